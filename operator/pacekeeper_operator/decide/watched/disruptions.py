"""Pods of a watched job that Kubernetes has ended: evicted, preempted, deleted, or lost with their node.

Their ranks end by signals, and those of other pods lose their peers. So these faults are no crashes. A controller that
deletes the pods of a job that has crashed or hangs causes no disruption: the crash or hang came first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from pacekeeper_analysis.failures.crash import is_peer_consequence
from pacekeeper_analysis.protocol.reports import FaultKind, FaultReport, LauncherState

from ...api.incident import IncidentCause, IncidentClass
from ...state.cluster_view import WorkerView
from ...state.desired_state import DesiredState, Incident
from ...state.observation import Observation
from ...state.policy import Policy
from ..decision import Decision
from ..failures import lost_worker_decision
from ..failures.lost_worker_decision import LostWorker
from ..failures.node_lost import WORKER_SILENT_SECONDS, compute_silent_seconds, is_node_down
from ..failures.worker_lost import classify_external_end

DISRUPTION_CAUSES = frozenset({IncidentCause.WORKER_LOST, IncidentCause.NODE_LOST})
"""Causes of the incidents about pods that Kubernetes has ended."""
API_TIME_RESOLUTION_SECONDS = 1.0
"""Times of the API server are cut to whole seconds."""
_LOST = IncidentCause.WORKER_LOST
_STANDSTILL_CAUSES = frozenset({IncidentCause.CRASH, IncidentCause.OUT_OF_MEMORY, IncidentCause.HANG})
_TERMINATION_EXIT_CODES = frozenset({0, -9, -15, 137, 143})
"""Exit codes of ranks that the end of their pod has ended. 0: a signal, of which no agent has reported the number."""


def check_disruptions(observation: Observation, policy: Policy) -> Decision | None:
    """Report the members whose pods have been ended since the round began, unless a crash or hang came first."""
    if find_disruption(observation) is not None:
        return None
    losses = sorted(_find_disrupted_members(observation), key=lambda loss: loss.first_sign)
    if not losses:
        return None
    event = lost_worker_decision.select_one_event(losses)
    settled = _list_consequences(observation, event[0].first_sign)
    return lost_worker_decision.decide_lost_workers(observation, policy, event, settled)


def settle_consequences(observation: Observation, _policy: Policy) -> DesiredState:
    """Settle the faults that followed a disruption of the present round: they are no crashes or hangs of their own."""
    incident = find_disruption(observation)
    if incident is None:
        return observation.desired
    return observation.desired.settle_faults(_list_consequences(observation, incident.first_sign))


def find_disruption(observation: Observation) -> Incident | None:
    """Return the open incident about disrupted pods of the present round."""
    return next(
        (
            incident
            for incident in observation.state.incidents.open
            if incident.cause in DISRUPTION_CAUSES and incident.round == observation.progress.round
        ),
        None,
    )


def _list_consequences(observation: Observation, since: float) -> tuple[str, ...]:
    return tuple(fault.name for fault in _list_faults(observation) if fault.noticed_at >= since)


def _list_faults(observation: Observation) -> list[FaultReport]:
    """Return the failures and stalls of the present round."""
    faults = observation.select_faults(FaultKind.RANK_FAILED, FaultKind.STALLED)
    return [fault for fault in faults if fault.round == observation.progress.round]


def _find_disrupted_members(observation: Observation) -> Iterator[LostWorker]:
    present, rounds = observation.state.watched.present, observation.state.watched.rounds
    for member in observation.plan.members:
        view = observation.find_worker(member.worker)
        if view is None or not all(rank < len(present) and present[rank] for rank in member.ranks):
            continue  # its processes are of an earlier round
        if view.heartbeat is None or view.heartbeat.state is LauncherState.FINISHED:
            continue  # a controller removes pods that have done their work
        loss = _classify_disruption(observation, view)
        began = rounds[-1].began if rounds else -math.inf
        if loss is None or loss.first_sign + API_TIME_RESOLUTION_SECONDS < began:
            continue
        if not _is_explained(observation, view):
            yield loss


def _classify_disruption(observation: Observation, view: WorkerView) -> LostWorker | None:
    """Return how Kubernetes has ended the worker; None: it has not, as far as is known."""
    pod, now = view.pod, observation.now
    first_fault = min((fault.noticed_at for fault in _list_faults(observation)), default=None)
    if pod is None:
        # That a pod is not listed proves nothing by itself. Its peers stop soon after it.
        reason, class_ = "its pod is gone; Kubernetes does not record why", IncidentClass.DISRUPTION
        return None if first_fault is None else LostWorker(view, _LOST, class_, reason, first_fault)
    if pod.phase == "Succeeded" or (pod.ended_by_itself and pod.deleting):
        return None
    ended = classify_external_end(view)
    if ended is None and pod.phase == "Failed" and pod.exit_reason:
        ended = f"its pod has failed: {pod.exit_reason}: {pod.exit_message}", IncidentClass.DISRUPTION
    if ended is not None:
        reason, class_ = ended
        if pod.deleting and not pod.disruption_reason:
            reason += "; Kubernetes does not record by whom"
        return LostWorker(view, _LOST, class_, reason, pod.disrupted_at or first_fault or now, not pod.ended)
    silent_seconds = compute_silent_seconds(observation, view)
    if pod.ended or silent_seconds <= WORKER_SILENT_SECONDS or not is_node_down(observation, view.node):
        return None
    reason = f"node {view.node} is lost: it is not Ready, and the pod has not reported for {silent_seconds:.0f} s"
    return LostWorker(view, IncidentCause.NODE_LOST, IncidentClass.INFRASTRUCTURE, reason, now - silent_seconds)


def _is_explained(observation: Observation, view: WorkerView) -> bool:
    """Return whether a crash or hang of this round came before the end of the pod, which then followed from it."""
    disrupted_at, round_ = None if view.pod is None else view.pod.disrupted_at, observation.progress.round
    crashes = (fault for fault in _list_faults(observation) if fault.kind is FaultKind.RANK_FAILED)
    if any(
        _is_in_ended_pod(observation, fault) or _precedes_disruption(fault, view, disrupted_at) for fault in crashes
    ):
        return True
    return any(
        incident.cause in _STANDSTILL_CAUSES
        and incident.round == round_
        and (disrupted_at is None or incident.first_sign < disrupted_at)
        for incident in observation.state.incidents.open
    )


def _is_in_ended_pod(observation: Observation, fault: FaultReport) -> bool:
    """Return whether a rank has failed in a pod that ended by itself, whereupon a controller deletes all pods."""
    view = observation.find_worker(fault.worker)
    ended_by_itself = view is not None and view.pod is not None and view.pod.ended_by_itself
    return ended_by_itself and not is_peer_consequence(fault)


def _precedes_disruption(fault: FaultReport, view: WorkerView, disrupted_at: float | None) -> bool:
    if is_peer_consequence(fault):
        return False
    is_killed = fault.exit_code in _TERMINATION_EXIT_CODES and not fault.out_of_memory
    if disrupted_at is None:
        return not (is_killed and fault.worker == view.name)
    return fault.noticed_at < disrupted_at + (0.0 if is_killed else API_TIME_RESOLUTION_SECONDS)
