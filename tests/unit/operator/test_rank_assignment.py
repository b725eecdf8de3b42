"""Nothing gets stuck over who sits where: each test is a state that a job once did not leave, or left the wrong way."""

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

BARREN: dict[str, Any] = {"completed_step": False, "exit_code": 1, "error": "RuntimeError: CUDA error"}


def seats(thought: PassResult) -> list[str]:
    return [member.worker for member in thought.desired.plan.members]


def again(thought: PassResult, world: Observation, **changes: Any) -> Observation:
    """The world after a pass was written."""
    return replace(world.with_desired(thought.desired), **changes)


def made(thought: PassResult) -> list[str]:
    """Names of the pods that are to be created."""
    return [worker.name for worker in list_missing_workers(thought.observation)]


def deleted(thought: PassResult) -> list[tuple[str, bool]]:
    """Names of the pods that are to be deleted, and whether by force."""
    return [(view.name, view.record.force) for view in list_surplus_workers(thought.observation)]


def only(thought: PassResult) -> Incident:
    (incident,) = list_decisions(thought)
    return incident


def could_not_meet(world: Observation) -> tuple[FaultReport, ...]:
    return tuple(
        FaultReport(
            f"{m.worker}-round-failed",
            FaultKind.ROUND_FAILED,
            m.worker,
            world.progress.round,
            NOW - 60,
            world.plan.membership,
        )
        for m in world.plan.members
    )


class TestFrozen:
    def frozen(self, seconds: float = LAUNCHER_UNRESPONSIVE_SECONDS, spares: int = 1) -> Observation:
        return change_worker(build_training(spares=spares), "j-w1-0", heartbeat={"launcher_silent_seconds": seconds})

    def test_a_spare_takes_over_without_waiting_for_a_checkpoint_and_the_node_is_not_blamed(self) -> None:
        thought = evaluate_job(self.frozen(), build_policy())
        assert seats(thought) == ["j-w0-0", "j-w4-0", "j-w2-0", "j-w3-0"]
        assert deleted(thought) == [("j-w1-0", False)], "with its grace: the kubelet ends what is stopped"
        assert made(thought) == ["j-w1-1"]
        incident = only(thought)
        assert (incident.cause, incident.class_, incident.worker) == (
            IncidentCause.WORKER_UNRESPONSIVE,
            IncidentClass.UNKNOWN,
            "j-w1-0",
        )
        assert incident.first_sign == NOW - LAUNCHER_UNRESPONSIVE_SECONDS
        assert not thought.desired.state.incidents.quarantine_requests
        assert len(thought.desired.state.budget.restarts) == 1

    def test_without_a_spare_its_pod_goes_at_once_since_its_successor_needs_the_gpus(self) -> None:
        thought = evaluate_job(self.frozen(spares=0), build_policy())
        assert (deleted(thought), made(thought)) == ([("j-w1-0", False)], ["j-w1-1"])
        world = change_worker(again(thought, self.frozen(spares=0)), "j-w1-0", gone=True)
        members = {view.name: view for view in world.workers if view.pod is not None}
        world = with_pods(world, state=LauncherState.WARM)
        world = replace(world, workers=tuple(members.get(view.name, view) for view in world.workers))
        assert seats(evaluate_job(world, build_policy())) == ["j-w0-0", "j-w1-1", "j-w2-0", "j-w3-0"]

    def test_a_short_pause_is_none(self) -> None:
        assert not list_decisions(evaluate_job(self.frozen(LAUNCHER_UNRESPONSIVE_SECONDS - 1), build_policy()))

    def test_ranks_that_cannot_be_killed_are_the_same(self) -> None:
        world = change_worker(
            build_training(), "j-w2-0", heartbeat={"unkillable_ranks": (2,), "state": LauncherState.FAILED}
        )
        world = replace(world, faults=could_not_meet(world)[2:3])
        thought = evaluate_job(world, build_policy())
        assert seats(thought)[2] == "j-w4-0"
        assert (only(thought).cause, "rank 2" in only(thought).message) == (IncidentCause.WORKER_UNRESPONSIVE, True)

    def test_what_its_peers_say_of_it_is_settled_and_costs_nothing_more(self) -> None:
        world = self.frozen()
        faults = (
            *could_not_meet(world),
            *build_stalls(world, culprit=1)[:1],
            build_crash("j-w3-0", 3, noticed_at=NOW - 30),
        )
        thought = evaluate_job(replace(world, faults=faults), build_policy())
        assert only(thought).cause is IncidentCause.WORKER_UNRESPONSIVE
        assert {fault.name for fault in faults} <= set(thought.desired.state.incidents.settled_faults)
        assert len(thought.desired.state.budget.restarts) == 1

    @pytest.mark.parametrize("seconds", [LAUNCHER_UNRESPONSIVE_SECONDS / 2, LAUNCHER_UNRESPONSIVE_SECONDS])
    def test_peers_that_do_not_come_together_spend_no_budget_while_one_stands_still(self, seconds: float) -> None:
        world = self.frozen(seconds)
        may_not = build_policy(allow=frozenset({Remedy.RESTART_RANKS}))
        thought = evaluate_job(replace(world, faults=could_not_meet(world)), may_not)
        assert thought.desired.plan.membership == 1
        assert not thought.desired.state.budget.restarts

    def test_a_frozen_spare_is_replaced_while_the_job_trains(self) -> None:
        world = change_worker(build_training(), "j-w4-0", heartbeat={"launcher_silent_seconds": 60.0})
        thought = evaluate_job(world, build_policy())
        assert (deleted(thought), made(thought)) == ([("j-w4-0", False)], ["j-w4-1"])
        (incident,) = thought.desired.state.incidents.open
        assert incident.live, "nothing is recovering"
        assert not thought.desired.state.budget.restarts

    def test_one_whose_ranks_have_ended_is_left_in_peace(self) -> None:
        world = change_worker(self.frozen(), "j-w1-0", heartbeat={"state": LauncherState.FINISHED})
        assert not list_decisions(evaluate_job(world, build_policy()))

    def test_with_the_budget_spent_the_job_fails_and_says_why(self) -> None:
        world = self.frozen()
        world = world.with_desired(world.desired.with_budget(restarts=(NOW - 10,)))
        life = evaluate_job(world, build_policy(max_restarts=1)).desired.state.lifecycle
        assert life.failed_reason == "RestartBudgetSpent"
        assert "unresponsive" in life.failed_message


