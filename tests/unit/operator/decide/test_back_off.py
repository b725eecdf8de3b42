"""Rounds of a job that has trained and that now end before their first step: the operator waits and tries again."""

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

AWAY = "Traceback …\nsocket.gaierror: [Errno -3] Temporary failure in name resolution"


class Job:
    """A job over several passes: its launchers follow the plan, and give up as real ones do."""

    def __init__(self, rules: Policy | None = None, **changes: Any) -> None:
        self.world = build_training(**{"spares": 0, **changes})
        self.rules = rules or build_policy()
        self.round = 1

    @property
    def budget(self) -> RestartBudget:
        return self.world.state.budget

    def think(self, *, seconds: float = 0.0, **changes: Any) -> DesiredState:
        """One pass, after so much time."""
        self.world = replace(self.world, now=self.world.now + seconds, **changes)
        draft = evaluate_job(self.world, self.rules).desired
        self.world = replace(self.world.with_desired(draft), faults=())
        return draft

    def runs(self, *, state: LauncherState = LauncherState.RUNNING, first_step_at: float | None = None) -> None:
        """All launchers are in the newest round."""
        membership = self.world.plan.membership
        start = {"first_step_at": first_step_at}
        self.world = change_members(self.world, state=state, membership=membership, round=self.round, start=start)

    def ends(self, *, error: str = AWAY, halts: bool = True, **changes: Any) -> DesiredState:
        """The round ends before its first step; `halts`: the launchers begin no other one."""
        how: dict[str, Any] = {"exit_code": 1, "error": error, "completed_step": False, "step": None, **changes}
        noticed = {"membership": self.world.plan.membership, "noticed_at": self.world.now}
        fault = build_crash("j-w1-0", 1, self.round, **noticed, **how)
        if not halts:
            self.round += 1
        self.runs(state=LauncherState.FAILED if halts else LauncherState.RUNNING)
        return self.think(seconds=3.0, faults=(fault,))

    def ends_twice(self, **how: Any) -> DesiredState:
        """As where DNS goes with a node: the next round is begun by the launchers, and both end at once."""
        self.round += 1
        self.runs()
        self.ends(halts=False, **how)
        return self.ends(**how)

    def waits(self) -> float:
        """Until the next round begins, pass by pass; seconds."""
        began, membership = self.world.now, self.world.plan.membership
        while self.world.plan.membership == membership:
            pause = max(0.5, (self.world.now - began) / 20)
            assert not self.think(seconds=pause).state.lifecycle.failed_reason
            assert self.world.now - began < 7200
        self.round = self.world.plan.round
        self.runs()
        return self.world.now - began


def test_two_rounds_that_end_seconds_apart_by_the_same_error_do_not_fail_it() -> None:
    job = Job()
    draft = job.ends_twice()
    assert not draft.state.lifecycle.failed_reason
    assert draft.state.budget.backoffs == 1
    assert draft.state.budget.next_round_at is not None
    assert 3 < draft.state.budget.next_round_at - job.world.now < 7


def test_each_wait_is_longer_up_to_five_minutes_and_each_round_counts_once() -> None:
    job = Job(build_policy(max_restarts=1000))
    job.ends_twice()
    waits, counted = [], []
    for _ in range(10):
        waits.append(job.waits())
        counted.append(job.budget.total_restarts)
        job.ends()
    assert waits[0] < 10
    assert 200 < waits[-1] < 380
    assert all(after > before / 2 for before, after in pairwise(waits))
    assert [after - before for before, after in pairwise(counted)] == [1] * 9


def test_hours_of_it_make_one_incident_more_than_the_first_round() -> None:
    job = Job()
    job.ends_twice()
    for _ in range(15):
        job.waits()
        job.ends()
    assert len(job.world.state.incidents.current) == 2


def test_a_spent_budget_makes_it_wait_until_a_restart_leaves_the_window() -> None:
    job = Job(build_policy(max_restarts=3))
    job.ends_twice()
    waits = []
    for _ in range(6):
        waits.append(job.waits())
        job.ends()
    assert any(wait > 1800 for wait in waits)
    restarts = job.budget.restarts
    assert all(sum(end - 3600 < at <= end for at in restarts) <= 3 for end in restarts)


