"""Give workers up. Who takes their ranks, and when, follows from what is there: `decide.membership`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...decision import Decision, ReplaceWorker
from ...observation import Observation
from ...state import Worker
from .. import workforce
from .applied import Applied


def apply(actions: Sequence[ReplaceWorker], _decision: Decision, observation: Observation) -> Applied:
    """All at once: one event may take thousands."""
    draft = observation.draft
    seated = {member.worker for member in draft.plan.members}
    given_up: list[Worker] = []
    for action in actions:
        worker = observation.state.placement.worker(action.worker)
        if worker is None:
            continue
        given_up.append(
            replace(worker, leaving=action.reason, dead=action.dead, force=action.force, patient=action.patient)
        )
        if action.refused:
            draft = workforce.hold_back(draft, observation)
        elif action.never_ready:
            draft = workforce.put_off(draft, observation)
        elif action.worker in seated and not action.disruption:
            draft = draft.count_restart(observation.now)
    return Applied(draft.with_workers(given_up))
