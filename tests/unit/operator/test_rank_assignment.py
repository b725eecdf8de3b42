"""Rank assignment never blocks: each test is a state that a job once did not leave, or left the wrong way."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import pytest

from pacekeeper_analysis.protocol.plan import Plan, Stop
from pacekeeper_analysis.protocol.reports import FaultKind, FaultReport, LauncherState
from pacekeeper_operator.api.incident import IncidentCause, IncidentClass
from pacekeeper_operator.api.training_job import Remedy
from pacekeeper_operator.decide.evaluate import PassResult, evaluate_job
from pacekeeper_operator.decide.failures.start_failed import WARM_UP_TIMEOUT_SECONDS
from pacekeeper_operator.decide.placement.workforce import (
    POD_DELETION_OVERDUE_SECONDS,
    list_missing_workers,
    list_surplus_workers,
)
from pacekeeper_operator.observe.views import view_pod
from pacekeeper_operator.pods.queues import QueueDecision, apply_queue_decision
from pacekeeper_operator.state import state_codec
from pacekeeper_operator.state.cluster_view import FRESH_WORKER_SECONDS, LAUNCHER_UNRESPONSIVE_SECONDS, NodeView
from pacekeeper_operator.state.desired_state import Incident
from pacekeeper_operator.state.observation import Observation
from testing.operators.observations import (
    NOW,
    build_crash,
    build_fresh,
    build_job,
    build_policy,
    build_stalls,
    build_training,
    build_untrained,
    change_members,
    change_worker,
    list_decisions,
    with_pods,
)

NO_PROGRESS: dict[str, Any] = {"completed_step": False, "exit_code": 1, "error": "RuntimeError: CUDA error"}


def list_assigned_workers(result: PassResult) -> list[str]:
    return [member.worker for member in result.desired.plan.members]


def apply_result(result: PassResult, observation: Observation, **changes: Any) -> Observation:
    """Return the observation after a pass was written."""
    return replace(observation.with_desired(result.desired), **changes)


def list_created_pods(result: PassResult) -> list[str]:
    """Return the names of the pods to create."""
    return [worker.name for worker in list_missing_workers(result.observation)]


def list_deleted_pods(result: PassResult) -> list[tuple[str, bool]]:
    """Return the names of the pods to delete, and whether by force."""
    return [(view.name, view.record.force) for view in list_surplus_workers(result.observation)]


def find_only_decision(result: PassResult) -> Incident:
    (incident,) = list_decisions(result)
    return incident


def build_round_failures(observation: Observation) -> tuple[FaultReport, ...]:
    return tuple(
        FaultReport(
            f"{member.worker}-round-failed",
            FaultKind.ROUND_FAILED,
            member.worker,
            observation.progress.round,
            NOW - 60,
            observation.plan.membership,
        )
        for member in observation.plan.members
    )


class TestUnresponsive:
    def build_unresponsive(self, seconds: float = LAUNCHER_UNRESPONSIVE_SECONDS, spares: int = 1) -> Observation:
        return change_worker(build_training(spares=spares), "j-w1-0", heartbeat={"launcher_silent_seconds": seconds})

    def test_a_spare_takes_over_without_waiting_for_a_checkpoint_and_the_node_is_not_blamed(self) -> None:
        result = evaluate_job(self.build_unresponsive(), build_policy())
        assert list_assigned_workers(result) == ["j-w0-0", "j-w4-0", "j-w2-0", "j-w3-0"]
        assert list_deleted_pods(result) == [("j-w1-0", False)], (
            "with its grace period: the kubelet ends stopped processes"
        )
        assert list_created_pods(result) == ["j-w1-1"]
        incident = find_only_decision(result)
        assert (incident.cause, incident.class_, incident.worker) == (
            IncidentCause.WORKER_UNRESPONSIVE,
            IncidentClass.UNKNOWN,
            "j-w1-0",
        )
        assert incident.first_sign == NOW - LAUNCHER_UNRESPONSIVE_SECONDS
        assert not result.desired.state.incidents.quarantine_requests
        assert len(result.desired.state.budget.restarts) == 1

    def test_without_a_spare_its_pod_is_deleted_at_once_since_its_successor_needs_the_gpus(self) -> None:
        result = evaluate_job(self.build_unresponsive(spares=0), build_policy())
        assert (list_deleted_pods(result), list_created_pods(result)) == ([("j-w1-0", False)], ["j-w1-1"])
        observation = change_worker(apply_result(result, self.build_unresponsive(spares=0)), "j-w1-0", gone=True)
        members = {view.name: view for view in observation.workers if view.pod is not None}
        observation = with_pods(observation, state=LauncherState.WARM)
        observation = replace(observation, workers=tuple(members.get(view.name, view) for view in observation.workers))
        assert list_assigned_workers(evaluate_job(observation, build_policy())) == [
            "j-w0-0",
            "j-w1-1",
            "j-w2-0",
            "j-w3-0",
        ]

    def test_a_short_silence_is_no_failure(self) -> None:
        assert not list_decisions(
            evaluate_job(self.build_unresponsive(LAUNCHER_UNRESPONSIVE_SECONDS - 1), build_policy())
        )

    def test_ranks_that_cannot_be_killed_are_handled_the_same_way(self) -> None:
        observation = change_worker(
            build_training(), "j-w2-0", heartbeat={"unkillable_ranks": (2,), "state": LauncherState.FAILED}
        )
        observation = replace(observation, faults=build_round_failures(observation)[2:3])
        result = evaluate_job(observation, build_policy())
        assert list_assigned_workers(result)[2] == "j-w4-0"
        assert (find_only_decision(result).cause, "rank 2" in find_only_decision(result).message) == (
            IncidentCause.WORKER_UNRESPONSIVE,
            True,
        )

    def test_faults_reported_by_its_peers_are_settled_with_it(self) -> None:
        observation = self.build_unresponsive()
        faults = (
            *build_round_failures(observation),
            *build_stalls(observation, culprit=1)[:1],
            build_crash("j-w3-0", 3, noticed_at=NOW - 30),
        )
        result = evaluate_job(replace(observation, faults=faults), build_policy())
        assert find_only_decision(result).cause is IncidentCause.WORKER_UNRESPONSIVE
        assert {fault.name for fault in faults} <= set(result.desired.state.incidents.settled_faults)
        assert len(result.desired.state.budget.restarts) == 1

    @pytest.mark.parametrize("seconds", [LAUNCHER_UNRESPONSIVE_SECONDS / 2, LAUNCHER_UNRESPONSIVE_SECONDS])
    def test_failed_rounds_spend_no_budget_while_a_launcher_is_unresponsive(self, seconds: float) -> None:
        observation = self.build_unresponsive(seconds)
        may_not = build_policy(allow=frozenset({Remedy.RESTART_RANKS}))
        result = evaluate_job(replace(observation, faults=build_round_failures(observation)), may_not)
        assert result.desired.plan.membership == 1
        assert not result.desired.state.budget.restarts

    def test_an_unresponsive_spare_is_replaced_while_the_job_trains(self) -> None:
        observation = change_worker(build_training(), "j-w4-0", heartbeat={"launcher_silent_seconds": 60.0})
        result = evaluate_job(observation, build_policy())
        assert (list_deleted_pods(result), list_created_pods(result)) == ([("j-w4-0", False)], ["j-w4-1"])
        (incident,) = result.desired.state.incidents.open
        assert incident.live, "nothing is recovering"
        assert not result.desired.state.budget.restarts

    def test_an_unresponsive_worker_whose_ranks_have_ended_is_left_alone(self) -> None:
        observation = change_worker(self.build_unresponsive(), "j-w1-0", heartbeat={"state": LauncherState.FINISHED})
        assert not list_decisions(evaluate_job(observation, build_policy()))

    def test_with_the_budget_spent_the_job_fails_with_a_reason(self) -> None:
        observation = self.build_unresponsive()
        observation = observation.with_desired(observation.desired.with_budget(restarts=(NOW - 10,)))
        life = evaluate_job(observation, build_policy(max_restarts=1)).desired.state.lifecycle
        assert life.failed_reason == "RestartBudgetSpent"
        assert "unresponsive" in life.failed_message


class TestFinished:
    def test_exit_code_0_without_a_report_of_the_launcher_is_no_success(self) -> None:
        """`pacekeeper run … | tee log` whose launcher is killed."""
        observation = build_training(2, 1)
        for name in ("j-w0-0", "j-w1-0"):
            observation = change_worker(observation, name, pod={"exit_code": 0, "phase": "Succeeded"})
        result = evaluate_job(observation, build_policy())
        assert (result.desired.state.lifecycle.finished, result.desired.state.lifecycle.is_over) == ((), False)
        assert len(result.desired.state.budget.restarts) == 1, "it costs a restart: a command that always does it fails"
        unheard = replace(observation, workers=tuple(replace(view, heartbeat=None) for view in observation.workers))
        assert not evaluate_job(unheard, build_policy()).desired.state.lifecycle.is_over, (
            "a new operator restarts the job, too"
        )

    def test_a_workers_report_counts_after_its_pod_is_deleted(self) -> None:
        """One exits 0, and the other one's pod vanishes before its exit was seen."""
        observation = change_worker(
            build_training(2, 0), "j-w0-0", pod={"exit_code": 0, "finished": True, "phase": "Succeeded"}
        )
        observation = change_worker(observation, "j-w1-0", heartbeat={"state": LauncherState.FINISHED}, gone=True)
        assert evaluate_job(observation, build_policy()).desired.state.lifecycle.completed_at == NOW

    def test_finished_workers_are_stored_for_the_next_operator(self) -> None:
        observation = change_worker(build_training(2, 0), "j-w1-0", heartbeat={"state": LauncherState.FINISHED})
        first = evaluate_job(observation, build_policy())
        assert first.desired.state.lifecycle.finished == ("j-w1-0",)
        observation = change_worker(
            apply_result(first, observation), "j-w1-0", gone=True, heartbeat={}, silent_seconds=5.0
        )
        observation = replace(observation, workers=tuple(replace(view, heartbeat=None) for view in observation.workers))
        observation = change_worker(observation, "j-w0-0", pod={"exit_code": 0, "finished": True})
        assert evaluate_job(observation, build_policy()).desired.state.lifecycle.completed_at == NOW

    def test_a_pod_that_vanished_without_a_report_is_no_success_and_the_others_start_again(self) -> None:
        """The job finished while the operator was away: how the second worker ended is unknown."""
        observation = change_worker(
            build_training(2, 0), "j-w0-0", pod={"exit_code": 0, "finished": True, "phase": "Succeeded"}
        )
        observation = change_worker(observation, "j-w1-0", gone=True)
        observation = replace(observation, workers=tuple(replace(view, heartbeat=None) for view in observation.workers))
        result = evaluate_job(observation, build_policy())
        assert not result.desired.state.lifecycle.completed_at
        assert list_created_pods(result) == ["j-w0-1", "j-w1-1"]
        observation = with_pods(apply_result(result, observation), state=LauncherState.WARM)
        observation = change_worker(change_worker(observation, "j-w0-0", gone=True), "j-w1-0", gone=True)
        later = evaluate_job(observation, build_policy())
        assert sorted(list_assigned_workers(later)) == ["j-w0-1", "j-w1-1"]
        assert later.desired.plan.membership == 2
        assert later.desired.state.lifecycle.finished == ()

    def test_a_worker_lost_next_to_a_finished_one_is_replaced_and_the_finished_one_joins_again(self) -> None:
        observation = change_worker(build_training(), "j-w0-0", heartbeat={"state": LauncherState.FINISHED})
        result = evaluate_job(change_worker(observation, "j-w1-0", gone=True), build_policy())
        assert list_assigned_workers(result) == ["j-w0-0", "j-w4-0", "j-w2-0", "j-w3-0"]
        assert (result.desired.plan.membership, result.desired.state.lifecycle.finished) == (2, ())

    def test_a_worker_whose_trainer_has_ended_is_replaced_too(self) -> None:
        observation = change_worker(
            build_training(4, 2), "j-w0-0", pod={"exit_code": 0, "finished": True, "phase": "Succeeded"}
        )
        result = evaluate_job(change_worker(observation, "j-w1-0", gone=True), build_policy())
        assert list_assigned_workers(result) == ["j-w4-0", "j-w5-0", "j-w2-0", "j-w3-0"]
        later = evaluate_job(change_members(apply_result(result, observation), membership=2, round=2), build_policy())
        assert not later.desired.state.lifecycle.completed_at

    def test_without_spares_all_workers_wait_for_the_new_ones(self) -> None:
        observation = change_worker(
            build_training(4, 0), "j-w0-0", pod={"exit_code": 0, "finished": True, "phase": "Succeeded"}
        )
        observation = change_worker(observation, "j-w1-0", gone=True)
        result = evaluate_job(observation, build_policy())
        assert list_created_pods(result) == ["j-w0-1", "j-w1-1"]
        observation = change_worker(
            apply_result(result, observation), "j-w2-0", heartbeat={"state": LauncherState.FINISHED}
        )
        later = evaluate_job(observation, build_policy())
        assert later.desired == observation.desired
        assert list_created_pods(later) == ["j-w0-1", "j-w1-1"]

    def test_a_worker_that_finished_before_this_membership_has_not_finished_in_it(self) -> None:
        observation = change_members(build_training(), membership=2)
        observation = observation.with_desired(observation.desired.with_plan(membership=2))
        observation = change_worker(
            observation, "j-w0-0", pod={"exit_code": 0, "finished": True}, heartbeat={"membership": 1}
        )
        result = evaluate_job(observation, build_policy())
        assert result.desired.state.lifecycle.finished == ()
        assert list_assigned_workers(result)[0] == "j-w4-0"
        assert not result.desired.state.budget.restarts

    def test_a_worker_that_was_done_before_its_next_report_has_finished(self) -> None:
        warm = {"state": LauncherState.WARM, "membership": 0}
        observation = change_worker(
            build_training(1, 0), "j-w0-0", pod={"exit_code": 0, "finished": True}, heartbeat=warm
        )
        assert evaluate_job(observation, build_policy()).desired.state.lifecycle.completed_at == NOW

    @pytest.mark.parametrize("phase", ["Succeeded", "Running"])
    def test_a_container_that_exits_with_0_behind_a_pipe_is_no_success(self, phase: str) -> None:
        """Its launcher was killed: its last report is that its ranks run."""
        observation = build_training(1, 0)
        observation = change_worker(observation, "j-w0-0", pod={"exit_code": 0, "phase": phase}, silent_seconds=20.0)
        result = evaluate_job(observation, build_policy())
        assert not result.desired.state.lifecycle.completed_at
        assert list_created_pods(result) == ["j-w0-1"]
        assert "exited with 0, although its ranks had not finished" in find_only_decision(result).message
        assert len(result.desired.state.budget.restarts) == 1

    def test_the_last_heartbeat_of_a_worker_may_still_arrive(self) -> None:
        observation = change_worker(build_training(1, 0), "j-w0-0", pod={"exit_code": 0})
        result = evaluate_job(observation, build_policy())
        assert not result.desired.state.lifecycle.completed_at
        assert not list_decisions(result)
        reported = change_worker(observation, "j-w0-0", heartbeat={"state": LauncherState.FINISHED})
        assert evaluate_job(reported, build_policy()).desired.state.lifecycle.completed_at == NOW

    def test_nothing_is_done_while_the_other_workers_can_finish(self) -> None:
        observation = change_worker(build_training(), "j-w0-0", pod={"exit_code": 0, "finished": True})
        result = evaluate_job(observation, build_policy())
        assert (result.desired.plan.membership, result.desired.state.lifecycle.finished) == (1, ("j-w0-0",))

    def test_workers_that_wait_for_an_ended_trainer_get_another(self) -> None:
        """A rank crashed when another worker had finished and left: the next round can never form."""
        observation = change_worker(build_training(4, 1), "j-w0-0", pod={"exit_code": 0, "finished": True})
        observation = change_worker(
            observation, "j-w1-0", heartbeat={"state": LauncherState.GATHERING}, state_seconds=0.5
        )
        assert evaluate_job(observation, build_policy()).desired.plan.membership == 1, (
            "its report may be older than the others'"
        )
        observation = change_worker(observation, "j-w1-0", state_seconds=5.0)
        assert list_assigned_workers(evaluate_job(observation, build_policy())) == [
            "j-w4-0",
            "j-w1-0",
            "j-w2-0",
            "j-w3-0",
        ]
        assert evaluate_job(observation, build_policy(paused="maintenance")).desired.plan.membership == 1
        early = change_worker(observation, "j-w1-0", heartbeat={"round": 0})
        assert evaluate_job(early, build_policy()).desired.plan.membership == 1, (
            "it has not started the round that the other finished"
        )

    def test_a_launcher_that_has_joined_a_later_round_has_not_finished(self) -> None:
        observation = change_worker(build_training(), "j-w0-0", heartbeat={"state": LauncherState.FINISHED})
        observation = apply_result(evaluate_job(observation, build_policy()), observation)
        rejoined = change_worker(observation, "j-w0-0", heartbeat={"state": LauncherState.RUNNING, "round": 2})
        assert evaluate_job(rejoined, build_policy()).desired.state.lifecycle.finished == ()


