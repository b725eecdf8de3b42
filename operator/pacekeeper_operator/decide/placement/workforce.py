"""The pods that a job is to have: members and spares, reserved by name before they are created."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import count, islice

from pacekeeper_analysis.protocol.plan import Stop
from pacekeeper_analysis.protocol.reports import LauncherState

from ...api.conditions import Reason
from ...api.training_job import CleanPodPolicy
from ...pods.gangs import Gang
from ...pods.queues import SPARES_POD_SET, WORKERS_POD_SET
from ...state.cluster_view import FRESH_WORKER_SECONDS, PodView, WorkerView
from ...state.desired_state import DesiredState, WorkerRecord
from ...state.observation import Observation
from ...state.policy import Policy
from . import avoided_nodes

FIRST_WORKER_BACKOFF_SECONDS = 5.0
MAX_WORKER_BACKOFF_SECONDS = 300.0
OLDER_JOB_TURN_SECONDS = 300.0
"""Time that a job lets an older one go first: one that can never be placed does not block it indefinitely."""
POD_DELETION_OVERDUE_SECONDS = 15.0
"""Time after its grace period that a pod may still exist before its node is no longer awaited."""
UNPLACED_POD_SECONDS = 60.0
"""Time that a pod may be unschedulable before it is created again for nodes that may be used again."""
WORKER_LEAVE_SECONDS = 120.0
"""Time that workers may take to leave by themselves (checkpoint, exit) before their pods are deleted."""


def update_workforce(observation: Observation, policy: Policy) -> DesiredState:
    """Return the state with all names reserved. It is level-triggered: from the present pods to the desired ones."""
    observation = observation.with_desired(_update_records(observation, policy))
    desired = observation.desired
    if desired.state.lifecycle.is_over or observation.job.spec.suspend or desired.plan.stop is not Stop.NO:
        return desired
    if not _can_be_staffed(observation) or find_folder_holder(observation):
        return desired
    desired = _give_up_ended(observation, _enforce_placement_timeout(observation))
    desired = _give_up_unplaced(observation, policy, desired)
    stuck = frozenset(view.name for view in list_stuck_workers(observation, policy))
    wanted = observation.job.spec.replicas + observation.job.spec.spares + _needs_substitute(observation, stuck)
    return _reserve_names(observation, _give_up_surplus(desired, stuck, wanted), wanted)


def _can_be_staffed(observation: Observation) -> bool:
    """Return whether the API server accepts the job's template, or has accepted it: a job that trains goes on."""
    placement = observation.state.placement
    return placement.template_accepted == observation.job.generation or bool(observation.plan.members)


def find_folder_holder(observation: Observation) -> str:
    """Return the job that writes to the checkpoint folder of this one, which has no workers yet; "": none.

    If this job has workers, the result is "" as well: it goes on, and its ranks settle who owns the checkpoints.
    """
    has_workers = observation.plan.members or observation.state.placement.workers
    return "" if has_workers else observation.cluster_view.folder_owner


def list_missing_workers(observation: Observation) -> tuple[WorkerRecord, ...]:
    """Return the workers whose pods are to be created now."""
    if _is_job_ending(observation) or not _can_be_staffed(observation):
        return ()
    return tuple(view.record for view in observation.workers if view.pod is None and not _is_created_or_leaving(view))


def list_stuck_workers(observation: Observation, policy: Policy) -> tuple[WorkerView, ...]:
    """Return the workers without ranks that have been unable to start for longer than `schedulingTimeout`.

    It applies to a job that trains, whose template has worked on other nodes. The node may be the cause, so one more
    worker is created. A queue admits a fixed number of pods: its jobs wait.
    """
    job = observation.job
    if not observation.plan.members or not observation.clock_agrees or job.queue or not policy.applies_remedies:
        return ()
    latest_creation = observation.now - job.spec.scheduling_timeout
    return tuple(
        view
        for view in observation.workers
        if view.usable and view.pod is not None and view.pod.stuck and view.pod.created_at <= latest_creation
        if view.name not in observation.assigned
    )


def count_needed_workers(observation: Observation, missing: Sequence[WorkerRecord]) -> int:
    """Return how many of the missing workers are needed as members; the others are spares.

    Members may share a node where there is no other, even while the rest of the job trains.
    """
    names = {worker.name for worker in missing}
    present = [view for view in observation.workers if view.name not in names and not view.record.leaving]
    return observation.job.spec.replicas - len(present)


