"""The groups that a rank records, and which of them it retains."""

from __future__ import annotations

from pathlib import Path

import pytest

from pacekeeper.observe.collectives.communicator_file import read_communicators
from pacekeeper_rank.collectives.communicators import MAX_COMMUNICATORS, Communicators


def list_identities(path: Path) -> list[int]:
    return [communicator.identity for communicator in read_communicators(path)]


def test_destroyed_groups_are_dropped_first_unless_they_were_created_again(tmp_path: Path) -> None:
    path = tmp_path / "0.json"
    communicators = Communicators(path)
    for identity in range(1, MAX_COMMUNICATORS + 1):
        communicators.add(identity, (0, 1))
    for identity in (7, 3, 7, 9):
        communicators.mark_destroyed(identity)
    communicators.add(9, (0, 1))
    for new in (1001, 1002, 1003):
        communicators.add(new, (0, 1))
    left = list_identities(path)
    assert len(left) == MAX_COMMUNICATORS
    assert not {7, 3, 1} & set(left), "then the eldest goes"
    assert {2, 9, 1001, 1002, 1003} <= set(left)


def test_a_file_that_cannot_be_written_does_not_end_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    communicators = Communicators(tmp_path / "gone" / "0.json")
    (tmp_path / "gone").rmdir()
    communicators.add(1, (0, 1))
    assert "No such file" in caplog.text
