"""What the operator says of a job: phase, conditions and figures. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from pacekeeper_analysis.plan import Paths, Stop, SyncMode
from pacekeeper_analysis.reports import LauncherState, PathFault

from ..api import Condition, ConditionStatus, JobPhase, JobStatus, Reason, Verdict, WorkerCounts, format_time
from ..manifests import checkpoint_folder, checkpoint_sub_path
from ..observation import FRESH_SECONDS, NOT_ASKED, Observation, Policy
from ..state import Life
from ..words import listed, shortened
from . import back_off, node_lost, paths, preflight, seating, start_failed, workforce
from . import progress as progresses
from .stages import say_stuck, stuck_worker, why_stuck

UNIFORM_SLOWDOWN = 1.2
"""A job whose fastest rank takes so many times its own first steady steps is slow as a whole."""
READY_SECONDS = 60.0
"""A recovery of up to so long leaves a job Ready: most take a second, and what tools wait for must not flap."""
TO_DO_AFTER_FAILURE = "the job does not begin again: mend the cause, delete the job, and apply it again"
"""Its template can no longer be changed to any effect."""
MAX_MESSAGE = 4000
"""Characters of a condition's message."""


@dataclass(frozen=True)
class _Found:
    """A condition as it is now."""

    type: Condition
    holds: bool | None  # None: not known
    reason: Reason
    message: str = ""


def report(observation: Observation, policy: Policy, before: JobStatus) -> JobStatus:
    """The status as it shall be; transition times are kept from `before` where nothing has changed."""
    if _is_unheard(observation, policy, before):
        return before
    state, job, phase = observation.state, observation.job, phase_of(observation)
    members = observation.plan.members
    ready = sum(
        view.heartbeat is not None and view.heartbeat.state in (LauncherState.RUNNING, LauncherState.FINISHED)
        for view in observation.members
    )
    conditions = tuple(
        _dated(found, before, job.generation, observation.now)
        for found in _conditions(observation, policy, phase, before)
    )
    ended = bool(state.life.completed_at or state.life.failed_reason)
    main = next((c for c in conditions if c.type == _MAIN.get(phase, Condition.RUNNING)), None)
    slowdown = observation.metrics.slowdown if phase is JobPhase.RUNNING else None
    step = observation.step if observation.step >= 0 else before.step
    goodput = before.goodput if ended else _goodput(observation)
    total_steps, progress, remaining = progresses.told(observation, phase, before, step, goodput)
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
        checkpoint_sub_path=checkpoint_sub_path(job, apart=True) if state.life.apart else None,
        workers=WorkerCounts.of(job.spec.replicas, ready if members else 0, _spares(observation) if members else 0),
        selector=job.selector,
        slowdown=slowdown,
        goodput=goodput,
        sync_mode=_sync_mode(observation),
        restarts=state.budget.total,
        bottleneck=_bottleneck(observation) if phase is JobPhase.RUNNING else None,
        leaf_crossings=seating.leaf_crossings(observation),
    )


def _spares(observation: Observation) -> int:
    """Those whose pods run: what has no place, or cannot start, helps nobody."""
    return sum(view.pod is not None and view.pod.phase == "Running" for view in observation.spares)


def blind(before: JobStatus, generation: int, words: str, now: float) -> JobStatus:
    """The status of a job whose bookkeeping cannot be read: as it was, and why nothing goes on."""
    found = _Found(Condition.HINDERED, True, Reason.NOT_DONE, words)
    others = tuple(condition for condition in before.conditions if condition.type != found.type)
    phase = before.phase or JobPhase.PENDING
    return replace(before, phase=phase, conditions=(*others, _dated(found, before, generation, now)))


_REASONS = frozenset(map(str, Reason))
_MAIN = {
    JobPhase.COMPLETE: Condition.COMPLETE,
    JobPhase.FAILED: Condition.FAILED,
    JobPhase.SUSPENDED: Condition.SUSPENDED,
    JobPhase.RECOVERING: Condition.RECOVERING,
    JobPhase.RUNNING: Condition.RUNNING,
}


def _is_unheard(observation: Observation, policy: Policy, before: JobStatus) -> bool:
    """This operator has just begun, and not all members have found it: what they do now is not known, and what was said
    stands. A thousand jobs that say how many have come, one by one, keep an API server busy for a minute."""
    young = observation.operator_age < policy.grace_after_start
    steady = not observation.state.life.over and not observation.state.incidents.open
    told = before.phase is not None and before.observed_generation == observation.job.generation
    unheard = any(view.heartbeat is None for view in observation.members)
    return young and steady and told and unheard and not observation.hindrances


