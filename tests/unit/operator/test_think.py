"""Whole passes over a job, from one state of the world to the next: what is decisions, written and done."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pacekeeper_analysis.plan import Stop
from pacekeeper_analysis.reports import LauncherState
from pacekeeper_operator.api import Cause, Class, Mode, Outcome, Remedy, RunPolicySpec
from pacekeeper_operator.decide.think import Thought, think
from pacekeeper_operator.decide.workforce import TURN_SECONDS, missing, surplus
from pacekeeper_operator.observation import Metrics, Observation, Policy
from pacekeeper_operator.state import Draft, Past
from tests.support.worlds import (
    NOW,
    change_members,
    change_worker,
    crash,
    decisions,
    fresh,
    job,
    policy,
    stall,
    stalls,
    training,
    untrained,
    with_pods,
)


def seats(draft: Draft) -> list[str]:
    return [member.worker for member in draft.plan.members]


def again(thought: Thought, world: Observation, **changes: object) -> Observation:
    """The world after a pass was written."""
    return replace(world.with_draft(thought.draft), **changes)  # type: ignore[arg-type]


class TestBeginning:
    def test_names_are_reserved_before_pods_are_made(self) -> None:
        thought = think(fresh(replicas=2, spares=1), policy())
        assert [worker.name for worker in thought.draft.state.placement.workers] == ["j-w0-0", "j-w1-0", "j-w2-0"]
        assert missing(thought.observation) == thought.draft.state.placement.workers

    def test_a_pass_that_is_repeated_after_the_write_reserves_nothing_more(self) -> None:
        world = fresh()
        thought = think(world, policy())
        repeated = think(again(thought, world), policy())
        assert repeated.draft == thought.draft
        assert missing(repeated.observation) == missing(thought.observation)  # the pods are still not there

    def test_no_membership_until_all_seats_are_warm(self) -> None:
        world = with_pods(again(think(fresh(), policy()), fresh()), state=LauncherState.WARM)
        starting = change_worker(world, "j-w1-0", heartbeat={"state": LauncherState.STARTING})
        starting = change_worker(starting, "j-w2-0", heartbeat={"state": LauncherState.STARTING})
        assert think(starting, policy()).draft.plan.members == ()
        only_the_spare = change_worker(world, "j-w1-0", heartbeat={"state": LauncherState.STARTING})
        assert think(only_the_spare, policy()).draft.plan.members == ()  # a spare keeps off the others' nodes
        plan = think(world, policy()).draft.plan
        assert seats(Draft(plan, world.state)) == ["j-w0-0", "j-w1-0"]
        assert (plan.membership, plan.round, plan.restarts) == (1, 1, 10)

    def test_not_all_placed_in_time_means_all_pods_go_and_come_back_later(self) -> None:
        world = fresh(job=job(2, 0, scheduling_timeout=60.0))
        world = with_pods(again(think(world, policy()), world), placed=False)
        early = think(replace(world, now=NOW + 59), policy())
        assert not surplus(early.observation)
        late = think(replace(world, now=NOW + 61), policy())
        assert {view.name for view in surplus(late.observation)} == {"j-w0-0", "j-w1-0"}
        assert late.draft.state.placement.attempts == 1
        gone = replace(again(late, world), workers=(), now=NOW + 62)
        gone = gone.with_draft(gone.draft)
        waiting = think(gone, policy())
        assert not missing(waiting.observation)
        back = think(replace(again(waiting, gone), now=waiting.draft.state.placement.retry_at + 1), policy())
        assert [worker.name for worker in missing(back.observation)] == ["j-w0-1", "j-w1-1"]

    def test_a_job_waits_for_an_older_one_after_its_first_failure(self) -> None:
        world = fresh()
        world = world.with_draft(world.draft.with_placement(retry_at=NOW))
        behind = replace(world, surroundings=replace(world.surroundings, older_job_waits="older"))
        assert missing(think(world, policy()).observation)
        assert not missing(think(replace(behind, now=NOW + TURN_SECONDS - 1), policy()).observation)
        late = think(replace(behind, now=NOW + TURN_SECONDS), policy()).observation
        assert missing(late), "an older job that can never be placed holds nobody up for ever"

    def test_a_trainer_that_ends_before_it_is_ready_is_tried_once_more_and_then_fails_the_job(self) -> None:
        world = with_pods(again(think(fresh(1, 0), policy()), fresh(1, 0)))
        world = change_worker(world, "j-w0-0", pod={"exit_code": 127, "exit_message": "no such command"})
        first = think(world, policy())
        assert not first.draft.state.life.failed_reason
        assert first.draft.state.placement.worker("j-w0-1") is not None
        world = with_pods(again(first, world))
        second = think(
            change_worker(world, "j-w0-1", pod={"exit_code": 127, "exit_message": "no such command"}), policy()
        )
        assert second.draft.state.life.failed_reason == "ScriptFailed"
        assert "no such command" in second.draft.state.life.failed_message

    def test_an_image_that_cannot_be_pulled_fails_the_job_after_the_scheduling_timeout(self) -> None:
        start = fresh(1, 0, job=job(1, 0, scheduling_timeout=60.0))
        world = with_pods(again(think(start, policy()), start))
        world = change_worker(
            world, "j-w0-0", pod={"waiting_reason": "ErrImagePull", "waiting_message": "no such host"}
        )
        assert not think(replace(world, now=NOW + 30), policy()).draft.state.life.failed_reason
        wrong_clock = think(replace(world, now=NOW + 61, clock_agrees=False), policy())
        assert not wrong_clock.draft.state.life.failed_reason, "the wait may be the clock's"
        late = think(replace(world, now=NOW + 61), policy()).draft.state
        assert (late.life.failed_reason, "no such host" in late.life.failed_message) == ("ImagePullFailed", True)


class TestCrash:
    def test_the_launchers_have_restarted_and_the_operator_counts(self) -> None:
        world = replace(training(), faults=(crash("j-w1-0", 1),))
        world = change_members(world, round=2, first_step_at=0.0)
        thought = think(world, policy())
        state = thought.draft.state
        assert thought.draft.plan.members == world.plan.members
        assert thought.draft.plan.membership == 1
        assert [incident.cause for incident in state.incidents.current] == [Cause.CRASH]
        assert len(state.budget.restarts) == 1
        # The launchers have used one of ten: the plan still allows nine more in this membership.
        assert thought.draft.plan.restarts == 10
        assert "j-w1-0-rank-1-round-1" in state.incidents.settled

    def test_recovery_is_the_first_step_of_the_next_round_on_every_member(self) -> None:
        world = change_members(replace(training(), faults=(crash("j-w1-0", 1),)), round=2, first_step_at=0.0)
        world = again(think(world, policy()), world, now=NOW + 1)
        partly = change_worker(world, "j-w0-0", heartbeat={"first_step_at": NOW + 0.7, "restored_step": 496})
        assert think(partly, policy()).draft.state.incidents.open
        done = change_members(world, first_step_at=NOW + 0.8, restored_step=496, step=497)
        (incident,) = think(done, policy()).draft.state.incidents.current
        assert incident.outcome is Outcome.RECOVERED
        assert incident.recovered == NOW + 0.8
        assert incident.steps_lost == 4

    def test_a_late_report_of_the_same_round_opens_no_second_incident(self) -> None:
        world = change_members(replace(training(), faults=(crash("j-w1-0", 1),)), round=2, first_step_at=0.0)
        world = again(think(world, policy()), world, faults=(crash("j-w2-0", 2),))
        thought = think(world, policy())
        assert len(thought.draft.state.incidents.current) == 1
        assert len(thought.draft.state.budget.restarts) == 1
        assert "j-w2-0-rank-2-round-1" in thought.draft.state.incidents.settled

    @pytest.mark.parametrize(
        ("exit_code", "error"),
        [
            (1, "RuntimeError: Connection closed by peer"),
            (-6, "[Rank 0] Process group watchdog thread terminated with exception: NCCL error: remote process exited"),
        ],
    )
    def test_who_lost_a_peer_is_not_to_blame(self, exit_code: int, error: str) -> None:
        consequence = crash("j-w0-0", 0, exit_code=exit_code, error=error, noticed_at=NOW - 1)
        world = replace(training(), faults=(consequence, crash("j-w1-0", 1)))
        (incident,) = think(change_members(world, round=2), policy()).draft.state.incidents.current
        assert incident.rank == 1

    def test_two_rounds_without_a_step_and_with_the_same_error_fail_the_job(self) -> None:
        error = "Traceback …\nValueError: no such file"
        faults = (
            crash("j-w0-0", 0, 1, completed_step=False, exit_code=1, error=error, noticed_at=NOW - 9),
            crash("j-w1-0", 1, 2, completed_step=False, exit_code=1, error=error, noticed_at=NOW - 5),
        )
        draft = think(change_members(replace(untrained(), faults=faults), round=2), policy()).draft
        assert draft.state.life.failed_reason == "ScriptFailed"
        assert "ValueError: no such file" in draft.state.life.failed_message
        assert draft.plan.stop is Stop.FINISH

    def test_also_when_the_rounds_in_between_could_not_even_be_started(self) -> None:
        error = {"completed_step": False, "exit_code": 1, "error": "ValueError: y"}
        world = change_members(
            replace(untrained(), faults=(crash("j-w0-0", 0, 1, **error),)), round=2, first_step_at=0.0
        )
        world = again(think(world, policy()), world, faults=(crash("j-w1-0", 1, 4, **error),), now=NOW + 60)
        assert think(world, policy()).draft.state.life.failed_reason == "ScriptFailed"

    def test_launchers_that_gave_up_are_judged_by_the_crash_that_made_them(self) -> None:
        world = change_members(replace(training(), faults=(crash("j-w0-0", 0, 1, noticed_at=NOW),)), state="Failed")
        assert think(world, policy()).draft.plan.membership == 1

    @pytest.mark.parametrize("second", [{"completed_step": True}, {"error": "KeyError: 'x'"}])
    def test_another_error_or_a_completed_step_in_between_does_not(self, second: dict[str, object]) -> None:
        first = {"completed_step": False, "exit_code": 1, "error": "ValueError: y", "noticed_at": NOW - 9}
        faults = (crash("j-w0-0", 0, 1, **first), crash("j-w0-0", 0, 2, **{**first, **second}))
        draft = think(change_members(replace(training(), faults=faults), round=3), policy()).draft
        assert not draft.state.life.failed_reason

    def test_the_budget_ends_in_failure_that_says_so(self) -> None:
        world = replace(training(), faults=(crash("j-w1-0", 1),))
        world = change_members(world, round=2)
        world = world.with_draft(world.draft.with_budget(restarts=(NOW - 10, NOW - 5)))
        state = think(world, policy(max_restarts=2)).draft.state
        assert state.life.failed_reason == "RestartBudgetSpent"
        assert "maxRestarts" in state.life.failed_message

    def test_restarts_outside_of_the_window_do_not_count(self) -> None:
        world = change_members(replace(training(), faults=(crash("j-w1-0", 1),)), round=2)
        world = world.with_draft(world.draft.with_budget(restarts=(NOW - 4000, NOW - 3700)))
        assert not think(world, policy(max_restarts=2)).draft.state.life.failed_reason

    def test_out_of_memory_moves_the_rank_once_and_then_blames_the_script(self) -> None:
        world = replace(training(), faults=(crash("j-w1-0", 1, out_of_memory=True),))
        thought = think(world, policy())
        assert seats(thought.draft)[1] == "j-w4-0"
        past = Past(Cause.OUT_OF_MEMORY, NOW - 60, 3.0, rank=1, worker="j-w9-0")
        known = world.with_draft(world.draft.with_incidents(past=(past,)))
        thought = think(known, policy())
        assert seats(thought.draft)[1] == "j-w1-0"
        assert thought.draft.state.incidents.current[0].class_ is Class.APPLICATION


class TestHang:
    def test_the_culprit_is_named_and_the_same_members_begin_anew(self) -> None:
        world = training()
        thought = think(replace(world, faults=stalls(world, culprit=2)), policy())
        (incident,) = thought.draft.state.incidents.current
        assert (incident.cause, incident.rank, incident.worker, incident.node) == (Cause.HANG, 2, "j-w2-0", "node-2")
        assert incident.first_sign == pytest.approx(NOW - 3.1)
        assert thought.draft.plan.membership == 2
        assert thought.draft.plan.round == 2
        assert seats(thought.draft) == seats(world.draft)

    def test_no_verdict_while_a_worker_has_not_complained(self) -> None:
        world = training()
        asleep = [
            replace(fault, ranks=tuple(replace(rank, process_state="S") for rank in fault.ranks))
            for fault in stalls(world, culprit=2)[:-1]
        ]
        thought = think(replace(world, faults=tuple(asleep)), policy())
        assert thought.draft.plan.membership == 1
        assert not decisions(thought)

    def test_the_same_again_moves_the_rank(self) -> None:
        world = training()
        past = Past(Cause.HANG, NOW - 100, 5.0, rank=2, worker="j-w2-0", node="node-2")
        world = world.with_draft(world.draft.with_incidents(past=(past,)))
        thought = think(replace(world, faults=stalls(world, culprit=2)), policy())
        assert seats(thought.draft)[2] == "j-w4-0"
        assert thought.draft.state.incidents.current[0].remedy is Remedy.REPLACE_WORKER

    def test_what_follows_the_rank_is_the_scripts(self) -> None:
        world = training()
        past = Past(Cause.HANG, NOW - 100, 5.0, rank=2, worker="j-w7-0", node="node-7")
        world = world.with_draft(world.draft.with_incidents(past=(past,)))
        thought = think(replace(world, faults=stalls(world, culprit=2)), policy())
        assert seats(thought.draft) == seats(world.draft)
        assert thought.draft.state.incidents.current[0].class_ is Class.APPLICATION

    def test_what_stays_with_the_node_is_the_nodes(self) -> None:
        world = training()
        past = Past(Cause.HANG, NOW - 100, 5.0, rank=3, worker="j-w8-0", node="node-2")
        world = world.with_draft(world.draft.with_incidents(past=(past,)))
        thought = think(replace(world, faults=stalls(world, culprit=2)), policy())
        assert seats(thought.draft)[2] == "j-w4-0"
        assert [wanted.node for wanted in thought.draft.state.incidents.quarantines] == ["node-2"]

    def test_one_jobs_repeated_hang_of_one_rank_never_touches_a_node(self) -> None:
        world = training()
        past = tuple(Past(Cause.HANG, NOW - n, 5.0, rank=2, worker="j-w2-0", node="node-2") for n in range(5))
        world = world.with_draft(world.draft.with_incidents(past=past))
        assert not think(replace(world, faults=stalls(world, culprit=2)), policy()).draft.state.incidents.quarantines

    def test_a_stall_that_is_over_is_settled_and_blames_nobody_later(self) -> None:
        """All waited in a slow collective and went on. One worker's next stall is no verdict upon the others."""
        world = training()
        waited = tuple(stall(member.worker, member.ranks[0]) for member in world.plan.members)
        first = think(replace(world, faults=waited), policy())
        assert not decisions(first)
        newer = stall("j-w0-0", 0, step=600)
        newer = replace(newer, name="j-w0-0-stall-1-2", ranks=(replace(newer.ranks[0], step=600, sequence=90),))
        later = change_members(again(first, world), step=600)
        second = think(replace(later, faults=(*waited, newer)), policy())
        assert not decisions(second)
        assert {fault.name for fault in waited} <= set(second.draft.state.incidents.settled)
        assert newer.name not in second.draft.state.incidents.settled

    def test_a_stall_of_the_round_before_does_not_hide_the_next_hang(self) -> None:
        """The launchers have begun a round by themselves, in the same membership."""
        world = change_members(training(), round=2)
        old = stall("j-w1-0", 1, round_=1)
        hanging = tuple(replace(fault, name=f"{fault.name}-2", round=2) for fault in stalls(world, culprit=2))
        thought = think(replace(world, faults=(old, *hanging)), policy())
        (incident,) = thought.draft.state.incidents.current
        assert (incident.cause, incident.rank) == (Cause.HANG, 2)
        assert old.name in thought.draft.state.incidents.settled


