"""The status of a job: phase, conditions, and metrics. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from pacekeeper_analysis.protocol.plan import Paths, Stop, SyncMode
from pacekeeper_analysis.protocol.reports import LauncherState, PathFault

from ...api.conditions import ConditionStatus, JobCondition, Reason
from ...api.formats import format_time
from ...api.node_quarantine import QuarantineVerdict
from ...api.training_job import JobPhase, JobStatus, ResumePoint, WorkerCounts
from ...formatting import format_list, shorten_text
from ...pods.manifests import choose_checkpoint_sub_path, identify_checkpoint_folder
from ...state.cluster_view import FRESH_WORKER_SECONDS
from ...state.desired_state import Lifecycle
from ...state.job_metrics import PROMETHEUS_NOT_QUERIED
from ...state.observation import Observation
from ...state.policy import Policy
from ..failures import back_off, node_lost, start_failed
from ..network import paths
from ..placement import checkpoint_server, preflight, rank_assignment, workforce
from . import progress as progresses
from .lifecycle import classify_stuck_reason, describe_stuck_worker, find_stuck_worker, list_followed_members
from .restart_breakdown import find_state_origin

MIN_UNIFORM_SLOWDOWN = 1.2
"""Step time of the fastest rank, over that of the job's first steady steps, from which the whole job counts as slow."""
READY_WHILE_RECOVERING_SECONDS = 60.0
"""Longest recovery, in seconds, that leaves a job Ready. Most take a second, and a condition that tools wait for must
not flap."""
TO_DO_AFTER_FAILURE = (
    "a job that has failed does not start again. Fix the cause, delete the job, and apply it again: it resumes "
    "from its "
    "newest checkpoint, if it has one"
)
"""What the user can do about a failed job. A change of its template has no effect any more."""
MAX_NAMED_ACTIONS = 3
_MINUTE_SECONDS = 60
MAX_JOB_MESSAGE_CHARACTERS = 4000
"""Characters of a condition's message."""


@dataclass(frozen=True)
class _JobConditionState:
    """The present state of one condition."""

    type: JobCondition
    holds: bool | None  # None: not known
    reason: Reason
    message: str = ""


def build_job_status(observation: Observation, policy: Policy, before: JobStatus) -> JobStatus:
    """Return the job's status. Transition times are kept from `before` where a condition has not changed."""
    if _is_too_early(observation, policy, before):
        return before
    state, job, phase = observation.state, observation.job, compute_phase(observation)
    members = observation.plan.members
    ready = sum(
        view.heartbeat is not None and view.heartbeat.state in (LauncherState.RUNNING, LauncherState.FINISHED)
        for view in observation.members
    )
    conditions = tuple(
        _build_condition_status(condition, before, job.generation, observation.now)
        for condition in _build_conditions(observation, policy, phase, before)
    )
    ended = state.lifecycle.is_over
    main = next((c for c in conditions if c.type == _PHASE_TO_CONDITION.get(phase, JobCondition.RUNNING)), None)
    slowdown = observation.metrics.slowdown if phase is JobPhase.RUNNING else None
    step = before.step if observation.progress.step is None else observation.progress.step
    goodput = before.goodput if ended else _compute_goodput(observation)
    total_steps, progress, remaining = progresses.report_progress(observation, phase, before, step, goodput)
    return replace(
        before,
        phase=phase,
        reason=main.reason if main else None,
        message=main.message if main else None,
        observed_generation=job.generation,
        conditions=conditions,
        start_time=state.lifecycle.start_time,
        completion_time=_get_end_time(state.lifecycle) if ended else None,
        round=observation.progress.round if members else before.round,
        step=step,
        total_steps=total_steps,
        progress=progress,
        remaining=remaining,
        last_checkpoint_step=before.last_checkpoint_step
        if observation.progress.checkpoint_step is None
        else observation.progress.checkpoint_step,
        checkpoint_sub_path=choose_checkpoint_sub_path(job),
        resumed_from=_find_resume_point(observation) or before.resumed_from,
        workers=WorkerCounts.from_counts(
            job.spec.replicas, ready if members else 0, _count_running_spares(observation) if members else 0
        ),
        selector=job.selector,
        slowdown=slowdown,
        goodput=goodput,
        sync_mode=_get_sync_mode(observation),
        restarts=state.budget.total_restarts,
        bottleneck=_describe_bottleneck(observation) if phase is JobPhase.RUNNING else None,
        leaf_crossings=rank_assignment.count_leaf_crossings(observation),
    )