def test_a_spent_budget_keeps_no_worker_from_moving_to_a_spare() -> None:
    """Its rounds end on one worker, and another one may do better: the job does not fail, and nothing more counts."""
    job = Job(build_policy(max_restarts=2), spares=1)
    draft = job.ends_twice()
    assert not draft.state.lifecycle.failed_reason
    assert draft.state.placement.find_worker("j-w1-0").dead  # type: ignore[union-attr]
    assert len(draft.state.budget.restarts) <= 2


def test_launchers_begin_no_round_by_themselves_meanwhile() -> None:
    job = Job()
    job.ends_twice()
    job.waits()
    assert job.think(seconds=0.5).plan.restarts == 0


def test_it_is_over_with_the_first_step_of_all_ranks() -> None:
    job = Job()
    job.ends_twice()
    job.waits()
    job.runs(first_step_at=job.world.now)
    draft = job.think(seconds=1.0)
    assert (draft.state.budget.backoffs, draft.state.budget.next_round_at) == (0, None)
    assert draft.plan.restarts > 0
    assert not draft.state.incidents.open


def test_a_round_that_the_launchers_have_begun_goes_on() -> None:
    job = Job()
    job.ends_twice()
    job.round += 1
    job.runs()
    before = job.world.plan.membership
    assert job.think(seconds=60.0).plan.membership == before


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
def test_what_python_says_of_the_text_of_a_script_is_the_scripts_own(error: str, fails: bool) -> None:
    draft = Job().ends_twice(error=error)
    assert draft.state.lifecycle.failed_reason == ("ScriptFailed" if fails else "")


def test_another_error_in_each_round_is_no_reason_to_hurry() -> None:
    job = Job()
    job.ends_twice()
    job.waits()
    draft = job.ends(error="OSError: port 41234")
    assert draft.state.budget.backoffs == 2
    assert len(draft.state.budget.restarts) < 10


def test_a_job_that_has_never_trained_fails() -> None:
    job = Job()
    world = change_members(job.world, start={"first_step_at": None})
    job.world = world.with_desired(world.desired.with_lifecycle(training_since=None))
    assert job.ends_twice().state.lifecycle.failed_reason == "ScriptFailed"


def test_without_any_restart_it_fails() -> None:
    assert Job(build_policy(max_restarts=0)).ends_twice().state.lifecycle.failed_reason


def test_launchers_that_cannot_meet_wait_too_once_the_budget_is_spent() -> None:
    """A partition between nodes, say."""
    job = Job(build_policy(max_restarts=1))
    world = job.world
    job.world = world.with_desired(world.desired.count_restart(NOW - 10))
    job.runs(state=LauncherState.FAILED, first_step_at=NOW - 300)
    draft = job.think(seconds=5.0)
    assert not draft.state.lifecycle.failed_reason
    assert draft.state.budget.backoffs == 1
    assert job.waits() > 3500


def test_a_lost_worker_is_replaced_meanwhile() -> None:
    job = Job()
    job.ends_twice()
    job.world = change_worker(job.world, "j-w2-0", pod={"exit_code": 137, "phase": "Failed"})
    draft = job.think(seconds=1.0)
    assert draft.state.placement.find_worker("j-w2-1") is not None


def test_the_condition_has_the_words() -> None:
    job = Job()
    job.ends_twice()
    before = JobStatus()
    found = {each.type: each for each in status.build_job_status(job.world, build_policy(), before).conditions}
    stalled = found[JobCondition.STALLED]
    assert (stalled.status, stalled.reason) == ("True", "BackOff")
    for part in ("rounds end before their first step", "attempt 1 begins at 1970", "name resolution"):
        assert part in stalled.message
    assert "attempt 1" in found[JobCondition.RECOVERING].message
    assert found[JobCondition.READY].status == "False"
