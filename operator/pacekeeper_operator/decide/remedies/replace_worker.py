"""Give workers up. `placement.membership` decides which workers take their ranks, and when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...state.desired_state import WorkerRecord
from ...state.observation import Observation
from ..decision import Decision, ReplaceWorker
from ..placement import workforce
from .action_result import ActionResult


def apply_replace_workers(
    actions: Sequence[ReplaceWorker], _decision: Decision, observation: Observation
) -> ActionResult:
    """Mark all workers as leaving, in one change: one event may take thousands of workers."""
    desired = observation.desired
    assigned = {member.worker for member in desired.plan.members}
    given_up: list[WorkerRecord] = []
    for action in actions:
        worker = observation.state.placement.find_worker(action.worker)
        if worker is None:
            continue
        given_up.append(
            replace(
                worker,
                leaving=action.reason,
                dead=action.dead,
                force=action.force,
                waits_for_checkpoint=action.waits_for_checkpoint,
            )
        )
        if action.refused:
            desired = workforce.delay_after_refusal(desired, observation)
        elif action.never_ready:
            desired = workforce.delay_next_start(desired, observation)
        elif action.worker in assigned and not action.disruption:
            desired = desired.count_restart(observation.now)
    return ActionResult(desired.with_workers(given_up))