def _find_resume_point(observation: Observation) -> ResumePoint | None:
    """Return from which step the present round continued; None: its ranks have not reported it."""
    progress = observation.progress
    if progress.resumed_step is None:
        return None
    return ResumePoint(progress.round, progress.resumed_step, find_state_origin(progress.heartbeats))


def _count_running_spares(observation: Observation) -> int:
    """Return the number of spares whose pods run. A pod that is unscheduled or cannot start is no spare."""
    return sum(view.pod is not None and view.pod.phase == "Running" for view in observation.spares)


def build_unreadable_status(before: JobStatus, generation: int, reason: str, now: float) -> JobStatus:
    """Return the status of a job whose state cannot be read: as it was `before`, with the reason in a condition."""
    blocked = _JobConditionState(JobCondition.ACTION_BLOCKED, True, Reason.ACTION_FAILED, reason)
    others = tuple(condition for condition in before.conditions if condition.type != blocked.type)
    phase = before.phase or JobPhase.PENDING
    return replace(before, phase=phase, conditions=(*others, _build_condition_status(blocked, before, generation, now)))


_KNOWN_REASONS = frozenset(map(str, Reason))
_PHASE_TO_CONDITION = {
    JobPhase.COMPLETE: JobCondition.COMPLETE,
    JobPhase.FAILED: JobCondition.FAILED,
    JobPhase.SUSPENDED: JobCondition.SUSPENDED,
    JobPhase.RECOVERING: JobCondition.RECOVERING,
    JobPhase.RUNNING: JobCondition.RUNNING,
}


def _is_too_early(observation: Observation, policy: Policy, before: JobStatus) -> bool:
    """Return whether to keep the old status: this operator has just started, and not all members have reported to it.

    A thousand jobs that update their status with each member that reports would keep an API server busy for a minute.
    """
    young = observation.operator_age < policy.grace_after_start
    steady = not observation.state.lifecycle.is_over and not observation.state.incidents.open
    is_current = before.phase is not None and before.observed_generation == observation.job.generation
    awaits_reports = any(view.heartbeat is None for view in observation.members)
    return young and steady and is_current and awaits_reports and not observation.blocked_actions


def _get_end_time(lifecycle: Lifecycle) -> float | None:
    """Return when the job ended; None: unknown."""
    return lifecycle.stopped_at if lifecycle.completed_at is None else lifecycle.completed_at


def compute_phase(observation: Observation) -> JobPhase:
    """Return the phase of the job."""
    state, plan = observation.state, observation.plan
    if state.lifecycle.failed_reason:
        return JobPhase.FAILED
    if state.lifecycle.completed_at is not None:
        return JobPhase.COMPLETE
    if observation.job.spec.suspend or plan.stop is Stop.SUSPEND:
        return JobPhase.SUSPENDED
    if not plan.members:
        return JobPhase.PENDING
    if any(not incident.live for incident in state.incidents.open):
        return JobPhase.RECOVERING
    if observation.progress.training_since is not None or plan.stop is Stop.FINISH:
        return JobPhase.RUNNING
    return JobPhase.RECOVERING if state.lifecycle.has_trained else JobPhase.STARTING


