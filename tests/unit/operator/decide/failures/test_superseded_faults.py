"""Which faults are superseded and settled before any check decides on them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pacekeeper_analysis.protocol.plan import Stop
from pacekeeper_analysis.protocol.reports import FaultKind, FaultReport
from pacekeeper_operator.decide.failures import superseded_faults
from pacekeeper_operator.state.observation import Observation
from testing.operators.observations import NOW, build_crash, build_policy, build_stall, build_training, change_worker


def settle_faults(observation: Observation, *faults: FaultReport) -> list[str]:
    return list(
        superseded_faults.settle_superseded_faults(
            replace(observation, faults=faults), build_policy()
        ).state.incidents.settled_faults
    )


def build_in_membership(membership: int) -> Observation:
    observation = build_training()
    return observation.with_desired(observation.desired.with_plan(membership=membership))


def test_a_fault_of_this_membership_stays() -> None:
    assert settle_faults(build_training(), build_crash("j-w1-0", 1), build_stall("j-w1-0", 1)) == []


def test_a_fault_of_an_earlier_membership_is_settled() -> None:
    earlier, now, unknown = (
        replace(build_crash("j-w1-0", 1, n), membership=membership) for n, membership in ((1, 2), (2, 3), (3, 0))
    )
    assert settle_faults(build_in_membership(3), earlier, now, unknown) == [earlier.name]


def test_a_fault_of_an_unknown_membership_is_settled_after_a_minute() -> None:
    fresh, old, ahead = (
        replace(build_crash("j-w1-0", 1, n), membership=10**6, noticed_at=noticed_at)
        for n, noticed_at in ((1, NOW - 59), (2, NOW - 61), (3, NOW + 1e6))
    )
    assert settle_faults(build_in_membership(3), fresh, old, ahead) == [old.name, ahead.name], (
        "a forged time has no effect"
    )


@pytest.mark.parametrize("end", ["stop", "over"])
def test_faults_of_a_job_that_ends_are_settled(end: str) -> None:
    observation = build_training()
    stopping, failed = (
        observation.desired.with_plan(stop=Stop.SUSPEND),
        observation.desired.with_lifecycle(failed_reason="ScriptFailed"),
    )
    fault = build_crash("j-w1-0", 1)
    assert settle_faults(observation.with_desired(stopping if end == "stop" else failed), fault) == [fault.name]


def test_of_a_spare_only_gpu_errors_stay() -> None:
    gpu = FaultReport("j-w4-0-gpu", FaultKind.GPU_ERROR, "j-w4-0", 1, NOW, 1, xid=79)
    terminating = FaultReport("j-w4-0-terminating", FaultKind.TERMINATING, "j-w4-0", 1, NOW, 1)
    assert settle_faults(build_training(), gpu, terminating) == [terminating.name]
    of_member = replace(gpu, worker="j-w1-0"), replace(terminating, worker="j-w1-0")
    assert settle_faults(build_training(), *of_member) == []


class TestPeerErrors:
    """A worker is leaving, and its ranks wait for another."""

    LOST = replace(build_crash("j-w0-0", 0), exit_code=1, error="RuntimeError: Connection closed by peer")

    @staticmethod
    def build_leaving(dead: bool = True, **changes: Any) -> Observation:
        observation = change_worker(build_training(spares=0), "j-w1-0", **changes)
        view = observation.find_worker("j-w1-0")
        assert view is not None
        return observation.with_desired(
            observation.desired.with_worker(replace(view.record, leaving="it is lost", dead=dead))
        )

    @pytest.mark.parametrize("how", [{}, {"dead": False, "gone": True}, {"dead": False, "pod": {"exit_code": 137}}])
    def test_peer_errors_are_settled_once_the_leaving_worker_no_longer_trains(self, how: dict[str, Any]) -> None:
        assert settle_faults(self.build_leaving(**how), self.LOST) == [self.LOST.name]

    def test_peer_errors_stay_while_no_worker_leaves_or_it_still_trains(self) -> None:
        assert settle_faults(build_training(), self.LOST) == []
        assert settle_faults(change_worker(build_training(), "j-w1-0", gone=True), self.LOST) == [], (
            "the loss is not handled yet"
        )
        assert settle_faults(self.build_leaving(dead=False), self.LOST) == []

    @pytest.mark.parametrize(
        "error_values", [{"error": "ValueError: no such file"}, {"exit_code": -9}, {"out_of_memory": True}]
    )
    def test_errors_of_the_rank_itself_stay(self, error_values: dict[str, Any]) -> None:
        assert settle_faults(self.build_leaving(), replace(self.LOST, **error_values)) == []


class TestStall:
    def test_a_stall_is_settled_once_its_worker_has_completed_later_steps(self) -> None:
        faults = (replace(build_stall("j-w1-0", 1), name=f"s{n}", step=n) for n in (0, 499, 500, None))
        assert settle_faults(build_training(), *faults) == ["s0", "s499"], "the worker is at step 500"

    def test_a_stall_is_settled_once_a_later_round_has_begun(self) -> None:
        observation = change_worker(build_training(), "j-w0-0", heartbeat={"round": 2})
        old, new, unknown = (replace(build_stall("j-w1-0", 1), name=f"s{n}", round=n) for n in (1, 2, 0))
        assert settle_faults(observation, old, new, unknown) == ["s1"]

    def test_a_stall_of_a_worker_that_does_not_report_stays(self) -> None:
        observation = build_training()
        silent = tuple(replace(view, heartbeat=None) for view in observation.workers)
        assert settle_faults(replace(observation, workers=silent), build_stall("j-w1-0", 1)) == []

    def test_a_crash_of_an_earlier_step_stays(self) -> None:
        assert settle_faults(build_training(), replace(build_crash("j-w1-0", 1), step=3)) == []
