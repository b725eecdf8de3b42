"""GPU warnings: a GPU works, but shows signs of an upcoming fault.

Its worker moves at the next checkpoint, which loses no step.

NVML's values from a worker's pod, and series whose labels a target may have set itself, only move the worker. Only
series that the platform vouches for blame the node. A job leaves a node once for a warning; later workers stay there,
so that ranks do not move from pod to pod.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from pacekeeper_analysis.failures import finding
from pacekeeper_analysis.failures.gpu_health import (
    GPU_RATE_WINDOW_MINUTES,
    GpuSign,
    ObservedGpuSign,
    describe_gpu_sign,
    list_gpu_signs,
)

from ...api.incident import IncidentCause, IncidentClass
from ...api.node_quarantine import Witness
from ...state.cluster_view import WorkerView
from ...state.desired_state import Incident, PastIncident
from ...state.job_metrics import GpuValue
from ...state.observation import Observation
from ...state.policy import Policy
from ..decision import Decision
from ..nodes import quarantine_proposal
from ..placement import move
from ..placement.move import WorkerMove

GPU_WARNING_ADVICE = "reset the GPU once its node is free, and have it inspected if the signs return"


@dataclass(frozen=True)
class GpuWarning:
    """Signs of an upcoming fault that one worker's GPUs show."""

    view: WorkerView
    signs: tuple[ObservedGpuSign, ...]
    vouched: tuple[ObservedGpuSign, ...]  # those of them that are a witness against the node

    @property
    def message(self) -> str:
        return "; ".join(dict.fromkeys(sign.message for sign in self.signs))


def check_gpu_warnings(observation: Observation, policy: Policy) -> Decision | None:
    """Move the first worker with a GPU warning. Spares first: a worker must not move to a spare with a warning."""
    nodes = {value.node for value in observation.metrics.gpu_signs}
    for view in (*observation.spares, *observation.members):
        has_signs = view.record.node in nodes or (
            view.heartbeat is not None and any(gpu.signs for gpu in view.heartbeat.gpus)
        )
        warning = _find_warning(observation, view) if has_signs and not view.record.leaving else None
        if warning is not None:
            decision = move.decide_move(
                observation, policy, _build_move(observation, policy, warning), partial(has_gpu_warning, observation)
            )
            if decision is not None:
                return decision
    return None


def has_gpu_warning(observation: Observation, view: WorkerView) -> bool:
    return _find_warning(observation, view) is not None


def is_still_warned(observation: Observation, incident: Incident) -> bool:
    """Return whether the worker of an incident without an applied remedy still has a warning.

    A worker that has not reported since this operator started counts as warned.
    """
    view = observation.find_worker(incident.worker or "")
    if view is None or view.record.leaving:
        return False
    return view.heartbeat is None or observation.metrics.queried_at is None or has_gpu_warning(observation, view)


def describe_gpu_signs(observation: Observation, view: WorkerView | None) -> tuple[str, ...]:
    """Return all signs of a worker's GPUs: warnings, and signals of slowness."""
    return () if view is None else tuple(dict.fromkeys(sign.message for sign in _find_signs(observation, view)))


def _find_signs(observation: Observation, view: WorkerView) -> Iterator[ObservedGpuSign]:
    if view.heartbeat is not None:
        yield from list_gpu_signs(view.heartbeat.gpus)
    yield from (_build_shown_sign(value) for value in _find_series(observation, view))


def _find_warning(observation: Observation, view: WorkerView) -> GpuWarning | None:
    signs = tuple(sign for sign in _find_signs(observation, view) if sign.meaning.is_warning)
    if not signs:
        return None
    vouched = tuple(
        sign
        for sign in (_build_shown_sign(v) for v in _find_series(observation, view) if v.trusted)
        if sign.meaning.is_warning
    )
    return GpuWarning(view, signs, vouched)


def _find_series(observation: Observation, view: WorkerView) -> Iterator[GpuValue]:
    """Yield the series of the worker's own GPUs if both sides name them, or else of all GPUs of its node."""
    own_gpus = {health.gpu for health in view.heartbeat.gpus} if view.heartbeat is not None else set()
    for value in observation.metrics.gpu_signs:
        if value.node == view.record.node and (not own_gpus or not value.uuid or value.uuid in own_gpus):
            yield value


def _build_shown_sign(value: GpuValue) -> ObservedGpuSign:
    sign = GpuSign(value.metric)
    reading = _SIGN_VALUE_FORMATS[sign].format(value.value) if sign in _SIGN_VALUE_FORMATS else ""
    return describe_gpu_sign(sign, value.uuid or f"GPU {value.gpu} of {value.node}", reading)


_SIGN_VALUE_FORMATS = {
    GpuSign.PCIE_REPLAYS: "{:.0f} in ten minutes",
    GpuSign.NVLINK_ERRORS: "{:.0f} in ten minutes",
    GpuSign.THROTTLED: f"in {{:.0f}} of the last {GPU_RATE_WINDOW_MINUTES} minutes",
    GpuSign.SLOW_CLOCK: "{:.0f} MHz",
}


def _build_move(observation: Observation, policy: Policy, warning: GpuWarning) -> WorkerMove:
    view, reason = warning.view, warning.message
    vouched_reason = "; ".join(sign.message for sign in warning.vouched)
    quarantine = quarantine_proposal.propose_quarantine(
        observation, policy, view.record.node, vouched_reason, Witness.GPU_SERIES
    )
    return WorkerMove(
        view=view,
        cause=IncidentCause.GPU_WARNING,
        class_=IncidentClass.INFRASTRUCTURE,
        reason=reason,
        message=f"a GPU of {view.name} is expected to fail: {reason}",
        benefit="the expected fault costs more",
        stay_reason=_explain_stay(observation, view),
        evidence=tuple(dict.fromkeys(sign.message for sign in warning.signs)),
        finding=_build_finding(warning),
        quarantine=quarantine if warning.vouched else None,
    )


def _build_finding(warning: GpuWarning) -> finding.Finding:
    signals = tuple(dict.fromkeys(finding.Signal(finding.SignalKind.GPU, sign.message) for sign in warning.signs))
    return finding.Finding(
        finding.FaultClass.HARDWARE, f"a GPU of {warning.view.name}", signals, advice=GPU_WARNING_ADVICE
    )


def _explain_stay(observation: Observation, view: WorkerView) -> str:
    """Return why this worker stays for now; "": it may move."""
    node, incidents = view.record.node, observation.state.incidents
    all_incidents: tuple[Incident | PastIncident, ...] = (*incidents.past, *incidents.open)
    moved_before = any(
        incident.cause is IncidentCause.GPU_WARNING and incident.node == node and incident.worker != view.name
        for incident in all_incidents
    )
    return (
        f"another worker had such a warning on {node} before: the node needs an inspection"
        if node and moved_before
        else ""
    )