def _build_conditions(
    observation: Observation, policy: Policy, phase: JobPhase, before: JobStatus
) -> Iterator[_JobConditionState]:
    state = observation.state
    running, recovering = (
        _build_running_condition(observation, phase),
        _build_recovering_condition(observation, policy, phase),
    )
    yield from _build_kstatus_conditions(
        _choose_kstatus_condition(observation, policy, phase, recovering if recovering.holds else running, before)
    )
    yield running
    yield _build_degraded_condition(observation, policy, phase)
    yield recovering
    suspended, queued = phase is JobPhase.SUSPENDED, observation.job.queue_hold_reason
    remaining = sum(view.pod is not None for view in observation.workers)
    leaving = f"{remaining} workers are leaving" if suspended and remaining else ""
    reason = "spec.suspend is true" if observation.job.spec.suspend else ""
    yield _JobConditionState(
        JobCondition.SUSPENDED,
        suspended and not remaining,
        Reason.QUEUED if queued and suspended else Reason.SUSPENDED if suspended else Reason.RESUMED,
        "; ".join(filter(None, ((queued or reason) if suspended else "", leaving))),
    )
    complete = state.lifecycle.completed_at is not None
    yield _JobConditionState(
        JobCondition.COMPLETE,
        complete,
        Reason.RANKS_FINISHED if complete else Reason.TRAINING,
        "the ranks of all workers have finished" if complete else "",
    )
    failure_reason = _get_failure_reason(state.lifecycle) if state.lifecycle.failed_reason else Reason.TRAINING
    yield _JobConditionState(
        JobCondition.FAILED, bool(state.lifecycle.failed_reason), failure_reason, state.lifecycle.failed_message
    )
    rejected = state.placement.template_rejected == observation.job.generation
    yield _JobConditionState(
        JobCondition.INVALID_TEMPLATE,
        rejected,
        Reason.POD_REFUSED if rejected else Reason.POD_ACCEPTED,
        state.placement.rejection if rejected else "",
    )
    yield _build_blocked_condition(observation)
    if observation.plan.paths is not None:
        yield _build_paths_condition(observation.plan.paths, observation)
    if observation.job.spec.preflight.enabled:
        yield _build_preflight_condition(observation, before)
    yield _build_metrics_condition(observation)


def _build_kstatus_conditions(verdict: _JobConditionState) -> Iterator[_JobConditionState]:
    """Yield Ready, Reconciling, and Stalled, which kubectl wait, Helm and Argo CD evaluate. One of them is True."""
    for type_ in (JobCondition.READY, JobCondition.RECONCILING, JobCondition.STALLED):
        holds = type_ == verdict.type
        yield _JobConditionState(type_, holds, verdict.reason, verdict.message if holds else "")


def _choose_kstatus_condition(
    observation: Observation, policy: Policy, phase: JobPhase, waits: _JobConditionState, before: JobStatus
) -> _JobConditionState:
    """Return the one of the three conditions that is True.

    Ready: the job is as its spec requests, whether training, suspended, or complete. Stalled: nothing happens until a
    user changes something, or the operator retries with a back-off. `waits`: why the job does not train.
    """
    spec, state = observation.job.spec, observation.state
    if phase is JobPhase.FAILED:
        return _JobConditionState(
            JobCondition.STALLED,
            True,
            _get_failure_reason(state.lifecycle),
            f"{state.lifecycle.failed_message}; {TO_DO_AFTER_FAILURE}",
        )
    if phase is JobPhase.COMPLETE:
        return _JobConditionState(JobCondition.READY, True, Reason.RANKS_FINISHED)
    if phase is JobPhase.SUSPENDED and observation.job.queue_hold_reason:
        return _JobConditionState(JobCondition.RECONCILING, True, Reason.QUEUED, observation.job.queue_hold_reason)
    if phase is JobPhase.SUSPENDED:
        is_suspended = spec.suspend and all(view.pod is None for view in observation.workers)
        reason = Reason.SUSPENDED if spec.suspend else Reason.RESUMED
        return _JobConditionState(JobCondition.READY if is_suspended else JobCondition.RECONCILING, True, reason)
    if phase is JobPhase.RUNNING:
        member_count = len(observation.plan.members)
        if spec.effective_min_replicas <= member_count <= spec.replicas:
            return _JobConditionState(JobCondition.READY, True, Reason.TRAINING)
        message = f"{member_count} workers train, {spec.replicas} are requested"
        return _JobConditionState(JobCondition.RECONCILING, True, Reason.REPLICAS_DIFFER, message)
    if state.placement.template_rejected == observation.job.generation:
        return _JobConditionState(JobCondition.STALLED, True, Reason.POD_REFUSED, state.placement.rejection)
    if phase is JobPhase.RECOVERING and _was_ready(before, observation.now):
        return _JobConditionState(JobCondition.READY, True, Reason.TRAINING)
    message = back_off.describe_back_off(observation, policy)
    if message:
        return _JobConditionState(JobCondition.STALLED, True, Reason.BACK_OFF, message)
    return _JobConditionState(JobCondition.RECONCILING, True, waits.reason, waits.message)