class TestFinished:
    def test_exit_code_0_without_the_launchers_word_is_no_success(self) -> None:
        """`pacekeeper run … | tee log` whose launcher is killed."""
        world = build_training(2, 1)
        for name in ("j-w0-0", "j-w1-0"):
            world = change_worker(world, name, pod={"exit_code": 0, "phase": "Succeeded"})
        thought = evaluate_job(world, build_policy())
        assert (thought.desired.state.lifecycle.finished, thought.desired.state.lifecycle.is_over) == ((), False)
        assert len(thought.desired.state.budget.restarts) == 1, (
            "it costs a restart: a command that always does it fails"
        )
        unheard = replace(world, workers=tuple(replace(view, heartbeat=None) for view in world.workers))
        assert not evaluate_job(unheard, build_policy()).desired.state.lifecycle.is_over, (
            "nor for an operator that has just begun"
        )

    def test_what_a_worker_has_said_itself_counts_when_its_pod_has_gone(self) -> None:
        """One exits 0, and the other one's pod vanishes before its exit was seen."""
        world = change_worker(
            build_training(2, 0), "j-w0-0", pod={"exit_code": 0, "finished": True, "phase": "Succeeded"}
        )
        world = change_worker(world, "j-w1-0", heartbeat={"state": LauncherState.FINISHED}, gone=True)
        assert evaluate_job(world, build_policy()).desired.state.lifecycle.completed_at == NOW

    def test_that_is_remembered_by_the_next_operator(self) -> None:
        world = change_worker(build_training(2, 0), "j-w1-0", heartbeat={"state": LauncherState.FINISHED})
        first = evaluate_job(world, build_policy())
        assert first.desired.state.lifecycle.finished == ("j-w1-0",)
        world = change_worker(again(first, world), "j-w1-0", gone=True, heartbeat={}, silent_seconds=5.0)
        world = replace(world, workers=tuple(replace(view, heartbeat=None) for view in world.workers))
        world = change_worker(world, "j-w0-0", pod={"exit_code": 0, "finished": True})
        assert evaluate_job(world, build_policy()).desired.state.lifecycle.completed_at == NOW

    def test_a_pod_that_vanished_without_a_word_is_no_success_and_the_others_begin_anew(self) -> None:
        """The job finished while the operator was away: nobody knows how the second worker ended."""
        world = change_worker(
            build_training(2, 0), "j-w0-0", pod={"exit_code": 0, "finished": True, "phase": "Succeeded"}
        )
        world = change_worker(world, "j-w1-0", gone=True)
        world = replace(world, workers=tuple(replace(view, heartbeat=None) for view in world.workers))
        thought = evaluate_job(world, build_policy())
        assert not thought.desired.state.lifecycle.completed_at
        assert made(thought) == ["j-w0-1", "j-w1-1"]
        world = with_pods(again(thought, world), state=LauncherState.WARM)
        world = change_worker(change_worker(world, "j-w0-0", gone=True), "j-w1-0", gone=True)
        later = evaluate_job(world, build_policy())
        assert sorted(seats(later)) == ["j-w0-1", "j-w1-1"]
        assert later.desired.plan.membership == 2
        assert later.desired.state.lifecycle.finished == ()

    def test_a_worker_lost_beside_a_finished_one_is_replaced_and_the_finished_one_joins_again(self) -> None:
        world = change_worker(build_training(), "j-w0-0", heartbeat={"state": LauncherState.FINISHED})
        thought = evaluate_job(change_worker(world, "j-w1-0", gone=True), build_policy())
        assert seats(thought) == ["j-w0-0", "j-w4-0", "j-w2-0", "j-w3-0"]
        assert (thought.desired.plan.membership, thought.desired.state.lifecycle.finished) == (2, ())

    def test_one_whose_trainer_has_ended_is_replaced_too(self) -> None:
        world = change_worker(
            build_training(4, 2), "j-w0-0", pod={"exit_code": 0, "finished": True, "phase": "Succeeded"}
        )
        thought = evaluate_job(change_worker(world, "j-w1-0", gone=True), build_policy())
        assert seats(thought) == ["j-w4-0", "j-w5-0", "j-w2-0", "j-w3-0"]
        later = evaluate_job(change_members(again(thought, world), membership=2, round=2), build_policy())
        assert not later.desired.state.lifecycle.completed_at

    def test_without_spares_all_wait_for_the_new_ones_and_nothing_flickers(self) -> None:
        world = change_worker(
            build_training(4, 0), "j-w0-0", pod={"exit_code": 0, "finished": True, "phase": "Succeeded"}
        )
        world = change_worker(world, "j-w1-0", gone=True)
        thought = evaluate_job(world, build_policy())
        assert made(thought) == ["j-w0-1", "j-w1-1"]
        world = change_worker(again(thought, world), "j-w2-0", heartbeat={"state": LauncherState.FINISHED})
        later = evaluate_job(world, build_policy())
        assert later.desired == world.desired
        assert made(later) == ["j-w0-1", "j-w1-1"]

    def test_who_ended_well_before_this_membership_has_not_finished_in_it(self) -> None:
        world = change_members(build_training(), membership=2)
        world = world.with_desired(world.desired.with_plan(membership=2))
        world = change_worker(world, "j-w0-0", pod={"exit_code": 0, "finished": True}, heartbeat={"membership": 1})
        thought = evaluate_job(world, build_policy())
        assert thought.desired.state.lifecycle.finished == ()
        assert seats(thought)[0] == "j-w4-0"
        assert not thought.desired.state.budget.restarts

    def test_one_that_was_done_before_it_was_heard_of_again_has_finished(self) -> None:
        warm = {"state": LauncherState.WARM, "membership": 0}
        world = change_worker(build_training(1, 0), "j-w0-0", pod={"exit_code": 0, "finished": True}, heartbeat=warm)
        assert evaluate_job(world, build_policy()).desired.state.lifecycle.completed_at == NOW

    @pytest.mark.parametrize("phase", ["Succeeded", "Running"])
    def test_a_container_that_exits_with_0_behind_a_pipe_is_no_success(self, phase: str) -> None:
        """Its launcher was killed: the last that it said is that its ranks run."""
        world = build_training(1, 0)
        world = change_worker(world, "j-w0-0", pod={"exit_code": 0, "phase": phase}, silent_seconds=20.0)
        thought = evaluate_job(world, build_policy())
        assert not thought.desired.state.lifecycle.completed_at
        assert made(thought) == ["j-w0-1"]
        assert "exited with 0, although its ranks had not finished" in only(thought).message
        assert len(thought.desired.state.budget.restarts) == 1

    def test_its_last_words_may_be_on_their_way(self) -> None:
        world = change_worker(build_training(1, 0), "j-w0-0", pod={"exit_code": 0})
        thought = evaluate_job(world, build_policy())
        assert not thought.desired.state.lifecycle.completed_at
        assert not list_decisions(thought)
        heard = change_worker(world, "j-w0-0", heartbeat={"state": LauncherState.FINISHED})
        assert evaluate_job(heard, build_policy()).desired.state.lifecycle.completed_at == NOW

    def test_as_long_as_the_others_can_come_to_their_end_nothing_is_done(self) -> None:
        world = change_worker(build_training(), "j-w0-0", pod={"exit_code": 0, "finished": True})
        thought = evaluate_job(world, build_policy())
        assert (thought.desired.plan.membership, thought.desired.state.lifecycle.finished) == (1, ("j-w0-0",))

    def test_who_waits_for_a_trainer_that_has_ended_gets_another(self) -> None:
        """A rank crashed when another worker had finished and left: the next round can never come together."""
        world = change_worker(build_training(4, 1), "j-w0-0", pod={"exit_code": 0, "finished": True})
        world = change_worker(world, "j-w1-0", heartbeat={"state": LauncherState.GATHERING}, state_seconds=0.5)
        assert evaluate_job(world, build_policy()).desired.plan.membership == 1, (
            "its news may be older than the others'"
        )
        world = change_worker(world, "j-w1-0", state_seconds=5.0)
        assert seats(evaluate_job(world, build_policy())) == ["j-w4-0", "j-w1-0", "j-w2-0", "j-w3-0"]
        assert evaluate_job(world, build_policy(paused="maintenance")).desired.plan.membership == 1
        early = change_worker(world, "j-w1-0", heartbeat={"round": 0})
        assert evaluate_job(early, build_policy()).desired.plan.membership == 1, (
            "it has not begun the round that the other finished"
        )

    def test_a_launcher_that_has_joined_a_later_round_has_not_finished(self) -> None:
        world = change_worker(build_training(), "j-w0-0", heartbeat={"state": LauncherState.FINISHED})
        world = again(evaluate_job(world, build_policy()), world)
        rejoined = change_worker(world, "j-w0-0", heartbeat={"state": LauncherState.RUNNING, "round": 2})
        assert evaluate_job(rejoined, build_policy()).desired.state.lifecycle.finished == ()


