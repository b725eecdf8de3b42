"""GPU errors: their class, message, and actions, and the baseline of the nodes' counters."""

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


def build_measured(
    metric: str, value: float, node: str = "node-1", *, baseline_value: float = 0.0, **changes: Any
) -> Observation:
    """Build a job with a series of GPU 3 of a node, whose first value for the job was `seen`."""
    observation = build_training()
    found = GpuValue(node, "3", metric, value, **changes)
    baseline = GpuReadings(
        nodes=tuple(f"node-{n}" for n in range(5)), values={found.key: baseline_value} if baseline_value else {}
    )
    observation = observation.with_desired(observation.desired.with_gpus(nodes=baseline.nodes, values=baseline.values))
    return replace(observation, metrics=JobMetrics(step_seconds=0.1, gpu_values=(found,)))


def build_reported(xid: int, worker: str = "j-w1-0", **changes: Any) -> Observation:
    fault = FaultReport(f"{worker}-gpu-{xid}", FaultKind.GPU_ERROR, worker, 1, NOW - 2, 1, xid=xid, **changes)
    return replace(build_training(), faults=(fault,))


def make_decision(observation: Observation) -> Decision:
    decision = gpu_error.check_gpu_errors(observation, build_policy())
    assert decision is not None
    return decision


class TestMeasured:
    def test_a_fatal_xid_takes_the_worker_from_the_node(self) -> None:
        decision = make_decision(build_measured(DCGM_XID_METRIC, 79.0, trusted=True))
        moved, quarantine = decision.actions
        assert isinstance(moved, ReplaceWorker)
        assert isinstance(quarantine, QuarantineNode)
        assert (moved.worker, moved.dead, moved.disruption) == ("j-w1-0", False, True)
        assert (quarantine.node, quarantine.witness) == ("node-1", Witness.GPU_SERIES)
        assert decision.message == "GPU 3 of node node-1: XID 79 (GPU has fallen off the bus)"
        assert (decision.rank, decision.worker, decision.node, decision.live) == (1, "j-w1-0", "node-1", False)

    def test_the_message_names_what_a_counter_counts(self) -> None:
        assert make_decision(build_measured(DBE, 7.0)).message == "GPU 3 of node node-1: uncorrectable memory error"

    @pytest.mark.parametrize(
        ("metric", "baseline_value", "value", "is_new"),
        [
            (DBE, 7.0, 8.0, True),
            (DBE, 7.0, 7.0, False),
            (DBE, 7.0, 6.0, False),
            (DCGM_XID_METRIC, 79.0, 79.0, False),
            (DCGM_XID_METRIC, 94.0, 79.0, True),
            (DCGM_XID_METRIC, 79.0, 94.0, True),
        ],
    )
    def test_only_a_changed_value_is_reported(
        self, metric: str, baseline_value: float, value: float, is_new: bool
    ) -> None:
        """A counter decreases only by a reset; the gauge of XIDs holds the last one."""
        found = gpu_error.check_gpu_errors(build_measured(metric, value, baseline_value=baseline_value), build_policy())
        assert (found is not None) is is_new

    def test_errors_on_nodes_without_a_worker_of_the_job_are_ignored(self) -> None:
        assert gpu_error.check_gpu_errors(build_measured(DCGM_XID_METRIC, 79.0, node="node-9"), build_policy()) is None
        observation = build_measured(DCGM_XID_METRIC, 79.0)
        leaving = replace(observation.state.placement.workers[1], leaving="it is given up")
        assert (
            gpu_error.check_gpu_errors(
                observation.with_desired(observation.desired.with_worker(leaving)), build_policy()
            )
            is None
        )