def _was_ready(before: JobStatus, now: float) -> bool:
    """Return whether the job was Ready until the present recovery, which began a short time ago."""
    since = {c.type: c.last_transition_time for c in before.conditions if c.status == "True"}
    began = since.get(JobCondition.RECOVERING, now)
    return JobCondition.READY in since and began is not None and now - began < READY_WHILE_RECOVERING_SECONDS


def _build_recovering_condition(observation: Observation, policy: Policy, phase: JobPhase) -> _JobConditionState:
    incidents = [incident for incident in observation.state.incidents.open if not incident.live]
    descriptions = [f"{incident.name}: {incident.message}" for incident in incidents[:5]]
    message = "; ".join(filter(None, [back_off.describe_back_off(observation, policy), *descriptions]))
    reason = Reason.INCIDENT_OPEN if incidents else Reason.NO_INCIDENT
    if phase is JobPhase.RECOVERING:
        message = (
            "; ".join(filter(None, (message, _explain_cannot_start(observation))))
            or "the next round has not begun to train"
        )
    return _JobConditionState(JobCondition.RECOVERING, phase is JobPhase.RECOVERING, reason, message)


def _build_blocked_condition(observation: Observation) -> _JobConditionState:
    """Report actions that failed so far. The operator retries them, and a user may have to help."""
    blocked = observation.blocked_actions
    message = "; ".join(f"{problem.action}: {problem.reason}" for problem in blocked[:MAX_NAMED_ACTIONS])
    more = f"; and {len(blocked) - MAX_NAMED_ACTIONS} more" if len(blocked) > MAX_NAMED_ACTIONS else ""
    reason = (
        Reason.POD_DENIED
        if any(action.is_pod_creation for action in blocked)
        else Reason.ACTION_FAILED
        if blocked
        else Reason.NOTHING_BLOCKED
    )
    return _JobConditionState(JobCondition.ACTION_BLOCKED, bool(blocked), reason, f"{message}{more}")


def _build_paths_condition(planned: Paths, observation: Observation) -> _JobConditionState:
    """Report which planned paths are in force, as the senders' launchers report it for this membership."""
    flows, reports = len(planned.wanted), paths.collect_path_reports(observation)
    faults = Counter(report.fault for report in reports.values() if report.fault is not PathFault.NONE)
    if faults:
        reasons = "; ".join(
            f"{fault} ({count}): {paths.PATH_FAULT_ADVICE[fault]}" for fault, count in faults.most_common()
        )
        message = f"{faults.total()} of {flows} flows do not follow their planned paths: {reasons}"
        return _JobConditionState(JobCondition.PATHS_IN_FORCE, False, Reason.ROUTED_BY_NETWORK, message)
    if sum(report.in_force for report in reports.values()) == flows:
        return _JobConditionState(JobCondition.PATHS_IN_FORCE, True, Reason.ALL_FLOWS_ON_ROUTE, f"{flows} flows")
    return _JobConditionState(
        JobCondition.PATHS_IN_FORCE, None, Reason.NOT_REPORTED, "workers have not reported all flows yet"
    )


def _build_preflight_condition(observation: Observation, before: JobStatus) -> _JobConditionState:
    """Report the preflight: True if the checked nodes passed. A node whose result is unknown does not block the job.

    An operator that starts while the job trains has not checked its nodes, so it keeps the condition of `before`.
    """
    unchecked, avoided = preflight.list_unchecked_workers(observation), observation.state.preflight.avoided_nodes
    previous = next((c for c in before.conditions if c.type == JobCondition.PREFLIGHT), None)
    if (
        previous is not None
        and observation.plan.members
        and not observation.node_checks
        and previous.reason in _KNOWN_REASONS
    ):
        holds = {"True": True, "False": False}.get(previous.status)
        return _JobConditionState(JobCondition.PREFLIGHT, holds, Reason(previous.reason), previous.message)
    failed = [
        f"{node.node}: {node.reason}" + (" (used for lack of other nodes)" if node.readmitted else "")
        for node in avoided
    ]
    unknown = [
        f"{view.node}: {check.message}"
        for view in observation.workers
        if (check := preflight.get_node_check(observation, view)) is not None and check.passed is None
    ]
    if failed:
        return _JobConditionState(JobCondition.PREFLIGHT, False, Reason.NODES_FAILED, "; ".join(failed[:8]))
    if any(preflight.is_check_awaited(observation, view) for view in unchecked):
        return _JobConditionState(
            JobCondition.PREFLIGHT, None, Reason.PROBING, format_list([view.node for view in unchecked])
        )
    if unchecked or unknown:
        messages = [
            *unknown[:8],
            *(f"{view.node}: not within {_format_preflight_timeout(observation)} s" for view in unchecked[:8]),
        ]
        return _JobConditionState(JobCondition.PREFLIGHT, None, Reason.INCONCLUSIVE, "; ".join(messages))
    placed = any(view.node for view in observation.workers)
    return _JobConditionState(
        JobCondition.PREFLIGHT, True if placed else None, Reason.NODES_PASSED if placed else Reason.PROBING
    )


