"""Lost workers: their pods are gone, have ended, or are terminating."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pacekeeper_analysis.protocol.reports import FaultKind, LauncherState

from ...api.incident import IncidentCause, IncidentClass
from ...state.cluster_view import FRESH_WORKER_SECONDS, PodView, WorkerView
from ...state.observation import Observation
from ...state.policy import Policy
from ..decision import Decision
from . import lost_worker_decision
from .lost_worker_decision import LostWorker

TERMINATION_CAUSE_WAIT_SECONDS = 2.0
"""Seconds that the API server may take to show why a pod is terminated. If it shows nothing by then, the pod was not
deleted, drained or preempted: the pod itself is the cause, most often by a failing liveness probe."""


def check_lost_workers(observation: Observation, policy: Policy) -> Decision | None:
    """Replace the members that are lost for the same kind of reason."""
    losses = tuple(_find_lost_workers(observation))
    if not losses:
        return None
    event = lost_worker_decision.select_one_event(losses)
    names = {loss.view.name for loss in event}
    settles = (
        fault.name for fault in observation.faults if fault.worker in names or fault.kind is not FaultKind.TERMINATING
    )
    return replace(lost_worker_decision.decide_lost_workers(observation, policy, event, tuple(settles)), routine=True)


def _find_lost_workers(observation: Observation) -> Iterator[LostWorker]:
    sigterm_times = {fault.worker: fault.noticed_at for fault in observation.select_faults(FaultKind.TERMINATING)}
    for view in observation.members:
        if view.record.leaving or view.name in observation.state.lifecycle.finished_names:
            continue
        classification = _classify_loss(observation, view, sigterm_times.get(view.name))
        if classification is not None:
            reason, class_, trains = classification
            yield LostWorker(
                view, _get_loss_cause(view), class_, reason, sigterm_times.get(view.name, observation.now), trains
            )


def _classify_loss(
    observation: Observation, view: WorkerView, sigterm_at: float | None
) -> tuple[str, IncidentClass, bool] | None:
    """Return why the worker is lost, the incident's class, and whether it still trains; None: it is not lost.

    `sigterm_at`: when its launcher received SIGTERM, in seconds since the epoch.
    """
    pod, ended = view.pod, classify_external_end(view)
    if ended is not None:
        return (*ended, pod is not None and not pod.ended)
    if pod is None:
        return None
    if sigterm_at is not None:
        return _classify_termination(observation, view, pod, sigterm_at)
    if pod.finished or pod.exit_code == 0:
        return _classify_clean_exit(view, pod)
    return (_describe_exit(pod), IncidentClass.UNKNOWN, False) if pod.ended else None


def classify_external_end(view: WorkerView) -> tuple[str, IncidentClass] | None:
    """Return why Kubernetes has ended or is ending the worker's pod, and the incident's class; None: it does not."""
    pod = view.pod
    if pod is None:
        return ("its pod is gone", IncidentClass.DISRUPTION) if view.record.uid else None
    if pod.self_inflicted_reason:
        return f"its kubelet ended its pod: {pod.self_inflicted_reason}", IncidentClass.APPLICATION
    if pod.disruption_reason:
        detail = f": {pod.exit_reason}: {pod.exit_message}" if pod.phase == "Failed" and pod.exit_code is None else ""
        return f"its pod is disrupted ({pod.disruption_reason}){detail}", IncidentClass.DISRUPTION
    if pod.deleting:
        return "its pod was deleted", IncidentClass.DISRUPTION
    return None


def _classify_termination(
    observation: Observation, view: WorkerView, pod: PodView, sigterm_at: float
) -> tuple[str, IncidentClass, bool] | None:
    node = observation.cluster_view.nodes.get(view.node)
    if node is None or node.leave_reason or not node.ready:
        return "its pod received SIGTERM", IncidentClass.DISRUPTION, not pod.ended
    if not pod.ended and 0 <= observation.now - sigterm_at < TERMINATION_CAUSE_WAIT_SECONDS:
        return None
    reason = (
        "its pod received SIGTERM, but was not deleted, drained or preempted: most likely its liveness probe failed "
        f"(kubectl describe pod {view.name} shows its events)"
    )
    return reason, IncidentClass.UNKNOWN, not pod.ended


def _classify_clean_exit(view: WorkerView, pod: PodView) -> tuple[str, IncidentClass, bool] | None:
    """Classify exit code 0. It may be that of a command behind a pipe, so only the launcher's report counts."""
    heartbeat = view.heartbeat
    if pod.finished or (heartbeat is not None and heartbeat.state is LauncherState.FINISHED):
        return "its ranks had finished before the others had to restart", IncidentClass.DISRUPTION, False
    if (
        heartbeat is not None
        and pod.phase == "Running"
        and view.silent_seconds <= FRESH_WORKER_SECONDS
        and not view.unresponsive
    ):
        return None  # the launcher's last report is on its way
    last_state = f" (its launcher last reported {heartbeat.state})" if heartbeat is not None else ""
    reason = (
        f"its container exited with 0, although its ranks had not finished{last_state}: was the launcher killed behind "
        "a shell or a pipe? Let the command end with `exec pacekeeper run …`"
    )
    return reason, IncidentClass.UNKNOWN, False


def _get_loss_cause(view: WorkerView) -> IncidentCause:
    killed = view.pod is not None and view.pod.exit_reason == "OOMKilled"
    return IncidentCause.OUT_OF_MEMORY if killed else IncidentCause.WORKER_LOST


def _describe_exit(pod: PodView) -> str:
    reason = f" ({pod.exit_reason})" if pod.exit_reason else ""
    return f"its trainer ended with {pod.exit_code}{reason}" if pod.exit_code is not None else "its pod has failed"
