"""Who is to hold the ranks: members that can go on, warm workers in the empty seats, fewer seats if it must be."""

from __future__ import annotations

from collections.abc import Sequence

from pacekeeper_analysis.plan import Member, Stop

from .. import rounds
from ..api import Job, Remedy
from ..observation import Observation, Policy, WorkerView
from ..state import Draft

CHECKPOINT_SECONDS = 30.0
"""So long a change that nothing forces waits for the checkpoint it has asked for."""
SHRINK_SECONDS = 10.0
"""A seat that cannot be filled for so long is given up where spec.minReplicas allows."""


def step(observation: Observation, policy: Policy) -> Draft:
    """The plan with the members that are possible now: unchanged where they are what they should be, or must wait."""
    draft = observation.draft
    if draft.plan.stop is not Stop.NO or draft.state.finished_for_good or draft.state.finished:
        return draft
    if not policy.acts and draft.plan.members:
        return draft
    if not draft.plan.members:
        return _found(observation)
    return _change(observation)


def _found(observation: Observation) -> Draft:
    """The first members of a job that starts or resumes: all seats at once, or none."""
    warm = sorted((view for view in observation.workers if view.warm), key=lambda view: view.record.ordinal)
    seats = observation.job.spec.replicas
    if len(warm) < seats:
        return observation.draft
    return rounds.begin(observation, _seat(observation.job, warm[:seats]))


def _change(observation: Observation) -> Draft:
    draft, job = observation.draft, observation.job
    stay = [view for view in observation.members if view.usable or _only_told_to_leave(view)]
    staying = {view.name for view in stay if not view.record.leaving}
    spares = [view for view in observation.spares if view.warm]
    wanted = job.spec.replicas
    seats: list[WorkerView] = []
    for member in observation.plan.members[:wanted]:
        view = observation.worker(member.worker)
        if member.worker in staying and view is not None:
            seats.append(view)
        elif spares:
            seats.append(spares.pop(0))
        elif view is not None and view in stay:
            seats.append(view)
    seats += spares[: max(0, wanted - max(len(seats), len(observation.plan.members)))]
    vacant = min(wanted, len(observation.plan.members)) - len(seats)
    if vacant > 0:
        return _wait_or_shrink(observation, seats)
    draft = draft.with_state(vacant_since=0.0) if draft.state.vacant_since else draft
    observation = observation.with_draft(draft)
    if not seats or [view.name for view in seats] == [member.worker for member in observation.plan.members]:
        return draft
    forced = any(view.record.dead or view.pod is None or view.pod.ended for view in observation.members)
    if len(observation.members) == len(observation.plan.members) and not forced:
        waiting = _await_checkpoint(observation)
        if waiting is not None:
            return waiting
    return rounds.begin(observation, _seat(job, seats))


def _only_told_to_leave(view: WorkerView) -> bool:
    """It is to be replaced, but trains on until that can be done."""
    return view.pod is not None and not view.pod.ended and bool(view.record.leaving) and not view.record.dead


def _wait_or_shrink(observation: Observation, seats: Sequence[WorkerView]) -> Draft:
    """Some rank has no worker. The others wait for it, or go on without where that is allowed."""
    state, job = observation.state, observation.job
    if not state.vacant_since:
        return observation.draft.with_state(vacant_since=observation.now)
    enough = len(seats) >= max(1, job.spec.fewest_replicas)
    if not enough or observation.now - state.vacant_since < SHRINK_SECONDS:
        return observation.draft
    coming = any(_comes(view) for view in observation.workers if view not in observation.members)
    if coming and observation.now - state.vacant_since < job.spec.scheduling_timeout:
        return observation.draft
    return rounds.begin(observation, _seat(job, seats))


def _comes(view: WorkerView) -> bool:
    """Not yet here, but nothing speaks against it."""
    made = view.pod is not None or bool(view.record.uid)
    return not view.record.leaving and (
        not made or (view.alive and view.pod is not None and not view.pod.unschedulable)
    )


def _await_checkpoint(observation: Observation) -> Draft | None:
    """The draft to wait with; None: the checkpoint is there, or is not to be had."""
    draft = observation.draft
    if draft.state.checkpoint_asked_at == 0.0:
        return draft.with_plan(checkpoint_request=draft.plan.checkpoint_request + 1).with_state(
            checkpoint_asked_at=observation.now
        )
    answers = [view.heartbeat.checkpoint_request if view.heartbeat else 0 for view in observation.members]
    answered = min(answers, default=0) >= draft.plan.checkpoint_request
    late = observation.now - draft.state.checkpoint_asked_at > CHECKPOINT_SECONDS
    return None if answered or late else draft


def _seat(job: Job, views: Sequence[WorkerView]) -> tuple[Member, ...]:
    """Consecutive ranks, `nprocPerNode` a worker."""
    each = job.spec.nproc_per_node
    members = []
    for position, view in enumerate(views):
        assert view.pod is not None
        ranks = tuple(range(position * each, (position + 1) * each))
        members.append(Member(view.name, view.pod.address, ranks))
    return tuple(members)


def allow_restarts(draft: Draft, policy: Policy, now: float) -> Draft:
    """What the launchers may do by themselves: those they have used in this membership, and what the budget leaves."""
    left = policy.max_restarts - draft.state.restarts_in_window(now, policy.restart_window)
    may = policy.acts and not policy.refusal(Remedy.RESTART_RANKS)
    restarts = draft.state.membership_restarts + max(0, left) if may else 0
    return draft if restarts == draft.plan.restarts else draft.with_plan(restarts=restarts)
