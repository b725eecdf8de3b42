"""The lifecycle of a job: start, suspend, resume, completion, deadline."""

from __future__ import annotations

from pacekeeper_analysis.protocol.plan import Stop
from pacekeeper_analysis.protocol.reports import LauncherState

from ...api.conditions import Reason
from ...state.cluster_view import PodView, WorkerView
from ...state.desired_state import DesiredState
from ...state.observation import Observation
from ...state.policy import Policy

_REGISTRY_REASONS = ("RegistryUnavailable", "SignatureValidationFailed")


def advance_lifecycle(observation: Observation, _policy: Policy) -> DesiredState:
    """Apply the user's spec and the passing of time to the job: suspend, resume, finish, or fail it."""
    desired = observation.desired
    if desired.state.lifecycle.is_over:
        return _date_end(observation)
    for stage in (_suspend_job, _resume_job, _record_start, _finish_job, _enforce_deadline, _fail_stuck_start):
        desired = stage(observation.with_desired(desired))
    return desired


def _date_end(observation: Observation) -> DesiredState:
    """Set the time of the job's end again if the clock was wrong then.

    Otherwise a clock that was a day behind would have the job deleted (`ttlSecondsAfterFinished`) once it is corrected.
    """
    desired, lifecycle = observation.desired, observation.state.lifecycle
    if observation.job.spec.run_policy.ttl_seconds_after_finished is None:
        return desired
    if not observation.clock_agrees:
        return desired if lifecycle.misdated else desired.with_lifecycle(misdated=True)
    return desired.with_lifecycle(stopped_at=observation.now, misdated=False) if lifecycle.misdated else desired


def _suspend_job(observation: Observation) -> DesiredState:
    desired = observation.desired
    if not observation.job.spec.suspend:
        return desired
    # A job whose ranks have finished runs its other commands again after it is resumed.
    if desired.plan.stop is Stop.NO or list_followed_members(observation):
        desired = (
            desired.with_plan(stop=Stop.SUSPEND).with_requests(evidence=None).with_lifecycle(stopped_at=observation.now)
        )
    if not desired.state.placement.workers and desired.plan.members:
        desired = desired.with_plan(members=(), shares=None, paths=None)
    without_pod = {view.name for view in observation.workers if view.pod is None}
    if desired.plan.members and all(member.worker in without_pod for member in desired.plan.members):
        desired = desired.with_plan(members=(), shares=None, paths=None)
    return desired


def _resume_job(observation: Observation) -> DesiredState:
    desired = observation.desired
    leaving = any(view.pod is not None for view in observation.workers)
    if observation.job.spec.suspend or desired.plan.stop is not Stop.SUSPEND or leaving:
        return desired
    return (
        desired.with_plan(stop=Stop.NO, members=(), shares=None, paths=None, sequence_cost=None)
        .with_lifecycle(start_time=observation.now, finished=(), progress_since=None)
        .with_placement(placing_since=None, retry_at=None, attempts=0, workers=())
        .with_incidents(settled_faults=())
        .with_budget(backoffs=0, next_round_at=None)
        .with_adaptation(mode_refusal="", shares_refusal="")
    )


def _record_start(observation: Observation) -> DesiredState:
    """Record what has started by now: the job, a round, training, all workers. Reset the counters of failures."""
    desired, state, progress = observation.desired, observation.state, observation.progress
    if state.lifecycle.start_time is None and not observation.job.spec.suspend:
        desired = desired.with_lifecycle(start_time=observation.now)
    if observation.plan.members and progress.round > state.placement.highest_round:
        desired = desired.with_placement(highest_round=progress.round)
        # Until the new round completes a step, heartbeats have the last one of the round before.
        if state.lifecycle.has_trained and progress.training_since is None:
            desired = desired.with_lifecycle(earlier_step=_find_earlier_step(observation))
    no_progress_round = state.budget.no_progress_round
    if no_progress_round is not None and no_progress_round < progress.round and progress.training_since is not None:
        desired = desired.with_budget(no_progress_round=None, no_progress_error="", no_progress_worker="")
    if state.budget.backoffs and _has_resumed_training(observation):
        desired = desired.with_budget(backoffs=0, next_round_at=None)
    if state.lifecycle.training_since is None and progress.training_since is not None:
        desired = desired.with_lifecycle(training_since=progress.training_since)
    if state.lifecycle.progress_since is None and progress.training_since is not None:
        desired = desired.with_lifecycle(progress_since=progress.training_since, progress_step=progress.restored_step)
    if (state.placement.failed_starts or state.placement.refused_pods) and is_complete(observation):
        desired = desired.with_placement(failed_starts=0, refused_pods=0, refused_until=None)
    return desired


