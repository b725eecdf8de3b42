"""Which worker is to hold which seat: rings of ranks follow the seats, so neighbours in the order are to be near in the
network.

Seats are chosen when they are founded, never afterwards: who holds a part of a sharded model stays where it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pacekeeper_analysis.fabric import order
from pacekeeper_analysis.fabric.order import TopologyLocation
from pacekeeper_analysis.plan import Member

from ..api import LeafCrossings
from ..observation import Observation


def order_new_members(observation: Observation, members: Iterable[Member]) -> list[Member]:
    """The same, in the order of new seats: so that a ring through them leaves each leaf once."""
    by_name = {member.worker: member for member in members}
    if not by_name:
        return []
    return [by_name[name] for name in order.order_by_topology(list(by_name), _add_node_tier(observation))]


class SpareSelector:
    """Who of the spares is to take an empty seat. Made once for all seats, since every member counts for each."""

    def __init__(self, observation: Observation) -> None:
        self._places = observation.network_places
        self._is_known = any(self._places.values())
        self._leaves = order.count_by_leaf([member.worker for member in observation.plan.members], self._places)

    def select(self, empty: Member, spares: Sequence[Member]) -> Member:
        """Where nobody is nearer, the first of them."""
        if not self._is_known:
            return spares[0]
        by_name = {spare.worker: spare for spare in spares}
        peers = self._leaves - order.count_by_leaf([empty.worker], self._places)
        return by_name[order.sort_by_distance(empty.worker, list(by_name), self._places, peers)[0]]


def count_leaf_crossings(observation: Observation) -> LeafCrossings | None:
    """Of the present members; None where there are none, or nobody says in which leaf they are."""
    seats = [member.worker for member in observation.plan.members]
    if not any(observation.network_places.get(name) for name in seats):
        return None
    return LeafCrossings(*order.count_leaf_crossings(seats, observation.network_places))


def _add_node_tier(observation: Observation) -> Mapping[str, TopologyLocation]:
    """Places with the node as their innermost tier: workers that share one are the nearest."""
    known = observation.network_places
    return {view.name: (view.node, *known[view.name]) if known[view.name] else () for view in observation.workers}
