"""What rank 0 reports of checkpoints, and how its launcher evaluates it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pacekeeper.checkpointing.storage.checkpoint_status import (
    NO_CHECKPOINT_STATUS,
    CheckpointStatusFile,
    NullCheckpointReporter,
    open_checkpoint_reporter,
    parse_failed_rank,
    read_checkpoint_status,
)
from pacekeeper.environment import Environment
from pacekeeper.runtime_folder import RuntimeFolder


def test_a_failure_is_reported_with_the_newest_checkpoint_until_the_next_one_is_published(tmp_path: Path) -> None:
    path = tmp_path / "checkpoints.json"
    file = CheckpointStatusFile(path)
    file.report_published(10)
    kept = read_checkpoint_status(path)
    assert (kept.step, kept.failed_rank, kept.error) == (10, None, "")
    file.report_failure("/checkpoints: full" + "!" * 1_000, 3)
    assert read_checkpoint_status(path) == replace(kept, failed_rank=3, error="/checkpoints: full" + "!" * 482)
    file.report_published(30)
    assert (
        read_checkpoint_status(path).step,
        read_checkpoint_status(path).failed_rank,
        read_checkpoint_status(path).error,
    ) == (30, None, "")


def test_a_new_round_knows_the_age_of_the_newest_checkpoint_if_this_worker_published_it(tmp_path: Path) -> None:
    path = tmp_path / "checkpoints.json"
    CheckpointStatusFile(path).report_published(10)
    CheckpointStatusFile(path).report_failure("full", 0)
    before = read_checkpoint_status(path)
    CheckpointStatusFile(path).report_found(10)
    assert read_checkpoint_status(path) == before
    CheckpointStatusFile(path).report_found(40)
    found = read_checkpoint_status(path)
    assert (found.step, found.error) == (40, "")
    assert (found.published_ns or 0) > (before.published_ns or 0), (
        "kept by another worker: from now on it is as old as it has been seen here"
    )


def test_the_age_is_never_negative_and_unknown_without_a_checkpoint() -> None:
    status = replace(NO_CHECKPOINT_STATUS, step=5, published_ns=10 * 10**9)
    assert (status.compute_age(12.5), status.compute_age(9.0), NO_CHECKPOINT_STATUS.compute_age(12.5)) == (
        2.5,
        0.0,
        None,
    )


@pytest.mark.parametrize(
    "content", ["", "[]", '{"step": "ten"}', '{"published_ns": -1}', '{"published_ns": NaN}', "\ufffd"]
)
def test_a_status_without_sense_is_ignored(tmp_path: Path, content: str) -> None:
    path = tmp_path / "checkpoints.json"
    assert read_checkpoint_status(path) == NO_CHECKPOINT_STATUS
    path.write_text(content)
    assert read_checkpoint_status(path) == NO_CHECKPOINT_STATUS


def test_training_continues_where_no_status_can_be_written(tmp_path: Path) -> None:
    CheckpointStatusFile(tmp_path / "missing" / "checkpoints.json").report_published(10)


def test_only_rank_0_under_a_launcher_writes_the_status(tmp_path: Path) -> None:
    assert isinstance(
        open_checkpoint_reporter(Environment(rank=0, runtime=RuntimeFolder(tmp_path))), CheckpointStatusFile
    )
    assert isinstance(
        open_checkpoint_reporter(Environment(rank=1, runtime=RuntimeFolder(tmp_path))), NullCheckpointReporter
    )
    assert isinstance(open_checkpoint_reporter(Environment(rank=0)), NullCheckpointReporter)


@pytest.mark.parametrize(
    ("reason", "rank"),
    [("rank 12: OSError: full; rank 13: OSError: full", 12), ("the store is gone", None), ("", None)],
)
def test_the_rank_that_failed_first_is_read_from_the_reason(reason: str, rank: int | None) -> None:
    assert parse_failed_rank(reason) == rank