def _find_earlier_step(observation: Observation) -> int | None:
    """Return the last step that is known to be completed before the present round; None: none is."""
    incidents, lifecycle = observation.state.incidents, observation.state.lifecycle
    lost = [incident.last_step for incident in incidents.open if incident.round < observation.progress.round]
    steps = (lifecycle.earlier_step, observation.progress.step, *lost)
    return max((step for step in steps if step is not None), default=None)


def _has_resumed_training(observation: Observation) -> bool:
    """Return whether the present round has completed a step.

    Until the round begins, heartbeats may still report the last round that completed steps.
    """
    heartbeats = [view.heartbeat for view in observation.members if view.heartbeat is not None]
    runs = all(heartbeat.state in (LauncherState.RUNNING, LauncherState.FINISHED) for heartbeat in heartbeats)
    failed_round = observation.state.budget.no_progress_round
    return (
        runs
        and observation.progress.training_since is not None
        and (failed_round is None or observation.progress.round > failed_round)
    )


def is_complete(observation: Observation) -> bool:
    """Return whether the job trains, and all its workers and spares are ready."""
    spec, assigned = observation.job.spec, {member.worker for member in observation.plan.members}
    trains = observation.progress.training_since is not None and observation.state.placement.vacant_since is None
    ready = sum(view.usable and (view.warm or view.name in assigned) for view in observation.workers)
    return trains and ready >= spec.replicas + spec.spares


def _finish_job(observation: Observation) -> DesiredState:
    """Complete the job once the ranks of all members have finished, and what follows them in their containers."""
    desired = observation.desired
    if desired.plan.stop is Stop.FINISH:
        return _complete_job(observation)
    if not desired.plan.members or desired.plan.stop is not Stop.NO:
        return desired
    finished = desired.state.lifecycle.finished_names
    still_finished = tuple(v.name for v in observation.members if v.name in finished and not _has_rejoined(v))
    newly_finished = tuple(
        v.name for v in observation.members if v.name not in finished and _has_finished(v, desired.plan.membership)
    )
    if (*still_finished, *newly_finished) != desired.state.lifecycle.finished:
        desired = desired.with_lifecycle(finished=(*still_finished, *newly_finished))
    if any(member.worker not in desired.state.lifecycle.finished_names for member in desired.plan.members):
        return desired
    finishing = desired.with_plan(stop=Stop.FINISH).with_requests(evidence=None)
    return _complete_job(observation.with_desired(finishing.with_lifecycle(stopped_at=observation.now)))


def _complete_job(observation: Observation) -> DesiredState:
    """Complete or fail a job whose ranks have finished, unless commands still run after a launcher."""
    if list_followed_members(observation):
        return observation.desired
    for view in observation.members:
        if view.pod is not None and _may_be_followed(view) and _has_failed_by_itself(view.pod):
            message = f"the ranks have finished, but then the command of {view.name} ended with {view.pod.exit_code}"
            return _fail_job(observation, Reason.SCRIPT_FAILED, message)
    return observation.desired.with_lifecycle(completed_at=observation.now, stopped_at=observation.now)


def list_followed_members(observation: Observation) -> tuple[str, ...]:
    """Return the workers of a job whose ranks have finished, in which other commands may run."""
    if observation.plan.stop is not Stop.FINISH or observation.state.lifecycle.is_over:
        return ()
    return tuple(
        view.name
        for view in observation.members
        if _may_be_followed(view) and view.pod is not None and not view.pod.ended and not view.pod.deleting
    )


def _has_failed_by_itself(pod: PodView) -> bool:
    return bool(pod.exit_code) and not pod.disruption_reason and not pod.deleting


