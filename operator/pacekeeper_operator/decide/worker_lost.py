"""Workers whose pods are gone, end, or are told to end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pacekeeper_analysis.reports import FaultKind, LauncherState

from ..api import Cause, Class
from ..decision import Decision
from ..observation import FRESH_SECONDS, Observation, PodView, Policy, WorkerView
from . import loss
from .loss import Loss

TOLD_SECONDS = 2.0
"""So long the API server may take to show who ends a pod that is told to end. Where nothing is shown by then nobody has
deleted, drained or preempted it: the pod itself is the cause, mostly by a liveness probe that fails."""


def check(observation: Observation, policy: Policy) -> Decision | None:
    found = tuple(_lost(observation))
    if not found:
        return None
    event = loss.of_one_event(found)
    names = {one.view.name for one in event}
    settles = (f.name for f in observation.faults if f.worker in names or f.kind is not FaultKind.TERMINATING)
    return replace(loss.decide(observation, policy, event, tuple(settles)), routine=True)


def _lost(observation: Observation) -> Iterator[Loss]:
    told = {fault.worker: fault.noticed_at for fault in observation.faults_of(FaultKind.TERMINATING)}
    for view in observation.members:
        if view.record.leaving or view.name in observation.state.life.names_finished:
            continue
        how = _how_lost(observation, view, told.get(view.name))
        if how is not None:
            words, class_, trains = how
            yield Loss(view, _cause(view), class_, words, told.get(view.name, observation.now), trains)


def _how_lost(observation: Observation, view: WorkerView, told_at: float | None) -> tuple[str, Class, bool] | None:
    """In words, whose doing, and whether it still trains for a moment; None: it is not lost. told_at: seconds since the
    epoch when its launcher was told to end."""
    pod = view.pod
    if pod is None:
        return ("its pod is gone", Class.DISRUPTION, False) if view.record.uid else None
    if pod.own_fault:
        return f"its kubelet ended its pod: {pod.own_fault}", Class.APPLICATION, not pod.ended
    if pod.disrupted:
        words = f": {pod.exit_reason}: {pod.exit_message}" if pod.phase == "Failed" and pod.exit_code is None else ""
        return f"its pod is disrupted ({pod.disrupted}){words}", Class.DISRUPTION, not pod.ended
    if pod.deleting:
        return "its pod was deleted", Class.DISRUPTION, not pod.ended
    if told_at is not None:
        return _told_to_end(observation, view, pod, told_at)
    if pod.finished or pod.exit_code == 0:
        return _exited_well(view, pod)
    return (_say_exit(pod), Class.UNKNOWN, False) if pod.ended else None


def _told_to_end(
    observation: Observation, view: WorkerView, pod: PodView, told_at: float
) -> tuple[str, Class, bool] | None:
    node = observation.surroundings.nodes.get(view.node)
    if node is None or node.leaving or not node.ready:
        return "its pod was told to end", Class.DISRUPTION, not pod.ended
    if not pod.ended and 0 <= observation.now - told_at < TOLD_SECONDS:
        return None
    words = (
        "its pod was told to end, and nobody has deleted, drained or preempted it: a liveness probe that fails, mostly "
        f"(kubectl describe pod {view.name} shows its events)"
    )
    return words, Class.UNKNOWN, not pod.ended


def _exited_well(view: WorkerView, pod: PodView) -> tuple[str, Class, bool] | None:
    """Exit code 0 may be that of a command behind a pipe: what counts is the launcher's word."""
    beat = view.heartbeat
    if pod.finished or (beat is not None and beat.state is LauncherState.FINISHED):
        return "its ranks had ended well before the others had to begin anew", Class.DISRUPTION, False
    if beat is not None and pod.phase == "Running" and view.silent_seconds <= FRESH_SECONDS and not view.frozen:
        return None  # the launcher's last words are on their way
    last = f" (its launcher last said {beat.state})" if beat is not None else ""
    words = (
        f"its container exited with 0, although its ranks had not finished{last}: was the launcher killed behind a "
        "shell or a pipe? Let the command end with `exec pacekeeper run …`"
    )
    return words, Class.UNKNOWN, False


def _cause(view: WorkerView) -> Cause:
    killed = view.pod is not None and view.pod.exit_reason == "OOMKilled"
    return Cause.OUT_OF_MEMORY if killed else Cause.WORKER_LOST


def _say_exit(pod: PodView) -> str:
    reason = f" ({pod.exit_reason})" if pod.exit_reason else ""
    return f"its trainer ended with {pod.exit_code}{reason}" if pod.exit_code is not None else "its pod has failed"
