"""Whole passes over a job, from one state of the world to the next: what is decisions, written and done."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pacekeeper_analysis.protocol.plan import Stop
from pacekeeper_analysis.protocol.reports import LauncherState
from pacekeeper_operator.api.incident import IncidentCause, IncidentClass, IncidentOutcome
from pacekeeper_operator.api.training_job import RemediationMode, Remedy, RunPolicySpec
from pacekeeper_operator.decide.evaluate import PassResult, evaluate_job
from pacekeeper_operator.decide.placement.workforce import (
    OLDER_JOB_TURN_SECONDS,
    list_missing_workers,
    list_surplus_workers,
)
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


def seats(draft: DesiredState) -> list[str]:
    return [member.worker for member in draft.plan.members]


def again(thought: PassResult, world: Observation, **changes: object) -> Observation:
    """The world after a pass was written."""
    return replace(world.with_desired(thought.desired), **changes)  # type: ignore[arg-type]


class TestBeginning:
    def test_names_are_reserved_before_pods_are_made(self) -> None:
        thought = evaluate_job(build_fresh(replicas=2, spares=1), build_policy())
        assert [worker.name for worker in thought.desired.state.placement.workers] == ["j-w0-0", "j-w1-0", "j-w2-0"]
        assert list_missing_workers(thought.observation) == thought.desired.state.placement.workers

    def test_a_pass_that_is_repeated_after_the_write_reserves_nothing_more(self) -> None:
        world = build_fresh()
        thought = evaluate_job(world, build_policy())
        repeated = evaluate_job(again(thought, world), build_policy())
        assert repeated.desired == thought.desired
        assert list_missing_workers(repeated.observation) == list_missing_workers(
            thought.observation
        )  # the pods are still not there

    def test_no_membership_until_all_seats_are_warm(self) -> None:
        world = with_pods(again(evaluate_job(build_fresh(), build_policy()), build_fresh()), state=LauncherState.WARM)
        starting = change_worker(world, "j-w1-0", heartbeat={"state": LauncherState.STARTING})
        starting = change_worker(starting, "j-w2-0", heartbeat={"state": LauncherState.STARTING})
        assert evaluate_job(starting, build_policy()).desired.plan.members == ()
        only_the_spare = change_worker(world, "j-w1-0", heartbeat={"state": LauncherState.STARTING})
        assert (
            evaluate_job(only_the_spare, build_policy()).desired.plan.members == ()
        )  # a spare keeps off the others' nodes
        plan = evaluate_job(world, build_policy()).desired.plan
        assert seats(DesiredState(plan, world.state)) == ["j-w0-0", "j-w1-0"]
        assert (plan.membership, plan.round, plan.restarts) == (1, 1, 10)

    def test_not_all_placed_in_time_means_all_pods_go_and_come_back_later(self) -> None:
        world = build_fresh(job=build_job(2, 0, scheduling_timeout=60.0))
        world = with_pods(again(evaluate_job(world, build_policy()), world), placed=False)
        early = evaluate_job(replace(world, now=NOW + 59), build_policy())
        assert not list_surplus_workers(early.observation)
        late = evaluate_job(replace(world, now=NOW + 61), build_policy())
        assert {view.name for view in list_surplus_workers(late.observation)} == {"j-w0-0", "j-w1-0"}
        assert late.desired.state.placement.attempts == 1
        gone = replace(again(late, world), workers=(), now=NOW + 62)
        gone = gone.with_desired(gone.desired)
        waiting = evaluate_job(gone, build_policy())
        assert not list_missing_workers(waiting.observation)
        retry_at = waiting.desired.state.placement.retry_at
        assert retry_at is not None
        back = evaluate_job(replace(again(waiting, gone), now=retry_at + 1), build_policy())
        assert [worker.name for worker in list_missing_workers(back.observation)] == ["j-w0-1", "j-w1-1"]

    def test_a_job_waits_for_an_older_one_after_its_first_failure(self) -> None:
        world = build_fresh()
        world = world.with_desired(world.desired.with_placement(retry_at=NOW))
        behind = replace(world, cluster_view=replace(world.cluster_view, older_waiting_job="older"))
        assert list_missing_workers(evaluate_job(world, build_policy()).observation)
        assert not list_missing_workers(
            evaluate_job(replace(behind, now=NOW + OLDER_JOB_TURN_SECONDS - 1), build_policy()).observation
        )
        late = evaluate_job(replace(behind, now=NOW + OLDER_JOB_TURN_SECONDS), build_policy()).observation
        assert list_missing_workers(late), "an older job that can never be placed holds nobody up for ever"

    def test_a_trainer_that_ends_before_it_is_ready_is_tried_once_more_and_then_fails_the_job(self) -> None:
        world = with_pods(again(evaluate_job(build_fresh(1, 0), build_policy()), build_fresh(1, 0)))
        world = change_worker(world, "j-w0-0", pod={"exit_code": 127, "exit_message": "no such command"})
        first = evaluate_job(world, build_policy())
        assert not first.desired.state.lifecycle.failed_reason
        assert first.desired.state.placement.find_worker("j-w0-1") is not None
        world = with_pods(again(first, world))
        second = evaluate_job(
            change_worker(world, "j-w0-1", pod={"exit_code": 127, "exit_message": "no such command"}), build_policy()
        )
        assert second.desired.state.lifecycle.failed_reason == "ScriptFailed"
        assert "no such command" in second.desired.state.lifecycle.failed_message

    def test_an_image_that_cannot_be_pulled_fails_the_job_after_the_scheduling_timeout(self) -> None:
        start = build_fresh(1, 0, job=build_job(1, 0, scheduling_timeout=60.0))
        world = with_pods(again(evaluate_job(start, build_policy()), start))
        world = change_worker(
            world, "j-w0-0", pod={"waiting_reason": "ErrImagePull", "waiting_message": "no such host"}
        )
        assert not evaluate_job(replace(world, now=NOW + 30), build_policy()).desired.state.lifecycle.failed_reason
        wrong_clock = evaluate_job(replace(world, now=NOW + 61, clock_agrees=False), build_policy())
        assert not wrong_clock.desired.state.lifecycle.failed_reason, "the wait may be the clock's"
        late = evaluate_job(replace(world, now=NOW + 61), build_policy()).desired.state
        assert (late.lifecycle.failed_reason, "no such host" in late.lifecycle.failed_message) == (
            "ImagePullFailed",
            True,
        )


class TestCrash:
    def test_the_launchers_have_restarted_and_the_operator_counts(self) -> None:
        world = replace(build_training(), faults=(build_crash("j-w1-0", 1),))
        world = change_members(world, round=2, start={"first_step_at": None})
        thought = evaluate_job(world, build_policy())
        state = thought.desired.state
        assert thought.desired.plan.members == world.plan.members
        assert thought.desired.plan.membership == 1
        assert [incident.cause for incident in state.incidents.current] == [IncidentCause.CRASH]
        assert len(state.budget.restarts) == 1
        # The launchers have used one of ten: the plan still allows nine more in this membership.
        assert thought.desired.plan.restarts == 10
        assert "j-w1-0-rank-1-round-1" in state.incidents.settled_faults

    def test_recovery_is_the_first_step_of_the_next_round_on_every_member(self) -> None:
        world = change_members(
            replace(build_training(), faults=(build_crash("j-w1-0", 1),)), round=2, start={"first_step_at": None}
        )
        world = again(evaluate_job(world, build_policy()), world, now=NOW + 1)
        partly = change_worker(world, "j-w0-0", heartbeat={"start": {"first_step_at": NOW + 0.7, "restored_step": 496}})
        assert evaluate_job(partly, build_policy()).desired.state.incidents.open
        done = change_members(world, start={"first_step_at": NOW + 0.8, "restored_step": 496}, progress={"step": 497})
        (incident,) = evaluate_job(done, build_policy()).desired.state.incidents.current
        assert incident.outcome is IncidentOutcome.RECOVERED
        assert incident.recovered == NOW + 0.8
        assert incident.steps_lost == 4

    def test_a_late_report_of_the_same_round_opens_no_second_incident(self) -> None:
        world = change_members(
            replace(build_training(), faults=(build_crash("j-w1-0", 1),)), round=2, start={"first_step_at": None}
        )
        world = again(evaluate_job(world, build_policy()), world, faults=(build_crash("j-w2-0", 2),))
        thought = evaluate_job(world, build_policy())
        assert len(thought.desired.state.incidents.current) == 1
        assert len(thought.desired.state.budget.restarts) == 1
        assert "j-w2-0-rank-2-round-1" in thought.desired.state.incidents.settled_faults

    @pytest.mark.parametrize(
        ("exit_code", "error"),
        [
            (1, "RuntimeError: Connection closed by peer"),
            (-6, "[Rank 0] Process group watchdog thread terminated with exception: NCCL error: remote process exited"),
        ],
    )
    def test_who_lost_a_peer_is_not_to_blame(self, exit_code: int, error: str) -> None:
        consequence = build_crash("j-w0-0", 0, exit_code=exit_code, error=error, noticed_at=NOW - 1)
        world = replace(build_training(), faults=(consequence, build_crash("j-w1-0", 1)))
        (incident,) = evaluate_job(change_members(world, round=2), build_policy()).desired.state.incidents.current
        assert incident.rank == 1

    def test_two_rounds_without_a_step_and_with_the_same_error_fail_the_job(self) -> None:
        error = "Traceback …\nValueError: no such file"
        faults = (
            build_crash("j-w0-0", 0, 1, completed_step=False, exit_code=1, error=error, noticed_at=NOW - 9),
            build_crash("j-w1-0", 1, 2, completed_step=False, exit_code=1, error=error, noticed_at=NOW - 5),
        )
        draft = evaluate_job(change_members(replace(build_untrained(), faults=faults), round=2), build_policy()).desired
        assert draft.state.lifecycle.failed_reason == "ScriptFailed"
        assert "ValueError: no such file" in draft.state.lifecycle.failed_message
        assert draft.plan.stop is Stop.FINISH

    def test_also_when_the_rounds_in_between_could_not_even_be_started(self) -> None:
        error = {"completed_step": False, "exit_code": 1, "error": "ValueError: y"}
        world = change_members(
            replace(build_untrained(), faults=(build_crash("j-w0-0", 0, 1, **error),)),
            round=2,
            start={"first_step_at": None},
        )
        world = again(
            evaluate_job(world, build_policy()), world, faults=(build_crash("j-w1-0", 1, 4, **error),), now=NOW + 60
        )
        assert evaluate_job(world, build_policy()).desired.state.lifecycle.failed_reason == "ScriptFailed"

    def test_launchers_that_gave_up_are_judged_by_the_crash_that_made_them(self) -> None:
        world = change_members(
            replace(build_training(), faults=(build_crash("j-w0-0", 0, 1, noticed_at=NOW),)), state="Failed"
        )
        assert evaluate_job(world, build_policy()).desired.plan.membership == 1

    @pytest.mark.parametrize("second", [{"completed_step": True}, {"error": "KeyError: 'x'"}])
    def test_another_error_or_a_completed_step_in_between_does_not(self, second: dict[str, object]) -> None:
        first = {"completed_step": False, "exit_code": 1, "error": "ValueError: y", "noticed_at": NOW - 9}
        faults = (build_crash("j-w0-0", 0, 1, **first), build_crash("j-w0-0", 0, 2, **{**first, **second}))
        draft = evaluate_job(change_members(replace(build_training(), faults=faults), round=3), build_policy()).desired
        assert not draft.state.lifecycle.failed_reason

    def test_the_budget_ends_in_failure_that_says_so(self) -> None:
        world = replace(build_training(), faults=(build_crash("j-w1-0", 1),))
        world = change_members(world, round=2)
        world = world.with_desired(world.desired.with_budget(restarts=(NOW - 10, NOW - 5)))
        state = evaluate_job(world, build_policy(max_restarts=2)).desired.state
        assert state.lifecycle.failed_reason == "RestartBudgetSpent"
        assert "maxRestarts" in state.lifecycle.failed_message

    def test_restarts_outside_of_the_window_do_not_count(self) -> None:
        world = change_members(replace(build_training(), faults=(build_crash("j-w1-0", 1),)), round=2)
        world = world.with_desired(world.desired.with_budget(restarts=(NOW - 4000, NOW - 3700)))
        assert not evaluate_job(world, build_policy(max_restarts=2)).desired.state.lifecycle.failed_reason

    def test_out_of_memory_moves_the_rank_once_and_then_blames_the_script(self) -> None:
        world = replace(build_training(), faults=(build_crash("j-w1-0", 1, out_of_memory=True),))
        thought = evaluate_job(world, build_policy())
        assert seats(thought.desired)[1] == "j-w4-0"
        past = PastIncident(IncidentCause.OUT_OF_MEMORY, NOW - 60, 3.0, rank=1, worker="j-w9-0")
        known = world.with_desired(world.desired.with_incidents(past=(past,)))
        thought = evaluate_job(known, build_policy())
        assert seats(thought.desired)[1] == "j-w1-0"
        assert thought.desired.state.incidents.current[0].class_ is IncidentClass.APPLICATION


class TestHang:
    def test_the_culprit_is_named_and_the_same_members_begin_anew(self) -> None:
        world = build_training()
        thought = evaluate_job(replace(world, faults=build_stalls(world, culprit=2)), build_policy())
        (incident,) = thought.desired.state.incidents.current
        assert (incident.cause, incident.rank, incident.worker, incident.node) == (
            IncidentCause.HANG,
            2,
            "j-w2-0",
            "node-2",
        )
        assert incident.first_sign == pytest.approx(NOW - 3.1)
        assert thought.desired.plan.membership == 2
        assert thought.desired.plan.round == 2
        assert seats(thought.desired) == seats(world.desired)

    def test_no_verdict_while_a_worker_has_not_complained(self) -> None:
        world = build_training()
        asleep = [
            replace(fault, ranks=tuple(replace(rank, process_state="S") for rank in fault.ranks))
            for fault in build_stalls(world, culprit=2)[:-1]
        ]
        thought = evaluate_job(replace(world, faults=tuple(asleep)), build_policy())
        assert thought.desired.plan.membership == 1
        assert not list_decisions(thought)

    def test_the_same_again_moves_the_rank(self) -> None:
        world = build_training()
        past = PastIncident(IncidentCause.HANG, NOW - 100, 5.0, rank=2, worker="j-w2-0", node="node-2")
        world = world.with_desired(world.desired.with_incidents(past=(past,)))
        thought = evaluate_job(replace(world, faults=build_stalls(world, culprit=2)), build_policy())
        assert seats(thought.desired)[2] == "j-w4-0"
        assert thought.desired.state.incidents.current[0].remedy is Remedy.REPLACE_WORKER

    def test_what_follows_the_rank_is_the_scripts(self) -> None:
        world = build_training()
        past = PastIncident(IncidentCause.HANG, NOW - 100, 5.0, rank=2, worker="j-w7-0", node="node-7")
        world = world.with_desired(world.desired.with_incidents(past=(past,)))
        thought = evaluate_job(replace(world, faults=build_stalls(world, culprit=2)), build_policy())
        assert seats(thought.desired) == seats(world.desired)
        assert thought.desired.state.incidents.current[0].class_ is IncidentClass.APPLICATION

    def test_what_stays_with_the_node_is_the_nodes(self) -> None:
        world = build_training()
        past = PastIncident(IncidentCause.HANG, NOW - 100, 5.0, rank=3, worker="j-w8-0", node="node-2")
        world = world.with_desired(world.desired.with_incidents(past=(past,)))
        thought = evaluate_job(replace(world, faults=build_stalls(world, culprit=2)), build_policy())
        assert seats(thought.desired)[2] == "j-w4-0"
        assert [wanted.node for wanted in thought.desired.state.incidents.quarantine_requests] == ["node-2"]

    def test_one_jobs_repeated_hang_of_one_rank_never_touches_a_node(self) -> None:
        world = build_training()
        past = tuple(
            PastIncident(IncidentCause.HANG, NOW - n, 5.0, rank=2, worker="j-w2-0", node="node-2") for n in range(5)
        )
        world = world.with_desired(world.desired.with_incidents(past=past))
        assert not evaluate_job(
            replace(world, faults=build_stalls(world, culprit=2)), build_policy()
        ).desired.state.incidents.quarantine_requests

    def test_a_stall_that_is_over_is_settled_and_blames_nobody_later(self) -> None:
        """All waited in a slow collective and went on. One worker's next stall is no verdict upon the others."""
        world = build_training()
        waited = tuple(build_stall(member.worker, member.ranks[0]) for member in world.plan.members)
        first = evaluate_job(replace(world, faults=waited), build_policy())
        assert not list_decisions(first)
        newer = build_stall("j-w0-0", 0, step=600)
        newer = replace(newer, name="j-w0-0-stall-1-2", ranks=(replace(newer.ranks[0], step=600, sequence=90),))
        later = change_members(again(first, world), progress={"step": 600})
        second = evaluate_job(replace(later, faults=(*waited, newer)), build_policy())
        assert not list_decisions(second)
        assert {fault.name for fault in waited} <= set(second.desired.state.incidents.settled_faults)
        assert newer.name not in second.desired.state.incidents.settled_faults

    def test_a_stall_of_the_round_before_does_not_hide_the_next_hang(self) -> None:
        """The launchers have begun a round by themselves, in the same membership."""
        world = change_members(build_training(), round=2)
        old = build_stall("j-w1-0", 1, round_=1)
        hanging = tuple(replace(fault, name=f"{fault.name}-2", round=2) for fault in build_stalls(world, culprit=2))
        thought = evaluate_job(replace(world, faults=(old, *hanging)), build_policy())
        (incident,) = thought.desired.state.incidents.current
        assert (incident.cause, incident.rank) == (IncidentCause.HANG, 2)
        assert old.name in thought.desired.state.incidents.settled_faults


