"""A worker answers nobody any more, although its pod seems to run.

That the operator does not reach it proves nothing: the operator, or the path to that node, may be cut off while the
ranks train on. Somebody else has to say so too, and nobody may show that it lives: see `_proof`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from pacekeeper_analysis.reports import FaultReport, FaultKind

from ..api import IncidentCause, IncidentClass, Remedy, Witness
from ..decision import Action, Decision, ReplaceWorker
from ..observation import RECENT_POLL_SECONDS, Observation, Policy, WorkerView
from ..subject import IncidentKey
from ..words import MAX_LISTED_ITEMS, format_list
from . import blame
from .pricing import choose_remedy_at_standstill, build_replace_lost_option, build_remedy_prices

WORKER_SILENT_SECONDS = 10.0
"""A shorter silence is no reason for anything."""
WORKER_SILENCE_LIMIT_SECONDS = 120.0
"""So long a silence, or that of three steps, is enough where nobody at all shows whether the worker lives. Its node is
not blamed then, and its pod is ended by the kubelet, so that a worker that did live ends before another takes over."""


def needs_reachability_probe(observation: Observation) -> bool:
    """Whether there is a reason to probe the members at all."""
    if _list_complaints(observation):
        return True
    return any(view.alive and view.silent_seconds > WORKER_SILENT_SECONDS for view in observation.members)


def check_lost_nodes(observation: Observation, policy: Policy) -> Decision | None:
    lost = tuple(_find_lost_members(observation, policy))
    if not lost:
        return None
    event = tuple(one for one in lost if one.node_is_lost == lost[0].node_is_lost)
    decision = _build_decision(observation, policy, event)
    # What the peers say is about all of them, also those that are judged next.
    settles = tuple(fault.name for fault in observation.faults) if len(event) == len(lost) else ()
    return replace(decision, settles=settles)


@dataclass(frozen=True)
class _LostMember:
    """A worker that is lost. `blamed`: its node is lost with it; `down`: that node is not Ready."""

    view: WorkerView
    proof: str
    node_is_lost: bool
    node_is_not_ready: bool

    @property
    def node_is_silent(self) -> bool:
        return self.view.node_reachable is False

    @property
    def reason(self) -> str:
        if self.view.reachable is not False:
            return self.proof
        if self.node_is_lost:
            return f"node {self.view.node} is lost: {self.proof}"
        return f"the operator does not reach it, and {self.proof}"


def _find_lost_members(observation: Observation, policy: Policy) -> Iterator[_LostMember]:
    signs = _LivenessSigns(observation)
    for view in observation.members:
        proof = ""
        if view.usable:
            proof = _find_loss_proof(signs, policy, view) if view.reachable is False else _find_abandonment_proof(signs, policy, view)
        if proof:
            down, silent = signs.is_node_down(view), view.node_reachable is False
            many = silent and (signs.is_reported_unreachable(view) or signs.is_multi_node_failure)
            yield _LostMember(view, proof, down or many, down)


def list_unreachable_members(observation: Observation) -> tuple[WorkerView, ...]:
    """Members that the operator neither hears nor reaches."""
    return tuple(v for v in observation.members if v.reachable is False and v.silent_seconds > WORKER_SILENT_SECONDS)


def compute_silent_seconds(observation: Observation, view: WorkerView) -> float:
    """Since the last sign that the worker lives: its own word, a step of its peers, who take none without it for long,
    or Prometheus' look at its steps."""
    return _LivenessSigns(observation).compute_silent_seconds(view)


