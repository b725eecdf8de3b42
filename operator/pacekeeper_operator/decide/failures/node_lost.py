"""Lost members: a worker no longer responds, although its pod seems to run.

That the operator cannot reach a worker proves nothing: the operator, or its path to that node, may be cut off while the
ranks train on. A second source must confirm the loss, and no source may show that the worker is alive: see
`_find_loss_proof`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from pacekeeper_analysis.protocol.reports import FaultKind, FaultReport

from ...api.incident import IncidentCause, IncidentClass
from ...api.node_quarantine import Witness
from ...api.training_job import Remedy
from ...formatting import MAX_LISTED_ITEMS, format_list
from ...state.cluster_view import RECENT_POLL_SECONDS, WorkerView
from ...state.incident_key import IncidentKey
from ...state.observation import Observation
from ...state.policy import Policy
from ..decision import Action, Decision, ReplaceWorker
from ..nodes import quarantine_proposal
from ..stragglers.pricing import build_remedy_prices, build_replace_lost_option, choose_remedy_at_standstill

WORKER_SILENT_SECONDS = 10.0
"""Seconds of silence that start a reachability probe. A shorter silence has no effect."""
WORKER_SILENCE_LIMIT_SECONDS = 120.0
"""Seconds of silence after which a worker counts as lost if no source shows whether it is alive; or three steps, if
that is longer. Its node is not blamed then. Its kubelet ends its pod, so that a worker that was alive ends before
another takes over."""


def needs_reachability_probe(observation: Observation) -> bool:
    """Return whether to probe the members: some report a stall or a failed round, or some are silent."""
    if _list_complaints(observation):
        return True
    return any(view.alive and view.silent_seconds > WORKER_SILENT_SECONDS for view in observation.members)


def check_lost_nodes(observation: Observation, policy: Policy) -> Decision | None:
    """Replace the members that are proven lost: first all that share the first one's kind of loss."""
    lost = tuple(_find_lost_members(observation, policy))
    if not lost:
        return None
    event = tuple(member for member in lost if member.node_is_lost == lost[0].node_is_lost)
    decision = _build_decision(observation, policy, event)
    # The peers' reports are about all lost members, so they stay open until the last ones are decided on.
    settles = tuple(fault.name for fault in observation.faults) if len(event) == len(lost) else ()
    return replace(decision, settled_faults=settles)


@dataclass(frozen=True)
class _LostMember:
    """A worker that is lost. `node_is_lost`: its node is lost with it."""

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
            proof = (
                _find_loss_proof(signs, policy, view)
                if view.reachable is False
                else _find_abandonment_proof(signs, policy, view)
            )
        if proof:
            down, silent = signs.is_node_down(view), view.node_reachable is False
            corroborated = silent and (signs.is_reported_unreachable(view) or signs.is_multi_node_failure)
            yield _LostMember(view, proof, down or corroborated, down)


def list_unreachable_members(observation: Observation) -> tuple[WorkerView, ...]:
    """Return the members that are silent and that the operator cannot reach."""
    return tuple(v for v in observation.members if v.reachable is False and v.silent_seconds > WORKER_SILENT_SECONDS)


def compute_silent_seconds(observation: Observation, view: WorkerView) -> float:
    """Return the seconds since the last sign that the worker is alive.

    A sign is its own report, a step of its peers (which soon stop without it), or a scrape of its steps by Prometheus.
    """
    return _LivenessSigns(observation).compute_silent_seconds(view)


def is_node_down(observation: Observation, name: str) -> bool:
    """Return whether the API server shows the node as not Ready or gone. It counts only while any node is Ready."""
    nodes = observation.cluster_view.nodes
    node = nodes.get(name)
    return (node is None or not node.ready) and any(node.ready for node in nodes.values())


@dataclass(frozen=True)
class _LivenessSigns:
    """Signs of life from members, peers, and nodes, computed once for any number of workers."""

    observation: Observation

    def is_reported_unreachable(self, view: WorkerView) -> bool:
        """Return whether a peer cannot reach the worker either."""
        return bool(
            self._reporters_by_address.get("" if view.pod is None else view.pod.address, frozenset()) - {view.name}
        )

    def is_node_down(self, view: WorkerView) -> bool:
        return is_node_down(self.observation, view.node)

    def compute_silent_seconds(self, view: WorkerView) -> float:
        peer_seconds = next((seconds for seconds, name in self._last_steps if name != view.name), math.inf)
        return min(view.silent_seconds, _compute_scraped_seconds(self.observation, view), peer_seconds)

    @cached_property
    def complaints(self) -> tuple[FaultReport, ...]:
        return _list_complaints(self.observation)

    @cached_property
    def is_operator_cut_off(self) -> bool:
        """Whether the operator can reach no worker of any job and no node.

        That it reaches the API server does not show that it could reach them.
        """
        workers = self.observation.workers
        reached = any(view.reachable or view.node_reachable for view in workers)
        reported = any(view.heartbeat is not None and view.silent_seconds < RECENT_POLL_SECONDS for view in workers)
        return not (reached or reported or self.observation.cluster_view.reached_elsewhere)

    @cached_property
    def is_multi_node_failure(self) -> bool:
        """Whether all members, on several nodes, are lost at once: no single broken path explains this."""
        silent = list_unreachable_members(self.observation)
        down = {view.node for view in silent if view.node_reachable is False}
        return len(down) > 1 and len(silent) == len(self.observation.plan.members)

    @cached_property
    def _reporters_by_address(self) -> Mapping[str, frozenset[str]]:
        """Address → up to two workers that cannot reach it."""
        reporters: dict[str, frozenset[str]] = {}
        for fault in self.complaints:
            for address in fault.unreachable:
                workers = reporters.get(address, frozenset())
                reporters[address] = workers if len(workers) > 1 else workers | {fault.worker}
        return reporters

    @cached_property
    def _last_steps(self) -> Sequence[tuple[float, str]]:
        """The two members that completed a step most recently, with the seconds since then."""
        members = ((view.seconds_since_step, view.name) for view in self.observation.members)
        return heapq.nsmallest(2, ((seconds, name) for seconds, name in members if seconds is not None))