class TestWorkerLost:
    def test_a_spare_takes_over_at_once_and_a_new_one_is_made(self) -> None:
        world = build_training()
        thought = evaluate_job(change_worker(world, "j-w1-0", gone=True), build_policy())
        assert seats(thought.desired) == ["j-w0-0", "j-w4-0", "j-w2-0", "j-w3-0"]
        assert (thought.desired.plan.membership, thought.desired.plan.round) == (2, 2)
        assert [worker.name for worker in list_missing_workers(thought.observation)] == ["j-w1-1"]
        assert not thought.desired.state.budget.restarts  # a disruption burns no budget

    def test_one_that_is_told_to_end_first_gets_its_checkpoint(self) -> None:
        world = change_worker(build_training(), "j-w1-0", pod={"deleting": True, "delete_by": NOW + 30})
        thought = evaluate_job(world, build_policy())
        assert thought.desired.plan.checkpoint_request == 1
        assert seats(thought.desired)[1] == "j-w1-0"
        answered = change_members(again(thought, world), checkpoint={"request": 1})
        assert seats(evaluate_job(answered, build_policy()).desired)[1] == "j-w4-0"

    def test_one_that_ends_while_others_checkpoint_is_replaced_at_once(self) -> None:
        world = change_worker(build_training(), "j-w1-0", pod={"deleting": True, "delete_by": NOW + 30})
        world = change_worker(again(evaluate_job(world, build_policy()), world), "j-w1-0", gone=True)
        assert seats(evaluate_job(world, build_policy()).desired)[1] == "j-w4-0"

    def test_without_a_spare_the_seat_waits_and_the_incident_stays_open(self) -> None:
        world = change_worker(build_training(spares=0), "j-w1-0", gone=True)
        thought = evaluate_job(world, build_policy())
        assert seats(thought.desired)[1] == "j-w1-0"
        assert [worker.name for worker in list_missing_workers(thought.observation)] == ["j-w1-1"]
        later = with_pods(again(thought, world), state=LauncherState.RUNNING)
        later = change_worker(later, "j-w1-0", gone=True)
        later = change_worker(later, "j-w1-1", heartbeat={"state": LauncherState.WARM})
        assert seats(evaluate_job(later, build_policy()).desired)[1] == "j-w1-1"

    def test_a_job_that_may_shrink_goes_on_with_fewer(self) -> None:
        world = build_training(spares=0, job=build_job(4, 0, min_replicas=2))
        world = change_worker(world, "j-w1-0", gone=True)
        world = again(evaluate_job(world, build_policy()), world)
        pending = replace(world, now=NOW + 11)
        draft = evaluate_job(pending, build_policy()).desired
        assert len(draft.plan.members) == 4  # its successor may still come
        world = with_pods(world, state=LauncherState.RUNNING)
        world = change_worker(world, "j-w1-0", gone=True)
        world = change_worker(
            world,
            "j-w1-1",
            pod={"node": "", "address": "", "unschedulable_message": "0/6 nodes"},
            heartbeat={"state": LauncherState.STARTING},
        )
        draft = evaluate_job(replace(world, now=NOW + 11), build_policy()).desired
        assert seats(draft) == ["j-w0-0", "j-w2-0", "j-w3-0"]
        assert [member.ranks for member in draft.plan.members] == [(0,), (1,), (2,)]

    def test_its_peers_crashes_are_no_incidents_of_their_own(self) -> None:
        world = replace(build_training(), faults=(build_crash("j-w0-0", 0), build_crash("j-w2-0", 2)))
        thought = evaluate_job(change_worker(world, "j-w1-0", gone=True), build_policy())
        assert [incident.cause for incident in thought.desired.state.incidents.current] == [IncidentCause.WORKER_LOST]
        assert not thought.desired.state.budget.restarts

    def test_a_trainer_that_ends_with_an_error_counts(self) -> None:
        world = change_worker(build_training(), "j-w1-0", pod={"exit_code": 1, "exit_reason": "Error"})
        assert len(evaluate_job(world, build_policy()).desired.state.budget.restarts) == 1

    def test_a_worker_whose_trainer_ended_well_is_not_lost(self) -> None:
        world = change_worker(build_training(), "j-w1-0", pod={"exit_code": 0, "finished": True})
        thought = evaluate_job(world, build_policy())
        assert thought.desired.state.lifecycle.finished == ("j-w1-0",)
        assert not list_decisions(thought)

    def test_a_lost_spare_is_made_anew_without_ado(self) -> None:
        thought = evaluate_job(change_worker(build_training(), "j-w4-0", gone=True), build_policy())
        assert [worker.name for worker in list_missing_workers(thought.observation)] == ["j-w4-1"]
        assert thought.desired.plan.membership == 1

    @pytest.mark.parametrize("pod", [{"disruption_reason": "Evicted", "exit_code": 137}, {"deleting": True}])
    def test_so_is_one_that_is_taken_away_while_its_pod_is_still_there(self, pod: dict[str, object]) -> None:
        thought = evaluate_job(change_worker(build_training(), "j-w4-0", pod=pod), build_policy())
        assert [worker.name for worker in list_missing_workers(thought.observation)] == ["j-w4-1"]
        assert not thought.desired.state.placement.failed_starts

    @pytest.mark.parametrize("state", [LauncherState.WARM, LauncherState.STARTING])
    def test_a_spare_that_dies_is_tried_again_later_and_never_fails_a_job_that_trains(
        self, state: LauncherState
    ) -> None:
        world = build_training()
        for tries in range(1, 5):
            name = f"j-w4-{tries - 1}"
            world = change_worker(world, name, pod={"exit_code": 1}, heartbeat={"state": state})
            thought = evaluate_job(world, build_policy())
            assert not thought.desired.state.lifecycle.failed_reason
            assert all(incident.live for incident in thought.desired.state.incidents.open), "nothing is recovering"
            assert not list_missing_workers(thought.observation)
            assert thought.desired.state.placement.failed_starts == tries
            retry_at = thought.desired.state.placement.retry_at
            assert retry_at is not None
            waits = retry_at - world.now
            assert 0.75 * 5 * 2 ** (tries - 1) <= waits <= 1.25 * 5 * 2 ** (tries - 1)
            world = replace(again(thought, change_worker(world, name, gone=True)), now=world.now + waits + 1)
            thought = evaluate_job(world, build_policy())
            assert [worker.name for worker in list_missing_workers(thought.observation)] == [f"j-w4-{tries}"]
            members = {view.name: view for view in world.workers}
            world = with_pods(again(thought, world), state=LauncherState.STARTING)
            world = replace(world, workers=tuple(members.get(view.name, view) for view in world.workers))
        warm = change_worker(world, "j-w4-4", heartbeat={"state": LauncherState.WARM})
        assert evaluate_job(warm, build_policy()).desired.state.placement.failed_starts == 0


