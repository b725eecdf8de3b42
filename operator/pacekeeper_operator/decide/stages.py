"""The job as a whole: started, suspended, resumed, complete, out of time."""

from __future__ import annotations

from pacekeeper_analysis.plan import Stop
from pacekeeper_analysis.reports import LauncherState

from ..api import Reason
from ..observation import Observation, Policy, WorkerView
from ..state import DesiredState

STUCK_WAITING_REASONS = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "ImageInspectError",
        "ErrImageNeverPull",
        "RegistryUnavailable",
        "SignatureValidationFailed",
        "CreateContainerConfigError",
        "CreateContainerError",
        "RunContainerError",
        "CrashLoopBackOff",
    }
)
"""Why a container waits that no patience of ours will start."""
_REGISTRY_REASONS = ("RegistryUnavailable", "SignatureValidationFailed")


def advance_lifecycle(observation: Observation, _policy: Policy) -> DesiredState:
    """What the passing of time and the user's wishes make of the job."""
    draft = observation.desired
    if draft.state.life.is_over:
        return _date_end(observation)
    for stage in (_suspend_job, _resume_job, _record_start, _finish_job, _enforce_deadline, _fail_stuck_start):
        draft = stage(observation.with_desired(draft))
    return draft


def _date_end(observation: Observation) -> DesiredState:
    """Date the end of a job again where the clock was wrong. A clock that was a day behind would else have the job
    deleted (`ttlSecondsAfterFinished`) as soon as it is set."""
    draft, life = observation.desired, observation.state.life
    if observation.job.spec.run_policy.ttl_seconds_after_finished is None:
        return draft
    if not observation.clock_agrees:
        return draft if life.misdated else draft.with_lifecycle(misdated=True)
    return draft.with_lifecycle(stopped_at=observation.now, misdated=False) if life.misdated else draft


def _suspend_job(observation: Observation) -> DesiredState:
    draft = observation.desired
    if not observation.job.spec.suspend:
        return draft
    if draft.plan.stop is Stop.NO:
        draft = draft.with_plan(stop=Stop.SUSPEND, evidence_request="").with_lifecycle(stopped_at=observation.now)
    if not draft.state.placement.workers and draft.plan.members:
        draft = draft.with_plan(members=(), shares=None, paths=None)
    gone = {view.name for view in observation.workers if view.pod is None}
    if draft.plan.members and all(member.worker in gone for member in draft.plan.members):
        draft = draft.with_plan(members=(), shares=None, paths=None)
    return draft


def _resume_job(observation: Observation) -> DesiredState:
    draft = observation.desired
    leaving = any(view.pod is not None for view in observation.workers)
    if observation.job.spec.suspend or draft.plan.stop is not Stop.SUSPEND or leaving:
        return draft
    return (
        draft.with_plan(stop=Stop.NO, members=(), shares=None, paths=None, sequence_cost=None)
        .with_lifecycle(start_time=observation.now, finished=(), paced_since=0.0)
        .with_placement(placing_since=0.0, retry_at=0.0, attempts=0, workers=())
        .with_incidents(settled=())
        .with_budget(backoffs=0, next_round_at=0.0)
        .with_adaptation(mode_refusal="", shares_refusal="")
    )


def _record_start(observation: Observation) -> DesiredState:
    draft, state = observation.desired, observation.state
    if not state.life.start_time and not observation.job.spec.suspend:
        draft = draft.with_lifecycle(start_time=observation.now)
    if observation.plan.members and observation.round > state.placement.round_seen:
        draft = draft.with_placement(round_seen=observation.round)
    if 0 < state.budget.barren_round < observation.round and observation.training_since is not None:
        draft = draft.with_budget(barren_round=0, barren_error="", barren_worker="")
    if state.budget.backoffs and _has_resumed_training(observation):
        draft = draft.with_budget(backoffs=0, next_round_at=0.0)
    if not state.life.training_since and observation.training_since is not None:
        draft = draft.with_lifecycle(training_since=observation.training_since)
    if not state.life.paced_since and observation.training_since is not None:
        draft = draft.with_lifecycle(paced_since=observation.training_since, paced_step=observation.restored_step)
    if (state.placement.failed_starts or state.placement.refused) and is_complete(observation):
        draft = draft.with_placement(failed_starts=0, refused=0, refused_until=0.0)
    return draft


def _has_resumed_training(observation: Observation) -> bool:
    """Whether the round that runs has completed a step. Before it begins, heartbeats may tell of the last good one."""
    beats = [view.heartbeat for view in observation.members if view.heartbeat is not None]
    runs = all(beat.state in (LauncherState.RUNNING, LauncherState.FINISHED) for beat in beats)
    return runs and observation.training_since is not None and observation.round > observation.state.budget.barren_round


