"""Failed starts: workers that are never ready.

The trainer exits with an error, or is not ready in time: its command or image is wrong, or it hangs in an import. Or
the kubelet refuses the pod, which is not the job's fault. No node is blamed.
"""

from __future__ import annotations

from pacekeeper_analysis.protocol.reports import LauncherState

from ...api.conditions import Reason
from ...api.incident import IncidentCause, IncidentClass
from ...api.training_job import Remedy
from ...state.cluster_view import PodView, WorkerView
from ...state.desired_state import Incident
from ...state.incident_key import IncidentKey
from ...state.observation import Observation
from ...state.policy import Policy
from ..decision import Action, Decision, FailJob, ReplaceWorker

MAX_FAILED_STARTS = 2
"""Failed starts in a row, in the whole job, at which a job fails that does not train and never has. In a job that has
trained, nodes, volumes or DNS may be at fault, so the next worker backs off instead."""

WARM_UP_TIMEOUT_SECONDS = 120.0
"""Seconds that a trainer's container may run until its launcher is warm. Most of it is the import of torch, which takes
seconds from a warm disk and a minute from a slow volume. Behind a shell, whose commands come first, it is the job's
`schedulingTimeout`, if that is longer."""

_COMMAND_ADVICE = (
    "the command of the container with the ranks must call torchrun or `pacekeeper run`, or its variable "
    "PACEKEEPER_LAUNCH_SCRIPT name the script that it starts by Python (docs/running-jobs.md#commands)"
)


def check_failed_starts(observation: Observation, policy: Policy) -> Decision | None:
    """Give up the first worker without ranks that failed, was refused, or took too long before it was ready."""
    assigned = {member.worker for member in observation.plan.members}
    for view in observation.workers:
        if view.name in assigned or view.record.leaving:
            continue
        if _has_failed_to_start(view):
            assert view.pod is not None
            return (_decide_failed_start if view.pod.exit_code is not None else _decide_refused_pod)(
                observation, policy, view
            )
        since = view.record.starting_since
        if since is None or not observation.clock_agrees:
            continue
        limit = _get_warm_up_limit(observation, view)
        if view.usable and since < observation.now - limit:
            reason = f"it was not ready {limit:.0f} s after its container had begun to run"
            reason += _describe_missing_launcher(view)
            return _build_replacement(observation, policy, view, reason, IncidentClass.UNKNOWN, since)
    return None


def _get_warm_up_limit(observation: Observation, view: WorkerView) -> float:
    is_behind_shell = view.heartbeat is not None and view.heartbeat.commands_may_follow is not False
    return max(WARM_UP_TIMEOUT_SECONDS, observation.job.spec.scheduling_timeout if is_behind_shell else 0.0)


def newest_incident(observation: Observation) -> Incident | None:
    """Return the newest open Incident of a worker that did not start; None: there is none."""
    incidents = [incident for incident in observation.state.incidents.open if is_about_start(incident)]
    return max(incidents, key=lambda incident: incident.decided, default=None)


def is_about_start(incident: Incident) -> bool:
    """Return whether the Incident is about a worker that was never ready: it had no rank."""
    return incident.cause is IncidentCause.WORKER_LOST and incident.rank is None


def _covered_by(observation: Observation, message: str, view: WorkerView) -> str:
    """Return the open Incident of a worker that did not start for the same reason; "": there is none.

    One Incident covers all attempts, since hours of retries would make hundreds.
    """
    incident = newest_incident(observation)
    if incident is None or incident.applied is None:
        return ""
    covered_message = _remove_names(incident.message, incident.worker, incident.node)
    return incident.name if covered_message == _remove_names(message, view.name, view.node) else ""


def _remove_names(message: str, *names: str | None) -> str:
    for name in filter(None, names):
        message = message.replace(name, "")
    return message


