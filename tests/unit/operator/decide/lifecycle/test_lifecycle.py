"""The lifecycle of a job: start time, resumption, deadline, and workers that cannot start."""

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


def apply_step(observation: Observation) -> DesiredState:
    return lifecycle.advance_lifecycle(observation, build_policy())


class TestStartTime:
    def test_the_job_starts_when_the_operator_observes_it(self) -> None:
        assert apply_step(build_fresh()).state.lifecycle.start_time == NOW
        assert apply_step(build_training()).state.lifecycle.start_time == NOW - 400, "it does not change later"

    def test_a_suspended_job_has_no_start_time(self) -> None:
        assert apply_step(build_fresh(job=build_job(suspend=True))).state.lifecycle.start_time is None

    def test_training_begins_with_the_first_step_of_the_first_round(self) -> None:
        observation = build_training()
        first = observation.with_desired(observation.desired.with_lifecycle(training_since=None))
        assert apply_step(first).state.lifecycle.training_since == NOW - 300
        assert apply_step(change_members(first, start={"first_step_at": None})).state.lifecycle.training_since is None
        later = change_members(observation, round=2, start={"first_step_at": NOW - 5})
        assert apply_step(later).state.lifecycle.training_since == NOW - 300, "later rounds do not change it"

    def test_the_highest_reported_round_is_recorded(self) -> None:
        assert apply_step(change_members(build_training(), round=7)).state.placement.highest_round == 7


class TestNoProgressRound:
    def find_no_progress_round(self, no_progress_round: int, *, is_training: bool = True) -> int | None:
        """Return the recorded no-progress round while the second round runs."""
        observation = build_training()
        observation = observation.with_desired(
            observation.desired.with_budget(
                no_progress_round=no_progress_round, no_progress_error="e", no_progress_worker="w"
            )
        )
        observation = change_members(observation, round=2, start={"first_step_at": NOW - 1 if is_training else None})
        budget = apply_step(observation).state.budget
        assert (
            bool(budget.no_progress_round) == bool(budget.no_progress_error) == bool(budget.no_progress_worker)
            or not no_progress_round
        )
        return budget.no_progress_round

    def test_a_later_round_that_trains_clears_the_no_progress_round(self) -> None:
        assert self.find_no_progress_round(1) is None

    def test_other_rounds_do_not_clear_the_no_progress_round(self) -> None:
        assert self.find_no_progress_round(1, is_training=False) == 1
        assert self.find_no_progress_round(2) == 2, (
            "it is the current round: it completed no step, and its reports are late"
        )

    def test_without_a_no_progress_round_the_desired_state_is_unchanged(self) -> None:
        observation = change_members(build_training(), round=2)
        observation = observation.with_desired(apply_step(observation))
        assert apply_step(observation) is observation.desired


class TestResume:
    def build_suspended(self, *, pods: bool) -> Observation:
        observation = build_training(2, 1, job=build_job(2, 1))
        desired = observation.desired.with_plan(stop=Stop.SUSPEND).with_lifecycle(stopped_at=NOW - 5)
        observation = observation.with_desired(desired)
        for view in observation.workers:
            observation = change_worker(observation, view.name, gone=not pods)
        return observation

    def test_the_job_resumes_once_the_last_pod_is_gone(self) -> None:
        assert apply_step(self.build_suspended(pods=True)).plan.stop is Stop.SUSPEND
        all_gone = change_worker(self.build_suspended(pods=False), "j-w0-0", pod={})
        one_left = self.build_suspended(pods=True)
        for name in ("j-w0-0", "j-w1-0"):
            one_left = change_worker(one_left, name, gone=True)
        assert apply_step(one_left).plan.stop is Stop.SUSPEND
        resumed = apply_step(all_gone)
        assert (resumed.plan.stop, resumed.plan.members) == (Stop.NO, ())
        assert resumed.state.placement.workers == ()
        assert resumed.state.lifecycle.start_time == NOW


