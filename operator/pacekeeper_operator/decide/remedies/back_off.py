"""The next round waits: the ones before it ended before their first step, and what keeps them from it may come back."""

from __future__ import annotations

from ...decision import BackOff, Decision
from ...observation import Observation
from .. import workforce
from .applied import ActionResult
from .count_restart import count_launcher_restart


def apply_back_off(_action: BackOff, decision: Decision, observation: Observation) -> ActionResult:
    """Let the next round wait longer than the one before. A round that the launchers have begun meanwhile counts."""
    draft = count_launcher_restart(observation) if observation.round > decision.round else observation.desired
    backoffs = observation.state.budget.backoffs
    pause = workforce.compute_backoff(observation.job.uid, backoffs)
    return ActionResult(draft.with_budget(backoffs=backoffs + 1, next_round_at=observation.now + pause))
