"""Which of a Trainer's checkpoints a restart continues from."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")

from pacekeeper.checkpointing.peer_saves.trainer_folders import COMPLETE_MARKER_FILE, begin_checkpoint
from pacekeeper.integrations.huggingface import _write_marker, find_newest_checkpoint  # it imports transformers


def write_checkpoint(folder: Path, step: int, state: str | None = None, marked: bool = False) -> str:
    path = folder / f"checkpoint-{step}"
    path.mkdir()
    if state is not None:
        (path / "trainer_state.json").write_text(state)
    if marked:
        (path / COMPLETE_MARKER_FILE).touch()
    return str(path)


def test_the_newest_checkpoint_that_all_ranks_have_written_is_found(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 9, "{}", marked=True)
    newest = write_checkpoint(tmp_path, 100, "{}", marked=True)
    write_checkpoint(tmp_path, 101, "{}")  # a crash in the middle of it: perhaps another rank's part is missing
    for name in ("checkpoint-best", "checkpoint-best2", "checkpoint-last-100"):  # the script's own
        (tmp_path / name).mkdir()
    assert find_newest_checkpoint(tmp_path) == newest


def test_a_checkpoint_without_the_callback_counts_if_its_last_file_is_whole(tmp_path: Path) -> None:
    newest = write_checkpoint(tmp_path, 10, "{}")
    write_checkpoint(tmp_path, 20, '{"global_st')
    write_checkpoint(tmp_path, 30)
    assert find_newest_checkpoint(str(tmp_path)) == newest


def test_the_callback_does_not_mark_what_is_marked_with_saves_in_memory(tmp_path: Path) -> None:
    newest = write_checkpoint(tmp_path, 10, "{}")
    _write_marker(Path(newest))
    begun = Path(write_checkpoint(tmp_path, 20, "{}"))
    begin_checkpoint(begun)
    _write_marker(begun)
    assert find_newest_checkpoint(tmp_path) == newest


def test_training_begins_at_zero_without_a_checkpoint(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 30)
    assert find_newest_checkpoint(tmp_path) is None
    assert find_newest_checkpoint(tmp_path / "nowhere") is None
