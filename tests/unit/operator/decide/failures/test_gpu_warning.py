"""GPUs with warning signs: which worker moves, when, at what cost, and the quarantine requests for nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pacekeeper_analysis.failures.finding import FaultClass, SignalKind
from pacekeeper_analysis.failures.gpu_health import GPU_SIGN_MEANINGS, GpuSign
from pacekeeper_analysis.protocol.reports import GpuHealth
from pacekeeper_operator.api.incident import IncidentCause, IncidentClass, IncidentOutcome
from pacekeeper_operator.api.node_quarantine import Witness
from pacekeeper_operator.api.training_job import JobPhase, RemediationMode, Remedy
from pacekeeper_operator.decide.decision import Decision, ReplaceWorker
from pacekeeper_operator.decide.evaluate import PassResult, evaluate_job
from pacekeeper_operator.decide.failures import gpu_warning
from pacekeeper_operator.decide.lifecycle.status import compute_phase
from pacekeeper_operator.decide.placement.membership import MEMBERSHIP_CHECKPOINT_WAIT_SECONDS
from pacekeeper_operator.state.desired_state import Incident, PastIncident
from pacekeeper_operator.state.job_metrics import GpuValue, JobMetrics
from pacekeeper_operator.state.observation import Observation
from testing.operators.observations import NOW, build_policy, build_training, change_members, change_worker

EXPECTED = "the expected fault costs more"
PENDING = "GPU-1: memory rows wait for a reset of the GPU to be remapped"


def with_warning(observation: Observation, worker: str = "j-w1-0", *signs: GpuSign, **health: Any) -> Observation:
    """Return the observation with signs that a launcher reports. The default sign: memory rows wait to be remapped."""
    reported_signs = tuple(str(sign) for sign in signs or (GpuSign.ROWS_PENDING,))
    return change_worker(observation, worker, heartbeat={"gpus": (GpuHealth("GPU-1", reported_signs, **health),)})


def build_measured(
    sign: GpuSign = GpuSign.ROWS_PENDING, value: float = 1.0, observation: Observation | None = None, **changes: Any
) -> Any:
    """Build a job with a sign that DCGM reports for node 1."""
    found = replace(GpuValue("node-1", "3", str(sign), value), **changes)
    return replace(
        observation or build_training(), metrics=JobMetrics(step_seconds=0.1, queried_at=NOW, gpu_signs=(found,))
    )


def make_decision(observation: Observation) -> Decision:
    decision = gpu_warning.check_gpu_warnings(observation, build_policy())
    assert decision is not None
    return decision


def apply_result(result: PassResult, observation: Observation, **changes: Any) -> Observation:
    """Return the observation after the result of a pass was written."""
    return replace(observation.with_desired(result.desired), **changes)


def find_only_incident(result: PassResult) -> Incident:
    (incident,) = result.desired.state.incidents.current
    return incident


def list_members(result: PassResult) -> list[str]:
    return [member.worker for member in result.desired.plan.members]


class TestMove:
    def test_a_spare_takes_the_ranks_once_the_checkpoint_is_saved(self) -> None:
        observation = with_warning(build_training())
        result = evaluate_job(observation, build_policy())
        assert (result.desired.plan.checkpoint_request, list_members(result)[1]) == (1, "j-w1-0")
        late = apply_result(result, observation, now=NOW + 10 * MEMBERSHIP_CHECKPOINT_WAIT_SECONDS)
        assert evaluate_job(late, build_policy()).desired.plan.membership == 1, (
            "the checkpoint is awaited, because the GPU still works"
        )
        result = evaluate_job(change_members(late, checkpoint={"request": 1}), build_policy())
        assert list_members(result) == ["j-w0-0", "j-w4-0", "j-w2-0", "j-w3-0"]

    def test_price_and_message_of_a_warning(self) -> None:
        decision = make_decision(with_warning(build_training()))
        assert decision.actions == (
            ReplaceWorker("j-w1-0", PENDING, dead=False, disruption=True, waits_for_checkpoint=True),
        )
        (price,) = decision.remedies
        assert (price.name, price.cost_seconds, price.chosen, price.reason) == ("ReplaceWorker", 5.0, True, EXPECTED)
        assert decision.message == f"a GPU of j-w1-0 is expected to fail: {PENDING}"
        assert (decision.class_, decision.remedy) == (IncidentClass.INFRASTRUCTURE, Remedy.REPLACE_WORKER)
        assert (decision.rank, decision.worker, decision.node) == (1, "j-w1-0", "node-1")
        assert decision.finding is not None
        assert (decision.finding.fault, decision.finding.signal_kinds) == (
            FaultClass.HARDWARE,
            frozenset({SignalKind.GPU}),
        )

    def test_a_warning_counts_no_restart_and_the_job_stays_running(self) -> None:
        observation = with_warning(build_training())
        result = evaluate_job(observation, build_policy())
        assert result.desired.state.budget.restarts == ()
        after = apply_result(result, observation, now=NOW + 60)
        assert compute_phase(after) is JobPhase.RUNNING
        assert evaluate_job(after, build_policy()).desired.state.incidents.closed == ()

    def test_the_incident_closes_with_the_first_step_of_the_next_round_without_lost_steps(self) -> None:
        observation = with_warning(build_training())
        observation = apply_result(evaluate_job(observation, build_policy()), observation, now=NOW + 5)
        observation = apply_result(
            evaluate_job(change_members(observation, checkpoint={"request": 1}), build_policy()),
            observation,
            now=NOW + 7,
        )
        assert find_only_incident(evaluate_job(observation, build_policy())).outcome is None
        round_ = {"start": {"restored_step": 501, "first_step_at": NOW + 9}, "progress": {"step": 503}}
        observation = replace(
            change_members(observation, membership=2, round=2, checkpoint={"request": 1}, **round_), now=NOW + 10
        )
        incident = find_only_incident(evaluate_job(observation, build_policy()))
        assert (incident.outcome, incident.steps_lost, incident.recovered) == (IncidentOutcome.RECOVERED, 0, NOW + 9)

    def test_the_checkpoint_is_not_awaited_once_the_gpu_has_failed(self) -> None:
        observation = with_warning(build_training())
        observation = apply_result(evaluate_job(observation, build_policy()), observation, now=NOW + 5)
        broken = GpuValue("node-1", "3", "DCGM_FI_DEV_XID_ERRORS", 79.0)
        observation = change_worker(
            replace(observation, metrics=replace(observation.metrics, gpu_values=(broken,))), "j-w1-0", gone=True
        )
        assert "j-w1-0" not in list_members(evaluate_job(observation, build_policy()))

    def test_the_incident_stays_open_over_a_restart_of_the_operator(self) -> None:
        """No worker has reported yet, and Prometheus was not queried."""
        observation = with_warning(build_training(spares=0))
        observation = apply_result(evaluate_job(observation, build_policy()), observation)
        without_reports = replace(
            observation, workers=tuple(replace(view, heartbeat=None) for view in observation.workers)
        )
        assert find_only_incident(evaluate_job(without_reports, build_policy())).outcome is None


class TestWarnings:
    @pytest.mark.parametrize("sign", GpuSign)
    def test_only_signs_that_are_warnings_lead_to_a_decision(self, sign: GpuSign) -> None:
        for observation in (with_warning(build_training(), "j-w1-0", sign), build_measured(sign)):
            assert (gpu_warning.check_gpu_warnings(observation, build_policy()) is not None) is GPU_SIGN_MEANINGS[
                sign
            ].is_warning

    def test_an_unknown_sign_of_a_newer_launcher_is_ignored(self) -> None:
        observation = change_worker(
            build_training(), "j-w1-0", heartbeat={"gpus": (GpuHealth("GPU-1", ("SomethingNew",)),)}
        )
        assert gpu_warning.check_gpu_warnings(observation, build_policy()) is None

    def test_series_of_the_gpu_of_another_job_on_the_same_node_are_ignored(self) -> None:
        observation = change_worker(build_training(), "j-w1-0", heartbeat={"gpus": (GpuHealth("GPU-1"),)})
        assert (
            gpu_warning.check_gpu_warnings(build_measured(observation=observation, uuid="GPU-9"), build_policy())
            is None
        )
        assert make_decision(build_measured(observation=observation, uuid="GPU-1")).worker == "j-w1-0"
        assert make_decision(build_measured(observation=observation, uuid="")).worker == "j-w1-0"
        assert gpu_warning.check_gpu_warnings(build_measured(node="node-9"), build_policy()) is None

    def test_the_message_contains_the_measured_values(self) -> None:
        assert (
            "PCIe link repeats packets (132 in ten minutes)"
            in make_decision(build_measured(GpuSign.PCIE_REPLAYS, 132.4)).message
        )
        decision = make_decision(with_warning(build_training(), "j-w1-0", GpuSign.PCIE_REPLAYS, pcie_replays=99))
        assert "(99 in ten minutes)" in decision.message

    def test_gpu_signs_of_a_worker_are_described(self) -> None:
        observation = with_warning(
            build_measured(GpuSign.SLOW_CLOCK, 1400.0), "j-w1-0", GpuSign.PCIE_LOW, pcie_width=8, pcie_generation=4
        )
        assert gpu_warning.describe_gpu_signs(observation, observation.find_worker("j-w1-0")) == (
            "GPU-1: its PCIe link has been below its maximum from the start (8 lanes of generation 4)",
            "GPU 3 of node-1: its clock is below that of its peers under load (1400 MHz)",
        )
        assert gpu_warning.describe_gpu_signs(observation, observation.find_worker("j-w2-0")) == ()
        assert gpu_warning.describe_gpu_signs(observation, None) == ()

    def test_a_leaving_worker_is_not_replaced_again(self) -> None:
        observation = with_warning(build_training())
        after = apply_result(evaluate_job(observation, build_policy()), observation)
        assert gpu_warning.check_gpu_warnings(after, build_policy()) is None


class TestNodes:
    def test_a_report_of_the_launcher_requests_no_quarantine(self) -> None:
        result = evaluate_job(with_warning(build_training()), build_policy())
        assert result.desired.state.incidents.quarantine_requests == ()

    def test_untrusted_series_request_no_quarantine(self) -> None:
        result = evaluate_job(build_measured(trusted=False), build_policy())
        assert result.desired.state.incidents.quarantine_requests == ()
        assert result.desired.plan.checkpoint_request == 1, "the job saves a checkpoint in both cases"

    def test_trusted_series_are_a_witness(self) -> None:
        (request,) = evaluate_job(
            build_measured(trusted=True), build_policy()
        ).desired.state.incidents.quarantine_requests
        assert (request.node, request.witness) == ("node-1", Witness.GPU_SERIES)
        assert request.reason == "GPU 3 of node-1: memory rows wait for a reset of the GPU to be remapped"

    def test_no_quarantine_is_requested_if_the_worker_stays(self) -> None:
        result = evaluate_job(build_measured(trusted=True, observation=build_training(spares=0)), build_policy())
        assert result.desired.state.incidents.quarantine_requests == ()

    def test_a_node_that_another_worker_left_for_a_warning_is_not_left_again(self) -> None:
        """Otherwise each next worker would be moved until the GPU is reset."""

        def decide_after(**changes: Any) -> Decision:
            past = replace(
                PastIncident(IncidentCause.GPU_WARNING, NOW - 60, 9.0, worker="j-w1-9", node="node-1"), **changes
            )
            observation = with_warning(build_training())
            return make_decision(observation.with_desired(observation.desired.with_incidents(past=(past,))))

        (price,) = decide_after().remedies
        assert (decide_after().actions, price.chosen) == ((), False)
        assert price.reason == "another worker had such a warning on node-1 before: the node needs an inspection"
        for other in (
            decide_after(node="node-2"),
            decide_after(worker="j-w1-0"),
            decide_after(cause=IncidentCause.GPU_ERROR),
        ):
            assert other.actions


class TestWithoutASpare:
    def test_the_incident_is_recorded_and_the_remedy_applied_once_a_spare_is_warm(self) -> None:
        without_spare = change_worker(with_warning(build_training()), "j-w4-0", silent_seconds=99.0)
        result = evaluate_job(without_spare, build_policy())
        waiting = find_only_incident(result)
        assert (waiting.applied, waiting.remedy, waiting.outcome) == (None, None, None)
        assert [price.reason for price in waiting.remedies] == ["no spare is warm"]
        later = apply_result(result, without_spare, now=NOW + 300)
        assert find_only_incident(evaluate_job(later, build_policy())) == waiting, "the incident is written once"
        result = evaluate_job(change_worker(later, "j-w4-0", silent_seconds=0.5), build_policy())
        applied = find_only_incident(result)
        assert (applied.name, applied.applied, applied.remedy) == (waiting.name, NOW + 300, Remedy.REPLACE_WORKER)
        assert applied.first_sign == NOW
        assert result.desired.plan.checkpoint_request == 1

    def test_a_warning_is_one_incident_over_all_rounds(self) -> None:
        observation = with_warning(build_training(spares=0))
        result = evaluate_job(observation, build_policy())
        later = change_members(apply_result(result, observation, now=NOW + 60), round=2)
        assert (
            evaluate_job(later, build_policy()).desired.state.incidents.current
            == result.desired.state.incidents.current
        )

    def test_the_incident_closes_with_the_sign_and_a_new_sign_opens_another(self) -> None:
        observation = replace(build_training(spares=0), metrics=JobMetrics(step_seconds=0.1, queried_at=NOW))
        result = evaluate_job(with_warning(observation), build_policy())
        result = evaluate_job(apply_result(result, observation, now=NOW + 9), build_policy())
        assert (find_only_incident(result).outcome, find_only_incident(result).recovered) == (
            IncidentOutcome.RECOVERED,
            NOW + 9,
        )
        result = evaluate_job(with_warning(apply_result(result, observation, now=NOW + 20)), build_policy())
        assert [incident.outcome for incident in result.desired.state.incidents.current] == [
            IncidentOutcome.RECOVERED,
            None,
        ]

    def test_two_warned_workers_do_not_wait_for_the_same_spare(self) -> None:
        result = evaluate_job(with_warning(with_warning(build_training()), "j-w2-0"), build_policy())
        incidents = result.desired.state.incidents.current
        assert [(incident.worker, incident.remedy) for incident in incidents] == [
            ("j-w1-0", Remedy.REPLACE_WORKER),
            ("j-w2-0", None),
        ]

    def test_a_warning_hides_no_straggler(self) -> None:
        """Nothing is measured, because no remedy was applied."""
        observation = with_warning(build_training(spares=0))
        after = apply_result(evaluate_job(observation, build_policy()), observation)
        after = after.with_desired(after.desired.with_adaptation(suppressed_relative_time=2.0))
        metrics = JobMetrics(step_seconds=0.1, relative_time=2.0, peer_slowdown=9.0, wait_share=0.0)
        assert (
            evaluate_job(replace(after, metrics=metrics), build_policy()).desired.state.adaptation.investigation
            is not None
        )


class TestSpares:
    def test_a_spare_with_a_warning_is_replaced_at_once_and_takes_no_ranks(self) -> None:
        result = evaluate_job(with_warning(with_warning(build_training()), "j-w4-0"), build_policy())
        incidents = {incident.worker: incident for incident in result.desired.state.incidents.current}
        spare = incidents.pop("j-w4-0")
        assert (spare.remedy, spare.outcome) == (Remedy.REPLACE_WORKER, IncidentOutcome.RECOVERED)
        assert [(incident.worker, incident.remedy) for incident in incidents.values()] == [("j-w1-0", None)]
        assert result.desired.plan.checkpoint_request == 0


class TestPermission:
    def test_in_mode_recommend_the_remedy_is_applied_only_once_it_is_allowed(self) -> None:
        observation = with_warning(build_training())
        result = evaluate_job(observation, build_policy(mode=RemediationMode.RECOMMEND))
        assert (find_only_incident(result).outcome, result.desired.plan.checkpoint_request) == (
            IncidentOutcome.RECOMMENDED,
            0,
        )
        result = evaluate_job(apply_result(result, observation), build_policy(mode=RemediationMode.RECOMMEND))
        assert len(result.desired.state.incidents.list_names()) == 2, (
            "the current and the recommended incident have the same cause"
        )
        assert evaluate_job(apply_result(result, observation), build_policy()).desired.plan.checkpoint_request == 1

    def test_the_price_states_that_the_remedy_is_not_allowed(self) -> None:
        decision = gpu_warning.check_gpu_warnings(
            with_warning(build_training()), build_policy(allow=frozenset({Remedy.RESTART_RANKS}))
        )
        assert decision is not None
        (price,) = decision.remedies
        assert (decision.actions, price.reason) == ((), "spec.remediation.allow does not list it")
