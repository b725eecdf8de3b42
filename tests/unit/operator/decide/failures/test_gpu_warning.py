"""GPUs that show what comes before a fault: who moves, when, at what cost, and what is said of nodes."""

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


def warned(world: Observation, worker: str = "j-w1-0", *signs: GpuSign, **health: Any) -> Observation:
    """Its launcher says so; without signs, rows of its memory wait to be remapped."""
    shown = tuple(str(sign) for sign in signs or (GpuSign.ROWS_PENDING,))
    return change_worker(world, worker, heartbeat={"gpus": (GpuHealth("GPU-1", shown, **health),)})


def measured(
    sign: GpuSign = GpuSign.ROWS_PENDING, value: float = 1.0, world: Observation | None = None, **changes: Any
) -> Any:
    """DCGM says so of node 1."""
    found = replace(GpuValue("node-1", "3", str(sign), value), **changes)
    return replace(world or build_training(), metrics=JobMetrics(step_seconds=0.1, queried_at=NOW, gpu_signs=(found,)))


def decided(world: Observation) -> Decision:
    decision = gpu_warning.check_gpu_warnings(world, build_policy())
    assert decision is not None
    return decision


def again(thought: PassResult, world: Observation, **changes: Any) -> Observation:
    """The world after a pass was written."""
    return replace(world.with_desired(thought.desired), **changes)


def only(thought: PassResult) -> Incident:
    (incident,) = thought.desired.state.incidents.current
    return incident


def seats(thought: PassResult) -> list[str]:
    return [member.worker for member in thought.desired.plan.members]


class TestMove:
    def test_the_worker_gives_its_ranks_to_a_spare_once_the_checkpoint_is_there(self) -> None:
        world = warned(build_training())
        thought = evaluate_job(world, build_policy())
        assert (thought.desired.plan.checkpoint_request, seats(thought)[1]) == (1, "j-w1-0")
        late = again(thought, world, now=NOW + 10 * MEMBERSHIP_CHECKPOINT_WAIT_SECONDS)
        assert evaluate_job(late, build_policy()).desired.plan.membership == 1, (
            "it is waited for, since nothing is broken"
        )
        thought = evaluate_job(change_members(late, checkpoint={"request": 1}), build_policy())
        assert seats(thought) == ["j-w0-0", "j-w4-0", "j-w2-0", "j-w3-0"]

    def test_what_it_costs_and_what_is_said(self) -> None:
        decision = decided(warned(build_training()))
        assert decision.actions == (
            ReplaceWorker("j-w1-0", PENDING, dead=False, disruption=True, waits_for_checkpoint=True),
        )
        (price,) = decision.remedies
        assert (price.name, price.cost_seconds, price.chosen, price.reason) == ("ReplaceWorker", 5.5, True, EXPECTED)
        assert decision.message == f"a GPU of j-w1-0 is expected to fail: {PENDING}"
        assert (decision.class_, decision.remedy) == (IncidentClass.INFRASTRUCTURE, Remedy.REPLACE_WORKER)
        assert (decision.rank, decision.worker, decision.node) == (1, "j-w1-0", "node-1")
        assert decision.finding is not None
        assert (decision.finding.fault, decision.finding.signal_kinds) == (
            FaultClass.HARDWARE,
            frozenset({SignalKind.GPU}),
        )

    def test_it_burns_no_restart_and_the_job_is_running_meanwhile(self) -> None:
        world = warned(build_training())
        thought = evaluate_job(world, build_policy())
        assert thought.desired.state.budget.restarts == ()
        after = again(thought, world, now=NOW + 60)
        assert compute_phase(after) is JobPhase.RUNNING
        assert evaluate_job(after, build_policy()).desired.state.incidents.closed == ()

    def test_it_is_over_with_the_first_steps_of_the_next_round_and_no_step_is_lost(self) -> None:
        world = warned(build_training())
        world = again(evaluate_job(world, build_policy()), world, now=NOW + 5)
        world = again(
            evaluate_job(change_members(world, checkpoint={"request": 1}), build_policy()), world, now=NOW + 7
        )
        assert only(evaluate_job(world, build_policy())).outcome is None
        round_ = {"start": {"restored_step": 501, "first_step_at": NOW + 9}, "progress": {"step": 503}}
        world = replace(change_members(world, membership=2, round=2, checkpoint={"request": 1}, **round_), now=NOW + 10)
        incident = only(evaluate_job(world, build_policy()))
        assert (incident.outcome, incident.steps_lost, incident.recovered) == (IncidentOutcome.RECOVERED, 0, NOW + 9)

    def test_a_checkpoint_is_not_waited_for_where_the_gpu_fails_meanwhile(self) -> None:
        world = warned(build_training())
        world = again(evaluate_job(world, build_policy()), world, now=NOW + 5)
        broken = GpuValue("node-1", "3", "DCGM_FI_DEV_XID_ERRORS", 79.0)
        world = change_worker(replace(world, metrics=replace(world.metrics, gpu_values=(broken,))), "j-w1-0", gone=True)
        assert "j-w1-0" not in seats(evaluate_job(world, build_policy()))

    def test_it_survives_the_operators_restart(self) -> None:
        """Nobody has been heard yet, and Prometheus was not asked."""
        world = warned(build_training(spares=0))
        world = again(evaluate_job(world, build_policy()), world)
        blind = replace(world, workers=tuple(replace(view, heartbeat=None) for view in world.workers))
        assert only(evaluate_job(blind, build_policy())).outcome is None