class TestBarrenRounds:
    def barren(
        self, round_: int, world: Observation, worker: str = "j-w1-0", rank: int = 1, **changes: Any
    ) -> PassResult:
        """The pass after a round without a completed step."""
        fault = build_crash(worker, rank, round_, membership=world.plan.membership, **{**BARREN, **changes})
        world = change_members(world, round=round_ + 1, start={"first_step_at": None})
        return evaluate_job(replace(world, faults=(fault,)), build_policy())

    def twice(self, world: Observation, **changes: Any) -> tuple[PassResult, Observation]:
        first = self.barren(1, world, **changes)
        assert not first.desired.state.lifecycle.failed_reason
        return self.barren(2, again(first, world), **changes), world

    def test_the_same_worker_twice_is_tried_on_a_spare_first(self) -> None:
        thought, _ = self.twice(build_untrained())
        assert not thought.desired.state.lifecycle.failed_reason
        assert seats(thought)[1] == "j-w4-0"
        assert thought.desired.state.incidents.current[-1].remedy is Remedy.REPLACE_WORKER

    def test_the_same_error_on_the_spare_is_the_scripts(self) -> None:
        thought, world = self.twice(build_untrained())
        assert seats(thought)[1] == "j-w4-0"
        world = change_members(again(thought, world), membership=2)
        third = self.barren(3, world, worker="j-w4-0")
        assert third.desired.state.lifecycle.failed_reason == "ScriptFailed"

    def test_so_is_one_that_two_workers_show_at_once(self) -> None:
        first = self.barren(1, build_untrained())
        world = change_members(again(first, build_untrained()), round=3, start={"first_step_at": None})
        both = tuple(build_crash(f"j-w{n}-0", n, 2, noticed_at=NOW - 1 + n / 10, **BARREN) for n in (1, 3))
        assert (
            evaluate_job(replace(world, faults=both), build_policy()).desired.state.lifecycle.failed_reason
            == "ScriptFailed"
        )

    def test_without_a_spare_the_same_error_twice_fails_the_job(self) -> None:
        thought, _ = self.twice(build_untrained(spares=0))
        assert thought.desired.state.lifecycle.failed_reason == "ScriptFailed"
        assert "CUDA error" in thought.desired.state.lifecycle.failed_message

    def test_a_spare_that_is_on_its_way_is_waited_for(self) -> None:
        starting = change_worker(build_untrained(), "j-w4-0", heartbeat={"state": LauncherState.STARTING})
        thought, world = self.twice(starting)
        assert not thought.desired.state.lifecycle.failed_reason
        warm = change_worker(again(thought, world), "j-w4-0", heartbeat={"state": LauncherState.WARM})
        assert seats(self.barren(3, warm))[1] == "j-w4-0"
        silent = change_worker(starting, "j-w4-0", silent_seconds=FRESH_WORKER_SECONDS + 1)
        gone, _ = self.twice(silent)
        assert gone.desired.state.lifecycle.failed_reason == "ScriptFailed"

    def test_two_signals_say_nothing_of_the_script(self) -> None:
        thought, _ = self.twice(build_untrained(spares=0), exit_code=-9, error="")
        assert not thought.desired.state.lifecycle.failed_reason
        assert len(thought.desired.state.budget.restarts) == 2

    def test_nor_do_they_beside_a_spare_which_is_tried(self) -> None:
        thought, _ = self.twice(build_untrained(), exit_code=-9, error="")
        assert seats(thought)[1] == "j-w4-0"

    def test_an_exit_code_without_a_word_is_the_scripts_own(self) -> None:
        thought, _ = self.twice(build_untrained(spares=0), exit_code=3, error="")
        assert thought.desired.state.lifecycle.failed_reason == "ScriptFailed"

    def test_signals_on_two_workers_in_turn_move_nobody(self) -> None:
        first = self.barren(1, build_untrained(), exit_code=-9, error="")
        world = again(first, build_untrained())
        second = self.barren(2, world, worker="j-w2-0", rank=2, exit_code=-9, error="")
        assert seats(second) == ["j-w0-0", "j-w1-0", "j-w2-0", "j-w3-0"]
        assert not second.desired.state.lifecycle.failed_reason