def assign_pod_sets(observation: Observation, spares: Sequence[bool]) -> Sequence[str]:
    """Return the pod set of each new pod, given whether it is a spare. Texts are empty for a job in no queue.

    A pod keeps its set when a spare becomes a member. The next pod then has the place that is free in the other set.
    """
    job = observation.job
    if not job.queue:
        return [""] * len(spares)
    free = Counter({WORKERS_POD_SET: job.spec.replicas, SPARES_POD_SET: job.spec.spares})
    free.subtract(
        view.pod.pod_set or WORKERS_POD_SET
        for view in observation.workers
        if view.pod is not None and not view.record.leaving
    )
    pod_sets = []
    for spare in spares:
        preferred, other = (SPARES_POD_SET, WORKERS_POD_SET) if spare else (WORKERS_POD_SET, SPARES_POD_SET)
        pod_sets.append(other if free[preferred] <= 0 < free[other] else preferred)
        free[pod_sets[-1]] -= 1
    return pod_sets


def runs_completely(observation: Observation) -> bool:
    """Return whether the containers of as many workers run as the job has replicas."""
    running = sum(
        view.pod is not None and view.pod.started and not view.pod.ended and not view.pod.deleting
        for view in observation.workers
        if not view.record.leaving
    )
    return running >= observation.job.spec.replicas


def build_gang(observation: Observation) -> Gang | None:
    """Return the gang in which new pods are to be placed; None: each pod alone.

    Any workers and spares of that number suffice: ranks go to those that are placed.
    """
    size = observation.job.spec.replicas
    if observation.plan.members or size == 1:
        return None
    return Gang(size, observation.state.placement.attempts)


def list_surplus_workers(observation: Observation) -> tuple[WorkerView, ...]:
    """Return the workers whose pods are to be deleted now."""
    if observation.state.lifecycle.is_over:
        return _list_pods_to_clean_up(observation)
    assigned = {member.worker for member in observation.plan.members}
    if _is_job_ending(observation):
        stopping = _list_stopping_workers(observation)
        # Commands may follow the ranks of members, whose pods show how they ended.
        finishing = observation.plan.stop is Stop.FINISH
        return tuple(view for view in stopping if not finishing or view.name not in assigned)
    return tuple(
        view
        for view in observation.workers
        # A dead worker yields its GPUs to its successor, even while its ranks are vacant.
        if view.record.leaving and (view.record.dead or view.name not in assigned)
        if view.pod is not None and not _is_deletion_requested(view)
    )


def _is_job_ending(observation: Observation) -> bool:
    is_over = observation.state.lifecycle.is_over or observation.job.spec.suspend
    return is_over or observation.plan.stop is not Stop.NO


def _is_created_or_leaving(view: WorkerView) -> bool:
    return bool(view.record.uid) or bool(view.record.leaving)


def _is_deletion_requested(view: WorkerView) -> bool:
    """Return whether its deletion has been requested, and does not have to be forced."""
    return view.pod is not None and view.pod.deleting and not view.record.force


def _update_records(observation: Observation, policy: Policy) -> DesiredState:
    """Update the workers' records from their pods, and drop those without a pod and ranks.

    It also records how long the last worker took until it was warm.
    """
    desired = observation.desired
    assigned = {member.worker for member in desired.plan.members}
    records, start_seconds = list[WorkerRecord](), desired.state.placement.start_seconds
    has_reports = observation.operator_age > policy.grace_after_start  # a young operator may receive its reports late
    for view in observation.workers:
        record = view.record
        if view.pod is not None:
            record = _update_record(observation, policy, view, view.pod)
            has_started = view.record.starting_since is not None and record.starting_since is None
            if has_started and view.warm and has_reports:
                start_seconds = observation.now - view.pod.created_at
        elif (record.uid or record.leaving) and record.name not in assigned:
            continue
        records.append(record)
    if tuple(records) == desired.state.placement.workers:
        return desired
    return desired.with_placement(workers=tuple(records), start_seconds=start_seconds)


