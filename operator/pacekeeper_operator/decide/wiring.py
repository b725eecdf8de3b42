"""A Fabric as planning sees it: in which leaf each node is, what each link carries, and what does not fit. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import numpy as np

from pacekeeper_analysis.fabric import places
from pacekeeper_analysis.fabric.order import TopologyLocation
from pacekeeper_analysis.fabric.topology import Ints, Topology

from ..api import FabricSpec, LinkState
from ..network import LinkShares, Wiring
from ..observation import NodeView
from ..words import format_list
from .link_state import NO_DEGRADED_LINKS, DegradedLinks

MAX_PLANNED_LINKS = 2**18
"""Leaves × ways: of a larger fabric nothing is planned."""
CAPACITY_UNIT_BITS_PER_SECOND = 1e6
"""Bits a second that capacities are counted in."""
_SPINE_PATTERN = re.compile(r"s([1-9]\d{0,3})", re.ASCII)

LinkRates = Mapping[tuple[str, str], float]
"""Bits a second that links carry now, by leaf and spine; 0: it is down."""


def build_wiring(spec: FabricSpec, nodes: Iterable[NodeView], measured_rates: LinkRates, degraded: DegradedLinks = NO_DEGRADED_LINKS) -> Wiring:
    """`told`: what is measured of links; `doubts`: what jobs' flows have shown, which only ever takes from it.
    Exceptions go before both; a link of which nobody says anything is as it is built, and none carries more than that.
    """
    where = _map_nodes_to_leaves(spec, nodes)
    leaves = tuple(sorted({leaf for leaf in where.values() if leaf}))
    group = {leaf: number for number, leaf in enumerate(leaves)}
    leaf_of = {node: group[leaf] for node, leaf in where.items() if leaf}
    ways = spec.planes * spec.spines
    if not leaves or len(leaves) * ways > MAX_PLANNED_LINKS:
        return Wiring(leaves, leaf_of, None)
    full = _to_capacity_units(spec.uplink.capacity * spec.uplink.parallel)
    links = np.full((len(leaves), ways), full, dtype=np.int64)
    strange = _set_link_rates(links, group, measured_rates) + _set_link_rates(links, group, _list_exception_rates(spec))
    links = np.minimum(links, full)
    routes = Topology(links, links, spec.planes)
    excepted = frozenset((one.leaf, one.spine) for one in spec.exceptions)

    def doubted(links: Ints, shares: LinkShares) -> Ints:
        less = links.copy()
        rates = {link: share * full * CAPACITY_UNIT_BITS_PER_SECOND for link, share in shares.items() if link not in excepted}
        _set_link_rates(less, group, rates)  # a link that has gone meanwhile is nobody's
        lower: Ints = np.minimum(links, less)
        return lower

    links = doubted(links, degraded.agreed_shares)
    views = {tenant: doubted(links, shares) for tenant, shares in degraded.shares_by_namespace.items()}
    return Wiring(
        leaves,
        leaf_of,
        Topology(links, links, spec.planes),
        routes,
        tuple(dict.fromkeys(strange)),
        slow={link: share for link, share in degraded.agreed_shares.items() if link[0] in group and link not in excepted},
        views={tenant: Topology(view, view, spec.planes) for tenant, view in views.items() if (view < links).any()},
    )


def format_spine_name(route: int) -> str:
    """Its name: spines are numbered through all planes, from s1 on."""
    return f"s{route + 1}"


def parse_spine_name(spine: str) -> int | None:
    """The other way round; None: that is no spine's name."""
    match = _SPINE_PATTERN.fullmatch(spine)
    return None if match is None else int(match[1]) - 1


def list_unknown_spines(spec: FabricSpec) -> tuple[str, ...]:
    """That its hops name, and that it does not have."""
    ways = spec.planes * spec.spines
    ours = {format_spine_name(way) for way in range(ways)}
    return tuple(sorted(set(spec.hops.values()) - ours))


def list_unaddressed_spines(spec: FabricSpec) -> tuple[str, ...]:
    """That no address in its hops answers for."""
    answering = set(spec.hops.values())
    return tuple(name for name in map(format_spine_name, range(spec.planes * spec.spines)) if name not in answering)


def _map_nodes_to_leaves(spec: FabricSpec, nodes: Iterable[NodeView]) -> dict[str, str]:
    """Node → leaf; "": it does not say."""
    levels = tuple(level.node_label for level in spec.levels)
    labels = {node.name: node.labels for node in nodes}
    if levels:
        labels = {node: {name: of[name] for name in levels if name in of} for node, of in labels.items()}
    return {node: _format_leaf(place) for node, place in places.locate_nodes(labels, levels).items()}


def _format_leaf(place: TopologyLocation) -> str:
    """By its labels, from the outermost level inward: racks of two rows may have one name."""
    return "/".join(label for label in reversed(place) if label) if place and place[0] else ""


def _list_exception_rates(spec: FabricSpec) -> LinkRates:
    return {(one.leaf, one.spine): 0.0 if one.state is LinkState.DOWN else one.capacity for one in spec.exceptions}


def _set_link_rates(links: Ints, group: Mapping[str, int], rates: LinkRates) -> list[str]:
    """The links that there are not."""
    strange = []
    for (leaf, spine), rate in rates.items():
        way = parse_spine_name(spine)
        if leaf in group and way is not None and way < links.shape[1]:
            links[group[leaf], way] = _to_capacity_units(rate)
        else:
            strange.append(f"{leaf}–{spine}")
    return strange


def _to_capacity_units(rate: float) -> int:
    """What is not quite down is not counted as dead."""
    return max(1, round(rate / CAPACITY_UNIT_BITS_PER_SECOND)) if rate > 0 else 0


def describe_unknown_links(strange: tuple[str, ...]) -> str:
    """For people."""
    return f"there is no link {format_list(strange)}"
