"""In which order a job's workers hold its ranks: who is near in the fabric is near in the order.

gloo's ring and NCCL's follow the seats, so that grouped by tier, the outermost first, a ring leaves each leaf once.
That is the least there is: it has to come back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeVar

import numpy as np

TopologyLocation = tuple[str, ...]
"""Where a node is, the innermost tier first: (leaf, block, …); "" where a label is missing. Names count inside of what
is around them: rack 1 of one block is not rack 1 of another."""
Name = TypeVar("Name", bound=Hashable)


def order_by_topology(slots: Sequence[Name], locations: Mapping[Name, TopologyLocation]) -> list[Name]:
    """The same names, grouped by tier, the outermost first. Groups, and who is in them, stay in the order in which they
    stood: nothing moves without a gain.

    Whose place is not known, or only in part, stands behind the others of what is known of it.
    """
    return _group_by_tier(list(slots), locations, _count_tiers(slots, locations))


def _group_by_tier(seats: list[Name], places: Mapping[Name, TopologyLocation], tier: int) -> list[Name]:
    if tier == 0 or len(seats) < 2:
        return seats
    groups: dict[str, list[Name]] = {}
    for name in seats:
        groups.setdefault(_get_tier_label(places, name, tier - 1), []).append(name)
    known = [label for label in groups if label]
    order = [*known, ""] if "" in groups else known
    return [name for label in order for name in _group_by_tier(groups[label], places, tier - 1)]


def arrange_in_mesh(ordered: Sequence[Name], shape: Sequence[int], weight: Sequence[float]) -> list[Name]:
    """Seats for a mesh of workers whose last axis varies fastest, so that its heaviest axis joins neighbours.

    ordered: as `order_by_topology` gives them, one for each place of the mesh. weight: bytes of each axis. Only whole workers
    change places: what a worker's own ranks say to each other stays where it is. Raises ValueError where `shape` is not
    that of so many.
    """
    heaviest_last = sorted(range(len(shape)), key=lambda axis: weight[axis])
    numbers = np.arange(len(ordered)).reshape([shape[axis] for axis in heaviest_last])
    return [ordered[number] for number in numbers.transpose(np.argsort(heaviest_last)).ravel().tolist()]


def count_leaf_crossings(slots: Sequence[Name], places: Mapping[Name, TopologyLocation]) -> tuple[int, int]:
    """How often a ring through these seats leaves a leaf: now, and at best. Who has no leaf counts as one by itself."""
    leaves = [_get_location_from_tier(places, name, 0) or (str(number),) for number, name in enumerate(slots)]
    now = sum(one != other for one, other in zip(leaves, leaves[1:] + leaves[:1], strict=True))
    distinct = len(set(leaves))
    return now, distinct if distinct > 1 else 0


def count_by_leaf(names: Sequence[Name], places: Mapping[Name, TopologyLocation]) -> Counter[TopologyLocation]:
    """How many of them are in each leaf; those whose leaf is not known count under ()."""
    return Counter(_get_location_from_tier(places, name, 0) for name in names)


def sort_by_distance(
    slot: Name, spares: Sequence[Name], places: Mapping[Name, TopologyLocation], peers: Mapping[TopologyLocation, int] = MappingProxyType({})
) -> list[Name]:
    """The spares, those first that share the innermost tier with who held the seat, then with most of its peers.
    `peers`: as `leaves` counts them."""
    tiers = _count_tiers([slot], places)

    def distance(spare: Name) -> tuple[int, int]:
        def shares(tier: int) -> bool:
            return bool(_get_location_from_tier(places, slot, tier)) and _get_location_from_tier(places, spare, tier) == _get_location_from_tier(places, slot, tier)

        leaf = _get_location_from_tier(places, spare, 0)
        return next(filter(shares, range(tiers)), tiers), -peers.get(leaf, 0) if leaf else 1

    return sorted(spares, key=distance)


def _count_tiers(seats: Sequence[Name], places: Mapping[Name, TopologyLocation]) -> int:
    return max((len(places.get(name, ())) for name in seats), default=0)


def _get_location_from_tier(places: Mapping[Name, TopologyLocation], name: Name, tier: int) -> TopologyLocation:
    """From this tier outward; (): its label is missing."""
    return tuple(places.get(name, ()))[tier:] if _get_tier_label(places, name, tier) else ()


def _get_tier_label(places: Mapping[Name, TopologyLocation], name: Name, tier: int) -> str:
    place = places.get(name, ())
    return place[tier] if tier < len(place) else ""
