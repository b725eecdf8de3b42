"""When the job's state is kept."""

from __future__ import annotations

from pacekeeper.modes.retention import snapshot_interval


def test_the_interval_keeps_the_cost_below_one_percent() -> None:
    assert snapshot_interval(0.0, 0.1) == 1
    assert snapshot_interval(0.001, 0.1) == 1
    assert snapshot_interval(0.0011, 0.1) == 2
    assert snapshot_interval(0.1, 0.1) == 128
    assert snapshot_interval(9.0, 0.1) == 16384
    assert snapshot_interval(0.001, 0.0) == 100
