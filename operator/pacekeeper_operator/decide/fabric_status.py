"""What the operator says of a Fabric. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ..api import (
    ConditionStatus,
    Fabric,
    FabricCondition,
    FabricLink,
    FabricReason,
    FabricStatus,
    LinkState,
    PathControl,
)
from ..network import TrafficPlan, Wiring
from ..words import format_list, shorten_text
from .wiring import CAPACITY_UNIT_BITS_PER_SECOND, describe_unknown_links, list_unaddressed_spines, format_spine_name, list_unknown_spines

MAX_REPORTED_LINKS = 256
MAX_FABRIC_MESSAGE_CHARACTERS = 4000
"""Characters of a condition's message."""


@dataclass(frozen=True)
class FabricState:
    """What is known of the Fabric in force."""

    wiring: Wiring
    traffic: TrafficPlan | None  # None: there is nothing to plan on
    unlabeled_nodes: tuple[str, ...] = ()  # nodes that have members of jobs, and do not say in which leaf they are
    query_error: str = ""  # why its query tells nothing; "": it does, or there is none


def select_active_fabric(fabrics: Sequence[Fabric]) -> Fabric | None:
    """The one that counts: the oldest of those that can be read."""
    readable = [fabric for fabric in fabrics if not fabric.unreadable]
    return min(readable, key=lambda fabric: (fabric.created_at, fabric.name), default=None)


def build_fabric_status(fabric: Fabric, state: FabricState, now: float) -> FabricStatus:
    """Of the one in force; transition times are kept where nothing has changed."""
    wiring, traffic = state.wiring, state.traffic
    mode = fabric.spec.path_control.mode
    controlled = mode is PathControl.PROBE
    found = [
        _FabricConditionState(FabricCondition.IN_FORCE, True, FabricReason.OLDEST),
        _build_leaves_condition(state),
        _build_links_condition(fabric, state),
        _build_planned_condition(traffic, mode),
    ]
    return FabricStatus(
        observed_generation=fabric.generation,
        leaves=len(wiring.leaves),
        flows=traffic.flows if traffic else 0,
        max_load=traffic.level if traffic and controlled else None,
        bound=traffic.bound if traffic else None,
        dead=wiring.dead_links,
        moved=traffic.moved if traffic and controlled else None,
        links=tuple(_list_reported_links(fabric, wiring, traffic if controlled else None)),
        conditions=_build_condition_statuses(fabric, found, now),
    )


def build_inactive_status(fabric: Fabric, other: Fabric | None, now: float) -> FabricStatus:
    """Of one that does not count."""
    if fabric.unreadable:
        found = _FabricConditionState(FabricCondition.IN_FORCE, False, FabricReason.UNREADABLE, fabric.unreadable)
    else:
        words = f"Fabric {other.name} is older: delete one of them" if other else ""
        found = _FabricConditionState(FabricCondition.IN_FORCE, False, FabricReason.ANOTHER_IS_OLDER, words)
    return FabricStatus(observed_generation=fabric.generation, conditions=_build_condition_statuses(fabric, [found], now))


def build_planning_status(fabric: Fabric, words: str, now: float) -> FabricStatus:
    """While a plan takes long; all else stays as it was said."""
    found = _FabricConditionState(FabricCondition.PLANNED, None, FabricReason.PLANNING, words)
    others = [condition for condition in fabric.status.conditions if condition.type != FabricCondition.PLANNED]
    return replace(fabric.status, conditions=(*others, *_build_condition_statuses(fabric, [found], now)))


@dataclass(frozen=True)
class _FabricConditionState:
    """A condition as it is now."""

    type: FabricCondition
    holds: bool | None  # None: not known
    reason: FabricReason
    message: str = ""


def _build_leaves_condition(seen: FabricState) -> _FabricConditionState:
    wiring = seen.wiring
    if not wiring.leaves:
        words = "no node carries the labels by which spec.levels say where it is: ranks are ordered by other labels"
        return _FabricConditionState(FabricCondition.LEAVES_KNOWN, False, FabricReason.NO_LEAVES, words)
    if wiring.topology is None:
        words = f"{len(wiring.leaves)} leaves with so many spines are too many to plan: ranks are ordered, no more"
        return _FabricConditionState(FabricCondition.LEAVES_KNOWN, False, FabricReason.TOO_MANY_LEAVES, words)
    if seen.unlabeled_nodes:
        words = (
            f"flows from and to nodes that do not say in which leaf they are go unplanned: {format_list(seen.unlabeled_nodes)}"
        )
        return _FabricConditionState(FabricCondition.LEAVES_KNOWN, False, FabricReason.NODES_UNLABELLED, words)
    return _FabricConditionState(FabricCondition.LEAVES_KNOWN, True, FabricReason.LABELLED)


