"""A worker answers nobody any more: neither its peers nor the operator reach it, although its pod seems to run."""

from __future__ import annotations

from pacekeeper_analysis.reports import FaultKind

from ..api import Cause, Class, Remedy
from ..decision import Action, Decision, ReplaceWorker
from ..observation import Observation, Policy, WorkerView
from ..subject import Subject
from . import quarantine
from .pricing import choose_at_standstill, replace_lost_option, written

SILENT_SECONDS = 10.0
"""Without peers who could say so (they may be lost too), so long a silence stands for their word."""


def suspected(observation: Observation) -> bool:
    """Whether there is a reason to probe the members at all."""
    if observation.faults_of(FaultKind.STALLED, FaultKind.ROUND_FAILED):
        return True
    return any(view.alive and view.silent_seconds > SILENT_SECONDS for view in observation.members)


def check(observation: Observation, policy: Policy) -> Decision | None:
    stalls = observation.faults_of(FaultKind.STALLED, FaultKind.ROUND_FAILED)
    named = {address for fault in stalls for address in fault.unreachable}
    lost = [view for view in observation.members if view.usable and view.reachable is False]
    if len(lost) == len(observation.plan.members) > 1:
        return None  # it is the operator that reaches nobody
    for view in lost:
        silent = observation.operator_age > policy.grace_after_start and view.silent_seconds > SILENT_SECONDS
        if (view.pod is not None and view.pod.address in named) or silent:
            return _replace(observation, policy, view)
    return None


def _replace(observation: Observation, policy: Policy, view: WorkerView) -> Decision:
    node = view.pod.node if view.pod is not None else view.record.node
    node_lost = view.node_reachable is False
    stalls = observation.faults_of(FaultKind.STALLED, FaultKind.ROUND_FAILED)
    words = f"node {node} is lost" if node_lost else "nobody reaches it, although its node answers"
    choice = choose_at_standstill((replace_lost_option(observation, policy),))
    actions: tuple[Action, ...] = ()
    if not policy.refusal(Remedy.REPLACE_WORKER):
        actions = (ReplaceWorker(view.name, words, dead=True, force=node_lost, disruption=True),)
    if node_lost:
        reason = "neither its workers nor its kubelet answer"
        actions = (*actions, quarantine.propose(observation, policy, node, reason))
    member = next(member for member in observation.plan.members if member.worker == view.name)
    return Decision(
        subject=Subject(Cause.NODE_LOST if node_lost else Cause.WORKER_LOST, observation.round, worker=view.name),
        class_=Class.INFRASTRUCTURE,
        message=f"worker {view.name} (rank {', '.join(map(str, member.ranks))}) is lost: {words}",
        first_sign=min(
            (f.noticed_at - max((s.waiting_seconds for s in f.ranks), default=0.0) for f in stalls),
            default=observation.now - view.silent_seconds,
        ),
        actions=actions,
        remedy=Remedy.REPLACE_WORKER if actions else None,
        remedies=written(choice.prices, choice.chosen),
        evidence=(
            *(f"{fault.worker} cannot reach {', '.join(fault.unreachable)}" for fault in stalls if fault.unreachable),
            f"the operator's probe of {view.name} failed; no word of it for {view.silent_seconds:.1f} s",
        ),
        rank=member.ranks[0],
        worker=view.name,
        node=node or None,
        settles=tuple(fault.name for fault in observation.faults),
        last_step=observation.step,
    )
