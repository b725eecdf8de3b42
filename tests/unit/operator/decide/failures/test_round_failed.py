"""Launchers that have given up meet anew, unless it is known, or about to be known, that this would not help."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pacekeeper_analysis.protocol.reports import FaultKind, FaultReport, LauncherState
from pacekeeper_operator.decide.decision import FailJob, RestartRanks
from pacekeeper_operator.decide.failures import round_failed
from pacekeeper_operator.state.observation import Observation
from testing.operators import observations


def given_up(seconds: float) -> Observation:
    """All members have said so `seconds` ago."""
    world = observations.change_members(observations.build_training(), state=LauncherState.FAILED)
    return replace(world, workers=tuple(replace(view, state_seconds=seconds) for view in world.workers))


def test_they_meet_anew() -> None:
    decision = round_failed.check_failed_rounds(given_up(4.0), observations.build_policy())
    assert decision is not None
    assert decision.actions == (RestartRanks(),)


def test_the_faults_that_say_why_may_still_be_on_their_way() -> None:
    assert round_failed.check_failed_rounds(given_up(0.1), observations.build_policy()) is None


def test_why_they_gave_up_is_judged_first() -> None:
    world = replace(given_up(4.0), faults=(observations.build_crash("j-w0-0", 0),))
    assert round_failed.check_failed_rounds(world, observations.build_policy()) is None


@pytest.mark.parametrize(("ago", "judged"), [(2.9, False), (3.0, True)])
def test_a_lost_worker_is_looked_for_before_that_is_judged(ago: float, judged: bool) -> None:
    fault = FaultReport("f", FaultKind.ROUND_FAILED, "j-w0-0", 1, observations.NOW - ago, 1)
    decision = round_failed.check_failed_rounds(
        replace(observations.build_training(), faults=(fault,)), observations.build_policy()
    )
    assert (decision is not None) is judged


@pytest.mark.parametrize(("used", "fails"), [(1, False), (2, True), (3, True)])
def test_without_a_restart_left_the_job_fails(used: int, fails: bool) -> None:
    world = given_up(4.0)
    world = world.with_desired(world.desired.with_lifecycle(training_since=None))
    spent = world.desired.with_budget(restarts=tuple(observations.NOW - n for n in range(1, used + 1)))
    decision = round_failed.check_failed_rounds(world.with_desired(spent), observations.build_policy(max_restarts=2))
    assert decision is not None
    assert isinstance(decision.actions[0], FailJob) is fails
