"""Which of Trainer's checkpoints a restart continues from, and which may be removed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from pacekeeper.checkpointing.peer_saves.rank_channel import RankChannel
from pacekeeper.checkpointing.peer_saves.trainer_folders import (
    SHARDED_PARTS,
    Completeness,
    begin_checkpoint,
    choose_removable,
    flush_files,
    get_completeness,
    is_stored,
    mark_complete,
    remove_old_checkpoints,
)
from pacekeeper.checkpointing.peer_saves.trainer_saves import choose_checkpoint


def write_checkpoint(output_dir: Path, step: int, kind: str) -> None:
    """`kind`: stored, lost (its optimizer was in memory only), begun, foreign (of a program without markers), or full.

    The last one is of a program without markers, too, and not sharded.
    """
    folder = output_dir / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    for part in SHARDED_PARTS if kind != "full" else ():
        (folder / part).mkdir()
    if kind not in {"foreign", "full"}:
        begin_checkpoint(folder)
    for part in {"lost": SHARDED_PARTS[:1], "full": ()}.get(kind, SHARDED_PARTS):
        (folder / part / ".metadata").touch()
    (folder / "trainer_state.json").write_text("{}")
    (folder / "rng_state_0.pth").touch()
    if kind in {"stored", "lost"}:
        flush_files(folder, 0, True)
        mark_complete(folder)


@pytest.mark.parametrize(
    ("kinds", "resumed", "chosen"),
    [
        pytest.param({10: "stored", 20: "stored"}, True, 20, id="the newest"),
        pytest.param({10: "stored", 20: "stored"}, 10, 10, id="the one that the script names"),
        pytest.param({10: "stored", 20: "lost"}, True, 10, id="lost"),
        pytest.param({10: "stored", 20: "lost", 30: "begun"}, 20, 10, id="named, and lost"),
        pytest.param({10: "stored", 20: "begun"}, True, 10, id="not completed"),
        pytest.param({10: "stored", 20: "foreign"}, True, 20, id="of a program without markers"),
        pytest.param({9: "stored", 10: "foreign", 20: "begun"}, True, 9, id="marked ones first"),
        pytest.param({10: "begun", 20: "lost"}, 20, None, id="none"),
        pytest.param({10: "stored"}, None, None, id="from the start, as the script wants"),
    ],
)
def test_the_newest_checkpoint_that_can_be_read_is_chosen(
    kinds: dict[int, str], resumed: Any, chosen: int | None, tmp_path: Path
) -> None:
    for step, kind in kinds.items():
        write_checkpoint(tmp_path, step, kind)
    named = f"{tmp_path}/checkpoint-{resumed}" if type(resumed) is int else resumed
    expected = None if chosen is None else f"{tmp_path}/checkpoint-{chosen}"
    assert choose_checkpoint(RankChannel("", (0,)), tmp_path, named) == expected


def test_what_is_no_sharded_checkpoint_of_the_run_stays_as_it_is(tmp_path: Path) -> None:
    """Trainer loads it, or raises its own error. Beginning from the start would be worse."""
    for step, kind in {10: "stored", 20: "full", 30: "stored"}.items():
        write_checkpoint(tmp_path / "run", step, kind)
    write_checkpoint(tmp_path / "other", 10, "lost")
    for resumed in (f"{tmp_path}/other/checkpoint-10", f"{tmp_path}/run/best", f"{tmp_path}/run/checkpoint-20"):
        assert choose_checkpoint(RankChannel("", (0,)), tmp_path / "run", resumed) == resumed
    assert choose_checkpoint(RankChannel("", (0,)), tmp_path / "new", True) is True
    write_checkpoint(tmp_path / "full", 10, "full")
    write_checkpoint(tmp_path / "full", 20, "lost")
    assert choose_checkpoint(RankChannel("", (0,)), tmp_path / "full", True) is True


def test_a_storage_that_does_not_answer_is_no_lost_checkpoint(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 10, "stored")
    write_checkpoint(tmp_path, 20, "lost")
    metadata = tmp_path / "checkpoint-20" / SHARDED_PARTS[1] / ".metadata"
    metadata.symlink_to(metadata)  # reading it fails, as of a storage that is away
    with pytest.raises(OSError, match="symbolic links"):
        choose_checkpoint(RankChannel("", (0,)), tmp_path, True)


def test_a_checkpoint_that_is_written_again_does_not_count_before_it_is_complete(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 10, "stored")
    folder = tmp_path / "checkpoint-10"
    assert is_stored(folder)
    begin_checkpoint(folder)
    assert get_completeness(folder) is Completeness.NONE
    mark_complete(folder)
    assert not is_stored(folder), "what it had stored is of the earlier attempt"


@pytest.mark.parametrize(
    ("stored", "limit", "best", "removed"),
    [
        pytest.param({1, 2, 3, 4}, 2, None, [1, 2], id="as Trainer does"),
        pytest.param({1, 2}, 1, None, [1], id="uploads have not ended"),
        pytest.param(set(), 1, None, [], id="nothing is stored"),
        pytest.param({1, 2, 3, 4}, 1, 1, [2, 3], id="the best"),
        pytest.param({1, 2, 3, 4}, 9, None, [], id="fewer than the limit"),
    ],
)
def test_what_is_newer_than_the_newest_stored_checkpoint_is_not_removed(
    stored: set[int], limit: int, best: int | None, removed: list[int]
) -> None:
    folders = [Path(str(step)) for step in range(1, 5)]
    best_folder = None if best is None else Path(str(best))
    chosen = choose_removable(folders, lambda folder: int(str(folder)) in stored, limit, best_folder)
    assert [int(str(folder)) for folder in chosen] == removed


def test_leftovers_of_an_earlier_attempt_are_removed_first(tmp_path: Path) -> None:
    for step, kind in {10: "stored", 20: "stored", 30: "lost"}.items():
        write_checkpoint(tmp_path, step, kind)
    remove_old_checkpoints(tmp_path, 20, 2, None)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-10", "checkpoint-20"]
