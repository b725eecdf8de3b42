"""Which of a Trainer's checkpoints a restart goes on from."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")

from pacekeeper.integrations.huggingface import COMPLETE_MARKER_FILE, find_newest_checkpoint  # it imports transformers


def checkpoint(folder: Path, step: int, state: str | None = None, marked: bool = False) -> str:
    path = folder / f"checkpoint-{step}"
    path.mkdir()
    if state is not None:
        (path / "trainer_state.json").write_text(state)
    if marked:
        (path / COMPLETE_MARKER_FILE).touch()
    return str(path)


def test_the_newest_that_all_ranks_have_written(tmp_path: Path) -> None:
    checkpoint(tmp_path, 9, "{}", marked=True)
    newest = checkpoint(tmp_path, 100, "{}", marked=True)
    checkpoint(tmp_path, 101, "{}")  # a crash in the middle of it: perhaps another rank's part is missing
    for name in ("checkpoint-best", "checkpoint-best2", "checkpoint-last-100"):  # the script's own
        (tmp_path / name).mkdir()
    assert find_newest_checkpoint(tmp_path) == newest


def test_one_that_was_trained_without_the_callback_counts_where_its_last_file_is_whole(tmp_path: Path) -> None:
    newest = checkpoint(tmp_path, 10, "{}")
    checkpoint(tmp_path, 20, '{"global_st')
    checkpoint(tmp_path, 30)
    assert find_newest_checkpoint(str(tmp_path)) == newest


def test_without_one_the_training_begins(tmp_path: Path) -> None:
    checkpoint(tmp_path, 30)
    assert find_newest_checkpoint(tmp_path) is None
    assert find_newest_checkpoint(tmp_path / "nowhere") is None