@dataclass(frozen=True)
class _LivenessSigns:
    """What members, peers and nodes together show: worked out once, for a look at any number of workers."""

    observation: Observation

    def is_reported_unreachable(self, view: WorkerView) -> bool:
        """Whether a peer does not reach it either."""
        return bool(self._reporters_by_address.get("" if view.pod is None else view.pod.address, frozenset()) - {view.name})

    def is_node_down(self, view: WorkerView) -> bool:
        """By the word of the API server, which counts while it hears of any node at all."""
        node = self.observation.cluster_view.nodes.get(view.node)
        return self._has_ready_node and (node is None or not node.ready)

    def compute_silent_seconds(self, view: WorkerView) -> float:
        peers = next((seconds for seconds, name in self._last_steps if name != view.name), math.inf)
        return min(view.silent_seconds, _compute_scraped_seconds(self.observation, view), peers)

    @cached_property
    def complaints(self) -> tuple[FaultReport, ...]:
        return _list_complaints(self.observation)

    @cached_property
    def is_operator_cut_off(self) -> bool:
        """It is the operator that reaches nobody: of no job a worker, nor any node. That it reaches the API server
        tells nothing of its way to them."""
        workers = self.observation.workers
        answers = any(view.reachable or view.node_reachable for view in workers)
        speaks = any(view.heartbeat is not None and view.silent_seconds < RECENT_POLL_SECONDS for view in workers)
        return not (answers or speaks or self.observation.cluster_view.reached_elsewhere)

    @cached_property
    def is_multi_node_failure(self) -> bool:
        """Several nodes at once, which no single broken path explains."""
        silent = list_unreachable_members(self.observation)
        down = {view.node for view in silent if view.node_reachable is False}
        return len(down) > 1 and len(silent) == len(self.observation.plan.members)

    @cached_property
    def _reporters_by_address(self) -> Mapping[str, frozenset[str]]:
        """Two workers at most that do not reach an address, by that."""
        found: dict[str, frozenset[str]] = {}
        for fault in self.complaints:
            for address in fault.unreachable:
                known = found.get(address, frozenset())
                found[address] = known if len(known) > 1 else known | {fault.worker}
        return found

    @cached_property
    def _has_ready_node(self) -> bool:
        return any(node.ready for node in self.observation.cluster_view.nodes.values())

    @cached_property
    def _last_steps(self) -> Sequence[tuple[float, str]]:
        """The two members that were heard last to have completed a step, and how long ago that was."""
        return heapq.nsmallest(2, ((view.seconds_since_step, view.name) for view in self.observation.members))


def _find_loss_proof(signs: _LivenessSigns, policy: Policy, view: WorkerView) -> str:
    """Who else says that a worker that the operator does not reach is lost, in words; "": nobody does, so far."""
    if signs.is_reported_unreachable(view):
        return "its peers do not reach it either"
    observation, unheard = signs.observation, signs.compute_silent_seconds(view)
    if observation.operator_age <= policy.grace_after_start or unheard <= WORKER_SILENT_SECONDS:
        return ""
    if signs.is_node_down(view):
        return "its node is not Ready"
    if signs.is_operator_cut_off:
        return ""
    if signs.complaints:
        return "the job stands still, and nobody hears of it"
    if signs.is_multi_node_failure:
        return "none of the job's workers nor of their nodes answers, and others do"
    patience = _compute_silence_limit(observation)
    return f"there has been no sign of it for {patience:.0f} s" if unheard > patience else ""


def _find_abandonment_proof(signs: _LivenessSigns, policy: Policy, view: WorkerView) -> str:
    """Why a worker is lost whose machine answers: its sidecar has gone, and its kubelet, which would start that again.
    Without peers, whose steps would show it, its launcher has ended its ranks by now. In words; "": it is not lost."""
    patience = _compute_silence_limit(signs.observation)
    if signs.observation.operator_age <= policy.grace_after_start or signs.compute_silent_seconds(view) <= patience:
        return ""
    words = f"its node is not Ready, and there has been no sign of it for {patience:.0f} s"
    return words if signs.is_node_down(view) else ""


def _compute_silence_limit(observation: Observation) -> float:
    return max(WORKER_SILENCE_LIMIT_SECONDS, 3 * observation.step_seconds)


def _list_complaints(observation: Observation) -> tuple[FaultReport, ...]:
    return observation.select_faults(FaultKind.STALLED, FaultKind.ROUND_FAILED)