def _update_record(observation: Observation, policy: Policy, view: WorkerView, pod: PodView) -> WorkerRecord:
    record, node = view.record, pod.node or view.record.node
    force = record.force or is_end_unconfirmed(observation, pod)
    since = _get_starting_since(observation, policy, view, pod)
    if (record.uid, record.node, record.force, record.starting_since) == (pod.uid, node, force, since):
        return record
    return replace(record, uid=pod.uid, node=node, force=force, starting_since=since)


def is_end_unconfirmed(observation: Observation, pod: PodView) -> bool:
    """Return whether the pod is being deleted, and its node will not confirm its end."""
    overdue = observation.clock_agrees and is_overdue(pod, observation.now)
    return overdue or (pod.deleting and is_node_lost(observation, pod))


def is_overdue(pod: PodView, now: float) -> bool:
    """Return whether the pod still exists long after its grace period."""
    return pod.delete_by is not None and now > pod.delete_by + POD_DELETION_OVERDUE_SECONDS


def is_node_lost(observation: Observation, pod: PodView) -> bool:
    """Return whether the API server has no such node, or reports it as not ready."""
    nodes = observation.cluster_view.nodes
    node = nodes.get(pod.node)
    return bool(nodes) and bool(pod.node) and (node is None or not node.ready)


def _get_starting_since(observation: Observation, policy: Policy, view: WorkerView, pod: PodView) -> float | None:
    """Return since when the worker has been starting, in whole seconds; None: it is not.

    A young operator may lack reports of workers that are warm.
    """
    if not pod.started or pod.ended or _is_beyond_starting(view) or _is_assigned(observation, view):
        return None
    if view.record.starting_since is not None:
        return view.record.starting_since
    has_reports = view.heartbeat is not None or observation.operator_age > policy.grace_after_start
    return float(int(observation.now)) if has_reports else None


def _is_assigned(observation: Observation, view: WorkerView) -> bool:
    return view.name in observation.assigned


def _is_beyond_starting(view: WorkerView) -> bool:
    return view.heartbeat is not None and view.heartbeat.state is not LauncherState.STARTING


def _enforce_placement_timeout(observation: Observation) -> DesiredState:
    """Place the job as a gang: all members within the timeout, or all pods are given up and the job waits."""
    desired, state, job = observation.desired, observation.state, observation.job
    if desired.plan.members:
        return desired
    placing_since = state.placement.placing_since
    if placing_since is None:
        retry_at = state.placement.retry_at
        is_turn_of_older = (
            retry_at is not None
            and bool(observation.cluster_view.older_waiting_job)
            and retry_at <= observation.now < retry_at + OLDER_JOB_TURN_SECONDS
        )
        if is_turn_of_older or not is_due(retry_at, observation.now):
            return desired
        return desired.with_placement(placing_since=observation.now)
    gated = any(view.pod is not None and view.pod.scheduling_gated for view in observation.workers)
    if gated != state.placement.scheduling_gated:
        return desired.with_placement(scheduling_gated=gated, placing_since=observation.now)
    if gated:
        return desired  # a queue decides when it may be placed: until then, the timeout does not run
    placed = sum(view.pod is not None and bool(view.pod.node) and view.usable for view in observation.workers)
    if placed >= job.spec.replicas or observation.now - placing_since < job.spec.scheduling_timeout:
        return desired
    return desired.with_placement(
        workers=tuple(
            replace(worker, leaving=str(Reason.SCHEDULING_TIMEOUT), dead=True) for worker in state.placement.workers
        ),
        placing_since=None,
        attempts=state.placement.attempts + 1,
        retry_at=observation.now + compute_backoff(job.uid, state.placement.attempts),
    )


def compute_backoff(uid: str, attempts: int) -> float:
    """Return the seconds before the next attempt: doubled each time, ± 25 % by a hash of the job's UID."""
    fraction = int.from_bytes(hashlib.sha256(f"{uid}/{attempts}".encode()).digest()[:4]) / 2**32
    doubled = FIRST_WORKER_BACKOFF_SECONDS * 2.0 ** min(attempts, 10)
    return min(MAX_WORKER_BACKOFF_SECONDS, doubled) * (0.75 + 0.5 * fraction)


