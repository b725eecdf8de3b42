"""Fail the job: the ranks stop, and the job's status shows why."""

from __future__ import annotations

from pacekeeper_analysis.protocol.plan import Stop

from ...state.observation import Observation
from ..decision import Decision, FailJob
from .action_result import ActionResult

MAX_FAILURE_MESSAGE_CHARACTERS = 4000
"""Characters of a condition's message. The message is cut at its beginning: the script's last lines matter most."""


def apply_fail_job(action: FailJob, _decision: Decision, observation: Observation) -> ActionResult:
    message = (
        action.message
        if len(action.message) <= MAX_FAILURE_MESSAGE_CHARACTERS
        else "… " + action.message[-MAX_FAILURE_MESSAGE_CHARACTERS:]
    )
    return ActionResult(
        observation.desired.with_plan(stop=Stop.FINISH).with_lifecycle(
            failed_reason=str(action.reason), failed_message=message, stopped_at=observation.now
        )
    )
