"""What a worker says of itself, made from its ranks' states."""

from __future__ import annotations

import numpy as np
import pytest

from pacekeeper.launcher.heartbeat import next_beat
from pacekeeper.launcher.rounds import State
from pacekeeper_analysis.records import STATE
from pacekeeper_analysis.reports import Heartbeat, LauncherState


def rank(step: int, snapshot_step: int) -> np.void:
    state = np.zeros((), STATE)
    state["step"], state["steps_in_round"], state["snapshot_step"] = step, step, snapshot_step
    copy: np.void = np.frombuffer(state.tobytes(), STATE)[0]
    return copy


@pytest.mark.parametrize(
    ("snapshots", "said"),
    [
        ((40, -1), 40),  # of replicas one rank a worker keeps snapshots, for all
        ((40, 38), 38),  # of shards every rank keeps its own, and all are needed
        ((-1, -1), -1),
    ],
)
def test_the_newest_snapshot_that_helps_the_worker(snapshots: tuple[int, int], said: int) -> None:
    running = State(stage=LauncherState.RUNNING, round=1, started=5.0)
    ranks = [rank(step=41, snapshot_step=step) for step in snapshots]
    assert next_beat(Heartbeat("w", round=1), running, None, ranks, wall=100.0, monotonic=9.0).snapshot_step == said


def test_the_slowest_rank_speaks_for_the_worker() -> None:
    running = State(stage=LauncherState.RUNNING, round=1, started=5.0)
    beat = next_beat(Heartbeat("w", round=1), running, None, [rank(9, -1), rank(7, -1)], wall=100.0, monotonic=9.0)
    assert (beat.step, beat.round_started_at) == (7, 96.0)
