"""The assignment of ranks to workers. Rings follow the ranks, so neighbors in the order are to be near in the network.

Ranks are assigned when they are new, and do not move afterwards: a worker with a part of a sharded model keeps it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pacekeeper_analysis.fabric import rank_order
from pacekeeper_analysis.fabric.rank_order import TopologyLocation
from pacekeeper_analysis.protocol.plan import Member

from ...api.training_job import LeafCrossings
from ...state.observation import Observation


def order_new_members(observation: Observation, members: Iterable[Member]) -> list[Member]:
    """Return the members in the order of new ranks, so that a ring through them leaves each leaf once."""
    by_name = {member.worker: member for member in members}
    if not by_name:
        return []
    return [by_name[name] for name in rank_order.order_by_topology(list(by_name), _add_node_tier(observation))]


class SpareSelector:
    """The choice of a spare for vacant ranks. It is built once for all of them, since every member counts for each."""

    def __init__(self, observation: Observation) -> None:
        self._places = observation.network_places
        self._is_known = any(self._places.values())
        self._leaves = rank_order.count_by_leaf([member.worker for member in observation.plan.members], self._places)

    def select(self, vacant: Member, spares: Sequence[Member]) -> Member:
        """Return the nearest spare; the first one where none is nearer."""
        if not self._is_known:
            return spares[0]
        by_name = {spare.worker: spare for spare in spares}
        peers = self._leaves - rank_order.count_by_leaf([vacant.worker], self._places)
        return by_name[rank_order.sort_by_distance(vacant.worker, list(by_name), self._places, peers)[0]]


def count_leaf_crossings(observation: Observation) -> LeafCrossings | None:
    """Return the crossings of the present members; None: there are none, or no leaf is known."""
    names = [member.worker for member in observation.plan.members]
    if not any(observation.network_places.get(worker) for worker in names):
        return None
    return LeafCrossings(*rank_order.count_leaf_crossings(names, observation.network_places))


def _add_node_tier(observation: Observation) -> Mapping[str, TopologyLocation]:
    """Return network places with the node as the innermost tier: workers that share one are the nearest."""
    places = observation.network_places
    return {view.name: (view.node, *places[view.name]) if places[view.name] else () for view in observation.workers}
