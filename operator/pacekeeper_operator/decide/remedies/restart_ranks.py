"""Restart the ranks in place: a new membership with the same members."""

from __future__ import annotations

from ...state import rounds
from ...state.observation import Observation
from ..decision import Decision, RestartRanks
from .action_result import ActionResult


def apply_restart_ranks(_action: RestartRanks, _decision: Decision, observation: Observation) -> ActionResult:
    return ActionResult(rounds.begin_round(observation, observation.plan.members).count_restart(observation.now))
