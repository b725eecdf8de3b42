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

from pacekeeper_analysis.diagnose.gpu_health import XIDS, Origin, xid_blame, xid_words
from pacekeeper_analysis.reports import Fault, FaultKind

from ..api import Cause, Class, Remedy, Witness
from ..decision import Action, Decision, ReplaceWorker
from ..observation import GpuValue, Observation, Policy
from ..state import Draft
from ..subject import Subject
from . import blame
from .pricing import choose_at_standstill, replace_option, written

XID = "DCGM_FI_DEV_XID_ERRORS"
MEMORY_ERRORS = "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL"
COUNTERS: Mapping[str, str] = {
    MEMORY_ERRORS: "uncorrectable memory error",
    "DCGM_FI_DEV_ROW_REMAP_FAILURE": "memory rows could not be remapped",
}
"""Counters of which any rise is fatal for the GPU."""

MOST_NAMED = 5
TOGETHER_SECONDS = 60.0
"""Errors that may come of the application, and come on several nodes within so long, are its own."""


@dataclass(frozen=True)
class GpuFault:
    """One error of one GPU, by whichever way it was heard of."""

    node: str
    gpu: str
    words: str
    blame: Origin
    workers: tuple[str, ...]  # of the job, on this node
    fault: Fault | None = None
    value: GpuValue | None = None

    @property
    def witness(self) -> Witness:
        vouched = self.value is not None and self.value.vouched
        return Witness.GPU_SERIES if vouched and self.blame is Origin.HARDWARE else Witness.NONE

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
        return self.blame in (Origin.HARDWARE, Origin.LINK)


def check(observation: Observation, policy: Policy) -> Decision | None:
    found = next(_reported(observation), None) or next(_measured(observation), None)
    if found is None:
        return None
    alike = _alike_elsewhere(observation, found)
    nodes = {one.node for one in alike} | _nodes_before(observation, _CLASSES[found.blame])
    return _decide(observation, policy, found) if len(nodes) < 2 or not alike else _alike(observation, alike, nodes)


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
        yield GpuFault(node, "", xid_words(fault.xid), xid_blame(fault.xid), workers, fault=fault)


def _measured(observation: Observation) -> Iterator[GpuFault]:
    gpus = observation.state.gpus
    nodes = frozenset(gpus.nodes)
    for value in observation.metrics.gpu:  # of the whole cluster
        if value.node not in nodes:
            continue
        seen = gpus.values.get(value.key, value.before)
        if seen is None:
            continue
        if value.value == seen or (value.metric != XID and value.value < seen):
            continue
        workers = tuple(v.name for v in observation.workers if v.record.node == value.node and not v.record.leaving)
        if workers:
            yield GpuFault(value.node, value.gpu, _words(value), _blame(observation, value), workers, value=value)


def _alike_elsewhere(observation: Observation, found: GpuFault) -> Sequence[GpuFault]:
    """All errors that are heard of now and that no GPU is blamed for, where the first one is such."""
    if found.blame not in (Origin.APPLICATION, Origin.UNKNOWN) or not found.node:
        return ()
    heard = (*_reported(observation), *_measured(observation))
    return [one for one in heard if one.blame is found.blame and one.node]


def _nodes_before(observation: Observation, class_: Class) -> set[str]:
    """On which such errors have come lately."""
    since = observation.now - TOGETHER_SECONDS
    return {
        past.node
        for past in observation.state.incidents.past
        if past.cause is Cause.GPU_ERROR and past.class_ is class_ and past.at > since and past.node
    }


def _alike(observation: Observation, found: Sequence[GpuFault], nodes: Collection[str]) -> Decision:
    """GPUs of several nodes do not break at once: one incident for all of them, and nobody is moved."""
    faults = [one.fault for one in found if one.fault is not None]
    whose = "the application's own" if found[0].blame is Origin.APPLICATION else "of something that they share"
    where = ", ".join(sorted(nodes)[:MOST_NAMED]) + (" …" if len(nodes) > MOST_NAMED else "")
    return Decision(
        subject=Subject(Cause.GPU_ERROR, observation.round, gpu=_SUBJECTS[found[0].blame]),
        class_=_CLASSES[found[0].blame],
        message=f"{found[0].words} on {len(nodes)} nodes at once ({where}): {whose}",
        first_sign=min((fault.noticed_at for fault in faults), default=observation.now),
        evidence=tuple(dict.fromkeys(fault.error for fault in faults if fault.error)),
        node=found[0].node,
        settles=tuple(fault.name for fault in faults),
        gpu_seen=tuple(one.value for one in found if one.value is not None),
        live=True,
        last_step=observation.step,
    )


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
        class_=_CLASSES[found.blame],
        message=f"{where}: {found.words}{_ADVICE[found.blame]}",
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


_ADVICE: Mapping[Origin, str] = {
    Origin.HARDWARE: "",
    Origin.CONTAINED: "; it has cost one process, which is started again",
    Origin.LINK: "; either end of the link may be at fault",
    Origin.APPLICATION: "; may come of the application alone",
    Origin.UNKNOWN: "; whose fault it is, NVIDIA's catalogue of XIDs says, as far as it is known",
}
_CLASSES: Mapping[Origin, Class] = {
    Origin.HARDWARE: Class.INFRASTRUCTURE,
    Origin.CONTAINED: Class.INFRASTRUCTURE,
    Origin.LINK: Class.INFRASTRUCTURE,
    Origin.APPLICATION: Class.APPLICATION,
    Origin.UNKNOWN: Class.UNKNOWN,
}
_SUBJECTS: Mapping[Origin, str] = {Origin.APPLICATION: "the application", Origin.UNKNOWN: "unknown"}


def _words(value: GpuValue) -> str:
    return xid_words(int(value.value)) if value.metric == XID else COUNTERS.get(value.metric, value.metric)


def _blame(observation: Observation, value: GpuValue) -> Origin:
    """A memory error that is counted while the GPU's last XID says that it was contained is that error."""
    if value.metric == XID:
        return xid_blame(int(value.value))
    last = next((v.value for v in observation.metrics.gpu if v.metric == XID and v.gpu_key == value.gpu_key), 0.0)
    contained = value.metric == MEMORY_ERRORS and xid_blame(int(last)) is Origin.CONTAINED
    return Origin.CONTAINED if contained else Origin.HARDWARE
