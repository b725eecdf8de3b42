"""Another training strategy: it is written into the plan, and rank 0 passes it to all ranks at one step."""

from __future__ import annotations

from dataclasses import replace

from pacekeeper_analysis.protocol.plan import SyncMode
from pacekeeper_analysis.stragglers.strategies import Bottleneck

from ...state import sync_mode_changes
from ...state.observation import Observation
from ..decision import Adapt, Decision
from .action_result import ActionResult


def apply_strategy(action: Adapt, decision: Decision, observation: Observation) -> ActionResult:
    desired = replace(observation.desired, plan=action.strategy.apply_to(observation.plan)).with_requests(evidence=None)
    if action.strategy.mode is not SyncMode.SYNC:
        incident_name = decision.incident_name(observation.job)
        desired = sync_mode_changes.enter_local_sgd(
            desired, action.bottleneck, action.strategy.reason, incident_name, observation.now
        )
    if action.bottleneck is Bottleneck.COMPUTE and decision.rank is not None:
        slowdown_before = decision.slowdown_before or 1.0
        loss = observation.state.adaptation.accumulate_loss(observation.now, slowdown_before, decision.first_sign)
        desired = desired.with_adaptation(loss=loss.continue_at(observation.now, action.strategy.slowdown_after))
    if not action.sufficient:
        return ActionResult(desired)  # the investigation goes on: more evidence, and another remedy at once
    return ActionResult(
        desired.with_adaptation(
            investigation=None,
            suppressed_relative_time=observation.metrics.relative_time,
            suppressed_peer_slowdown=None,
        )
    )
