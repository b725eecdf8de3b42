"""The groups that a rank writes down, and what of them it keeps."""

from __future__ import annotations

from pathlib import Path

import pytest

from pacekeeper.observe.collectives.communicators import Communicators, read_communicators
from pacekeeper_analysis.protocol.communicators import MAX_COMMUNICATORS


def identities(path: Path) -> list[int]:
    return [communicator.identity for communicator in read_communicators(path)]


def test_the_first_that_were_destroyed_make_room_but_none_that_was_made_again(tmp_path: Path) -> None:
    path = tmp_path / "0.json"
    known = Communicators(path)
    for identity in range(1, MAX_COMMUNICATORS + 1):
        known.add(identity, (0, 1))
    for identity in (7, 3, 7, 9):
        known.mark_destroyed(identity)
    known.add(9, (0, 1))
    for new in (1001, 1002, 1003):
        known.add(new, (0, 1))
    left = identities(path)
    assert len(left) == MAX_COMMUNICATORS
    assert not {7, 3, 1} & set(left), "then the eldest goes"
    assert {2, 9, 1001, 1002, 1003} <= set(left)


def test_a_file_that_cannot_be_written_does_not_end_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    known = Communicators(tmp_path / "gone" / "0.json")
    (tmp_path / "gone").rmdir()
    known.add(1, (0, 1))
    assert "No such file" in caplog.text
