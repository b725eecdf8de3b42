"""Whole passes over a job, from one observation to the next: decisions, desired state, and effects."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pacekeeper_analysis.protocol.plan import Stop
from pacekeeper_analysis.protocol.reports import LauncherState
from pacekeeper_operator.api.conditions import JobCondition, Reason
from pacekeeper_operator.api.incident import IncidentCause, IncidentClass, IncidentOutcome
from pacekeeper_operator.api.training_job import JobPhase, JobStatus, RemediationMode, Remedy, RunPolicySpec
from pacekeeper_operator.decide.effects import SyncWorkload
from pacekeeper_operator.decide.evaluate import PassResult, evaluate_job, list_effects
from pacekeeper_operator.decide.lifecycle.status import build_job_status
from pacekeeper_operator.decide.placement.workforce import (
    OLDER_JOB_TURN_SECONDS,
    list_missing_workers,
    list_surplus_workers,
)
from pacekeeper_operator.pods.queues import restore_queue_decision
from pacekeeper_operator.state.desired_state import DesiredState, PastIncident
from pacekeeper_operator.state.job_metrics import JobMetrics
from pacekeeper_operator.state.observation import Observation
from pacekeeper_operator.state.policy import Policy
from testing.operators.observations import (
    NOW,
    build_crash,
    build_fresh,
    build_job,
    build_policy,
    build_stall,
    build_stalls,
    build_training,
    build_untrained,
    change_members,
    change_worker,
    list_decisions,
    with_pods,
)


def list_members(desired: DesiredState) -> list[str]:
    return [member.worker for member in desired.plan.members]


def apply_result(result: PassResult, observation: Observation, **changes: object) -> Observation:
    """Return the observation after the result of a pass was written."""
    return replace(observation.with_desired(result.desired), **changes)  # type: ignore[arg-type]


class TestStart:
    def test_workers_are_recorded_before_pods_are_created(self) -> None:
        result = evaluate_job(build_fresh(replicas=2, spares=1), build_policy())
        assert [worker.name for worker in result.desired.state.placement.workers] == ["j-w0-0", "j-w1-0", "j-w2-0"]
        assert list_missing_workers(result.observation) == result.desired.state.placement.workers

    def test_a_pass_that_is_repeated_after_the_write_changes_nothing(self) -> None:
        observation = build_fresh()
        result = evaluate_job(observation, build_policy())
        repeated = evaluate_job(apply_result(result, observation), build_policy())
        assert repeated.desired == result.desired
        assert list_missing_workers(repeated.observation) == list_missing_workers(
            result.observation
        )  # the pods do not exist yet

    def test_no_membership_begins_until_enough_workers_are_warm(self) -> None:
        observation = with_pods(
            apply_result(evaluate_job(build_fresh(), build_policy()), build_fresh()), state=LauncherState.WARM
        )
        starting = change_worker(observation, "j-w1-0", heartbeat={"state": LauncherState.STARTING})
        starting = change_worker(starting, "j-w2-0", heartbeat={"state": LauncherState.STARTING})
        assert evaluate_job(starting, build_policy()).desired.plan.members == ()
        only_the_spare = change_worker(observation, "j-w1-0", heartbeat={"state": LauncherState.STARTING})
        assert (
            evaluate_job(only_the_spare, build_policy()).desired.plan.members == ()
        )  # a spare avoids the nodes of the others
        plan = evaluate_job(observation, build_policy()).desired.plan
        assert list_members(DesiredState(plan, observation.state)) == ["j-w0-0", "j-w1-0"]
        assert (plan.membership, plan.round, plan.restarts) == (1, 1, 10)

    def test_if_not_all_pods_are_placed_in_time_all_leave_and_are_created_later(self) -> None:
        observation = build_fresh(job=build_job(2, 0, scheduling_timeout=60.0))
        observation = with_pods(apply_result(evaluate_job(observation, build_policy()), observation), placed=False)
        early = evaluate_job(replace(observation, now=NOW + 59), build_policy())
        assert not list_surplus_workers(early.observation)
        late = evaluate_job(replace(observation, now=NOW + 61), build_policy())
        assert {view.name for view in list_surplus_workers(late.observation)} == {"j-w0-0", "j-w1-0"}
        assert late.desired.state.placement.attempts == 1
        without_pods = replace(apply_result(late, observation), workers=(), now=NOW + 62)
        without_pods = without_pods.with_desired(without_pods.desired)
        waiting = evaluate_job(without_pods, build_policy())
        assert not list_missing_workers(waiting.observation)
        retry_at = waiting.desired.state.placement.retry_at
        assert retry_at is not None
        next_attempt = evaluate_job(replace(apply_result(waiting, without_pods), now=retry_at + 1), build_policy())
        assert [worker.name for worker in list_missing_workers(next_attempt.observation)] == ["j-w0-1", "j-w1-1"]

    def test_a_job_waits_for_an_older_one_after_its_first_failure(self) -> None:
        observation = build_fresh()
        observation = observation.with_desired(observation.desired.with_placement(retry_at=NOW))
        after_older_job = replace(
            observation, cluster_view=replace(observation.cluster_view, older_waiting_job="older")
        )
        assert list_missing_workers(evaluate_job(observation, build_policy()).observation)
        assert not list_missing_workers(
            evaluate_job(replace(after_older_job, now=NOW + OLDER_JOB_TURN_SECONDS - 1), build_policy()).observation
        )
        late = evaluate_job(replace(after_older_job, now=NOW + OLDER_JOB_TURN_SECONDS), build_policy()).observation
        assert list_missing_workers(late), "an older job that can never be placed does not block others indefinitely"

    def test_a_trainer_that_ends_before_it_is_ready_is_retried_once_and_then_fails_the_job(self) -> None:
        observation = with_pods(apply_result(evaluate_job(build_fresh(1, 0), build_policy()), build_fresh(1, 0)))
        observation = change_worker(observation, "j-w0-0", pod={"exit_code": 127, "exit_message": "no such command"})
        first = evaluate_job(observation, build_policy())
        assert not first.desired.state.lifecycle.failed_reason
        assert first.desired.state.placement.find_worker("j-w0-1") is not None
        observation = with_pods(apply_result(first, observation))
        second = evaluate_job(
            change_worker(observation, "j-w0-1", pod={"exit_code": 127, "exit_message": "no such command"}),
            build_policy(),
        )
        assert second.desired.state.lifecycle.failed_reason == "ScriptFailed"
        assert "no such command" in second.desired.state.lifecycle.failed_message

    def test_an_image_that_cannot_be_pulled_fails_the_job_after_the_scheduling_timeout(self) -> None:
        start = build_fresh(1, 0, job=build_job(1, 0, scheduling_timeout=60.0))
        observation = with_pods(apply_result(evaluate_job(start, build_policy()), start))
        observation = change_worker(
            observation, "j-w0-0", pod={"waiting_reason": "ErrImagePull", "waiting_message": "no such host"}
        )
        assert not evaluate_job(
            replace(observation, now=NOW + 30), build_policy()
        ).desired.state.lifecycle.failed_reason
        wrong_clock = evaluate_job(replace(observation, now=NOW + 61, clock_agrees=False), build_policy())
        assert not wrong_clock.desired.state.lifecycle.failed_reason, "the clock may be wrong"
        late = evaluate_job(replace(observation, now=NOW + 61), build_policy()).desired.state
        assert (late.lifecycle.failed_reason, "no such host" in late.lifecycle.failed_message) == (
            "ImagePullFailed",
            True,
        )


class TestCrash:
    def test_the_operator_counts_a_restart_by_the_launchers(self) -> None:
        observation = replace(build_training(), faults=(build_crash("j-w1-0", 1),))
        observation = change_members(observation, round=2, start={"first_step_at": None})
        result = evaluate_job(observation, build_policy())
        state = result.desired.state
        assert result.desired.plan.members == observation.plan.members
        assert result.desired.plan.membership == 1
        assert [incident.cause for incident in state.incidents.current] == [IncidentCause.CRASH]
        assert len(state.budget.restarts) == 1
        # The launchers have used one of ten: the plan still allows nine more in this membership.
        assert result.desired.plan.restarts == 10
        assert "j-w1-0-rank-1-round-1" in state.incidents.settled_faults

    def test_recovery_is_the_first_step_of_the_next_round_on_every_member(self) -> None:
        observation = change_members(
            replace(build_training(), faults=(build_crash("j-w1-0", 1),)), round=2, start={"first_step_at": None}
        )
        observation = apply_result(evaluate_job(observation, build_policy()), observation, now=NOW + 1)
        one_member = change_worker(
            observation, "j-w0-0", heartbeat={"start": {"first_step_at": NOW + 0.7, "restored_step": 496}}
        )
        assert evaluate_job(one_member, build_policy()).desired.state.incidents.open
        all_members = change_members(
            observation, start={"first_step_at": NOW + 0.8, "restored_step": 496}, progress={"step": 497}
        )
        (incident,) = evaluate_job(all_members, build_policy()).desired.state.incidents.current
        assert incident.outcome is IncidentOutcome.RECOVERED
        assert incident.recovered == NOW + 0.8
        assert incident.steps_lost == 4

    def test_a_late_report_of_the_same_round_opens_no_second_incident(self) -> None:
        observation = change_members(
            replace(build_training(), faults=(build_crash("j-w1-0", 1),)), round=2, start={"first_step_at": None}
        )
        observation = apply_result(
            evaluate_job(observation, build_policy()), observation, faults=(build_crash("j-w2-0", 2),)
        )
        result = evaluate_job(observation, build_policy())
        assert len(result.desired.state.incidents.current) == 1
        assert len(result.desired.state.budget.restarts) == 1
        assert "j-w2-0-rank-2-round-1" in result.desired.state.incidents.settled_faults

    @pytest.mark.parametrize(
        ("exit_code", "error"),
        [
            (1, "RuntimeError: Connection closed by peer"),
            (-6, "[Rank 0] Process group watchdog thread terminated with exception: NCCL error: remote process exited"),
        ],
    )
    def test_a_rank_that_lost_a_peer_is_not_blamed(self, exit_code: int, error: str) -> None:
        consequence = build_crash("j-w0-0", 0, exit_code=exit_code, error=error, noticed_at=NOW - 1)
        observation = replace(build_training(), faults=(consequence, build_crash("j-w1-0", 1)))
        (incident,) = evaluate_job(change_members(observation, round=2), build_policy()).desired.state.incidents.current
        assert incident.rank == 1

    def test_two_rounds_without_a_step_and_with_the_same_error_fail_the_job(self) -> None:
        error = "Traceback …\nValueError: no such file"
        faults = (
            build_crash("j-w0-0", 0, 1, completed_step=False, exit_code=1, error=error, noticed_at=NOW - 9),
            build_crash("j-w1-0", 1, 2, completed_step=False, exit_code=1, error=error, noticed_at=NOW - 5),
        )
        desired = evaluate_job(
            change_members(replace(build_untrained(), faults=faults), round=2), build_policy()
        ).desired
        assert desired.state.lifecycle.failed_reason == "ScriptFailed"
        assert "ValueError: no such file" in desired.state.lifecycle.failed_message
        assert desired.plan.stop is Stop.FINISH

    def test_the_same_error_after_rounds_that_did_not_start_fails_the_job(self) -> None:
        error = {"completed_step": False, "exit_code": 1, "error": "ValueError: y"}
        observation = change_members(
            replace(build_untrained(), faults=(build_crash("j-w0-0", 0, 1, **error),)),
            round=2,
            start={"first_step_at": None},
        )
        observation = apply_result(
            evaluate_job(observation, build_policy()),
            observation,
            faults=(build_crash("j-w1-0", 1, 4, **error),),
            now=NOW + 60,
        )
        assert evaluate_job(observation, build_policy()).desired.state.lifecycle.failed_reason == "ScriptFailed"

    def test_failed_launchers_are_explained_by_the_crash(self) -> None:
        observation = change_members(
            replace(build_training(), faults=(build_crash("j-w0-0", 0, 1, noticed_at=NOW),)), state="Failed"
        )
        assert evaluate_job(observation, build_policy()).desired.plan.membership == 1

    @pytest.mark.parametrize("second", [{"completed_step": True}, {"error": "KeyError: 'x'"}])
    def test_another_error_or_a_completed_step_does_not_fail_the_job(self, second: dict[str, object]) -> None:
        first = {"completed_step": False, "exit_code": 1, "error": "ValueError: y", "noticed_at": NOW - 9}
        faults = (build_crash("j-w0-0", 0, 1, **first), build_crash("j-w0-0", 0, 2, **{**first, **second}))
        desired = evaluate_job(
            change_members(replace(build_training(), faults=faults), round=3), build_policy()
        ).desired
        assert not desired.state.lifecycle.failed_reason

    def test_without_a_restart_left_the_job_fails_and_the_message_names_the_limit(self) -> None:
        observation = replace(build_training(), faults=(build_crash("j-w1-0", 1),))
        observation = change_members(observation, round=2)
        observation = observation.with_desired(observation.desired.with_budget(restarts=(NOW - 10, NOW - 5)))
        state = evaluate_job(observation, build_policy(max_restarts=2)).desired.state
        assert state.lifecycle.failed_reason == "RestartBudgetSpent"
        assert "maxRestarts" in state.lifecycle.failed_message

    def test_restarts_outside_of_the_window_do_not_count(self) -> None:
        observation = change_members(replace(build_training(), faults=(build_crash("j-w1-0", 1),)), round=2)
        observation = observation.with_desired(observation.desired.with_budget(restarts=(NOW - 4000, NOW - 3700)))
        assert not evaluate_job(observation, build_policy(max_restarts=2)).desired.state.lifecycle.failed_reason

    def test_out_of_memory_moves_the_rank_once_and_then_blames_the_script(self) -> None:
        observation = replace(build_training(), faults=(build_crash("j-w1-0", 1, out_of_memory=True),))
        result = evaluate_job(observation, build_policy())
        assert list_members(result.desired)[1] == "j-w4-0"
        past = PastIncident(IncidentCause.OUT_OF_MEMORY, NOW - 60, 3.0, rank=1, worker="j-w9-0")
        moved_before = observation.with_desired(observation.desired.with_incidents(past=(past,)))
        result = evaluate_job(moved_before, build_policy())
        assert list_members(result.desired)[1] == "j-w1-0"
        assert result.desired.state.incidents.current[0].class_ is IncidentClass.APPLICATION


class TestHang:
    def test_the_culprit_is_named_and_the_same_members_begin_a_new_round(self) -> None:
        observation = build_training()
        result = evaluate_job(replace(observation, faults=build_stalls(observation, culprit=2)), build_policy())
        (incident,) = result.desired.state.incidents.current
        assert (incident.cause, incident.rank, incident.worker, incident.node) == (
            IncidentCause.HANG,
            2,
            "j-w2-0",
            "node-2",
        )
        assert incident.first_sign == pytest.approx(NOW - 3.1)
        assert result.desired.plan.membership == 2
        assert result.desired.plan.round == 2
        assert list_members(result.desired) == list_members(observation.desired)

    def test_no_decision_is_made_until_all_workers_report_a_stall(self) -> None:
        observation = build_training()
        sleeping = [
            replace(fault, ranks=tuple(replace(rank, process_state="S") for rank in fault.ranks))
            for fault in build_stalls(observation, culprit=2)[:-1]
        ]
        result = evaluate_job(replace(observation, faults=tuple(sleeping)), build_policy())
        assert result.desired.plan.membership == 1
        assert not list_decisions(result)

    def test_a_repeated_hang_on_the_same_worker_moves_the_rank(self) -> None:
        observation = build_training()
        past = PastIncident(IncidentCause.HANG, NOW - 100, 5.0, rank=2, worker="j-w2-0", node="node-2")
        observation = observation.with_desired(observation.desired.with_incidents(past=(past,)))
        result = evaluate_job(replace(observation, faults=build_stalls(observation, culprit=2)), build_policy())
        assert list_members(result.desired)[2] == "j-w4-0"
        assert result.desired.state.incidents.current[0].remedy is Remedy.REPLACE_WORKER

    def test_a_hang_that_follows_the_rank_is_of_the_application(self) -> None:
        observation = build_training()
        past = PastIncident(IncidentCause.HANG, NOW - 100, 5.0, rank=2, worker="j-w7-0", node="node-7")
        observation = observation.with_desired(observation.desired.with_incidents(past=(past,)))
        result = evaluate_job(replace(observation, faults=build_stalls(observation, culprit=2)), build_policy())
        assert list_members(result.desired) == list_members(observation.desired)
        assert result.desired.state.incidents.current[0].class_ is IncidentClass.APPLICATION

    def test_a_hang_that_stays_with_the_node_requests_its_quarantine(self) -> None:
        observation = build_training()
        past = PastIncident(IncidentCause.HANG, NOW - 100, 5.0, rank=3, worker="j-w8-0", node="node-2")
        observation = observation.with_desired(observation.desired.with_incidents(past=(past,)))
        result = evaluate_job(replace(observation, faults=build_stalls(observation, culprit=2)), build_policy())
        assert list_members(result.desired)[2] == "j-w4-0"
        assert [request.node for request in result.desired.state.incidents.quarantine_requests] == ["node-2"]

    def test_repeated_hangs_of_one_rank_of_one_job_request_no_quarantine(self) -> None:
        observation = build_training()
        past = tuple(
            PastIncident(IncidentCause.HANG, NOW - n, 5.0, rank=2, worker="j-w2-0", node="node-2") for n in range(5)
        )
        observation = observation.with_desired(observation.desired.with_incidents(past=past))
        assert not evaluate_job(
            replace(observation, faults=build_stalls(observation, culprit=2)), build_policy()
        ).desired.state.incidents.quarantine_requests

    def test_a_stall_that_has_ended_is_settled_and_has_no_later_effect(self) -> None:
        """All waited in a slow collective and continued. The next stall of one worker does not concern the others."""
        observation = build_training()
        stalls = tuple(build_stall(member.worker, member.ranks[0]) for member in observation.plan.members)
        first = evaluate_job(replace(observation, faults=stalls), build_policy())
        assert not list_decisions(first)
        newer = build_stall("j-w0-0", 0, step=600)
        newer = replace(newer, name="j-w0-0-stall-1-2", ranks=(replace(newer.ranks[0], step=600, sequence=90),))
        later = change_members(apply_result(first, observation), progress={"step": 600})
        second = evaluate_job(replace(later, faults=(*stalls, newer)), build_policy())
        assert not list_decisions(second)
        assert {fault.name for fault in stalls} <= set(second.desired.state.incidents.settled_faults)
        assert newer.name not in second.desired.state.incidents.settled_faults

    def test_a_stall_of_the_previous_round_does_not_hide_the_next_hang(self) -> None:
        """The launchers have begun a round by themselves, in the same membership."""
        observation = change_members(build_training(), round=2)
        old_stall = build_stall("j-w1-0", 1, round_=1)
        hanging = tuple(
            replace(fault, name=f"{fault.name}-2", round=2) for fault in build_stalls(observation, culprit=2)
        )
        result = evaluate_job(replace(observation, faults=(old_stall, *hanging)), build_policy())
        (incident,) = result.desired.state.incidents.current
        assert (incident.cause, incident.rank) == (IncidentCause.HANG, 2)
        assert old_stall.name in result.desired.state.incidents.settled_faults


class TestWorkerLost:
    def test_a_spare_takes_the_ranks_at_once_and_a_new_spare_is_created(self) -> None:
        observation = build_training()
        result = evaluate_job(change_worker(observation, "j-w1-0", gone=True), build_policy())
        assert list_members(result.desired) == ["j-w0-0", "j-w4-0", "j-w2-0", "j-w3-0"]
        assert (result.desired.plan.membership, result.desired.plan.round) == (2, 2)
        assert [worker.name for worker in list_missing_workers(result.observation)] == ["j-w1-1"]
        assert not result.desired.state.budget.restarts  # a disruption uses no budget

    def test_a_worker_whose_pod_is_being_deleted_first_gets_a_checkpoint(self) -> None:
        observation = change_worker(build_training(), "j-w1-0", pod={"deleting": True, "delete_by": NOW + 30})
        result = evaluate_job(observation, build_policy())
        assert result.desired.plan.checkpoint_request == 1
        assert list_members(result.desired)[1] == "j-w1-0"
        answered = change_members(apply_result(result, observation), checkpoint={"request": 1})
        assert list_members(evaluate_job(answered, build_policy()).desired)[1] == "j-w4-0"

    def test_a_worker_that_ends_during_the_checkpoint_is_replaced_at_once(self) -> None:
        observation = change_worker(build_training(), "j-w1-0", pod={"deleting": True, "delete_by": NOW + 30})
        observation = change_worker(
            apply_result(evaluate_job(observation, build_policy()), observation), "j-w1-0", gone=True
        )
        assert list_members(evaluate_job(observation, build_policy()).desired)[1] == "j-w4-0"

    def test_without_a_spare_the_ranks_wait_for_a_new_worker(self) -> None:
        observation = change_worker(build_training(spares=0), "j-w1-0", gone=True)
        result = evaluate_job(observation, build_policy())
        assert list_members(result.desired)[1] == "j-w1-0"
        assert [worker.name for worker in list_missing_workers(result.observation)] == ["j-w1-1"]
        later = with_pods(apply_result(result, observation), state=LauncherState.RUNNING)
        later = change_worker(later, "j-w1-0", gone=True)
        later = change_worker(later, "j-w1-1", heartbeat={"state": LauncherState.WARM})
        assert list_members(evaluate_job(later, build_policy()).desired)[1] == "j-w1-1"

    def test_a_job_that_may_shrink_continues_with_fewer_workers(self) -> None:
        observation = build_training(spares=0, job=build_job(4, 0, min_replicas=2))
        observation = change_worker(observation, "j-w1-0", gone=True)
        observation = apply_result(evaluate_job(observation, build_policy()), observation)
        pending = replace(observation, now=NOW + 11)
        desired = evaluate_job(pending, build_policy()).desired
        assert len(desired.plan.members) == 4  # its successor may still come
        observation = with_pods(observation, state=LauncherState.RUNNING)
        observation = change_worker(observation, "j-w1-0", gone=True)
        observation = change_worker(
            observation,
            "j-w1-1",
            pod={"node": "", "address": "", "unschedulable_message": "0/6 nodes"},
            heartbeat={"state": LauncherState.STARTING},
        )
        desired = evaluate_job(replace(observation, now=NOW + 11), build_policy()).desired
        assert list_members(desired) == ["j-w0-0", "j-w2-0", "j-w3-0"]
        assert [member.ranks for member in desired.plan.members] == [(0,), (1,), (2,)]

    def test_crashes_of_its_peers_are_no_separate_incidents(self) -> None:
        observation = replace(build_training(), faults=(build_crash("j-w0-0", 0), build_crash("j-w2-0", 2)))
        result = evaluate_job(change_worker(observation, "j-w1-0", gone=True), build_policy())
        assert [incident.cause for incident in result.desired.state.incidents.current] == [IncidentCause.WORKER_LOST]
        assert not result.desired.state.budget.restarts

    def test_a_trainer_that_ends_with_an_error_counts_as_a_restart(self) -> None:
        observation = change_worker(build_training(), "j-w1-0", pod={"exit_code": 1, "exit_reason": "Error"})
        assert len(evaluate_job(observation, build_policy()).desired.state.budget.restarts) == 1

    def test_a_worker_whose_trainer_succeeded_is_not_lost(self) -> None:
        observation = change_worker(build_training(), "j-w1-0", pod={"exit_code": 0, "finished": True})
        result = evaluate_job(observation, build_policy())
        assert result.desired.state.lifecycle.finished == ("j-w1-0",)
        assert not list_decisions(result)

    def test_a_lost_spare_is_created_again_without_a_new_round(self) -> None:
        result = evaluate_job(change_worker(build_training(), "j-w4-0", gone=True), build_policy())
        assert [worker.name for worker in list_missing_workers(result.observation)] == ["j-w4-1"]
        assert result.desired.plan.membership == 1

    @pytest.mark.parametrize("pod", [{"disruption_reason": "Evicted", "exit_code": 137}, {"deleting": True}])
    def test_an_evicted_or_deleted_spare_is_created_again_before_its_pod_is_gone(self, pod: dict[str, object]) -> None:
        result = evaluate_job(change_worker(build_training(), "j-w4-0", pod=pod), build_policy())
        assert [worker.name for worker in list_missing_workers(result.observation)] == ["j-w4-1"]
        assert not result.desired.state.placement.failed_starts

    @pytest.mark.parametrize("state", [LauncherState.WARM, LauncherState.STARTING])
    def test_a_spare_that_fails_is_retried_later_and_never_fails_a_job_that_trains(self, state: LauncherState) -> None:
        observation = build_training()
        for tries in range(1, 5):
            name = f"j-w4-{tries - 1}"
            observation = change_worker(observation, name, pod={"exit_code": 1}, heartbeat={"state": state})
            result = evaluate_job(observation, build_policy())
            assert not result.desired.state.lifecycle.failed_reason
            assert all(incident.live for incident in result.desired.state.incidents.open), "nothing is recovering"
            assert not list_missing_workers(result.observation)
            assert result.desired.state.placement.failed_starts == tries
            retry_at = result.desired.state.placement.retry_at
            assert retry_at is not None
            wait_seconds = retry_at - observation.now
            assert 0.75 * 5 * 2 ** (tries - 1) <= wait_seconds <= 1.25 * 5 * 2 ** (tries - 1)
            observation = replace(
                apply_result(result, change_worker(observation, name, gone=True)),
                now=observation.now + wait_seconds + 1,
            )
            result = evaluate_job(observation, build_policy())
            assert [worker.name for worker in list_missing_workers(result.observation)] == [f"j-w4-{tries}"]
            members = {view.name: view for view in observation.workers}
            observation = with_pods(apply_result(result, observation), state=LauncherState.STARTING)
            observation = replace(
                observation, workers=tuple(members.get(view.name, view) for view in observation.workers)
            )
        warm = change_worker(observation, "j-w4-4", heartbeat={"state": LauncherState.WARM})
        assert evaluate_job(warm, build_policy()).desired.state.placement.failed_starts == 0


class TestRecommend:
    @pytest.fixture
    def recommend_policy(self) -> Policy:
        return build_policy(mode=RemediationMode.RECOMMEND)

    def test_a_remedy_is_recommended_but_not_applied(self, recommend_policy: Policy) -> None:
        observation = build_training()
        result = evaluate_job(replace(observation, faults=build_stalls(observation, culprit=2)), recommend_policy)
        assert result.desired.plan.membership == 1
        (incident,) = result.desired.state.incidents.current
        assert (incident.outcome, incident.remedy, incident.applied) == (
            IncidentOutcome.RECOMMENDED,
            "RestartRanks",
            None,
        )

    def test_a_hang_has_one_recommendation(self, recommend_policy: Policy) -> None:
        observation = build_training()
        observation = replace(observation, faults=build_stalls(observation, culprit=2))
        result = evaluate_job(observation, recommend_policy)
        assert len(list_decisions(result)) == 1
        assert not list_decisions(
            evaluate_job(replace(apply_result(result, observation), now=NOW + 1), recommend_policy)
        )

    def test_lost_workers_are_replaced_as_kubernetes_would(self, recommend_policy: Policy) -> None:
        result = evaluate_job(change_worker(build_training(), "j-w1-0", gone=True), recommend_policy)
        (incident,) = result.desired.state.incidents.open
        assert (incident.mode, incident.remedy, list_members(result.desired)[1]) == (
            RemediationMode.ACT,
            "ReplaceWorker",
            "j-w4-0",
        )
        silent = replace(
            change_worker(build_training(), "j-w1-0", silent_seconds=400.0, reachable=False), operator_age=500.0
        )
        assert list_members(evaluate_job(silent, recommend_policy).desired)[1] == "j-w1-0", "its pod exists"

    @pytest.mark.parametrize("out_of_memory", [False, True])
    def test_crashed_ranks_restart_in_place_and_the_restart_counts(
        self, recommend_policy: Policy, out_of_memory: bool
    ) -> None:
        """Moving to another worker, if that is better, is only recommended."""
        observation = build_training()
        assert evaluate_job(observation, recommend_policy).desired.plan.restarts == 10
        fault = build_crash("j-w1-0", 1, noticed_at=NOW - 5, out_of_memory=out_of_memory)
        result = evaluate_job(replace(observation, faults=(fault,)), recommend_policy)
        (incident,) = result.desired.state.incidents.open
        assert (incident.remedy, incident.applied, len(result.desired.state.budget.restarts)) == (
            "RestartRanks",
            NOW,
            1,
        )
        assert list_members(result.desired)[1] == "j-w1-0"
        assert bool([price for price in incident.remedies if "only recommended" in price.reason]) is out_of_memory

    def test_the_limit_of_restarts_applies_in_mode_recommend(self, recommend_policy: Policy) -> None:
        result = evaluate_job(
            replace(build_training(), faults=(build_crash("j-w1-0", 1, noticed_at=NOW - 5),)),
            replace(recommend_policy, max_restarts=0),
        )
        assert result.desired.state.lifecycle.failed_reason == "RestartBudgetSpent"

    @pytest.mark.parametrize("mode", RemediationMode)
    def test_in_a_pause_no_action_is_taken_and_the_job_does_not_fail(self, mode: RemediationMode) -> None:
        paused = build_policy(mode=mode, paused="maintenance", max_restarts=0)
        assert evaluate_job(build_training(), paused).desired.plan.restarts == 0
        result = evaluate_job(replace(build_training(), faults=(build_crash("j-w1-0", 1, noticed_at=NOW - 5),)), paused)
        assert not result.desired.state.lifecycle.is_over
        assert (
            list_members(evaluate_job(change_worker(build_training(), "j-w1-0", gone=True), paused).desired)[1]
            == "j-w1-0"
        )

    def test_a_remedy_that_is_not_allowed_is_not_applied_in_another_way(self) -> None:
        observation = change_worker(build_training(), "j-w1-0", gone=True)
        result = evaluate_job(observation, build_policy(allow=frozenset({Remedy.RESTART_RANKS})))
        assert list_members(result.desired)[1] == "j-w1-0"
        (incident,) = result.desired.state.incidents.current
        assert "spec.remediation.allow" in incident.remedies[0].reason

    def test_scaling_is_applied_in_mode_recommend(self, recommend_policy: Policy) -> None:
        observation = build_training(2, 2, job=build_job(3, 1))
        result = evaluate_job(observation, recommend_policy)
        grown = evaluate_job(
            change_members(apply_result(result, observation), checkpoint={"request": 1}), recommend_policy
        )
        assert len(grown.desired.plan.members) == 3

    def test_a_recommended_remedy_is_applied_once_it_is_allowed(self, recommend_policy: Policy) -> None:
        observation = build_training()
        observation = replace(observation, faults=build_stalls(observation, culprit=2))
        repeated_stalls = tuple(
            replace(fault, name=f"{fault.name}-2") for fault in observation.faults
        )  # launchers repeat a stall
        result = evaluate_job(
            apply_result(evaluate_job(observation, recommend_policy), observation, faults=repeated_stalls),
            build_policy(),
        )
        (incident,) = result.desired.state.incidents.open
        assert (incident.mode, incident.applied) == (RemediationMode.ACT, NOW)

    def test_the_evidence_names_the_pause(self) -> None:
        observation = change_worker(build_training(), "j-w1-0", gone=True)
        result = evaluate_job(observation, build_policy(paused="remedies are paused: maintenance"))
        assert list_members(result.desired)[1] == "j-w1-0"
        assert "maintenance" in result.desired.state.incidents.current[0].evidence[-1]


class TestLifecycle:
    def test_a_job_is_complete_when_all_trainers_have_succeeded(self) -> None:
        observation = build_training(replicas=2, spares=1)
        for name in ("j-w0-0", "j-w1-0"):
            observation = change_worker(observation, name, pod={"exit_code": 0, "finished": True, "phase": "Succeeded"})
        result = evaluate_job(observation, build_policy())
        assert result.desired.state.lifecycle.completed_at == NOW
        assert result.desired.plan.stop is Stop.FINISH

    def build_followed(self) -> Observation:
        """The ranks of both workers have finished, and other commands of their containers run. There is a spare."""
        observation = build_training(replicas=2, spares=1)
        for name in ("j-w0-0", "j-w1-0"):
            report = {"state": LauncherState.FINISHED, "commands_may_follow": True}
            observation = change_worker(observation, name, heartbeat=report)
        result = evaluate_job(observation, build_policy())
        assert (result.desired.plan.stop, result.desired.state.lifecycle.is_over) == (Stop.FINISH, False)
        return apply_result(result, observation)

    @pytest.mark.parametrize("known", [True, False], ids=["the same operator", "a new leader"])
    def test_commands_after_the_ranks_run_for_as_long_as_they_take(self, known: bool) -> None:
        observation = replace(self.build_followed(), now=NOW + 3600)
        if not known:
            observation = replace(
                observation, workers=tuple(replace(view, heartbeat=None) for view in observation.workers)
            )
        result = evaluate_job(observation, build_policy())
        assert not result.desired.state.lifecycle.is_over
        assert [view.name for view in list_surplus_workers(result.observation)] == ["j-w2-0"], "the spare"
        queued = replace(result.observation, job=replace(observation.job, queue="team"))
        (workload,) = (
            effect for effect in list_effects(queued, build_policy(), {}) if isinstance(effect, SyncWorkload)
        )
        assert workload.progress.ready
        assert restore_queue_decision(result.desired).admitted, "the queue cannot be read"
        status = build_job_status(result.observation, build_policy(), JobStatus())
        running = next(condition for condition in status.conditions if condition.type == JobCondition.RUNNING)
        assert (status.phase, running.reason) == (JobPhase.RUNNING, Reason.RANKS_FINISHED)
        assert "j-w0-0, j-w1-0" in running.message

    @pytest.mark.parametrize(
        ("end", "failed"),
        [
            ({"exit_code": 0, "phase": "Succeeded"}, ""),
            ({"exit_code": 3, "phase": "Failed"}, "ScriptFailed"),
            ({"exit_code": 143, "phase": "Failed", "disruption_reason": "EvictionByEvictionAPI"}, ""),
            ({"deleting": True}, ""),
        ],
    )
    def test_the_job_ends_as_the_commands_after_its_ranks(self, end: dict[str, object], failed: str) -> None:
        observation = change_worker(self.build_followed(), "j-w0-0", pod={"exit_code": 0, "phase": "Succeeded"})
        lifecycle = evaluate_job(change_worker(observation, "j-w1-0", pod=end), build_policy()).desired.state.lifecycle
        assert (lifecycle.failed_reason, lifecycle.completed_at) == (failed, None if failed else NOW)
        assert not failed or "j-w1-0 ended with 3" in lifecycle.failed_message

    def test_a_job_that_is_suspended_runs_the_commands_after_its_ranks_again(self) -> None:
        observation = replace(self.build_followed(), job=build_job(2, 1, suspend=True))
        assert evaluate_job(observation, build_policy()).desired.plan.stop is Stop.SUSPEND

    def test_suspending_stops_the_ranks_and_then_deletes_the_pods(self) -> None:
        observation = build_training(2, 0, job=build_job(2, 0, suspend=True))
        result = evaluate_job(observation, build_policy())
        assert result.desired.plan.stop is Stop.SUSPEND
        assert not list_surplus_workers(result.observation)
        finished = apply_result(result, observation)
        for name in ("j-w0-0", "j-w1-0"):
            finished = change_worker(finished, name, pod={"exit_code": 0, "finished": True, "phase": "Succeeded"})
        assert len(list_surplus_workers(evaluate_job(finished, build_policy()).observation)) == 2
        assert not evaluate_job(finished, build_policy()).desired.state.lifecycle.completed_at

    def test_a_resumed_job_begins_with_new_workers_and_a_later_round(self) -> None:
        observation = build_training(2, 0, job=build_job(2, 0, suspend=True))
        stopped = apply_result(evaluate_job(observation, build_policy()), observation)
        for name in ("j-w0-0", "j-w1-0"):
            stopped = change_worker(stopped, name, gone=True)
        stopped = apply_result(evaluate_job(stopped, build_policy()), stopped)
        stopped = stopped.with_desired(stopped.desired.with_plan(sequence_cost=(0.0, 0.0, 1.0)))
        resumed = replace(stopped, job=build_job(2, 0))
        result = evaluate_job(resumed, build_policy())
        assert result.desired.plan.stop is Stop.NO
        assert result.desired.plan.sequence_cost is None, "the script may have changed"
        assert [worker.name for worker in list_missing_workers(result.observation)] == ["j-w0-1", "j-w1-1"]
        warm = with_pods(apply_result(result, resumed), state=LauncherState.WARM)
        plan = evaluate_job(warm, build_policy()).desired.plan
        assert (plan.membership, plan.round) == (2, 2)

    def test_the_deadline_fails_the_job(self) -> None:
        limited = build_job(2, 0, run_policy=RunPolicySpec(active_deadline_seconds=300))
        state = evaluate_job(build_training(2, 0, job=limited), build_policy()).desired.state
        assert state.lifecycle.failed_reason == "DeadlineExceeded"

    def test_growing_waits_for_a_checkpoint(self) -> None:
        observation = build_training(2, 2, job=build_job(3, 1))
        result = evaluate_job(observation, build_policy())
        assert len(result.desired.plan.members) == 2
        assert result.desired.plan.checkpoint_request == 1
        grown = evaluate_job(
            change_members(apply_result(result, observation), checkpoint={"request": 1}), build_policy()
        )
        assert list_members(grown.desired) == ["j-w0-0", "j-w1-0", "j-w2-0"]

    def test_shrinking_keeps_the_first_members(self) -> None:
        observation = build_training(3, 0, job=build_job(2, 0))
        result = evaluate_job(observation, build_policy())
        shrunk = evaluate_job(
            change_members(apply_result(result, observation), checkpoint={"request": 1}), build_policy()
        )
        assert list_members(shrunk.desired) == ["j-w0-0", "j-w1-0"]
        assert {view.name for view in list_surplus_workers(shrunk.observation)} == {"j-w2-0"}

    def test_a_failing_prometheus_changes_nothing(self) -> None:
        observation = replace(build_training(), metrics=JobMetrics(prometheus_error="unavailable"))
        result = evaluate_job(replace(observation, faults=build_stalls(observation, culprit=2)), build_policy())
        assert result.desired.plan.membership == 2
