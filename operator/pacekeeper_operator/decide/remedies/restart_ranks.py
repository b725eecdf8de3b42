"""The next round by the same workers: a new membership with the same members, which the launchers follow in place."""

from __future__ import annotations

from ... import rounds
from ...decision import Decision, RestartRanks
from ...observation import Observation
from .applied import Applied


def apply(_action: RestartRanks, _decision: Decision, observation: Observation) -> Applied:
    return Applied(rounds.begin(observation, observation.plan.members).count_restart(observation.now))