def is_due(at: float | None, now: float) -> bool:
    """Return whether a wait until `at` is over; None: there is none.

    A longer wait than any was written by a clock that was ahead.
    """
    return at is None or not 0.0 < at - now <= 1.25 * MAX_WORKER_BACKOFF_SECONDS


def _give_up_ended(observation: Observation, desired: DesiredState) -> DesiredState:
    """Give up spares whose pods died or were taken away, alone or with their nodes.

    A worker with ranks is handled in `worker_lost`.
    """
    assigned, given_up = {member.worker for member in desired.plan.members}, list[WorkerRecord]()
    for view in observation.workers:
        pod = view.pod
        if pod is None or view.name in assigned or view.record.leaving:
            continue
        silent = view.silent_seconds > FRESH_WORKER_SECONDS and is_node_lost(observation, pod)
        taken_away = pod.deleting or bool(pod.disruption_reason) or silent
        died = not taken_away and pod.ended and pod.exit_code != 0
        if taken_away or died:
            given_up.append(replace(view.record, leaving="its pod has ended", dead=True))
        if died:
            desired = delay_next_start(desired, observation)
    return desired.with_workers(given_up)


def _give_up_unplaced(observation: Observation, policy: Policy, desired: DesiredState) -> DesiredState:
    """Give up unschedulable pods if a node that they must avoid may be used again: a pod's affinity is immutable.

    A young operator may lack reports of suspects.
    """
    if observation.operator_age <= policy.grace_after_start:
        return desired
    unplaced = [view for view in observation.workers if view.pod is not None and view.pod.unschedulable_message]
    usable = (
        observation.cluster_view.nodes.keys() - set(avoided_nodes.list_avoided_nodes(observation))
        if unplaced
        else frozenset()
    )
    for view in unplaced:
        pod = view.pod
        if pod is None or pod.deleting or view.record.leaving:
            continue
        if observation.now - pod.created_at >= UNPLACED_POD_SECONDS and pod.avoided_nodes & usable:
            desired = desired.with_worker(replace(view.record, leaving="nodes that it was kept off may be used again"))
    return desired


def delay_next_start(desired: DesiredState, observation: Observation) -> DesiredState:
    """Delay the next worker after one that was not ready, or did not stay so: longer each time."""
    failed = desired.state.placement.failed_starts
    return desired.with_placement(
        failed_starts=failed + 1, retry_at=observation.now + compute_backoff(observation.job.uid, failed)
    )


def is_waiting_for_starts(observation: Observation) -> bool:
    """Return whether workers end before they are ready and so keep a job from training that has trained before."""
    placement = observation.state.placement
    trains = bool(observation.plan.members) and placement.vacant_since is None
    return observation.state.lifecycle.has_trained and not trains and placement.failed_starts > 0


def delay_after_refusal(desired: DesiredState, observation: Observation) -> DesiredState:
    """Delay new pods after one that its kubelet refused: not after the first, then longer each time.

    The scheduler may choose the same node again.
    """
    refused = desired.state.placement.refused_pods
    pause = compute_backoff(observation.job.uid, refused - 1) if refused else 0.0
    return desired.with_placement(refused_pods=refused + 1, refused_until=observation.now + pause)


def _needs_substitute(observation: Observation, stuck: Collection[str]) -> bool:
    """Return whether a stuck worker needs a substitute that is not warm yet."""
    if not stuck:
        return False
    able = sum(
        view.warm or view.name in observation.assigned for view in observation.workers if not view.record.leaving
    )
    return able < observation.job.spec.replicas + observation.job.spec.spares


def _give_up_surplus(desired: DesiredState, stuck: Collection[str], wanted: int) -> DesiredState:
    """Give up surplus workers after a scale-down, or once the substitute of a stuck worker is warm.

    Stuck workers go first, then spares, then the newest. A worker that holds ranks stays until it no longer does.
    """
    assigned = {member.worker for member in desired.plan.members}
    staying = [worker for worker in desired.state.placement.workers if not worker.leaving]
    surplus = sorted(
        (worker for worker in staying if worker.name not in assigned),
        key=lambda worker: (worker.name not in stuck, -worker.ordinal),
    )[: max(0, len(staying) - wanted)]
    return desired.with_workers(
        replace(worker, leaving="it cannot start" if worker.name in stuck else "fewer workers are wanted")
        for worker in surplus
    )


