"""A GPU works, but shows what comes before a fault: its worker moves at the next checkpoint, which loses no step.

What NVML in a worker's pod says, and series that a target may have labelled itself, move the worker and no more. A node
is blamed by series that the platform vouches for alone. Without a warm spare the warning is written down, and acted
upon once there is one. A node from which the job has moved a worker for a warning before is not left again for one: who
comes after it must not go from pod to pod.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from pacekeeper_analysis.diagnose import finding
from pacekeeper_analysis.diagnose.gpu_health import MINUTES, ShownSign, Sign, shown, signs_of
from pacekeeper_analysis.price import Price

from ..api import Cause, Class, Remedy, Witness
from ..decision import Action, Decision, ReplaceWorker
from ..observation import GpuValue, Observation, Policy, WorkerView
from ..state import Incident, Past
from ..subject import Subject
from . import blame
from .pricing import NO_SPARE, SPARE_SECONDS, replace_option, written

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
            decision = _decide(observation, policy, found)
            if _is_news(observation, policy, decision):
                return decision
    return None


def lasts(observation: Observation, incident: Incident) -> bool:
    """Whether the worker of an incident, about which nothing has been done so far, is still warned of. Who has not been
    heard since this operator began may be."""
    view = observation.worker(incident.worker or "")
    if view is None or view.record.leaving:
        return False
    return view.heartbeat is None or not observation.metrics.at or _warned(observation, view) is not None


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


def _is_news(observation: Observation, policy: Policy, decision: Decision) -> bool:
    """It is not written down yet, or something can be done about it now."""
    incidents, name = observation.state.incidents, decision.incident_name(observation.job)
    before = incidents.find(name)
    if before is not None and before.outcome is None:
        return before.applied is None and policy.acts and bool(decision.actions)
    return policy.acts or name not in incidents.recommended


def _decide(observation: Observation, policy: Policy, found: Warned) -> Decision:
    view, words = found.view, found.words
    rank = next((member.ranks[0] for member in observation.plan.members if member.worker == view.name), None)
    seated = rank is not None
    open_ = [i for i in observation.state.incidents.open if i.cause is Cause.GPU_WARNING and i.worker == view.name]
    option = replace_option(observation, policy, refused=_why_not_move(observation, view, seated=seated))
    if not seated and option.refused == NO_SPARE:
        option = replace(option, refused="")  # who trains nothing needs none in its place
    cost = observation.restart_seconds + SPARE_SECONDS if seated else 0.0  # it waits for a checkpoint: no step is lost
    reason = option.refused or "the fault that is to be expected costs more"
    price = Price(replace(option, cost_seconds=cost), math.inf, not option.refused, reason)
    actions: tuple[Action, ...] = ()
    if price.due:
        moved = ReplaceWorker(view.name, words, dead=False, disruption=True, patient=seated)
        against = "; ".join(sign.words for sign in found.vouched)
        blamed = blame.propose(observation, policy, view.record.node, against, Witness.GPU_SERIES)
        actions = (moved, blamed) if found.vouched else (moved,)
    return Decision(
        subject=_subject(observation, view),
        class_=Class.INFRASTRUCTURE,
        message=f"a GPU of {view.name} is expected to fail: {words}",
        first_sign=open_[0].first_sign if open_ else observation.now,
        actions=actions,
        remedy=Remedy.REPLACE_WORKER if actions else None,
        remedies=written((price,), price if price.due else None),
        evidence=tuple(dict.fromkeys(sign.words for sign in found.signs)),
        rank=rank,
        worker=view.name,
        node=view.record.node or None,
        continues=open_[0].name if open_ else "",
        live=True,
        last_step=observation.step,
        finding=_finding(found),
    )


def _finding(found: Warned) -> finding.Finding:
    witnesses = tuple(dict.fromkeys(finding.Witness(finding.WitnessKind.GPU, sign.words) for sign in found.signs))
    return finding.Finding(finding.FaultClass.HARDWARE, f"a GPU of {found.view.name}", witnesses, advice=ADVICE)


def _subject(observation: Observation, view: WorkerView) -> Subject:
    """A warning that was over and comes again is another one."""
    subject = Subject(Cause.GPU_WARNING, observation.round, worker=view.name)
    over = (subject.number_of(name, observation.job) for name in observation.state.incidents.closed)
    return replace(subject, number=1 + max(over, default=0))


def _why_not_move(observation: Observation, view: WorkerView, *, seated: bool) -> str:
    """Why this worker stays for now; "": nothing stands against its move."""
    node, incidents = view.record.node, observation.state.incidents
    known: tuple[Incident | Past, ...] = (*incidents.past, *incidents.open)
    left = any(i.cause is Cause.GPU_WARNING and i.node == node and i.worker != view.name for i in known)
    if node and left:
        return f"another worker was on {node} when such a warning came: the node is to be looked at"
    return NO_SPARE if seated and not _spare_is_free(observation) else ""


def _spare_is_free(observation: Observation) -> bool:
    """More of them are warm, and not warned of, than are already waited for."""
    warm = sum(spare.warm and _warned(observation, spare) is None for spare in observation.spares)
    return warm > sum(bool(member.record.leaving) for member in observation.members)
