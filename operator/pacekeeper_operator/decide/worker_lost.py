"""Workers whose pods are gone, end, or are told to end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pacekeeper_analysis.reports import FaultKind

from ..api import Cause, Class
from ..decision import Decision
from ..observation import Observation, PodView, Policy, WorkerView
from . import loss
from .loss import Loss


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
        how = _how_lost(view, view.name in told)
        if how is not None:
            words, class_, trains = how
            yield Loss(view, _cause(view), class_, words, told.get(view.name, observation.now), trains)


def _how_lost(view: WorkerView, told_to_end: bool) -> tuple[str, Class, bool] | None:
    """In words, whose doing, and whether it still trains for a moment; None: it is not lost."""
    pod = view.pod
    if pod is None:
        return ("its pod is gone", Class.DISRUPTION, False) if view.record.uid else None
    if pod.disrupted:
        return f"its pod is disrupted ({pod.disrupted})", Class.DISRUPTION, not pod.ended
    if pod.deleting:
        return "its pod was deleted", Class.DISRUPTION, not pod.ended
    if told_to_end:
        return "its pod was told to end", Class.DISRUPTION, not pod.ended
    if pod.finished:
        return "its ranks had ended well before the others had to begin anew", Class.DISRUPTION, False
    return (_say_exit(pod), Class.UNKNOWN, False) if pod.ended else None


def _cause(view: WorkerView) -> Cause:
    killed = view.pod is not None and view.pod.exit_reason == "OOMKilled"
    return Cause.OUT_OF_MEMORY if killed else Cause.WORKER_LOST


def _say_exit(pod: PodView) -> str:
    if pod.exit_code == 0:
        return "its trainer ended with 0 before its ranks had finished: its command hides the launcher's exit code"
    reason = f" ({pod.exit_reason})" if pod.exit_reason else ""
    return f"its trainer ended with {pod.exit_code}{reason}" if pod.exit_code is not None else "its pod has failed"
