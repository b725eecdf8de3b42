"""The members of a job: those that can go on, warm workers for vacant ranks, fewer members if necessary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pacekeeper_analysis.protocol.plan import Member, Stop
from pacekeeper_analysis.protocol.reports import FaultKind, LauncherState

from ...api.training_job import Remedy, TrainingJob
from ...state import rounds
from ...state.cluster_view import WorkerView
from ...state.desired_state import DesiredState
from ...state.observation import Observation
from ...state.policy import Policy
from . import elastic_scaling, preflight, rank_assignment

MEMBERSHIP_CHECKPOINT_WAIT_SECONDS = 30.0
"""Time that a change that nothing forces waits for the checkpoint that it has requested."""
MIN_GATHERING_SECONDS = 3.0
"""Time that a launcher must have waited in the rendezvous. Before, it may only be ahead of the others' reports."""
SHRINK_DELAY_SECONDS = 10.0
"""Time after which ranks that cannot be placed are given up, if spec.minReplicas allows that and no worker is coming.

It also applies to scripts that do not report whether they train exactly with fewer (`elastic_scaling`).
"""


def update_membership(observation: Observation, policy: Policy) -> DesiredState:
    """Return the state with the members that are possible now, unchanged where they are right or must wait.

    Only workers that a remedy has given up (`WorkerRecord.leaving`) lose their ranks here.
    """
    desired = observation.desired
    if desired.plan.stop is not Stop.NO or desired.state.lifecycle.is_over:
        return desired
    if desired.state.lifecycle.finished:
        if not _cannot_finish(observation, policy):
            return desired
        observation = observation.with_desired(_reopen_finished(observation))
    return _change_members(observation, policy) if desired.plan.members else _assign_first_members(observation)


def _cannot_finish(observation: Observation, policy: Policy) -> bool:
    """Return whether some ranks have finished, and others never will: all go on from the last checkpoint."""
    unfinished = [view for view in observation.members if view.name not in observation.state.lifecycle.finished_names]
    lost = any(view.record.leaving and not view.can_checkpoint for view in unfinished)
    may_restart = policy.applies_routine_remedies and not policy.find_refusal(Remedy.RESTART_RANKS)
    return lost or (may_restart and any(_needs_new_round(observation, view) for view in unfinished))


def _needs_new_round(observation: Observation, view: WorkerView) -> bool:
    """Return whether its ranks did not finish, and it waits for all others in a new round, including finished ones."""
    heartbeat = view.heartbeat
    if (
        heartbeat is None
        or heartbeat.membership != observation.plan.membership
        or heartbeat.round < observation.progress.round
    ):
        return False
    waits = heartbeat.state in (LauncherState.GATHERING, LauncherState.FAILED, LauncherState.LOST)
    return waits and view.state_seconds >= MIN_GATHERING_SECONDS


def _reopen_finished(observation: Observation) -> DesiredState:
    """Return the state in which no member has finished.

    Launchers that are still there join the next round; the others are replaced.
    """
    reason = "its trainer had ended when the others had to begin again"
    ended = (
        v for v in observation.members if v.name in observation.state.lifecycle.finished_names and not v.can_checkpoint
    )
    records = (replace(view.record, leaving=reason, dead=True) for view in ended)
    return observation.desired.with_lifecycle(finished=()).with_workers(records)


def _assign_first_members(observation: Observation) -> DesiredState:
    """Assign the first members of a job that starts or resumes: all of them at once, or none.

    A worker that was created as a spare becomes a member only where a worker has been given up: spares are kept off the
    others' nodes.
    """
    wanted = observation.job.spec.replicas
    views = sorted((view for view in observation.workers if view.usable), key=lambda view: view.record.ordinal)
    chosen = views[:wanted]
    if len(chosen) < wanted or not all(_can_take_ranks(observation, view) for view in chosen):
        return observation.desired
    return rounds.begin_round(
        observation,
        _number_ranks(observation.job, rank_assignment.order_new_members(observation, map(_build_member, chosen))),
    )


