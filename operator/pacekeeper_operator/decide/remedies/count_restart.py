"""The launchers restarted the ranks by themselves: it counts."""

from __future__ import annotations

from ...decision import CountRestart, Decision
from ...observation import Observation
from .applied import Applied


def apply(_action: CountRestart, decision: Decision, observation: Observation) -> Applied:
    draft = observation.draft.count_restart(observation.now)
    draft = draft.with_budget(in_membership=draft.state.budget.in_membership + 1)
    if decision.barren:
        draft = draft.with_budget(
            barren_round=decision.round, barren_error=decision.error, barren_worker=decision.worker or ""
        )
    return Applied(draft)
