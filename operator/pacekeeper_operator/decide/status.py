"""What the operator says of a job: phase, conditions and figures. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from pacekeeper_analysis.plan import Paths, Stop, SyncMode
from pacekeeper_analysis.reports import LauncherState, PathFault

from ..api import JobCondition, ConditionStatus, JobPhase, JobStatus, Reason, QuarantineVerdict, WorkerCounts, format_time
from ..manifests import identify_checkpoint_folder, choose_checkpoint_sub_path
from ..observation import FRESH_WORKER_SECONDS, PROMETHEUS_NOT_QUERIED, Observation, Policy
from ..state import Lifecycle
from ..words import format_list, shorten_text
from . import back_off, node_lost, paths, preflight, seating, start_failed, workforce
from . import progress as progresses
from .stages import describe_stuck_worker, find_stuck_worker, classify_stuck_reason

MIN_UNIFORM_SLOWDOWN = 1.2
"""A job whose fastest rank takes so many times its own first steady steps is slow as a whole."""
READY_WHILE_RECOVERING_SECONDS = 60.0
"""A recovery of up to so long leaves a job Ready: most take a second, and what tools wait for must not flap."""
TO_DO_AFTER_FAILURE = "the job does not begin again: mend the cause, delete the job, and apply it again"
"""Its template can no longer be changed to any effect."""
MAX_JOB_MESSAGE_CHARACTERS = 4000
"""Characters of a condition's message."""


@dataclass(frozen=True)
class _JobConditionState:
    """A condition as it is now."""

    type: JobCondition
    holds: bool | None  # None: not known
    reason: Reason
    message: str = ""


def build_job_status(observation: Observation, policy: Policy, before: JobStatus) -> JobStatus:
    """The status as it shall be; transition times are kept from `before` where nothing has changed."""
    if _is_too_early(observation, policy, before):
        return before
    state, job, phase = observation.state, observation.job, compute_phase(observation)
    members = observation.plan.members
    ready = sum(
        view.heartbeat is not None and view.heartbeat.state in (LauncherState.RUNNING, LauncherState.FINISHED)
        for view in observation.members
    )
    conditions = tuple(
        _build_condition_status(found, before, job.generation, observation.now)
        for found in _build_conditions(observation, policy, phase, before)
    )
    ended = bool(state.life.completed_at or state.life.failed_reason)
    main = next((c for c in conditions if c.type == _PHASE_TO_CONDITION.get(phase, JobCondition.RUNNING)), None)
    slowdown = observation.metrics.slowdown if phase is JobPhase.RUNNING else None
    step = observation.step if observation.step >= 0 else before.step
    goodput = before.goodput if ended else _compute_goodput(observation)
    total_steps, progress, remaining = progresses.report_progress(observation, phase, before, step, goodput)
    return replace(
        before,
        phase=phase,
        reason=main.reason if main else None,
        message=main.message if main else None,
        observed_generation=job.generation,
        conditions=conditions,
        start_time=state.life.start_time or None,
        completion_time=(state.life.completed_at or state.life.stopped_at or None) if ended else None,
        round=observation.round if members else before.round,
        step=step,
        total_steps=total_steps,
        progress=progress,
        remaining=remaining,
        last_checkpoint_step=observation.checkpoint_step
        if observation.checkpoint_step >= 0
        else before.last_checkpoint_step,
        checkpoint_sub_path=choose_checkpoint_sub_path(job, separate=True) if state.life.apart else None,
        workers=WorkerCounts.from_counts(job.spec.replicas, ready if members else 0, _count_running_spares(observation) if members else 0),
        selector=job.selector,
        slowdown=slowdown,
        goodput=goodput,
        sync_mode=_get_sync_mode(observation),
        restarts=state.budget.total,
        bottleneck=_describe_bottleneck(observation) if phase is JobPhase.RUNNING else None,
        leaf_crossings=seating.count_leaf_crossings(observation),
    )


def _count_running_spares(observation: Observation) -> int:
    """Those whose pods run: what has no place, or cannot start, helps nobody."""
    return sum(view.pod is not None and view.pod.phase == "Running" for view in observation.spares)