def _format_preflight_timeout(observation: Observation) -> str:
    return f"{observation.job.spec.preflight.timeout:.0f}"


def _build_running_condition(observation: Observation, phase: JobPhase) -> _JobConditionState:
    if phase is JobPhase.RUNNING and (followed := list_followed_members(observation)):
        message = f"the ranks have finished, and the command of {format_list(followed)} goes on"
        return _JobConditionState(JobCondition.RUNNING, True, Reason.RANKS_FINISHED, message)
    if phase is JobPhase.RUNNING:
        return _JobConditionState(JobCondition.RUNNING, True, Reason.TRAINING, f"round {observation.progress.round}")
    if phase is JobPhase.PENDING:
        return _explain_waiting(observation)
    if phase is JobPhase.COMPLETE:
        return _JobConditionState(JobCondition.RUNNING, False, Reason.RANKS_FINISHED)
    if phase is JobPhase.FAILED:
        return _JobConditionState(JobCondition.RUNNING, False, _get_failure_reason(observation.state.lifecycle))
    if phase is JobPhase.SUSPENDED:
        return _JobConditionState(JobCondition.RUNNING, False, Reason.SUSPENDED)
    if phase is JobPhase.RECOVERING:
        return _JobConditionState(JobCondition.RUNNING, False, Reason.INCIDENT_OPEN)
    return _JobConditionState(
        JobCondition.RUNNING,
        False,
        Reason.WAITING_FOR_PODS,
        "; ".join(
            filter(None, ("the first step of the first round is not done yet", _explain_cannot_start(observation)))
        ),
    )


def _explain_waiting(observation: Observation) -> _JobConditionState:
    """Return why a job has not started."""
    state, cluster_view = observation.state, observation.cluster_view
    if holder := workforce.find_folder_holder(observation):
        folder = identify_checkpoint_folder(observation.job)
        message = (
            f"job {holder} writes its checkpoints to the same folder ({folder}), so no worker is created: give this "
            "job its own folder (spec.checkpoint.path, or spec.checkpoint.subPath of a claim or URI), or wait until "
            f"the other has ended; to resume from its checkpoints then, set spec.checkpoint.adopt: {holder}"
        )
        return _JobConditionState(JobCondition.RUNNING, False, Reason.FOLDER_IN_USE, message)
    stuck = find_stuck_worker(observation)
    if stuck is not None:
        return _JobConditionState(
            JobCondition.RUNNING,
            False,
            classify_stuck_reason(stuck),
            f"worker {stuck.name}: {describe_stuck_worker(stuck)}",
        )
    denied = next(
        (
            problem
            for problem in observation.blocked_actions
            if problem.is_pod_creation or problem.action.startswith("template")
        ),
        None,
    )
    if denied is not None:
        return _JobConditionState(JobCondition.RUNNING, False, Reason.POD_DENIED, denied.reason)
    if state.placement.attempts and state.placement.placing_since is None:
        when = (
            f"after {cluster_view.older_waiting_job}, which is older" if cluster_view.older_waiting_job else "shortly"
        )
        message = (
            f"not all {observation.job.spec.replicas} workers could be placed within "
            f"{observation.job.spec.scheduling_timeout:.0f} s (attempt {state.placement.attempts}); "
            f"the next attempt comes {when}"
        )
        return _JobConditionState(JobCondition.RUNNING, False, Reason.SCHEDULING_TIMEOUT, message)
    blocker = _explain_cannot_start(observation) or _did_not_start(observation)
    warm = sum(view.warm for view in observation.workers)
    message = f"{warm} of {observation.job.spec.replicas} workers are ready" + (f"; {blocker}" if blocker else "")
    return _JobConditionState(JobCondition.RUNNING, False, Reason.WAITING_FOR_PODS, message)


