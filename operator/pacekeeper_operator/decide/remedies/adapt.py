"""Another way to train: it stands in the plan, and rank 0 hands it to all ranks on one step."""

from __future__ import annotations

from dataclasses import replace

from pacekeeper_analysis.adapt import Trouble
from pacekeeper_analysis.plan import SyncMode

from ... import modes
from ...decision import Adapt, Decision
from ...observation import Observation
from .applied import Applied


def apply(action: Adapt, decision: Decision, observation: Observation) -> Applied:
    draft = replace(observation.draft, plan=replace(action.way.applied_to(observation.plan), evidence_request=""))
    if action.way.mode is not SyncMode.SYNC:
        name = decision.incident_name(observation.job)
        draft = modes.entered(draft, action.trouble, action.way.reason, name, observation.now)
    if action.trouble is Trouble.COMPUTE and decision.rank is not None:
        before = decision.slowdown_before or 1.0
        lost = observation.state.adaptation.lost_by(observation.now, before, decision.first_sign)
        draft = draft.with_adaptation(loss=lost.goes_on(observation.now, action.way.slowdown_after))
    if not action.mended:
        return Applied(draft)  # the suspicion stays: more evidence, and another remedy at once
    return Applied(
        draft.with_adaptation(suspicion=None, tolerated_pace=observation.metrics.pace or 0.0, tolerated_behind=0.0)
    )
