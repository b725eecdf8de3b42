"""Who is to hold the ranks: members that can go on, warm workers in the empty seats, fewer seats if it must be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pacekeeper_analysis.plan import Member, Stop
from pacekeeper_analysis.reports import FaultKind, LauncherState

from .. import rounds
from ..api import Job, Remedy
from ..observation import Observation, Policy, WorkerView
from ..state import Draft
from . import preflight, seating, survivors

CHECKPOINT_SECONDS = 30.0
"""So long a change that nothing forces waits for the checkpoint it has asked for."""
GATHER_SECONDS = 3.0
"""A launcher that wants to meet the others for so long has not just been overtaken by their news."""
SHRINK_SECONDS = 10.0
"""A seat that cannot be filled for so long is given up where spec.minReplicas allows, and nothing speaks for its being
filled: also by a script that does not say whether it trains as exactly with fewer (`survivors`)."""


def step(observation: Observation, policy: Policy) -> Draft:
    """The plan with the members that are possible now: unchanged where they are what they should be, or must wait.

    Nobody loses a seat here but those who have been given up (`Worker.leaving`), which is a remedy's doing.
    """
    draft = observation.draft
    if draft.plan.stop is not Stop.NO or draft.state.life.over:
        return draft
    if draft.state.life.finished:
        if not _cannot_end(observation, policy):
            return draft
        observation = observation.with_draft(_call_back(observation))
    return _change(observation, policy) if draft.plan.members else _found(observation)


def _cannot_end(observation: Observation, policy: Policy) -> bool:
    """Some ranks have come to their end, and others never will as things are: all go on from the last checkpoint."""
    unfinished = [view for view in observation.members if view.name not in observation.state.life.names_finished]
    lost = any(view.record.leaving and not view.trains for view in unfinished)
    may = policy.recovers and not policy.refusal(Remedy.RESTART_RANKS)
    return lost or (may and any(_wants_a_round(observation, view) for view in unfinished))


def _wants_a_round(observation: Observation, view: WorkerView) -> bool:
    """Its ranks did not finish, and it waits for the others to begin anew: for those whose trainers have ended, too."""
    beat = view.heartbeat
    if beat is None or beat.membership != observation.plan.membership or beat.round < observation.round:
        return False
    waits = beat.state in (LauncherState.GATHERING, LauncherState.FAILED, LauncherState.LOST)
    return waits and view.state_seconds >= GATHER_SECONDS


def _call_back(observation: Observation) -> Draft:
    """Nobody has finished. Launchers that are still there join the next round; the others are replaced."""
    words = "its trainer had ended when the others had to begin anew"
    ended = (v for v in observation.members if v.name in observation.state.life.names_finished and not v.trains)
    gone = (replace(view.record, leaving=words, dead=True) for view in ended)
    return observation.draft.with_life(finished=()).with_workers(gone)


def _found(observation: Observation) -> Draft:
    """The first members of a job that starts or resumes: all seats at once, or none.

    Who was made to be a spare takes a seat only where a worker has been given up: spares keep off the others' nodes.
    """
    wanted = observation.job.spec.replicas
    views = sorted((view for view in observation.workers if view.usable), key=lambda view: view.record.ordinal)
    seats = views[:wanted]
    if len(seats) < wanted or not all(view.warm and not preflight.awaited(observation, view) for view in seats):
        return observation.draft
    return rounds.begin(observation, _numbered(observation.job, seating.founded(observation, map(_member, seats))))


def _change(observation: Observation, policy: Policy) -> Draft:
    draft, plan = observation.draft, observation.plan
    wanted = observation.job.spec.replicas
    warm = (view for view in observation.spares if view.warm)
    spares = [_member(view) for view in warm if not preflight.awaited(observation, view)]
    nearest: seating.Nearest | None = None
    seats: list[Member] = []
    for member in _still_wanted(observation):
        view = observation.worker(member.worker)
        if view is not None and not view.record.leaving:
            seats.append(member)
        elif spares:
            nearest = nearest or seating.Nearest(observation)
            seats.append(nearest.of(member, spares))
            spares.remove(seats[-1])
        elif view is not None and view.trains:
            seats.append(member)
    if len(seats) < min(wanted, len(plan.members)):
        return _wait_or_shrink(observation, policy, seats)
    newcomers = spares[: max(0, survivors.most(observation, min(wanted, len(seats) + len(spares))) - len(seats))]
    seats += seating.founded(observation, newcomers)
    if [member.worker for member in seats] == [member.worker for member in plan.members]:
        return _save_before_end(observation, _calm(draft))
    if all(view.trains for view in observation.members) and len(observation.members) == len(plan.members):
        if not survivors.may_grow(observation, seats):
            return _calm(draft)
        waiting = _await_checkpoint(observation)
        if waiting is not None:
            return waiting
    return rounds.begin(observation, _numbered(observation.job, seats))


def _save_before_end(observation: Observation, draft: Draft) -> Draft:
    """Members whose pods end, and whose seats nobody can take yet, are told by the plan to let their ranks save and
    leave: a signal does not reach a launcher that runs behind a shell."""
    ending = (
        view
        for view in observation.members
        if view.record.leaving and view.trains and view.pod is not None and (view.pod.deleting or view.pod.disrupted)
    )
    leaving = tuple(sorted({*draft.plan.leaving, *(view.name for view in ending)}))
    return draft if leaving == draft.plan.leaving else draft.with_plan(leaving=leaving)


def _still_wanted(observation: Observation) -> Sequence[Member]:
    """The plan's members, so many as are wanted: after a scale-down, who was given up goes first, then the last ones.
    Nobody would come for an empty seat while others are over."""
    members, wanted = observation.plan.members, observation.job.spec.replicas
    if len(members) <= wanted:
        return members
    views = ((member, observation.worker(member.worker)) for member in reversed(members))
    given_up = [member.worker for member, view in views if view is None or view.record.leaving]
    first = set(given_up[: len(members) - wanted])
    return [member for member in members if member.worker not in first][:wanted]


def _calm(draft: Draft) -> Draft:
    """Nothing is waited for."""
    waited = draft.state.placement.vacant_since or draft.state.placement.checkpoint_asked_at
    return draft.with_placement(vacant_since=0.0, checkpoint_asked_at=0.0) if waited else draft


def _wait_or_shrink(observation: Observation, policy: Policy, seats: Sequence[Member]) -> Draft:
    """Some rank has no worker. The others wait for it, or go on without where that is allowed."""
    state, job = observation.state, observation.job
    replicas = survivors.of_whole_replicas(observation, seats)
    if survivors.can_go_on(observation, policy, replicas):
        return _shrink(observation, replicas)
    seats = replicas or seats
    if not state.placement.vacant_since:
        return observation.draft.with_placement(vacant_since=observation.now)
    enough = len(seats) >= max(1, job.spec.fewest_replicas)
    if not enough or observation.now - state.placement.vacant_since < SHRINK_SECONDS:
        return observation.draft
    seated = {member.worker for member in observation.plan.members}
    coming = any(_comes(view) for view in observation.workers if view.name not in seated)
    if coming and observation.now - state.placement.vacant_since < job.spec.scheduling_timeout:
        return observation.draft
    return _shrink(observation, seats)


def _shrink(observation: Observation, seats: Sequence[Member]) -> Draft:
    return survivors.gone_on(rounds.begin(observation, _numbered(observation.job, seats)), observation)


def _comes(view: WorkerView) -> bool:
    """Not yet here, but nothing speaks against it."""
    made = view.pod is not None or bool(view.record.uid)
    return not view.record.leaving and (
        not made or (view.alive and view.pod is not None and not view.pod.unschedulable)
    )


def _await_checkpoint(observation: Observation) -> Draft | None:
    """The draft to wait with; None: the checkpoint is there, or is not to be had."""
    draft = observation.draft
    if draft.state.placement.checkpoint_asked_at == 0.0:
        return draft.with_plan(checkpoint_request=draft.plan.checkpoint_request + 1).with_placement(
            checkpoint_asked_at=observation.now
        )
    answers = [view.heartbeat.checkpoint_request if view.heartbeat else 0 for view in observation.members]
    answered = min(answers, default=0) >= draft.plan.checkpoint_request
    forced = any(view.record.leaving and not view.record.patient for view in observation.members)
    hurried = forced or not any(view.record.leaving for view in observation.members)
    late = hurried and observation.now - draft.state.placement.checkpoint_asked_at > CHECKPOINT_SECONDS
    return None if answered or late or observation.faults_of(FaultKind.STALLED) else draft


def _member(view: WorkerView) -> Member:
    assert view.pod is not None
    return Member(view.name, view.pod.address, ())


def _numbered(job: Job, seats: Sequence[Member]) -> tuple[Member, ...]:
    """Consecutive ranks, `nprocPerNode` a worker."""
    each = job.spec.nproc_per_node
    return tuple(
        replace(member, ranks=tuple(range(position * each, (position + 1) * each)))
        for position, member in enumerate(seats)
    )


def allow_restarts(observation: Observation, policy: Policy) -> Draft:
    """What the launchers may do by themselves: those they have used in this membership, and what the budget leaves."""
    draft, budget = observation.draft, observation.state.budget
    if draft.plan.stop is not Stop.NO or draft.state.life.over:
        return draft
    left = policy.max_restarts - budget.within(observation.now, policy.restart_window)
    may = policy.recovers and not policy.refusal(Remedy.RESTART_RANKS)
    if budget.backoffs:
        left = 0  # the operator says when the next round begins
    restarts = budget.in_membership + max(0, left) if may else 0
    return draft if restarts == draft.plan.restarts else draft.with_plan(restarts=restarts)