def build_unreadable_status(before: JobStatus, generation: int, words: str, now: float) -> JobStatus:
    """The status of a job whose bookkeeping cannot be read: as it was, and why nothing goes on."""
    found = _JobConditionState(JobCondition.HINDERED, True, Reason.NOT_DONE, words)
    others = tuple(condition for condition in before.conditions if condition.type != found.type)
    phase = before.phase or JobPhase.PENDING
    return replace(before, phase=phase, conditions=(*others, _build_condition_status(found, before, generation, now)))


_KNOWN_REASONS = frozenset(map(str, Reason))
_PHASE_TO_CONDITION = {
    JobPhase.COMPLETE: JobCondition.COMPLETE,
    JobPhase.FAILED: JobCondition.FAILED,
    JobPhase.SUSPENDED: JobCondition.SUSPENDED,
    JobPhase.RECOVERING: JobCondition.RECOVERING,
    JobPhase.RUNNING: JobCondition.RUNNING,
}


def _is_too_early(observation: Observation, policy: Policy, before: JobStatus) -> bool:
    """This operator has just begun, and not all members have found it: what they do now is not known, and what was said
    stands. A thousand jobs that say how many have come, one by one, keep an API server busy for a minute."""
    young = observation.operator_age < policy.grace_after_start
    steady = not observation.state.life.is_over and not observation.state.incidents.open
    told = before.phase is not None and before.observed_generation == observation.job.generation
    unheard = any(view.heartbeat is None for view in observation.members)
    return young and steady and told and unheard and not observation.blocked_actions


def compute_phase(observation: Observation) -> JobPhase:
    state, plan = observation.state, observation.plan
    if state.life.failed_reason:
        return JobPhase.FAILED
    if state.life.completed_at:
        return JobPhase.COMPLETE
    if observation.job.spec.suspend or plan.stop is Stop.SUSPEND:
        return JobPhase.SUSPENDED
    if not plan.members:
        return JobPhase.PENDING
    if any(not incident.live for incident in state.incidents.open):
        return JobPhase.RECOVERING
    if observation.training_since is not None:
        return JobPhase.RUNNING
    return JobPhase.STARTING if not state.life.training_since else JobPhase.RECOVERING


def _build_conditions(observation: Observation, policy: Policy, phase: JobPhase, before: JobStatus) -> Iterator[_JobConditionState]:
    state = observation.state
    running, recovering = _build_running_condition(observation, phase), _build_recovering_condition(observation, policy, phase)
    yield from _build_kstatus_conditions(_choose_kstatus_condition(observation, policy, phase, recovering if recovering.holds else running, before))
    yield running
    yield _build_degraded_condition(observation, policy, phase)
    yield recovering
    suspended, queued = phase is JobPhase.SUSPENDED, observation.job.queued
    left = sum(view.pod is not None for view in observation.workers)
    leaving = f"{left} workers are leaving" if suspended and left else ""
    why = "spec.suspend is true" if observation.job.spec.suspend else ""
    yield _JobConditionState(
        JobCondition.SUSPENDED,
        suspended and not left,
        Reason.QUEUED if queued and suspended else Reason.SUSPENDED if suspended else Reason.RESUMED,
        "; ".join(filter(None, ((queued or why) if suspended else "", leaving))),
    )
    yield _JobConditionState(
        JobCondition.COMPLETE,
        bool(state.life.completed_at),
        Reason.TRAINED if state.life.completed_at else Reason.TRAINING,
        "the ranks of all workers have finished" if state.life.completed_at else "",
    )
    failed = _get_failure_reason(state.life) if state.life.failed_reason else Reason.TRAINING
    yield _JobConditionState(JobCondition.FAILED, bool(state.life.failed_reason), failed, state.life.failed_message)
    rejected = state.placement.template_rejected == observation.job.generation
    yield _JobConditionState(
        JobCondition.INVALID_TEMPLATE,
        rejected,
        Reason.REFUSED if rejected else Reason.ACCEPTED,
        state.placement.rejection if rejected else "",
    )
    yield _build_blocked_condition(observation)
    if observation.plan.paths is not None:
        yield _build_paths_condition(observation.plan.paths, observation)
    if observation.job.spec.preflight.enabled:
        yield _build_preflight_condition(observation, before)
    yield _build_metrics_condition(observation)


def _build_kstatus_conditions(verdict: _JobConditionState) -> Iterator[_JobConditionState]:
    """By these three kubectl wait, Helm and Argo CD judge a job. The words stand at the one that is True."""
    for one in (JobCondition.READY, JobCondition.RECONCILING, JobCondition.STALLED):
        holds = one == verdict.type
        yield _JobConditionState(one, holds, verdict.reason, verdict.message if holds else "")