def phase_of(observation: Observation) -> JobPhase:
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


def _conditions(observation: Observation, policy: Policy, phase: JobPhase, before: JobStatus) -> Iterator[_Found]:
    state = observation.state
    running, recovering = _running(observation, phase), _recovering(observation, policy, phase)
    yield from _for_tools(_verdict(observation, policy, phase, recovering if recovering.holds else running, before))
    yield running
    yield _degraded(observation, policy, phase)
    yield recovering
    suspended, queued = phase is JobPhase.SUSPENDED, observation.job.queued
    left = sum(view.pod is not None for view in observation.workers)
    leaving = f"{left} workers are leaving" if suspended and left else ""
    why = "spec.suspend is true" if observation.job.spec.suspend else ""
    yield _Found(
        Condition.SUSPENDED,
        suspended and not left,
        Reason.QUEUED if queued and suspended else Reason.SUSPENDED if suspended else Reason.RESUMED,
        "; ".join(filter(None, ((queued or why) if suspended else "", leaving))),
    )
    yield _Found(
        Condition.COMPLETE,
        bool(state.life.completed_at),
        Reason.TRAINED if state.life.completed_at else Reason.TRAINING,
        "the ranks of all workers have finished" if state.life.completed_at else "",
    )
    failed = _why_failed(state.life) if state.life.failed_reason else Reason.TRAINING
    yield _Found(Condition.FAILED, bool(state.life.failed_reason), failed, state.life.failed_message)
    rejected = state.placement.template_rejected == observation.job.generation
    yield _Found(
        Condition.INVALID_TEMPLATE,
        rejected,
        Reason.REFUSED if rejected else Reason.ACCEPTED,
        state.placement.rejection if rejected else "",
    )
    yield _hindered(observation)
    if observation.plan.paths is not None:
        yield _paths(observation.plan.paths, observation)
    if observation.job.spec.preflight.enabled:
        yield _preflight(observation, before)
    yield _metrics(observation)


def _for_tools(verdict: _Found) -> Iterator[_Found]:
    """By these three kubectl wait, Helm and Argo CD judge a job. The words stand at the one that is True."""
    for one in (Condition.READY, Condition.RECONCILING, Condition.STALLED):
        holds = one == verdict.type
        yield _Found(one, holds, verdict.reason, verdict.message if holds else "")


def _verdict(observation: Observation, policy: Policy, phase: JobPhase, waits: _Found, before: JobStatus) -> _Found:
    """Which of the three is True. Ready: the job is what its spec asks for, be it in training, suspended or complete.
    Stalled: nothing more happens until somebody changes something, or the operator tries it again, less and less often.
    waits: why it does not train, where it does not."""
    spec, state = observation.job.spec, observation.state
    if phase is JobPhase.FAILED:
        return _Found(
            Condition.STALLED, True, _why_failed(state.life), f"{TO_DO_AFTER_FAILURE}: {state.life.failed_message}"
        )
    if phase is JobPhase.COMPLETE:
        return _Found(Condition.READY, True, Reason.TRAINED)
    if phase is JobPhase.SUSPENDED and observation.job.queued:
        return _Found(Condition.RECONCILING, True, Reason.QUEUED, observation.job.queued)
    if phase is JobPhase.SUSPENDED:
        gone = spec.suspend and all(view.pod is None for view in observation.workers)
        reason = Reason.SUSPENDED if spec.suspend else Reason.RESUMED
        return _Found(Condition.READY if gone else Condition.RECONCILING, True, reason)
    if phase is JobPhase.RUNNING:
        seats = len(observation.plan.members)
        if spec.fewest_replicas <= seats <= spec.replicas:
            return _Found(Condition.READY, True, Reason.TRAINING)
        words = f"{seats} workers train, {spec.replicas} are asked for"
        return _Found(Condition.RECONCILING, True, Reason.OTHER_REPLICAS, words)
    if state.placement.template_rejected == observation.job.generation:
        return _Found(Condition.STALLED, True, Reason.REFUSED, state.placement.rejection)
    if phase is JobPhase.RECOVERING and _was_ready(before, observation.now):
        return _Found(Condition.READY, True, Reason.TRAINING)
    words = back_off.describe(observation, policy)
    if words:
        return _Found(Condition.STALLED, True, Reason.BACK_OFF, words)
    return _Found(Condition.RECONCILING, True, waits.reason, waits.message)