class TestWorkerLost:
    def test_a_spare_takes_over_at_once_and_a_new_one_is_made(self) -> None:
        world = training()
        thought = think(change_worker(world, "j-w1-0", gone=True), policy())
        assert seats(thought.draft) == ["j-w0-0", "j-w4-0", "j-w2-0", "j-w3-0"]
        assert (thought.draft.plan.membership, thought.draft.plan.round) == (2, 2)
        assert [worker.name for worker in missing(thought.observation)] == ["j-w1-1"]
        assert not thought.draft.state.budget.restarts  # a disruption burns no budget

    def test_one_that_is_told_to_end_first_gets_its_checkpoint(self) -> None:
        world = change_worker(training(), "j-w1-0", pod={"deleting": True, "delete_by": NOW + 30})
        thought = think(world, policy())
        assert thought.draft.plan.checkpoint_request == 1
        assert seats(thought.draft)[1] == "j-w1-0"
        answered = change_members(again(thought, world), checkpoint_request=1)
        assert seats(think(answered, policy()).draft)[1] == "j-w4-0"

    def test_one_that_ends_while_others_checkpoint_is_replaced_at_once(self) -> None:
        world = change_worker(training(), "j-w1-0", pod={"deleting": True, "delete_by": NOW + 30})
        world = change_worker(again(think(world, policy()), world), "j-w1-0", gone=True)
        assert seats(think(world, policy()).draft)[1] == "j-w4-0"

    def test_without_a_spare_the_seat_waits_and_the_incident_stays_open(self) -> None:
        world = change_worker(training(spares=0), "j-w1-0", gone=True)
        thought = think(world, policy())
        assert seats(thought.draft)[1] == "j-w1-0"
        assert [worker.name for worker in missing(thought.observation)] == ["j-w1-1"]
        later = with_pods(again(thought, world), state=LauncherState.RUNNING)
        later = change_worker(later, "j-w1-0", gone=True)
        later = change_worker(later, "j-w1-1", heartbeat={"state": LauncherState.WARM})
        assert seats(think(later, policy()).draft)[1] == "j-w1-1"

    def test_a_job_that_may_shrink_goes_on_with_fewer(self) -> None:
        world = training(spares=0, job=job(4, 0, min_replicas=2))
        world = change_worker(world, "j-w1-0", gone=True)
        world = again(think(world, policy()), world)
        pending = replace(world, now=NOW + 11)
        draft = think(pending, policy()).draft
        assert len(draft.plan.members) == 4  # its successor may still come
        world = with_pods(world, state=LauncherState.RUNNING)
        world = change_worker(world, "j-w1-0", gone=True)
        world = change_worker(
            world,
            "j-w1-1",
            pod={"node": "", "address": "", "unschedulable": "0/6 nodes"},
            heartbeat={"state": LauncherState.STARTING},
        )
        draft = think(replace(world, now=NOW + 11), policy()).draft
        assert seats(draft) == ["j-w0-0", "j-w2-0", "j-w3-0"]
        assert [member.ranks for member in draft.plan.members] == [(0,), (1,), (2,)]

    def test_its_peers_crashes_are_no_incidents_of_their_own(self) -> None:
        world = replace(training(), faults=(crash("j-w0-0", 0), crash("j-w2-0", 2)))
        thought = think(change_worker(world, "j-w1-0", gone=True), policy())
        assert [incident.cause for incident in thought.draft.state.incidents.current] == [Cause.WORKER_LOST]
        assert not thought.draft.state.budget.restarts

    def test_a_trainer_that_ends_with_an_error_counts(self) -> None:
        world = change_worker(training(), "j-w1-0", pod={"exit_code": 1, "exit_reason": "Error"})
        assert len(think(world, policy()).draft.state.budget.restarts) == 1

    def test_a_worker_whose_trainer_ended_well_is_not_lost(self) -> None:
        world = change_worker(training(), "j-w1-0", pod={"exit_code": 0, "finished": True})
        thought = think(world, policy())
        assert thought.draft.state.life.finished == ("j-w1-0",)
        assert not decisions(thought)

    def test_a_lost_spare_is_made_anew_without_ado(self) -> None:
        thought = think(change_worker(training(), "j-w4-0", gone=True), policy())
        assert [worker.name for worker in missing(thought.observation)] == ["j-w4-1"]
        assert thought.draft.plan.membership == 1

    @pytest.mark.parametrize("pod", [{"disrupted": "Evicted", "exit_code": 137}, {"deleting": True}])
    def test_so_is_one_that_is_taken_away_while_its_pod_is_still_there(self, pod: dict[str, object]) -> None:
        thought = think(change_worker(training(), "j-w4-0", pod=pod), policy())
        assert [worker.name for worker in missing(thought.observation)] == ["j-w4-1"]
        assert not thought.draft.state.placement.failed_starts

    @pytest.mark.parametrize("state", [LauncherState.WARM, LauncherState.STARTING])
    def test_a_spare_that_dies_is_tried_again_later_and_never_fails_a_job_that_trains(
        self, state: LauncherState
    ) -> None:
        world = training()
        for tries in range(1, 5):
            name = f"j-w4-{tries - 1}"
            world = change_worker(world, name, pod={"exit_code": 1}, heartbeat={"state": state})
            thought = think(world, policy())
            assert not thought.draft.state.life.failed_reason
            assert all(incident.live for incident in thought.draft.state.incidents.open), "nothing is recovering"
            assert not missing(thought.observation)
            assert thought.draft.state.placement.failed_starts == tries
            waits = thought.draft.state.placement.retry_at - world.now
            assert 0.75 * 5 * 2 ** (tries - 1) <= waits <= 1.25 * 5 * 2 ** (tries - 1)
            world = replace(again(thought, change_worker(world, name, gone=True)), now=world.now + waits + 1)
            thought = think(world, policy())
            assert [worker.name for worker in missing(thought.observation)] == [f"j-w4-{tries}"]
            members = {view.name: view for view in world.workers}
            world = with_pods(again(thought, world), state=LauncherState.STARTING)
            world = replace(world, workers=tuple(members.get(view.name, view) for view in world.workers))
        warm = change_worker(world, "j-w4-4", heartbeat={"state": LauncherState.WARM})
        assert think(warm, policy()).draft.state.placement.failed_starts == 0