def _choose_kstatus_condition(observation: Observation, policy: Policy, phase: JobPhase, waits: _JobConditionState, before: JobStatus) -> _JobConditionState:
    """Which of the three is True. Ready: the job is what its spec asks for, be it in training, suspended or complete.
    Stalled: nothing more happens until somebody changes something, or the operator tries it again, less and less often.
    waits: why it does not train, where it does not."""
    spec, state = observation.job.spec, observation.state
    if phase is JobPhase.FAILED:
        return _JobConditionState(
            JobCondition.STALLED, True, _get_failure_reason(state.life), f"{TO_DO_AFTER_FAILURE}: {state.life.failed_message}"
        )
    if phase is JobPhase.COMPLETE:
        return _JobConditionState(JobCondition.READY, True, Reason.TRAINED)
    if phase is JobPhase.SUSPENDED and observation.job.queued:
        return _JobConditionState(JobCondition.RECONCILING, True, Reason.QUEUED, observation.job.queued)
    if phase is JobPhase.SUSPENDED:
        gone = spec.suspend and all(view.pod is None for view in observation.workers)
        reason = Reason.SUSPENDED if spec.suspend else Reason.RESUMED
        return _JobConditionState(JobCondition.READY if gone else JobCondition.RECONCILING, True, reason)
    if phase is JobPhase.RUNNING:
        seats = len(observation.plan.members)
        if spec.effective_min_replicas <= seats <= spec.replicas:
            return _JobConditionState(JobCondition.READY, True, Reason.TRAINING)
        words = f"{seats} workers train, {spec.replicas} are asked for"
        return _JobConditionState(JobCondition.RECONCILING, True, Reason.OTHER_REPLICAS, words)
    if state.placement.template_rejected == observation.job.generation:
        return _JobConditionState(JobCondition.STALLED, True, Reason.REFUSED, state.placement.rejection)
    if phase is JobPhase.RECOVERING and _was_ready(before, observation.now):
        return _JobConditionState(JobCondition.READY, True, Reason.TRAINING)
    words = back_off.describe_back_off(observation, policy)
    if words:
        return _JobConditionState(JobCondition.STALLED, True, Reason.BACK_OFF, words)
    return _JobConditionState(JobCondition.RECONCILING, True, waits.reason, waits.message)


def _was_ready(before: JobStatus, now: float) -> bool:
    """Until the recovery that is under way began, and that is not long ago."""
    since = {c.type: c.last_transition_time for c in before.conditions if c.status == "True"}
    return JobCondition.READY in since and now - since.get(JobCondition.RECOVERING, now) < READY_WHILE_RECOVERING_SECONDS


def _build_recovering_condition(observation: Observation, policy: Policy, phase: JobPhase) -> _JobConditionState:
    incidents = [incident for incident in observation.state.incidents.open if not incident.live]
    told = [f"{incident.name}: {incident.message}" for incident in incidents[:5]]
    words = "; ".join(filter(None, [back_off.describe_back_off(observation, policy), *told]))
    reason = Reason.INCIDENT if incidents else Reason.NO_INCIDENT
    if phase is JobPhase.RECOVERING:
        words = "; ".join(filter(None, (words, _explain_cannot_start(observation)))) or "the next round has not begun to train"
    return _JobConditionState(JobCondition.RECOVERING, phase is JobPhase.RECOVERING, reason, words)


def _build_blocked_condition(observation: Observation) -> _JobConditionState:
    """Something that is wanted could not be done so far: it is tried again, and people may have to help."""
    hindrances = observation.blocked_actions
    words = "; ".join(f"{trouble.action}: {trouble.reason}" for trouble in hindrances[:3])
    more = f"; and {len(hindrances) - 3} more" if len(hindrances) > 3 else ""
    reason = (
        Reason.POD_DENIED if any(t.is_pod_creation for t in hindrances) else Reason.NOT_DONE if hindrances else Reason.ALL_DONE
    )
    return _JobConditionState(JobCondition.HINDERED, bool(hindrances), reason, f"{words}{more}")