def _was_ready(before: JobStatus, now: float) -> bool:
    """Until the recovery that is under way began, and that is not long ago."""
    since = {c.type: c.last_transition_time for c in before.conditions if c.status == "True"}
    return Condition.READY in since and now - since.get(Condition.RECOVERING, now) < READY_SECONDS


def _recovering(observation: Observation, policy: Policy, phase: JobPhase) -> _Found:
    incidents = [incident for incident in observation.state.incidents.open if not incident.live]
    told = [f"{incident.name}: {incident.message}" for incident in incidents[:5]]
    words = "; ".join(filter(None, [back_off.describe(observation, policy), *told]))
    reason = Reason.INCIDENT if incidents else Reason.NO_INCIDENT
    if phase is JobPhase.RECOVERING:
        words = "; ".join(filter(None, (words, _cannot_start(observation)))) or "the next round has not begun to train"
    return _Found(Condition.RECOVERING, phase is JobPhase.RECOVERING, reason, words)


def _hindered(observation: Observation) -> _Found:
    """Something that is wanted could not be done so far: it is tried again, and people may have to help."""
    hindrances = observation.hindrances
    words = "; ".join(f"{trouble.what}: {trouble.why}" for trouble in hindrances[:3])
    more = f"; and {len(hindrances) - 3} more" if len(hindrances) > 3 else ""
    reason = (
        Reason.POD_DENIED if any(t.pods for t in hindrances) else Reason.NOT_DONE if hindrances else Reason.ALL_DONE
    )
    return _Found(Condition.HINDERED, bool(hindrances), reason, f"{words}{more}")


def _paths(planned: Paths, observation: Observation) -> _Found:
    """What has become of the planned paths, as senders' launchers tell it of this membership."""
    flows, told = len(planned.wanted), paths.told(observation)
    faults = Counter(one.fault for one in told.values() if one.fault is not PathFault.NONE)
    if faults:
        why = "; ".join(f"{fault} ({count}): {paths.FAULTS[fault]}" for fault, count in faults.most_common())
        words = f"{faults.total()} of {flows} flows go where the network puts them: {why}"
        return _Found(Condition.PATHS_IN_FORCE, False, Reason.LEFT_TO_THE_NETWORK, words)
    if sum(one.in_force for one in told.values()) == flows:
        return _Found(Condition.PATHS_IN_FORCE, True, Reason.ALL_ON_THEIR_WAY, f"{flows} flows")
    return _Found(Condition.PATHS_IN_FORCE, None, Reason.NOT_TOLD, "workers have not told of all flows yet")


def _preflight(observation: Observation, before: JobStatus) -> _Found:
    """True where the nodes have passed that were looked at; what is not known does not hold the job up. An operator
    that finds the job training has not looked at its nodes: what was said of them stays."""
    unmet, avoided = preflight.unmet(observation), observation.state.preflight.avoided
    said = next((c for c in before.conditions if c.type == Condition.PREFLIGHT), None)
    if said is not None and observation.plan.members and not observation.checks and said.reason in _REASONS:
        holds = {"True": True, "False": False}.get(said.status)
        return _Found(Condition.PREFLIGHT, holds, Reason(said.reason), said.message)
    failed = [
        f"{one.node}: {one.why}" + (" (there was no room without it)" if one.tolerated else "") for one in avoided
    ]
    unknown = [
        f"{view.node}: {check.words}"
        for view in observation.workers
        if (check := preflight.check_of(observation, view)) is not None and check.passed is None
    ]
    if failed:
        return _Found(Condition.PREFLIGHT, False, Reason.NODES_FAILED, "; ".join(failed[:8]))
    if any(preflight.awaited(observation, view) for view in unmet):
        return _Found(Condition.PREFLIGHT, None, Reason.PROBING, listed([view.node for view in unmet]))
    if unmet or unknown:
        words = [*unknown[:8], *(f"{view.node}: not within {_seconds(observation)} s" for view in unmet[:8])]
        return _Found(Condition.PREFLIGHT, None, Reason.NOT_FOUND_OUT, "; ".join(words))
    placed = any(view.node for view in observation.workers)
    return _Found(Condition.PREFLIGHT, True if placed else None, Reason.NODES_PASSED if placed else Reason.PROBING)