class TestNeverReady:
    def starting(self, state: LauncherState | None = LauncherState.STARTING) -> Observation:
        """The first worker's trainer runs since NOW without being warm; all others are warm."""
        start = build_fresh(2, 1)
        world = with_pods(again(evaluate_job(start, build_policy()), start), state=LauncherState.WARM)
        world = change_worker(world, "j-w0-0", pod={"started": True}, heartbeat={"state": LauncherState.STARTING})
        if state is None:
            views = tuple(replace(v, heartbeat=None) if v.name == "j-w0-0" else v for v in world.workers)
            world = replace(world, workers=views)
        return again(evaluate_job(world, build_policy()), world)

    @pytest.mark.parametrize("state", [LauncherState.STARTING, None])
    def test_it_gives_its_seat_to_a_spare_after_the_deadline(self, state: LauncherState | None) -> None:
        world = self.starting(state)
        patient = evaluate_job(replace(world, now=NOW + WARM_UP_TIMEOUT_SECONDS), build_policy())
        assert (seats(patient), list_decisions(patient)) == ([], ())
        thought = evaluate_job(replace(world, now=NOW + WARM_UP_TIMEOUT_SECONDS + 1), build_policy())
        assert seats(thought) == ["j-w1-0", "j-w2-0"]
        assert deleted(thought) == [("j-w0-0", False)]
        assert thought.desired.state.placement.failed_starts == 1
        retry_at = thought.desired.state.placement.retry_at
        assert retry_at is not None
        assert retry_at > NOW + WARM_UP_TIMEOUT_SECONDS, "what may hang again is not hurried"
        assert only(thought).class_ is IncidentClass.UNKNOWN

    def test_a_slow_image_is_waited_for(self) -> None:
        start = build_fresh(2, 1)
        world = with_pods(again(evaluate_job(start, build_policy()), start), state=LauncherState.WARM)
        world = change_worker(world, "j-w0-0", heartbeat={"state": LauncherState.STARTING})
        world = again(evaluate_job(world, build_policy()), world)
        assert not list_decisions(evaluate_job(replace(world, now=NOW + WARM_UP_TIMEOUT_SECONDS + 1), build_policy()))

    def test_the_deadline_outlives_the_operator_and_ends_with_being_warm(self) -> None:
        world = self.starting()
        assert world.state.placement.workers[0].starting_since == NOW
        content = state_codec.encode_state(world.desired, "j")
        assert state_codec.decode_state(content, "j").desired.state.placement.workers[0].starting_since == NOW
        warm = change_worker(world, "j-w0-0", heartbeat={"state": LauncherState.WARM})
        assert evaluate_job(warm, build_policy()).desired.state.placement.workers[0].starting_since is None

    def test_how_long_the_last_one_took_is_known(self) -> None:
        world = self.starting()
        later = replace(world, now=NOW + 25.0)
        warm = change_worker(later, "j-w0-0", heartbeat={"state": LauncherState.WARM})
        draft = evaluate_job(warm, build_policy()).desired
        assert draft.state.placement.start_seconds == 25.0
        assert (
            state_codec.decode_state(state_codec.encode_state(draft, "j"), "j").desired.state.placement.start_seconds
            == 25.0
        )
        assert warm.with_desired(draft).restarts.start_seconds == 25.0
        young = replace(warm, operator_age=9.0)
        assert evaluate_job(young, build_policy()).desired.state.placement.start_seconds is None, (
            "it may have been warm for long"
        )
        ended = change_worker(later, "j-w0-0", pod={"exit_code": 1})
        assert evaluate_job(ended, build_policy()).desired.state.placement.start_seconds is None, "it was never warm"

    def test_a_young_operator_that_has_not_heard_of_a_warm_spare_writes_nothing_of_it(self) -> None:
        world = change_worker(build_training(), "j-w4-0", pod={"started": True})
        world = replace(world, workers=tuple(replace(view, heartbeat=None) for view in world.workers), operator_age=5.0)
        thought = evaluate_job(world, build_policy())
        assert not any(worker.starting_since for worker in thought.desired.state.placement.workers)