def _build_paths_condition(planned: Paths, observation: Observation) -> _JobConditionState:
    """What has become of the planned paths, as senders' launchers tell it of this membership."""
    flows, told = len(planned.wanted), paths.collect_path_reports(observation)
    faults = Counter(one.fault for one in told.values() if one.fault is not PathFault.NONE)
    if faults:
        why = "; ".join(f"{fault} ({count}): {paths.PATH_FAULT_ADVICE[fault]}" for fault, count in faults.most_common())
        words = f"{faults.total()} of {flows} flows go where the network puts them: {why}"
        return _JobConditionState(JobCondition.PATHS_IN_FORCE, False, Reason.LEFT_TO_THE_NETWORK, words)
    if sum(one.in_force for one in told.values()) == flows:
        return _JobConditionState(JobCondition.PATHS_IN_FORCE, True, Reason.ALL_ON_THEIR_WAY, f"{flows} flows")
    return _JobConditionState(JobCondition.PATHS_IN_FORCE, None, Reason.NOT_TOLD, "workers have not told of all flows yet")


def _build_preflight_condition(observation: Observation, before: JobStatus) -> _JobConditionState:
    """True where the nodes have passed that were looked at; what is not known does not hold the job up. An operator
    that finds the job training has not looked at its nodes: what was said of them stays."""
    unmet, avoided = preflight.list_unchecked_workers(observation), observation.state.preflight.avoided
    said = next((c for c in before.conditions if c.type == JobCondition.PREFLIGHT), None)
    if said is not None and observation.plan.members and not observation.node_checks and said.reason in _KNOWN_REASONS:
        holds = {"True": True, "False": False}.get(said.status)
        return _JobConditionState(JobCondition.PREFLIGHT, holds, Reason(said.reason), said.message)
    failed = [
        f"{one.node}: {one.why}" + (" (there was no room without it)" if one.tolerated else "") for one in avoided
    ]
    unknown = [
        f"{view.node}: {check.message}"
        for view in observation.workers
        if (check := preflight.get_node_check(observation, view)) is not None and check.passed is None
    ]
    if failed:
        return _JobConditionState(JobCondition.PREFLIGHT, False, Reason.NODES_FAILED, "; ".join(failed[:8]))
    if any(preflight.is_check_awaited(observation, view) for view in unmet):
        return _JobConditionState(JobCondition.PREFLIGHT, None, Reason.PROBING, format_list([view.node for view in unmet]))
    if unmet or unknown:
        words = [*unknown[:8], *(f"{view.node}: not within {_format_preflight_timeout(observation)} s" for view in unmet[:8])]
        return _JobConditionState(JobCondition.PREFLIGHT, None, Reason.NOT_FOUND_OUT, "; ".join(words))
    placed = any(view.node for view in observation.workers)
    return _JobConditionState(JobCondition.PREFLIGHT, True if placed else None, Reason.NODES_PASSED if placed else Reason.PROBING)


def _format_preflight_timeout(observation: Observation) -> str:
    return f"{observation.job.spec.preflight.timeout:.0f}"


def _build_running_condition(observation: Observation, phase: JobPhase) -> _JobConditionState:
    if phase is JobPhase.RUNNING:
        return _JobConditionState(JobCondition.RUNNING, True, Reason.TRAINING, f"round {observation.round}")
    if phase is JobPhase.PENDING:
        return _explain_waiting(observation)
    if phase is JobPhase.COMPLETE:
        return _JobConditionState(JobCondition.RUNNING, False, Reason.TRAINED)
    if phase is JobPhase.FAILED:
        return _JobConditionState(JobCondition.RUNNING, False, _get_failure_reason(observation.state.life))
    if phase is JobPhase.SUSPENDED:
        return _JobConditionState(JobCondition.RUNNING, False, Reason.SUSPENDED)
    if phase is JobPhase.RECOVERING:
        return _JobConditionState(JobCondition.RUNNING, False, Reason.INCIDENT)
    return _JobConditionState(
        JobCondition.RUNNING,
        False,
        Reason.WAITING_FOR_PODS,
        "; ".join(filter(None, ("the first step of the first round is not done yet", _explain_cannot_start(observation)))),
    )


