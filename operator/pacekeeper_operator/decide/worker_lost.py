"""Workers whose pods are gone, end, or are told to end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pacekeeper_analysis.reports import FaultKind, LauncherState

from ..api import IncidentCause, IncidentClass
from ..decision import Decision
from ..observation import FRESH_WORKER_SECONDS, Observation, PodView, Policy, WorkerView
from . import loss
from .loss import LostWorker

TERMINATION_CAUSE_WAIT_SECONDS = 2.0
"""So long the API server may take to show who ends a pod that is told to end. Where nothing is shown by then nobody has
deleted, drained or preempted it: the pod itself is the cause, mostly by a liveness probe that fails."""


def check_lost_workers(observation: Observation, policy: Policy) -> Decision | None:
    found = tuple(_find_lost_workers(observation))
    if not found:
        return None
    event = loss.select_one_event(found)
    names = {one.view.name for one in event}
    settles = (f.name for f in observation.faults if f.worker in names or f.kind is not FaultKind.TERMINATING)
    return replace(loss.decide_lost_workers(observation, policy, event, tuple(settles)), routine=True)


def _find_lost_workers(observation: Observation) -> Iterator[LostWorker]:
    told = {fault.worker: fault.noticed_at for fault in observation.select_faults(FaultKind.TERMINATING)}
    for view in observation.members:
        if view.record.leaving or view.name in observation.state.life.finished_names:
            continue
        how = _classify_loss(observation, view, told.get(view.name))
        if how is not None:
            words, class_, trains = how
            yield LostWorker(view, _get_loss_cause(view), class_, words, told.get(view.name, observation.now), trains)


def _classify_loss(observation: Observation, view: WorkerView, told_at: float | None) -> tuple[str, IncidentClass, bool] | None:
    """In words, whose doing, and whether it still trains for a moment; None: it is not lost. told_at: seconds since the
    epoch when its launcher was told to end."""
    pod = view.pod
    if pod is None:
        return ("its pod is gone", IncidentClass.DISRUPTION, False) if view.record.uid else None
    if pod.self_inflicted_reason:
        return f"its kubelet ended its pod: {pod.self_inflicted_reason}", IncidentClass.APPLICATION, not pod.ended
    if pod.disruption_reason:
        words = f": {pod.exit_reason}: {pod.exit_message}" if pod.phase == "Failed" and pod.exit_code is None else ""
        return f"its pod is disrupted ({pod.disruption_reason}){words}", IncidentClass.DISRUPTION, not pod.ended
    if pod.deleting:
        return "its pod was deleted", IncidentClass.DISRUPTION, not pod.ended
    if told_at is not None:
        return _classify_termination(observation, view, pod, told_at)
    if pod.finished or pod.exit_code == 0:
        return _classify_clean_exit(view, pod)
    return (_describe_exit(pod), IncidentClass.UNKNOWN, False) if pod.ended else None


def _classify_termination(
    observation: Observation, view: WorkerView, pod: PodView, told_at: float
) -> tuple[str, IncidentClass, bool] | None:
    node = observation.cluster_view.nodes.get(view.node)
    if node is None or node.leave_reason or not node.ready:
        return "its pod was told to end", IncidentClass.DISRUPTION, not pod.ended
    if not pod.ended and 0 <= observation.now - told_at < TERMINATION_CAUSE_WAIT_SECONDS:
        return None
    words = (
        "its pod was told to end, and nobody has deleted, drained or preempted it: a liveness probe that fails, mostly "
        f"(kubectl describe pod {view.name} shows its events)"
    )
    return words, IncidentClass.UNKNOWN, not pod.ended


def _classify_clean_exit(view: WorkerView, pod: PodView) -> tuple[str, IncidentClass, bool] | None:
    """Exit code 0 may be that of a command behind a pipe: what counts is the launcher's word."""
    beat = view.heartbeat
    if pod.finished or (beat is not None and beat.state is LauncherState.FINISHED):
        return "its ranks had ended well before the others had to begin anew", IncidentClass.DISRUPTION, False
    if beat is not None and pod.phase == "Running" and view.silent_seconds <= FRESH_WORKER_SECONDS and not view.unresponsive:
        return None  # the launcher's last words are on their way
    last = f" (its launcher last said {beat.state})" if beat is not None else ""
    words = (
        f"its container exited with 0, although its ranks had not finished{last}: was the launcher killed behind a "
        "shell or a pipe? Let the command end with `exec pacekeeper run …`"
    )
    return words, IncidentClass.UNKNOWN, False


def _get_loss_cause(view: WorkerView) -> IncidentCause:
    killed = view.pod is not None and view.pod.exit_reason == "OOMKilled"
    return IncidentCause.OUT_OF_MEMORY if killed else IncidentCause.WORKER_LOST


def _describe_exit(pod: PodView) -> str:
    reason = f" ({pod.exit_reason})" if pod.exit_reason else ""
    return f"its trainer ended with {pod.exit_code}{reason}" if pod.exit_code is not None else "its pod has failed"