class TestNoProgressRounds:
    def evaluate_failed_round(
        self, round_: int, observation: Observation, worker: str = "j-w1-0", rank: int = 1, **changes: Any
    ) -> PassResult:
        """Evaluate the pass after a round without a completed step."""
        fault = build_crash(worker, rank, round_, membership=observation.plan.membership, **{**NO_PROGRESS, **changes})
        observation = change_members(observation, round=round_ + 1, start={"first_step_at": None})
        return evaluate_job(replace(observation, faults=(fault,)), build_policy())

    def evaluate_two_failed_rounds(self, observation: Observation, **changes: Any) -> tuple[PassResult, Observation]:
        first = self.evaluate_failed_round(1, observation, **changes)
        assert not first.desired.state.lifecycle.failed_reason
        return self.evaluate_failed_round(2, apply_result(first, observation), **changes), observation

    def test_a_worker_that_fails_twice_is_first_replaced_by_a_spare(self) -> None:
        result, _ = self.evaluate_two_failed_rounds(build_untrained())
        assert not result.desired.state.lifecycle.failed_reason
        assert list_assigned_workers(result)[1] == "j-w4-0"
        assert result.desired.state.incidents.current[-1].remedy is Remedy.REPLACE_WORKER

    def test_the_same_error_on_the_spare_fails_the_script(self) -> None:
        result, observation = self.evaluate_two_failed_rounds(build_untrained())
        assert list_assigned_workers(result)[1] == "j-w4-0"
        observation = change_members(apply_result(result, observation), membership=2)
        third = self.evaluate_failed_round(3, observation, worker="j-w4-0")
        assert third.desired.state.lifecycle.failed_reason == "ScriptFailed"

    def test_the_same_error_on_two_workers_fails_the_script(self) -> None:
        first = self.evaluate_failed_round(1, build_untrained())
        observation = change_members(apply_result(first, build_untrained()), round=3, start={"first_step_at": None})
        both = tuple(build_crash(f"j-w{n}-0", n, 2, noticed_at=NOW - 1 + n / 10, **NO_PROGRESS) for n in (1, 3))
        assert (
            evaluate_job(replace(observation, faults=both), build_policy()).desired.state.lifecycle.failed_reason
            == "ScriptFailed"
        )

    def test_without_a_spare_the_same_error_twice_fails_the_job(self) -> None:
        result, _ = self.evaluate_two_failed_rounds(build_untrained(spares=0))
        assert result.desired.state.lifecycle.failed_reason == "ScriptFailed"
        assert "CUDA error" in result.desired.state.lifecycle.failed_message

    def test_the_job_waits_for_a_spare_that_starts(self) -> None:
        starting = change_worker(build_untrained(), "j-w4-0", heartbeat={"state": LauncherState.STARTING})
        result, observation = self.evaluate_two_failed_rounds(starting)
        assert not result.desired.state.lifecycle.failed_reason
        warm = change_worker(apply_result(result, observation), "j-w4-0", heartbeat={"state": LauncherState.WARM})
        assert list_assigned_workers(self.evaluate_failed_round(3, warm))[1] == "j-w4-0"
        silent = change_worker(starting, "j-w4-0", silent_seconds=FRESH_WORKER_SECONDS + 1)
        gone, _ = self.evaluate_two_failed_rounds(silent)
        assert gone.desired.state.lifecycle.failed_reason == "ScriptFailed"

    def test_two_signals_do_not_fail_the_script(self) -> None:
        result, _ = self.evaluate_two_failed_rounds(build_untrained(spares=0), exit_code=-9, error="")
        assert not result.desired.state.lifecycle.failed_reason
        assert len(result.desired.state.budget.restarts) == 2

    def test_two_signals_move_the_ranks_to_a_spare(self) -> None:
        result, _ = self.evaluate_two_failed_rounds(build_untrained(), exit_code=-9, error="")
        assert list_assigned_workers(result)[1] == "j-w4-0"

    def test_an_exit_code_without_an_error_is_the_scripts_own(self) -> None:
        result, _ = self.evaluate_two_failed_rounds(build_untrained(spares=0), exit_code=3, error="")
        assert result.desired.state.lifecycle.failed_reason == "ScriptFailed"

    def test_signals_on_two_workers_in_turn_move_no_worker(self) -> None:
        first = self.evaluate_failed_round(1, build_untrained(), exit_code=-9, error="")
        observation = apply_result(first, build_untrained())
        second = self.evaluate_failed_round(2, observation, worker="j-w2-0", rank=2, exit_code=-9, error="")
        assert list_assigned_workers(second) == ["j-w0-0", "j-w1-0", "j-w2-0", "j-w3-0"]
        assert not second.desired.state.lifecycle.failed_reason