class TestDeadline:
    @pytest.mark.parametrize(("limit", "fails"), [(401, False), (400, True)])
    def test_the_deadline_counts_from_the_start_time(self, limit: int, fails: bool) -> None:
        limited = build_job(run_policy=RunPolicySpec(active_deadline_seconds=limit))
        lifecycle_state = apply_step(build_training(job=limited)).state.lifecycle
        assert lifecycle_state.failed_reason == ("DeadlineExceeded" if fails else "")

    def test_no_job_fails_while_the_clock_disagrees_with_the_api_server(self) -> None:
        limited = build_training(job=build_job(run_policy=RunPolicySpec(active_deadline_seconds=400)))
        assert not apply_step(replace(limited, clock_agrees=False)).state.lifecycle.failed_reason

    def test_a_start_time_before_the_creation_does_not_shorten_the_deadline(self) -> None:
        observation = build_training(job=build_job(run_policy=RunPolicySpec(active_deadline_seconds=1001)))
        early_start = observation.with_desired(observation.desired.with_lifecycle(start_time=NOW - 9000))
        assert not apply_step(early_start).state.lifecycle.failed_reason, "it was created 1000 s ago"
        assert apply_step(replace(early_start, now=NOW + 1)).state.lifecycle.failed_reason

    def test_a_job_without_a_deadline_does_not_fail(self) -> None:
        assert not apply_step(replace(build_training(), now=NOW + 10_000_000)).state.lifecycle.failed_reason


class TestCannotStart:
    def build_stuck(self, seconds: float, *, trained: bool = False) -> Observation:
        observation = (build_training if trained else build_untrained)(
            2, 0, job=build_job(2, 0, scheduling_timeout=60.0)
        )
        desired = observation.desired.with_plan(members=()).with_placement(placing_since=NOW - seconds)
        observation = with_pods(observation.with_desired(desired))
        return change_worker(
            observation, "j-w1-0", pod={"waiting_reason": "ErrImagePull", "waiting_message": "no such host"}
        )

    def test_the_job_fails_after_the_scheduling_timeout(self) -> None:
        assert not apply_step(self.build_stuck(59)).state.lifecycle.failed_reason
        lifecycle_state = apply_step(self.build_stuck(60)).state.lifecycle
        assert lifecycle_state.failed_reason == "ImagePullFailed"
        assert lifecycle_state.failed_message == "worker j-w1-0 cannot start: ErrImagePull: no such host"

    def test_a_resumed_job_waits_for_its_registry_and_is_stalled(self) -> None:
        observation = self.build_stuck(1000, trained=True)
        assert not apply_step(observation).state.lifecycle.failed_reason
        found = {
            condition.type: condition
            for condition in status.build_job_status(observation, build_policy(), JobStatus()).conditions
        }["Stalled"]
        assert (found.status, found.reason) == ("True", "BackOff")
        assert found.message == "worker j-w1-0 cannot start: ErrImagePull: no such host; its kubelet tries again"

    def test_a_missing_secret_is_a_separate_reason(self) -> None:
        pod = {
            "waiting_reason": "CreateContainerConfigError",
            "waiting_message": 'secret "s" not found',
            "waiting_container": "trainer",
        }
        lifecycle_state = apply_step(change_worker(self.build_stuck(60), "j-w1-0", pod=pod)).state.lifecycle
        assert lifecycle_state.failed_reason == "ContainerCannotStart"
        assert lifecycle_state.failed_message.endswith(
            'container trainer: CreateContainerConfigError: secret "s" not found'
        )

    def test_only_a_job_that_is_being_placed_fails(self) -> None:
        observation = self.build_stuck(1000)
        idle = observation.with_desired(observation.desired.with_placement(placing_since=None))
        assert not apply_step(idle).state.lifecycle.failed_reason
        training = observation.with_desired(observation.desired.with_plan(members=build_training(2, 0).plan.members))
        assert not apply_step(training).state.lifecycle.failed_reason

    def test_other_reasons_for_waiting_do_not_fail_the_job(self) -> None:
        observation = change_worker(self.build_stuck(1000), "j-w1-0", pod={"waiting_reason": "PodInitializing"})
        assert not apply_step(observation).state.lifecycle.failed_reason
