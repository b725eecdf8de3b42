"""The job as a whole: when it is taken up, resumed, out of time, or cannot start."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pacekeeper_analysis.protocol.plan import Stop
from pacekeeper_operator.api.training_job import JobStatus, RunPolicySpec
from pacekeeper_operator.decide.lifecycle import lifecycle, status
from pacekeeper_operator.state.desired_state import DesiredState
from pacekeeper_operator.state.observation import Observation
from testing.operators.observations import (
    NOW,
    build_fresh,
    build_job,
    build_policy,
    build_training,
    build_untrained,
    change_members,
    change_worker,
    with_pods,
)


def step(world: Observation) -> DesiredState:
    return lifecycle.advance_lifecycle(world, build_policy())


class TestTakenUp:
    def test_since_the_operator_has_seen_it(self) -> None:
        assert step(build_fresh()).state.lifecycle.start_time == NOW
        assert step(build_training()).state.lifecycle.start_time == NOW - 400, "and never again"

    def test_but_not_while_it_is_suspended(self) -> None:
        assert step(build_fresh(job=build_job(suspend=True))).state.lifecycle.start_time is None

    def test_it_trains_since_the_first_step_of_its_first_round(self) -> None:
        world = build_training()
        first = world.with_desired(world.desired.with_lifecycle(training_since=None))
        assert step(first).state.lifecycle.training_since == NOW - 300
        assert step(change_members(first, start={"first_step_at": None})).state.lifecycle.training_since is None
        later = change_members(world, round=2, start={"first_step_at": NOW - 5})
        assert step(later).state.lifecycle.training_since == NOW - 300, "whatever rounds come later"

    def test_rounds_that_were_heard_of_are_remembered(self) -> None:
        assert step(change_members(build_training(), round=7)).state.placement.highest_round == 7


class TestBarrenRound:
    def after(self, barren: int, *, trains: bool = True) -> int | None:
        """The round that is remembered as barren, when the second round is under way."""
        world = build_training()
        world = world.with_desired(
            world.desired.with_budget(no_progress_round=barren, no_progress_error="e", no_progress_worker="w")
        )
        world = change_members(world, round=2, start={"first_step_at": NOW - 1 if trains else None})
        budget = step(world).state.budget
        assert (
            bool(budget.no_progress_round) == bool(budget.no_progress_error) == bool(budget.no_progress_worker)
            or not barren
        )
        return budget.no_progress_round

    def test_a_later_round_that_trains_redeems_it(self) -> None:
        assert self.after(1) is None

    def test_nothing_else_does(self) -> None:
        assert self.after(1, trains=False) == 1
        assert self.after(2) == 2, "it is this one: it completed no step, and what is told of it is late"

    def test_what_is_not_there_is_not_written(self) -> None:
        world = change_members(build_training(), round=2)
        world = world.with_desired(step(world))
        assert step(world) is world.desired


class TestResume:
    def suspended(self, *, pods: bool) -> Observation:
        world = build_training(2, 1, job=build_job(2, 1))
        draft = world.desired.with_plan(stop=Stop.SUSPEND).with_lifecycle(stopped_at=NOW - 5)
        world = world.with_desired(draft)
        for view in world.workers:
            world = change_worker(world, view.name, gone=not pods)
        return world

    def test_it_waits_until_the_last_pod_has_gone(self) -> None:
        assert step(self.suspended(pods=True)).plan.stop is Stop.SUSPEND
        one = change_worker(self.suspended(pods=False), "j-w0-0", pod={})
        left = self.suspended(pods=True)
        for name in ("j-w0-0", "j-w1-0"):
            left = change_worker(left, name, gone=True)
        assert step(left).plan.stop is Stop.SUSPEND
        resumed = step(one)
        assert (resumed.plan.stop, resumed.plan.members) == (Stop.NO, ())
        assert resumed.state.placement.workers == ()
        assert resumed.state.lifecycle.start_time == NOW


class TestDeadline:
    @pytest.mark.parametrize(("limit", "fails"), [(401, False), (400, True)])
    def test_counts_from_when_the_job_was_taken_up(self, limit: int, fails: bool) -> None:
        limited = build_job(run_policy=RunPolicySpec(active_deadline_seconds=limit))
        life = step(build_training(job=limited)).state.lifecycle
        assert life.failed_reason == ("DeadlineExceeded" if fails else "")

    def test_a_clock_that_disagrees_with_the_api_servers_fails_nobody(self) -> None:
        limited = build_training(job=build_job(run_policy=RunPolicySpec(active_deadline_seconds=400)))
        assert not step(replace(limited, clock_agrees=False)).state.lifecycle.failed_reason

    def test_one_that_was_behind_when_the_job_was_taken_up_makes_it_no_shorter(self) -> None:
        world = build_training(job=build_job(run_policy=RunPolicySpec(active_deadline_seconds=1001)))
        behind = world.with_desired(world.desired.with_lifecycle(start_time=NOW - 9000))
        assert not step(behind).state.lifecycle.failed_reason, "it was made 1000 s ago"
        assert step(replace(behind, now=NOW + 1)).state.lifecycle.failed_reason

    def test_there_need_not_be_one(self) -> None:
        assert not step(replace(build_training(), now=NOW + 10_000_000)).state.lifecycle.failed_reason


class TestCannotStart:
    def stuck(self, seconds: float, *, trained: bool = False) -> Observation:
        world = (build_training if trained else build_untrained)(2, 0, job=build_job(2, 0, scheduling_timeout=60.0))
        draft = world.desired.with_plan(members=()).with_placement(placing_since=NOW - seconds)
        world = with_pods(world.with_desired(draft))
        return change_worker(world, "j-w1-0", pod={"waiting_reason": "ErrImagePull", "waiting_message": "no such host"})

    def test_after_the_time_that_placing_may_take(self) -> None:
        assert not step(self.stuck(59)).state.lifecycle.failed_reason
        life = step(self.stuck(60)).state.lifecycle
        assert life.failed_reason == "ImagePullFailed"
        assert life.failed_message == "worker j-w1-0 cannot start: ErrImagePull: no such host"

    def test_a_job_that_resumes_waits_for_its_registry_and_says_so(self) -> None:
        world = self.stuck(1000, trained=True)
        assert not step(world).state.lifecycle.failed_reason
        found = {each.type: each for each in status.build_job_status(world, build_policy(), JobStatus()).conditions}[
            "Stalled"
        ]
        assert (found.status, found.reason) == ("True", "BackOff")
        assert found.message == "worker j-w1-0 cannot start: ErrImagePull: no such host; its kubelet tries again"

    def test_a_missing_secret_is_no_image(self) -> None:
        why = {
            "waiting_reason": "CreateContainerConfigError",
            "waiting_message": 'secret "s" not found',
            "waiting_container": "trainer",
        }
        life = step(change_worker(self.stuck(60), "j-w1-0", pod=why)).state.lifecycle
        assert life.failed_reason == "ContainerCannotStart"
        assert life.failed_message.endswith('container trainer: CreateContainerConfigError: secret "s" not found')

    def test_only_of_a_job_that_is_being_placed(self) -> None:
        world = self.stuck(1000)
        idle = world.with_desired(world.desired.with_placement(placing_since=None))
        assert not step(idle).state.lifecycle.failed_reason
        trains = world.with_desired(world.desired.with_plan(members=build_training(2, 0).plan.members))
        assert not step(trains).state.lifecycle.failed_reason

    def test_other_waits_are_for_the_moment(self) -> None:
        world = change_worker(self.stuck(1000), "j-w1-0", pod={"waiting_reason": "PodInitializing"})
        assert not step(world).state.lifecycle.failed_reason