def _explain_waiting(observation: Observation) -> _JobConditionState:
    """Why a job has not begun."""
    state, around = observation.state, observation.cluster_view
    if holder := workforce.find_folder_holder(observation):
        folder = identify_checkpoint_folder(observation.job, state.life.apart)
        words = (
            f"job {holder} writes its checkpoints to the same folder ({folder}), so no worker is made: give this job a "
            "folder of its own (spec.checkpoint.path, or spec.checkpoint.subPath of a claim), or wait until the other "
            f"has ended; to go on from its checkpoints then, set spec.checkpoint.adopt: {holder}"
        )
        return _JobConditionState(JobCondition.RUNNING, False, Reason.FOLDER_IN_USE, words)
    stuck = find_stuck_worker(observation)
    if stuck is not None:
        return _JobConditionState(JobCondition.RUNNING, False, classify_stuck_reason(stuck), f"worker {stuck.name}: {describe_stuck_worker(stuck)}")
    denied = next(
        (trouble for trouble in observation.blocked_actions if trouble.is_pod_creation or trouble.action.startswith("template")), None
    )
    if denied is not None:
        return _JobConditionState(JobCondition.RUNNING, False, Reason.POD_DENIED, denied.reason)
    if state.placement.attempts and not state.placement.placing_since:
        turn = f"after {around.older_waiting_job}, which is older" if around.older_waiting_job else "shortly"
        words = (
            f"not all {observation.job.spec.replicas} workers could be placed within "
            f"{observation.job.spec.scheduling_timeout:.0f} s (attempt {state.placement.attempts}); "
            f"the next attempt comes {turn}"
        )
        return _JobConditionState(JobCondition.RUNNING, False, Reason.SCHEDULING_TIMEOUT, words)
    kept = _explain_cannot_start(observation) or _did_not_start(observation)
    warm = sum(view.warm for view in observation.workers)
    words = f"{warm} of {observation.job.spec.replicas} workers are ready" + (f"; {kept}" if kept else "")
    return _JobConditionState(JobCondition.RUNNING, False, Reason.WAITING_FOR_PODS, words)


def _build_degraded_condition(observation: Observation, policy: Policy, phase: JobPhase) -> _JobConditionState:
    """The first reason that holds, gravest first."""
    state, plan, spec = observation.state, observation.plan, observation.job.spec
    metrics = observation.metrics
    if state.life.is_over:
        return _JobConditionState(
            JobCondition.DEGRADED, False, Reason.HEALTHY
        )  # what holds remedies up is none of its business any more
    held = next((i for i in state.incidents.current if i.verdict == QuarantineVerdict.BREAKER), None)
    if held is not None:
        return _JobConditionState(JobCondition.DEGRADED, True, Reason.QUARANTINE_BREAKER, held.quarantine)
    if policy.paused:
        return _JobConditionState(JobCondition.DEGRADED, True, Reason.PAUSED, policy.paused)
    if phase is JobPhase.RECOVERING and (failing := _find_checkpoint_failure(observation)) is not None:
        return failing  # a round that ended because it could keep none says so until another one can
    if phase is not JobPhase.RUNNING:
        return _JobConditionState(JobCondition.DEGRADED, False, Reason.HEALTHY)
    grave = _find_bad_input(observation) or _find_checkpoint_failure(observation) or _find_unreachable_workers(observation)
    if grave is not None:
        return grave
    if len(plan.members) < spec.replicas:
        roomless = any(view.pod is not None and view.pod.unschedulable_message for view in observation.workers)
        why = "for want of nodes" if roomless else "until others have started"
        words = f"{len(plan.members)} of {spec.replicas} workers train, {why}"
        words = "; ".join(filter(None, (words, _explain_cannot_start(observation) or _did_not_start(observation))))
        return _JobConditionState(JobCondition.DEGRADED, True, Reason.FEWER_REPLICAS, words)
    if state.adaptation.local_sgd is not None:
        since = format_time(state.adaptation.local_sgd.since)
        words = f"{plan.sync_mode} since {since}: {state.adaptation.local_sgd.reason}"
        return _JobConditionState(JobCondition.DEGRADED, True, Reason.LOCAL_SGD, words)
    if observation.has_straggler:
        words = f"rank {metrics.slowest_rank} takes {metrics.pace:.2f} × its peers' time a sample"
        return _JobConditionState(JobCondition.DEGRADED, True, Reason.STRAGGLER, words)
    if metrics.uniform is not None and metrics.uniform >= MIN_UNIFORM_SLOWDOWN:
        alone = plan.world_size == 1  # it waits for nobody
        waiting = None if alone else metrics.waiting
        if waiting is not None and (1 - waiting) * metrics.uniform < spec.detection.straggler_slowdown:
            words = (
                f"steps take {metrics.uniform:.2f} × the time of the job's own first steady steps, and "
                f"{waiting:.0%} of each is waiting: for a link, or for ranks that are slow in turns"
            )
            return _JobConditionState(JobCondition.DEGRADED, True, Reason.SLOW_COMMUNICATION, words)
        words = (
            f"UniformSlowdown: all ranks take {metrics.uniform:.2f} × the time of the job's own first steady steps, "
            "so it is not a node: look at code, data and storage"
        )
        return _JobConditionState(JobCondition.DEGRADED, True, Reason.ALL_SLOW, words)
    if spec.spares and (words := _explain_cannot_start(observation) or _did_not_start(observation)):
        return _JobConditionState(JobCondition.DEGRADED, True, Reason.WORKER_CANNOT_START, words)
    if spec.spares and not observation.spares:
        return _JobConditionState(JobCondition.DEGRADED, True, Reason.NO_SPARE, "the next lost worker will cost the time of a new pod")
    return _JobConditionState(JobCondition.DEGRADED, False, Reason.HEALTHY)


