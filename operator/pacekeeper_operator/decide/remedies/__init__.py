"""Remedies: one module each. Each changes the draft of plan and bookkeeping, which is written as one, and is
idempotent: an operator that dies before the write has done nothing, and one that dies after it has done all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ... import decision as decisions
from ...decision import Action, Decision
from ...observation import Observation
from . import adapt, count_restart, fail_job, plan_traffic, quarantine_node, replace_worker, restart_ranks
from .applied import Applied

ACTS: Mapping[type[Any], Callable[[Any, Decision, Observation], Applied]] = {
    decisions.CountRestart: count_restart.apply,
    decisions.RestartRanks: restart_ranks.apply,
    decisions.ReplaceWorker: replace_worker.apply,
    decisions.Adapt: adapt.apply,
    decisions.PlanTraffic: plan_traffic.apply,
    decisions.QuarantineNode: quarantine_node.apply,
    decisions.FailJob: fail_job.apply,
}


def apply(action: Action, decision: Decision, observation: Observation) -> Applied:
    """Carry one action of `decision` out upon the draft that `observation` holds."""
    return ACTS[type(action)](action, decision, observation)