def _build_degraded_condition(observation: Observation, policy: Policy, phase: JobPhase) -> _JobConditionState:
    """Return the first reason that applies, most severe first."""
    state, plan, spec = observation.state, observation.plan, observation.job.spec
    metrics = observation.metrics
    if state.lifecycle.is_over:
        # A job that has ended needs no remedies.
        return _JobConditionState(JobCondition.DEGRADED, False, Reason.HEALTHY)
    held_incident = next(
        (incident for incident in state.incidents.current if incident.verdict == QuarantineVerdict.BREAKER), None
    )
    if held_incident is not None:
        return _JobConditionState(
            JobCondition.DEGRADED, True, Reason.QUARANTINE_BREAKER, held_incident.quarantine_summary
        )
    if policy.paused:
        return _JobConditionState(JobCondition.DEGRADED, True, Reason.PAUSED, policy.paused)
    if phase is JobPhase.RECOVERING and (failing := _find_checkpoint_failure(observation)) is not None:
        return failing  # a round that ended since it could save no checkpoint; shown until a later round can
    if phase is not JobPhase.RUNNING:
        return _JobConditionState(JobCondition.DEGRADED, False, Reason.HEALTHY)
    severe = (
        _find_bad_input(observation) or _find_checkpoint_failure(observation) or _find_unreachable_workers(observation)
    )
    if severe is not None:
        return severe
    if len(plan.members) < spec.replicas:
        is_unschedulable = any(view.pod is not None and view.pod.unschedulable_message for view in observation.workers)
        reason = "for lack of nodes" if is_unschedulable else "until others have started"
        message = f"{len(plan.members)} of {spec.replicas} workers train, {reason}"
        message = "; ".join(filter(None, (message, _explain_cannot_start(observation) or _did_not_start(observation))))
        return _JobConditionState(JobCondition.DEGRADED, True, Reason.FEWER_REPLICAS, message)
    if state.adaptation.local_sgd is not None:
        since = format_time(state.adaptation.local_sgd.since)
        message = f"{plan.sync_mode} since {since}: {state.adaptation.local_sgd.reason}"
        return _JobConditionState(JobCondition.DEGRADED, True, Reason.LOCAL_SGD_ACTIVE, message)
    if observation.has_straggler:
        message = f"rank {metrics.slowest_rank} takes {metrics.relative_time:.2f} × its peers' time a sample"
        return _JobConditionState(JobCondition.DEGRADED, True, Reason.STRAGGLER, message)
    if metrics.uniform_slowdown is not None and metrics.uniform_slowdown >= MIN_UNIFORM_SLOWDOWN:
        is_single_rank = plan.world_size == 1  # it waits for no other rank
        wait_share = None if is_single_rank else metrics.wait_share
        if wait_share is not None and (1 - wait_share) * metrics.uniform_slowdown < spec.detection.straggler_slowdown:
            message = (
                f"steps take {metrics.uniform_slowdown:.2f} × the time of the job's own first steady steps, and "
                f"{wait_share:.0%} of each is waiting: for a link, or for ranks that are slow in turns"
            )
            return _JobConditionState(JobCondition.DEGRADED, True, Reason.SLOW_COMMUNICATION, message)
        message = (
            f"UniformSlowdown: all ranks take {metrics.uniform_slowdown:.2f} × the time of the job's own first steady "
            "steps, so it is not a node: check code, data and storage"
        )
        return _JobConditionState(JobCondition.DEGRADED, True, Reason.ALL_RANKS_SLOW, message)
    if spec.spares and (message := _explain_cannot_start(observation) or _did_not_start(observation)):
        return _JobConditionState(JobCondition.DEGRADED, True, Reason.WORKER_CANNOT_START, message)
    if spec.spares and not observation.spares:
        return _JobConditionState(
            JobCondition.DEGRADED, True, Reason.NO_SPARE, "the next lost worker will cost the time of a new pod"
        )
    return _JobConditionState(JobCondition.DEGRADED, False, Reason.HEALTHY)


