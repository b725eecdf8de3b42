"""The status of a Fabric. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from pacekeeper_analysis.fabric.view import FabricLink, LinkState

from ...api.conditions import ConditionStatus, FabricCondition, FabricReason
from ...api.fabric import Fabric, FabricStatus, PathControl
from ...formatting import format_list, shorten_text
from ...state.network import TrafficPlan, Wiring
from ...state.routes import format_spine_name
from .wiring import CAPACITY_UNIT_BITS_PER_SECOND, describe_unknown_links, list_unaddressed_spines, list_unknown_spines

MAX_REPORTED_LINKS = 256
MAX_FABRIC_MESSAGE_CHARACTERS = 4000
"""Characters of a condition's message."""


@dataclass(frozen=True)
class FabricState:
    """The state of the Fabric in force, from which its status is built."""

    wiring: Wiring
    traffic: TrafficPlan | None  # None: there is nothing to plan
    unlabeled_nodes: tuple[str, ...] = ()  # nodes that have members of jobs and no leaf label
    query_error: str = ""  # why its query fails; "": it succeeds, or there is none


def select_active_fabric(fabrics: Sequence[Fabric]) -> Fabric | None:
    """Return the Fabric in force: the oldest of those that can be read."""
    readable = [fabric for fabric in fabrics if not fabric.parse_error]
    return min(readable, key=lambda fabric: (fabric.created_at or 0.0, fabric.name), default=None)


def build_fabric_status(fabric: Fabric, state: FabricState, now: float) -> FabricStatus:
    """Return the status of the Fabric in force. Transition times are kept where nothing has changed."""
    wiring, traffic = state.wiring, state.traffic
    mode = fabric.spec.path_control.mode
    controlled = mode is PathControl.PROBE
    conditions = [
        _FabricConditionState(FabricCondition.IN_FORCE, True, FabricReason.OLDEST),
        _build_leaves_condition(state),
        _build_links_condition(fabric, state),
        _build_planned_condition(traffic, mode),
    ]
    return FabricStatus(
        observed_generation=fabric.generation,
        leaves=len(wiring.leaves),
        flows=traffic.flows if traffic else 0,
        max_load=traffic.max_load if traffic and controlled else None,
        lower_bound=traffic.lower_bound if traffic else None,
        dead_links=wiring.dead_links,
        moved_flows=traffic.moved_flows if traffic and controlled else None,
        links=tuple(_list_reported_links(fabric, wiring, traffic if controlled else None)),
        conditions=_build_condition_statuses(fabric, conditions, now),
    )


def build_inactive_status(fabric: Fabric, active: Fabric | None, now: float) -> FabricStatus:
    """Return the status of a Fabric that is not in force."""
    if fabric.parse_error:
        condition = _FabricConditionState(FabricCondition.IN_FORCE, False, FabricReason.UNREADABLE, fabric.parse_error)
    else:
        message = f"Fabric {active.name} is older: delete one of them" if active else ""
        condition = _FabricConditionState(FabricCondition.IN_FORCE, False, FabricReason.ANOTHER_IS_OLDER, message)
    return FabricStatus(
        observed_generation=fabric.generation, conditions=_build_condition_statuses(fabric, [condition], now)
    )


def build_planning_status(fabric: Fabric, message: str, now: float) -> FabricStatus:
    """Return the status while a plan takes long; all else stays as it was."""
    planning = _FabricConditionState(FabricCondition.PLANNED, None, FabricReason.PLANNING, message)
    others = [condition for condition in fabric.status.conditions if condition.type != FabricCondition.PLANNED]
    return replace(fabric.status, conditions=(*others, *_build_condition_statuses(fabric, [planning], now)))


@dataclass(frozen=True)
class _FabricConditionState:
    """The present state of a condition."""

    type: FabricCondition
    holds: bool | None  # None: not known
    reason: FabricReason
    message: str = ""


def _build_leaves_condition(state: FabricState) -> _FabricConditionState:
    wiring = state.wiring
    if not wiring.leaves:
        message = "no node has the labels of spec.levels: ranks are ordered by other labels"
        return _FabricConditionState(FabricCondition.LEAVES_RESOLVED, False, FabricReason.NO_LEAVES, message)
    if wiring.topology is None:
        message = f"{len(wiring.leaves)} leaves with this many spines are too many to plan: ranks are only ordered"
        return _FabricConditionState(FabricCondition.LEAVES_RESOLVED, False, FabricReason.TOO_MANY_LEAVES, message)
    if state.unlabeled_nodes:
        message = f"flows from and to nodes without a leaf label are not planned: {format_list(state.unlabeled_nodes)}"
        return _FabricConditionState(FabricCondition.LEAVES_RESOLVED, False, FabricReason.NODES_UNLABELED, message)
    return _FabricConditionState(FabricCondition.LEAVES_RESOLVED, True, FabricReason.LABELED)


