"""Who is lost, by whose doing, whether it still trains for a moment, and which faults are explained by it."""

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


def told_to_end(worker: str) -> FaultReport:
    return FaultReport(f"{worker}-terminating", FaultKind.TERMINATING, worker, 1, NOW - 3, membership=1)


def lost(world: Observation) -> Decision:
    decision = worker_lost.check_lost_workers(world, build_policy())
    assert decision is not None
    return decision


@pytest.mark.parametrize(
    ("pod", "words", "class_", "dead"),
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
def test_by_what_its_pod_shows(pod: dict[str, Any], words: str, class_: IncidentClass, dead: bool) -> None:
    decision = lost(change_worker(build_training(), "j-w1-0", pod=pod))
    assert decision.message.startswith("worker j-w1-0 (rank 1) is lost: ")
    assert decision.message.endswith(words)
    assert decision.class_ is class_
    (action,) = decision.actions
    assert isinstance(action, ReplaceWorker)
    assert (action.dead, action.disruption) == (dead, class_ is IncidentClass.DISRUPTION)
    assert (decision.cause, decision.first_sign, decision.node) == (IncidentCause.WORKER_LOST, NOW, "node-1")


def test_who_had_ended_well_before_the_others_began_anew() -> None:
    done = {"state": LauncherState.FINISHED}
    decision = lost(change_worker(build_training(), "j-w1-0", pod={"exit_code": 0}, heartbeat=done))
    assert decision.message.endswith("its ranks had finished before the others had to restart")
    assert decision.class_ is IncidentClass.DISRUPTION


def test_a_pod_that_is_gone_trains_no_more() -> None:
    decision = lost(change_worker(build_training(), "j-w1-0", gone=True))
    (action,) = decision.actions
    assert isinstance(action, ReplaceWorker)
    assert action.dead


def test_a_pod_that_is_still_to_be_made_is_not_lost() -> None:
    world = change_worker(build_training(), "j-w1-0", gone=True)
    (record,) = (worker for worker in world.state.placement.workers if worker.name == "j-w1-0")
    promised = world.with_desired(world.desired.with_worker(replace(record, uid="")))
    assert worker_lost.check_lost_workers(promised, build_policy()) is None


def test_out_of_memory_is_a_cause_of_its_own() -> None:
    killed = change_worker(build_training(), "j-w1-0", pod={"exit_code": 137, "exit_reason": "OOMKilled"})
    assert lost(killed).cause is IncidentCause.OUT_OF_MEMORY
    assert lost(change_worker(killed, "j-w1-0", pod={"exit_reason": "Error"})).cause is IncidentCause.WORKER_LOST


class TestToldToEnd:
    def test_its_own_word_counts_on_a_node_that_is_to_be_empty(self) -> None:
        world = replace(build_training(), faults=(told_to_end("j-w1-0"),))
        nodes = dict(world.cluster_view.nodes)
        nodes["node-1"] = replace(nodes["node-1"], leave_reason="it is drained")
        decision = lost(replace(world, cluster_view=replace(world.cluster_view, nodes=nodes)))
        (action,) = decision.actions
        assert isinstance(action, ReplaceWorker)
        assert (decision.class_, decision.first_sign, action.dead) == (IncidentClass.DISRUPTION, NOW - 3, False)
        assert decision.message.endswith("its pod received SIGTERM")
        assert decision.settled_faults == ("j-w1-0-terminating",)

    def test_where_nobody_wanted_it_the_pod_itself_is_the_cause_and_its_budget_pays(self) -> None:
        """A liveness probe that fails: its kubelet ends it, and the API server shows nothing."""
        world = replace(build_training(), faults=(told_to_end("j-w1-0"),))
        assert worker_lost.check_lost_workers(replace(world, now=NOW - 2), build_policy()) is None, (
            "its deletion may be shown yet"
        )
        decision = lost(world)
        (action,) = decision.actions
        assert isinstance(action, ReplaceWorker)
        assert (decision.class_, action.dead, action.disruption) == (IncidentClass.UNKNOWN, False, False)
        assert "liveness probe" in decision.message
        deleted = lost(change_worker(replace(world, now=NOW - 2), "j-w1-0", pod={"deleting": True}))
        assert deleted.class_ is IncidentClass.DISRUPTION

    def test_once_its_pod_has_ended_it_trains_no_more(self) -> None:
        world = change_worker(build_training(), "j-w1-0", pod={"exit_code": 143})
        (action,) = lost(replace(world, faults=(told_to_end("j-w1-0"),))).actions
        assert isinstance(action, ReplaceWorker)
        assert action.dead


def test_it_explains_what_others_say_but_not_that_another_is_told_to_end() -> None:
    world = change_worker(build_training(), "j-w1-0", gone=True)
    leaving = told_to_end("j-w3-0")
    spare = told_to_end("j-w4-0")
    faults = (build_crash("j-w0-0", 0), build_crash("j-w1-0", 1), spare)
    assert lost(replace(world, faults=faults)).settled_faults == tuple(fault.name for fault in faults[:2])
    deleted = change_worker(world, "j-w3-0", pod={"deleting": True})
    both = lost(replace(deleted, faults=(*faults, leaving)))
    assert set(both.settled_faults) == {faults[0].name, faults[1].name, leaving.name}, "both are one event"
