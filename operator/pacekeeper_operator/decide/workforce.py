"""Which pods a job is to have: seats and spares, reserved by name before they are made; what is given up goes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from itertools import count, islice

from pacekeeper_analysis.plan import Stop
from pacekeeper_analysis.reports import LauncherState

from ..api import CleanPodPolicy, Reason
from ..gangs import Gang
from ..observation import FRESH_WORKER_SECONDS, Observation, PodView, Policy, WorkerView
from ..state import DesiredState, WorkerRecord
from . import avoiding

FIRST_WORKER_BACKOFF_SECONDS = 5.0
MAX_WORKER_BACKOFF_SECONDS = 300.0
OLDER_JOB_TURN_SECONDS = 300.0
"""So long a job lets an older one go first: one that can never be placed holds nobody up for ever."""
POD_DELETION_OVERDUE_SECONDS = 15.0
"""So long after its grace period a pod may still be there before nobody waits for its node any more."""
UNPLACED_POD_SECONDS = 60.0
"""So long a pod may have no place before it is made anew for nodes that may be used again."""
WORKER_LEAVE_SECONDS = 120.0
"""So long workers may take to leave by themselves (checkpoint, exit) before their pods are deleted."""


def update_workforce(observation: Observation, policy: Policy) -> DesiredState:
    """Level-triggered: from what there is to what there shall be, with all names reserved."""
    observation = observation.with_desired(_update_records(observation, policy))
    draft = observation.desired
    if draft.state.life.is_over or observation.job.spec.suspend or draft.plan.stop is not Stop.NO:
        return draft
    if not _can_be_staffed(observation) or find_folder_holder(observation):
        return draft
    draft = _give_up_ended(observation, _enforce_placement_timeout(observation))
    draft = _give_up_unplaced(observation, policy, draft)
    return _reserve_names(observation, _give_up_surplus(observation, draft))


def _can_be_staffed(observation: Observation) -> bool:
    """The API server accepts its template, or has done so once: a job that trains goes on with what it has."""
    placement = observation.state.placement
    return placement.template_accepted == observation.job.generation or bool(observation.plan.members)


def find_folder_holder(observation: Observation) -> str:
    """The job that writes its checkpoints where this one would, which has no workers yet; "": none, or it has some.

    What has begun goes on: whose checkpoints these are, its ranks settle among themselves.
    """
    began = observation.plan.members or observation.state.placement.workers
    return "" if began else observation.cluster_view.folder_owner


def list_missing_workers(observation: Observation) -> tuple[WorkerRecord, ...]:
    """Workers that are promised, and whose pods are to be created now."""
    if _is_job_ending(observation) or not _can_be_staffed(observation):
        return ()
    return tuple(view.record for view in observation.workers if view.pod is None and not _is_created_or_leaving(view))


def count_needed_workers(observation: Observation, missing: Sequence[WorkerRecord]) -> int:
    """So many of those that are missing are needed for a seat: they may share a node where there is no other, also
    while the rest of the job trains. The others are spares."""
    names = {worker.name for worker in missing}
    there = [view for view in observation.workers if view.name not in names and not view.record.leaving]
    return observation.job.spec.replicas - len(there)


def build_gang(observation: Observation) -> Gang | None:
    """With whom pods that are created now are to be placed; None: each alone. Any so many of workers and spares will
    do: seats are given to those that are placed."""
    size = observation.job.spec.replicas
    if observation.plan.members or size == 1:
        return None
    return Gang(size, observation.state.placement.attempts)


def list_surplus_workers(observation: Observation) -> tuple[WorkerView, ...]:
    """Workers whose pods are to be deleted now."""
    if observation.state.life.is_over:
        return _list_pods_to_clean_up(observation)
    if _is_job_ending(observation):
        return _list_stopping_workers(observation)
    seated = {member.worker for member in observation.plan.members}
    return tuple(
        view
        for view in observation.workers
        # What is dead gives its GPUs to its successor, even while its seat is empty.
        if view.record.leaving and (view.record.dead or view.name not in seated)
        if view.pod is not None and not _is_deletion_requested(view)
    )


def _is_job_ending(observation: Observation) -> bool:
    over = observation.state.life.is_over or observation.job.spec.suspend
    return over or observation.plan.stop is not Stop.NO


def _is_created_or_leaving(view: WorkerView) -> bool:
    return bool(view.record.uid) or bool(view.record.leaving)


def _is_deletion_requested(view: WorkerView) -> bool:
    """Its deletion has been asked for, and nothing more is to be asked."""
    return view.pod is not None and view.pod.deleting and not view.record.force


def _update_records(observation: Observation, policy: Policy) -> DesiredState:
    """What the pods say of the workers; those whose pods are gone, and who hold no ranks, are struck off. And how
    long the last of them took to be warm."""
    draft = observation.desired
    seated = {member.worker for member in draft.plan.members}
    kept, took = list[WorkerRecord](), draft.state.placement.start_seconds
    knows = observation.operator_age > policy.grace_after_start  # a young operator may hear of it late
    for view in observation.workers:
        record = view.record
        if view.pod is not None:
            record = _update_record(observation, policy, view, view.pod)
            if record.starting_since < view.record.starting_since and view.warm and knows:
                took = observation.now - view.pod.created_at
        elif (record.uid or record.leaving) and record.name not in seated:
            continue
        kept.append(record)
    if tuple(kept) == draft.state.placement.workers:
        return draft
    return draft.with_placement(workers=tuple(kept), start_seconds=took)


def _update_record(observation: Observation, policy: Policy, view: WorkerView, pod: PodView) -> WorkerRecord:
    known, node = view.record, pod.node or view.record.node
    force = known.force or _is_end_unconfirmed(observation, pod)
    since = _get_starting_since(observation, policy, view, pod)
    if (known.uid, known.node, known.force, known.starting_since) == (pod.uid, node, force, since):
        return known
    return replace(known, uid=pod.uid, node=node, force=force, starting_since=since)


def _is_end_unconfirmed(observation: Observation, pod: PodView) -> bool:
    """It is being deleted, and its node will not say that it has ended."""
    overdue = observation.clock_agrees and is_overdue(pod, observation.now)
    return overdue or (pod.deleting and _is_node_lost(observation, pod))


def is_overdue(pod: PodView, now: float) -> bool:
    """Its grace period is long over, and it is still there."""
    return pod.deleting and now > pod.delete_by + POD_DELETION_OVERDUE_SECONDS


def _is_node_lost(observation: Observation, pod: PodView) -> bool:
    """By the word of the API server."""
    nodes = observation.cluster_view.nodes
    node = nodes.get(pod.node)
    return bool(nodes) and bool(pod.node) and (node is None or not node.ready)


def _get_starting_since(observation: Observation, policy: Policy, view: WorkerView, pod: PodView) -> float:
    """Since when it has been on its way to being warm, in whole seconds; 0: it is not. A young operator has not heard
    of all those that are warm."""
    if not pod.started or pod.ended or _is_beyond_starting(view) or _is_assigned(observation, view):
        return 0.0
    known = view.heartbeat is not None or observation.operator_age > policy.grace_after_start
    return view.record.starting_since or (float(int(observation.now)) if known else 0.0)


def _is_assigned(observation: Observation, view: WorkerView) -> bool:
    return view.name in observation.assigned


def _is_beyond_starting(view: WorkerView) -> bool:
    return view.heartbeat is not None and view.heartbeat.state is not LauncherState.STARTING


def _enforce_placement_timeout(observation: Observation) -> DesiredState:
    """Gang placement: all seats are placed within the time, or all pods go and the job waits its turn."""
    draft, state, job = observation.desired, observation.state, observation.job
    if draft.plan.members:
        return draft
    if not state.placement.placing_since:
        at = state.placement.retry_at
        is_turn_of_older = bool(observation.cluster_view.older_waiting_job) and observation.now < at + OLDER_JOB_TURN_SECONDS
        if not is_due(at, observation.now) or (at <= observation.now and is_turn_of_older):
            return draft
        return draft.with_placement(placing_since=observation.now)
    gated = any(view.pod is not None and view.pod.scheduling_gated for view in observation.workers)
    if gated != state.placement.gated:
        return draft.with_placement(gated=gated, placing_since=observation.now)
    if gated:
        return draft  # somebody else decides when it may be placed: until then, the time does not run
    placed = sum(view.pod is not None and bool(view.pod.node) and view.usable for view in observation.workers)
    if placed >= job.spec.replicas or observation.now - state.placement.placing_since < job.spec.scheduling_timeout:
        return draft
    return draft.with_placement(
        workers=tuple(replace(w, leaving=str(Reason.SCHEDULING_TIMEOUT), dead=True) for w in state.placement.workers),
        placing_since=0.0,
        attempts=state.placement.attempts + 1,
        retry_at=observation.now + compute_backoff(job.uid, state.placement.attempts),
    )


def compute_backoff(uid: str, attempts: int) -> float:
    """Seconds before the next attempt: doubled each time, and ± 25 % by the job's own dice."""
    dice = int.from_bytes(hashlib.sha256(f"{uid}/{attempts}".encode()).digest()[:4]) / 2**32
    doubled = FIRST_WORKER_BACKOFF_SECONDS * 2.0 ** min(attempts, 10)
    return min(MAX_WORKER_BACKOFF_SECONDS, doubled) * (0.75 + 0.5 * dice)