class TestSpares:
    def silent(self, seconds: float = FRESH_WORKER_SECONDS + 1) -> Observation:
        return change_worker(build_training(), "j-w4-0", silent_seconds=seconds)

    def test_one_that_nobody_has_heard_of_lately_takes_no_seat(self) -> None:
        gone = change_worker(self.silent(), "j-w1-0", gone=True)
        assert seats(evaluate_job(gone, build_policy()))[1] == "j-w1-0"
        heard = change_worker(self.silent(FRESH_WORKER_SECONDS - 1), "j-w1-0", gone=True)
        assert seats(evaluate_job(heard, build_policy()))[1] == "j-w4-0"

    def test_one_on_a_lost_node_is_made_anew(self) -> None:
        world = self.silent()
        down = {**world.cluster_view.nodes, "node-4": NodeView("node-4", "u", ready=False)}
        lost = replace(world, cluster_view=replace(world.cluster_view, nodes=down))
        assert made(evaluate_job(lost, build_policy())) == ["j-w4-1"]
        assert made(evaluate_job(world, build_policy())) == [], "it may be the operator that does not hear"
        assert made(evaluate_job(change_worker(lost, "j-w4-0", silent_seconds=0.0), build_policy())) == [], "it speaks"

    def suspended(self, **node: Any) -> Observation:
        """Told to end; the pod of the spare stays in Terminating."""
        world = build_training(2, 1, job=build_job(2, 1, suspend=True))
        world = again(evaluate_job(world, build_policy()), world)
        for name in ("j-w0-0", "j-w1-0"):
            world = change_worker(world, name, gone=True)
        world = change_worker(world, "j-w2-0", pod={"deleting": True, "delete_by": NOW + 30})
        nodes = {**world.cluster_view.nodes, "node-2": NodeView("node-2", "u", **node)}
        return replace(world, cluster_view=replace(world.cluster_view, nodes=nodes))

    def test_a_pod_on_a_lost_node_does_not_block_resuming(self) -> None:
        world = self.suspended(ready=False)
        assert deleted(evaluate_job(world, build_policy())) == [("j-w2-0", True)]

    def test_nor_one_whose_kubelet_never_confirms(self) -> None:
        world = self.suspended()
        assert deleted(evaluate_job(replace(world, now=NOW + 30), build_policy())) == [], "it has its grace"
        late = replace(world, now=NOW + 30 + POD_DELETION_OVERDUE_SECONDS + 1)
        assert deleted(evaluate_job(late, build_policy())) == [("j-w2-0", True)]

    def test_then_the_job_resumes_with_new_workers(self) -> None:
        world = self.suspended(ready=False)
        world = change_worker(again(evaluate_job(world, build_policy()), world), "j-w2-0", gone=True)
        world = replace(again(evaluate_job(world, build_policy()), world), job=build_job(2, 1))
        thought = evaluate_job(world, build_policy())
        assert thought.desired.plan.stop is Stop.NO
        assert made(thought) == ["j-w0-1", "j-w1-1", "j-w2-1"]


