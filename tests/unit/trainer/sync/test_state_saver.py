"""When the job's state is saved."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pacekeeper.sync.state_saver import StateSaver, compute_snapshot_interval


@pytest.mark.parametrize(
    ("every", "look_first", "under_way", "due"),
    [
        (10, False, False, True),
        (10, False, True, True),
        (10, True, False, True),
        (10, True, True, False),
        (15, True, False, False),
        (0, True, False, False),
    ],
)
def test_a_snapshot_that_would_wait_for_its_copy_is_not_due_where_the_copy_is_checked_first(
    every: int, look_first: bool, under_way: bool, due: bool
) -> None:
    store = RecordingStore(under_way)
    assert build_saver(store).is_snapshot_due(16, 20, every, look_first) is due
    assert store.checks == (["settle", "is_snapshot_possible"] if look_first and every == 10 else [])


def test_a_snapshot_that_is_valid_only_once_the_next_is_due_is_reported() -> None:
    """The host computes its checksum next to the training, and may take long."""
    valid: list[int] = []
    state = SimpleNamespace(snapshot_step=-1)
    store: Any = SimpleNamespace(
        has_folder=False,
        settle=lambda wait: 40 if wait else None,
        replicated_step=30,
        snapshot=lambda *_: valid.append(state.snapshot_step),
    )
    recorder: Any = SimpleNamespace(ring=SimpleNamespace(state=state))
    progress: Any = SimpleNamespace(step=50, own_samples=7)
    replication: Any = SimpleNamespace(finish=lambda: None)
    one = StateSaver(store, recorder, progress, replication, checkpoint_every=0, snapshot_every=None)
    one.settle()
    one.snapshot()
    assert valid == [40]
    assert state.replicated_step == 30


class RecordingStore:
    """Records when the possibility of a snapshot is checked, which is collective."""

    has_folder = False
    replicated_step = 0

    def __init__(self, under_way: bool) -> None:
        self._under_way = under_way
        self.checks: list[str] = []

    def settle(self, _wait: bool) -> None:
        self.checks.append("settle")

    def is_snapshot_possible(self) -> bool:
        self.checks.append("is_snapshot_possible")
        return not self._under_way


def build_saver(store: Any) -> StateSaver:
    nothing: Any = SimpleNamespace(ring=SimpleNamespace(state=SimpleNamespace()))
    return StateSaver(store, nothing, nothing, nothing, checkpoint_every=0, snapshot_every=None)


def test_the_interval_keeps_the_cost_below_one_percent() -> None:
    assert compute_snapshot_interval(0.0, 0.1) == 1
    assert compute_snapshot_interval(0.001, 0.1) == 1
    assert compute_snapshot_interval(0.0011, 0.1) == 2
    assert compute_snapshot_interval(0.1, 0.1) == 128
    assert compute_snapshot_interval(9.0, 0.1) == 16384
    assert compute_snapshot_interval(0.001, None) == 100
