"""Remedies, one module each. A remedy only changes the desired state, which is persisted in one write.

So remedies are atomic: an operator that crashes before the write has done nothing, and one that crashes after it has
done everything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, TypeVar

from ...state.observation import Observation
from .. import decision as decisions
from ..decision import Action, Decision
from . import adapt, back_off, count_restart, fail_job, plan_traffic, quarantine_node, replace_worker, restart_ranks
from .action_result import ActionResult

ActionT = TypeVar("ActionT", bound=Action)
ActionHandler = Callable[[Sequence[Any], Decision, Observation], ActionResult]


def apply_actions(decision: Decision, observation: Observation) -> ActionResult:
    """Apply all actions of `decision`, in their order, to the desired state of `observation`."""
    notes: list[str] = []
    for kind, actions in groupby(decision.actions, type):
        result = ACTION_HANDLERS[kind](tuple(actions), decision, observation)
        observation = observation.with_desired(result.desired)
        notes += result.notes
    return ActionResult(observation.desired, tuple(notes))


def _apply_one_by_one(act: Callable[[ActionT, Decision, Observation], ActionResult]) -> ActionHandler:
    """Return a handler that applies `act` to one action after the other."""

    def all_of_them(actions: Sequence[ActionT], decision: Decision, observation: Observation) -> ActionResult:
        notes: list[str] = []
        for action in actions:
            result = act(action, decision, observation)
            observation = observation.with_desired(result.desired)
            notes += result.notes
        return ActionResult(observation.desired, tuple(notes))

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
"""Action type → handler of consecutive actions of that type."""