def _explain_cannot_start(observation: Observation) -> str:
    """Return why a spare or a lost worker's successor does not start, as the component that blocks it reports it.

    "": none is blocked.
    """
    stuck = find_stuck_worker(observation)
    if stuck is not None:
        return f"worker {stuck.name} cannot start: {describe_stuck_worker(stuck)}"
    unplaced = next(
        (view for view in observation.workers if view.pod is not None and view.pod.unschedulable_message), None
    )
    if unplaced is not None and unplaced.pod is not None:
        return f"worker {unplaced.name} cannot be scheduled: {unplaced.pod.unschedulable_message}"
    denied = next((problem for problem in observation.blocked_actions if problem.is_pod_creation), None)
    if denied is not None:
        return f"{denied.action}: {denied.reason}"
    timeout = observation.job.spec.scheduling_timeout
    slow = (view for view in observation.workers if view.pod is not None and view.node and view.pod.phase == "Pending")
    late = next((v for v in slow if v.pod is not None and observation.now - v.pod.created_at > timeout), None)
    if late is None:
        missing = checkpoint_server.explain_missing_server(observation)
        return f"checkpoints cannot be read: {missing}" if missing else ""
    message = f"worker {late.name} is on {late.node}, and has not started for more than {timeout:.0f} s"
    claim = observation.job.spec.checkpoint.volume_claim_name
    others_started = any(v.pod is not None and v.pod.started and v.node != late.node for v in observation.workers)
    mounts_claim = claim and not observation.job.spec.checkpoint.uses_server
    hint = (
        f". If claim {claim} has access mode ReadWriteOnce, the pods of one node alone can mount it: set "
        "spec.checkpoint.accessMode to ReadWriteOnce, or use a claim with ReadWriteMany"
    )
    return (
        f"{message}: kubectl describe pod {late.name} shows what it waits for (a volume, an init container)"
        f"{hint if mounts_claim and others_started else ''}"
    )


def _did_not_start(observation: Observation) -> str:
    """Return why the last worker ended before it was ready, while the next one waits.

    "": none has, since the job last had all its workers.
    """
    incident = start_failed.newest_incident(observation)
    return "" if incident is None else incident.message


def _find_bad_input(observation: Observation) -> _JobConditionState | None:
    """Return what only the user can fix: a loss that is not finite, a plan that ranks refuse; None: nothing."""
    heartbeats = [view.heartbeat for view in observation.members if view.heartbeat is not None]
    for heartbeat in heartbeats:
        loss = heartbeat.training.bad_loss
        if loss is not None:
            message = (
                f"the loss of rank {loss.rank} on {heartbeat.worker} has not been finite since step {loss.step}: check "
                "the samples of that step and the learning rate; to go back, suspend the job, delete the checkpoints "
                "from that step on, and resume it"
            )
            return _JobConditionState(JobCondition.DEGRADED, True, Reason.NON_FINITE_LOSS, message)
    refused = next((heartbeat for heartbeat in heartbeats if heartbeat.training.refused), None)
    if refused is not None:
        reason = refused.training.refused
        message = f"the ranks on {refused.worker} do not follow the newest plan but the one before: {reason}"
        return _JobConditionState(JobCondition.DEGRADED, True, Reason.PLAN_REFUSED, message)
    return None


def _find_checkpoint_failure(observation: Observation) -> _JobConditionState | None:
    """Return that checkpoints fail while the job trains on; None: they do not."""
    reports = (view.heartbeat.checkpoint for view in observation.members if view.heartbeat is not None)
    failing = next((report for report in reports if report.error), None)
    if failing is None:
        return None
    rank_name = "a rank" if failing.failed_rank is None else f"rank {failing.failed_rank}"
    last_good = (
        f"the newest good one is of step {observation.progress.checkpoint_step}"
        if observation.progress.checkpoint_step is not None
        else ""
    )
    if failing.age_seconds is not None:
        last_good += f", {_format_age(failing.age_seconds)} old"
    message = (
        f"{rank_name} could not save its part of the newest checkpoint: {failing.error}; {last_good or 'there is none'}"
    )
    if missing := checkpoint_server.explain_missing_server(observation):
        message = f"{message}; the checkpoint server does not serve: {missing}"
    return _JobConditionState(JobCondition.DEGRADED, True, Reason.CHECKPOINT_FAILING, message)


def _format_age(seconds: float) -> str:
    """Return the age in minutes. A message that changes each second would be written each second."""
    return f"{seconds / _MINUTE_SECONDS:.0f} min" if seconds >= _MINUTE_SECONDS else "less than a minute"


