"""Invariants about nodes: nobody touches one without a witness, and what others have put on it stays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pacekeeper_operator.api import FIELD_MANAGER_CORDON, TAINT_QUARANTINE, Witness, parse_time
from pacekeeper_operator.decide.node_census import AT_ONCE_SECONDS
from pacekeeper_operator.decide.node_suspicion import SUSPICION_SECONDS, allowed_nodes
from pacekeeper_operator.settings import Settings

from .record import NEVER, Record, by_operator, cordoned_by, is_cordoned, is_ready, is_tainted
from .rules import UNDER_WAY_SECONDS, Rule

if TYPE_CHECKING:
    from ..kubernetes.api_server import Change
    from ..world import World

Object = Mapping[str, Any]
NOT_READY: Object = {}
NOTICED_SECONDS = 10.0
"""So late an operator may notice a label or a pause."""


class _Approvals(Rule):
    """Judges an operator's decision to quarantine a node."""

    kinds: ClassVar[tuple[str, ...]] = ("nodequarantines",)

    def heard(self, change: Change) -> Iterator[str]:
        before = change.before
        if before is None or change.type != "MODIFIED" or not by_operator(change):
            return
        if change.object["spec"].get("approved") and not before["spec"].get("approved"):
            yield from self.approved(change)

    def approved(self, change: Change) -> Iterator[str]:
        raise NotImplementedError

    @property
    def settings(self) -> Settings:
        return Settings(**self.world.settings.operator)


class NodesHaveWitnesses(_Approvals):
    words = "no node is quarantined without a witness"

    def approved(self, change: Change) -> Iterator[str]:
        node, spec = _name(change), change.object["spec"]
        long_ago = change.at - SUSPICION_SECONDS - UNDER_WAY_SECONDS
        shown = self.world.prometheus.last_error.get(node, NEVER)
        if shown >= long_ago and any(sign.get("witness") == Witness.GPU_SERIES for sign in spec.get("signs", ())):
            return
        unready = self.record.last_unready.get(node, NEVER)
        failed = self.record.last_failed_probe.get(spec.get("nodeUID", ""), NEVER)
        if max(unready, failed) < long_ago:
            yield f"{node}: it was Ready, no probe on it has failed of its own, and its GPUs have shown nothing new"


class QuarantinesWithinBudget(_Approvals):
    words = "never more quarantines than the budget allows"

    def approved(self, change: Change) -> Iterator[str]:
        node, settings = _name(change), self.settings
        others = [
            name for name, body in self.record.quarantines.items() if name != node and body["spec"].get("approved")
        ]
        allowed = allowed_nodes(self.record.most_nodes, settings.quarantine_max_nodes, settings.quarantine_max_share)
        if len(others) >= allowed:
            yield f"{node}, beside {', '.join(others)}: {allowed} of {self.record.most_nodes} nodes are allowed"


class TheBreakerHolds(_Approvals):
    words = "no node is quarantined while many fail at once"

    def approved(self, change: Change) -> Iterator[str]:
        last = _last_sign(change.object)
        once = [
            name
            for name, body in self.record.quarantines.items()
            if body["spec"].get("signs") and abs(_last_sign(body) - last) <= AT_ONCE_SECONDS and _is_blamed(body)
        ]
        if len(once) >= self.settings.breaker_nodes:
            yield f"{_name(change)}, while {', '.join(once)} are blamed at once"


class MassesAreLeftAlone(_Approvals):
    """One that is back first, and well, shows nothing of those that still boot."""

    words = "no node is quarantined because it takes longest to come back, of many that went at once"
    kinds = ("nodequarantines", "nodes")

    def __init__(self, world: World, record: Record) -> None:
        super().__init__(world, record)
        self._fell: dict[str, float] = {}
        """Node → when it was last Ready no longer."""
        self._blamed: dict[str, float] = {}
        """Node → when it was first blamed since."""

    def heard(self, change: Change) -> Iterator[str]:
        name = _name(change)
        if change.plural == "nodes":
            was = change.before is not None and is_ready(change.before)
            if change.type == "DELETED":
                self._fell.pop(name, None)
            elif was and not is_ready(change.object):
                self._fell[name] = change.at
                self._blamed.pop(name, None)
            return
        if change.type == "DELETED":
            self._blamed.pop(name, None)
        elif _is_strong(change.object):
            self._blamed.setdefault(name, change.at)
        yield from super().heard(change)

    def approved(self, change: Change) -> Iterator[str]:
        node = _name(change)
        fell, blamed = self._fell.get(node, NEVER), self._blamed.get(node, NEVER)
        shown = self.world.prometheus.last_error.get(node, NEVER)
        if is_ready(self.record.nodes.get(node, NOT_READY)) or shown >= fell:
            return
        others = [
            name
            for name, at in self._blamed.items()
            if name != node
            and abs(at - blamed) <= AT_ONCE_SECONDS
            and abs(self._fell.get(name, NEVER) - fell) <= AT_ONCE_SECONDS
        ]
        if len(others) + 1 >= self.settings.breaker_nodes:
            yield f"{node}, which went with {', '.join(others)}"


