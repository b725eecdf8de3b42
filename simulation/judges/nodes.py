"""Invariants about nodes: nobody touches one without a witness, and what others have put on it stays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pacekeeper_operator.api import FIELD_MANAGER_CORDON, TAINT_QUARANTINE, Witness, parse_time
from pacekeeper_operator.decide.node_census import SIMULTANEOUS_FAILURE_SECONDS
from pacekeeper_operator.decide.node_suspicion import SUSPICION_TTL_SECONDS, count_allowed_nodes
from pacekeeper_operator.settings import Settings

from .record import NEVER_HAPPENED, ClusterHistory, is_operator_change, list_cordon_owners, is_cordoned, is_ready, is_tainted
from .rules import MAX_REQUEST_DELAY_SECONDS, Rule

if TYPE_CHECKING:
    from ..kubernetes.api_server import ObjectChange
    from ..world import World

Object = Mapping[str, Any]
NOT_READY: Object = {}
NODE_NOTICE_SECONDS = 10.0
"""So late an operator may notice a label or a pause."""


class _ApprovalRule(Rule):
    """Judges an operator's decision to quarantine a node."""

    kinds: ClassVar[tuple[str, ...]] = ("nodequarantines",)

    def check_change(self, change: ObjectChange) -> Iterator[str]:
        before = change.previous
        if before is None or change.type != "MODIFIED_MESSAGE" or not is_operator_change(change):
            return
        if change.object["spec"].get("approved") and not before["spec"].get("approved"):
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
        shown = self.world.prometheus.last_error.get(node, NEVER_HAPPENED)
        if shown >= long_ago and any(sign.get("witness") == Witness.GPU_SERIES for sign in spec.get("signs", ())):
            return
        unready = self.history.last_unready.get(node, NEVER_HAPPENED)
        failed = self.history.last_failed_probe.get(spec.get("nodeUID", ""), NEVER_HAPPENED)
        if max(unready, failed) < long_ago:
            yield f"{node}: it was Ready, no probe on it has failed of its own, and its GPUs have shown nothing new"


class QuarantinesWithinBudget(_ApprovalRule):
    description = "never more quarantines than the budget allows"

    def check_approval(self, change: ObjectChange) -> Iterator[str]:
        node, settings = _get_name(change), self.settings
        others = [
            name for name, body in self.history.quarantines.items() if name != node and body["spec"].get("approved")
        ]
        allowed = count_allowed_nodes(self.history.most_nodes, settings.quarantine_max_nodes, settings.quarantine_max_share)
        if len(others) >= allowed:
            yield f"{node}, beside {', '.join(others)}: {allowed} of {self.history.most_nodes} nodes are allowed"


class BreakerLimitsQuarantines(_ApprovalRule):
    description = "no node is quarantined while many fail at once"

    def check_approval(self, change: ObjectChange) -> Iterator[str]:
        last = _get_last_suspicion_time(change.object)
        once = [
            name
            for name, body in self.history.quarantines.items()
            if body["spec"].get("signs") and abs(_get_last_suspicion_time(body) - last) <= SIMULTANEOUS_FAILURE_SECONDS and _is_blamed(body)
        ]
        if len(once) >= self.settings.breaker_nodes:
            yield f"{_get_name(change)}, while {', '.join(once)} are blamed at once"


class MassesAreLeftAlone(_ApprovalRule):
    """One that is back first, and well, shows nothing of those that still boot."""

    words = "no node is quarantined because it takes longest to come back, of many that went at once"
    kinds = ("nodequarantines", "nodes")

    def __init__(self, world: World, record: ClusterHistory) -> None:
        super().__init__(world, record)
        self._fell: dict[str, float] = {}
        """Node → when it was last Ready no longer."""
        self._blamed: dict[str, float] = {}
        """Node → when it was first blamed since."""

    def heard(self, change: ObjectChange) -> Iterator[str]:
        name = _get_name(change)
        if change.plural == "nodes":
            was = change.previous is not None and is_ready(change.previous)
            if change.type == "DELETED":
                self._fell.pop(name, None)
            elif was and not is_ready(change.object):
                self._fell[name] = change.time
                self._blamed.pop(name, None)
            return
        if change.type == "DELETED":
            self._blamed.pop(name, None)
        elif _is_strong(change.object):
            self._blamed.setdefault(name, change.time)
        yield from super().check_change(change)

    def approved(self, change: ObjectChange) -> Iterator[str]:
        node = _get_name(change)
        fell, blamed = self._fell.get(node, NEVER_HAPPENED), self._blamed.get(node, NEVER_HAPPENED)
        shown = self.world.prometheus.last_error.get(node, NEVER_HAPPENED)
        if is_ready(self.history.nodes.get(node, NOT_READY)) or shown >= fell:
            return
        others = [
            name
            for name, at in self._blamed.items()
            if name != node
            and abs(at - blamed) <= SIMULTANEOUS_FAILURE_SECONDS
            and abs(self._fell.get(name, NEVER_HAPPENED) - fell) <= SIMULTANEOUS_FAILURE_SECONDS
        ]
        if len(others) + 1 >= self.settings.breaker_nodes:
            yield f"{node}, which went with {', '.join(others)}"


