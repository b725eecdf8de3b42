"""Another way to train: it stands in the plan, and rank 0 hands it to all ranks on one step."""

from __future__ import annotations

from dataclasses import replace

from pacekeeper_analysis.adapt import Bottleneck
from pacekeeper_analysis.plan import SyncMode

from ... import modes
from ...decision import Adapt, Decision
from ...observation import Observation
from .applied import ActionResult


def apply_strategy(action: Adapt, decision: Decision, observation: Observation) -> ActionResult:
    draft = replace(observation.desired, plan=replace(action.strategy.apply_to(observation.plan), evidence_request=""))
    if action.strategy.mode is not SyncMode.SYNC:
        name = decision.incident_name(observation.job)
        draft = modes.enter_local_sgd(draft, action.bottleneck, action.strategy.reason, name, observation.now)
    if action.bottleneck is Bottleneck.COMPUTE and decision.rank is not None:
        before = decision.slowdown_before or 1.0
        lost = observation.state.adaptation.accumulate_loss(observation.now, before, decision.first_sign)
        draft = draft.with_adaptation(loss=lost.continue_at(observation.now, action.strategy.slowdown_after))
    if not action.sufficient:
        return ActionResult(draft)  # the suspicion stays: more evidence, and another remedy at once
    return ActionResult(
        draft.with_adaptation(suspicion=None, tolerated_pace=observation.metrics.pace or 0.0, tolerated_behind=0.0)
    )
