"""Launchers that have given up meet anew, unless it is known, or about to be known, that this would not help."""

from __future__ import annotations

from dataclasses import replace

from pacekeeper_analysis.reports import LauncherState
from pacekeeper_operator.decide import round_failed
from pacekeeper_operator.decision import RestartRanks
from pacekeeper_operator.observation import Observation
from tests.support import worlds


def given_up(seconds: float) -> Observation:
    """All members have said so `seconds` ago."""
    world = worlds.change_members(worlds.training(), state=LauncherState.FAILED)
    return replace(world, workers=tuple(replace(view, state_seconds=seconds) for view in world.workers))


def test_they_meet_anew() -> None:
    decision = round_failed.check(given_up(4.0), worlds.policy())
    assert decision is not None
    assert decision.actions == (RestartRanks(),)


def test_the_faults_that_say_why_may_still_be_on_their_way() -> None:
    assert round_failed.check(given_up(0.1), worlds.policy()) is None


def test_why_they_gave_up_is_judged_first() -> None:
    world = replace(given_up(4.0), faults=(worlds.crash("j-w0-0", 0),))
    assert round_failed.check(world, worlds.policy()) is None