class TestNeverReady:
    def build_starting(self, state: LauncherState | None = LauncherState.STARTING) -> Observation:
        """Build a job whose first worker's trainer runs since NOW without being warm; all others are warm."""
        start = build_fresh(2, 1)
        observation = with_pods(apply_result(evaluate_job(start, build_policy()), start), state=LauncherState.WARM)
        observation = change_worker(
            observation, "j-w0-0", pod={"started": True}, heartbeat={"state": LauncherState.STARTING}
        )
        if state is None:
            views = tuple(replace(v, heartbeat=None) if v.name == "j-w0-0" else v for v in observation.workers)
            observation = replace(observation, workers=views)
        return apply_result(evaluate_job(observation, build_policy()), observation)

    @pytest.mark.parametrize("state", [LauncherState.STARTING, None])
    def test_a_worker_that_is_not_ready_gives_its_ranks_to_a_spare_after_the_deadline(
        self, state: LauncherState | None
    ) -> None:
        observation = self.build_starting(state)
        patient = evaluate_job(replace(observation, now=NOW + WARM_UP_TIMEOUT_SECONDS), build_policy())
        assert (list_assigned_workers(patient), list_decisions(patient)) == ([], ())
        result = evaluate_job(replace(observation, now=NOW + WARM_UP_TIMEOUT_SECONDS + 1), build_policy())
        assert list_assigned_workers(result) == ["j-w1-0", "j-w2-0"]
        assert list_deleted_pods(result) == [("j-w0-0", False)]
        assert result.desired.state.placement.failed_starts == 1
        retry_at = result.desired.state.placement.retry_at
        assert retry_at is not None
        assert retry_at > NOW + WARM_UP_TIMEOUT_SECONDS, "a worker that may hang again is not hurried"
        assert find_only_decision(result).class_ is IncidentClass.UNKNOWN

    def test_the_job_waits_for_a_slow_image(self) -> None:
        start = build_fresh(2, 1)
        observation = with_pods(apply_result(evaluate_job(start, build_policy()), start), state=LauncherState.WARM)
        observation = change_worker(observation, "j-w0-0", heartbeat={"state": LauncherState.STARTING})
        observation = apply_result(evaluate_job(observation, build_policy()), observation)
        assert not list_decisions(
            evaluate_job(replace(observation, now=NOW + WARM_UP_TIMEOUT_SECONDS + 1), build_policy())
        )

    def test_the_deadline_outlives_the_operator_and_ends_with_being_warm(self) -> None:
        observation = self.build_starting()
        assert observation.state.placement.workers[0].starting_since == NOW
        content = state_codec.encode_state(observation.desired, "j")
        assert state_codec.decode_state(content, "j").desired.state.placement.workers[0].starting_since == NOW
        warm = change_worker(observation, "j-w0-0", heartbeat={"state": LauncherState.WARM})
        assert evaluate_job(warm, build_policy()).desired.state.placement.workers[0].starting_since is None

    def test_the_last_warm_up_duration_is_stored(self) -> None:
        observation = self.build_starting()
        later = replace(observation, now=NOW + 25.0)
        warm = change_worker(later, "j-w0-0", heartbeat={"state": LauncherState.WARM})
        desired = evaluate_job(warm, build_policy()).desired
        assert desired.state.placement.start_seconds == 25.0
        assert (
            state_codec.decode_state(state_codec.encode_state(desired, "j"), "j").desired.state.placement.start_seconds
            == 25.0
        )
        assert warm.with_desired(desired).restarts.start_seconds == 25.0
        young = replace(warm, operator_age=9.0)
        assert evaluate_job(young, build_policy()).desired.state.placement.start_seconds is None, (
            "it may have been warm earlier"
        )
        ended = change_worker(later, "j-w0-0", pod={"exit_code": 1})
        assert evaluate_job(ended, build_policy()).desired.state.placement.start_seconds is None, "it was never warm"

    def test_a_new_operator_without_a_heartbeat_of_a_warm_spare_stores_no_duration(self) -> None:
        observation = change_worker(build_training(), "j-w4-0", pod={"started": True})
        observation = replace(
            observation, workers=tuple(replace(view, heartbeat=None) for view in observation.workers), operator_age=5.0
        )
        result = evaluate_job(observation, build_policy())
        assert not any(worker.starting_since for worker in result.desired.state.placement.workers)


