"""Which workers are probed, which count as lost, and the messages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pacekeeper_analysis.protocol.reports import FaultKind, FaultReport
from pacekeeper_operator.api.incident import IncidentCause
from pacekeeper_operator.api.training_job import Remedy
from pacekeeper_operator.decide.decision import Decision, ReplaceWorker
from pacekeeper_operator.decide.failures import node_lost
from pacekeeper_operator.decide.failures.node_lost import (
    WORKER_SILENCE_LIMIT_SECONDS,
    WORKER_SILENT_SECONDS,
    list_unreachable_members,
    needs_reachability_probe,
)
from pacekeeper_operator.state.cluster_view import RECENT_POLL_SECONDS
from pacekeeper_operator.state.observation import Observation
from testing.operators.observations import NOW, build_policy, build_stall, build_training, change_worker


def build_silent(*names: str, seconds: float = WORKER_SILENT_SECONDS + 1, kubelet: bool | None = False) -> Observation:
    """Build a job in which these workers neither report nor answer probes; all others answer."""
    observation = build_training()
    for view in observation.workers:
        observation = change_worker(
            observation, view.name, reachable=True, node_reachable=True, seconds_since_step=900.0
        )
    for name in names:
        observation = change_worker(observation, name, reachable=False, node_reachable=kubelet, silent_seconds=seconds)
    return observation


def with_node_not_ready(observation: Observation, name: str) -> Observation:
    nodes = {**observation.cluster_view.nodes, name: replace(observation.cluster_view.nodes[name], ready=False)}
    return replace(observation, cluster_view=replace(observation.cluster_view, nodes=nodes))


def make_decision(observation: Observation) -> Decision:
    decision = node_lost.check_lost_nodes(observation, build_policy())
    assert decision is not None
    return decision


class TestSuspected:
    def test_a_silent_member_or_a_fault_report_needs_a_reachability_probe(self) -> None:
        assert not needs_reachability_probe(build_training())
        silent = change_worker(build_training(), "j-w1-0", silent_seconds=WORKER_SILENT_SECONDS + 1)
        assert needs_reachability_probe(silent)
        assert not needs_reachability_probe(
            change_worker(build_training(), "j-w1-0", silent_seconds=WORKER_SILENT_SECONDS - 1)
        )
        assert not needs_reachability_probe(change_worker(silent, "j-w1-0", pod={"deleting": True})), (
            "it is being deleted"
        )
        assert not needs_reachability_probe(change_worker(build_training(), "j-w4-0", silent_seconds=900.0)), (
            "it holds no ranks"
        )
        report = FaultReport("f", FaultKind.ROUND_FAILED, "j-w0-0", 1, NOW, 1)
        assert needs_reachability_probe(replace(build_training(), faults=(report,)))
        assert needs_reachability_probe(replace(build_training(), faults=(build_stall("j-w0-0", 0),)))


def test_unreachable_members_are_silent_and_do_not_answer_probes() -> None:
    assert [view.name for view in list_unreachable_members(build_silent("j-w1-0", "j-w4-0"))] == ["j-w1-0"]
    assert not list_unreachable_members(build_silent("j-w1-0", seconds=WORKER_SILENT_SECONDS - 1))
    assert not list_unreachable_members(change_worker(build_training(), "j-w1-0", silent_seconds=900.0)), (
        "it was not probed"
    )
    assert not list_unreachable_members(change_worker(build_silent("j-w1-0"), "j-w1-0", reachable=True))


class TestMessages:
    def test_message_and_action_for_a_worker_on_a_lost_node(self) -> None:
        decision = make_decision(with_node_not_ready(build_silent("j-w1-0"), "node-1"))
        assert decision.message == "worker j-w1-0 (rank 1) is lost: node node-1 is lost: its node is not Ready"
        assert (decision.cause, decision.node, decision.remedy) == (
            IncidentCause.NODE_LOST,
            "node-1",
            Remedy.REPLACE_WORKER,
        )
        (moved, _) = decision.actions
        assert isinstance(moved, ReplaceWorker)
        assert (moved.dead, moved.force, moved.disruption) == (True, True, True)

    def test_message_and_action_for_a_lost_worker_alone(self) -> None:
        decision = make_decision(build_silent("j-w1-0", seconds=WORKER_SILENCE_LIMIT_SECONDS + 1, kubelet=True))
        message = f"there has been no sign of it for {WORKER_SILENCE_LIMIT_SECONDS:.0f} s"
        assert decision.message == f"worker j-w1-0 (rank 1) is lost: the operator does not reach it, and {message}"
        (moved,) = decision.actions
        assert isinstance(moved, ReplaceWorker)
        assert (decision.cause, moved.force) == (IncidentCause.WORKER_LOST, False)

    def test_message_for_workers_on_several_lost_nodes(self) -> None:
        observation = with_node_not_ready(with_node_not_ready(build_silent("j-w1-0", "j-w2-0"), "node-1"), "node-2")
        decision = make_decision(observation)
        assert decision.message.startswith("2 workers are lost (j-w1-0, j-w2-0); of j-w1-0: node node-1 is lost: ")
        assert len(decision.actions) == 4

    def test_a_worker_without_a_node_names_no_node(self) -> None:
        observation = change_worker(
            build_silent("j-w1-0", seconds=WORKER_SILENCE_LIMIT_SECONDS + 1), "j-w1-0", pod={"node": ""}
        )
        observation = replace(observation, cluster_view=replace(observation.cluster_view, nodes={}))
        assert make_decision(observation).node is None


class TestWithoutKubelet:
    """The machine answers, but its sidecar is gone, and so is its kubelet, which would restart the sidecar."""

    def build_without_kubelet(self, seconds: float = WORKER_SILENCE_LIMIT_SECONDS + 1) -> Observation:
        return with_node_not_ready(change_worker(build_silent(), "j-w1-0", silent_seconds=seconds), "node-1")

    def test_a_silent_worker_on_a_node_that_is_not_ready_is_lost(self) -> None:
        decision = make_decision(self.build_without_kubelet())
        message = f"its node is not Ready, and there has been no sign of it for {WORKER_SILENCE_LIMIT_SECONDS:.0f} s"
        assert decision.message == f"worker j-w1-0 (rank 1) is lost: {message}"
        assert (decision.cause, decision.node) == (IncidentCause.NODE_LOST, "node-1")
        (moved, _) = decision.actions
        assert isinstance(moved, ReplaceWorker)
        assert (moved.dead, moved.force) == (True, False)

    def test_a_worker_that_may_still_train_is_not_lost(self) -> None:
        ready = change_worker(build_silent(), "j-w1-0", silent_seconds=WORKER_SILENCE_LIMIT_SECONDS + 1)
        for observation in (
            self.build_without_kubelet(WORKER_SILENCE_LIMIT_SECONDS - 1),
            ready,
            change_worker(self.build_without_kubelet(), "j-w2-0", seconds_since_step=5.0),
            replace(self.build_without_kubelet(), operator_age=build_policy().grace_after_start),
        ):
            assert node_lost.check_lost_nodes(observation, build_policy()) is None


class TestCutOff:
    """If the operator reaches no worker, silence proves nothing."""

    def build_cut_off(self) -> Observation:
        observation = build_silent(*(view.name for view in build_training().workers), kubelet=False)
        return replace(observation, faults=(build_stall("j-w0-0", 0),))

    def test_no_worker_is_lost_if_the_operator_reaches_none(self) -> None:
        assert node_lost.check_lost_nodes(self.build_cut_off(), build_policy()) is None

    @pytest.mark.parametrize(
        ("name", "answer"),
        [("j-w4-0", {"reachable": True}), ("j-w4-0", {"node_reachable": True}), ("j-w4-0", {"silent_seconds": 1.0})],
    )
    def test_workers_are_lost_if_another_worker_or_node_answers(self, name: str, answer: dict[str, Any]) -> None:
        assert make_decision(change_worker(self.build_cut_off(), name, **answer)) is not None

    def test_a_worker_that_never_reported_is_no_answer(self) -> None:
        observation = self.build_cut_off()
        never_reported = tuple(
            replace(view, heartbeat=None, silent_seconds=RECENT_POLL_SECONDS / 2) for view in observation.workers[4:]
        )
        assert (
            node_lost.check_lost_nodes(
                replace(observation, workers=(*observation.workers[:4], *never_reported)), build_policy()
            )
            is None
        )

    def test_workers_are_lost_if_the_operator_reaches_another_job(self) -> None:
        observation = self.build_cut_off()
        assert (
            make_decision(replace(observation, cluster_view=replace(observation.cluster_view, reached_elsewhere=True)))
            is not None
        )


def test_no_worker_is_lost_before_the_grace_period_of_the_operator_ends() -> None:
    observation = with_node_not_ready(build_silent("j-w1-0"), "node-1")
    assert (
        node_lost.check_lost_nodes(replace(observation, operator_age=build_policy().grace_after_start), build_policy())
        is None
    )
    assert make_decision(replace(observation, operator_age=build_policy().grace_after_start + 1)) is not None
