"""A GPU has reported an error: DCGM's counters in Prometheus, or NVML's events from the launcher.

What launchers report, and series that a target may have labelled itself, choose remedies inside of the job. Of the
node they raise a suspicion; only series that the platform vouches for are a witness against it.

The gauge of XIDs holds the last one for ever and the counters never fall, so only a change is news, and what a node had
before the job looked at it for the first time is none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pacekeeper_analysis.reports import Fault, FaultKind

from ..api import Cause, Class, Remedy, Witness
from ..decision import Action, Decision, ReplaceWorker
from ..observation import GpuValue, Observation, Policy
from ..state import Draft
from ..subject import Subject
from . import blame
from .pricing import choose_at_standstill, replace_option, written

XID = "DCGM_FI_DEV_XID_ERRORS"
COUNTERS: Mapping[str, str] = {
    "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": "uncorrectable memory error",
    "DCGM_FI_DEV_ROW_REMAP_FAILURE": "memory rows could not be remapped",
}
"""Counters of which any rise is fatal for the GPU."""

FATAL: Mapping[int, str] = {
    46: "GPU stopped processing",
    48: "double-bit memory error",
    62: "internal micro-controller halt",
    63: "row remapping or page retirement",
    64: "row remapping or page retirement failed",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    92: "high rate of single-bit memory errors",
    94: "contained memory error",
    95: "uncontained memory error",
    119: "GSP firmware does not answer",
    120: "GSP firmware error",
    136: "link training failed",
    140: "unrecovered memory error",
    143: "GPU initialisation failed",
    154: "GPU needs a recovery action",
}
"""XIDs that speak of hardware (NVIDIA's catalogue of XID errors).

All others may come of the application alone, as 13, 31, 43, 45 and 68 do, and never touch a node.
"""


@dataclass(frozen=True)
class GpuFault:
    """One error of one GPU, by whichever way it was heard of."""

    node: str
    gpu: str
    words: str
    fatal: bool
    workers: tuple[str, ...]  # of the job, on this node
    fault: Fault | None = None
    value: GpuValue | None = None

    @property
    def witness(self) -> Witness:
        return Witness.GPU_SERIES if self.value is not None and self.value.vouched else Witness.NONE

    @property
    def identity(self) -> str:
        """The same for the same error, and for no other. What a worker says again in a round, under whatever name, is
        the same: its script can say anything, without end."""
        if self.fault is not None:
            return f"{self.fault.worker}/{self.fault.xid}"
        return f"{self.value.key}={self.value.value}" if self.value else ""


def check(observation: Observation, policy: Policy) -> Decision | None:
    found = next(_reported(observation), None) or next(_measured(observation), None)
    return None if found is None else _decide(observation, policy, found)


def learn(observation: Observation, _policy: Policy) -> Draft:
    """Remember what nodes show when the job looks at them for the first time; forget nodes that it has left."""
    draft, gpus = observation.draft, observation.state.gpus
    if observation.metrics.unavailable:
        return draft
    present = tuple(sorted({view.record.node for view in observation.workers if view.record.node}))
    if present == gpus.nodes:
        return draft
    kept = {key: value for key, value in gpus.values.items() if key.split("/", 1)[0] in present}
    fresh = {v.key: v.value for v in observation.metrics.gpu if v.node in present and v.node not in gpus.nodes}
    return draft.with_gpus(nodes=present, values={**kept, **fresh})


def _reported(observation: Observation) -> Iterator[GpuFault]:
    for fault in observation.faults_of(FaultKind.GPU_ERROR):
        view = observation.worker(fault.worker)
        node = view.record.node if view is not None else ""
        workers = (fault.worker,) if view is not None else ()
        yield GpuFault(node, "", _xid_words(fault.xid), fault.xid in FATAL, workers, fault=fault)


def _measured(observation: Observation) -> Iterator[GpuFault]:
    state = observation.state
    for value in observation.metrics.gpu:
        seen = state.gpus.values.get(value.key, 0.0)
        news = value.value != seen if value.metric == XID else value.value > seen
        if value.node not in state.gpus.nodes or not news:
            continue
        workers = tuple(v.name for v in observation.workers if v.record.node == value.node and not v.record.leaving)
        if workers:
            yield GpuFault(value.node, value.gpu, _words(value), _fatal(value), workers, value=value)


def _decide(observation: Observation, policy: Policy, found: GpuFault) -> Decision:
    worker = found.workers[0] if found.workers else None
    member = next((m for m in observation.plan.members if m.worker == worker), None)
    choice = choose_at_standstill((replace_option(observation, policy),))
    actions: tuple[Action, ...] = ()
    if found.fatal and not policy.refusal(Remedy.REPLACE_WORKER):
        actions = tuple(ReplaceWorker(w, found.words, dead=False, disruption=True) for w in found.workers)
    if found.fatal and found.node:
        actions = (*actions, blame.propose(observation, policy, found.node, found.words, found.witness))
    moved = tuple(action.worker for action in actions if isinstance(action, ReplaceWorker))
    where = f"GPU {found.gpu} of node {found.node}" if found.gpu else f"a GPU of {worker}"
    return Decision(
        subject=Subject(Cause.GPU_ERROR, observation.round, gpu=found.identity),
        class_=Class.INFRASTRUCTURE if found.fatal else Class.APPLICATION,
        message=f"{where}: {found.words}" + ("" if found.fatal else "; may come of the application alone"),
        first_sign=observation.now if found.fault is None else found.fault.noticed_at,
        actions=actions,
        remedy=Remedy.REPLACE_WORKER if moved else None,
        remedies=written(choice.prices, choice.chosen) if found.fatal else (),
        evidence=(found.words, *([found.fault.error] if found.fault is not None and found.fault.error else ())),
        rank=None if member is None else member.ranks[0],
        worker=worker,
        node=found.node or None,
        settles=() if found.fault is None else (found.fault.name,),
        gpu_seen=() if found.value is None else (found.value,),
        live=not any(m.worker in moved for m in observation.plan.members),
        last_step=observation.step,
    )


def _words(value: GpuValue) -> str:
    return _xid_words(int(value.value)) if value.metric == XID else COUNTERS.get(value.metric, value.metric)


def _fatal(value: GpuValue) -> bool:
    return int(value.value) in FATAL if value.metric == XID else value.metric in COUNTERS


def _xid_words(xid: int) -> str:
    return f"XID {xid}" + (f" ({FATAL[xid]})" if xid in FATAL else "")