class TestReported:
    def test_an_error_that_the_application_may_cause_has_no_action(self) -> None:
        decision = make_decision(build_reported(13))
        assert (decision.actions, decision.class_, decision.remedy) == ((), IncidentClass.APPLICATION, None)
        assert (
            decision.message
            == "a GPU of j-w1-0: XID 13 (graphics engine exception); the application alone may cause it"
        )
        assert decision.remedies == ()

    def test_a_fatal_report_moves_the_rank_and_is_no_witness(self) -> None:
        decision = make_decision(build_reported(79, error="Xid (PCI:0000:01:00): 79"))
        quarantine = decision.actions[-1]
        assert isinstance(quarantine, QuarantineNode)
        assert (quarantine.witness, decision.remedy, decision.rank) == (Witness.NONE, Remedy.REPLACE_WORKER, 1)
        assert (decision.first_sign, decision.settled_faults) == (NOW - 2, ("j-w1-0-gpu-79",))
        assert decision.evidence[-1] == "Xid (PCI:0000:01:00): 79"

    def test_the_same_error_of_a_worker_has_the_same_incident_key_under_any_name(self) -> None:
        first, repeated = build_reported(79), build_reported(79)
        renamed = replace(repeated, faults=(replace(repeated.faults[0], name="j-w1-0-gpu-once-more"),))
        assert make_decision(first).incident_key == make_decision(renamed).incident_key
        assert make_decision(first).incident_key != make_decision(build_reported(94)).incident_key
        assert make_decision(first).incident_key != make_decision(build_reported(79, worker="j-w2-0")).incident_key

    def test_all_unknown_xids_of_a_worker_share_one_incident_key(self) -> None:
        """A script can invent any number of XIDs, and each would be an Incident that is stored for a month."""
        assert make_decision(build_reported(10_000)).incident_key == make_decision(build_reported(10_001)).incident_key
        assert make_decision(build_reported(10_000)).incident_key != make_decision(build_reported(13)).incident_key
        assert (
            make_decision(build_reported(10_000)).incident_key
            != make_decision(build_reported(10_001, worker="j-w2-0")).incident_key
        )

    def test_the_job_trains_on_after_an_error_of_a_spare(self) -> None:
        decision = make_decision(build_reported(79, worker="j-w4-0"))
        assert (decision.rank, decision.live) == (None, True)

    def test_a_worker_that_is_no_longer_recorded_has_no_node(self) -> None:
        decision = make_decision(build_reported(79, worker="j-w9-0"))
        assert (decision.actions, decision.node, decision.remedy) == ((), None, None)


class TestSeveralNodes:
    """Errors that the application may cause, on nodes 1 and 2 at once."""

    def build_both(self, first_xid: int = 13, second_xid: int = 31) -> Observation:
        one_report, other_report = (
            build_reported(first_xid, error="kernel"),
            build_reported(second_xid, worker="j-w2-0", error="kernel"),
        )
        return replace(one_report, faults=(*one_report.faults, *other_report.faults))

    def test_errors_on_two_nodes_are_one_incident_of_the_application(self) -> None:
        decision = make_decision(self.build_both())
        message = "XID 13 (graphics engine exception) on 2 nodes at once (node-1, node-2): the application causes it"
        assert decision.message == message
        assert (decision.class_, decision.actions, decision.live) == (IncidentClass.APPLICATION, (), True)
        assert decision.settled_faults == ("j-w1-0-gpu-13", "j-w2-0-gpu-31")
        assert decision.evidence == ("kernel",)
        assert decision.first_sign == NOW - 2

    def test_dcgm_values_of_two_nodes_are_one_incident_of_the_application(self) -> None:
        observation = build_training()
        values = tuple(GpuValue(f"node-{n}", "0", DCGM_XID_METRIC, 13.0) for n in (1, 2))
        decision = make_decision(replace(observation, metrics=JobMetrics(gpu_values=values)))
        assert "on 2 nodes at once" in decision.message
        assert (decision.gpu_readings, decision.first_sign) == (values, NOW)

    def test_an_error_shortly_before_on_another_node_counts(self) -> None:
        def build_after(seconds: float, **changes: Any) -> Observation:
            past = PastIncident(
                IncidentCause.GPU_ERROR, NOW - seconds, 0.0, node="node-2", class_=IncidentClass.APPLICATION
            )
            observation = build_reported(13)
            return observation.with_desired(observation.desired.with_incidents(past=(replace(past, **changes),)))

        assert "on 2 nodes at once (node-1, node-2)" in make_decision(build_after(SHARED_GPU_ERROR_SECONDS - 1)).message
        for unrelated in (
            build_after(SHARED_GPU_ERROR_SECONDS),
            build_after(1, node="node-1"),
            build_after(1, class_=IncidentClass.INFRASTRUCTURE),
            build_after(1, cause=IncidentCause.CRASH),
        ):
            assert make_decision(unrelated).message.endswith("the application alone may cause it")

    def test_errors_of_two_gpus_of_one_node_are_not_shared(self) -> None:
        first, second = build_reported(13), build_reported(31)
        assert "at once" not in make_decision(replace(first, faults=(*first.faults, *second.faults))).message

    def test_a_hardware_error_concerns_its_node_alone(self) -> None:
        decision = make_decision(self.build_both(79, 13))
        assert (decision.class_, decision.node) == (IncidentClass.INFRASTRUCTURE, "node-1")
        assert make_decision(self.build_both(13, 79)).message.endswith("the application alone may cause it")