def _explain_cannot_start(observation: Observation) -> str:
    """Why a worker that is to be a spare, or a lost one's successor, does not start: in the words of whoever keeps it
    from that; "": none is kept."""
    stuck = find_stuck_worker(observation)
    if stuck is not None:
        return f"worker {stuck.name} cannot start: {describe_stuck_worker(stuck)}"
    unplaced = next((view for view in observation.workers if view.pod is not None and view.pod.unschedulable_message), None)
    if unplaced is not None and unplaced.pod is not None:
        return f"worker {unplaced.name} has no place: {unplaced.pod.unschedulable_message}"
    denied = next((trouble for trouble in observation.blocked_actions if trouble.is_pod_creation), None)
    if denied is not None:
        return f"{denied.action}: {denied.reason}"
    patience = observation.job.spec.scheduling_timeout
    slow = (view for view in observation.workers if view.pod is not None and view.node and view.pod.phase == "Pending")
    late = next((v for v in slow if v.pod is not None and observation.now - v.pod.created_at > patience), None)
    if late is None:
        return ""
    words = f"worker {late.name} is on {late.node}, and has not started for more than {patience:.0f} s"
    return f"{words}: kubectl describe pod {late.name} shows what it waits for (a volume, an init container)"


def _did_not_start(observation: Observation) -> str:
    """Return why the last worker ended before it was ready, while the next one waits; "": none has since the job had
    all of its workers."""
    last = start_failed.newest_incident(observation)
    return "" if last is None else last.message


def _find_bad_input(observation: Observation) -> _JobConditionState | None:
    """What only the user can put right: a loss that is not finite, a plan that cannot be followed."""
    beats = [view.heartbeat for view in observation.members if view.heartbeat is not None]
    bad = next((beat for beat in beats if beat.bad_loss_rank >= 0), None)
    if bad is not None:
        words = (
            f"the loss of rank {bad.bad_loss_rank} on {bad.worker} is not finite since step {bad.bad_loss_step}: look "
            "at the samples of that step and at the learning rate; to go back, suspend the job, delete the checkpoints "
            "from that step on, and resume it"
        )
        return _JobConditionState(JobCondition.DEGRADED, True, Reason.NON_FINITE_LOSS, words)
    refused = next((beat for beat in beats if beat.refused), None)
    if refused is not None:
        words = f"the ranks on {refused.worker} do not follow the newest plan but the one before: {refused.refused}"
        return _JobConditionState(JobCondition.DEGRADED, True, Reason.PLAN_REFUSED, words)
    return None


def _find_checkpoint_failure(observation: Observation) -> _JobConditionState | None:
    """The job trains on, but what it trains from now on is not kept."""
    beats = (view.heartbeat for view in observation.members if view.heartbeat is not None)
    bad = next((beat for beat in beats if beat.checkpoint_error), None)
    if bad is None:
        return None
    who = f"rank {bad.checkpoint_failed_rank}" if bad.checkpoint_failed_rank >= 0 else "a rank"
    kept = f"the newest good one is of step {observation.checkpoint_step}" if observation.checkpoint_step >= 0 else ""
    if bad.checkpoint_age_seconds >= 0:
        kept += f", {_format_age(bad.checkpoint_age_seconds)} old"
    words = f"{who} could not keep its part of the newest checkpoint: {bad.checkpoint_error}; {kept or 'there is none'}"
    return _JobConditionState(JobCondition.DEGRADED, True, Reason.CHECKPOINT_FAILING, words)