def is_complete(observation: Observation) -> bool:
    """Return whether it trains with all the workers that it is to have: nobody is on the way, or still to be made."""
    spec, seated = observation.job.spec, {member.worker for member in observation.plan.members}
    trains = observation.training_since is not None and not observation.state.placement.vacant_since
    there = sum(view.usable and (view.warm or view.name in seated) for view in observation.workers)
    return trains and there >= spec.replicas + spec.spares


def _finish_job(observation: Observation) -> DesiredState:
    """Complete once the trainers of all members have ended well."""
    draft = observation.desired
    if not draft.plan.members or draft.plan.stop is not Stop.NO:
        return draft
    known = draft.state.life.finished_names
    kept = tuple(v.name for v in observation.members if v.name in known and not _has_rejoined(v))
    fresh = tuple(v.name for v in observation.members if v.name not in known and _has_finished(v, draft.plan.membership))
    if (*kept, *fresh) != draft.state.life.finished:
        draft = draft.with_lifecycle(finished=(*kept, *fresh))
    if any(member.worker not in draft.state.life.finished_names for member in draft.plan.members):
        return draft
    return draft.with_plan(stop=Stop.FINISH, evidence_request="").with_lifecycle(
        completed_at=observation.now, stopped_at=observation.now
    )


def _has_finished(view: WorkerView, membership: int) -> bool:
    """Its ranks came to their end in this membership; not: it was told to leave. Its own word is enough: its pod may
    be gone before anybody has seen its exit. Nothing else is: exit code 0 may be that of a command behind a pipe."""
    pod, beat = view.pod, view.heartbeat
    if view.record.dead or (beat is not None and 0 < beat.membership < membership):
        return False  # what it was last heard of before its first membership (0) says nothing
    if beat is not None and beat.state is LauncherState.FINISHED:
        return True
    return pod is not None and pod.finished and not pod.disruption_reason and not pod.deleting


def _has_rejoined(view: WorkerView) -> bool:
    """Its ranks had ended, and it has joined the others in a later round since: they could not end without it."""
    lives = view.pod is not None and not view.pod.ended
    return lives and view.heartbeat is not None and view.heartbeat.state is not LauncherState.FINISHED


def _enforce_deadline(observation: Observation) -> DesiredState:
    draft, limit = observation.desired, observation.job.spec.run_policy.active_deadline_seconds
    state = draft.state
    if limit is None or not state.life.start_time or draft.plan.stop is not Stop.NO:
        return draft
    # Whose clock was behind may have taken it up before it was made.
    began = max(state.life.start_time, observation.job.created_at)
    if not observation.clock_agrees or observation.now - began < limit:
        return draft
    message = f"the job has run for spec.runPolicy.activeDeadlineSeconds = {limit} s"
    return _fail_job(observation, Reason.DEADLINE_EXCEEDED, message)


def _fail_stuck_start(observation: Observation) -> DesiredState:
    """Fail a job whose pods are placed but cannot start. One that has trained before goes on trying: its images were
    there, and its kubelets try again by themselves, less and less often."""
    message, stuck = explain_stuck_start(observation), find_stuck_worker(observation)
    if not message or stuck is None or observation.has_trained:
        return observation.desired
    return _fail_job(observation, classify_stuck_reason(stuck), message)


def explain_stuck_start(observation: Observation) -> str:
    """Return why a pod of a job that is being placed cannot start, once that lasts for longer than placing may take."""
    since, stuck = observation.state.placement.placing_since, find_stuck_worker(observation)
    if observation.plan.members or not since or stuck is None:
        return ""
    if not observation.clock_agrees or observation.now - since < observation.job.spec.scheduling_timeout:
        return ""
    return f"worker {stuck.name} cannot start: {describe_stuck_worker(stuck)}"


def find_stuck_worker(observation: Observation) -> WorkerView | None:
    """A worker whose containers cannot be started as they are written."""
    return next((v for v in observation.workers if v.pod is not None and v.pod.waiting_reason in STUCK_WAITING_REASONS), None)


def classify_stuck_reason(view: WorkerView) -> Reason:
    """Whether it is the image that is missing, or something else that its containers are made of."""
    of_image = view.pod is not None and "Image" in view.pod.waiting_reason
    of_registry = view.pod is not None and view.pod.waiting_reason in _REGISTRY_REASONS
    return Reason.IMAGE_PULL_FAILED if of_image or of_registry else Reason.CONTAINER_CANNOT_START


def describe_stuck_worker(view: WorkerView) -> str:
    """In the kubelet's words, with the container and the pod to look at."""
    assert view.pod is not None
    pod = view.pod
    of = f"container {pod.waiting_container}: " if pod.waiting_container else ""
    return f"{of}{pod.waiting_reason}: {pod.waiting_message}"


def _fail_job(observation: Observation, reason: Reason, message: str) -> DesiredState:
    return observation.desired.with_plan(stop=Stop.FINISH, evidence_request="").with_lifecycle(
        failed_reason=str(reason), failed_message=message, stopped_at=observation.now
    )