class TestRecommend:
    @pytest.fixture
    def watching(self) -> Policy:
        return policy(mode=Mode.RECOMMEND)

    def test_all_but_acting(self, watching: Policy) -> None:
        world = training()
        thought = think(replace(world, faults=stalls(world, culprit=2)), watching)
        assert thought.draft.plan.membership == 1
        (incident,) = thought.draft.state.incidents.current
        assert (incident.outcome, incident.remedy, incident.applied) == (Outcome.RECOMMENDED, "RestartRanks", None)

    def test_what_hangs_is_recommended_upon_once(self, watching: Policy) -> None:
        world = training()
        world = replace(world, faults=stalls(world, culprit=2))
        thought = think(world, watching)
        assert len(decisions(thought)) == 1
        assert not decisions(think(replace(again(thought, world), now=NOW + 1), watching))

    def test_lost_workers_are_replaced_as_kubernetes_would(self, watching: Policy) -> None:
        thought = think(change_worker(training(), "j-w1-0", gone=True), watching)
        (incident,) = thought.draft.state.incidents.open
        assert (incident.mode, incident.remedy, seats(thought.draft)[1]) == (Mode.ACT, "ReplaceWorker", "j-w4-0")
        silent = replace(change_worker(training(), "j-w1-0", silent_seconds=400.0, reachable=False), operator_age=500.0)
        assert seats(think(silent, watching).draft)[1] == "j-w1-0", "its pod is there"

    @pytest.mark.parametrize("out_of_memory", [False, True])
    def test_crashed_ranks_restart_in_place_which_counts(self, watching: Policy, out_of_memory: bool) -> None:
        """Another worker, where that would do better, is only recommended."""
        world = training()
        assert think(world, watching).draft.plan.restarts == 10
        fault = crash("j-w1-0", 1, noticed_at=NOW - 5, out_of_memory=out_of_memory)
        thought = think(replace(world, faults=(fault,)), watching)
        (incident,) = thought.draft.state.incidents.open
        assert (incident.remedy, incident.applied, len(thought.draft.state.budget.restarts)) == ("RestartRanks", NOW, 1)
        assert seats(thought.draft)[1] == "j-w1-0"
        assert bool([price for price in incident.remedies if "only recommended" in price.reason]) is out_of_memory

    def test_the_restarts_that_the_user_allows_are_all(self, watching: Policy) -> None:
        thought = think(
            replace(training(), faults=(crash("j-w1-0", 1, noticed_at=NOW - 5),)), replace(watching, max_restarts=0)
        )
        assert thought.draft.state.life.failed_reason == "RestartBudgetSpent"

    @pytest.mark.parametrize("mode", Mode)
    def test_in_a_pause_nothing_is_done_and_nothing_fails(self, mode: Mode) -> None:
        paused = policy(mode=mode, paused="maintenance", max_restarts=0)
        assert think(training(), paused).draft.plan.restarts == 0
        thought = think(replace(training(), faults=(crash("j-w1-0", 1, noticed_at=NOW - 5),)), paused)
        assert not thought.draft.state.life.over
        assert seats(think(change_worker(training(), "j-w1-0", gone=True), paused).draft)[1] == "j-w1-0"

    def test_a_remedy_that_is_not_allowed_is_not_done_in_another_way(self) -> None:
        world = change_worker(training(), "j-w1-0", gone=True)
        thought = think(world, policy(allow=frozenset({Remedy.RESTART_RANKS})))
        assert seats(thought.draft)[1] == "j-w1-0"
        (incident,) = thought.draft.state.incidents.current
        assert "spec.remediation.allow" in incident.remedies[0].reason

    def test_scaling_is_the_users_wish_not_a_remedy(self, watching: Policy) -> None:
        world = training(2, 2, job=job(3, 1))
        thought = think(world, watching)
        grown = think(change_members(again(thought, world), checkpoint_request=1), watching)
        assert len(grown.draft.plan.members) == 3

    def test_what_was_recommended_is_done_once_it_may_be(self, watching: Policy) -> None:
        world = training()
        world = replace(world, faults=stalls(world, culprit=2))
        later = tuple(replace(fault, name=f"{fault.name}-2") for fault in world.faults)  # launchers repeat a stall
        thought = think(again(think(world, watching), world, faults=later), policy())
        (incident,) = thought.draft.state.incidents.open
        assert (incident.mode, incident.applied) == (Mode.ACT, NOW)

    def test_a_pause_is_said_to_be_why(self) -> None:
        world = change_worker(training(), "j-w1-0", gone=True)
        thought = think(world, policy(paused="remedies are paused: maintenance"))
        assert seats(thought.draft)[1] == "j-w1-0"
        assert "maintenance" in thought.draft.state.incidents.current[0].evidence[-1]


