"""Other ways through the fabric: a new membership with the same members, whose paths `decide.paths` plans in this pass.
Nothing was broken, so it burns no restart."""

from __future__ import annotations

from ... import rounds
from ...decision import Decision, PlanTraffic
from ...observation import Observation
from .applied import Applied


def apply(_action: PlanTraffic, _decision: Decision, observation: Observation) -> Applied:
    return Applied(rounds.begin(observation, observation.plan.members))