class TestOneEvent:
    def test_many_workers_lost_at_once_are_one_incident(self) -> None:
        world = build_training(8, 1)
        for n in range(2, 8):
            world = change_worker(world, f"j-w{n}-0", gone=True)
        thought = evaluate_job(world, build_policy())
        incident = only(thought)
        assert (incident.worker, incident.rank) == ("j-w2-0", 2)
        assert incident.message.startswith("6 workers are lost: j-w2-0 (rank 2): its pod is gone; ")
        assert incident.message.endswith("; and 3 more")
        assert all(
            worker.leaving
            for worker in thought.desired.state.placement.workers
            if 2 <= worker.ordinal < 8 and not worker.incarnation
        )
        assert len(made(thought)) == 6

    def test_they_cost_one_restart(self) -> None:
        world = build_training()
        for n in (1, 2, 3):
            world = change_worker(world, f"j-w{n}-0", pod={"exit_code": 1, "exit_reason": "Error"})
        assert len(evaluate_job(world, build_policy()).desired.state.budget.restarts) == 1

    def test_another_kind_of_loss_is_another_incident(self) -> None:
        world = change_worker(build_training(), "j-w1-0", pod={"exit_code": 1, "exit_reason": "Error"})
        thought = evaluate_job(change_worker(world, "j-w2-0", gone=True), build_policy())
        assert {incident.worker for incident in list_decisions(thought)} == {"j-w1-0", "j-w2-0"}