def _compute_scraped_seconds(observation: Observation, view: WorkerView) -> float:
    """Since Prometheus last saw all ranks of the job, each beyond the steps that the worker has told of itself."""
    metrics, told = observation.metrics, -1 if view.heartbeat is None else view.heartbeat.step
    if metrics.unavailable or metrics.scrape_age is None or (metrics.ranks or 0) < observation.plan.world_size:
        return math.inf
    if metrics.least_step is None or metrics.least_step <= told:
        return math.inf
    return observation.now - metrics.at + metrics.scrape_age


def _build_decision(observation: Observation, policy: Policy, event: Sequence[_LostMember]) -> Decision:
    first = event[0]
    choice = choose_remedy_at_standstill((build_replace_lost_option(observation, policy),))
    cause = IncidentCause.NODE_LOST if first.node_is_lost else IncidentCause.WORKER_LOST
    return Decision(
        incident_key=IncidentKey(cause, observation.round, worker=first.view.name),
        class_=IncidentClass.INFRASTRUCTURE,
        message=_describe_losses(observation, event),
        first_sign=_find_first_sign(observation, first.view),
        actions=(*_build_replacements(policy, event), *_build_quarantine_proposals(observation, policy, event)),
        remedy=Remedy.REPLACE_WORKER if not policy.find_refusal(Remedy.REPLACE_WORKER) else None,
        remedies=build_remedy_prices(choice.prices, choice.chosen),
        evidence=_collect_evidence(observation, event),
        rank=_get_ranks(observation, first.view)[0],
        worker=first.view.name,
        node=first.view.node or None,
        last_step=observation.step,
    )


def _build_replacements(policy: Policy, event: Sequence[_LostMember]) -> Iterator[Action]:
    if policy.find_refusal(Remedy.REPLACE_WORKER):
        return
    for one in event:
        force = one.node_is_lost and one.node_is_silent
        yield ReplaceWorker(one.view.name, one.reason, dead=True, force=force, disruption=True)


def _build_quarantine_proposals(observation: Observation, policy: Policy, event: Sequence[_LostMember]) -> Iterator[Action]:
    for one in {one.view.node: one for one in event if one.node_is_lost}.values():
        witness = Witness.NODE_CONDITION if one.node_is_not_ready else Witness.NONE
        reason = "neither its workers nor its kubelet answer" if one.node_is_silent else "it is not Ready"
        yield blame.propose_quarantine(observation, policy, one.view.node, reason, witness)


def _describe_losses(observation: Observation, event: Sequence[_LostMember]) -> str:
    first = event[0]
    if len(event) > 1:
        names = format_list([one.view.name for one in event])
        return f"{len(event)} workers are lost ({names}); of {first.view.name}: {first.reason}"
    return f"worker {first.view.name} (rank {format_list(_get_ranks(observation, first.view))}) is lost: {first.reason}"


def _get_ranks(observation: Observation, view: WorkerView) -> Sequence[int]:
    return next(member.ranks for member in observation.plan.members if member.worker == view.name)


def _find_first_sign(observation: Observation, view: WorkerView) -> float:
    return min(
        (
            fault.noticed_at - max((state.waiting_seconds for state in fault.ranks), default=0.0)
            for fault in _list_complaints(observation)
        ),
        default=observation.now - compute_silent_seconds(observation, view),
    )


def _collect_evidence(observation: Observation, event: Sequence[_LostMember]) -> tuple[str, ...]:
    complaints = [fault for fault in _list_complaints(observation) if fault.unreachable]
    return (
        *(f"{fault.worker} cannot reach {format_list(fault.unreachable)}" for fault in complaints[:MAX_LISTED_ITEMS]),
        *(_describe_probe(one.view) for one in event[:MAX_LISTED_ITEMS]),
    )


def _describe_probe(view: WorkerView) -> str:
    kubelet = {None: "was not asked", True: "answers", False: "does not answer"}[view.node_reachable]
    return (
        f"the operator's probe of {view.name} failed, and there is no word of it for {view.silent_seconds:.1f} s; "
        f"the kubelet of {view.node} {kubelet}"
    )