def _seconds(observation: Observation) -> str:
    return f"{observation.job.spec.preflight.timeout:.0f}"


def _running(observation: Observation, phase: JobPhase) -> _Found:
    if phase is JobPhase.RUNNING:
        return _Found(Condition.RUNNING, True, Reason.TRAINING, f"round {observation.round}")
    if phase is JobPhase.PENDING:
        return _waiting(observation)
    if phase is JobPhase.COMPLETE:
        return _Found(Condition.RUNNING, False, Reason.TRAINED)
    if phase is JobPhase.FAILED:
        return _Found(Condition.RUNNING, False, _why_failed(observation.state.life))
    if phase is JobPhase.SUSPENDED:
        return _Found(Condition.RUNNING, False, Reason.SUSPENDED)
    if phase is JobPhase.RECOVERING:
        return _Found(Condition.RUNNING, False, Reason.INCIDENT)
    return _Found(
        Condition.RUNNING,
        False,
        Reason.WAITING_FOR_PODS,
        "; ".join(filter(None, ("the first step of the first round is not done yet", _cannot_start(observation)))),
    )


def _waiting(observation: Observation) -> _Found:
    """Why a job has not begun."""
    state, around = observation.state, observation.surroundings
    if holder := workforce.waits_for_folder(observation):
        folder = checkpoint_folder(observation.job, state.life.apart)
        words = (
            f"job {holder} writes its checkpoints to the same folder ({folder}), so no worker is made: give this job a "
            "folder of its own (spec.checkpoint.path, or spec.checkpoint.subPath of a claim), or wait until the other "
            f"has ended; to go on from its checkpoints then, set spec.checkpoint.adopt: {holder}"
        )
        return _Found(Condition.RUNNING, False, Reason.FOLDER_IN_USE, words)
    stuck = stuck_worker(observation)
    if stuck is not None:
        return _Found(Condition.RUNNING, False, why_stuck(stuck), f"worker {stuck.name}: {say_stuck(stuck)}")
    denied = next(
        (trouble for trouble in observation.hindrances if trouble.pods or trouble.what.startswith("template")), None
    )
    if denied is not None:
        return _Found(Condition.RUNNING, False, Reason.POD_DENIED, denied.why)
    if state.placement.attempts and not state.placement.placing_since:
        turn = f"after {around.older_job_waits}, which is older" if around.older_job_waits else "shortly"
        words = (
            f"not all {observation.job.spec.replicas} workers could be placed within "
            f"{observation.job.spec.scheduling_timeout:.0f} s (attempt {state.placement.attempts}); "
            f"the next attempt comes {turn}"
        )
        return _Found(Condition.RUNNING, False, Reason.SCHEDULING_TIMEOUT, words)
    kept = _cannot_start(observation) or _did_not_start(observation)
    warm = sum(view.warm for view in observation.workers)
    words = f"{warm} of {observation.job.spec.replicas} workers are ready" + (f"; {kept}" if kept else "")
    return _Found(Condition.RUNNING, False, Reason.WAITING_FOR_PODS, words)


