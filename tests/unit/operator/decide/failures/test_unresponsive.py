"""Workers that exist but do not respond, and the faults that they explain."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pacekeeper_analysis.protocol.reports import LauncherState
from pacekeeper_operator.decide.failures import unresponsive
from pacekeeper_operator.state.cluster_view import LAUNCHER_UNRESPONSIVE_SECONDS
from testing.operators.observations import build_crash, build_policy, build_training, change_worker


@pytest.mark.parametrize(("worker", "explains"), [("j-w1-0", True), ("j-w4-0", False)], ids=["a member", "a spare"])
def test_only_an_unresponsive_member_explains_faults_of_others(worker: str, explains: bool) -> None:
    observation = change_worker(
        build_training(), worker, heartbeat={"launcher_silent_seconds": LAUNCHER_UNRESPONSIVE_SECONDS}
    )
    decision = unresponsive.check_unresponsive_workers(
        replace(observation, faults=(build_crash("j-w0-0", 0),)), build_policy()
    )
    assert decision is not None
    assert (decision.worker, bool(decision.settled_faults), decision.live) == (worker, explains, not explains)


def test_an_unresponsive_member_is_present_and_has_missed_reports() -> None:
    assert not unresponsive.has_unresponsive_member(build_training())
    missed = {"launcher_silent_seconds": 0.6}
    assert unresponsive.has_unresponsive_member(change_worker(build_training(), "j-w1-0", heartbeat=missed))
    assert not unresponsive.has_unresponsive_member(change_worker(build_training(), "j-w4-0", heartbeat=missed)), (
        "it holds no ranks"
    )
    assert not unresponsive.has_unresponsive_member(
        change_worker(build_training(), "j-w1-0", heartbeat=missed, pod={"deleting": True})
    )
    stuck = {"unkillable_ranks": (1,), "state": LauncherState.FAILED}
    assert unresponsive.has_unresponsive_member(change_worker(build_training(), "j-w1-0", heartbeat=stuck))