def _reserve_names(observation: Observation, desired: DesiredState, wanted: int) -> DesiredState:
    """Reserve names for the workers that are missing.

    There are none while no attempt to place the job is under way. After workers that did not start, and pods that
    kubelets refused, new ones wait.
    """
    placing = desired.plan.members or desired.state.placement.placing_since is not None
    if not placing or not is_due(desired.state.placement.refused_until, observation.now):
        return desired
    spec, state = observation.job.spec, desired.state
    waits = not is_due(state.placement.retry_at, observation.now)
    if waits and is_waiting_for_starts(observation):
        return desired
    waits = waits and bool(desired.plan.members) and state.placement.vacant_since is None
    if waits:
        wanted = min(spec.replicas, len(desired.plan.members))
    staying = [worker for worker in desired.state.placement.workers if not worker.leaving]
    taken = {worker.ordinal for worker in staying}
    free = (ordinal for ordinal in count() if ordinal not in taken)
    ordinals = list(islice(free, max(0, wanted - len(staying))))
    if not ordinals:
        return desired
    placement = state.placement
    incarnations = {str(ordinal): placement.incarnations.get(str(ordinal), -1) + 1 for ordinal in ordinals}
    new_records = (
        WorkerRecord(
            f"{observation.job.name}-w{ordinal}-{incarnations[str(ordinal)]}", ordinal, incarnations[str(ordinal)]
        )
        for ordinal in ordinals
    )
    return desired.with_placement(
        workers=(*placement.workers, *new_records), incarnations={**placement.incarnations, **incarnations}
    )


def _list_stopping_workers(observation: Observation) -> tuple[WorkerView, ...]:
    """Return the pods of a job that is to stop: those that have left, and all of them once their time is over."""
    stopped_at = observation.state.lifecycle.stopped_at
    late = stopped_at is None or observation.now - stopped_at > WORKER_LEAVE_SECONDS
    return tuple(
        view
        for view in observation.workers
        if view.pod is not None
        and not _is_deletion_requested(view)
        and (view.pod.ended or late or _has_no_ranks(view) or view.record.force)
    )


def _has_no_ranks(view: WorkerView) -> bool:
    """Return whether the worker has no ranks (any more), and so nothing that a checkpoint could save."""
    return view.heartbeat is None or view.heartbeat.round == 0 or view.heartbeat.state is LauncherState.WARM


def _list_pods_to_clean_up(observation: Observation) -> tuple[WorkerView, ...]:
    """Return the pods of a job that has ended."""
    candidates: Sequence[WorkerView]
    match observation.job.spec.run_policy.clean_pod_policy:
        case CleanPodPolicy.NONE:
            return ()
        case CleanPodPolicy.ALL:
            candidates = observation.workers
        case _:
            return _list_running_pods_to_clean_up(observation)
    late = _is_late(observation, WORKER_LEAVE_SECONDS / 4)
    failed = bool(observation.state.lifecycle.failed_reason)
    return tuple(
        view
        for view in candidates
        if view.pod is not None
        and not _is_deletion_requested(view)
        and (view.pod.ended or failed or late or _has_no_ranks(view))
    )


def _list_running_pods_to_clean_up(observation: Observation) -> tuple[WorkerView, ...]:
    """Return the pods whose containers run. Ended pods stay for their logs, as do launchers that leave by themselves.

    In a failed job, all launchers get the time to do so, since their last output explains the failure. A pod whose
    trainer has ended, while another of its containers runs on, keeps its node: it is late, too.
    """
    failed = bool(observation.state.lifecycle.failed_reason)
    late = _is_late(observation, WORKER_LEAVE_SECONDS if failed else WORKER_LEAVE_SECONDS / 4)
    return tuple(
        view
        for view in observation.workers
        if view.pod is not None and view.pod.phase not in ("Succeeded", "Failed") and not _is_deletion_requested(view)
        # A pod without a node or a container would only start now.
        if late or view.pod.phase == "Pending" or (not failed and not view.pod.ended and _has_no_ranks(view))
    )


def _is_late(observation: Observation, seconds: float) -> bool:
    """Return whether the ranks were directed to leave more than `seconds` ago."""
    stopped_at = observation.state.lifecycle.stopped_at
    return stopped_at is not None and observation.now - stopped_at > seconds