def _build_links_condition(fabric: Fabric, state: FabricState) -> _FabricConditionState:
    if state.query_error:
        return _FabricConditionState(
            FabricCondition.LINKS_RESOLVED, False, FabricReason.QUERY_FAILED, state.query_error
        )
    if state.wiring.unknown_links:
        message = describe_unknown_links(state.wiring.unknown_links)
        return _FabricConditionState(FabricCondition.LINKS_RESOLVED, False, FabricReason.UNKNOWN_LINKS, message)
    if spines := list_unknown_spines(fabric.spec):
        message = f"spec.hops names spines that do not exist: {format_list(spines)}"
        return _FabricConditionState(FabricCondition.LINKS_RESOLVED, False, FabricReason.UNKNOWN_SPINES, message)
    if fabric.spec.path_control.mode is PathControl.PROBE and (spines := list_unaddressed_spines(fabric.spec)):
        message = (
            f"spec.hops has no address of {format_list(spines)}: flows planned there go where the network puts them"
        )
        return _FabricConditionState(FabricCondition.LINKS_RESOLVED, False, FabricReason.UNKNOWN_SPINES, message)
    slow = [f"{leaf}–{spine} ({share:.0%})" for (leaf, spine), share in sorted(state.wiring.slow_links.items())]
    message = f"by what jobs' flows have shown, links carry less than they should: {format_list(slow)}" if slow else ""
    return _FabricConditionState(FabricCondition.LINKS_RESOLVED, True, FabricReason.LINKS_CONSISTENT, message)


def _build_planned_condition(traffic: TrafficPlan | None, mode: PathControl) -> _FabricConditionState:
    def found(holds: bool | None, reason: FabricReason, message: str = "") -> _FabricConditionState:
        return _FabricConditionState(FabricCondition.PLANNED, holds, reason, message)

    if traffic is None:
        return found(False, FabricReason.NOT_PLANNED, "there are no leaves to plan flows between")
    if mode is PathControl.OFF:
        message = (
            "ranks are ordered by leaf; flows go where the network puts them (spec.pathControl.mode is Off, or "
            "policy.traffic.planning of the installation is false)"
        )
        return found(None, FabricReason.PATH_CONTROL_OFF, message)
    if mode is PathControl.REROLL:
        message = "flows go where the network puts them; slow pairs are given other ports"
        return found(None, FabricReason.PATHS_UNKNOWN, message)
    if traffic.unroutable_flows:
        pairs = [f"{'/'.join(job)} {source} → {destination}" for job, (source, destination) in traffic.unroutable_flows]
        return found(False, FabricReason.NO_ROUTE, f"no route is alive for {len(pairs)} flows: {format_list(pairs)}")
    if not traffic.flows:
        return found(True, FabricReason.NO_FLOWS, "no job has flows between leaves")
    jobs = format_list(["/".join(name) for name in sorted(traffic.recommended)])
    recommended = f". Other routes are recommended, but not taken (mode Recommend): {jobs}" if jobs else ""
    if traffic.max_load > traffic.lower_bound:
        message = (
            f"the fullest link carries {traffic.max_load}, and no plan is below {traffic.lower_bound}{recommended}"
        )
        return found(True, FabricReason.ABOVE_LOWER_BOUND, message)
    message = f"the fullest link carries {traffic.max_load}: no plan is below that{recommended}"
    return found(True, FabricReason.AT_LOWER_BOUND, message)


def _list_reported_links(fabric: Fabric, wiring: Wiring, traffic: TrafficPlan | None) -> Iterator[FabricLink]:
    """Yield all links if they are few; else the dead ones first, then the fullest."""
    topology = wiring.topology
    if topology is None:
        return
    full = round(fabric.spec.uplink.capacity * fabric.spec.uplink.parallel / CAPACITY_UNIT_BITS_PER_SECOND)
    states = {0: LinkState.DOWN, full: LinkState.UP}
    links = [
        FabricLink(
            leaf,
            format_spine_name(route),
            int(traffic.up[group, route]) if traffic else 0,
            int(traffic.down[group, route]) if traffic else 0,
            states.get(int(topology.up[group, route]), LinkState.SLOW),
        )
        for group, leaf in enumerate(wiring.leaves)
        for route in range(topology.routes)
    ]
    if len(links) > MAX_REPORTED_LINKS:
        links.sort(key=lambda link: (link.state is not LinkState.DOWN, -max(link.up, link.down)))
    yield from links[:MAX_REPORTED_LINKS]


def _build_condition_statuses(
    fabric: Fabric, states: Sequence[_FabricConditionState], now: float
) -> tuple[ConditionStatus, ...]:
    previous = {condition.type: condition for condition in fabric.status.conditions}
    conditions = []
    for state in states:
        status = "Unknown" if state.holds is None else "True" if state.holds else "False"
        old = previous.get(state.type)
        since = old.last_transition_time if old is not None and old.status == status else now
        message = shorten_text(state.message, MAX_FABRIC_MESSAGE_CHARACTERS)
        conditions.append(ConditionStatus(state.type, status, state.reason, message, since, fabric.generation))
    return tuple(conditions)