def _format_age(seconds: float) -> str:
    """Roughly: a message that changes with each second would be written with each."""
    return f"{seconds / 60:.0f} min" if seconds >= 60 else "less than a minute"


def _find_unreachable_workers(observation: Observation) -> _JobConditionState | None:
    """Workers that are taken to train on, though the operator cannot tell them anything."""
    names = [view.name for view in node_lost.list_unreachable_members(observation)]
    if not names:
        return None
    words = f"the operator neither hears nor reaches {format_list(names)}: nobody else says that they are lost"
    return _JobConditionState(JobCondition.DEGRADED, True, Reason.WORKERS_UNREACHED, words)


def _build_metrics_condition(observation: Observation) -> _JobConditionState:
    """How the ranks train is told by their sidecars, what their GPUs report by Prometheus."""
    over = observation.state.life.is_over
    away, silent = observation.metrics.unavailable, () if over else _list_old_sidecars(observation)
    if silent:
        words = (
            f"the sidecars of {format_list(silent)} are older than the operator and tell no figures: stragglers, slow "
            "communication and jobs that slow down as a whole cannot be seen before their workers are replaced"
        )
        return _JobConditionState(JobCondition.METRICS_AVAILABLE, False, Reason.FIGURES_MISSING, words)
    if away == PROMETHEUS_NOT_QUERIED:
        return _JobConditionState(JobCondition.METRICS_AVAILABLE, None, Reason.METRICS_AWAY, away)
    if not away:
        return _JobConditionState(JobCondition.METRICS_AVAILABLE, True, Reason.METRICS_ANSWERED, observation.metrics.gpu_unvouched)
    refused = Reason.METRICS_REFUSED if observation.metrics.refused else Reason.METRICS_AWAY
    reason = Reason.METRICS_NOT_CONFIGURED if "configured" in away else refused
    return _JobConditionState(JobCondition.METRICS_AVAILABLE, False, reason, f"{away}: DCGM's GPU errors cannot be seen")


def _list_old_sidecars(observation: Observation) -> tuple[str, ...]:
    """Workers that are heard, and whose ranks have taken steps that nothing is told of."""
    untold = frozenset(observation.metrics.untold)
    return tuple(
        view.name
        for view in observation.members
        if view.name in untold
        and view.heartbeat is not None
        and view.heartbeat.steps_in_round > 0
        and view.silent_seconds <= FRESH_WORKER_SECONDS
    )


def _get_failure_reason(life: Lifecycle) -> Reason:
    known = life.failed_reason in list(Reason)
    return Reason(life.failed_reason) if known else Reason.JOB_FAILED


def _build_condition_status(found: _JobConditionState, before: JobStatus, generation: int, now: float) -> ConditionStatus:
    status = "Unknown" if found.holds is None else "True" if found.holds else "False"
    old = next((condition for condition in before.conditions if condition.type == found.type), None)
    since = old.last_transition_time if old is not None and old.status == status else now
    return ConditionStatus(found.type, status, found.reason, shorten_text(found.message, MAX_JOB_MESSAGE_CHARACTERS), since, generation)


def _get_sync_mode(observation: Observation) -> SyncMode:
    """The mode in force as rank 0's worker tells it, or else the one that is wanted."""
    told = next((view.heartbeat.sync_mode for view in observation.members if view.heartbeat is not None), "")
    return SyncMode(told) if told in list(SyncMode) else observation.plan.sync_mode


def _compute_goodput(observation: Observation) -> float | None:
    """Share of the time since the first step that was not lost to incidents."""
    state = observation.state
    if not state.life.training_since:
        return None
    elapsed = observation.now - state.life.training_since
    open_ = sum(observation.now - i.first_sign for i in state.incidents.open if not i.live)
    return max(0.0, 1.0 - (state.budget.lost_seconds + open_) / elapsed) if elapsed > 0 else 1.0


def _describe_bottleneck(observation: Observation) -> str | None:
    rank = observation.metrics.slowest_rank
    if rank is None or not observation.has_straggler:
        return None
    return f"rank {rank} on {observation.find_worker_of_rank(rank)}"