class TestSpares:
    def build_silent_spare(self, seconds: float = FRESH_WORKER_SECONDS + 1) -> Observation:
        return change_worker(build_training(), "j-w4-0", silent_seconds=seconds)

    def test_a_silent_spare_takes_no_ranks(self) -> None:
        gone = change_worker(self.build_silent_spare(), "j-w1-0", gone=True)
        assert list_assigned_workers(evaluate_job(gone, build_policy()))[1] == "j-w1-0"
        reported = change_worker(self.build_silent_spare(FRESH_WORKER_SECONDS - 1), "j-w1-0", gone=True)
        assert list_assigned_workers(evaluate_job(reported, build_policy()))[1] == "j-w4-0"

    def test_a_spare_on_a_lost_node_is_created_again(self) -> None:
        observation = self.build_silent_spare()
        down = {**observation.cluster_view.nodes, "node-4": NodeView("node-4", "u", ready=False)}
        lost = replace(observation, cluster_view=replace(observation.cluster_view, nodes=down))
        assert list_created_pods(evaluate_job(lost, build_policy())) == ["j-w4-1"]
        assert list_created_pods(evaluate_job(observation, build_policy())) == [], "the operator may be cut off"
        assert (
            list_created_pods(evaluate_job(change_worker(lost, "j-w4-0", silent_seconds=0.0), build_policy())) == []
        ), "it reports again"

    def build_suspended(self, **node: Any) -> Observation:
        """Build a suspended job; the pod of the spare stays in Terminating."""
        observation = build_training(2, 1, job=build_job(2, 1, suspend=True))
        observation = apply_result(evaluate_job(observation, build_policy()), observation)
        for name in ("j-w0-0", "j-w1-0"):
            observation = change_worker(observation, name, gone=True)
        observation = change_worker(observation, "j-w2-0", pod={"deleting": True, "delete_by": NOW + 30})
        nodes = {**observation.cluster_view.nodes, "node-2": NodeView("node-2", "u", **node)}
        return replace(observation, cluster_view=replace(observation.cluster_view, nodes=nodes))

    def test_a_pod_on_a_lost_node_does_not_block_resuming(self) -> None:
        observation = self.build_suspended(ready=False)
        assert list_deleted_pods(evaluate_job(observation, build_policy())) == [("j-w2-0", True)]

    def test_a_pod_whose_kubelet_never_confirms_does_not_block_resuming(self) -> None:
        observation = self.build_suspended()
        assert list_deleted_pods(evaluate_job(replace(observation, now=NOW + 30), build_policy())) == [], (
            "its grace period runs"
        )
        late = replace(observation, now=NOW + 30 + POD_DELETION_OVERDUE_SECONDS + 1)
        assert list_deleted_pods(evaluate_job(late, build_policy())) == [("j-w2-0", True)]

    def test_the_job_resumes_with_new_workers(self) -> None:
        observation = self.build_suspended(ready=False)
        observation = change_worker(
            apply_result(evaluate_job(observation, build_policy()), observation), "j-w2-0", gone=True
        )
        observation = replace(apply_result(evaluate_job(observation, build_policy()), observation), job=build_job(2, 1))
        result = evaluate_job(observation, build_policy())
        assert result.desired.plan.stop is Stop.NO
        assert list_created_pods(result) == ["j-w0-1", "j-w1-1", "j-w2-1"]


