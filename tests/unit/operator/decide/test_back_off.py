"""Back-off of a job that has trained, and whose rounds now end before their first step."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from pacekeeper_analysis.protocol.reports import LauncherState
from pacekeeper_operator.api.conditions import JobCondition
from pacekeeper_operator.api.training_job import JobStatus
from pacekeeper_operator.decide.evaluate import evaluate_job
from pacekeeper_operator.decide.lifecycle import status
from pacekeeper_operator.state.desired_state import DesiredState, RestartBudget
from pacekeeper_operator.state.policy import Policy
from testing.operators.observations import (
    NOW,
    build_crash,
    build_policy,
    build_training,
    change_members,
    change_worker,
)

UNAVAILABLE = "Traceback …\nsocket.gaierror: [Errno -3] Temporary failure in name resolution"


class BackOffJob:
    """A job over several passes: its launchers follow the plan, and fail as real ones do."""

    def __init__(self, policy: Policy | None = None, **changes: Any) -> None:
        self.observation = build_training(**{"spares": 0, **changes})
        self.policy = policy or build_policy()
        self.round = 1

    @property
    def budget(self) -> RestartBudget:
        return self.observation.state.budget

    def run_pass(self, *, seconds: float = 0.0, **changes: Any) -> DesiredState:
        """Run one pass after `seconds`."""
        self.observation = replace(self.observation, now=self.observation.now + seconds, **changes)
        desired = evaluate_job(self.observation, self.policy).desired
        self.observation = replace(self.observation.with_desired(desired), faults=())
        return desired

    def start_round(self, *, state: LauncherState = LauncherState.RUNNING, first_step_at: float | None = None) -> None:
        """Put all launchers into the newest round."""
        membership = self.observation.plan.membership
        start = {"first_step_at": first_step_at}
        self.observation = change_members(
            self.observation, state=state, membership=membership, round=self.round, start=start
        )

    def end_round(self, *, error: str = UNAVAILABLE, launchers_stop: bool = True, **changes: Any) -> DesiredState:
        """End the round before its first step; `launchers_stop`: the launchers begin no other one."""
        fault_values: dict[str, Any] = {
            "exit_code": 1,
            "error": error,
            "completed_step": False,
            "step": None,
            **changes,
        }
        context = {"membership": self.observation.plan.membership, "noticed_at": self.observation.now}
        fault = build_crash("j-w1-0", 1, self.round, **context, **fault_values)
        if not launchers_stop:
            self.round += 1
        self.start_round(state=LauncherState.FAILED if launchers_stop else LauncherState.RUNNING)
        return self.run_pass(seconds=3.0, faults=(fault,))

    def end_two_rounds(self, **fault_values: Any) -> DesiredState:
        """End two rounds at once, as when DNS fails: the launchers begin the next round by themselves."""
        self.round += 1
        self.start_round()
        self.end_round(launchers_stop=False, **fault_values)
        return self.end_round(**fault_values)

    def wait_for_round(self) -> float:
        """Run passes until the next round begins; return the seconds until then."""
        started_at, membership = self.observation.now, self.observation.plan.membership
        while self.observation.plan.membership == membership:
            pause = max(0.5, (self.observation.now - started_at) / 20)
            assert not self.run_pass(seconds=pause).state.lifecycle.failed_reason
            assert self.observation.now - started_at < 7200
        self.round = self.observation.plan.round
        self.start_round()
        return self.observation.now - started_at


def test_two_rounds_that_end_with_the_same_error_do_not_fail_the_job() -> None:
    job = BackOffJob()
    desired = job.end_two_rounds()
    assert not desired.state.lifecycle.failed_reason
    assert desired.state.budget.backoffs == 1
    assert desired.state.budget.next_round_at is not None
    assert 3 < desired.state.budget.next_round_at - job.observation.now < 7


def test_each_wait_is_longer_up_to_five_minutes_and_each_round_counts_once() -> None:
    job = BackOffJob(build_policy(max_restarts=1000))
    job.end_two_rounds()
    waits, counted = [], []
    for _ in range(10):
        waits.append(job.wait_for_round())
        counted.append(job.budget.total_restarts)
        job.end_round()
    assert waits[0] < 10
    assert 200 < waits[-1] < 380
    assert all(after > before / 2 for before, after in pairwise(waits))
    assert [after - before for before, after in pairwise(counted)] == [1] * 9


def test_hours_of_back_off_are_one_incident() -> None:
    job = BackOffJob()
    job.end_two_rounds()
    for _ in range(15):
        job.wait_for_round()
        job.end_round()
    assert len(job.observation.state.incidents.current) == 2


def test_without_a_restart_left_the_job_waits_until_one_leaves_the_window() -> None:
    job = BackOffJob(build_policy(max_restarts=3))
    job.end_two_rounds()
    waits = []
    for _ in range(6):
        waits.append(job.wait_for_round())
        job.end_round()
    assert any(wait > 1800 for wait in waits)
    restarts = job.budget.restarts
    assert all(sum(end - 3600 < time <= end for time in restarts) <= 3 for end in restarts)


def test_without_a_restart_left_a_worker_still_moves_to_a_spare() -> None:
    """The rounds end on one worker, and another may succeed: the job does not fail, and no more restarts count."""
    job = BackOffJob(build_policy(max_restarts=2), spares=1)
    desired = job.end_two_rounds()
    assert not desired.state.lifecycle.failed_reason
    assert desired.state.placement.find_worker("j-w1-0").dead  # type: ignore[union-attr]
    assert len(desired.state.budget.restarts) <= 2


def test_launchers_begin_no_round_during_the_back_off() -> None:
    job = BackOffJob()
    job.end_two_rounds()
    job.wait_for_round()
    assert job.run_pass(seconds=0.5).plan.restarts == 0


def test_the_back_off_ends_with_the_first_step_of_all_ranks() -> None:
    job = BackOffJob()
    job.end_two_rounds()
    job.wait_for_round()
    job.start_round(first_step_at=job.observation.now)
    desired = job.run_pass(seconds=1.0)
    assert (desired.state.budget.backoffs, desired.state.budget.next_round_at) == (0, None)
    assert desired.plan.restarts > 0
    assert not desired.state.incidents.open


def test_a_round_that_the_launchers_have_begun_continues() -> None:
    job = BackOffJob()
    job.end_two_rounds()
    job.round += 1
    job.start_round()
    before = job.observation.plan.membership
    assert job.run_pass(seconds=60.0).plan.membership == before


@pytest.mark.parametrize(
    ("error", "fails"),
    [
        ("Traceback …\nImportError: cannot import name 'x'", True),
        ("Traceback …\n[rank1]: ModuleNotFoundError: No module named 'x'", True),
        ("  x = = 1\nSyntaxError: invalid syntax", True),
        ("Traceback …\nOSError: [Errno 116] Stale file handle", False),
        ("Traceback …\ntorch.distributed.DistNetworkError: no route", False),
        ("killed", False),
    ],
)
def test_import_and_syntax_errors_fail_the_job(error: str, fails: bool) -> None:
    desired = BackOffJob().end_two_rounds(error=error)
    assert desired.state.lifecycle.failed_reason == ("ScriptFailed" if fails else "")


def test_another_error_does_not_reset_the_back_off() -> None:
    job = BackOffJob()
    job.end_two_rounds()
    job.wait_for_round()
    desired = job.end_round(error="OSError: port 41234")
    assert desired.state.budget.backoffs == 2
    assert len(desired.state.budget.restarts) < 10


def test_a_job_that_has_never_trained_fails() -> None:
    job = BackOffJob()
    observation = change_members(job.observation, start={"first_step_at": None})
    job.observation = observation.with_desired(observation.desired.with_lifecycle(training_since=None))
    assert job.end_two_rounds().state.lifecycle.failed_reason == "ScriptFailed"


def test_without_any_allowed_restart_the_job_fails() -> None:
    assert BackOffJob(build_policy(max_restarts=0)).end_two_rounds().state.lifecycle.failed_reason


def test_failed_launchers_wait_too_once_no_restart_is_left() -> None:
    """An example is a network partition between nodes."""
    job = BackOffJob(build_policy(max_restarts=1))
    observation = job.observation
    job.observation = observation.with_desired(observation.desired.count_restart(NOW - 10))
    job.start_round(state=LauncherState.FAILED, first_step_at=NOW - 300)
    desired = job.run_pass(seconds=5.0)
    assert not desired.state.lifecycle.failed_reason
    assert desired.state.budget.backoffs == 1
    assert job.wait_for_round() > 3500


def test_a_lost_worker_is_replaced_during_the_back_off() -> None:
    job = BackOffJob()
    job.end_two_rounds()
    job.observation = change_worker(job.observation, "j-w2-0", pod={"exit_code": 137, "phase": "Failed"})
    desired = job.run_pass(seconds=1.0)
    assert desired.state.placement.find_worker("j-w2-1") is not None


def test_the_conditions_describe_the_back_off() -> None:
    job = BackOffJob()
    job.end_two_rounds()
    before = JobStatus()
    found = {
        condition.type: condition
        for condition in status.build_job_status(job.observation, build_policy(), before).conditions
    }
    stalled = found[JobCondition.STALLED]
    assert (stalled.status, stalled.reason) == ("True", "BackOff")
    for part in ("rounds end before their first step", "attempt 1 begins at 1970", "name resolution"):
        assert part in stalled.message
    assert "attempt 1" in found[JobCondition.RECOVERING].message
    assert found[JobCondition.READY].status == "False"
