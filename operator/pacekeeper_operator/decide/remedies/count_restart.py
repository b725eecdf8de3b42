"""The launchers restarted the ranks by themselves: it counts."""

from __future__ import annotations

from ...decision import CountRestart, Decision
from ...observation import Observation
from ...state import Draft
from .applied import Applied


def apply(_action: CountRestart, _decision: Decision, observation: Observation) -> Applied:
    return Applied(count(observation))


def count(observation: Observation) -> Draft:
    """Return the draft with one more restart that the launchers have made in this membership."""
    draft = observation.draft.count_restart(observation.now)
    return draft.with_budget(in_membership=draft.state.budget.in_membership + 1)
