"""Which workers are lost, the class of the loss, whether they still train, and which faults the loss explains."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pacekeeper_analysis.protocol.reports import FaultKind, FaultReport, LauncherState
from pacekeeper_operator.api.incident import IncidentCause, IncidentClass
from pacekeeper_operator.decide.decision import Decision, ReplaceWorker
from pacekeeper_operator.decide.failures import worker_lost
from pacekeeper_operator.state.observation import Observation
from testing.operators.observations import NOW, build_crash, build_policy, build_training, change_worker


def build_termination(worker: str) -> FaultReport:
    return FaultReport(f"{worker}-terminating", FaultKind.TERMINATING, worker, 1, NOW - 3, membership=1)


def make_decision(observation: Observation) -> Decision:
    decision = worker_lost.check_lost_workers(observation, build_policy())
    assert decision is not None
    return decision


@pytest.mark.parametrize(
    ("pod", "message", "class_", "dead"),
    [
        (
            {"disruption_reason": "EvictionByEvictionAPI"},
            "is disrupted (EvictionByEvictionAPI)",
            IncidentClass.DISRUPTION,
            False,
        ),
        ({"disruption_reason": "Evicted", "exit_code": 137}, "is disrupted (Evicted)", IncidentClass.DISRUPTION, True),
        ({"deleting": True}, "its pod was deleted", IncidentClass.DISRUPTION, False),
        ({"deleting": True, "exit_code": 143}, "its pod was deleted", IncidentClass.DISRUPTION, True),
        (
            {"exit_code": 0, "finished": True},
            "its ranks had finished before the others had to restart",
            IncidentClass.DISRUPTION,
            True,
        ),
        (
            {"phase": "Failed", "self_inflicted_reason": "Evicted: it exceeds the limit"},
            "its kubelet ended its pod: Evicted: it exceeds the limit",
            IncidentClass.APPLICATION,
            True,
        ),
        (
            {
                "phase": "Failed",
                "disruption_reason": "TerminationByKubelet",
                "exit_reason": "Evicted",
                "exit_message": "low",
            },
            "its pod is disrupted (TerminationByKubelet): Evicted: low",
            IncidentClass.DISRUPTION,
            True,
        ),
        ({"exit_code": 1, "exit_reason": "Error"}, "its trainer ended with 1 (Error)", IncidentClass.UNKNOWN, True),
        ({"phase": "Failed"}, "its pod has failed", IncidentClass.UNKNOWN, True),
    ],
)
def test_the_state_of_the_pod_determines_message_and_class(
    pod: dict[str, Any], message: str, class_: IncidentClass, dead: bool
) -> None:
    decision = make_decision(change_worker(build_training(), "j-w1-0", pod=pod))
    assert decision.message.startswith("worker j-w1-0 (rank 1) is lost: ")
    assert decision.message.endswith(message)
    assert decision.class_ is class_
    (action,) = decision.actions
    assert isinstance(action, ReplaceWorker)
    assert (action.dead, action.disruption) == (dead, class_ is IncidentClass.DISRUPTION)
    assert (decision.cause, decision.first_sign, decision.node) == (IncidentCause.WORKER_LOST, NOW, "node-1")


def test_a_worker_whose_ranks_had_finished_is_a_disruption() -> None:
    finished = {"state": LauncherState.FINISHED}
    decision = make_decision(change_worker(build_training(), "j-w1-0", pod={"exit_code": 0}, heartbeat=finished))
    assert decision.message.endswith("its ranks had finished before the others had to restart")
    assert decision.class_ is IncidentClass.DISRUPTION


def test_a_worker_whose_pod_is_gone_is_dead() -> None:
    decision = make_decision(change_worker(build_training(), "j-w1-0", gone=True))
    (action,) = decision.actions
    assert isinstance(action, ReplaceWorker)
    assert action.dead


def test_a_worker_whose_pod_is_not_created_yet_is_not_lost() -> None:
    observation = change_worker(build_training(), "j-w1-0", gone=True)
    (record,) = (worker for worker in observation.state.placement.workers if worker.name == "j-w1-0")
    not_created = observation.with_desired(observation.desired.with_worker(replace(record, uid="")))
    assert worker_lost.check_lost_workers(not_created, build_policy()) is None


def test_out_of_memory_is_a_separate_cause() -> None:
    killed = change_worker(build_training(), "j-w1-0", pod={"exit_code": 137, "exit_reason": "OOMKilled"})
    assert make_decision(killed).cause is IncidentCause.OUT_OF_MEMORY
    assert (
        make_decision(change_worker(killed, "j-w1-0", pod={"exit_reason": "Error"})).cause is IncidentCause.WORKER_LOST
    )


class TestTermination:
    def test_a_termination_on_a_drained_node_is_a_disruption(self) -> None:
        observation = replace(build_training(), faults=(build_termination("j-w1-0"),))
        nodes = dict(observation.cluster_view.nodes)
        nodes["node-1"] = replace(nodes["node-1"], leave_reason="it is drained")
        decision = make_decision(replace(observation, cluster_view=replace(observation.cluster_view, nodes=nodes)))
        (action,) = decision.actions
        assert isinstance(action, ReplaceWorker)
        assert (decision.class_, decision.first_sign, action.dead) == (IncidentClass.DISRUPTION, NOW - 3, False)
        assert decision.message.endswith("its pod received SIGTERM")
        assert decision.settled_faults == ("j-w1-0-terminating",)

    def test_a_termination_without_a_deletion_counts_as_a_restart(self) -> None:
        """For example, a liveness probe fails: the kubelet ends the container, and the API server shows no deletion."""
        observation = replace(build_training(), faults=(build_termination("j-w1-0"),))
        assert worker_lost.check_lost_workers(replace(observation, now=NOW - 2), build_policy()) is None, (
            "its deletion may still appear"
        )
        decision = make_decision(observation)
        (action,) = decision.actions
        assert isinstance(action, ReplaceWorker)
        assert (decision.class_, action.dead, action.disruption) == (IncidentClass.UNKNOWN, False, False)
        assert "liveness probe" in decision.message
        deleted = make_decision(change_worker(replace(observation, now=NOW - 2), "j-w1-0", pod={"deleting": True}))
        assert deleted.class_ is IncidentClass.DISRUPTION

    def test_a_terminated_worker_whose_pod_has_ended_is_dead(self) -> None:
        observation = change_worker(build_training(), "j-w1-0", pod={"exit_code": 143})
        (action,) = make_decision(replace(observation, faults=(build_termination("j-w1-0"),))).actions
        assert isinstance(action, ReplaceWorker)
        assert action.dead


def test_a_lost_worker_explains_crashes_but_not_terminations_of_others() -> None:
    observation = change_worker(build_training(), "j-w1-0", gone=True)
    leaving = build_termination("j-w3-0")
    spare = build_termination("j-w4-0")
    faults = (build_crash("j-w0-0", 0), build_crash("j-w1-0", 1), spare)
    assert make_decision(replace(observation, faults=faults)).settled_faults == tuple(
        fault.name for fault in faults[:2]
    )
    deleted = change_worker(observation, "j-w3-0", pod={"deleting": True})
    both = make_decision(replace(deleted, faults=(*faults, leaving)))
    assert set(both.settled_faults) == {faults[0].name, faults[1].name, leaving.name}, "both are one event"