class NoApprovalsWhilePaused(_ApprovalRule):
    description = "no node is quarantined while remedies are paused"

    def check_approval(self, change: ObjectChange) -> Iterator[str]:
        if change.time - self.history.paused_since > NODE_NOTICE_SECONDS:
            yield _get_name(change)


class _MarkRule(Rule):
    """Judges what an operator does to a node."""

    kinds = ("nodes",)

    def check_change(self, change: ObjectChange) -> Iterator[str]:
        if change.previous is not None and change.type == "MODIFIED_MESSAGE" and is_operator_change(change):
            yield from self.check_node_change(change, change.previous)

    def check_node_change(self, change: ObjectChange, before: Object) -> Iterator[str]:
        raise NotImplementedError


class MarksFollowQuarantines(_MarkRule):
    description = "a node is marked only under an approved NodeQuarantine of its own"

    def check_node_change(self, change: ObjectChange, before: Object) -> Iterator[str]:
        if not _is_newly_marked(before, change.object):
            return
        name = _get_name(change)
        if self.history.last_approved.get(name, NEVER_HAPPENED) < change.time - MAX_REQUEST_DELAY_SECONDS:
            yield name
            return
        body = self.history.quarantines.get(name)
        meant = body and (body["spec"].get("nodeUID") or body.get("status", {}).get("nodeUID"))
        if meant and meant != change.object["metadata"]["uid"]:
            yield f"{name}, where another node of that name is meant"


class OptedOutNodesAreUnmarked(_MarkRule):
    description = "a node with the opt-out label is never marked"

    def check_node_change(self, change: ObjectChange, before: Object) -> Iterator[str]:
        since = self.history.opted_out.get(_get_name(change))
        if since is not None and change.time - since > NODE_NOTICE_SECONDS and _is_newly_marked(before, change.object):
            yield _get_name(change)


class ForeignMarksAreUntouched(_MarkRule):
    description = "others' cordons and taints are untouched"

    def check_node_change(self, change: ObjectChange, before: Object) -> Iterator[str]:
        name, now = _get_name(change), change.object
        if _list_foreign_taints(before) != _list_foreign_taints(now):
            yield f"{name}: taints {_list_foreign_taints(before)} become {_list_foreign_taints(now)}"
        others = [manager for manager in list_cordon_owners(before) if manager != FIELD_MANAGER_CORDON]
        if others and before["spec"].get("unschedulable") and not now["spec"].get("unschedulable"):
            yield f"{name}: the cordon of {', '.join(others)} is taken away"
        for part in ("labels", "annotations", "finalizers"):
            if before["metadata"].get(part) != now["metadata"].get(part):
                yield f"{name}: its {part} are changed"


class ReleasedNodesAreClean(Rule):
    description = "a NodeQuarantine goes when nothing of it is left on its node"
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


def _is_newly_marked(before: Object, now: Object) -> bool:
    return (is_tainted(now) and not is_tainted(before)) or (is_cordoned(now) and not is_cordoned(before))


def _list_foreign_taints(node: Object) -> list[Object]:
    return [taint for taint in node["spec"].get("taints", ()) if taint["key"] != TAINT_QUARANTINE]


def _get_last_suspicion_time(quarantine: Object) -> float:
    return max((parse_time(sign["at"]) for sign in quarantine["spec"].get("signs", ())), default=NEVER_HAPPENED)


def _is_strong(quarantine: Object) -> bool:
    """By one strong sign, or by two namespaces."""
    signs = quarantine["spec"].get("signs", ())
    return len(signs) > 1 or any(not sign.get("weak") for sign in signs)


def _is_blamed(quarantine: Object) -> bool:
    """And no probe has cleared it."""
    probes = quarantine.get("status", {}).get("probes", ())
    over = quarantine.get("status", {}).get("phase") == "Released" or "deletionTimestamp" in quarantine["metadata"]
    return _is_strong(quarantine) and not over and not any(probe.get("passed") for probe in probes)


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
