"""A fabric of two tiers as planning sees it: groups of hosts under one leaf in each plane, ways, and directed links.

A *way* between two groups is one spine of one plane: who leaves by a plane comes in by it. Planes share nothing, so the
ways of two planes are numbered through: way = plane × spines + spine. A flow of group s to group d by way w loads the
uplink (s, w) and the downlink (d, w); what stays in its group loads neither.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError

Ints = NDArray[np.int64]
NO_ROUTE = -1
"""The way of a flow that stays in its group, or that has none."""


@dataclass(frozen=True)
class Topology:
    """Capacities of all directed links, (groups, ways), in any one unit; 0: dead. Arrays are not to be changed."""

    up: Ints
    down: Ints
    planes: int = 1

    def __post_init__(self) -> None:
        if self.up.ndim != 2 or self.up.shape != self.down.shape or not self.up.size:
            raise InputError(
                f"fabric: uplinks {self.up.shape} and downlinks {self.down.shape} must both be groups × ways"
            )
        if self.planes < 1 or self.up.shape[1] % self.planes:
            raise InputError(f"fabric: {self.up.shape[1]} ways cannot be those of {self.planes} planes")
        if min(self.up.min(), self.down.min()) < 0:
            raise InputError("fabric: a capacity is negative; give 0 for a dead link")

    @property
    def groups(self) -> int:
        return int(self.up.shape[0])

    @property
    def routes(self) -> int:
        return int(self.up.shape[1])

    @property
    def spines(self) -> int:
        """Of each plane."""
        return self.routes // self.planes

    @property
    def unit(self) -> int:
        """Capacity of the best link: loads of others are counted as if they were as fast."""
        return max(1, int(self.up.max()), int(self.down.max()))

    @property
    def is_symmetric(self) -> bool:
        """All links are alive and alike."""
        return bool((self.up == self.unit).all() and (self.down == self.unit).all())

    def fingerprint_live_routes(self, source: Ints, destination: Ints, way: Ints) -> Ints:
        """Of flows, each a number for the ways of its plane that are alive between its groups; 0: all are.

        Leaves choose among these by a hash: when one dies or comes back, flows that went by others may change, too.
        """
        dead_up, dead_down = self.up == 0, self.down == 0
        found = np.zeros(len(way), dtype=np.int64)
        known: dict[tuple[int, int, int], int] = {}
        at_risk = (way != NO_ROUTE) & (dead_up.any(axis=1)[source] | dead_down.any(axis=1)[destination])
        for flow in np.flatnonzero(at_risk).tolist():
            ends = int(source[flow]), int(destination[flow]), int(way[flow]) // self.spines
            if ends not in known:
                plane = slice(ends[2] * self.spines, (ends[2] + 1) * self.spines)
                dead = dead_up[ends[0], plane] | dead_down[ends[1], plane]
                known[ends] = zlib.crc32(np.packbits(dead).tobytes()) if dead.any() else 0
            found[flow] = known[ends]
        return found

    def with_dead_links(self, up: Iterable[tuple[int, int]] = (), down: Iterable[tuple[int, int]] = ()) -> Topology:
        """The same with these links, (group, way), dead."""
        ups, downs = self.up.copy(), self.down.copy()
        for group, way in up:
            ups[group, way] = 0
        for group, way in down:
            downs[group, way] = 0
        return Topology(ups, downs, self.planes)


def build_uniform_topology(groups: int, spines: int, capacity: int = 1, planes: int = 1) -> Topology:
    """All links alive and alike."""
    if groups < 1 or spines < 1 or capacity < 1:
        raise InputError(f"fabric: {groups} groups, {spines} spines, capacity {capacity}: each must be 1 at least")
    links = np.full((groups, planes * spines), capacity, dtype=np.int64)
    return Topology(links, links.copy(), planes)
