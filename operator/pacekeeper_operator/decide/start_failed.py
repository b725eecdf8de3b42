"""A worker that is never ready. Its trainer ends with an error before, or does not get there in time: the command or
the image is wrong, or it hangs in an import. Or its kubelet refuses it, which is nobody's doing. No node is blamed.
"""

from __future__ import annotations

from pacekeeper_analysis.reports import LauncherState

from ..api import IncidentCause, IncidentClass, Reason, Remedy
from ..decision import Action, Decision, FailJob, ReplaceWorker
from ..observation import Observation, PodView, Policy, WorkerView
from ..state import Incident
from ..subject import IncidentKey

MAX_FAILED_STARTS = 2
"""So many workers in a row, of the whole job, before a job fails that cannot train without them and never has. In one
that has trained, its nodes, volumes or DNS may be at fault, and the next worker waits."""

WARM_UP_TIMEOUT_SECONDS = 120.0
"""So long a trainer's container may run until its launcher is warm: it imports torch, mostly, which takes seconds from
a warm disk and a minute from a slow volume."""

_COMMAND_ADVICE = "the command of container trainer must run `pacekeeper run …` (in place of python or torchrun)"


def check_failed_starts(observation: Observation, policy: Policy) -> Decision | None:
    seated = {member.worker for member in observation.plan.members}
    for view in observation.workers:
        if view.name in seated or view.record.leaving:
            continue
        if _has_failed_to_start(view):
            assert view.pod is not None
            return (_decide_failed_start if view.pod.exit_code is not None else _decide_refused_pod)(observation, policy, view)
        late = observation.clock_agrees and 0 < view.record.starting_since < observation.now - WARM_UP_TIMEOUT_SECONDS
        if view.usable and late:
            words = f"it was not ready {WARM_UP_TIMEOUT_SECONDS:.0f} s after its container had begun to run"
            words += _describe_missing_launcher(view)
            return _build_replacement(observation, policy, view, words, IncidentClass.UNKNOWN, view.record.starting_since)
    return None


def newest_incident(observation: Observation) -> Incident | None:
    """Return the Incident that is open for workers that do not start; None: there is none."""
    found = [incident for incident in observation.state.incidents.open if is_about_start(incident)]
    return max(found, key=lambda incident: incident.decided, default=None)


def is_about_start(incident: Incident) -> bool:
    """Return whether it is about a worker that was never ready: it had no rank."""
    return incident.cause is IncidentCause.WORKER_LOST and incident.rank is None


def _covered_by(observation: Observation, message: str, view: WorkerView) -> str:
    """Return the name of the Incident that is open for a worker that did not start for the same reason: one covers all
    attempts, since hours of them would make hundreds."""
    before = newest_incident(observation)
    if before is None or before.applied is None:
        return ""
    same = _without_names(before.message, before.worker, before.node)
    return before.name if same == _without_names(message, view.name, view.node) else ""


def _without_names(message: str, *names: str | None) -> str:
    for name in filter(None, names):
        message = message.replace(name, "")
    return message


def _decide_refused_pod(observation: Observation, policy: Policy, view: WorkerView) -> Decision:
    """Its containers were never begun. However often: the job does not fail of it, but tries ever less often."""
    assert view.pod is not None
    reason = f" ({view.pod.exit_reason})" if view.pod.exit_reason else ""
    words = f"its pod was not taken by the kubelet of {view.pod.node or 'its node'}{reason}"
    return _build_replacement(observation, policy, view, words, IncidentClass.INFRASTRUCTURE, observation.now)


def _build_replacement(
    observation: Observation, policy: Policy, view: WorkerView, words: str, class_: IncidentClass, first_sign: float
) -> Decision:
    """It is not known to end ever. The job does not fail of it: who comes next may do better."""
    trains = bool(observation.plan.members) and not observation.state.placement.vacant_since
    allowed = not policy.find_refusal(Remedy.REPLACE_WORKER)
    refused = class_ is IncidentClass.INFRASTRUCTURE
    action = ReplaceWorker(view.name, words, dead=True, never_ready=not refused, refused=refused)
    message = f"worker {view.name} is given up: {words}"
    return Decision(
        incident_key=IncidentKey(IncidentCause.WORKER_LOST, observation.round if observation.plan.members else 0, worker=view.name),
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
    """A launcher announces its port before all else."""
    if view.heartbeat is None or view.heartbeat.meeting_port:
        return ""
    return f", and no launcher has spoken: {_COMMAND_ADVICE}"


def _has_failed_to_start(view: WorkerView) -> bool:
    if view.pod is None or view.pod.deleting or view.pod.disruption_reason or not view.pod.ended:
        return False
    return view.heartbeat is None or view.heartbeat.state is LauncherState.STARTING


def _describe_exit(view: WorkerView, pod: PodView) -> str:
    reason = f" ({pod.exit_reason})" if pod.exit_reason else ""
    if pod.failed_init_container:
        return f"the init container {pod.failed_init_container} of {view.name} ended with {pod.exit_code}{reason}"
    ended = f"the trainer of {view.name} ended with {pod.exit_code}{reason} before it was ready"
    return f"{ended}: {_COMMAND_ADVICE}" if pod.exit_code == 0 else ended


def _decide_failed_start(observation: Observation, _policy: Policy, view: WorkerView) -> Decision:
    pod = view.pod
    assert pod is not None
    message = _describe_exit(view, pod)
    trains = bool(observation.plan.members) and not observation.state.placement.vacant_since
    again = not trains and not observation.has_trained and observation.state.placement.failed_starts + 1 >= MAX_FAILED_STARTS
    actions: tuple[Action, ...] = (
        (FailJob(Reason.SCRIPT_FAILED, f"{message}:\n{pod.exit_message}"),)
        if again
        else (ReplaceWorker(view.name, "its trainer did not start", dead=True, never_ready=True),)
    )
    return Decision(
        incident_key=IncidentKey(IncidentCause.WORKER_LOST, observation.round if observation.plan.members else 0, worker=view.name),
        class_=IncidentClass.APPLICATION,
        routine=True,
        message=message,
        first_sign=observation.now,
        actions=actions,
        remedy=None if again else Remedy.REPLACE_WORKER,
        covered_by="" if again else _covered_by(observation, message, view),
        evidence=(pod.exit_message,) if pod.exit_message else (),
        worker=view.name,
        node=pod.node or None,
        live=trains,
    )