def is_due(at: float, now: float) -> bool:
    """Whether a wait until `at` is over. One that is longer than any was written by a clock that was ahead."""
    return not 0.0 < at - now <= 1.25 * MAX_WORKER_BACKOFF_SECONDS


def _give_up_ended(observation: Observation, draft: DesiredState) -> DesiredState:
    """A spare whose pod died, or was taken away, with its node or alone, is none any more. (Who holds ranks is lost:
    `worker_lost`.)"""
    seated, gone = {member.worker for member in draft.plan.members}, list[WorkerRecord]()
    for view in observation.workers:
        pod = view.pod
        if pod is None or view.name in seated or view.record.leaving:
            continue
        silent = view.silent_seconds > FRESH_WORKER_SECONDS and _is_node_lost(observation, pod)
        taken_away = pod.deleting or bool(pod.disruption_reason) or silent
        died = not taken_away and pod.ended and pod.exit_code != 0
        if taken_away or died:
            gone.append(replace(view.record, leaving="its pod has ended", dead=True))
        if died:
            draft = delay_next_start(draft, observation)
    return draft.with_workers(gone)


def _give_up_unplaced(observation: Observation, policy: Policy, draft: DesiredState) -> DesiredState:
    """A pod is kept off nodes for good. One that has no place without them is made anew when one of them may be used
    again. (A young operator has not heard of all suspects.)"""
    if observation.operator_age <= policy.grace_after_start:
        return draft
    unplaced = [view for view in observation.workers if view.pod is not None and view.pod.unschedulable_message]
    usable = observation.cluster_view.nodes.keys() - set(avoiding.list_avoided_nodes(observation)) if unplaced else frozenset()
    for view in unplaced:
        pod = view.pod
        if pod is None or pod.deleting or view.record.leaving:
            continue
        if observation.now - pod.created_at >= UNPLACED_POD_SECONDS and pod.avoided_nodes & usable:
            draft = draft.with_worker(replace(view.record, leaving="nodes that it was kept off may be used again"))
    return draft