class TestStages:
    def test_complete_when_all_trainers_ended_well(self) -> None:
        world = training(replicas=2, spares=1)
        for name in ("j-w0-0", "j-w1-0"):
            world = change_worker(world, name, pod={"exit_code": 0, "finished": True, "phase": "Succeeded"})
        thought = think(world, policy())
        assert thought.draft.state.life.completed_at == NOW
        assert thought.draft.plan.stop is Stop.FINISH

    def test_suspend_tells_the_ranks_and_then_lets_the_pods_go(self) -> None:
        world = training(2, 0, job=job(2, 0, suspend=True))
        thought = think(world, policy())
        assert thought.draft.plan.stop is Stop.SUSPEND
        assert not surplus(thought.observation)
        left = again(thought, world)
        for name in ("j-w0-0", "j-w1-0"):
            left = change_worker(left, name, pod={"exit_code": 0, "finished": True, "phase": "Succeeded"})
        assert len(surplus(think(left, policy()).observation)) == 2
        assert not think(left, policy()).draft.state.life.completed_at

    def test_resume_begins_with_new_workers_and_a_later_round(self) -> None:
        world = training(2, 0, job=job(2, 0, suspend=True))
        stopped = again(think(world, policy()), world)
        for name in ("j-w0-0", "j-w1-0"):
            stopped = change_worker(stopped, name, gone=True)
        stopped = again(think(stopped, policy()), stopped)
        stopped = stopped.with_draft(stopped.draft.with_plan(sequence_cost=(0.0, 0.0, 1.0)))
        resumed = replace(stopped, job=job(2, 0))
        thought = think(resumed, policy())
        assert thought.draft.plan.stop is Stop.NO
        assert thought.draft.plan.sequence_cost is None, "the script may be another one"
        assert [worker.name for worker in missing(thought.observation)] == ["j-w0-1", "j-w1-1"]
        warm = with_pods(again(thought, resumed), state=LauncherState.WARM)
        plan = think(warm, policy()).draft.plan
        assert (plan.membership, plan.round) == (2, 2)

    def test_the_deadline_fails_the_job(self) -> None:
        limited = job(2, 0, run_policy=RunPolicySpec(active_deadline_seconds=300))
        state = think(training(2, 0, job=limited), policy()).draft.state
        assert state.life.failed_reason == "DeadlineExceeded"

    def test_growing_waits_for_a_checkpoint(self) -> None:
        world = training(2, 2, job=job(3, 1))
        thought = think(world, policy())
        assert len(thought.draft.plan.members) == 2
        assert thought.draft.plan.checkpoint_request == 1
        grown = think(change_members(again(thought, world), checkpoint_request=1), policy())
        assert seats(grown.draft) == ["j-w0-0", "j-w1-0", "j-w2-0"]

    def test_shrinking_keeps_the_first_seats(self) -> None:
        world = training(3, 0, job=job(2, 0))
        thought = think(world, policy())
        shrunk = think(change_members(again(thought, world), checkpoint_request=1), policy())
        assert seats(shrunk.draft) == ["j-w0-0", "j-w1-0"]
        assert {view.name for view in surplus(shrunk.observation)} == {"j-w2-0"}

    def test_a_failing_prometheus_changes_nothing(self) -> None:
        world = replace(training(), metrics=Metrics(unavailable="away"))
        thought = think(replace(world, faults=stalls(world, culprit=2)), policy())
        assert thought.draft.plan.membership == 2
