"""The next round waits: the ones before it ended before their first step, and what keeps them from it may come back."""

from __future__ import annotations

from ...decision import BackOff, Decision
from ...observation import Observation
from .. import workforce
from .applied import Applied
from .count_restart import count


def apply(_action: BackOff, decision: Decision, observation: Observation) -> Applied:
    """Let the next round wait longer than the one before. A round that the launchers have begun meanwhile counts."""
    draft = count(observation) if observation.round > decision.round else observation.draft
    backoffs = observation.state.budget.backoffs
    pause = workforce.backoff(observation.job.uid, backoffs)
    return Applied(draft.with_budget(backoffs=backoffs + 1, next_round_at=observation.now + pause))
