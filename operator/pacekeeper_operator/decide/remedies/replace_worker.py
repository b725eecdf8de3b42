"""Give workers up. Who takes their ranks, and when, follows from what is there: `decide.membership`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...decision import Decision, ReplaceWorker
from ...observation import Observation
from ...state import WorkerRecord
from .. import workforce
from .applied import ActionResult


def apply_replace_workers(actions: Sequence[ReplaceWorker], _decision: Decision, observation: Observation) -> ActionResult:
    """All at once: one event may take thousands."""
    draft = observation.desired
    seated = {member.worker for member in draft.plan.members}
    given_up: list[WorkerRecord] = []
    for action in actions:
        worker = observation.state.placement.find_worker(action.worker)
        if worker is None:
            continue
        given_up.append(
            replace(worker, leaving=action.reason, dead=action.dead, force=action.force, patient=action.waits_for_checkpoint)
        )
        if action.refused:
            draft = workforce.delay_after_refusal(draft, observation)
        elif action.never_ready:
            draft = workforce.delay_next_start(draft, observation)
        elif action.worker in seated and not action.disruption:
            draft = draft.count_restart(observation.now)
    return ActionResult(draft.with_workers(given_up))