class TestGates:
    def waiting(self, gated: bool) -> Observation:
        start = build_fresh(job=build_job(2, 0, scheduling_timeout=60.0))
        world = with_pods(again(evaluate_job(start, build_policy()), start), placed=False)
        return change_worker(world, "j-w1-0", pod={"scheduling_gated": gated})

    def test_the_time_for_placing_does_not_run_while_a_queue_holds_a_pod(self) -> None:
        world = again(evaluate_job(self.waiting(gated=True), build_policy()), self.waiting(gated=True))
        thought = evaluate_job(replace(world, now=NOW + 10_000), build_policy())
        assert deleted(thought) == []
        assert thought.desired == world.desired, "and nothing is written meanwhile"

    def test_and_is_given_whole_once_it_lets_go(self) -> None:
        world = again(evaluate_job(self.waiting(gated=True), build_policy()), self.waiting(gated=True))
        freed = change_worker(replace(world, now=NOW + 10_000), "j-w1-0", pod={"scheduling_gated": False})
        freed = again(evaluate_job(freed, build_policy()), freed)
        assert deleted(evaluate_job(replace(freed, now=NOW + 10_059), build_policy())) == []
        assert len(deleted(evaluate_job(replace(freed, now=NOW + 10_061), build_policy()))) == 2

    def test_nor_while_its_queue_holds_the_job(self) -> None:
        """Whether it has never been admitted, or was put out in the midst of being placed."""
        queued = replace(build_job(2, 0, scheduling_timeout=60.0), queue="team")
        admitted, waiting = (
            apply_queue_decision(queued, QueueDecision(admitted=True)),
            apply_queue_decision(queued, QueueDecision(admitted=False, message="no quota")),
        )
        new = build_fresh(job=waiting)
        placing = build_fresh(job=admitted)
        placing = with_pods(again(evaluate_job(placing, build_policy()), placing), placed=False)
        put_out = replace(placing, job=waiting, now=NOW + 50)
        for world in (new, put_out):
            thought = evaluate_job(world, build_policy())
            held = replace(again(thought, world), workers=(), now=NOW + 10_000)
            thought = evaluate_job(held, build_policy())
            assert (made(thought), thought.desired.state.placement.attempts) == ([], 0)
            let_in = replace(again(thought, held), job=admitted)
            for _ in range(2):  # it is resumed, then placed
                let_in = again(evaluate_job(let_in, build_policy()), let_in)
            let_in = with_pods(let_in, placed=False)
            assert len(let_in.workers) == 2
            assert deleted(evaluate_job(replace(let_in, now=NOW + 10_059), build_policy())) == []
            assert len(deleted(evaluate_job(replace(let_in, now=NOW + 10_061), build_policy()))) == 2

    def test_gates_and_running_trainers_are_seen_in_the_pod(self) -> None:
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
    def test_a_crash_that_is_dated_in_the_future_is_judged_all_the_same(self) -> None:
        world = replace(build_training(), faults=(build_crash("j-w1-0", 1, noticed_at=NOW + 7200),))
        incident = only(evaluate_job(world, build_policy()))
        assert (incident.cause, incident.first_sign) == (IncidentCause.CRASH, NOW)

    def test_so_is_a_round_that_could_not_start(self) -> None:
        world = change_members(build_training(), state=LauncherState.FAILED)
        world = replace(world, workers=tuple(replace(view, state_seconds=5.0) for view in world.workers))
        late = tuple(replace(fault, noticed_at=NOW + 7200) for fault in could_not_meet(world))
        assert only(evaluate_job(replace(world, faults=late), build_policy())).cause is IncidentCause.ROUND_FAILED

    def test_a_first_sign_is_no_older_than_what_was_mended_last(self) -> None:
        world = change_members(build_training(), round=2)
        world = world.with_desired(world.desired.with_budget(restarts=(NOW - 90, NOW - 40)))
        world = replace(world, faults=(build_crash("j-w1-0", 1, noticed_at=NOW - 7200),))
        assert only(evaluate_job(world, build_policy())).first_sign == NOW - 40

    def test_restarts_count_by_the_operators_clock(self) -> None:
        """Two hours behind, each crash fell out of the window at once: there were more than there may be."""
        world, rounds = build_training(spares=0), 0
        while not world.state.lifecycle.is_over and rounds < 10:
            rounds += 1
            world = change_members(world, round=rounds + 1, start={"first_step_at": None})
            fault = build_crash("j-w1-0", 1, rounds, noticed_at=NOW - 7200)
            world = again(evaluate_job(replace(world, faults=(fault,)), build_policy(max_restarts=3)), world)
        assert rounds == 4
        assert world.state.lifecycle.failed_reason == "RestartBudgetSpent"