class TestRecommend:
    @pytest.fixture
    def watching(self) -> Policy:
        return build_policy(mode=RemediationMode.RECOMMEND)

    def test_all_but_acting(self, watching: Policy) -> None:
        world = build_training()
        thought = evaluate_job(replace(world, faults=build_stalls(world, culprit=2)), watching)
        assert thought.desired.plan.membership == 1
        (incident,) = thought.desired.state.incidents.current
        assert (incident.outcome, incident.remedy, incident.applied) == (
            IncidentOutcome.RECOMMENDED,
            "RestartRanks",
            None,
        )

    def test_what_hangs_is_recommended_upon_once(self, watching: Policy) -> None:
        world = build_training()
        world = replace(world, faults=build_stalls(world, culprit=2))
        thought = evaluate_job(world, watching)
        assert len(list_decisions(thought)) == 1
        assert not list_decisions(evaluate_job(replace(again(thought, world), now=NOW + 1), watching))

    def test_lost_workers_are_replaced_as_kubernetes_would(self, watching: Policy) -> None:
        thought = evaluate_job(change_worker(build_training(), "j-w1-0", gone=True), watching)
        (incident,) = thought.desired.state.incidents.open
        assert (incident.mode, incident.remedy, seats(thought.desired)[1]) == (
            RemediationMode.ACT,
            "ReplaceWorker",
            "j-w4-0",
        )
        silent = replace(
            change_worker(build_training(), "j-w1-0", silent_seconds=400.0, reachable=False), operator_age=500.0
        )
        assert seats(evaluate_job(silent, watching).desired)[1] == "j-w1-0", "its pod is there"

    @pytest.mark.parametrize("out_of_memory", [False, True])
    def test_crashed_ranks_restart_in_place_which_counts(self, watching: Policy, out_of_memory: bool) -> None:
        """Another worker, where that would do better, is only recommended."""
        world = build_training()
        assert evaluate_job(world, watching).desired.plan.restarts == 10
        fault = build_crash("j-w1-0", 1, noticed_at=NOW - 5, out_of_memory=out_of_memory)
        thought = evaluate_job(replace(world, faults=(fault,)), watching)
        (incident,) = thought.desired.state.incidents.open
        assert (incident.remedy, incident.applied, len(thought.desired.state.budget.restarts)) == (
            "RestartRanks",
            NOW,
            1,
        )
        assert seats(thought.desired)[1] == "j-w1-0"
        assert bool([price for price in incident.remedies if "only recommended" in price.reason]) is out_of_memory

    def test_the_restarts_that_the_user_allows_are_all(self, watching: Policy) -> None:
        thought = evaluate_job(
            replace(build_training(), faults=(build_crash("j-w1-0", 1, noticed_at=NOW - 5),)),
            replace(watching, max_restarts=0),
        )
        assert thought.desired.state.lifecycle.failed_reason == "RestartBudgetSpent"

    @pytest.mark.parametrize("mode", RemediationMode)
    def test_in_a_pause_nothing_is_done_and_nothing_fails(self, mode: RemediationMode) -> None:
        paused = build_policy(mode=mode, paused="maintenance", max_restarts=0)
        assert evaluate_job(build_training(), paused).desired.plan.restarts == 0
        thought = evaluate_job(
            replace(build_training(), faults=(build_crash("j-w1-0", 1, noticed_at=NOW - 5),)), paused
        )
        assert not thought.desired.state.lifecycle.is_over
        assert seats(evaluate_job(change_worker(build_training(), "j-w1-0", gone=True), paused).desired)[1] == "j-w1-0"

    def test_a_remedy_that_is_not_allowed_is_not_done_in_another_way(self) -> None:
        world = change_worker(build_training(), "j-w1-0", gone=True)
        thought = evaluate_job(world, build_policy(allow=frozenset({Remedy.RESTART_RANKS})))
        assert seats(thought.desired)[1] == "j-w1-0"
        (incident,) = thought.desired.state.incidents.current
        assert "spec.remediation.allow" in incident.remedies[0].reason

    def test_scaling_is_the_users_wish_not_a_remedy(self, watching: Policy) -> None:
        world = build_training(2, 2, job=build_job(3, 1))
        thought = evaluate_job(world, watching)
        grown = evaluate_job(change_members(again(thought, world), checkpoint={"request": 1}), watching)
        assert len(grown.desired.plan.members) == 3

    def test_what_was_recommended_is_done_once_it_may_be(self, watching: Policy) -> None:
        world = build_training()
        world = replace(world, faults=build_stalls(world, culprit=2))
        later = tuple(replace(fault, name=f"{fault.name}-2") for fault in world.faults)  # launchers repeat a stall
        thought = evaluate_job(again(evaluate_job(world, watching), world, faults=later), build_policy())
        (incident,) = thought.desired.state.incidents.open
        assert (incident.mode, incident.applied) == (RemediationMode.ACT, NOW)

    def test_a_pause_is_said_to_be_why(self) -> None:
        world = change_worker(build_training(), "j-w1-0", gone=True)
        thought = evaluate_job(world, build_policy(paused="remedies are paused: maintenance"))
        assert seats(thought.desired)[1] == "j-w1-0"
        assert "maintenance" in thought.desired.state.incidents.current[0].evidence[-1]


