"""Who is to hold the ranks: members that can go on, warm workers in the empty seats, fewer seats if it must be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pacekeeper_analysis.plan import Member, Stop
from pacekeeper_analysis.reports import FaultKind, LauncherState

from .. import rounds
from ..api import TrainingJob, Remedy
from ..observation import Observation, Policy, WorkerView
from ..state import DesiredState
from . import preflight, seating, survivors

MEMBERSHIP_CHECKPOINT_WAIT_SECONDS = 30.0
"""So long a change that nothing forces waits for the checkpoint it has asked for."""
MIN_GATHERING_SECONDS = 3.0
"""A launcher that wants to meet the others for so long has not just been overtaken by their news."""
SHRINK_DELAY_SECONDS = 10.0
"""A seat that cannot be filled for so long is given up where spec.minReplicas allows, and nothing speaks for its being
filled: also by a script that does not say whether it trains as exactly with fewer (`survivors`)."""


def update_membership(observation: Observation, policy: Policy) -> DesiredState:
    """The plan with the members that are possible now: unchanged where they are what they should be, or must wait.

    Nobody loses a seat here but those who have been given up (`Worker.leaving`), which is a remedy's doing.
    """
    draft = observation.desired
    if draft.plan.stop is not Stop.NO or draft.state.life.is_over:
        return draft
    if draft.state.life.finished:
        if not _cannot_finish(observation, policy):
            return draft
        observation = observation.with_desired(_reopen_finished(observation))
    return _change_members(observation, policy) if draft.plan.members else _assign_first_members(observation)


def _cannot_finish(observation: Observation, policy: Policy) -> bool:
    """Some ranks have come to their end, and others never will as things are: all go on from the last checkpoint."""
    unfinished = [view for view in observation.members if view.name not in observation.state.life.finished_names]
    lost = any(view.record.leaving and not view.can_checkpoint for view in unfinished)
    may = policy.applies_routine_remedies and not policy.find_refusal(Remedy.RESTART_RANKS)
    return lost or (may and any(_needs_new_round(observation, view) for view in unfinished))


def _needs_new_round(observation: Observation, view: WorkerView) -> bool:
    """Its ranks did not finish, and it waits for the others to begin anew: for those whose trainers have ended, too."""
    beat = view.heartbeat
    if beat is None or beat.membership != observation.plan.membership or beat.round < observation.round:
        return False
    waits = beat.state in (LauncherState.GATHERING, LauncherState.FAILED, LauncherState.LOST)
    return waits and view.state_seconds >= MIN_GATHERING_SECONDS


def _reopen_finished(observation: Observation) -> DesiredState:
    """Nobody has finished. Launchers that are still there join the next round; the others are replaced."""
    words = "its trainer had ended when the others had to begin anew"
    ended = (v for v in observation.members if v.name in observation.state.life.finished_names and not v.can_checkpoint)
    gone = (replace(view.record, leaving=words, dead=True) for view in ended)
    return observation.desired.with_lifecycle(finished=()).with_workers(gone)


def _assign_first_members(observation: Observation) -> DesiredState:
    """The first members of a job that starts or resumes: all seats at once, or none.

    Who was made to be a spare takes a seat only where a worker has been given up: spares keep off the others' nodes.
    """
    wanted = observation.job.spec.replicas
    views = sorted((view for view in observation.workers if view.usable), key=lambda view: view.record.ordinal)
    seats = views[:wanted]
    if len(seats) < wanted or not all(view.warm and not preflight.is_check_awaited(observation, view) for view in seats):
        return observation.desired
    return rounds.begin_round(observation, _number_ranks(observation.job, seating.order_new_members(observation, map(_build_member, seats))))


def _change_members(observation: Observation, policy: Policy) -> DesiredState:
    draft, plan = observation.desired, observation.plan
    wanted = observation.job.spec.replicas
    warm = (view for view in observation.spares if view.warm)
    spares = [_build_member(view) for view in warm if not preflight.is_check_awaited(observation, view)]
    nearest: seating.SpareSelector | None = None
    seats: list[Member] = []
    for member in _list_wanted_members(observation):
        view = observation.find_worker(member.worker)
        if view is not None and not view.record.leaving:
            seats.append(member)
        elif spares:
            nearest = nearest or seating.SpareSelector(observation)
            seats.append(nearest.select(member, spares))
            spares.remove(seats[-1])
        elif view is not None and view.can_checkpoint:
            seats.append(member)
    if len(seats) < min(wanted, len(plan.members)):
        return _wait_or_shrink(observation, policy, seats)
    newcomers = spares[: max(0, survivors.round_to_whole_replicas(observation, min(wanted, len(seats) + len(spares))) - len(seats))]
    seats += seating.order_new_members(observation, newcomers)
    if [member.worker for member in seats] == [member.worker for member in plan.members]:
        return _request_final_save(observation, _clear_waiting(draft))
    if all(view.can_checkpoint for view in observation.members) and len(observation.members) == len(plan.members):
        if not survivors.can_grow(observation, seats):
            return _clear_waiting(draft)
        waiting = _await_checkpoint(observation)
        if waiting is not None:
            return waiting
    return rounds.begin_round(observation, _number_ranks(observation.job, seats))


def _request_final_save(observation: Observation, draft: DesiredState) -> DesiredState:
    """Members whose pods end, and whose seats nobody can take yet, are told by the plan to let their ranks save and
    leave: a signal does not reach a launcher that runs behind a shell."""
    ending = (
        view
        for view in observation.members
        if view.record.leaving and view.can_checkpoint and view.pod is not None and (view.pod.deleting or view.pod.disruption_reason)
    )
    leaving = tuple(sorted({*draft.plan.leaving, *(view.name for view in ending)}))
    return draft if leaving == draft.plan.leaving else draft.with_plan(leaving=leaving)


def _list_wanted_members(observation: Observation) -> Sequence[Member]:
    """The plan's members, so many as are wanted: after a scale-down, who was given up goes first, then the last ones.
    Nobody would come for an empty seat while others are over."""
    members, wanted = observation.plan.members, observation.job.spec.replicas
    if len(members) <= wanted:
        return members
    views = ((member, observation.find_worker(member.worker)) for member in reversed(members))
    given_up = [member.worker for member, view in views if view is None or view.record.leaving]
    first = set(given_up[: len(members) - wanted])
    return [member for member in members if member.worker not in first][:wanted]


def _clear_waiting(draft: DesiredState) -> DesiredState:
    """Nothing is waited for."""
    waited = draft.state.placement.vacant_since or draft.state.placement.checkpoint_asked_at
    return draft.with_placement(vacant_since=0.0, checkpoint_asked_at=0.0) if waited else draft


def _wait_or_shrink(observation: Observation, policy: Policy, members: Sequence[Member]) -> DesiredState:
    """Some rank has no worker. The others wait for it, or go on without where that is allowed."""
    state, job = observation.state, observation.job
    replicas = survivors.select_whole_replicas(observation, members)
    if survivors.can_shrink(observation, policy, replicas):
        return _shrink_members(observation, replicas)
    members = replicas or members
    if not state.placement.vacant_since:
        return observation.desired.with_placement(vacant_since=observation.now)
    enough = len(members) >= max(1, job.spec.effective_min_replicas)
    if not enough or observation.now - state.placement.vacant_since < SHRINK_DELAY_SECONDS:
        return observation.desired
    seated = {member.worker for member in observation.plan.members}
    coming = any(_is_coming(view) for view in observation.workers if view.name not in seated)
    if coming and observation.now - state.placement.vacant_since < job.spec.scheduling_timeout:
        return observation.desired
    return _shrink_members(observation, members)


def _shrink_members(observation: Observation, members: Sequence[Member]) -> DesiredState:
    return survivors.record_shrink(rounds.begin_round(observation, _number_ranks(observation.job, members)), observation)


def _is_coming(view: WorkerView) -> bool:
    """Not yet here, but nothing speaks against it."""
    made = view.pod is not None or bool(view.record.uid)
    return not view.record.leaving and (
        not made or (view.alive and view.pod is not None and not view.pod.unschedulable_message)
    )


def _await_checkpoint(observation: Observation) -> DesiredState | None:
    """The draft to wait with; None: the checkpoint is there, or is not to be had."""
    draft = observation.desired
    if draft.state.placement.checkpoint_asked_at == 0.0:
        return draft.with_plan(checkpoint_request=draft.plan.checkpoint_request + 1).with_placement(
            checkpoint_asked_at=observation.now
        )
    answers = [view.heartbeat.checkpoint_request if view.heartbeat else 0 for view in observation.members]
    answered = min(answers, default=0) >= draft.plan.checkpoint_request
    forced = any(view.record.leaving and not view.record.patient for view in observation.members)
    hurried = forced or not any(view.record.leaving for view in observation.members)
    late = hurried and observation.now - draft.state.placement.checkpoint_asked_at > MEMBERSHIP_CHECKPOINT_WAIT_SECONDS
    return None if answered or late or observation.select_faults(FaultKind.STALLED) else draft


def _build_member(view: WorkerView) -> Member:
    assert view.pod is not None
    return Member(view.name, view.pod.address, ())


def _number_ranks(job: TrainingJob, members: Sequence[Member]) -> tuple[Member, ...]:
    """Consecutive ranks, `nprocPerNode` a worker."""
    each = job.spec.nproc_per_node
    return tuple(
        replace(member, ranks=tuple(range(position * each, (position + 1) * each)))
        for position, member in enumerate(members)
    )


def allow_restarts(observation: Observation, policy: Policy) -> DesiredState:
    """What the launchers may do by themselves: those they have used in this membership, and what the budget leaves."""
    draft, budget = observation.desired, observation.state.budget
    if draft.plan.stop is not Stop.NO or draft.state.life.is_over:
        return draft
    left = policy.max_restarts - budget.count_restarts_within(observation.now, policy.restart_window)
    may = policy.applies_routine_remedies and not policy.find_refusal(Remedy.RESTART_RANKS)
    if budget.backoffs:
        left = 0  # the operator says when the next round begins
    restarts = budget.in_membership + max(0, left) if may else 0
    return draft if restarts == draft.plan.restarts else draft.with_plan(restarts=restarts)