class TestOneEvent:
    def test_many_workers_lost_at_once_are_one_incident(self) -> None:
        observation = build_training(8, 1)
        for n in range(2, 8):
            observation = change_worker(observation, f"j-w{n}-0", gone=True)
        result = evaluate_job(observation, build_policy())
        incident = find_only_decision(result)
        assert (incident.worker, incident.rank) == ("j-w2-0", 2)
        assert incident.message.startswith("6 workers are lost: j-w2-0 (rank 2): its pod is gone; ")
        assert incident.message.endswith("; and 3 more")
        assert all(
            worker.leaving
            for worker in result.desired.state.placement.workers
            if 2 <= worker.ordinal < 8 and not worker.incarnation
        )
        assert len(list_created_pods(result)) == 6

    def test_many_workers_lost_at_once_cost_one_restart(self) -> None:
        observation = build_training()
        for n in (1, 2, 3):
            observation = change_worker(observation, f"j-w{n}-0", pod={"exit_code": 1, "exit_reason": "Error"})
        assert len(evaluate_job(observation, build_policy()).desired.state.budget.restarts) == 1

    def test_another_kind_of_loss_is_another_incident(self) -> None:
        observation = change_worker(build_training(), "j-w1-0", pod={"exit_code": 1, "exit_reason": "Error"})
        result = evaluate_job(change_worker(observation, "j-w2-0", gone=True), build_policy())
        assert {incident.worker for incident in list_decisions(result)} == {"j-w1-0", "j-w2-0"}


