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

from pacekeeper_analysis.reports import Fault, FaultKind

from ..api import Cause, Class, Remedy, Witness
from ..decision import Action, Decision, ReplaceWorker
from ..observation import HEARD_SECONDS, Observation, Policy, WorkerView
from ..subject import Subject
from ..words import NAMED, listed
from . import blame
from .pricing import choose_at_standstill, replace_lost_option, written

SILENT_SECONDS = 10.0
"""A shorter silence is no reason for anything."""
PATIENCE_SECONDS = 120.0
"""So long a silence, or that of three steps, is enough where nobody at all shows whether the worker lives. Its node is
not blamed then, and its pod is ended by the kubelet, so that a worker that did live ends before another takes over."""


def suspected(observation: Observation) -> bool:
    """Whether there is a reason to probe the members at all."""
    if _complaints(observation):
        return True
    return any(view.alive and view.silent_seconds > SILENT_SECONDS for view in observation.members)


def check(observation: Observation, policy: Policy) -> Decision | None:
    lost = tuple(_lost(observation, policy))
    if not lost:
        return None
    event = tuple(one for one in lost if one.blamed == lost[0].blamed)
    decision = _replace(observation, policy, event)
    # What the peers say is about all of them, also those that are judged next.
    settles = tuple(fault.name for fault in observation.faults) if len(event) == len(lost) else ()
    return replace(decision, settles=settles)


@dataclass(frozen=True)
class _Lost:
    """A worker that is lost. `blamed`: its node is lost with it; `down`: that node is not Ready."""

    view: WorkerView
    proof: str
    blamed: bool
    down: bool

    @property
    def node_is_silent(self) -> bool:
        return self.view.node_reachable is False

    @property
    def words(self) -> str:
        if self.view.reachable is not False:
            return self.proof
        if self.blamed:
            return f"node {self.view.node} is lost: {self.proof}"
        return f"the operator does not reach it, and {self.proof}"


def _lost(observation: Observation, policy: Policy) -> Iterator[_Lost]:
    signs = _Signs(observation)
    for view in observation.members:
        proof = ""
        if view.usable:
            proof = _proof(signs, policy, view) if view.reachable is False else _forsaken(signs, policy, view)
        if proof:
            down, silent = signs.node_is_down(view), view.node_reachable is False
            many = silent and (signs.named(view) or signs.fails_as_a_whole)
            yield _Lost(view, proof, down or many, down)


def unreached(observation: Observation) -> tuple[WorkerView, ...]:
    """Members that the operator neither hears nor reaches."""
    return tuple(v for v in observation.members if v.reachable is False and v.silent_seconds > SILENT_SECONDS)


def unheard_seconds(observation: Observation, view: WorkerView) -> float:
    """Since the last sign that the worker lives: its own word, a step of its peers, who take none without it for long,
    or Prometheus' look at its steps."""
    return _Signs(observation).unheard_seconds(view)


@dataclass(frozen=True)
class _Signs:
    """What members, peers and nodes together show: worked out once, for a look at any number of workers."""

    observation: Observation

    def named(self, view: WorkerView) -> bool:
        """Whether a peer does not reach it either."""
        return bool(self._namers.get("" if view.pod is None else view.pod.address, frozenset()) - {view.name})

    def node_is_down(self, view: WorkerView) -> bool:
        """By the word of the API server, which counts while it hears of any node at all."""
        node = self.observation.surroundings.nodes.get(view.node)
        return self._hears_of_nodes and (node is None or not node.ready)

    def unheard_seconds(self, view: WorkerView) -> float:
        peers = next((seconds for seconds, name in self._last_steps if name != view.name), math.inf)
        return min(view.silent_seconds, _scraped_seconds(self.observation, view), peers)

    @cached_property
    def complaints(self) -> tuple[Fault, ...]:
        return _complaints(self.observation)

    @cached_property
    def cut_off(self) -> bool:
        """It is the operator that reaches nobody: of no job a worker, nor any node. That it reaches the API server
        tells nothing of its way to them."""
        workers = self.observation.workers
        answers = any(view.reachable or view.node_reachable for view in workers)
        speaks = any(view.heartbeat is not None and view.silent_seconds < HEARD_SECONDS for view in workers)
        return not (answers or speaks or self.observation.surroundings.reached_elsewhere)

    @cached_property
    def fails_as_a_whole(self) -> bool:
        """Several nodes at once, which no single broken path explains."""
        silent = unreached(self.observation)
        down = {view.node for view in silent if view.node_reachable is False}
        return len(down) > 1 and len(silent) == len(self.observation.plan.members)

    @cached_property
    def _namers(self) -> Mapping[str, frozenset[str]]:
        """Two workers at most that do not reach an address, by that."""
        found: dict[str, frozenset[str]] = {}
        for fault in self.complaints:
            for address in fault.unreachable:
                known = found.get(address, frozenset())
                found[address] = known if len(known) > 1 else known | {fault.worker}
        return found

    @cached_property
    def _hears_of_nodes(self) -> bool:
        return any(node.ready for node in self.observation.surroundings.nodes.values())

    @cached_property
    def _last_steps(self) -> Sequence[tuple[float, str]]:
        """The two members that were heard last to have completed a step, and how long ago that was."""
        return heapq.nsmallest(2, ((view.stepped_seconds, view.name) for view in self.observation.members))