def _degraded(observation: Observation, policy: Policy, phase: JobPhase) -> _Found:
    """The first reason that holds, gravest first."""
    state, plan, spec = observation.state, observation.plan, observation.job.spec
    metrics = observation.metrics
    if state.life.over:
        # What blocks remedies does not concern a job that has ended.
        return _Found(Condition.DEGRADED, False, Reason.HEALTHY)
    held = next((i for i in state.incidents.current if i.verdict == Verdict.BREAKER), None)
    if held is not None:
        return _Found(Condition.DEGRADED, True, Reason.QUARANTINE_BREAKER, held.quarantine)
    if policy.paused:
        return _Found(Condition.DEGRADED, True, Reason.PAUSED, policy.paused)
    if phase is JobPhase.RECOVERING and (failing := _checkpoints(observation)) is not None:
        return failing  # a round that ended because it could keep none says so until another one can
    if phase is not JobPhase.RUNNING:
        return _Found(Condition.DEGRADED, False, Reason.HEALTHY)
    grave = _bad_input(observation) or _checkpoints(observation) or _unreached(observation)
    if grave is not None:
        return grave
    if len(plan.members) < spec.replicas:
        roomless = any(view.pod is not None and view.pod.unschedulable for view in observation.workers)
        why = "for want of nodes" if roomless else "until others have started"
        words = f"{len(plan.members)} of {spec.replicas} workers train, {why}"
        words = "; ".join(filter(None, (words, _cannot_start(observation) or _did_not_start(observation))))
        return _Found(Condition.DEGRADED, True, Reason.FEWER_REPLICAS, words)
    if state.adaptation.local_sgd is not None:
        since = format_time(state.adaptation.local_sgd.since)
        words = f"{plan.sync_mode} since {since}: {state.adaptation.local_sgd.reason}"
        return _Found(Condition.DEGRADED, True, Reason.LOCAL_SGD, words)
    if observation.has_straggler:
        words = f"rank {metrics.slowest_rank} takes {metrics.pace:.2f} × its peers' time a sample"
        return _Found(Condition.DEGRADED, True, Reason.STRAGGLER, words)
    if metrics.uniform is not None and metrics.uniform >= UNIFORM_SLOWDOWN:
        alone = plan.world_size == 1  # it waits for nobody
        waiting = None if alone else metrics.waiting
        if waiting is not None and (1 - waiting) * metrics.uniform < spec.detection.straggler_slowdown:
            words = (
                f"steps take {metrics.uniform:.2f} × the time of the job's own first steady steps, and "
                f"{waiting:.0%} of each is waiting: for a link, or for ranks that are slow in turns"
            )
            return _Found(Condition.DEGRADED, True, Reason.SLOW_COMMUNICATION, words)
        words = (
            f"UniformSlowdown: all ranks take {metrics.uniform:.2f} × the time of the job's own first steady steps, "
            "so it is not a node: look at code, data and storage"
        )
        return _Found(Condition.DEGRADED, True, Reason.ALL_SLOW, words)
    if spec.spares and (words := _cannot_start(observation) or _did_not_start(observation)):
        return _Found(Condition.DEGRADED, True, Reason.WORKER_CANNOT_START, words)
    if spec.spares and not observation.spares:
        return _Found(Condition.DEGRADED, True, Reason.NO_SPARE, "the next lost worker will cost the time of a new pod")
    return _Found(Condition.DEGRADED, False, Reason.HEALTHY)


def _cannot_start(observation: Observation) -> str:
    """Why a worker that is to be a spare, or a lost one's successor, does not start: in the words of whoever keeps it
    from that; "": none is kept."""
    stuck = stuck_worker(observation)
    if stuck is not None:
        return f"worker {stuck.name} cannot start: {say_stuck(stuck)}"
    unplaced = next((view for view in observation.workers if view.pod is not None and view.pod.unschedulable), None)
    if unplaced is not None and unplaced.pod is not None:
        return f"worker {unplaced.name} has no place: {unplaced.pod.unschedulable}"
    denied = next((trouble for trouble in observation.hindrances if trouble.pods), None)
    if denied is not None:
        return f"{denied.what}: {denied.why}"
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


def _bad_input(observation: Observation) -> _Found | None:
    """What only the user can put right: a loss that is not finite, a plan that cannot be followed."""
    beats = [view.heartbeat for view in observation.members if view.heartbeat is not None]
    bad = next((beat for beat in beats if beat.bad_loss_rank >= 0), None)
    if bad is not None:
        words = (
            f"the loss of rank {bad.bad_loss_rank} on {bad.worker} is not finite since step {bad.bad_loss_step}: look "
            "at the samples of that step and at the learning rate; to go back, suspend the job, delete the checkpoints "
            "from that step on, and resume it"
        )
        return _Found(Condition.DEGRADED, True, Reason.NON_FINITE_LOSS, words)
    refused = next((beat for beat in beats if beat.refused), None)
    if refused is not None:
        words = f"the ranks on {refused.worker} do not follow the newest plan but the one before: {refused.refused}"
        return _Found(Condition.DEGRADED, True, Reason.PLAN_REFUSED, words)
    return None