def _change_members(observation: Observation, policy: Policy) -> DesiredState:
    desired, plan = observation.desired, observation.plan
    wanted = observation.job.spec.replicas
    spares = [_build_member(view) for view in observation.spares if _can_take_ranks(observation, view)]
    selector: rank_assignment.SpareSelector | None = None
    # Keep members that stay, replace those that leave by the nearest spare, and keep the latter until there is one.
    members: list[Member] = []
    for member in _list_wanted_members(observation):
        view = observation.find_worker(member.worker)
        if view is not None and not view.record.leaving:
            members.append(member)
        elif spares:
            selector = selector or rank_assignment.SpareSelector(observation)
            members.append(selector.select(member, spares))
            spares.remove(members[-1])
        elif view is not None and view.can_checkpoint:
            members.append(member)
    if len(members) < min(wanted, len(plan.members)):
        return _wait_or_shrink(observation, policy, members)
    # Add warm workers up to the wanted number.
    newcomers = spares[
        : max(
            0,
            elastic_scaling.round_to_whole_replicas(observation, min(wanted, len(members) + len(spares)))
            - len(members),
        )
    ]
    members += rank_assignment.order_new_members(observation, newcomers)
    is_outdated = any(_follows_later_membership(observation, view) for view in observation.workers)
    if [member.worker for member in members] == [member.worker for member in plan.members] and not is_outdated:
        return _request_final_save(observation, _clear_waiting(desired))
    # If all present members can still save, wait for a checkpoint before the change. They ignore an outdated plan.
    if (
        not is_outdated
        and all(view.can_checkpoint for view in observation.members)
        and len(observation.members) == len(plan.members)
    ):
        if not elastic_scaling.can_grow(observation, members):
            return _clear_waiting(desired)
        waiting = _await_checkpoint(observation)
        if waiting is not None:
            return waiting
    return rounds.begin_round(observation, _number_ranks(observation.job, members))


def _can_take_ranks(observation: Observation, view: WorkerView) -> bool:
    ready = view.warm or (view.responsive and _follows_later_membership(observation, view))
    return ready and not preflight.is_check_awaited(observation, view)


def _follows_later_membership(observation: Observation, view: WorkerView) -> bool:
    """Return whether the worker is in a membership above the plan's: etcd was restored from an older backup.

    It ignores the plan until a later membership begins.
    """
    return view.usable and view.heartbeat is not None and view.heartbeat.membership > observation.plan.membership


def _request_final_save(observation: Observation, desired: DesiredState) -> DesiredState:
    """Ask members whose pods end, and that cannot be replaced yet, to have their ranks save and leave.

    The request is part of the plan: a signal does not reach a launcher that runs behind a shell.
    """
    ending = (
        view
        for view in observation.members
        if view.record.leaving
        and view.can_checkpoint
        and view.pod is not None
        and (view.pod.deleting or view.pod.disruption_reason)
    )
    leaving = tuple(sorted({*desired.plan.leaving, *(view.name for view in ending)}))
    return desired if leaving == desired.plan.leaving else desired.with_plan(leaving=leaving)


def _list_wanted_members(observation: Observation) -> Sequence[Member]:
    """Return as many of the plan's members as are wanted.

    After a scale-down, members that were given up go first, then the last ones. No worker would come for their ranks
    while there are too many.
    """
    members, wanted = observation.plan.members, observation.job.spec.replicas
    if len(members) <= wanted:
        return members
    views = ((member, observation.find_worker(member.worker)) for member in reversed(members))
    given_up = [member.worker for member, view in views if view is None or view.record.leaving]
    first = set(given_up[: len(members) - wanted])
    return [member for member in members if member.worker not in first][:wanted]


def _clear_waiting(desired: DesiredState) -> DesiredState:
    """Return the state in which nothing is awaited."""
    placement = desired.state.placement
    if placement.vacant_since is None and placement.checkpoint_requested_at is None:
        return desired
    return desired.with_placement(vacant_since=None, checkpoint_requested_at=None)


