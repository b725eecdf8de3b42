"""New shares of the batch: they stand in the plan, and rank 0 hands them to all ranks on one step."""

from __future__ import annotations

from ..decision import Decision, Rebalance
from ..observation import Observation
from .applied import Applied


def apply(action: Rebalance, _decision: Decision, observation: Observation) -> Applied:
    draft = observation.draft.with_plan(shares=action.shares, evidence_request="")
    if not action.mended:
        return Applied(draft)  # the suspicion stays: more evidence, and a dearer remedy once the loss is worth it
    return Applied(draft.with_state(suspicion=None, tolerated_pace=observation.metrics.pace or 0.0))