class TestGates:
    def build_waiting(self, gated: bool) -> Observation:
        start = build_fresh(job=build_job(2, 0, scheduling_timeout=60.0))
        observation = with_pods(apply_result(evaluate_job(start, build_policy()), start), placed=False)
        return change_worker(observation, "j-w1-0", pod={"scheduling_gated": gated})

    def test_the_time_for_placing_does_not_run_while_a_queue_holds_a_pod(self) -> None:
        observation = apply_result(
            evaluate_job(self.build_waiting(gated=True), build_policy()), self.build_waiting(gated=True)
        )
        result = evaluate_job(replace(observation, now=NOW + 10_000), build_policy())
        assert list_deleted_pods(result) == []
        assert result.desired == observation.desired, "nothing is written while it waits"

    def test_the_time_for_placing_starts_when_the_queue_releases_the_pod(self) -> None:
        observation = apply_result(
            evaluate_job(self.build_waiting(gated=True), build_policy()), self.build_waiting(gated=True)
        )
        freed = change_worker(replace(observation, now=NOW + 10_000), "j-w1-0", pod={"scheduling_gated": False})
        freed = apply_result(evaluate_job(freed, build_policy()), freed)
        assert list_deleted_pods(evaluate_job(replace(freed, now=NOW + 10_059), build_policy())) == []
        assert len(list_deleted_pods(evaluate_job(replace(freed, now=NOW + 10_061), build_policy()))) == 2

    def test_the_time_for_placing_does_not_run_while_a_queue_holds_the_job(self) -> None:
        """The job was never admitted, or was evicted while its pods were being placed."""
        queued = replace(build_job(2, 0, scheduling_timeout=60.0), queue="team")
        admitted, waiting = (
            apply_queue_decision(queued, QueueDecision(admitted=True)),
            apply_queue_decision(queued, QueueDecision(admitted=False, message="no quota")),
        )
        new = build_fresh(job=waiting)
        placing = build_fresh(job=admitted)
        placing = with_pods(apply_result(evaluate_job(placing, build_policy()), placing), placed=False)
        put_out = replace(placing, job=waiting, now=NOW + 50)
        for observation in (new, put_out):
            result = evaluate_job(observation, build_policy())
            gated_result = replace(apply_result(result, observation), workers=(), now=NOW + 10_000)
            result = evaluate_job(gated_result, build_policy())
            assert (list_created_pods(result), result.desired.state.placement.attempts) == ([], 0)
            let_in = replace(apply_result(result, gated_result), job=admitted)
            for _ in range(2):  # it is resumed, then placed
                let_in = apply_result(evaluate_job(let_in, build_policy()), let_in)
            let_in = with_pods(let_in, placed=False)
            assert len(let_in.workers) == 2
            assert list_deleted_pods(evaluate_job(replace(let_in, now=NOW + 10_059), build_policy())) == []
            assert len(list_deleted_pods(evaluate_job(replace(let_in, now=NOW + 10_061), build_policy()))) == 2

    def test_gates_and_running_trainers_are_read_from_the_pod(self) -> None:
        def pod(**status: object) -> dict[str, object]:
            metadata = {"name": "j-w0-0", "uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z"}
            return {"metadata": metadata, "spec": {}, "status": status}

        gate = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}
        assert view_pod(pod(conditions=[gate])).scheduling_gated
        assert not view_pod(pod(conditions=[{**gate, "reason": "Unschedulable"}])).scheduling_gated
        running = {"name": "trainer", "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}}
        assert view_pod(pod(containerStatuses=[running])).started
        assert not view_pod(pod(containerStatuses=[{"name": "pacekeeper-sidecar", "state": running["state"]}])).started


class TestClocks:
    def test_a_crash_dated_in_the_future_is_handled(self) -> None:
        observation = replace(build_training(), faults=(build_crash("j-w1-0", 1, noticed_at=NOW + 7200),))
        incident = find_only_decision(evaluate_job(observation, build_policy()))
        assert (incident.cause, incident.first_sign) == (IncidentCause.CRASH, NOW)

    def test_a_failed_round_dated_in_the_future_is_handled(self) -> None:
        observation = change_members(build_training(), state=LauncherState.FAILED)
        observation = replace(
            observation, workers=tuple(replace(view, state_seconds=5.0) for view in observation.workers)
        )
        late = tuple(replace(fault, noticed_at=NOW + 7200) for fault in build_round_failures(observation))
        assert (
            find_only_decision(evaluate_job(replace(observation, faults=late), build_policy())).cause
            is IncidentCause.ROUND_FAILED
        )

    def test_a_first_sign_is_no_older_than_the_last_restart(self) -> None:
        observation = change_members(build_training(), round=2)
        observation = observation.with_desired(observation.desired.with_budget(restarts=(NOW - 90, NOW - 40)))
        observation = replace(observation, faults=(build_crash("j-w1-0", 1, noticed_at=NOW - 7200),))
        assert find_only_decision(evaluate_job(observation, build_policy())).first_sign == NOW - 40

    def test_restarts_count_by_the_operators_clock(self) -> None:
        """With a clock two hours behind, each crash left the window at once, and restarts exceeded the limit."""
        observation, rounds = build_training(spares=0), 0
        while not observation.state.lifecycle.is_over and rounds < 10:
            rounds += 1
            observation = change_members(observation, round=rounds + 1, start={"first_step_at": None})
            fault = build_crash("j-w1-0", 1, rounds, noticed_at=NOW - 7200)
            observation = apply_result(
                evaluate_job(replace(observation, faults=(fault,)), build_policy(max_restarts=3)), observation
            )
        assert rounds == 4
        assert observation.state.lifecycle.failed_reason == "RestartBudgetSpent"


class TestAllowedLater:
    @pytest.mark.parametrize("first", [{"allow": frozenset({Remedy.RESTART_RANKS})}, {"paused": "maintenance"}])
    def test_a_remedy_is_applied_once_it_is_allowed(self, first: dict[str, Any]) -> None:
        observation = change_worker(build_training(), "j-w1-0", gone=True)
        refused = evaluate_job(observation, build_policy(**first))
        assert (list_assigned_workers(refused)[1], refused.desired.state.incidents.current[0].applied) == (
            "j-w1-0",
            None,
        )
        unchanged = evaluate_job(apply_result(refused, observation, now=NOW + 1), build_policy(**first))
        assert not list_decisions(unchanged)
        result = evaluate_job(apply_result(unchanged, observation, now=NOW + 2), build_policy())
        assert list_assigned_workers(result)[1] == "j-w4-0"
        assert result.desired.state.incidents.open[0].applied == NOW + 2

    def test_an_applied_remedy_is_not_repeated(self) -> None:
        observation = change_worker(build_training(spares=0), "j-w1-0", pod={"exit_code": 1})
        result = evaluate_job(observation, build_policy())
        repeated = evaluate_job(apply_result(result, observation, now=NOW + 1), build_policy())
        assert not list_decisions(repeated)
        assert len(repeated.desired.state.budget.restarts) == 1


class TestRounds:
    def build_next_plan(self, **changes: Any) -> Plan:
        return evaluate_job(
            replace(change_worker(build_training(), "j-w0-0", gone=True), **changes), build_policy()
        ).desired.plan

    def test_each_membership_has_its_own_secret(self) -> None:
        plan = self.build_next_plan(nonce="seven")
        assert plan.secret == hashlib.sha256(b"seven/2").hexdigest()
        assert plan.secret != self.build_next_plan(nonce="eight").secret
        assert plan.secret not in repr(plan)

    def test_there_is_no_secret_if_it_would_lock_out_a_member(self) -> None:
        """An older launcher or sidecar does not pass it on."""
        observation = change_worker(build_training(), "j-w2-0", heartbeat={"rendezvous_port": None})
        plan = evaluate_job(
            replace(change_worker(observation, "j-w0-0", gone=True), nonce="seven"), build_policy()
        ).desired.plan
        assert plan.secret == ""

    def test_the_known_step_time_is_part_of_the_plan(self) -> None:
        assert self.build_next_plan().step_seconds == 0.1
        silent = replace(build_training().metrics, step_seconds=None)
        assert self.build_next_plan(metrics=silent).step_seconds is None
        known = build_training()
        known = known.with_desired(known.desired.with_plan(step_seconds=0.4))
        observation = replace(change_worker(known, "j-w0-0", gone=True), metrics=silent)
        assert evaluate_job(observation, build_policy()).desired.plan.step_seconds == 0.4

    @pytest.mark.parametrize(("serving_port", "port"), [(31234, 31234), (None, Plan.store_port)])
    def test_the_first_member_serves_the_rendezvous_on_a_port_that_it_supports(
        self, serving_port: int | None, port: int
    ) -> None:
        observation = change_worker(build_training(), "j-w4-0", heartbeat={"rendezvous_port": serving_port})
        observation = change_worker(observation, "j-w0-0", gone=True)
        assert evaluate_job(observation, build_policy()).desired.plan.store_port == port