def delay_next_start(draft: DesiredState, observation: Observation) -> DesiredState:
    """After a worker that was not ready, or did not stay so: the next one waits, longer each time."""
    failed = draft.state.placement.failed_starts
    return draft.with_placement(
        failed_starts=failed + 1, retry_at=observation.now + compute_backoff(observation.job.uid, failed)
    )


def is_waiting_for_starts(observation: Observation) -> bool:
    """Whether the job does not train because workers end before they are ready, and has trained before."""
    placement = observation.state.placement
    trains = bool(observation.plan.members) and not placement.vacant_since
    return observation.has_trained and not trains and placement.failed_starts > 0


def delay_after_refusal(draft: DesiredState, observation: Observation) -> DesiredState:
    """After a pod that its kubelet refused: the next one comes at once, and from the second on all wait, longer each
    time, since the scheduler may choose the same node again."""
    refused = draft.state.placement.refused
    pause = compute_backoff(observation.job.uid, refused - 1) if refused else 0.0
    return draft.with_placement(refused=refused + 1, refused_until=observation.now + pause)


def _give_up_surplus(observation: Observation, draft: DesiredState) -> DesiredState:
    """After a scale-down: spares go first, the newest seats next; who holds ranks stays until it no longer does."""
    wanted = observation.job.spec.replicas + observation.job.spec.spares
    seated = {member.worker for member in draft.plan.members}
    staying = [worker for worker in draft.state.placement.workers if not worker.leaving]
    surplus = sorted((worker for worker in staying if worker.name not in seated), key=lambda worker: -worker.ordinal)[
        : max(0, len(staying) - wanted)
    ]
    return draft.with_workers(replace(worker, leaving="fewer workers are wanted") for worker in surplus)