def _build_links_condition(fabric: Fabric, seen: FabricState) -> _FabricConditionState:
    if seen.query_error:
        return _FabricConditionState(FabricCondition.LINKS_KNOWN, False, FabricReason.QUERY_FAILED, seen.query_error)
    if seen.wiring.strange:
        words = describe_unknown_links(seen.wiring.strange)
        return _FabricConditionState(FabricCondition.LINKS_KNOWN, False, FabricReason.UNKNOWN_LINKS, words)
    if spines := list_unknown_spines(fabric.spec):
        words = f"spec.hops name spines that there are not: {format_list(spines)}"
        return _FabricConditionState(FabricCondition.LINKS_KNOWN, False, FabricReason.UNKNOWN_SPINES, words)
    if fabric.spec.path_control.mode is PathControl.PROBE and (spines := list_unaddressed_spines(fabric.spec)):
        words = f"spec.hops have no address of {format_list(spines)}: flows planned there go where the network puts them"
        return _FabricConditionState(FabricCondition.LINKS_KNOWN, False, FabricReason.UNKNOWN_SPINES, words)
    slow = [f"{leaf}–{spine} ({share:.0%})" for (leaf, spine), share in sorted(seen.wiring.slow.items())]
    words = f"by what jobs' flows have shown, links carry less than they should: {format_list(slow)}" if slow else ""
    return _FabricConditionState(FabricCondition.LINKS_KNOWN, True, FabricReason.FITS, words)


def _build_planned_condition(traffic: TrafficPlan | None, mode: PathControl) -> _FabricConditionState:
    def found(holds: bool | None, reason: FabricReason, words: str = "") -> _FabricConditionState:
        return _FabricConditionState(FabricCondition.PLANNED, holds, reason, words)

    if traffic is None:
        return found(False, FabricReason.NOT_PLANNED, "there are no leaves to plan flows between")
    if mode is PathControl.OFF:
        words = (
            "ranks are ordered by leaf; flows go where the network puts them (spec.pathControl.mode is Off, or "
            "policy.traffic.planning of the installation is false)"
        )
        return found(None, FabricReason.PATH_CONTROL_OFF, words)
    if mode is PathControl.REROLL:
        words = "flows go where the network puts them; slow pairs are given other ports"
        return found(None, FabricReason.PATHS_UNKNOWN, words)
    if traffic.lost:
        pairs = [f"{'/'.join(job)} {source} → {destination}" for job, (source, destination) in traffic.lost]
        return found(False, FabricReason.NO_WAY, f"no way is alive for {len(pairs)} flows: {format_list(pairs)}")
    if not traffic.flows:
        return found(True, FabricReason.NO_FLOWS, "no job has flows between leaves")
    jobs = format_list(["/".join(name) for name in sorted(traffic.recommended)])
    recommended = f". Other ways are recommended, and nobody may take them (mode Recommend): {jobs}" if jobs else ""
    if traffic.level > traffic.bound:
        words = f"the fullest link carries {traffic.level}, and no plan is below {traffic.bound}{recommended}"
        return found(True, FabricReason.ABOVE_THE_BOUND, words)
    words = f"the fullest link carries {traffic.level}: no plan is below that{recommended}"
    return found(True, FabricReason.AT_THE_BOUND, words)


def _list_reported_links(fabric: Fabric, wiring: Wiring, traffic: TrafficPlan | None) -> Iterator[FabricLink]:
    """All links, where they are few; else those that are dead, then those that are full."""
    topology = wiring.topology
    if topology is None:
        return
    full = round(fabric.spec.uplink.capacity * fabric.spec.uplink.parallel / CAPACITY_UNIT_BITS_PER_SECOND)
    states = {0: LinkState.DOWN, full: LinkState.UP}
    links = [
        FabricLink(
            leaf,
            format_spine_name(way),
            int(traffic.up[group, way]) if traffic else 0,
            int(traffic.down[group, way]) if traffic else 0,
            states.get(int(topology.up[group, way]), LinkState.SLOW),
        )
        for group, leaf in enumerate(wiring.leaves)
        for way in range(topology.routes)
    ]
    if len(links) > MAX_REPORTED_LINKS:
        links.sort(key=lambda link: (link.state is not LinkState.DOWN, -max(link.up, link.down)))
    yield from links[:MAX_REPORTED_LINKS]


def _build_condition_statuses(fabric: Fabric, found: Sequence[_FabricConditionState], now: float) -> tuple[ConditionStatus, ...]:
    before = {condition.type: condition for condition in fabric.status.conditions}
    conditions = []
    for one in found:
        status = "Unknown" if one.holds is None else "True" if one.holds else "False"
        old = before.get(one.type)
        since = old.last_transition_time if old is not None and old.status == status else now
        words = shorten_text(one.message, MAX_FABRIC_MESSAGE_CHARACTERS)
        conditions.append(ConditionStatus(one.type, status, one.reason, words, since, fabric.generation))
    return tuple(conditions)