def _decide_refused_pod(observation: Observation, policy: Policy, view: WorkerView) -> Decision:
    """Replace a worker whose containers never started. The job does not fail of it, but retries less and less often."""
    assert view.pod is not None
    exit_reason = f" ({view.pod.exit_reason})" if view.pod.exit_reason else ""
    reason = f"its pod was refused by the kubelet of {view.pod.node or 'its node'}{exit_reason}"
    return _build_replacement(observation, policy, view, reason, IncidentClass.INFRASTRUCTURE, observation.now)


def _build_replacement(
    observation: Observation, policy: Policy, view: WorkerView, reason: str, class_: IncidentClass, first_sign: float
) -> Decision:
    """Replace a worker that may never be ready. The job does not fail of it, since the next worker may start."""
    trains = bool(observation.plan.members) and observation.state.placement.vacant_since is None
    allowed = not policy.find_refusal(Remedy.REPLACE_WORKER)
    refused = class_ is IncidentClass.INFRASTRUCTURE
    action = ReplaceWorker(view.name, reason, dead=True, never_ready=not refused, refused=refused)
    message = f"worker {view.name} is given up: {reason}"
    return Decision(
        incident_key=IncidentKey(
            IncidentCause.WORKER_LOST, observation.progress.round if observation.plan.members else 0, worker=view.name
        ),
        class_=class_,
        routine=refused,
        message=message,
        first_sign=first_sign,
        covered_by=_covered_by(observation, message, view),
        actions=(action,) if allowed else (),
        remedy=Remedy.REPLACE_WORKER if allowed else None,
        worker=view.name,
        node=view.record.node or None,
        live=trains,
    )


def _describe_missing_launcher(view: WorkerView) -> str:
    """Return advice where no launcher has reported. A launcher publishes its port before it does anything else."""
    if view.heartbeat is None or view.heartbeat.rendezvous_port is not None:
        return ""
    return f", and no launcher has reported: {_COMMAND_ADVICE}"


def _has_failed_to_start(view: WorkerView) -> bool:
    if view.pod is None or view.pod.deleting or view.pod.disruption_reason or not view.pod.ended:
        return False
    return view.heartbeat is None or view.heartbeat.state is LauncherState.STARTING


def _describe_exit(view: WorkerView, pod: PodView) -> str:
    reason = f" ({pod.exit_reason})" if pod.exit_reason else ""
    if pod.failed_init_container:
        return f"the init container {pod.failed_init_container} of {view.name} ended with {pod.exit_code}{reason}"
    message = f"the trainer of {view.name} ended with {pod.exit_code}{reason} before it was ready"
    return f"{message}: {_COMMAND_ADVICE}" if pod.exit_code == 0 else message


def _decide_failed_start(observation: Observation, _policy: Policy, view: WorkerView) -> Decision:
    pod = view.pod
    assert pod is not None
    message = _describe_exit(view, pod)
    trains = bool(observation.plan.members) and observation.state.placement.vacant_since is None
    is_repeated = (
        not trains
        and not observation.state.lifecycle.has_trained
        and observation.state.placement.failed_starts + 1 >= MAX_FAILED_STARTS
    )
    actions: tuple[Action, ...] = (
        (FailJob(Reason.SCRIPT_FAILED, f"{message}:\n{pod.exit_message}"),)
        if is_repeated
        else (ReplaceWorker(view.name, "its trainer did not start", dead=True, never_ready=True),)
    )
    return Decision(
        incident_key=IncidentKey(
            IncidentCause.WORKER_LOST, observation.progress.round if observation.plan.members else 0, worker=view.name
        ),
        class_=IncidentClass.APPLICATION,
        routine=True,
        message=message,
        first_sign=observation.now,
        actions=actions,
        remedy=None if is_repeated else Remedy.REPLACE_WORKER,
        covered_by="" if is_repeated else _covered_by(observation, message, view),
        evidence=(pod.exit_message,) if pod.exit_message else (),
        worker=view.name,
        node=pod.node or None,
        live=trains,
    )