def _reserve_names(observation: Observation, draft: DesiredState) -> DesiredState:
    """Names for the workers that are missing. While no attempt to place the job is under way, none is; workers that
    do not start, and pods that kubelets refuse, wait before they are tried again."""
    placing = draft.plan.members or draft.state.placement.placing_since
    if not placing or not is_due(draft.state.placement.refused_until, observation.now):
        return draft
    spec, state = observation.job.spec, draft.state
    waits = not is_due(state.placement.retry_at, observation.now)
    if waits and is_waiting_for_starts(observation):
        return draft
    waits = waits and bool(draft.plan.members) and not state.placement.vacant_since
    wanted = min(spec.replicas, len(draft.plan.members)) if waits else spec.replicas + spec.spares
    staying = [worker for worker in draft.state.placement.workers if not worker.leaving]
    taken = {worker.ordinal for worker in staying}
    free = (ordinal for ordinal in count() if ordinal not in taken)
    chosen = list(islice(free, max(0, wanted - len(staying))))
    if not chosen:
        return draft
    placement = state.placement
    incarnations = {str(ordinal): placement.incarnations.get(str(ordinal), -1) + 1 for ordinal in chosen}
    fresh = (
        WorkerRecord(f"{observation.job.name}-w{ordinal}-{incarnations[str(ordinal)]}", ordinal, incarnations[str(ordinal)])
        for ordinal in chosen
    )
    return draft.with_placement(
        workers=(*placement.workers, *fresh), incarnations={**placement.incarnations, **incarnations}
    )


def _list_stopping_workers(observation: Observation) -> tuple[WorkerView, ...]:
    """Of a job that is told to stop: pods that have left, and all of them once they have had the time."""
    late = observation.now - observation.state.life.stopped_at > WORKER_LEAVE_SECONDS
    return tuple(
        view
        for view in observation.workers
        if view.pod is not None
        and not _is_deletion_requested(view)
        and (view.pod.ended or late or _has_no_ranks(view) or view.record.force)
    )


def _has_no_ranks(view: WorkerView) -> bool:
    """It has no ranks (any more), and so nothing that a checkpoint could save."""
    return view.heartbeat is None or view.heartbeat.round == 0 or view.heartbeat.state is LauncherState.WARM


def _list_pods_to_clean_up(observation: Observation) -> tuple[WorkerView, ...]:
    """Of a job that has ended."""
    chosen: Sequence[WorkerView]
    match observation.job.spec.run_policy.clean_pod_policy:
        case CleanPodPolicy.NONE:
            return ()
        case CleanPodPolicy.ALL:
            chosen = observation.workers
        case _:
            return _list_running_pods_to_clean_up(observation)
    late = _is_late(observation, WORKER_LEAVE_SECONDS / 4)
    failed = bool(observation.state.life.failed_reason)
    return tuple(
        view
        for view in chosen
        if view.pod is not None and not _is_deletion_requested(view) and (view.pod.ended or failed or late or _has_no_ranks(view))
    )


def _list_running_pods_to_clean_up(observation: Observation) -> tuple[WorkerView, ...]:
    """Those whose containers run: ended pods stay for their logs, also those of launchers that leave by themselves.

    Of a failed job all of them have the time to do so, since what they have to say is why it has failed. A pod whose
    trainer has ended, while another of its containers runs on, keeps its node: it is late, too.
    """
    failed = bool(observation.state.life.failed_reason)
    late = _is_late(observation, WORKER_LEAVE_SECONDS if failed else WORKER_LEAVE_SECONDS / 4)
    return tuple(
        view
        for view in observation.workers
        if view.pod is not None and view.pod.phase not in ("Succeeded", "Failed") and not _is_deletion_requested(view)
        # What has no place, or no container yet, would only begin now.
        if late or view.pod.phase == "Pending" or (not failed and not view.pod.ended and _has_no_ranks(view))
    )


def _is_late(observation: Observation, seconds: float) -> bool:
    return observation.now - (observation.state.life.stopped_at or observation.now) > seconds
