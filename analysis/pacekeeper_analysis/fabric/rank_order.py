"""The order in which a job's workers hold its ranks: workers that are close in the fabric are close in the order.

Rings of gloo and NCCL follow the slots. So if slots are grouped by tier, the outermost first, a ring leaves each leaf
once. That is the minimum, because the ring must return.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeVar

import numpy as np

TopologyLocation = tuple[str, ...]
"""The location of a node, the innermost tier first: (leaf, block, …). "" if a label is missing.

Names are local to the outer tiers: rack 1 of one block is not rack 1 of another.
"""
Name = TypeVar("Name", bound=Hashable)


def order_by_topology(slots: Sequence[Name], locations: Mapping[Name, TopologyLocation]) -> list[Name]:
    """Return the same names, grouped by tier, the outermost first.

    Groups, and names within them, keep their order: nothing moves without a gain. Names with unknown or incomplete
    locations come after the others in the known part of their location.
    """
    return _group_by_tier(list(slots), locations, _count_tiers(slots, locations))


def _group_by_tier(slots: list[Name], locations: Mapping[Name, TopologyLocation], tier: int) -> list[Name]:
    if tier == 0 or len(slots) <= 1:
        return slots
    groups: dict[str, list[Name]] = {}
    for name in slots:
        groups.setdefault(_get_tier_label(locations, name, tier - 1), []).append(name)
    known_labels = [label for label in groups if label]
    order = [*known_labels, ""] if "" in groups else known_labels
    return [name for label in order for name in _group_by_tier(groups[label], locations, tier - 1)]


def arrange_in_mesh(ordered: Sequence[Name], shape: Sequence[int], weight: Sequence[float]) -> list[Name]:
    """Return slots for a mesh of workers, last axis fastest, so that its heaviest axis joins adjacent workers.

    `ordered` is the result of `order_by_topology`, with one name per place of the mesh. `weight` is the bytes of each
    axis. Only whole workers change places: traffic between a worker's own ranks stays within it. Raises ValueError if
    `shape` does not have this many places.
    """
    heaviest_last = sorted(range(len(shape)), key=lambda axis: weight[axis])
    numbers = np.arange(len(ordered)).reshape([shape[axis] for axis in heaviest_last])
    return [ordered[number] for number in numbers.transpose(np.argsort(heaviest_last)).ravel().tolist()]


def count_leaf_crossings(slots: Sequence[Name], locations: Mapping[Name, TopologyLocation]) -> tuple[int, int]:
    """Return how often a ring through these slots leaves a leaf: now, and at best.

    Unknown leaves count individually.
    """
    leaves = [_get_location_from_tier(locations, name, 0) or (str(number),) for number, name in enumerate(slots)]
    crossings = sum(leaf != next_leaf for leaf, next_leaf in zip(leaves, leaves[1:] + leaves[:1], strict=True))
    distinct = len(set(leaves))
    return crossings, distinct if distinct > 1 else 0


def count_by_leaf(names: Sequence[Name], locations: Mapping[Name, TopologyLocation]) -> Counter[TopologyLocation]:
    """Return the number of names in each leaf. Names with unknown leaf count under ()."""
    return Counter(_get_location_from_tier(locations, name, 0) for name in names)


def sort_by_distance(
    slot: Name,
    spares: Sequence[Name],
    locations: Mapping[Name, TopologyLocation],
    peers: Mapping[TopologyLocation, int] = MappingProxyType({}),
) -> list[Name]:
    """Sort the spares: first those that share the innermost tier with the slot's former worker, then by its peers.

    `peers` is the result of `count_by_leaf`.
    """
    tiers = _count_tiers([slot], locations)

    def distance(spare: Name) -> tuple[int, int]:
        def shares(tier: int) -> bool:
            return bool(_get_location_from_tier(locations, slot, tier)) and _get_location_from_tier(
                locations, spare, tier
            ) == _get_location_from_tier(locations, slot, tier)

        leaf = _get_location_from_tier(locations, spare, 0)
        return next(filter(shares, range(tiers)), tiers), -peers.get(leaf, 0) if leaf else 1

    return sorted(spares, key=distance)


def _count_tiers(slots: Sequence[Name], locations: Mapping[Name, TopologyLocation]) -> int:
    return max((len(locations.get(name, ())) for name in slots), default=0)


def _get_location_from_tier(locations: Mapping[Name, TopologyLocation], name: Name, tier: int) -> TopologyLocation:
    """Return the location from this tier outward. () if its label is missing."""
    return tuple(locations.get(name, ()))[tier:] if _get_tier_label(locations, name, tier) else ()


def _get_tier_label(locations: Mapping[Name, TopologyLocation], name: Name, tier: int) -> str:
    location = locations.get(name, ())
    return location[tier] if tier < len(location) else ""
