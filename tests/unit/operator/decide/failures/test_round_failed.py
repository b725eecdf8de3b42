"""Launchers that have failed begin a new round, unless another check explains the failure or may soon do so."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pacekeeper_analysis.protocol.reports import FaultKind, FaultReport, LauncherState
from pacekeeper_operator.decide.decision import FailJob, RestartRanks
from pacekeeper_operator.decide.failures import round_failed
from pacekeeper_operator.state.observation import Observation
from testing.operators import observations


def build_failed_launchers(seconds: float) -> Observation:
    """Build a job whose launchers all reported `seconds` ago that they have failed."""
    observation = observations.change_members(observations.build_training(), state=LauncherState.FAILED)
    return replace(observation, workers=tuple(replace(view, state_seconds=seconds) for view in observation.workers))


def test_launchers_that_have_failed_begin_a_new_round() -> None:
    decision = round_failed.check_failed_rounds(build_failed_launchers(4.0), observations.build_policy())
    assert decision is not None
    assert decision.actions == (RestartRanks(),)


def test_no_decision_is_made_while_fault_reports_may_still_arrive() -> None:
    assert round_failed.check_failed_rounds(build_failed_launchers(0.1), observations.build_policy()) is None


def test_a_crash_is_decided_first() -> None:
    observation = replace(build_failed_launchers(4.0), faults=(observations.build_crash("j-w0-0", 0),))
    assert round_failed.check_failed_rounds(observation, observations.build_policy()) is None


@pytest.mark.parametrize(("age_seconds", "is_decided"), [(2.9, False), (3.0, True)])
def test_a_failed_round_waits_for_the_check_for_lost_workers(age_seconds: float, is_decided: bool) -> None:
    fault = FaultReport("f", FaultKind.ROUND_FAILED, "j-w0-0", 1, observations.NOW - age_seconds, 1)
    decision = round_failed.check_failed_rounds(
        replace(observations.build_training(), faults=(fault,)), observations.build_policy()
    )
    assert (decision is not None) is is_decided


@pytest.mark.parametrize(("used", "fails"), [(1, False), (2, True), (3, True)])
def test_without_a_restart_left_the_job_fails(used: int, fails: bool) -> None:
    observation = build_failed_launchers(4.0)
    observation = observation.with_desired(observation.desired.with_lifecycle(training_since=None))
    with_restarts = observation.desired.with_budget(restarts=tuple(observations.NOW - n for n in range(1, used + 1)))
    decision = round_failed.check_failed_rounds(
        observation.with_desired(with_restarts), observations.build_policy(max_restarts=2)
    )
    assert decision is not None
    assert isinstance(decision.actions[0], FailJob) is fails
