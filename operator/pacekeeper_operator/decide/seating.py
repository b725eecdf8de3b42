"""Which worker is to hold which seat: rings of ranks follow the seats, so neighbours in the order are to be near in the
network.

Seats are chosen when they are founded, never afterwards: who holds a part of a sharded model stays where it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pacekeeper_analysis.fabric import order
from pacekeeper_analysis.fabric.order import Place
from pacekeeper_analysis.plan import Member

from ..api import LeafCrossings
from ..observation import Observation


def founded(observation: Observation, members: Iterable[Member]) -> list[Member]:
    """The same, in the order of new seats: so that a ring through them leaves each leaf once."""
    by_name = {member.worker: member for member in members}
    if not by_name:
        return []
    return [by_name[name] for name in order.by_topology(list(by_name), _with_nodes(observation))]


class Nearest:
    """Who of the spares is to take an empty seat. Made once for all seats, since every member counts for each."""

    def __init__(self, observation: Observation) -> None:
        self._places = observation.places
        self._is_known = any(self._places.values())
        self._leaves = order.leaves([member.worker for member in observation.plan.members], self._places)

    def of(self, empty: Member, spares: Sequence[Member]) -> Member:
        """Where nobody is nearer, the first of them."""
        if not self._is_known:
            return spares[0]
        by_name = {spare.worker: spare for spare in spares}
        peers = self._leaves - order.leaves([empty.worker], self._places)
        return by_name[order.nearest(empty.worker, list(by_name), self._places, peers)[0]]


def leaf_crossings(observation: Observation) -> LeafCrossings | None:
    """Of the present members; None where there are none, or nobody says in which leaf they are."""
    seats = [member.worker for member in observation.plan.members]
    if not any(observation.places.get(name) for name in seats):
        return None
    return LeafCrossings(*order.crossings(seats, observation.places))


def _with_nodes(observation: Observation) -> Mapping[str, Place]:
    """Places with the node as their innermost tier: workers that share one are the nearest."""
    known = observation.places
    return {view.name: (view.node, *known[view.name]) if known[view.name] else () for view in observation.workers}
