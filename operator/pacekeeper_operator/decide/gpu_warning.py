"""A GPU works, but shows what comes before a fault: its worker moves at the next checkpoint, which loses no step.

What NVML in a worker's pod says, and series that a target may have labelled itself, move the worker and no more. A node
is blamed by series that the platform vouches for alone. A node from which the job has moved a worker for a warning
before is not left again for one: who comes after it must not go from pod to pod.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from pacekeeper_analysis.diagnose import finding
from pacekeeper_analysis.diagnose.gpu_health import GPU_RATE_WINDOW_MINUTES, ObservedGpuSign, GpuSign, describe_gpu_sign, list_gpu_signs

from ..api import IncidentCause, IncidentClass, Witness
from ..decision import Decision
from ..observation import GpuValue, Observation, Policy, WorkerView
from ..state import Incident, PastIncident
from . import blame, move
from .move import WorkerMove

GPU_WARNING_ADVICE = "reset the GPU once its node is free, and have it looked at where the signs come again"


@dataclass(frozen=True)
class GpuWarning:
    """Signs of one worker's GPUs that come before a fault."""

    view: WorkerView
    signs: tuple[ObservedGpuSign, ...]
    vouched: tuple[ObservedGpuSign, ...]  # those of them that are a witness against the node

    @property
    def message(self) -> str:
        return "; ".join(dict.fromkeys(sign.words for sign in self.signs))


def check_gpu_warnings(observation: Observation, policy: Policy) -> Decision | None:
    """Spares go first: a worker must not be moved to one that is warned of, too."""
    nodes = {value.node for value in observation.metrics.gpu_signs}
    for view in (*observation.spares, *observation.members):
        shows = view.record.node in nodes or (view.heartbeat is not None and any(g.signs for g in view.heartbeat.gpus))
        found = _find_warning(observation, view) if shows and not view.record.leaving else None
        if found is not None:
            decision = move.decide_move(
                observation, policy, _build_move(observation, policy, found), partial(has_gpu_warning, observation)
            )
            if decision is not None:
                return decision
    return None


def has_gpu_warning(observation: Observation, view: WorkerView) -> bool:
    return _find_warning(observation, view) is not None


def is_still_warned(observation: Observation, incident: Incident) -> bool:
    """Whether the worker of an incident, about which nothing has been done so far, is still warned of. Who has not been
    heard since this operator began may be."""
    view = observation.find_worker(incident.worker or "")
    if view is None or view.record.leaving:
        return False
    return view.heartbeat is None or not observation.metrics.at or has_gpu_warning(observation, view)


def describe_gpu_signs(observation: Observation, view: WorkerView | None) -> tuple[str, ...]:
    """What a worker's GPUs show, warnings and witnesses for slowness alike."""
    return () if view is None else tuple(dict.fromkeys(sign.words for sign in _find_signs(observation, view)))


def _find_signs(observation: Observation, view: WorkerView) -> Iterator[ObservedGpuSign]:
    if view.heartbeat is not None:
        yield from list_gpu_signs(view.heartbeat.gpus)
    yield from (_build_shown_sign(value) for value in _find_series(observation, view))


def _find_warning(observation: Observation, view: WorkerView) -> GpuWarning | None:
    found = tuple(sign for sign in _find_signs(observation, view) if sign.meaning.warns)
    if not found:
        return None
    vouched = tuple(sign for sign in (_build_shown_sign(v) for v in _find_series(observation, view) if v.trusted) if sign.meaning.warns)
    return GpuWarning(view, found, vouched)


def _find_series(observation: Observation, view: WorkerView) -> Iterator[GpuValue]:
    """Of the worker's own GPUs, where both sides name them; else of all GPUs of its node."""
    own = {health.gpu for health in view.heartbeat.gpus} if view.heartbeat is not None else set()
    for value in observation.metrics.gpu_signs:
        if value.node == view.record.node and (not own or not value.uuid or value.uuid in own):
            yield value


def _build_shown_sign(value: GpuValue) -> ObservedGpuSign:
    sign = GpuSign(value.metric)
    figure = _SIGN_VALUE_FORMATS[sign].format(value.value) if sign in _SIGN_VALUE_FORMATS else ""
    return describe_gpu_sign(sign, value.uuid or f"GPU {value.gpu} of {value.node}", figure)


_SIGN_VALUE_FORMATS = {
    GpuSign.PCIE_REPLAYS: "{:.0f} in ten minutes",
    GpuSign.NVLINK_ERRORS: "{:.0f} in ten minutes",
    GpuSign.THROTTLED: f"in {{:.0f}} of the last {GPU_RATE_WINDOW_MINUTES} minutes",
    GpuSign.SLOW_CLOCK: "{:.0f} MHz",
}


def _build_move(observation: Observation, policy: Policy, found: GpuWarning) -> WorkerMove:
    view, words = found.view, found.message
    against = "; ".join(sign.words for sign in found.vouched)
    blamed = blame.propose_quarantine(observation, policy, view.record.node, against, Witness.GPU_SERIES)
    return WorkerMove(
        view=view,
        cause=IncidentCause.GPU_WARNING,
        class_=IncidentClass.INFRASTRUCTURE,
        reason=words,
        message=f"a GPU of {view.name} is expected to fail: {words}",
        benefit="the fault that is to be expected costs more",
        stay_reason=_explain_stay(observation, view),
        evidence=tuple(dict.fromkeys(sign.words for sign in found.signs)),
        finding=_build_finding(found),
        quarantine=blamed if found.vouched else None,
    )


def _build_finding(found: GpuWarning) -> finding.Finding:
    witnesses = tuple(dict.fromkeys(finding.Signal(finding.SignalKind.GPU, sign.words) for sign in found.signs))
    return finding.Finding(finding.FaultClass.HARDWARE, f"a GPU of {found.view.name}", witnesses, advice=GPU_WARNING_ADVICE)


def _explain_stay(observation: Observation, view: WorkerView) -> str:
    """Why this worker stays for now; "": nothing stands against its move."""
    node, incidents = view.record.node, observation.state.incidents
    known: tuple[Incident | PastIncident, ...] = (*incidents.past, *incidents.open)
    left = any(i.cause is IncidentCause.GPU_WARNING and i.node == node and i.worker != view.name for i in known)
    return (
        f"another worker was on {node} when such a warning came: the node is to be looked at" if node and left else ""
    )
