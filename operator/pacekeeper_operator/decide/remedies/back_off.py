"""Back-off before the next round: the rounds before it completed no step, and the reason may pass."""

from __future__ import annotations

from ...state.observation import Observation
from ..decision import BackOff, Decision
from ..placement import workforce
from .action_result import ActionResult
from .count_restart import count_launcher_restart


def apply_back_off(_action: BackOff, decision: Decision, observation: Observation) -> ActionResult:
    """Delay the next round longer than the one before. A round that the launchers have already begun counts."""
    desired = (
        count_launcher_restart(observation) if observation.progress.round > decision.round else observation.desired
    )
    backoffs = observation.state.budget.backoffs
    pause = workforce.compute_backoff(observation.job.uid, backoffs)
    return ActionResult(desired.with_budget(backoffs=backoffs + 1, next_round_at=observation.now + pause))