class TestContained:
    def test_a_contained_error_ends_one_process_and_moves_no_worker(self) -> None:
        decision = make_decision(build_reported(94))
        assert (decision.actions, decision.remedy, decision.class_) == ((), None, IncidentClass.INFRASTRUCTURE)
        assert decision.message.endswith("XID 94 (contained memory error); it ended one process, which is restarted")

    def test_the_memory_error_counted_with_a_contained_error_is_the_same_error(self) -> None:
        def with_xid(xid: float, gpu: str = "3") -> Decision:
            observation = build_measured(DBE, 1.0)
            last = GpuValue("node-1", gpu, DCGM_XID_METRIC, xid)
            observation = observation.with_desired(observation.desired.with_gpus(values={last.key: xid}))
            return make_decision(
                replace(
                    observation,
                    metrics=replace(observation.metrics, gpu_values=(*observation.metrics.gpu_values, last)),
                )
            )

        assert with_xid(94.0).actions == ()
        assert with_xid(95.0).remedy is Remedy.REPLACE_WORKER
        assert with_xid(94.0, gpu="4").remedy is Remedy.REPLACE_WORKER, "it is another GPU's"


class TestBaseline:
    """The baseline covers nodes 0 to 4; worker 4 is now on node 7."""

    def build_moved(self, **metrics: Any) -> Observation:
        values = {f"node-{n}/0/{DBE}": float(n) for n in range(5)}
        observation = build_training()
        observation = observation.with_desired(observation.desired.with_gpus(values=values))
        record = replace(observation.state.placement.workers[4], node="node-7")
        observation = observation.with_desired(observation.desired.with_worker(record))
        found = tuple(GpuValue(f"node-{n}", "0", DBE, 9.0) for n in (1, 6, 7))
        return replace(observation, metrics=JobMetrics(gpu_values=found, **metrics))

    def test_the_baseline_gains_the_new_node_and_drops_the_old_one(self) -> None:
        gpus = gpu_error.record_gpu_baseline(self.build_moved(), build_policy()).state.gpus
        assert gpus.nodes == ("node-0", "node-1", "node-2", "node-3", "node-7")
        retained = {f"node-{n}/0/{DBE}": float(n) for n in range(4)}
        assert gpus.values == {**retained, f"node-7/0/{DBE}": 9.0}

    def test_the_baseline_stays_while_prometheus_is_unavailable(self) -> None:
        observation = self.build_moved(prometheus_error="away")
        assert gpu_error.record_gpu_baseline(observation, build_policy()) is observation.desired

    def test_the_baseline_stays_if_no_worker_has_moved(self) -> None:
        observation = replace(build_training(), metrics=JobMetrics(gpu_values=(GpuValue("node-1", "0", DBE, 9.0),)))
        assert gpu_error.record_gpu_baseline(observation, build_policy()) is observation.desired

    def test_a_worker_without_a_node_is_not_in_the_baseline(self) -> None:
        observation = build_training()
        record = replace(observation.state.placement.workers[4], node="")
        observation = change_worker(
            observation.with_desired(observation.desired.with_worker(record)), "j-w4-0", pod={"node": ""}
        )
        assert "" not in gpu_error.record_gpu_baseline(observation, build_policy()).state.gpus.nodes
