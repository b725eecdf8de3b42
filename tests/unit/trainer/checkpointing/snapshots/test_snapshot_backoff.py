"""After a refusal, snapshots are skipped for longer and longer, but never indefinitely."""

from __future__ import annotations

from itertools import pairwise

from pacekeeper.checkpointing.snapshots.snapshot_backoff import SnapshotBackoff


def list_attempts(refusals: SnapshotBackoff, snapshots: range) -> list[int]:
    """Return the snapshots that are attempted, each of which is refused."""
    found = []
    for number in snapshots:
        if not refusals.should_skip():
            refusals.record_failure()
            found.append(number)
    return found


def test_a_refused_snapshot_is_retried_less_and_less_often_but_at_each_65th() -> None:
    attempts = list_attempts(SnapshotBackoff(), range(1000))
    assert attempts[:5] == [0, 2, 5, 10, 19]
    assert {later - earlier for earlier, later in pairwise(attempts[8:])} == {65}


def test_a_success_resets_the_backoff() -> None:
    refusals = SnapshotBackoff()
    list_attempts(refusals, range(100))
    refusals.reset()
    assert list_attempts(refusals, range(6)) == [0, 2, 5]