class NothingIsApprovedWhilePaused(_Approvals):
    words = "no node is quarantined while remedies are paused"

    def approved(self, change: Change) -> Iterator[str]:
        if change.at - self.record.paused_since > NOTICED_SECONDS:
            yield _name(change)


class _Marks(Rule):
    """Judges what an operator does to a node."""

    kinds = ("nodes",)

    def heard(self, change: Change) -> Iterator[str]:
        if change.before is not None and change.type == "MODIFIED" and by_operator(change):
            yield from self.touched(change, change.before)

    def touched(self, change: Change, before: Object) -> Iterator[str]:
        raise NotImplementedError


class MarksFollowQuarantines(_Marks):
    words = "a node is marked only under an approved NodeQuarantine of its own"

    def touched(self, change: Change, before: Object) -> Iterator[str]:
        if not _is_marked_anew(before, change.object):
            return
        name = _name(change)
        if self.record.last_approved.get(name, NEVER) < change.at - UNDER_WAY_SECONDS:
            yield name
            return
        body = self.record.quarantines.get(name)
        meant = body and (body["spec"].get("nodeUID") or body.get("status", {}).get("nodeUID"))
        if meant and meant != change.object["metadata"]["uid"]:
            yield f"{name}, where another node of that name is meant"


class OptedOutNodesAreLeftAlone(_Marks):
    words = "a node with the opt-out label is never marked"

    def touched(self, change: Change, before: Object) -> Iterator[str]:
        since = self.record.opted_out.get(_name(change))
        if since is not None and change.at - since > NOTICED_SECONDS and _is_marked_anew(before, change.object):
            yield _name(change)


class OthersMarksStay(_Marks):
    words = "others' cordons and taints are untouched"

    def touched(self, change: Change, before: Object) -> Iterator[str]:
        name, now = _name(change), change.object
        if _others_taints(before) != _others_taints(now):
            yield f"{name}: taints {_others_taints(before)} become {_others_taints(now)}"
        others = [manager for manager in cordoned_by(before) if manager != FIELD_MANAGER_CORDON]
        if others and before["spec"].get("unschedulable") and not now["spec"].get("unschedulable"):
            yield f"{name}: the cordon of {', '.join(others)} is taken away"
        for part in ("labels", "annotations", "finalizers"):
            if before["metadata"].get(part) != now["metadata"].get(part):
                yield f"{name}: its {part} are changed"


class ReleasedNodesAreClean(Rule):
    words = "a NodeQuarantine goes when nothing of it is left on its node"
    kinds = ("nodequarantines",)

    def heard(self, change: Change) -> Iterator[str]:
        if change.type != "DELETED" or not by_operator(change):
            return
        node = self.record.nodes.get(_name(change))
        if node is not None and (is_tainted(node) or is_cordoned(node)):
            yield _name(change)


def _name(change: Change) -> str:
    name: str = change.object["metadata"]["name"]
    return name


def _is_marked_anew(before: Object, now: Object) -> bool:
    return (is_tainted(now) and not is_tainted(before)) or (is_cordoned(now) and not is_cordoned(before))


def _others_taints(node: Object) -> list[Object]:
    return [taint for taint in node["spec"].get("taints", ()) if taint["key"] != TAINT_QUARANTINE]


def _last_sign(quarantine: Object) -> float:
    return max((parse_time(sign["at"]) for sign in quarantine["spec"].get("signs", ())), default=NEVER)


def _is_strong(quarantine: Object) -> bool:
    """By one strong sign, or by two namespaces."""
    signs = quarantine["spec"].get("signs", ())
    return len(signs) > 1 or any(not sign.get("weak") for sign in signs)


def _is_blamed(quarantine: Object) -> bool:
    """And no probe has cleared it."""
    probes = quarantine.get("status", {}).get("probes", ())
    over = quarantine.get("status", {}).get("phase") == "Released" or "deletionTimestamp" in quarantine["metadata"]
    return _is_strong(quarantine) and not over and not any(probe.get("passed") for probe in probes)


RULES: tuple[type[Rule], ...] = (
    NodesHaveWitnesses,
    QuarantinesWithinBudget,
    TheBreakerHolds,
    MassesAreLeftAlone,
    NothingIsApprovedWhilePaused,
    MarksFollowQuarantines,
    OptedOutNodesAreLeftAlone,
    OthersMarksStay,
    ReleasedNodesAreClean,
)
