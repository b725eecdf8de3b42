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
from pacekeeper_analysis.diagnose.gpu_health import MINUTES, ShownSign, Sign, shown, signs_of

from ..api import Cause, Class, Witness
from ..decision import Decision
from ..observation import GpuValue, Observation, Policy, WorkerView
from ..state import Incident, Past
from . import blame, move
from .move import Move

ADVICE = "reset the GPU once its node is free, and have it looked at where the signs come again"


@dataclass(frozen=True)
class Warned:
    """Signs of one worker's GPUs that come before a fault."""

    view: WorkerView
    signs: tuple[ShownSign, ...]
    vouched: tuple[ShownSign, ...]  # those of them that are a witness against the node

    @property
    def words(self) -> str:
        return "; ".join(dict.fromkeys(sign.words for sign in self.signs))


def check(observation: Observation, policy: Policy) -> Decision | None:
    """Spares go first: a worker must not be moved to one that is warned of, too."""
    nodes = {value.node for value in observation.metrics.gpu_signs}
    for view in (*observation.spares, *observation.members):
        shows = view.record.node in nodes or (view.heartbeat is not None and any(g.signs for g in view.heartbeat.gpus))
        found = _warned(observation, view) if shows and not view.record.leaving else None
        if found is not None:
            decision = move.decide(
                observation, policy, _move(observation, policy, found), partial(is_warned, observation)
            )
            if decision is not None:
                return decision
    return None


def is_warned(observation: Observation, view: WorkerView) -> bool:
    return _warned(observation, view) is not None


def lasts(observation: Observation, incident: Incident) -> bool:
    """Whether the worker of an incident, about which nothing has been done so far, is still warned of. Who has not been
    heard since this operator began may be."""
    view = observation.worker(incident.worker or "")
    if view is None or view.record.leaving:
        return False
    return view.heartbeat is None or not observation.metrics.at or is_warned(observation, view)


def words_of(observation: Observation, view: WorkerView | None) -> tuple[str, ...]:
    """What a worker's GPUs show, warnings and witnesses for slowness alike."""
    return () if view is None else tuple(dict.fromkeys(sign.words for sign in _signs(observation, view)))


def _signs(observation: Observation, view: WorkerView) -> Iterator[ShownSign]:
    if view.heartbeat is not None:
        yield from signs_of(view.heartbeat.gpus)
    yield from (_shown(value) for value in _series(observation, view))


def _warned(observation: Observation, view: WorkerView) -> Warned | None:
    found = tuple(sign for sign in _signs(observation, view) if sign.meaning.warns)
    if not found:
        return None
    vouched = tuple(sign for sign in (_shown(v) for v in _series(observation, view) if v.vouched) if sign.meaning.warns)
    return Warned(view, found, vouched)


def _series(observation: Observation, view: WorkerView) -> Iterator[GpuValue]:
    """Of the worker's own GPUs, where both sides name them; else of all GPUs of its node."""
    own = {health.gpu for health in view.heartbeat.gpus} if view.heartbeat is not None else set()
    for value in observation.metrics.gpu_signs:
        if value.node == view.record.node and (not own or not value.uuid or value.uuid in own):
            yield value


def _shown(value: GpuValue) -> ShownSign:
    sign = Sign(value.metric)
    figure = _FIGURES[sign].format(value.value) if sign in _FIGURES else ""
    return shown(sign, value.uuid or f"GPU {value.gpu} of {value.node}", figure)


_FIGURES = {
    Sign.PCIE_REPLAYS: "{:.0f} in ten minutes",
    Sign.NVLINK_ERRORS: "{:.0f} in ten minutes",
    Sign.THROTTLED: f"in {{:.0f}} of the last {MINUTES} minutes",
    Sign.SLOW_CLOCK: "{:.0f} MHz",
}


def _move(observation: Observation, policy: Policy, found: Warned) -> Move:
    view, words = found.view, found.words
    against = "; ".join(sign.words for sign in found.vouched)
    blamed = blame.propose(observation, policy, view.record.node, against, Witness.GPU_SERIES)
    return Move(
        view=view,
        cause=Cause.GPU_WARNING,
        class_=Class.INFRASTRUCTURE,
        why=words,
        message=f"a GPU of {view.name} is expected to fail: {words}",
        worth="the fault that is to be expected costs more",
        stays=_why_not_move(observation, view),
        evidence=tuple(dict.fromkeys(sign.words for sign in found.signs)),
        finding=_finding(found),
        blames=blamed if found.vouched else None,
    )


def _finding(found: Warned) -> finding.Finding:
    witnesses = tuple(dict.fromkeys(finding.Witness(finding.WitnessKind.GPU, sign.words) for sign in found.signs))
    return finding.Finding(finding.FaultClass.HARDWARE, f"a GPU of {found.view.name}", witnesses, advice=ADVICE)


def _why_not_move(observation: Observation, view: WorkerView) -> str:
    """Why this worker stays for now; "": nothing stands against its move."""
    node, incidents = view.record.node, observation.state.incidents
    known: tuple[Incident | Past, ...] = (*incidents.past, *incidents.open)
    left = any(i.cause is Cause.GPU_WARNING and i.node == node and i.worker != view.name for i in known)
    return (
        f"another worker was on {node} when such a warning came: the node is to be looked at" if node and left else ""
    )
