"""GPU errors: from DCGM's counters in Prometheus, or from NVML's events that launchers report.

Launchers' reports, and series whose labels a target may have set itself, choose remedies within the job. Against the
node they only raise a suspicion. Only series that the platform vouches for are a witness against it.

DCGM's gauge of XIDs keeps the last XID indefinitely, and its counters never fall. So only a change is an error, and
values from before the job first used a node are a baseline. A new series is not a change: an exporter that was down
returns with the counts of months. A value that the job has not recorded yet is compared with the same series two
minutes earlier; an earlier change that the operator could not observe stays undetected. A value that has become zero (a
GPU or its driver was reset) is recorded, so that the same error counts again.
`pacekeeper_analysis.failures.gpu_health` classifies XIDs by their origin.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pacekeeper_analysis.failures.gpu_health import XIDS, XidOrigin, classify_xid, describe_xid
from pacekeeper_analysis.protocol.reports import FaultKind, FaultReport

from ...api.incident import IncidentCause, IncidentClass
from ...api.node_quarantine import Witness
from ...api.training_job import Remedy
from ...state.desired_state import DesiredState
from ...state.incident_key import IncidentKey
from ...state.job_metrics import GpuValue
from ...state.observation import Observation
from ...state.policy import Policy
from ..decision import Action, Decision, ReplaceWorker
from ..nodes import quarantine_proposal
from ..stragglers.pricing import build_remedy_prices, build_replace_option, choose_remedy_at_standstill

DCGM_XID_METRIC = "DCGM_FI_DEV_XID_ERRORS"
DCGM_MEMORY_ERRORS_METRIC = "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL"
FATAL_COUNTERS: Mapping[str, str] = {
    DCGM_MEMORY_ERRORS_METRIC: "uncorrectable memory error",
    "DCGM_FI_DEV_ROW_REMAP_FAILURE": "memory rows could not be remapped",
}
"""Counters whose every increase is fatal for the GPU."""

MAX_NAMED_GPU_NODES = 5
SHARED_GPU_ERROR_SECONDS = 60.0
"""Seconds within which errors that the application may cause, on several nodes, are attributed to the application."""


@dataclass(frozen=True)
class GpuFault:
    """One error of one GPU: `fault` if a launcher reported it, `value` if DCGM measured it."""

    node: str
    gpu: str
    message: str
    origin: XidOrigin
    workers: tuple[str, ...]  # the job's workers on this node
    fault: FaultReport | None = None
    value: GpuValue | None = None

    @property
    def witness(self) -> Witness:
        vouched = self.value is not None and self.value.trusted
        return Witness.GPU_SERIES if vouched and self.origin is XidOrigin.HARDWARE else Witness.NONE

    @property
    def identity(self) -> str:
        """A key that is equal for the same error only.

        Repeated reports of a worker in a round are the same error. So are all XIDs that the catalog does not list: a
        script can report arbitrary numbers without end.
        """
        if self.fault is not None:
            return f"{self.fault.worker}/{self.fault.xid if self.fault.xid in XIDS else 'other'}"
        return f"{self.value.key}={self.value.value}" if self.value else ""

    @property
    def fatal(self) -> bool:
        """Whether the job must leave the GPU."""
        return self.origin in (XidOrigin.HARDWARE, XidOrigin.LINK)


def check_gpu_errors(observation: Observation, policy: Policy) -> Decision | None:
    """Decide on the first GPU error, or on all of its kind if several nodes have it at once."""
    first = next(_find_reported_faults(observation), None) or next(_find_measured_faults(observation), None)
    if first is None:
        return None
    similar = _find_similar_faults(observation, first)
    nodes = {fault.node for fault in similar} | _find_recent_error_nodes(observation, _ORIGIN_CLASSES[first.origin])
    return (
        _decide_gpu_fault(observation, policy, first)
        if len(nodes) <= 1 or not similar
        else _decide_shared_fault(observation, similar, nodes)
    )


def record_gpu_baseline(observation: Observation, _policy: Policy) -> DesiredState:
    """Record the GPU values of nodes that are new to the job, and resets; drop the values of nodes that it has left."""
    desired, gpus = observation.desired, observation.state.gpus
    if observation.metrics.prometheus_error:
        return desired
    present = tuple(sorted({view.record.node for view in observation.workers if view.record.node}))
    retained = {key: value for key, value in gpus.values.items() if key.split("/", 1)[0] in present}
    added = {v.key: v.value for v in observation.metrics.gpu_values if v.node in present and v.node not in gpus.nodes}
    reset = {v.key: 0.0 for v in observation.metrics.gpu_values if not v.value and gpus.values.get(v.key)}
    if present == gpus.nodes and not reset:
        return desired
    return desired.with_gpus(nodes=present, values={**retained, **added, **reset})


def _find_reported_faults(observation: Observation) -> Iterator[GpuFault]:
    for fault in observation.select_faults(FaultKind.GPU_ERROR):
        view = observation.find_worker(fault.worker)
        node = view.record.node if view is not None else ""
        workers = (fault.worker,) if view is not None else ()
        yield GpuFault(node, "", describe_xid(fault.xid), classify_xid(fault.xid), workers, fault=fault)


def _find_measured_faults(observation: Observation) -> Iterator[GpuFault]:
    gpus = observation.state.gpus
    nodes = frozenset(gpus.nodes)
    for value in observation.metrics.gpu_values:  # of the whole cluster
        if value.node not in nodes:
            continue
        previous = gpus.values.get(value.key, value.previous_value)
        if previous is None:
            continue
        if value.value in (0.0, previous) or (value.metric != DCGM_XID_METRIC and value.value < previous):
            continue
        workers = tuple(v.name for v in observation.workers if v.record.node == value.node and not v.record.leaving)
        if workers:
            yield GpuFault(
                value.node,
                value.gpu,
                _describe_value(value),
                _classify_origin(observation, value),
                workers,
                value=value,
            )


def _find_similar_faults(observation: Observation, first: GpuFault) -> Sequence[GpuFault]:
    """Return all present errors of the same origin as `first`; (): the GPU itself is to blame."""
    if first.origin not in (XidOrigin.APPLICATION, XidOrigin.UNKNOWN) or not first.node:
        return ()
    faults = (*_find_reported_faults(observation), *_find_measured_faults(observation))
    return [fault for fault in faults if fault.origin is first.origin and fault.node]


def _find_recent_error_nodes(observation: Observation, class_: IncidentClass) -> set[str]:
    """Return the nodes with recent GPU errors of this class."""
    since = observation.now - SHARED_GPU_ERROR_SECONDS
    return {
        incident.node
        for incident in observation.state.incidents.past
        if incident.cause is IncidentCause.GPU_ERROR
        and incident.class_ is class_
        and incident.at > since
        and incident.node
    }


def _decide_shared_fault(observation: Observation, gpu_faults: Sequence[GpuFault], nodes: Collection[str]) -> Decision:
    """Open one incident for all nodes, and move no worker: GPUs of several nodes do not break at once."""
    reports = [gpu_fault.fault for gpu_fault in gpu_faults if gpu_fault.fault is not None]
    cause = "the application causes it" if gpu_faults[0].origin is XidOrigin.APPLICATION else "they share the cause"
    where = ", ".join(sorted(nodes)[:MAX_NAMED_GPU_NODES]) + (" …" if len(nodes) > MAX_NAMED_GPU_NODES else "")
    return Decision(
        incident_key=IncidentKey(
            IncidentCause.GPU_ERROR, observation.progress.round, gpu=_SHARED_FAULT_KEYS[gpu_faults[0].origin]
        ),
        class_=_ORIGIN_CLASSES[gpu_faults[0].origin],
        message=f"{gpu_faults[0].message} on {len(nodes)} nodes at once ({where}): {cause}",
        first_sign=min((report.noticed_at for report in reports), default=observation.now),
        evidence=tuple(dict.fromkeys(report.error for report in reports if report.error)),
        node=gpu_faults[0].node,
        settled_faults=tuple(report.name for report in reports),
        gpu_readings=tuple(gpu_fault.value for gpu_fault in gpu_faults if gpu_fault.value is not None),
        live=True,
        last_step=observation.progress.step,
    )


def _decide_gpu_fault(observation: Observation, policy: Policy, gpu_fault: GpuFault) -> Decision:
    worker = gpu_fault.workers[0] if gpu_fault.workers else None
    member = next((m for m in observation.plan.members if m.worker == worker), None)
    choice = choose_remedy_at_standstill((build_replace_option(observation, policy),))
    actions: tuple[Action, ...] = ()
    if gpu_fault.fatal and not policy.find_refusal(Remedy.REPLACE_WORKER):
        actions = tuple(
            ReplaceWorker(name, gpu_fault.message, dead=False, disruption=True) for name in gpu_fault.workers
        )
    if gpu_fault.fatal and gpu_fault.node:
        actions = (
            *actions,
            quarantine_proposal.propose_quarantine(
                observation, policy, gpu_fault.node, gpu_fault.message, gpu_fault.witness
            ),
        )
    moved = tuple(action.worker for action in actions if isinstance(action, ReplaceWorker))
    where = f"GPU {gpu_fault.gpu} of node {gpu_fault.node}" if gpu_fault.gpu else f"a GPU of {worker}"
    return Decision(
        incident_key=IncidentKey(IncidentCause.GPU_ERROR, observation.progress.round, gpu=gpu_fault.identity),
        class_=_ORIGIN_CLASSES[gpu_fault.origin],
        message=f"{where}: {gpu_fault.message}{_ORIGIN_ADVICE[gpu_fault.origin]}",
        first_sign=observation.now if gpu_fault.fault is None else gpu_fault.fault.noticed_at,
        actions=actions,
        remedy=Remedy.REPLACE_WORKER if moved else None,
        remedies=build_remedy_prices(choice.prices, choice.chosen) if gpu_fault.fatal else (),
        evidence=(
            gpu_fault.message,
            *([gpu_fault.fault.error] if gpu_fault.fault is not None and gpu_fault.fault.error else ()),
        ),
        rank=None if member is None else member.ranks[0],
        worker=worker,
        node=gpu_fault.node or None,
        settled_faults=() if gpu_fault.fault is None else (gpu_fault.fault.name,),
        gpu_readings=() if gpu_fault.value is None else (gpu_fault.value,),
        live=not any(m.worker in moved for m in observation.plan.members),
        last_step=observation.progress.step,
    )


_ORIGIN_ADVICE: Mapping[XidOrigin, str] = {
    XidOrigin.HARDWARE: "",
    XidOrigin.CONTAINED: "; it ended one process, which is restarted",
    XidOrigin.LINK: "; either end of the link may be at fault",
    XidOrigin.APPLICATION: "; the application alone may cause it",
    XidOrigin.UNKNOWN: "; see NVIDIA's catalog of XIDs for its cause, if it is known",
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
    return (
        describe_xid(int(value.value))
        if value.metric == DCGM_XID_METRIC
        else FATAL_COUNTERS.get(value.metric, value.metric)
    )


def _classify_origin(observation: Observation, value: GpuValue) -> XidOrigin:
    """Return the origin. A memory error counts as contained if the GPU's last XID is a contained error."""
    if value.metric == DCGM_XID_METRIC:
        return classify_xid(int(value.value))
    last_xid = next(
        (v.value for v in observation.metrics.gpu_values if v.metric == DCGM_XID_METRIC and v.gpu_key == value.gpu_key),
        0.0,
    )
    contained = value.metric == DCGM_MEMORY_ERRORS_METRIC and classify_xid(int(last_xid)) is XidOrigin.CONTAINED
    return XidOrigin.CONTAINED if contained else XidOrigin.HARDWARE