def _may_be_followed(view: WorkerView) -> bool:
    """Return whether other commands may run in the container after its launcher. Without a report, they may."""
    return view.heartbeat is None or view.heartbeat.commands_may_follow is True


def _has_finished(view: WorkerView, membership: int) -> bool:
    """Return whether the worker's ranks finished in this membership, and did not just leave on request.

    The launcher's report is enough, since the pod may be gone before the operator sees its exit. An exit code of 0 is
    not: it may be that of a command behind a pipe.
    """
    pod, heartbeat = view.pod, view.heartbeat
    if view.record.dead or (heartbeat is not None and 0 < heartbeat.membership < membership):
        return False  # a report from an earlier membership; 0, before its first membership, has no such meaning
    if heartbeat is not None and heartbeat.state is LauncherState.FINISHED:
        return True
    return pod is not None and pod.finished and not pod.disruption_reason and not pod.deleting


def _has_rejoined(view: WorkerView) -> bool:
    """Return whether the worker had finished, but has joined a later round, since the others could not finish alone."""
    is_alive = view.pod is not None and not view.pod.ended
    return is_alive and view.heartbeat is not None and view.heartbeat.state is not LauncherState.FINISHED


def _enforce_deadline(observation: Observation) -> DesiredState:
    desired, limit = observation.desired, observation.job.spec.run_policy.active_deadline_seconds
    state = desired.state
    if limit is None or state.lifecycle.start_time is None or state.lifecycle.is_over:
        return desired
    if desired.plan.stop is Stop.SUSPEND:
        return desired
    # An operator whose clock was behind may have recorded a start before the job's creation.
    started_at = max(state.lifecycle.start_time, observation.job.created_at or 0.0)
    if not observation.clock_agrees or observation.now - started_at < limit:
        return desired
    message = f"the job has run for spec.runPolicy.activeDeadlineSeconds = {limit} s"
    return _fail_job(observation, Reason.DEADLINE_EXCEEDED, message)


def _fail_stuck_start(observation: Observation) -> DesiredState:
    """Fail a job whose pods are placed but cannot start.

    A job that has trained keeps trying: its images were available, and its kubelets retry with a back-off.
    """
    message, stuck = explain_stuck_start(observation), find_stuck_worker(observation)
    if not message or stuck is None or observation.state.lifecycle.has_trained:
        return observation.desired
    return _fail_job(observation, classify_stuck_reason(stuck), message)


def explain_stuck_start(observation: Observation) -> str:
    """Return why a pod cannot start, once this lasts longer than `schedulingTimeout`; "": all pods may start.

    It applies only to a job that is being placed.
    """
    since, stuck = observation.state.placement.placing_since, find_stuck_worker(observation)
    if observation.plan.members or since is None or stuck is None:
        return ""
    if not observation.clock_agrees or observation.now - since < observation.job.spec.scheduling_timeout:
        return ""
    return f"worker {stuck.name} cannot start: {describe_stuck_worker(stuck)}"


def find_stuck_worker(observation: Observation) -> WorkerView | None:
    """Return a worker whose containers cannot start as they are specified; None: there is none."""
    return next((view for view in observation.workers if view.pod is not None and view.pod.stuck), None)


def classify_stuck_reason(view: WorkerView) -> Reason:
    """Return whether the image or something else keeps the worker's containers from starting."""
    is_image = view.pod is not None and "Image" in view.pod.waiting_reason
    is_registry = view.pod is not None and view.pod.waiting_reason in _REGISTRY_REASONS
    return Reason.IMAGE_PULL_FAILED if is_image or is_registry else Reason.CONTAINER_CANNOT_START


def describe_stuck_worker(view: WorkerView) -> str:
    """Return the kubelet's reason and message, with the name of the container."""
    assert view.pod is not None
    pod = view.pod
    prefix = f"container {pod.waiting_container}: " if pod.waiting_container else ""
    return f"{prefix}{pod.waiting_reason}: {pod.waiting_message}"


def _fail_job(observation: Observation, reason: Reason, message: str) -> DesiredState:
    return (
        observation.desired.with_plan(stop=Stop.FINISH)
        .with_requests(evidence=None)
        .with_lifecycle(failed_reason=str(reason), failed_message=message, stopped_at=observation.now)
    )