def _find_unreachable_workers(observation: Observation) -> _JobConditionState | None:
    """Return the workers that the operator cannot reach, but assumes to be training; None: there are none."""
    names = [view.name for view in node_lost.list_unreachable_members(observation)]
    if not names:
        return None
    message = (
        f"the operator gets no reports from {format_list(names)} and cannot reach them; no other source confirms that "
        "they are lost"
    )
    return _JobConditionState(JobCondition.DEGRADED, True, Reason.WORKERS_UNREACHABLE, message)


def _build_metrics_condition(observation: Observation) -> _JobConditionState:
    """Report whether metrics are available: those of the ranks from their sidecars, those of GPUs from Prometheus."""
    is_over = observation.state.lifecycle.is_over
    error, outdated = observation.metrics.prometheus_error, () if is_over else _list_old_sidecars(observation)
    if outdated:
        message = (
            f"the sidecars of {format_list(outdated)} are older than the operator and report no metrics: stragglers, "
            "slow communication and jobs that slow down as a whole cannot be detected before their workers are replaced"
        )
        return _JobConditionState(JobCondition.METRICS_AVAILABLE, False, Reason.METRICS_MISSING, message)
    if error == PROMETHEUS_NOT_QUERIED:
        return _JobConditionState(JobCondition.METRICS_AVAILABLE, None, Reason.PROMETHEUS_UNAVAILABLE, error)
    if not error:
        return _JobConditionState(
            JobCondition.METRICS_AVAILABLE, True, Reason.PROMETHEUS_AVAILABLE, observation.metrics.gpu_untrusted_reason
        )
    failure_reason = (
        Reason.PROMETHEUS_ACCESS_DENIED if observation.metrics.prometheus_denied else Reason.PROMETHEUS_UNAVAILABLE
    )
    reason = Reason.PROMETHEUS_NOT_CONFIGURED if "configured" in error else failure_reason
    return _JobConditionState(
        JobCondition.METRICS_AVAILABLE, False, reason, f"{error}: DCGM's GPU errors cannot be detected"
    )


def _list_old_sidecars(observation: Observation) -> tuple[str, ...]:
    """Return the workers that report, but send no metrics of the steps that their ranks have completed."""
    unreported = frozenset(observation.metrics.unreported_members)
    return tuple(
        view.name
        for view in observation.members
        if view.name in unreported
        and view.heartbeat is not None
        and view.heartbeat.progress.steps_in_round > 0
        and view.silent_seconds <= FRESH_WORKER_SECONDS
    )


def _get_failure_reason(lifecycle: Lifecycle) -> Reason:
    is_known = lifecycle.failed_reason in list(Reason)
    return Reason(lifecycle.failed_reason) if is_known else Reason.JOB_FAILED


def _build_condition_status(
    state: _JobConditionState, before: JobStatus, generation: int, now: float
) -> ConditionStatus:
    status = "Unknown" if state.holds is None else "True" if state.holds else "False"
    previous = next((condition for condition in before.conditions if condition.type == state.type), None)
    since = previous.last_transition_time if previous is not None and previous.status == status else now
    return ConditionStatus(
        state.type, status, state.reason, shorten_text(state.message, MAX_JOB_MESSAGE_CHARACTERS), since, generation
    )


def _get_sync_mode(observation: Observation) -> SyncMode:
    """Return the mode in force as rank 0's worker reports it, or else the plan's."""
    reported = next(
        (view.heartbeat.training.sync_mode for view in observation.members if view.heartbeat is not None), ""
    )
    return SyncMode(reported) if reported in list(SyncMode) else observation.plan.sync_mode


def _compute_goodput(observation: Observation) -> float | None:
    """Return the share of the time since the first step that was not lost to incidents; None: no step is complete."""
    state = observation.state
    if state.lifecycle.training_since is None:
        return None
    elapsed = observation.now - state.lifecycle.training_since
    open_seconds = sum(observation.now - incident.first_sign for incident in state.incidents.open if not incident.live)
    return max(0.0, 1.0 - (state.budget.lost_seconds + open_seconds) / elapsed) if elapsed > 0 else 1.0


def _describe_bottleneck(observation: Observation) -> str | None:
    rank = observation.metrics.slowest_rank
    if rank is None or not observation.has_straggler:
        return None
    return f"rank {rank} on {observation.find_worker_of_rank(rank)}"
