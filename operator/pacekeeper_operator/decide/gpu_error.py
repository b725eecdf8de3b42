"""A GPU has reported an error: DCGM's counters in Prometheus, or NVML's events from the launcher.

What launchers report, and series that a target may have labelled itself, choose remedies inside of the job. Of the
node they raise a suspicion; only series that the platform vouches for are a witness against it.

The gauge of XIDs holds the last one for ever and the counters never fall, so only a change is news, and what a node had
before the job looked at it for the first time is none. A series that was not there before shows no change: an exporter
that was away comes back with the counts of months. So what a job has not seen itself is held against what the same
series was two minutes ago, and what has changed earlier while nobody could look is not found out. Whose fault an XID
is says `pacekeeper_analysis.diagnose.gpu_health`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pacekeeper_analysis.diagnose.gpu_health import XIDS, XidOrigin, classify_xid, describe_xid
from pacekeeper_analysis.reports import FaultReport, FaultKind

from ..api import IncidentCause, IncidentClass, Remedy, Witness
from ..decision import Action, Decision, ReplaceWorker
from ..observation import GpuValue, Observation, Policy
from ..state import DesiredState
from ..subject import IncidentKey
from . import blame
from .pricing import choose_remedy_at_standstill, build_replace_option, build_remedy_prices

DCGM_XID_METRIC = "DCGM_FI_DEV_XID_ERRORS"
DCGM_MEMORY_ERRORS_METRIC = "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL"
FATAL_COUNTERS: Mapping[str, str] = {
    DCGM_MEMORY_ERRORS_METRIC: "uncorrectable memory error",
    "DCGM_FI_DEV_ROW_REMAP_FAILURE": "memory rows could not be remapped",
}
"""Counters of which any rise is fatal for the GPU."""

MAX_NAMED_GPU_NODES = 5
SHARED_GPU_ERROR_SECONDS = 60.0
"""Errors that may come of the application, and come on several nodes within so long, are its own."""


@dataclass(frozen=True)
class GpuFault:
    """One error of one GPU, by whichever way it was heard of."""

    node: str
    gpu: str
    message: str
    origin: XidOrigin
    workers: tuple[str, ...]  # of the job, on this node
    fault: FaultReport | None = None
    value: GpuValue | None = None

    @property
    def witness(self) -> Witness:
        vouched = self.value is not None and self.value.trusted
        return Witness.GPU_SERIES if vouched and self.origin is XidOrigin.HARDWARE else Witness.NONE

    @property
    def identity(self) -> str:
        """The same for the same error, and for no other. What a worker says again in a round, under whatever name, is
        the same, and so is all that no catalogue has: its script can say anything, without end."""
        if self.fault is not None:
            return f"{self.fault.worker}/{self.fault.xid if self.fault.xid in XIDS else 'other'}"
        return f"{self.value.key}={self.value.value}" if self.value else ""

    @property
    def fatal(self) -> bool:
        """The job leaves the GPU."""
        return self.origin in (XidOrigin.HARDWARE, XidOrigin.LINK)


def check_gpu_errors(observation: Observation, policy: Policy) -> Decision | None:
    found = next(_find_reported_faults(observation), None) or next(_find_measured_faults(observation), None)
    if found is None:
        return None
    alike = _find_similar_faults(observation, found)
    nodes = {one.node for one in alike} | _find_recent_error_nodes(observation, _ORIGIN_CLASSES[found.origin])
    return _decide_gpu_fault(observation, policy, found) if len(nodes) < 2 or not alike else _decide_shared_fault(observation, alike, nodes)


def record_gpu_baseline(observation: Observation, _policy: Policy) -> DesiredState:
    """Remember what nodes show when the job looks at them for the first time; forget nodes that it has left."""
    draft, gpus = observation.desired, observation.state.gpus
    if observation.metrics.unavailable:
        return draft
    present = tuple(sorted({view.record.node for view in observation.workers if view.record.node}))
    if present == gpus.nodes:
        return draft
    kept = {key: value for key, value in gpus.values.items() if key.split("/", 1)[0] in present}
    fresh = {v.key: v.value for v in observation.metrics.gpu if v.node in present and v.node not in gpus.nodes}
    return draft.with_gpus(nodes=present, values={**kept, **fresh})


def _find_reported_faults(observation: Observation) -> Iterator[GpuFault]:
    for fault in observation.select_faults(FaultKind.GPU_ERROR):
        view = observation.find_worker(fault.worker)
        node = view.record.node if view is not None else ""
        workers = (fault.worker,) if view is not None else ()
        yield GpuFault(node, "", describe_xid(fault.xid), classify_xid(fault.xid), workers, fault=fault)


def _find_measured_faults(observation: Observation) -> Iterator[GpuFault]:
    gpus = observation.state.gpus
    nodes = frozenset(gpus.nodes)
    for value in observation.metrics.gpu:  # of the whole cluster
        if value.node not in nodes:
            continue
        seen = gpus.values.get(value.key, value.previous_value)
        if seen is None:
            continue
        if value.value == seen or (value.metric != DCGM_XID_METRIC and value.value < seen):
            continue
        workers = tuple(v.name for v in observation.workers if v.record.node == value.node and not v.record.leaving)
        if workers:
            yield GpuFault(value.node, value.gpu, _describe_value(value), _classify_origin(observation, value), workers, value=value)


def _find_similar_faults(observation: Observation, found: GpuFault) -> Sequence[GpuFault]:
    """All errors that are heard of now and that no GPU is blamed for, where the first one is such."""
    if found.origin not in (XidOrigin.APPLICATION, XidOrigin.UNKNOWN) or not found.node:
        return ()
    heard = (*_find_reported_faults(observation), *_find_measured_faults(observation))
    return [one for one in heard if one.origin is found.origin and one.node]


def _find_recent_error_nodes(observation: Observation, class_: IncidentClass) -> set[str]:
    """On which such errors have come lately."""
    since = observation.now - SHARED_GPU_ERROR_SECONDS
    return {
        past.node
        for past in observation.state.incidents.past
        if past.cause is IncidentCause.GPU_ERROR and past.class_ is class_ and past.at > since and past.node
    }


def _decide_shared_fault(observation: Observation, found: Sequence[GpuFault], nodes: Collection[str]) -> Decision:
    """GPUs of several nodes do not break at once: one incident for all of them, and nobody is moved."""
    faults = [one.fault for one in found if one.fault is not None]
    whose = "the application's own" if found[0].origin is XidOrigin.APPLICATION else "of something that they share"
    where = ", ".join(sorted(nodes)[:MAX_NAMED_GPU_NODES]) + (" …" if len(nodes) > MAX_NAMED_GPU_NODES else "")
    return Decision(
        incident_key=IncidentKey(IncidentCause.GPU_ERROR, observation.round, gpu=_SHARED_FAULT_KEYS[found[0].origin]),
        class_=_ORIGIN_CLASSES[found[0].origin],
        message=f"{found[0].message} on {len(nodes)} nodes at once ({where}): {whose}",
        first_sign=min((fault.noticed_at for fault in faults), default=observation.now),
        evidence=tuple(dict.fromkeys(fault.error for fault in faults if fault.error)),
        node=found[0].node,
        settled_faults=tuple(fault.name for fault in faults),
        gpu_readings=tuple(one.value for one in found if one.value is not None),
        live=True,
        last_step=observation.step,
    )


def _decide_gpu_fault(observation: Observation, policy: Policy, found: GpuFault) -> Decision:
    worker = found.workers[0] if found.workers else None
    member = next((m for m in observation.plan.members if m.worker == worker), None)
    choice = choose_remedy_at_standstill((build_replace_option(observation, policy),))
    actions: tuple[Action, ...] = ()
    if found.fatal and not policy.find_refusal(Remedy.REPLACE_WORKER):
        actions = tuple(ReplaceWorker(w, found.message, dead=False, disruption=True) for w in found.workers)
    if found.fatal and found.node:
        actions = (*actions, blame.propose_quarantine(observation, policy, found.node, found.message, found.witness))
    moved = tuple(action.worker for action in actions if isinstance(action, ReplaceWorker))
    where = f"GPU {found.gpu} of node {found.node}" if found.gpu else f"a GPU of {worker}"
    return Decision(
        incident_key=IncidentKey(IncidentCause.GPU_ERROR, observation.round, gpu=found.identity),
        class_=_ORIGIN_CLASSES[found.origin],
        message=f"{where}: {found.message}{_ORIGIN_ADVICE[found.origin]}",
        first_sign=observation.now if found.fault is None else found.fault.noticed_at,
        actions=actions,
        remedy=Remedy.REPLACE_WORKER if moved else None,
        remedies=build_remedy_prices(choice.prices, choice.chosen) if found.fatal else (),
        evidence=(found.message, *([found.fault.error] if found.fault is not None and found.fault.error else ())),
        rank=None if member is None else member.ranks[0],
        worker=worker,
        node=found.node or None,
        settled_faults=() if found.fault is None else (found.fault.name,),
        gpu_readings=() if found.value is None else (found.value,),
        live=not any(m.worker in moved for m in observation.plan.members),
        last_step=observation.step,
    )


_ORIGIN_ADVICE: Mapping[XidOrigin, str] = {
    XidOrigin.HARDWARE: "",
    XidOrigin.CONTAINED: "; it has cost one process, which is started again",
    XidOrigin.LINK: "; either end of the link may be at fault",
    XidOrigin.APPLICATION: "; may come of the application alone",
    XidOrigin.UNKNOWN: "; whose fault it is, NVIDIA's catalogue of XIDs says, as far as it is known",
}
_ORIGIN_CLASSES: Mapping[XidOrigin, IncidentClass] = {
    XidOrigin.HARDWARE: IncidentClass.INFRASTRUCTURE,
    XidOrigin.CONTAINED: IncidentClass.INFRASTRUCTURE,
    XidOrigin.LINK: IncidentClass.INFRASTRUCTURE,
    XidOrigin.APPLICATION: IncidentClass.APPLICATION,
    XidOrigin.UNKNOWN: IncidentClass.UNKNOWN,
}
_SHARED_FAULT_KEYS: Mapping[XidOrigin, str] = {XidOrigin.APPLICATION: "the application", XidOrigin.UNKNOWN: "unknown"}


def _describe_value(value: GpuValue) -> str:
    return describe_xid(int(value.value)) if value.metric == DCGM_XID_METRIC else FATAL_COUNTERS.get(value.metric, value.metric)


def _classify_origin(observation: Observation, value: GpuValue) -> XidOrigin:
    """A memory error that is counted while the GPU's last XID says that it was contained is that error."""
    if value.metric == DCGM_XID_METRIC:
        return classify_xid(int(value.value))
    last = next((v.value for v in observation.metrics.gpu if v.metric == DCGM_XID_METRIC and v.gpu_key == value.gpu_key), 0.0)
    contained = value.metric == DCGM_MEMORY_ERRORS_METRIC and classify_xid(int(last)) is XidOrigin.CONTAINED
    return XidOrigin.CONTAINED if contained else XidOrigin.HARDWARE
