"""Remedies: one module each. Each changes the draft of plan and bookkeeping, which is written as one, and is
idempotent: an operator that dies before the write has done nothing, and one that dies after it has done all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, TypeVar

from ... import decision as decisions
from ...decision import Action, Decision
from ...observation import Observation
from . import adapt, back_off, count_restart, fail_job, plan_traffic, quarantine_node, replace_worker, restart_ranks
from .applied import ActionResult

ActionT = TypeVar("ActionT", bound=Action)
ActionHandler = Callable[[Sequence[Any], Decision, Observation], ActionResult]


def apply_actions(decision: Decision, observation: Observation) -> ActionResult:
    """Carry all actions of `decision` out, in their order, upon the draft that `observation` holds."""
    words: list[str] = []
    for kind, actions in groupby(decision.actions, type):
        done = ACTION_HANDLERS[kind](tuple(actions), decision, observation)
        observation = observation.with_desired(done.desired)
        words += done.notes
    return ActionResult(observation.desired, tuple(words))


def _apply_one_by_one(act: Callable[[ActionT, Decision, Observation], ActionResult]) -> ActionHandler:
    """Each upon the draft that the one before has left."""

    def all_of_them(actions: Sequence[ActionT], decision: Decision, observation: Observation) -> ActionResult:
        words: list[str] = []
        for action in actions:
            done = act(action, decision, observation)
            observation = observation.with_desired(done.desired)
            words += done.notes
        return ActionResult(observation.desired, tuple(words))

    return all_of_them


ACTION_HANDLERS: Mapping[type[Any], ActionHandler] = {
    decisions.CountRestart: _apply_one_by_one(count_restart.apply_count_restart),
    decisions.RestartRanks: _apply_one_by_one(restart_ranks.apply_restart_ranks),
    decisions.BackOff: _apply_one_by_one(back_off.apply_back_off),
    decisions.ReplaceWorker: replace_worker.apply_replace_workers,
    decisions.Adapt: _apply_one_by_one(adapt.apply_strategy),
    decisions.PlanTraffic: _apply_one_by_one(plan_traffic.apply_plan_traffic),
    decisions.QuarantineNode: _apply_one_by_one(quarantine_node.apply_quarantine_node),
    decisions.FailJob: _apply_one_by_one(fail_job.apply_fail_job),
}
"""What carries out actions of a kind that stand one after the other."""
