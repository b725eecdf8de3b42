"""The next round by the same workers: a new membership with the same members, which the launchers follow in place."""

from __future__ import annotations

from .. import rounds
from ..decision import Decision, RestartRanks
from ..observation import Observation
from .applied import Applied


def apply(_action: RestartRanks, decision: Decision, observation: Observation) -> Applied:
    draft = rounds.begin(observation, observation.plan.members)
    state = draft.state
    return Applied(
        draft.with_state(restarts=(*state.restarts, decision.first_sign), restarts_total=state.restarts_total + 1)
    )