def _wait_or_shrink(observation: Observation, policy: Policy, members: Sequence[Member]) -> DesiredState:
    """Wait for a worker for the vacant ranks, or go on without them where that is allowed."""
    state, job = observation.state, observation.job
    replicas = elastic_scaling.select_whole_replicas(observation, members)
    if elastic_scaling.can_shrink(observation, policy, replicas):
        return _shrink_members(observation, replicas)
    members = replicas or members
    vacant_since = state.placement.vacant_since
    if vacant_since is None:
        return observation.desired.with_placement(vacant_since=observation.now)
    enough = len(members) >= max(1, job.spec.effective_min_replicas)
    if not enough or observation.now - vacant_since < SHRINK_DELAY_SECONDS:
        return observation.desired
    assigned = {member.worker for member in observation.plan.members}
    coming = any(_is_coming(view) for view in observation.workers if view.name not in assigned)
    if coming and observation.now - vacant_since < job.spec.scheduling_timeout:
        return observation.desired
    return _shrink_members(observation, members)


def _shrink_members(observation: Observation, members: Sequence[Member]) -> DesiredState:
    return elastic_scaling.record_shrink(
        rounds.begin_round(observation, _number_ranks(observation.job, members)), observation
    )


def _is_coming(view: WorkerView) -> bool:
    """Return whether the worker is not warm yet, but nothing prevents that."""
    exists = view.pod is not None or bool(view.record.uid)
    return not view.record.leaving and (
        not exists or (view.alive and view.pod is not None and not view.pod.unschedulable_message)
    )


def _await_checkpoint(observation: Observation) -> DesiredState | None:
    """Return the state to wait with; None: the checkpoint is published, or cannot be expected."""
    desired, requested_at = observation.desired, observation.desired.state.placement.checkpoint_requested_at
    if requested_at is None:
        return desired.with_plan(checkpoint_request=desired.plan.checkpoint_request + 1).with_placement(
            checkpoint_requested_at=observation.now
        )
    answers = [view.heartbeat.checkpoint.request if view.heartbeat else 0 for view in observation.members]
    answered = min(answers, default=0) >= desired.plan.checkpoint_request
    forced = any(view.record.leaving and not view.record.waits_for_checkpoint for view in observation.members)
    has_time_limit = forced or not any(view.record.leaving for view in observation.members)
    late = has_time_limit and observation.now - requested_at > MEMBERSHIP_CHECKPOINT_WAIT_SECONDS
    return None if answered or late or observation.select_faults(FaultKind.STALLED) else desired


def _build_member(view: WorkerView) -> Member:
    assert view.pod is not None
    return Member(view.name, view.pod.address, ())


def _number_ranks(job: TrainingJob, members: Sequence[Member]) -> tuple[Member, ...]:
    """Assign consecutive ranks, `nprocPerNode` per worker."""
    per_worker = job.spec.nproc_per_node
    return tuple(
        replace(member, ranks=tuple(range(position * per_worker, (position + 1) * per_worker)))
        for position, member in enumerate(members)
    )


def allow_restarts(observation: Observation, policy: Policy) -> DesiredState:
    """Allow the launchers their own restarts: those used in this membership, and what the budget leaves."""
    desired, budget = observation.desired, observation.state.budget
    if desired.plan.stop is not Stop.NO or desired.state.lifecycle.is_over:
        return desired
    remaining = policy.max_restarts - budget.count_restarts_within(observation.now, policy.restart_window)
    is_allowed = policy.applies_routine_remedies and not policy.find_refusal(Remedy.RESTART_RANKS)
    if budget.backoffs:
        remaining = 0  # the operator decides when the next round begins
    restarts = budget.membership_restarts + max(0, remaining) if is_allowed else 0
    return desired if restarts == desired.plan.restarts else desired.with_plan(restarts=restarts)


def raise_plan_version(observation: Observation, _policy: Policy) -> DesiredState:
    """Raise the plan's version above those that workers follow, which they prefer: etcd was restored from a backup.

    Workers of a later membership must not return to the plan's. They get a new one (`update_membership`), unless they
    are to stop.
    """
    plan = observation.plan
    heartbeats = (view.heartbeat for view in observation.workers if view.heartbeat is not None)
    followed = (
        heartbeat.plan_version
        for heartbeat in heartbeats
        if heartbeat.membership <= plan.membership or plan.stop is not Stop.NO
    )
    latest = max(followed, default=plan.version)
    return observation.desired.with_plan(version=latest + 1) if latest > plan.version else observation.desired
