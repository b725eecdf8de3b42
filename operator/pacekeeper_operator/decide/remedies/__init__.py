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
from .applied import Applied

Kind = TypeVar("Kind", bound=Action)
Act = Callable[[Sequence[Any], Decision, Observation], Applied]


def apply(decision: Decision, observation: Observation) -> Applied:
    """Carry all actions of `decision` out, in their order, upon the draft that `observation` holds."""
    words: list[str] = []
    for kind, actions in groupby(decision.actions, type):
        done = ACTS[kind](tuple(actions), decision, observation)
        observation = observation.with_draft(done.draft)
        words += done.words
    return Applied(observation.draft, tuple(words))


def _one_by_one(act: Callable[[Kind, Decision, Observation], Applied]) -> Act:
    """Each upon the draft that the one before has left."""

    def all_of_them(actions: Sequence[Kind], decision: Decision, observation: Observation) -> Applied:
        words: list[str] = []
        for action in actions:
            done = act(action, decision, observation)
            observation = observation.with_draft(done.draft)
            words += done.words
        return Applied(observation.draft, tuple(words))

    return all_of_them


ACTS: Mapping[type[Any], Act] = {
    decisions.CountRestart: _one_by_one(count_restart.apply),
    decisions.RestartRanks: _one_by_one(restart_ranks.apply),
    decisions.BackOff: _one_by_one(back_off.apply),
    decisions.ReplaceWorker: replace_worker.apply,
    decisions.Adapt: _one_by_one(adapt.apply),
    decisions.PlanTraffic: _one_by_one(plan_traffic.apply),
    decisions.QuarantineNode: _one_by_one(quarantine_node.apply),
    decisions.FailJob: _one_by_one(fail_job.apply),
}
"""What carries out actions of a kind that stand one after the other."""