class TestWhoIsWarnedOf:
    @pytest.mark.parametrize("sign", GpuSign)
    def test_signs_of_a_fault_move_and_witnesses_for_slowness_do_not(self, sign: GpuSign) -> None:
        for world in (warned(build_training(), "j-w1-0", sign), measured(sign)):
            assert (gpu_warning.check_gpu_warnings(world, build_policy()) is not None) is GPU_SIGN_MEANINGS[
                sign
            ].is_warning

    def test_a_sign_that_only_a_newer_launcher_knows_is_none(self) -> None:
        world = change_worker(build_training(), "j-w1-0", heartbeat={"gpus": (GpuHealth("GPU-1", ("SomethingNew",)),)})
        assert gpu_warning.check_gpu_warnings(world, build_policy()) is None

    def test_series_of_another_jobs_gpu_on_the_same_node_are_not_this_workers(self) -> None:
        world = change_worker(build_training(), "j-w1-0", heartbeat={"gpus": (GpuHealth("GPU-1"),)})
        assert gpu_warning.check_gpu_warnings(measured(world=world, uuid="GPU-9"), build_policy()) is None
        assert decided(measured(world=world, uuid="GPU-1")).worker == "j-w1-0"
        assert decided(measured(world=world, uuid="")).worker == "j-w1-0"
        assert gpu_warning.check_gpu_warnings(measured(node="node-9"), build_policy()) is None

    def test_the_figures_are_in_the_words(self) -> None:
        assert (
            "PCIe link repeats packets (132 in ten minutes)" in decided(measured(GpuSign.PCIE_REPLAYS, 132.4)).message
        )
        told = decided(warned(build_training(), "j-w1-0", GpuSign.PCIE_REPLAYS, pcie_replays=99))
        assert "(99 in ten minutes)" in told.message

    def test_a_slow_ranks_evidence_has_the_witnesses_too(self) -> None:
        world = warned(
            measured(GpuSign.SLOW_CLOCK, 1400.0), "j-w1-0", GpuSign.PCIE_LOW, pcie_width=8, pcie_generation=4
        )
        assert gpu_warning.describe_gpu_signs(world, world.find_worker("j-w1-0")) == (
            "GPU-1: its PCIe link has been below its maximum from the start (8 lanes of generation 4)",
            "GPU 3 of node-1: its clock is below that of its peers under load (1400 MHz)",
        )
        assert gpu_warning.describe_gpu_signs(world, world.find_worker("j-w2-0")) == ()
        assert gpu_warning.describe_gpu_signs(world, None) == ()

    def test_who_is_given_up_is_not_given_up_again(self) -> None:
        world = warned(build_training())
        after = again(evaluate_job(world, build_policy()), world)
        assert gpu_warning.check_gpu_warnings(after, build_policy()) is None


class TestNodes:
    def test_a_launchers_word_touches_none(self) -> None:
        thought = evaluate_job(warned(build_training()), build_policy())
        assert thought.desired.state.incidents.quarantine_requests == ()

    def test_nor_do_series_that_the_exporter_may_have_labelled_itself(self) -> None:
        thought = evaluate_job(measured(trusted=False), build_policy())
        assert thought.desired.state.incidents.quarantine_requests == ()
        assert thought.desired.plan.checkpoint_request == 1, "the job is helped either way"

    def test_series_that_the_platform_vouches_for_are_a_witness(self) -> None:
        (wanted,) = evaluate_job(measured(trusted=True), build_policy()).desired.state.incidents.quarantine_requests
        assert (wanted.node, wanted.witness) == ("node-1", Witness.GPU_SERIES)
        assert wanted.reason == "GPU 3 of node-1: memory rows wait for a reset of the GPU to be remapped"

    def test_where_the_worker_stays_the_node_is_left_alone(self) -> None:
        thought = evaluate_job(measured(trusted=True, world=build_training(spares=0)), build_policy())
        assert thought.desired.state.incidents.quarantine_requests == ()

    def test_one_that_was_left_for_a_warning_is_not_left_again_for_one(self) -> None:
        """Its next worker would be moved, and the next, for as long as the GPU is not reset."""

        def after(**changes: Any) -> Decision:
            past = replace(
                PastIncident(IncidentCause.GPU_WARNING, NOW - 60, 9.0, worker="j-w1-9", node="node-1"), **changes
            )
            world = warned(build_training())
            return decided(world.with_desired(world.desired.with_incidents(past=(past,))))

        (price,) = after().remedies
        assert (after().actions, price.chosen) == ((), False)
        assert price.reason == "another worker had such a warning on node-1 before: the node needs an inspection"
        for other in (after(node="node-2"), after(worker="j-w1-0"), after(cause=IncidentCause.GPU_ERROR)):
            assert other.actions


