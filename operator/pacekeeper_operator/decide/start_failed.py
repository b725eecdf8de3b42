"""A worker that is never ready. Its trainer ends with an error before, or does not get there in time: the command or
the image is wrong, or it hangs in an import. Or its kubelet refuses it, which is nobody's doing. No node is blamed.
"""

from __future__ import annotations

from pacekeeper_analysis.reports import LauncherState

from ..api import Cause, Class, Reason, Remedy
from ..decision import Action, Decision, FailJob, ReplaceWorker
from ..observation import Observation, PodView, Policy, WorkerView
from ..state import Incident
from ..subject import Subject

TRIES = 2
"""So many workers in a row, of the whole job, before a job fails that cannot train without them and never has. In one
that has trained, its nodes, volumes or DNS may be at fault, and the next worker waits."""

WARM_SECONDS = 120.0
"""So long a trainer's container may run until its launcher is warm: it imports torch, mostly, which takes seconds from
a warm disk and a minute from a slow volume."""

_COMMAND = "the command of container trainer must run `pacekeeper run …` (in place of python or torchrun)"


def check(observation: Observation, policy: Policy) -> Decision | None:
    seated = {member.worker for member in observation.plan.members}
    for view in observation.workers:
        if view.name in seated or view.record.leaving:
            continue
        if _failed_to_start(view):
            assert view.pod is not None
            return (_decide if view.pod.exit_code is not None else _refused)(observation, policy, view)
        late = observation.clock_agrees and 0 < view.record.starting_since < observation.now - WARM_SECONDS
        if view.usable and late:
            words = f"it was not ready {WARM_SECONDS:.0f} s after its container had begun to run"
            words += _without_launcher(view)
            return _replace(observation, policy, view, words, Class.UNKNOWN, view.record.starting_since)
    return None


def newest_incident(observation: Observation) -> Incident | None:
    """Return the Incident that is open for workers that do not start; None: there is none."""
    found = [incident for incident in observation.state.incidents.open if is_about_start(incident)]
    return max(found, key=lambda incident: incident.decided, default=None)


def is_about_start(incident: Incident) -> bool:
    """Return whether it is about a worker that was never ready: it had no rank."""
    return incident.cause is Cause.WORKER_LOST and incident.rank is None


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


def _refused(observation: Observation, policy: Policy, view: WorkerView) -> Decision:
    """Its containers were never begun. However often: the job does not fail of it, but tries ever less often."""
    assert view.pod is not None
    reason = f" ({view.pod.exit_reason})" if view.pod.exit_reason else ""
    words = f"its pod was not taken by the kubelet of {view.pod.node or 'its node'}{reason}"
    return _replace(observation, policy, view, words, Class.INFRASTRUCTURE, observation.now)


def _replace(
    observation: Observation, policy: Policy, view: WorkerView, words: str, class_: Class, first_sign: float
) -> Decision:
    """It is not known to end ever. The job does not fail of it: who comes next may do better."""
    trains = bool(observation.plan.members) and not observation.state.placement.vacant_since
    allowed = not policy.refusal(Remedy.REPLACE_WORKER)
    refused = class_ is Class.INFRASTRUCTURE
    action = ReplaceWorker(view.name, words, dead=True, never_ready=not refused, refused=refused)
    message = f"worker {view.name} is given up: {words}"
    return Decision(
        subject=Subject(Cause.WORKER_LOST, observation.round if observation.plan.members else 0, worker=view.name),
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


def _without_launcher(view: WorkerView) -> str:
    """A launcher announces its port before all else."""
    if view.heartbeat is None or view.heartbeat.meeting_port:
        return ""
    return f", and no launcher has spoken: {_COMMAND}"


def _failed_to_start(view: WorkerView) -> bool:
    if view.pod is None or view.pod.deleting or view.pod.disrupted or not view.pod.ended:
        return False
    return view.heartbeat is None or view.heartbeat.state is LauncherState.STARTING


def _say_end(view: WorkerView, pod: PodView) -> str:
    reason = f" ({pod.exit_reason})" if pod.exit_reason else ""
    if pod.ended_before:
        return f"the init container {pod.ended_before} of {view.name} ended with {pod.exit_code}{reason}"
    ended = f"the trainer of {view.name} ended with {pod.exit_code}{reason} before it was ready"
    return f"{ended}: {_COMMAND}" if pod.exit_code == 0 else ended


def _decide(observation: Observation, _policy: Policy, view: WorkerView) -> Decision:
    pod = view.pod
    assert pod is not None
    message = _say_end(view, pod)
    trains = bool(observation.plan.members) and not observation.state.placement.vacant_since
    again = not trains and not observation.has_trained and observation.state.placement.failed_starts + 1 >= TRIES
    actions: tuple[Action, ...] = (
        (FailJob(Reason.SCRIPT_FAILED, f"{message}:\n{pod.exit_message}"),)
        if again
        else (ReplaceWorker(view.name, "its trainer did not start", dead=True, never_ready=True),)
    )
    return Decision(
        subject=Subject(Cause.WORKER_LOST, observation.round if observation.plan.members else 0, worker=view.name),
        class_=Class.APPLICATION,
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
