"""Invariants of nodes: operators change a node only with a witness, and leave alone what others have set on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from pacekeeper_operator.api.formats import parse_time
from pacekeeper_operator.api.names import FIELD_MANAGER_CORDON, TAINT_QUARANTINE
from pacekeeper_operator.api.node_quarantine import Witness
from pacekeeper_operator.decide.nodes.node_suspicion import SUSPICION_TTL_SECONDS, count_allowed_nodes
from pacekeeper_operator.decide.nodes.quarantine_usage import SIMULTANEOUS_FAILURE_SECONDS
from pacekeeper_operator.settings import Settings

from ..kubernetes.api.changes import ObjectChange
from ..world import World
from .cluster_history import (
    NEVER_HAPPENED,
    ClusterHistory,
    is_cordoned,
    is_operator_change,
    is_ready,
    is_tainted,
    list_cordon_owners,
)
from .rule import MAX_REQUEST_DELAY_SECONDS, Rule

Object = Mapping[str, Any]
NOT_READY: Object = {}
NODE_NOTICE_SECONDS = 10.0
"""Seconds within which an operator must notice a label or a pause."""


class _ApprovalRule(Rule):
    """Checks an operator's decision to quarantine a node."""

    kinds: ClassVar[tuple[str, ...]] = ("nodequarantines",)

    def check_change(self, change: ObjectChange) -> Iterator[str]:
        previous = change.previous
        if previous is None or change.type != "MODIFIED" or not is_operator_change(change):
            return
        if change.object["spec"].get("approved") and not previous["spec"].get("approved"):
            yield from self.check_approval(change)

    def check_approval(self, change: ObjectChange) -> Iterator[str]:
        raise NotImplementedError

    @property
    def settings(self) -> Settings:
        return Settings(**self.world.settings.operator)


class NodesHaveWitnesses(_ApprovalRule):
    description = "no node is quarantined without a witness"

    def check_approval(self, change: ObjectChange) -> Iterator[str]:
        node, spec = _get_name(change), change.object["spec"]
        long_ago = change.time - SUSPICION_TTL_SECONDS - MAX_REQUEST_DELAY_SECONDS
        gpu_error_at = self.world.prometheus.last_error.get(node, NEVER_HAPPENED)
        if gpu_error_at >= long_ago and any(
            suspicion.get("witness") == Witness.GPU_SERIES for suspicion in spec.get("suspicions", ())
        ):
            return
        unready_at = self.history.last_unready.get(node, NEVER_HAPPENED)
        failed_probe_at = self.history.last_failed_probe.get(spec.get("nodeUID", ""), NEVER_HAPPENED)
        if max(unready_at, failed_probe_at) < long_ago:
            yield f"{node}: it was Ready, no probe on it has failed of its own, and its GPUs have shown nothing new"


class QuarantinesWithinBudget(_ApprovalRule):
    description = "never more quarantines than the budget allows"

    def check_approval(self, change: ObjectChange) -> Iterator[str]:
        node, settings = _get_name(change), self.settings
        others = [
            name for name, body in self.history.quarantines.items() if name != node and body["spec"].get("approved")
        ]
        allowed = count_allowed_nodes(
            self.history.most_nodes, settings.quarantine_max_nodes, settings.quarantine_max_share
        )
        if len(others) >= allowed:
            yield f"{node}, in addition to {', '.join(others)}: {allowed} of {self.history.most_nodes} nodes allowed"


class BreakerLimitsQuarantines(_ApprovalRule):
    description = "no node is quarantined while many fail at once"

    def check_approval(self, change: ObjectChange) -> Iterator[str]:
        last = _get_last_suspicion_time(change.object)
        simultaneous = [
            name
            for name, body in self.history.quarantines.items()
            if body["spec"].get("suspicions")
            and abs(_get_last_suspicion_time(body) - last) <= SIMULTANEOUS_FAILURE_SECONDS
            and _is_blamed(body)
        ]
        if len(simultaneous) >= self.settings.breaker_nodes:
            yield f"{_get_name(change)}, while {', '.join(simultaneous)} are blamed at once"


class MassesAreLeftAlone(_ApprovalRule):
    """A node that returns first, and is healthy, is no evidence against those that still boot."""

    description = "no node is quarantined for being the last of many simultaneous failures to recover"
    kinds = ("nodequarantines", "nodes")

    def __init__(self, world: World, history: ClusterHistory) -> None:
        super().__init__(world, history)
        self._fell: dict[str, float] = {}
        """Node → when it last ceased to be Ready."""
        self._blamed: dict[str, float] = {}
        """Node → when it was first blamed after that."""

    def check_change(self, change: ObjectChange) -> Iterator[str]:
        name = _get_name(change)
        if change.plural == "nodes":
            was_ready = change.previous is not None and is_ready(change.previous)
            if change.type == "DELETED":
                self._fell.pop(name, None)
            elif was_ready and not is_ready(change.object):
                self._fell[name] = change.time
                self._blamed.pop(name, None)
            return
        if change.type == "DELETED":
            self._blamed.pop(name, None)
        elif _is_strong(change.object):
            self._blamed.setdefault(name, change.time)
        yield from super().check_change(change)

    def check_approval(self, change: ObjectChange) -> Iterator[str]:
        node = _get_name(change)
        fell_at, blamed_at = self._fell.get(node, NEVER_HAPPENED), self._blamed.get(node, NEVER_HAPPENED)
        gpu_error_at = self.world.prometheus.last_error.get(node, NEVER_HAPPENED)
        if is_ready(self.history.nodes.get(node, NOT_READY)) or gpu_error_at >= fell_at:
            return
        others = [
            name
            for name, at in self._blamed.items()
            if name != node
            and abs(at - blamed_at) <= SIMULTANEOUS_FAILURE_SECONDS
            and abs(self._fell.get(name, NEVER_HAPPENED) - fell_at) <= SIMULTANEOUS_FAILURE_SECONDS
        ]
        if len(others) + 1 >= self.settings.breaker_nodes:
            yield f"{node}, which went with {', '.join(others)}"


