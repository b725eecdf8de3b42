"""The launchers restarted the ranks by themselves: it counts."""

from __future__ import annotations

from ..decision import CountRestart, Decision
from ..observation import Observation
from .applied import Applied


def apply(_action: CountRestart, decision: Decision, observation: Observation) -> Applied:
    state = observation.state
    return Applied(
        observation.draft.with_state(
            restarts=(*state.restarts, decision.first_sign),
            restarts_total=state.restarts_total + 1,
            membership_restarts=state.membership_restarts + 1,
            barren_round=decision.round if decision.barren else state.barren_round,
            barren_error=decision.error if decision.barren else state.barren_error,
        )
    )
