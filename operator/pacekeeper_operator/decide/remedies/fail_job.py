"""Nothing helps: the ranks stop, and the job says why."""

from __future__ import annotations

from pacekeeper_analysis.plan import Stop

from ...decision import Decision, FailJob
from ...observation import Observation
from .applied import ActionResult

MAX_FAILURE_MESSAGE_CHARACTERS = 4000
"""Characters of a condition's message; its end, the script's last lines, matters most."""


def apply_fail_job(action: FailJob, _decision: Decision, observation: Observation) -> ActionResult:
    message = action.message if len(action.message) <= MAX_FAILURE_MESSAGE_CHARACTERS else "… " + action.message[-MAX_FAILURE_MESSAGE_CHARACTERS:]
    return ActionResult(
        observation.desired.with_plan(stop=Stop.FINISH).with_lifecycle(
            failed_reason=str(action.reason), failed_message=message, stopped_at=observation.now
        )
    )