class NoApprovalsWhilePaused(_ApprovalRule):
    description = "no node is quarantined while remedies are paused"

    def check_approval(self, change: ObjectChange) -> Iterator[str]:
        if change.time - self.history.paused_since > NODE_NOTICE_SECONDS:
            yield _get_name(change)


class _MarkRule(Rule):
    """Checks an operator's changes of a node."""

    kinds = ("nodes",)

    def check_change(self, change: ObjectChange) -> Iterator[str]:
        if change.previous is not None and change.type == "MODIFIED" and is_operator_change(change):
            yield from self.check_node_change(change, change.previous)

    def check_node_change(self, change: ObjectChange, previous: Object) -> Iterator[str]:
        raise NotImplementedError


class MarksFollowQuarantines(_MarkRule):
    description = "a node is marked only under its own approved NodeQuarantine"

    def check_node_change(self, change: ObjectChange, previous: Object) -> Iterator[str]:
        if not _is_newly_marked(previous, change.object):
            return
        name = _get_name(change)
        if self.history.last_approved.get(name, NEVER_HAPPENED) < change.time - MAX_REQUEST_DELAY_SECONDS:
            yield name
            return
        body = self.history.quarantines.get(name)
        expected_uid = body and (body["spec"].get("nodeUID") or body.get("status", {}).get("nodeUID"))
        if expected_uid and expected_uid != change.object["metadata"]["uid"]:
            yield f"{name}, but another node of that name is meant"


class OptedOutNodesAreUnmarked(_MarkRule):
    description = "a node with the opt-out label is never marked"

    def check_node_change(self, change: ObjectChange, previous: Object) -> Iterator[str]:
        since = self.history.opted_out.get(_get_name(change))
        if (
            since is not None
            and change.time - since > NODE_NOTICE_SECONDS
            and _is_newly_marked(previous, change.object)
        ):
            yield _get_name(change)


class ForeignMarksAreUntouched(_MarkRule):
    description = "others' cordons and taints are untouched"

    def check_node_change(self, change: ObjectChange, previous: Object) -> Iterator[str]:
        name, current = _get_name(change), change.object
        if _list_foreign_taints(previous) != _list_foreign_taints(current):
            yield f"{name}: taints {_list_foreign_taints(previous)} become {_list_foreign_taints(current)}"
        others = [manager for manager in list_cordon_owners(previous) if manager != FIELD_MANAGER_CORDON]
        if others and previous["spec"].get("unschedulable") and not current["spec"].get("unschedulable"):
            yield f"{name}: the cordon of {', '.join(others)} is taken away"
        for part in ("labels", "annotations", "finalizers"):
            if previous["metadata"].get(part) != current["metadata"].get(part):
                yield f"{name}: its {part} are changed"


class ReleasedNodesAreClean(Rule):
    description = "a NodeQuarantine is deleted once its node has no marks of it"
    kinds = ("nodequarantines",)

    def check_change(self, change: ObjectChange) -> Iterator[str]:
        if change.type != "DELETED" or not is_operator_change(change):
            return
        node = self.history.nodes.get(_get_name(change))
        if node is not None and (is_tainted(node) or is_cordoned(node)):
            yield _get_name(change)


def _get_name(change: ObjectChange) -> str:
    name: str = change.object["metadata"]["name"]
    return name


def _is_newly_marked(previous: Object, current: Object) -> bool:
    return (is_tainted(current) and not is_tainted(previous)) or (is_cordoned(current) and not is_cordoned(previous))


def _list_foreign_taints(node: Object) -> list[Object]:
    return [taint for taint in node["spec"].get("taints", ()) if taint["key"] != TAINT_QUARANTINE]


def _get_last_suspicion_time(quarantine: Object) -> float:
    return max(
        (parse_time(suspicion["at"]) for suspicion in quarantine["spec"].get("suspicions", ())), default=NEVER_HAPPENED
    )


def _is_strong(quarantine: Object) -> bool:
    """Return whether there is one strong sign, or signs from two namespaces."""
    suspicions = quarantine["spec"].get("suspicions", ())
    return len(suspicions) > 1 or any(not suspicion.get("weak") for suspicion in suspicions)


def _is_blamed(quarantine: Object) -> bool:
    """Return whether the node is blamed and no probe has cleared it."""
    probes = quarantine.get("status", {}).get("probes", ())
    is_released = (
        quarantine.get("status", {}).get("phase") == "Released" or "deletionTimestamp" in quarantine["metadata"]
    )
    return _is_strong(quarantine) and not is_released and not any(probe.get("passed") for probe in probes)


NODE_RULES: tuple[type[Rule], ...] = (
    NodesHaveWitnesses,
    QuarantinesWithinBudget,
    BreakerLimitsQuarantines,
    MassesAreLeftAlone,
    NoApprovalsWhilePaused,
    MarksFollowQuarantines,
    OptedOutNodesAreUnmarked,
    ForeignMarksAreUntouched,
    ReleasedNodesAreClean,
)
