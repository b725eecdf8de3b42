"""GPU errors over several passes: what changes in the job, and the quarantine requests for the nodes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pacekeeper_analysis.protocol.reports import FaultKind, FaultReport
from pacekeeper_operator.api.incident import IncidentClass, IncidentOutcome
from pacekeeper_operator.api.node_quarantine import Witness
from pacekeeper_operator.api.training_job import Remedy
from pacekeeper_operator.decide.evaluate import PassResult, evaluate_job
from pacekeeper_operator.decide.placement.workforce import list_missing_workers
from pacekeeper_operator.state.desired_state import DesiredState
from pacekeeper_operator.state.job_metrics import GpuValue
from pacekeeper_operator.state.observation import Observation
from testing.operators.observations import (
    NOW,
    build_policy,
    build_stalls,
    build_training,
    change_members,
    change_worker,
    list_decisions,
)


def list_members(desired: DesiredState) -> list[str]:
    return [member.worker for member in desired.plan.members]


def apply_result(result: PassResult, observation: Observation, **changes: object) -> Observation:
    """Return the observation after the result of a pass was written."""
    return replace(observation.with_desired(result.desired), **changes)  # type: ignore[arg-type]


class TestGpuError:
    def with_value(self, observation: Observation, metric: str, value: float, node: str = "node-1") -> Observation:
        return replace(
            observation, metrics=replace(observation.metrics, gpu_values=(GpuValue(node, "0", metric, value),))
        )

    def test_a_fatal_xid_leads_to_checkpoint_spare_and_quarantine(self) -> None:
        observation = self.with_value(build_training(), "DCGM_FI_DEV_XID_ERRORS", 79.0)
        result = evaluate_job(observation, build_policy())
        assert result.desired.plan.checkpoint_request == 1
        assert [request.node for request in result.desired.state.incidents.quarantine_requests] == ["node-1"]
        answered = change_members(apply_result(result, observation), checkpoint={"request": 1})
        assert list_members(evaluate_job(answered, build_policy()).desired)[1] == "j-w4-0"

    def test_a_spare_on_a_failed_gpu_is_replaced_without_a_recovery_of_the_job(self) -> None:
        result = evaluate_job(
            self.with_value(build_training(), "DCGM_FI_DEV_XID_ERRORS", 79.0, node="node-4"), build_policy()
        )
        (incident,) = result.desired.state.incidents.current
        assert (incident.remedy, incident.outcome) == (Remedy.REPLACE_WORKER, IncidentOutcome.RECOVERED)
        assert result.desired.state.placement.failed_starts == 0
        assert [worker.name for worker in list_missing_workers(result.observation)] == ["j-w4-1"]
        assert [request.node for request in result.desired.state.incidents.quarantine_requests] == ["node-4"]

    def test_if_replacing_is_not_allowed_the_membership_stays(self) -> None:
        allowed = build_policy(allow=frozenset({Remedy.RESTART_RANKS}))
        result = evaluate_job(self.with_value(build_training(), "DCGM_FI_DEV_XID_ERRORS", 79.0), allowed)
        (incident,) = result.desired.state.incidents.current
        assert incident.remedy is None
        assert incident.outcome is not None
        assert result.desired.plan.membership == 1

    @pytest.mark.parametrize("xid", [13, 31, 43, 45, 68])
    def test_an_xid_of_the_application_has_no_action(self, xid: int) -> None:
        result = evaluate_job(self.with_value(build_training(), "DCGM_FI_DEV_XID_ERRORS", float(xid)), build_policy())
        assert not result.desired.state.incidents.quarantine_requests
        assert result.desired.plan.membership == 1
        assert result.desired.state.incidents.current[0].class_ is IncidentClass.APPLICATION

    @pytest.mark.parametrize("xid", range(144, 151))
    def test_an_nvlink_fault_moves_the_worker_and_is_no_witness_against_the_node(self, xid: int) -> None:
        """A link has two ends."""
        observation, value = (
            build_training(),
            GpuValue("node-1", "0", "DCGM_FI_DEV_XID_ERRORS", float(xid), trusted=True),
        )
        result = evaluate_job(
            replace(observation, metrics=replace(observation.metrics, gpu_values=(value,))), build_policy()
        )
        (incident,) = result.desired.state.incidents.current
        assert (incident.class_, incident.remedy) == (IncidentClass.INFRASTRUCTURE, Remedy.REPLACE_WORKER)
        (request,) = result.desired.state.incidents.quarantine_requests
        assert request.witness is Witness.NONE

    @pytest.mark.parametrize("xid", [155, 160, 999])
    def test_an_unknown_xid_has_no_action_and_is_of_unknown_class(self, xid: int) -> None:
        result = evaluate_job(self.with_value(build_training(), "DCGM_FI_DEV_XID_ERRORS", float(xid)), build_policy())
        assert not result.desired.state.incidents.quarantine_requests
        assert result.desired.plan.membership == 1
        assert result.desired.state.incidents.current[0].class_ is IncidentClass.UNKNOWN

    def test_unknown_xids_of_many_nodes_are_one_incident(self) -> None:
        observation = build_training()
        values = tuple(GpuValue(f"node-{index}", "0", "DCGM_FI_DEV_XID_ERRORS", 999.0) for index in range(3))
        result = evaluate_job(
            replace(observation, metrics=replace(observation.metrics, gpu_values=values)), build_policy()
        )
        (incident,) = result.desired.state.incidents.current
        assert incident.class_ is IncidentClass.UNKNOWN

    @pytest.mark.parametrize(
        ("metric", "before", "value", "is_new"),
        [
            ("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", None, 5.0, False),  # the exporter was unavailable, and has returned
            ("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", 5.0, 5.0, False),  # and has been for a while
            ("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", 5.0, 6.0, True),
            ("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", 0.0, 1.0, True),
            ("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", 6.0, 5.0, False),
            ("DCGM_FI_DEV_XID_ERRORS", None, 79.0, False),
            ("DCGM_FI_DEV_XID_ERRORS", 79.0, 79.0, False),
            ("DCGM_FI_DEV_XID_ERRORS", 45.0, 79.0, True),
            ("DCGM_FI_DEV_ROW_REMAP_FAILURE", None, 1.0, False),
        ],
    )
    def test_a_series_without_a_baseline_counts_if_it_has_changed_recently(
        self, metric: str, before: float | None, value: float, is_new: bool
    ) -> None:
        observation = build_training()
        series = GpuValue("node-1", "0", metric, value, trusted=True, previous_value=before)
        result = evaluate_job(
            replace(observation, metrics=replace(observation.metrics, gpu_values=(series,))), build_policy()
        )
        assert bool(list_decisions(result)) is is_new
        assert bool(result.desired.state.incidents.quarantine_requests) is is_new

    def test_a_change_from_the_baseline_counts_at_any_age(self) -> None:
        observation = build_training()
        baseline = {"node-1/0/DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": 2.0}
        observation = observation.with_desired(observation.desired.with_gpus(values=baseline))
        series = GpuValue("node-1", "0", "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", 3.0, previous_value=3.0)
        assert list_decisions(
            evaluate_job(
                replace(observation, metrics=replace(observation.metrics, gpu_values=(series,))), build_policy()
            )
        )

    @pytest.mark.parametrize("metric", ["DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", "DCGM_FI_DEV_XID_ERRORS"])
    def test_the_same_error_after_a_reset_is_a_new_one(self, metric: str) -> None:
        """As found by running a job a minute after a GPU of its node had the error, and again."""
        observation = build_training()
        baseline = {f"node-1/0/{metric}": 79.0}
        observation = observation.with_desired(observation.desired.with_gpus(values=baseline))
        found = []
        for second, value in enumerate((79.0, 0.0, 79.0, 79.0)):
            series = GpuValue("node-1", "0", metric, value, previous_value=79.0)
            observation = replace(
                observation, now=NOW + second, metrics=replace(observation.metrics, gpu_values=(series,))
            )
            result = evaluate_job(observation, build_policy())
            found.append(bool(list_decisions(result)))
            observation = apply_result(result, observation)
        assert found == [False, False, True, False]

    def test_mig_instances_of_a_gpu_are_distinguished(self) -> None:
        """Their XIDs are sticky, and differ: each is reported once."""
        observation = build_training()
        values = tuple(
            GpuValue("node-1", "0", "DCGM_FI_DEV_XID_ERRORS", xid, instance=instance)
            for xid, instance in ((45.0, "1"), (31.0, "2"))
        )
        observation = replace(observation, metrics=replace(observation.metrics, gpu_values=values))
        result = evaluate_job(observation, build_policy())
        for seconds in (1, 2):
            result = evaluate_job(replace(apply_result(result, observation), now=NOW + seconds), build_policy())
        assert not list_decisions(result)

    def test_a_counter_that_falls_is_no_error(self) -> None:
        observation = self.with_value(build_training(), "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", 1.0)
        baseline = {"node-1/0/DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": 2.0}
        assert not list_decisions(
            evaluate_job(observation.with_desired(observation.desired.with_gpus(values=baseline)), build_policy())
        )

    def test_a_stalled_job_does_not_wait_for_a_checkpoint(self) -> None:
        observation = self.with_value(build_training(), "DCGM_FI_DEV_XID_ERRORS", 79.0)
        observation = apply_result(
            evaluate_job(observation, build_policy()), observation, faults=build_stalls(observation, culprit=1)
        )
        result = evaluate_job(observation, build_policy())
        assert list_members(result.desired)[1] == "j-w4-0"
        assert len(result.desired.state.incidents.current) == 1

    def test_a_gauge_that_never_resets_fires_once(self) -> None:
        observation = self.with_value(build_training(), "DCGM_FI_DEV_XID_ERRORS", 45.0)
        result = evaluate_job(observation, build_policy())
        assert len(list_decisions(result)) == 1
        assert not list_decisions(evaluate_job(replace(apply_result(result, observation), now=NOW + 1), build_policy()))

    def test_values_from_before_the_job_are_ignored(self) -> None:
        observation = build_training()
        observation = observation.with_desired(observation.desired.with_gpus(nodes=()))
        assert not list_decisions(
            evaluate_job(self.with_value(observation, "DCGM_FI_DEV_XID_ERRORS", 79.0), build_policy())
        )

    def test_an_uncorrectable_memory_error_is_fatal(self) -> None:
        result = evaluate_job(self.with_value(build_training(), "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", 1.0), build_policy())
        assert [request.node for request in result.desired.state.incidents.quarantine_requests] == ["node-1"]

    def test_a_node_without_a_worker_of_the_job_is_ignored(self) -> None:
        assert not list_decisions(
            evaluate_job(self.with_value(build_training(), "DCGM_FI_DEV_XID_ERRORS", 79.0, "node-9"), build_policy())
        )

    def test_a_report_of_the_launcher_is_enough_for_a_quarantine_request(self) -> None:
        fault = FaultReport(
            "g", FaultKind.GPU_ERROR, "j-w1-0", 1, NOW, membership=1, xid=79, error="XID 79 on GPU-4711"
        )
        result = evaluate_job(replace(build_training(), faults=(fault,)), build_policy())
        assert [request.node for request in result.desired.state.incidents.quarantine_requests] == ["node-1"]
        assert "g" in result.desired.state.incidents.settled_faults
        assert "XID 79 on GPU-4711" in result.desired.state.incidents.current[0].evidence

    def test_a_report_of_the_launcher_is_no_witness_against_its_node(self) -> None:
        """The job acts on it at once. For the node it is only a suspicion, because any script can raise it."""
        fault = FaultReport("g", FaultKind.GPU_ERROR, "j-w1-0", 1, NOW, membership=1, xid=79)
        result = evaluate_job(replace(build_training(), faults=(fault,)), build_policy())
        (request,) = result.desired.state.incidents.quarantine_requests
        assert (request.node, request.witness) == ("node-1", Witness.NONE)
        assert result.desired.state.incidents.current[0].remedy is Remedy.REPLACE_WORKER

    def test_the_suspected_node_is_the_one_that_the_api_server_reports(self) -> None:
        """It is neither the node that the template requested nor one that the report names."""
        observation = change_worker(build_training(), "j-w1-0", pod={"node": "node-1"})
        worker = observation.state.placement.find_worker("j-w1-0")
        assert worker is not None
        observation = observation.with_desired(observation.desired.with_worker(replace(worker, node="node-1")))
        fault = FaultReport("node-7/0/XID", FaultKind.GPU_ERROR, "j-w1-0", 1, NOW, membership=1, xid=79, error="node-7")
        result = evaluate_job(replace(observation, faults=(fault,)), build_policy())
        assert [request.node for request in result.desired.state.incidents.quarantine_requests] == ["node-1"]

    @pytest.mark.parametrize(("trusted", "witness"), [(True, Witness.GPU_SERIES), (False, Witness.NONE)])
    def test_series_are_a_witness_if_they_are_trusted(self, trusted: bool, witness: Witness) -> None:
        observation = build_training()
        value = GpuValue("node-1", "0", "DCGM_FI_DEV_XID_ERRORS", 79.0, trusted=trusted)
        result = evaluate_job(
            replace(observation, metrics=replace(observation.metrics, gpu_values=(value,))), build_policy()
        )
        (request,) = result.desired.state.incidents.quarantine_requests
        assert request.witness is witness
        assert result.desired.plan.checkpoint_request == 1, "the job recovers in both cases"