class TestStages:
    def test_complete_when_all_trainers_ended_well(self) -> None:
        world = build_training(replicas=2, spares=1)
        for name in ("j-w0-0", "j-w1-0"):
            world = change_worker(world, name, pod={"exit_code": 0, "finished": True, "phase": "Succeeded"})
        thought = evaluate_job(world, build_policy())
        assert thought.desired.state.lifecycle.completed_at == NOW
        assert thought.desired.plan.stop is Stop.FINISH

    def test_suspend_tells_the_ranks_and_then_lets_the_pods_go(self) -> None:
        world = build_training(2, 0, job=build_job(2, 0, suspend=True))
        thought = evaluate_job(world, build_policy())
        assert thought.desired.plan.stop is Stop.SUSPEND
        assert not list_surplus_workers(thought.observation)
        left = again(thought, world)
        for name in ("j-w0-0", "j-w1-0"):
            left = change_worker(left, name, pod={"exit_code": 0, "finished": True, "phase": "Succeeded"})
        assert len(list_surplus_workers(evaluate_job(left, build_policy()).observation)) == 2
        assert not evaluate_job(left, build_policy()).desired.state.lifecycle.completed_at

    def test_resume_begins_with_new_workers_and_a_later_round(self) -> None:
        world = build_training(2, 0, job=build_job(2, 0, suspend=True))
        stopped = again(evaluate_job(world, build_policy()), world)
        for name in ("j-w0-0", "j-w1-0"):
            stopped = change_worker(stopped, name, gone=True)
        stopped = again(evaluate_job(stopped, build_policy()), stopped)
        stopped = stopped.with_desired(stopped.desired.with_plan(sequence_cost=(0.0, 0.0, 1.0)))
        resumed = replace(stopped, job=build_job(2, 0))
        thought = evaluate_job(resumed, build_policy())
        assert thought.desired.plan.stop is Stop.NO
        assert thought.desired.plan.sequence_cost is None, "the script may be another one"
        assert [worker.name for worker in list_missing_workers(thought.observation)] == ["j-w0-1", "j-w1-1"]
        warm = with_pods(again(thought, resumed), state=LauncherState.WARM)
        plan = evaluate_job(warm, build_policy()).desired.plan
        assert (plan.membership, plan.round) == (2, 2)

    def test_the_deadline_fails_the_job(self) -> None:
        limited = build_job(2, 0, run_policy=RunPolicySpec(active_deadline_seconds=300))
        state = evaluate_job(build_training(2, 0, job=limited), build_policy()).desired.state
        assert state.lifecycle.failed_reason == "DeadlineExceeded"

    def test_growing_waits_for_a_checkpoint(self) -> None:
        world = build_training(2, 2, job=build_job(3, 1))
        thought = evaluate_job(world, build_policy())
        assert len(thought.desired.plan.members) == 2
        assert thought.desired.plan.checkpoint_request == 1
        grown = evaluate_job(change_members(again(thought, world), checkpoint={"request": 1}), build_policy())
        assert seats(grown.desired) == ["j-w0-0", "j-w1-0", "j-w2-0"]

    def test_shrinking_keeps_the_first_seats(self) -> None:
        world = build_training(3, 0, job=build_job(2, 0))
        thought = evaluate_job(world, build_policy())
        shrunk = evaluate_job(change_members(again(thought, world), checkpoint={"request": 1}), build_policy())
        assert seats(shrunk.desired) == ["j-w0-0", "j-w1-0"]
        assert {view.name for view in list_surplus_workers(shrunk.observation)} == {"j-w2-0"}

    def test_a_failing_prometheus_changes_nothing(self) -> None:
        world = replace(build_training(), metrics=JobMetrics(prometheus_error="away"))
        thought = evaluate_job(replace(world, faults=build_stalls(world, culprit=2)), build_policy())
        assert thought.desired.plan.membership == 2