class TestAllowedLater:
    @pytest.mark.parametrize("first", [{"allow": frozenset({Remedy.RESTART_RANKS})}, {"paused": "maintenance"}])
    def test_a_remedy_that_was_not_allowed_is_taken_once_it_is(self, first: dict[str, Any]) -> None:
        world = change_worker(build_training(), "j-w1-0", gone=True)
        refused = evaluate_job(world, build_policy(**first))
        assert (seats(refused)[1], refused.desired.state.incidents.current[0].applied) == ("j-w1-0", None)
        unchanged = evaluate_job(again(refused, world, now=NOW + 1), build_policy(**first))
        assert not list_decisions(unchanged)
        thought = evaluate_job(again(unchanged, world, now=NOW + 2), build_policy())
        assert seats(thought)[1] == "j-w4-0"
        assert thought.desired.state.incidents.open[0].applied == NOW + 2

    def test_what_was_done_is_not_done_again(self) -> None:
        world = change_worker(build_training(spares=0), "j-w1-0", pod={"exit_code": 1})
        thought = evaluate_job(world, build_policy())
        repeated = evaluate_job(again(thought, world, now=NOW + 1), build_policy())
        assert not list_decisions(repeated)
        assert len(repeated.desired.state.budget.restarts) == 1


class TestRounds:
    def moved(self, **changes: Any) -> Plan:
        return evaluate_job(
            replace(change_worker(build_training(), "j-w0-0", gone=True), **changes), build_policy()
        ).desired.plan

    def test_each_membership_has_a_secret_of_its_own(self) -> None:
        plan = self.moved(nonce="seven")
        assert plan.secret == hashlib.sha256(b"seven/2").hexdigest()
        assert plan.secret != self.moved(nonce="eight").secret
        assert plan.secret not in repr(plan)

    def test_nobody_has_one_where_a_member_would_be_locked_out_by_it(self) -> None:
        """An older launcher, or sidecar, does not hand it on."""
        world = change_worker(build_training(), "j-w2-0", heartbeat={"rendezvous_port": None})
        plan = evaluate_job(
            replace(change_worker(world, "j-w0-0", gone=True), nonce="seven"), build_policy()
        ).desired.plan
        assert plan.secret == ""

    def test_the_known_step_time_goes_with_it(self) -> None:
        assert self.moved().step_seconds == 0.1
        silent = replace(build_training().metrics, step_seconds=None)
        assert self.moved(metrics=silent).step_seconds is None
        known = build_training()
        known = known.with_desired(known.desired.with_plan(step_seconds=0.4))
        world = replace(change_worker(known, "j-w0-0", gone=True), metrics=silent)
        assert evaluate_job(world, build_policy()).desired.plan.step_seconds == 0.4

    @pytest.mark.parametrize(("told", "port"), [(31234, 31234), (None, Plan.store_port)])
    def test_the_meeting_is_where_its_first_member_can_serve_it(self, told: int | None, port: int) -> None:
        world = change_worker(build_training(), "j-w4-0", heartbeat={"rendezvous_port": told})
        world = change_worker(world, "j-w0-0", gone=True)
        assert evaluate_job(world, build_policy()).desired.plan.store_port == port
