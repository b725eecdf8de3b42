"""Give a worker up. Who takes its ranks, and when, follows from what is there: `decide.membership`."""

from __future__ import annotations

from dataclasses import replace

from ...decision import Decision, ReplaceWorker
from ...observation import Observation
from .. import workforce
from .applied import Applied


def apply(action: ReplaceWorker, _decision: Decision, observation: Observation) -> Applied:
    draft = observation.draft
    worker = draft.state.placement.worker(action.worker)
    if worker is None:
        return Applied(draft)
    given_up = replace(worker, leaving=action.reason, dead=action.dead, force=action.force, patient=action.patient)
    draft = draft.with_worker(given_up)
    if action.refused:
        return Applied(workforce.hold_back(draft, observation))
    if action.never_ready:
        return Applied(workforce.put_off(draft, observation))
    seated = any(member.worker == action.worker for member in draft.plan.members)
    return Applied(draft.count_restart(observation.now) if seated and not action.disruption else draft)
