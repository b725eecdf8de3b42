"""Count a restart that the launchers did by themselves."""

from __future__ import annotations

from ...state.desired_state import DesiredState
from ...state.observation import Observation
from ..decision import CountRestart, Decision
from .action_result import ActionResult


def apply_count_restart(_action: CountRestart, _decision: Decision, observation: Observation) -> ActionResult:
    return ActionResult(count_launcher_restart(observation))


def count_launcher_restart(observation: Observation) -> DesiredState:
    """Return the desired state with one more restart that the launchers did in this membership."""
    desired = observation.desired.count_restart(observation.now)
    return desired.with_budget(membership_restarts=desired.state.budget.membership_restarts + 1)