def _checkpoints(observation: Observation) -> _Found | None:
    """The job trains on, but what it trains from now on is not kept."""
    beats = (view.heartbeat for view in observation.members if view.heartbeat is not None)
    bad = next((beat for beat in beats if beat.checkpoint_error), None)
    if bad is None:
        return None
    who = f"rank {bad.checkpoint_failed_rank}" if bad.checkpoint_failed_rank >= 0 else "a rank"
    kept = f"the newest good one is of step {observation.checkpoint_step}" if observation.checkpoint_step >= 0 else ""
    if bad.checkpoint_age_seconds >= 0:
        kept += f", {_age(bad.checkpoint_age_seconds)} old"
    words = f"{who} could not keep its part of the newest checkpoint: {bad.checkpoint_error}; {kept or 'there is none'}"
    return _Found(Condition.DEGRADED, True, Reason.CHECKPOINT_FAILING, words)


def _age(seconds: float) -> str:
    """Roughly: a message that changes with each second would be written with each."""
    return f"{seconds / 60:.0f} min" if seconds >= 60 else "less than a minute"


def _unreached(observation: Observation) -> _Found | None:
    """Workers that are taken to train on, though the operator cannot tell them anything."""
    names = [view.name for view in node_lost.unreached(observation)]
    if not names:
        return None
    words = f"the operator neither hears nor reaches {listed(names)}: nobody else says that they are lost"
    return _Found(Condition.DEGRADED, True, Reason.WORKERS_UNREACHED, words)


def _metrics(observation: Observation) -> _Found:
    """How the ranks train is told by their sidecars, what their GPUs report by Prometheus."""
    over = observation.state.life.over
    away, silent = observation.metrics.unavailable, () if over else _old_sidecars(observation)
    if silent:
        words = (
            f"the sidecars of {listed(silent)} are older than the operator and tell no figures: stragglers, slow "
            "communication and jobs that slow down as a whole cannot be seen before their workers are replaced"
        )
        return _Found(Condition.METRICS_AVAILABLE, False, Reason.FIGURES_MISSING, words)
    if away == NOT_ASKED:
        return _Found(Condition.METRICS_AVAILABLE, None, Reason.METRICS_AWAY, away)
    if not away:
        return _Found(Condition.METRICS_AVAILABLE, True, Reason.METRICS_ANSWERED, observation.metrics.gpu_unvouched)
    refused = Reason.METRICS_REFUSED if observation.metrics.refused else Reason.METRICS_AWAY
    reason = Reason.METRICS_NOT_CONFIGURED if "configured" in away else refused
    return _Found(Condition.METRICS_AVAILABLE, False, reason, f"{away}: DCGM's GPU errors cannot be seen")


def _old_sidecars(observation: Observation) -> tuple[str, ...]:
    """Workers that are heard, and whose ranks have taken steps that nothing is told of."""
    untold = frozenset(observation.metrics.untold)
    return tuple(
        view.name
        for view in observation.members
        if view.name in untold
        and view.heartbeat is not None
        and view.heartbeat.steps_in_round > 0
        and view.silent_seconds <= FRESH_SECONDS
    )


def _why_failed(life: Life) -> Reason:
    known = life.failed_reason in list(Reason)
    return Reason(life.failed_reason) if known else Reason.JOB_FAILED


def _dated(found: _Found, before: JobStatus, generation: int, now: float) -> ConditionStatus:
    status = "Unknown" if found.holds is None else "True" if found.holds else "False"
    old = next((condition for condition in before.conditions if condition.type == found.type), None)
    since = old.last_transition_time if old is not None and old.status == status else now
    return ConditionStatus(found.type, status, found.reason, shortened(found.message, MAX_MESSAGE), since, generation)


def _sync_mode(observation: Observation) -> SyncMode:
    """The mode in force as rank 0's worker tells it, or else the one that is wanted."""
    told = next((view.heartbeat.sync_mode for view in observation.members if view.heartbeat is not None), "")
    return SyncMode(told) if told in list(SyncMode) else observation.plan.sync_mode


def _goodput(observation: Observation) -> float | None:
    """Share of the time since the first step that was not lost to incidents."""
    state = observation.state
    if not state.life.training_since:
        return None
    elapsed = observation.now - state.life.training_since
    open_ = sum(observation.now - i.first_sign for i in state.incidents.open if not i.live)
    return max(0.0, 1.0 - (state.budget.lost_seconds + open_) / elapsed) if elapsed > 0 else 1.0


def _bottleneck(observation: Observation) -> str | None:
    rank = observation.metrics.slowest_rank
    if rank is None or not observation.has_straggler:
        return None
    return f"rank {rank} on {observation.worker_of_rank(rank)}"