def _find_loss_proof(signs: _LivenessSigns, policy: Policy, view: WorkerView) -> str:
    """Return what confirms that a worker the operator cannot reach is lost, in words; "": nothing so far."""
    if signs.is_reported_unreachable(view):
        return "its peers do not reach it either"
    observation, silent_seconds = signs.observation, signs.compute_silent_seconds(view)
    if observation.operator_age <= policy.grace_after_start or silent_seconds <= WORKER_SILENT_SECONDS:
        return ""
    if signs.is_node_down(view):
        return "its node is not Ready"
    if signs.is_operator_cut_off:
        return ""
    if signs.complaints:
        return "the job stands still, and there is no sign of the worker"
    if signs.is_multi_node_failure:
        return "none of the job's workers or their nodes responds, and others do"
    limit_seconds = _compute_silence_limit(observation)
    return f"there has been no sign of it for {limit_seconds:.0f} s" if silent_seconds > limit_seconds else ""


def _find_abandonment_proof(signs: _LivenessSigns, policy: Policy, view: WorkerView) -> str:
    """Return why a worker is lost although its machine responds, in words; "": it is not lost.

    Its sidecar is gone, and so is the kubelet that would restart the sidecar. Steps of its peers would show that it is
    alive; without them, its launcher has ended its ranks by now.
    """
    limit_seconds = _compute_silence_limit(signs.observation)
    if (
        signs.observation.operator_age <= policy.grace_after_start
        or signs.compute_silent_seconds(view) <= limit_seconds
    ):
        return ""
    proof = f"its node is not Ready, and there has been no sign of it for {limit_seconds:.0f} s"
    return proof if signs.is_node_down(view) else ""


def _compute_silence_limit(observation: Observation) -> float:
    return max(WORKER_SILENCE_LIMIT_SECONDS, 3 * (observation.progress.step_seconds or 0.0))


def _list_complaints(observation: Observation) -> tuple[FaultReport, ...]:
    return observation.select_faults(FaultKind.STALLED, FaultKind.ROUND_FAILED)


def _compute_scraped_seconds(observation: Observation, view: WorkerView) -> float:
    """Return the seconds since Prometheus last scraped all ranks of the job beyond the step that the worker reported.

    Infinity: Prometheus has no such sample.
    """
    metrics, reported_step = observation.metrics, None if view.heartbeat is None else view.heartbeat.progress.step
    if (
        metrics.prometheus_error
        or metrics.scrape_age is None
        or metrics.queried_at is None
        or (metrics.reporting_ranks or 0) < observation.plan.world_size
    ):
        return math.inf
    if metrics.min_step is None or (reported_step is not None and metrics.min_step <= reported_step):
        return math.inf
    return observation.now - metrics.queried_at + metrics.scrape_age


def _build_decision(observation: Observation, policy: Policy, event: Sequence[_LostMember]) -> Decision:
    first = event[0]
    choice = choose_remedy_at_standstill((build_replace_lost_option(observation, policy),))
    cause = IncidentCause.NODE_LOST if first.node_is_lost else IncidentCause.WORKER_LOST
    return Decision(
        incident_key=IncidentKey(cause, observation.progress.round, worker=first.view.name),
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
        last_step=observation.progress.step,
    )


def _build_replacements(policy: Policy, event: Sequence[_LostMember]) -> Iterator[Action]:
    if policy.find_refusal(Remedy.REPLACE_WORKER):
        return
    for member in event:
        force = member.node_is_lost and member.node_is_silent
        yield ReplaceWorker(member.view.name, member.reason, dead=True, force=force, disruption=True)


def _build_quarantine_proposals(
    observation: Observation, policy: Policy, event: Sequence[_LostMember]
) -> Iterator[Action]:
    for member in {member.view.node: member for member in event if member.node_is_lost}.values():
        witness = Witness.NODE_CONDITION if member.node_is_not_ready else Witness.NONE
        reason = "neither its workers nor its kubelet answer" if member.node_is_silent else "it is not Ready"
        yield quarantine_proposal.propose_quarantine(observation, policy, member.view.node, reason, witness)


def _describe_losses(observation: Observation, event: Sequence[_LostMember]) -> str:
    first = event[0]
    if len(event) > 1:
        names = format_list([member.view.name for member in event])
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
        *(_describe_probe(member.view) for member in event[:MAX_LISTED_ITEMS]),
    )


def _describe_probe(view: WorkerView) -> str:
    kubelet = {None: "was not probed", True: "answers", False: "does not answer"}[view.node_reachable]
    return (
        f"the operator's probe of {view.name} failed, and it has not reported for {view.silent_seconds:.1f} s; "
        f"the kubelet of {view.node} {kubelet}"
    )
