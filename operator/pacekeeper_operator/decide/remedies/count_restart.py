"""The launchers restarted the ranks by themselves: it counts."""

from __future__ import annotations

from ...decision import CountRestart, Decision
from ...observation import Observation
from .applied import Applied


def apply(_action: CountRestart, _decision: Decision, observation: Observation) -> Applied:
    draft = observation.draft.count_restart(observation.now)
    return Applied(draft.with_budget(in_membership=draft.state.budget.in_membership + 1))
