"""Give a worker up. Who takes its ranks, and when, follows from what is there: `decide.membership`."""

from __future__ import annotations

from dataclasses import replace

from ..decide import workforce
from ..decision import Decision, ReplaceWorker
from ..observation import Observation
from .applied import Applied


def apply(action: ReplaceWorker, decision: Decision, observation: Observation) -> Applied:
    draft = observation.draft
    worker = draft.state.worker(action.worker)
    if worker is None:
        return Applied(draft)
    gone = replace(worker, leaving=action.reason, dead=action.dead, force=action.force)
    draft = replace(draft, state=draft.state.with_worker(gone))
    if action.never_ready:
        return Applied(workforce.put_off(draft, observation))
    seated = any(member.worker == action.worker for member in draft.plan.members)
    if not seated or action.disruption:
        return Applied(draft)
    state = draft.state
    return Applied(
        draft.with_state(restarts=(*state.restarts, decision.first_sign), restarts_total=state.restarts_total + 1)
    )