def _proof(signs: _Signs, policy: Policy, view: WorkerView) -> str:
    """Who else says that a worker that the operator does not reach is lost, in words; "": nobody does, so far."""
    if signs.named(view):
        return "its peers do not reach it either"
    observation, unheard = signs.observation, signs.unheard_seconds(view)
    if observation.operator_age <= policy.grace_after_start or unheard <= SILENT_SECONDS:
        return ""
    if signs.node_is_down(view):
        return "its node is not Ready"
    if signs.cut_off:
        return ""
    if signs.complaints:
        return "the job stands still, and nobody hears of it"
    if signs.fails_as_a_whole:
        return "none of the job's workers nor of their nodes answers, and others do"
    patience = _patience(observation)
    return f"there has been no sign of it for {patience:.0f} s" if unheard > patience else ""


def _forsaken(signs: _Signs, policy: Policy, view: WorkerView) -> str:
    """Why a worker is lost whose machine answers: its sidecar has gone, and its kubelet, which would start that again.
    Without peers, whose steps would show it, its launcher has ended its ranks by now. In words; "": it is not lost."""
    patience = _patience(signs.observation)
    if signs.observation.operator_age <= policy.grace_after_start or signs.unheard_seconds(view) <= patience:
        return ""
    words = f"its node is not Ready, and there has been no sign of it for {patience:.0f} s"
    return words if signs.node_is_down(view) else ""


def _patience(observation: Observation) -> float:
    return max(PATIENCE_SECONDS, 3 * observation.step_seconds)


def _complaints(observation: Observation) -> tuple[Fault, ...]:
    return observation.faults_of(FaultKind.STALLED, FaultKind.ROUND_FAILED)


def _scraped_seconds(observation: Observation, view: WorkerView) -> float:
    """Since Prometheus last saw all ranks of the job, each beyond the steps that the worker has told of itself."""
    metrics, told = observation.metrics, -1 if view.heartbeat is None else view.heartbeat.step
    if metrics.unavailable or metrics.scrape_age is None or (metrics.ranks or 0) < observation.plan.world_size:
        return math.inf
    if metrics.least_step is None or metrics.least_step <= told:
        return math.inf
    return observation.now - metrics.at + metrics.scrape_age


def _replace(observation: Observation, policy: Policy, event: Sequence[_Lost]) -> Decision:
    first = event[0]
    choice = choose_at_standstill((replace_lost_option(observation, policy),))
    cause = Cause.NODE_LOST if first.blamed else Cause.WORKER_LOST
    return Decision(
        subject=Subject(cause, observation.round, worker=first.view.name),
        class_=Class.INFRASTRUCTURE,
        message=_say(observation, event),
        first_sign=_first_sign(observation, first.view),
        actions=(*_replacements(policy, event), *_suspicions(observation, policy, event)),
        remedy=Remedy.REPLACE_WORKER if not policy.refusal(Remedy.REPLACE_WORKER) else None,
        remedies=written(choice.prices, choice.chosen),
        evidence=_evidence(observation, event),
        rank=_ranks(observation, first.view)[0],
        worker=first.view.name,
        node=first.view.node or None,
        last_step=observation.step,
    )


def _replacements(policy: Policy, event: Sequence[_Lost]) -> Iterator[Action]:
    if policy.refusal(Remedy.REPLACE_WORKER):
        return
    for one in event:
        force = one.blamed and one.node_is_silent
        yield ReplaceWorker(one.view.name, one.words, dead=True, force=force, disruption=True)


def _suspicions(observation: Observation, policy: Policy, event: Sequence[_Lost]) -> Iterator[Action]:
    for one in {one.view.node: one for one in event if one.blamed}.values():
        witness = Witness.NODE_CONDITION if one.down else Witness.NONE
        reason = "neither its workers nor its kubelet answer" if one.node_is_silent else "it is not Ready"
        yield blame.propose(observation, policy, one.view.node, reason, witness)


def _say(observation: Observation, event: Sequence[_Lost]) -> str:
    first = event[0]
    if len(event) > 1:
        names = listed([one.view.name for one in event])
        return f"{len(event)} workers are lost ({names}); of {first.view.name}: {first.words}"
    return f"worker {first.view.name} (rank {listed(_ranks(observation, first.view))}) is lost: {first.words}"


def _ranks(observation: Observation, view: WorkerView) -> Sequence[int]:
    return next(member.ranks for member in observation.plan.members if member.worker == view.name)


def _first_sign(observation: Observation, view: WorkerView) -> float:
    return min(
        (
            fault.noticed_at - max((state.waiting_seconds for state in fault.ranks), default=0.0)
            for fault in _complaints(observation)
        ),
        default=observation.now - unheard_seconds(observation, view),
    )


def _evidence(observation: Observation, event: Sequence[_Lost]) -> tuple[str, ...]:
    complaints = [fault for fault in _complaints(observation) if fault.unreachable]
    return (
        *(f"{fault.worker} cannot reach {listed(fault.unreachable)}" for fault in complaints[:NAMED]),
        *(_probed(one.view) for one in event[:NAMED]),
    )


def _probed(view: WorkerView) -> str:
    kubelet = {None: "was not asked", True: "answers", False: "does not answer"}[view.node_reachable]
    return (
        f"the operator's probe of {view.name} failed, and there is no word of it for {view.silent_seconds:.1f} s; "
        f"the kubelet of {view.node} {kubelet}"
    )
