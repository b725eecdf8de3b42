"""The next round by the same workers: a new membership with the same members, which the launchers follow in place."""

from __future__ import annotations

from ... import rounds
from ...decision import Decision, RestartRanks
from ...observation import Observation
from .applied import ActionResult


def apply_restart_ranks(_action: RestartRanks, _decision: Decision, observation: Observation) -> ActionResult:
    return ActionResult(rounds.begin_round(observation, observation.plan.members).count_restart(observation.now))
