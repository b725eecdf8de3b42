"""The launchers restarted the ranks by themselves: it counts."""

from __future__ import annotations

from ...decision import CountRestart, Decision
from ...observation import Observation
from ...state import DesiredState
from .applied import ActionResult


def apply_count_restart(_action: CountRestart, _decision: Decision, observation: Observation) -> ActionResult:
    return ActionResult(count_launcher_restart(observation))


def count_launcher_restart(observation: Observation) -> DesiredState:
    """Return the draft with one more restart that the launchers have made in this membership."""
    draft = observation.desired.count_restart(observation.now)
    return draft.with_budget(in_membership=draft.state.budget.in_membership + 1)
