"""Who is probed, who counts as lost, and in which words."""

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


def silent(*names: str, seconds: float = WORKER_SILENT_SECONDS + 1, kubelet: bool | None = False) -> Observation:
    """The operator neither hears nor reaches these; all others answer its probes."""
    world = build_training()
    for view in world.workers:
        world = change_worker(world, view.name, reachable=True, node_reachable=True, seconds_since_step=900.0)
    for name in names:
        world = change_worker(world, name, reachable=False, node_reachable=kubelet, silent_seconds=seconds)
    return world


def not_ready(world: Observation, name: str) -> Observation:
    nodes = {**world.cluster_view.nodes, name: replace(world.cluster_view.nodes[name], ready=False)}
    return replace(world, cluster_view=replace(world.cluster_view, nodes=nodes))


def lost(world: Observation) -> Decision:
    decision = node_lost.check_lost_nodes(world, build_policy())
    assert decision is not None
    return decision


class TestSuspected:
    def test_silence_of_who_is_there_or_a_complaint_is_a_reason_to_look(self) -> None:
        assert not needs_reachability_probe(build_training())
        quiet = change_worker(build_training(), "j-w1-0", silent_seconds=WORKER_SILENT_SECONDS + 1)
        assert needs_reachability_probe(quiet)
        assert not needs_reachability_probe(
            change_worker(build_training(), "j-w1-0", silent_seconds=WORKER_SILENT_SECONDS - 1)
        )
        assert not needs_reachability_probe(change_worker(quiet, "j-w1-0", pod={"deleting": True})), "it is going"
        assert not needs_reachability_probe(change_worker(build_training(), "j-w4-0", silent_seconds=900.0)), (
            "it holds no ranks"
        )
        complaint = FaultReport("f", FaultKind.ROUND_FAILED, "j-w0-0", 1, NOW, 1)
        assert needs_reachability_probe(replace(build_training(), faults=(complaint,)))
        assert needs_reachability_probe(replace(build_training(), faults=(build_stall("j-w0-0", 0),)))


def test_unreached_are_those_who_are_neither_heard_nor_reached() -> None:
    assert [view.name for view in list_unreachable_members(silent("j-w1-0", "j-w4-0"))] == ["j-w1-0"]
    assert not list_unreachable_members(silent("j-w1-0", seconds=WORKER_SILENT_SECONDS - 1))
    assert not list_unreachable_members(change_worker(build_training(), "j-w1-0", silent_seconds=900.0)), (
        "nobody has probed it"
    )
    assert not list_unreachable_members(change_worker(silent("j-w1-0"), "j-w1-0", reachable=True))


class TestWords:
    def test_a_worker_on_a_node_that_is_lost(self) -> None:
        decision = lost(not_ready(silent("j-w1-0"), "node-1"))
        assert decision.message == "worker j-w1-0 (rank 1) is lost: node node-1 is lost: its node is not Ready"
        assert (decision.cause, decision.node, decision.remedy) == (
            IncidentCause.NODE_LOST,
            "node-1",
            Remedy.REPLACE_WORKER,
        )
        (moved, _) = decision.actions
        assert isinstance(moved, ReplaceWorker)
        assert (moved.dead, moved.force, moved.disruption) == (True, True, True)

    def test_a_worker_alone(self) -> None:
        decision = lost(silent("j-w1-0", seconds=WORKER_SILENCE_LIMIT_SECONDS + 1, kubelet=True))
        words = f"there has been no sign of it for {WORKER_SILENCE_LIMIT_SECONDS:.0f} s"
        assert decision.message == f"worker j-w1-0 (rank 1) is lost: the operator does not reach it, and {words}"
        (moved,) = decision.actions
        assert isinstance(moved, ReplaceWorker)
        assert (decision.cause, moved.force) == (IncidentCause.WORKER_LOST, False)

    def test_several(self) -> None:
        world = not_ready(not_ready(silent("j-w1-0", "j-w2-0"), "node-1"), "node-2")
        decision = lost(world)
        assert decision.message.startswith("2 workers are lost (j-w1-0, j-w2-0); of j-w1-0: node node-1 is lost: ")
        assert len(decision.actions) == 4

    def test_a_worker_without_a_node_names_none(self) -> None:
        world = change_worker(silent("j-w1-0", seconds=WORKER_SILENCE_LIMIT_SECONDS + 1), "j-w1-0", pod={"node": ""})
        world = replace(world, cluster_view=replace(world.cluster_view, nodes={}))
        assert lost(world).node is None


class TestForsaken:
    """Its machine answers; its sidecar has gone, and its kubelet, which would start it again."""

    def forsaken(self, seconds: float = WORKER_SILENCE_LIMIT_SECONDS + 1) -> Observation:
        return not_ready(change_worker(silent(), "j-w1-0", silent_seconds=seconds), "node-1")

    def test_it_is_lost(self) -> None:
        decision = lost(self.forsaken())
        words = f"its node is not Ready, and there has been no sign of it for {WORKER_SILENCE_LIMIT_SECONDS:.0f} s"
        assert decision.message == f"worker j-w1-0 (rank 1) is lost: {words}"
        assert (decision.cause, decision.node) == (IncidentCause.NODE_LOST, "node-1")
        (moved, _) = decision.actions
        assert isinstance(moved, ReplaceWorker)
        assert (moved.dead, moved.force) == (True, False)

    def test_unless_it_may_train_on(self) -> None:
        ready = change_worker(silent(), "j-w1-0", silent_seconds=WORKER_SILENCE_LIMIT_SECONDS + 1)
        for world in (
            self.forsaken(WORKER_SILENCE_LIMIT_SECONDS - 1),
            ready,
            change_worker(self.forsaken(), "j-w2-0", seconds_since_step=5.0),
            replace(self.forsaken(), operator_age=build_policy().grace_after_start),
        ):
            assert node_lost.check_lost_nodes(world, build_policy()) is None


class TestCutOff:
    """Where the operator reaches nobody, its own silence proves nothing."""

    def alone(self) -> Observation:
        world = silent(*(view.name for view in build_training().workers), kubelet=False)
        return replace(world, faults=(build_stall("j-w0-0", 0),))

    def test_nobody_is_lost(self) -> None:
        assert node_lost.check_lost_nodes(self.alone(), build_policy()) is None

    @pytest.mark.parametrize(
        ("name", "answer"),
        [("j-w4-0", {"reachable": True}), ("j-w4-0", {"node_reachable": True}), ("j-w4-0", {"silent_seconds": 1.0})],
    )
    def test_unless_one_worker_or_node_answers(self, name: str, answer: dict[str, Any]) -> None:
        assert lost(change_worker(self.alone(), name, **answer)) is not None

    def test_silence_since_it_began_to_serve_is_no_voice(self) -> None:
        world = self.alone()
        never = tuple(
            replace(view, heartbeat=None, silent_seconds=RECENT_POLL_SECONDS / 2) for view in world.workers[4:]
        )
        assert node_lost.check_lost_nodes(replace(world, workers=(*world.workers[:4], *never)), build_policy()) is None

    def test_another_job_may_show_that_it_is_not(self) -> None:
        world = self.alone()
        assert lost(replace(world, cluster_view=replace(world.cluster_view, reached_elsewhere=True))) is not None


def test_a_young_operator_has_not_listened_for_long_enough() -> None:
    world = not_ready(silent("j-w1-0"), "node-1")
    assert (
        node_lost.check_lost_nodes(replace(world, operator_age=build_policy().grace_after_start), build_policy())
        is None
    )
    assert lost(replace(world, operator_age=build_policy().grace_after_start + 1)) is not None