class TestWithoutASpare:
    def test_it_is_written_down_and_acted_upon_once_there_is_one(self) -> None:
        none = change_worker(warned(build_training()), "j-w4-0", silent_seconds=99.0)
        thought = evaluate_job(none, build_policy())
        waits = only(thought)
        assert (waits.applied, waits.remedy, waits.outcome) == (None, None, None)
        assert [price.reason for price in waits.remedies] == ["no spare is warm"]
        later = again(thought, none, now=NOW + 300)
        assert only(evaluate_job(later, build_policy())) == waits, "it is written once"
        thought = evaluate_job(change_worker(later, "j-w4-0", silent_seconds=0.5), build_policy())
        acted = only(thought)
        assert (acted.name, acted.applied, acted.remedy) == (waits.name, NOW + 300, Remedy.REPLACE_WORKER)
        assert acted.first_sign == NOW
        assert thought.desired.plan.checkpoint_request == 1

    def test_it_is_one_incident_over_all_rounds(self) -> None:
        world = warned(build_training(spares=0))
        thought = evaluate_job(world, build_policy())
        later = change_members(again(thought, world, now=NOW + 60), round=2)
        assert (
            evaluate_job(later, build_policy()).desired.state.incidents.current
            == thought.desired.state.incidents.current
        )

    def test_it_is_over_when_the_sign_is_and_comes_back_as_another_one(self) -> None:
        world = replace(build_training(spares=0), metrics=JobMetrics(step_seconds=0.1, queried_at=NOW))
        thought = evaluate_job(warned(world), build_policy())
        thought = evaluate_job(again(thought, world, now=NOW + 9), build_policy())
        assert (only(thought).outcome, only(thought).recovered) == (IncidentOutcome.RECOVERED, NOW + 9)
        thought = evaluate_job(warned(again(thought, world, now=NOW + 20)), build_policy())
        assert [incident.outcome for incident in thought.desired.state.incidents.current] == [
            IncidentOutcome.RECOVERED,
            None,
        ]

    def test_two_warned_workers_do_not_wait_for_the_same_spare(self) -> None:
        thought = evaluate_job(warned(warned(build_training()), "j-w2-0"), build_policy())
        incidents = thought.desired.state.incidents.current
        assert [(i.worker, i.remedy) for i in incidents] == [("j-w1-0", Remedy.REPLACE_WORKER), ("j-w2-0", None)]

    def test_it_hides_no_straggler(self) -> None:
        """Nothing is being measured, for nothing was done."""
        world = warned(build_training(spares=0))
        after = again(evaluate_job(world, build_policy()), world)
        after = after.with_desired(after.desired.with_adaptation(suppressed_relative_time=2.0))
        metrics = JobMetrics(step_seconds=0.1, relative_time=2.0, peer_slowdown=9.0, wait_share=0.0)
        assert (
            evaluate_job(replace(after, metrics=metrics), build_policy()).desired.state.adaptation.investigation
            is not None
        )


class TestSpares:
    def test_one_that_is_warned_of_goes_at_once_and_nobody_moves_to_it(self) -> None:
        thought = evaluate_job(warned(warned(build_training()), "j-w4-0"), build_policy())
        incidents = {incident.worker: incident for incident in thought.desired.state.incidents.current}
        spare = incidents.pop("j-w4-0")
        assert (spare.remedy, spare.outcome) == (Remedy.REPLACE_WORKER, IncidentOutcome.RECOVERED)
        assert [(incident.worker, incident.remedy) for incident in incidents.values()] == [("j-w1-0", None)]
        assert thought.desired.plan.checkpoint_request == 0


class TestLeave:
    def test_in_mode_recommend_it_is_only_written_and_done_once_that_is_allowed(self) -> None:
        world = warned(build_training())
        thought = evaluate_job(world, build_policy(mode=RemediationMode.RECOMMEND))
        assert (only(thought).outcome, thought.desired.plan.checkpoint_request) == (IncidentOutcome.RECOMMENDED, 0)
        thought = evaluate_job(again(thought, world), build_policy(mode=RemediationMode.RECOMMEND))
        assert len(thought.desired.state.incidents.list_names()) == 2, "current and recommended, of the one"
        assert evaluate_job(again(thought, world), build_policy()).desired.plan.checkpoint_request == 1

    def test_without_leave_to_replace_it_says_so(self) -> None:
        decision = gpu_warning.check_gpu_warnings(
            warned(build_training()), build_policy(allow=frozenset({Remedy.RESTART_RANKS}))
        )
        assert decision is not None
        (price,) = decision.remedies
        assert (decision.actions, price.reason) == ((), "spec.remediation.allow does not list it")
