"""Nothing helps: the ranks stop, and the job says why."""

from __future__ import annotations

from pacekeeper_analysis.plan import Stop

from ...decision import Decision, FailJob
from ...observation import Observation
from .applied import Applied

MAX_MESSAGE = 4000
"""Characters of a condition's message; its end, the script's last lines, matters most."""


def apply(action: FailJob, _decision: Decision, observation: Observation) -> Applied:
    message = action.message if len(action.message) <= MAX_MESSAGE else "… " + action.message[-MAX_MESSAGE:]
    return Applied(
        observation.draft.with_plan(stop=Stop.FINISH).with_life(
            failed_reason=str(action.reason), failed_message=message, stopped_at=observation.now
        )
    )
