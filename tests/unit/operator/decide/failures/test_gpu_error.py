"""One error of one GPU: whose it is, what is said of it, and what the job remembers of its nodes' counters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pacekeeper_analysis.protocol.reports import FaultKind, FaultReport
from pacekeeper_operator.api.incident import IncidentCause, IncidentClass
from pacekeeper_operator.api.node_quarantine import Witness
from pacekeeper_operator.api.training_job import Remedy
from pacekeeper_operator.decide.decision import Decision, QuarantineNode, ReplaceWorker
from pacekeeper_operator.decide.failures import gpu_error
from pacekeeper_operator.decide.failures.gpu_error import DCGM_XID_METRIC, SHARED_GPU_ERROR_SECONDS
from pacekeeper_operator.state.desired_state import GpuReadings, PastIncident
from pacekeeper_operator.state.job_metrics import GpuValue, JobMetrics
from pacekeeper_operator.state.observation import Observation
from testing.operators.observations import NOW, build_policy, build_training, change_worker

DBE = "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL"


def measured(metric: str, value: float, node: str = "node-1", *, seen: float = 0.0, **changes: Any) -> Observation:
    """The series of GPU 3 of a node, which showed `seen` when the job looked at it first."""
    world = build_training()
    found = GpuValue(node, "3", metric, value, **changes)
    known = GpuReadings(nodes=tuple(f"node-{n}" for n in range(5)), values={found.key: seen} if seen else {})
    world = world.with_desired(world.desired.with_gpus(nodes=known.nodes, values=known.values))
    return replace(world, metrics=JobMetrics(step_seconds=0.1, gpu_values=(found,)))


def reported(xid: int, worker: str = "j-w1-0", **changes: Any) -> Observation:
    fault = FaultReport(f"{worker}-gpu-{xid}", FaultKind.GPU_ERROR, worker, 1, NOW - 2, 1, xid=xid, **changes)
    return replace(build_training(), faults=(fault,))


def decided(world: Observation) -> Decision:
    decision = gpu_error.check_gpu_errors(world, build_policy())
    assert decision is not None
    return decision


class TestMeasured:
    def test_a_fatal_xid_takes_the_worker_from_the_node(self) -> None:
        decision = decided(measured(DCGM_XID_METRIC, 79.0, trusted=True))
        moved, blamed = decision.actions
        assert isinstance(moved, ReplaceWorker)
        assert isinstance(blamed, QuarantineNode)
        assert (moved.worker, moved.dead, moved.disruption) == ("j-w1-0", False, True)
        assert (blamed.node, blamed.witness) == ("node-1", Witness.GPU_SERIES)
        assert decision.message == "GPU 3 of node node-1: XID 79 (GPU has fallen off the bus)"
        assert (decision.rank, decision.worker, decision.node, decision.live) == (1, "j-w1-0", "node-1", False)

    def test_counters_are_told_by_what_they_count(self) -> None:
        assert decided(measured(DBE, 7.0)).message == "GPU 3 of node node-1: uncorrectable memory error"

    @pytest.mark.parametrize(
        ("metric", "seen", "value", "news"),
        [
            (DBE, 7.0, 8.0, True),
            (DBE, 7.0, 7.0, False),
            (DBE, 7.0, 6.0, False),
            (DCGM_XID_METRIC, 79.0, 79.0, False),
            (DCGM_XID_METRIC, 94.0, 79.0, True),
            (DCGM_XID_METRIC, 79.0, 94.0, True),
        ],
    )
    def test_only_what_changes_is_news(self, metric: str, seen: float, value: float, news: bool) -> None:
        """A counter never falls but by a reset; the gauge of XIDs holds the last one."""
        found = gpu_error.check_gpu_errors(measured(metric, value, seen=seen), build_policy())
        assert (found is not None) is news

    def test_nodes_that_the_job_is_not_on_are_not_its_business(self) -> None:
        assert gpu_error.check_gpu_errors(measured(DCGM_XID_METRIC, 79.0, node="node-9"), build_policy()) is None
        world = measured(DCGM_XID_METRIC, 79.0)
        leaving = replace(world.state.placement.workers[1], leaving="it is given up")
        assert (
            gpu_error.check_gpu_errors(world.with_desired(world.desired.with_worker(leaving)), build_policy()) is None
        )


class TestReported:
    def test_what_may_come_of_the_application_touches_nothing(self) -> None:
        decision = decided(reported(13))
        assert (decision.actions, decision.class_, decision.remedy) == ((), IncidentClass.APPLICATION, None)
        assert (
            decision.message
            == "a GPU of j-w1-0: XID 13 (graphics engine exception); the application alone may cause it"
        )
        assert decision.remedies == ()

    def test_a_fatal_one_moves_the_rank_and_is_no_witness(self) -> None:
        decision = decided(reported(79, error="Xid (PCI:0000:01:00): 79"))
        blamed = decision.actions[-1]
        assert isinstance(blamed, QuarantineNode)
        assert (blamed.witness, decision.remedy, decision.rank) == (Witness.NONE, Remedy.REPLACE_WORKER, 1)
        assert (decision.first_sign, decision.settled_faults) == (NOW - 2, ("j-w1-0-gpu-79",))
        assert decision.evidence[-1] == "Xid (PCI:0000:01:00): 79"

    def test_the_same_error_of_a_worker_is_the_same_trouble_under_whatever_name(self) -> None:
        one, again = reported(79), reported(79)
        renamed = replace(again, faults=(replace(again.faults[0], name="j-w1-0-gpu-once-more"),))
        assert decided(one).incident_key == decided(renamed).incident_key
        assert decided(one).incident_key != decided(reported(94)).incident_key
        assert decided(one).incident_key != decided(reported(79, worker="j-w2-0")).incident_key

    def test_all_that_is_in_no_catalogue_is_one_trouble(self) -> None:
        """A script can make numbers without end, and each would be an Incident that is kept for a month."""
        assert decided(reported(10_000)).incident_key == decided(reported(10_001)).incident_key
        assert decided(reported(10_000)).incident_key != decided(reported(13)).incident_key
        assert decided(reported(10_000)).incident_key != decided(reported(10_001, worker="j-w2-0")).incident_key

    def test_of_a_spare_the_job_trains_on(self) -> None:
        decision = decided(reported(79, worker="j-w4-0"))
        assert (decision.rank, decision.live) == (None, True)

    def test_a_worker_that_is_not_known_any_more_has_no_node(self) -> None:
        decision = decided(reported(79, worker="j-w9-0"))
        assert (decision.actions, decision.node, decision.remedy) == ((), None, None)


class TestSeveralNodes:
    """Errors that may come of the application, on nodes 1 and 2 at once."""

    def both(self, first: int = 13, second: int = 31) -> Observation:
        one, other = reported(first, error="kernel"), reported(second, worker="j-w2-0", error="kernel")
        return replace(one, faults=(*one.faults, *other.faults))

    def test_they_are_one_incident_of_the_application_for_sure(self) -> None:
        decision = decided(self.both())
        words = "XID 13 (graphics engine exception) on 2 nodes at once (node-1, node-2): the application causes it"
        assert decision.message == words
        assert (decision.class_, decision.actions, decision.live) == (IncidentClass.APPLICATION, (), True)
        assert decision.settled_faults == ("j-w1-0-gpu-13", "j-w2-0-gpu-31")
        assert decision.evidence == ("kernel",)
        assert decision.first_sign == NOW - 2

    def test_what_dcgm_says_of_them_is_dealt_with_too(self) -> None:
        world = build_training()
        values = tuple(GpuValue(f"node-{n}", "0", DCGM_XID_METRIC, 13.0) for n in (1, 2))
        decision = decided(replace(world, metrics=JobMetrics(gpu_values=values)))
        assert "on 2 nodes at once" in decision.message
        assert (decision.gpu_readings, decision.first_sign) == (values, NOW)

    def test_one_that_came_a_moment_before_counts(self) -> None:
        def after(seconds: float, **changes: Any) -> Observation:
            past = PastIncident(
                IncidentCause.GPU_ERROR, NOW - seconds, 0.0, node="node-2", class_=IncidentClass.APPLICATION
            )
            world = reported(13)
            return world.with_desired(world.desired.with_incidents(past=(replace(past, **changes),)))

        assert "on 2 nodes at once (node-1, node-2)" in decided(after(SHARED_GPU_ERROR_SECONDS - 1)).message
        for alone in (
            after(SHARED_GPU_ERROR_SECONDS),
            after(1, node="node-1"),
            after(1, class_=IncidentClass.INFRASTRUCTURE),
            after(1, cause=IncidentCause.CRASH),
        ):
            assert decided(alone).message.endswith("the application alone may cause it")

    def test_two_gpus_of_one_node_are_not(self) -> None:
        one, other = reported(13), reported(31)
        assert "at once" not in decided(replace(one, faults=(*one.faults, *other.faults))).message

    def test_an_error_of_the_hardware_is_its_nodes_own(self) -> None:
        decision = decided(self.both(79, 13))
        assert (decision.class_, decision.node) == (IncidentClass.INFRASTRUCTURE, "node-1")
        assert decided(self.both(13, 79)).message.endswith("the application alone may cause it")


class TestContained:
    def test_it_costs_one_process_and_moves_nobody(self) -> None:
        decision = decided(reported(94))
        assert (decision.actions, decision.remedy, decision.class_) == ((), None, IncidentClass.INFRASTRUCTURE)
        assert decision.message.endswith("XID 94 (contained memory error); it ended one process, which is restarted")

    def test_the_memory_error_that_is_counted_with_it_is_the_same(self) -> None:
        def with_xid(xid: float, gpu: str = "3") -> Decision:
            world = measured(DBE, 1.0)
            last = GpuValue("node-1", gpu, DCGM_XID_METRIC, xid)
            world = world.with_desired(world.desired.with_gpus(values={last.key: xid}))
            return decided(replace(world, metrics=replace(world.metrics, gpu_values=(*world.metrics.gpu_values, last))))

        assert with_xid(94.0).actions == ()
        assert with_xid(95.0).remedy is Remedy.REPLACE_WORKER
        assert with_xid(94.0, gpu="4").remedy is Remedy.REPLACE_WORKER, "it is another GPU's"


class TestLearned:
    """The job looked at nodes 0 to 4; now its worker 4 is on node 7."""

    def moved(self, **metrics: Any) -> Observation:
        values = {f"node-{n}/0/{DBE}": float(n) for n in range(5)}
        world = build_training()
        world = world.with_desired(world.desired.with_gpus(values=values))
        record = replace(world.state.placement.workers[4], node="node-7")
        world = world.with_desired(world.desired.with_worker(record))
        found = tuple(GpuValue(f"node-{n}", "0", DBE, 9.0) for n in (1, 6, 7))
        return replace(world, metrics=JobMetrics(gpu_values=found, **metrics))

    def test_a_new_node_is_known_as_it_is_and_one_that_was_left_is_forgotten(self) -> None:
        gpus = gpu_error.record_gpu_baseline(self.moved(), build_policy()).state.gpus
        assert gpus.nodes == ("node-0", "node-1", "node-2", "node-3", "node-7")
        kept = {f"node-{n}/0/{DBE}": float(n) for n in range(4)}
        assert gpus.values == {**kept, f"node-7/0/{DBE}": 9.0}

    def test_nothing_is_learned_while_prometheus_is_away(self) -> None:
        world = self.moved(prometheus_error="away")
        assert gpu_error.record_gpu_baseline(world, build_policy()) is world.desired

    def test_nor_where_nobody_has_moved(self) -> None:
        world = replace(build_training(), metrics=JobMetrics(gpu_values=(GpuValue("node-1", "0", DBE, 9.0),)))
        assert gpu_error.record_gpu_baseline(world, build_policy()) is world.desired

    def test_a_worker_without_a_node_is_on_none(self) -> None:
        world = build_training()
        record = replace(world.state.placement.workers[4], node="")
        world = change_worker(world.with_desired(world.desired.with_worker(record)), "j-w4-0", pod={"node": ""})
        assert "" not in gpu_error.record_gpu_baseline(world, build_policy()).state.gpus.nodes
