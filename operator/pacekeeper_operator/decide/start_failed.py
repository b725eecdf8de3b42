"""A worker's trainer ends with an error before it was ever ready: the command or the image is wrong, not a node."""

from __future__ import annotations

from pacekeeper_analysis.reports import LauncherState

from ..api import Cause, Class, Reason
from ..decision import Action, Decision, FailJob, ReplaceWorker
from ..observation import Observation, Policy, WorkerView
from ..subject import Subject

TRIES = 2
"""So many workers in a row, of the whole job, before a job fails that cannot train without them."""


def check(observation: Observation, _policy: Policy) -> Decision | None:
    seated = {member.worker for member in observation.plan.members}
    for view in observation.workers:
        if view.name not in seated and not view.record.leaving and _failed_to_start(view):
            return _decide(observation, view)
    return None


def _failed_to_start(view: WorkerView) -> bool:
    if view.pod is None or view.pod.deleting or view.pod.disrupted or not view.pod.ended or view.pod.exit_code == 0:
        return False
    return view.heartbeat is None or view.heartbeat.state is LauncherState.STARTING


def _decide(observation: Observation, view: WorkerView) -> Decision:
    pod = view.pod
    assert pod is not None
    reason = f" ({pod.exit_reason})" if pod.exit_reason else ""
    message = f"the trainer of {view.name} ended with {pod.exit_code}{reason} before it was ready"
    trains = bool(observation.plan.members) and not observation.state.placement.vacant_since
    again = not trains and observation.state.placement.failed_starts + 1 >= TRIES
    actions: tuple[Action, ...] = (
        (FailJob(Reason.SCRIPT_FAILED, f"{message}:\n{pod.exit_message}"),)
        if again
        else (ReplaceWorker(view.name, "its trainer did not start", dead=True, never_ready=True),)
    )
    return Decision(
        subject=Subject(Cause.WORKER_LOST, observation.round if observation.plan.members else 0, worker=view.name),
        class_=Class.APPLICATION,
        message=message,
        first_sign=observation.now,
        actions=actions,
        evidence=(pod.exit_message,) if pod.exit_message else (),
        worker=view.name,
        node=pod.node or None,
        live=trains,
    )
