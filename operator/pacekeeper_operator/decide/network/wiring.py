"""A Fabric as joint planning sees it: the leaf of each node, and the capacity of each link. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from pacekeeper_analysis.fabric import locations
from pacekeeper_analysis.fabric.rank_order import TopologyLocation
from pacekeeper_analysis.fabric.topology import Ints, Topology
from pacekeeper_analysis.fabric.view import LinkState

from ...api.fabric import FabricSpec
from ...formatting import format_list
from ...state.cluster_view import NodeView
from ...state.network import LinkShares, Wiring
from ...state.routes import format_spine_name, parse_spine_name
from .link_state import NO_DEGRADED_LINKS, DegradedLinks

MAX_PLANNED_LINKS = 2**18
"""Leaves × routes. A larger fabric is not planned."""
CAPACITY_UNIT_BITS_PER_SECOND = 1e6
"""Unit of capacities, in bits a second."""

LinkRates = Mapping[tuple[str, str], float]
"""Present rates of links in bits a second, by leaf and spine; 0: it is down."""


def build_wiring(
    spec: FabricSpec, nodes: Iterable[NodeView], measured_rates: LinkRates, degraded: DegradedLinks = NO_DEGRADED_LINKS
) -> Wiring:
    """Return the wiring of a Fabric.

    `measured_rates`: measurements of links. `degraded`: what jobs' flows have shown, which only reduces them.
    Exceptions in `spec` override both. A link without any of these has the built capacity, and none has more.
    """
    leaf_names = _map_nodes_to_leaves(spec, nodes)
    leaves = tuple(sorted({leaf for leaf in leaf_names.values() if leaf}))
    leaf_index = {leaf: index for index, leaf in enumerate(leaves)}
    leaf_of = {node: leaf_index[leaf] for node, leaf in leaf_names.items() if leaf}
    route_count = spec.planes * spec.spines
    if not leaves or len(leaves) * route_count > MAX_PLANNED_LINKS:
        return Wiring(leaves, leaf_of, None)
    full_capacity = _to_capacity_units(spec.uplink.capacity * spec.uplink.parallel)
    links = np.full((len(leaves), route_count), full_capacity, dtype=np.int64)
    unknown_links = _set_link_rates(links, leaf_index, measured_rates) + _set_link_rates(
        links, leaf_index, _list_exception_rates(spec)
    )
    links = np.minimum(links, full_capacity)
    switch_topology = Topology(links, links, spec.planes)
    excepted = frozenset((exception.leaf, exception.spine) for exception in spec.exceptions)

    def doubted(links: Ints, shares: LinkShares) -> Ints:
        reduced = links.copy()
        rates = {
            link: share * full_capacity * CAPACITY_UNIT_BITS_PER_SECOND
            for link, share in shares.items()
            if link not in excepted
        }
        _set_link_rates(reduced, leaf_index, rates)  # a link that no longer exists is ignored
        lower: Ints = np.minimum(links, reduced)
        return lower

    links = doubted(links, degraded.agreed_shares)
    views = {tenant: doubted(links, shares) for tenant, shares in degraded.shares_by_namespace.items()}
    return Wiring(
        leaves,
        leaf_of,
        Topology(links, links, spec.planes),
        switch_topology,
        tuple(dict.fromkeys(unknown_links)),
        slow_links={
            link: share
            for link, share in degraded.agreed_shares.items()
            if link[0] in leaf_index and link not in excepted
        },
        namespace_topologies={
            tenant: Topology(view, view, spec.planes) for tenant, view in views.items() if (view < links).any()
        },
    )


def list_unknown_spines(spec: FabricSpec) -> tuple[str, ...]:
    """Return the spines that its hops name and that do not exist."""
    route_count = spec.planes * spec.spines
    existing = {format_spine_name(route) for route in range(route_count)}
    return tuple(sorted(set(spec.hops.values()) - existing))


def list_unaddressed_spines(spec: FabricSpec) -> tuple[str, ...]:
    """Return the spines for which its hops have no address."""
    answering = set(spec.hops.values())
    return tuple(name for name in map(format_spine_name, range(spec.planes * spec.spines)) if name not in answering)


def _map_nodes_to_leaves(spec: FabricSpec, nodes: Iterable[NodeView]) -> dict[str, str]:
    """Return node → leaf; "": it has no label for it."""
    levels = tuple(level.node_label for level in spec.levels)
    labels = {node.name: node.labels for node in nodes}
    if levels:
        labels = {
            node: {name: node_labels[name] for name in levels if name in node_labels}
            for node, node_labels in labels.items()
        }
    return {node: _format_leaf(location) for node, location in locations.locate_nodes(labels, levels).items()}


def _format_leaf(location: TopologyLocation) -> str:
    """Return the leaf's labels from the outermost level inward: racks of two rows may have one name."""
    return "/".join(label for label in reversed(location) if label) if location and location[0] else ""


def _list_exception_rates(spec: FabricSpec) -> LinkRates:
    return {
        (exception.leaf, exception.spine): 0.0 if exception.state is LinkState.DOWN else exception.capacity
        for exception in spec.exceptions
    }


def _set_link_rates(links: Ints, leaf_index: Mapping[str, int], rates: LinkRates) -> list[str]:
    """Set the rates in `links`, and return the links that do not exist."""
    unknown_links = []
    for (leaf, spine), rate in rates.items():
        route = parse_spine_name(spine)
        if leaf in leaf_index and route is not None and route < links.shape[1]:
            links[leaf_index[leaf], route] = _to_capacity_units(rate)
        else:
            unknown_links.append(f"{leaf}–{spine}")
    return unknown_links


def _to_capacity_units(rate: float) -> int:
    """Return the rate in units of capacity. A link that is not quite down does not count as dead."""
    return max(1, round(rate / CAPACITY_UNIT_BITS_PER_SECOND)) if rate > 0 else 0


def describe_unknown_links(links: tuple[str, ...]) -> str:
    return f"there is no link {format_list(links)}"
