"""After a refusal, snapshots are left out ever longer; never for ever."""

from __future__ import annotations

from itertools import pairwise

from pacekeeper.checkpointing.snapshots.snapshot_backoff import SnapshotBackoff


def tried(refusals: SnapshotBackoff, snapshots: range) -> list[int]:
    """Of those taken one after another, each of which is refused."""
    found = []
    for number in snapshots:
        if not refusals.should_skip():
            refusals.record_failure()
            found.append(number)
    return found


def test_it_is_tried_again_ever_more_rarely_but_at_each_65th() -> None:
    attempts = tried(SnapshotBackoff(), range(1000))
    assert attempts[:5] == [0, 2, 5, 10, 19]
    assert {later - earlier for earlier, later in pairwise(attempts[8:])} == {65}


def test_once_there_is_memory_again_it_begins_anew() -> None:
    refusals = SnapshotBackoff()
    tried(refusals, range(100))
    refusals.reset()
    assert tried(refusals, range(6)) == [0, 2, 5]
