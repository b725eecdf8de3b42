"""A fabric of two tiers as planning sees it: groups of hosts, routes, and directed links.

A group is the hosts under one leaf in each plane. A *route* between two groups is one spine of one plane: traffic that
leaves by a plane arrives by it. Planes share nothing, so the routes of two planes are numbered consecutively: route =
plane × spines + spine. A flow from group s to group d by route w loads the uplink (s, w) and the downlink (d, w).
Traffic within a group loads neither.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError

Ints = NDArray[np.int64]
_LINK_TABLE_DIMENSIONS = 2
NO_ROUTE = -1
"""The route of a flow that stays in its group, or that has none."""


@dataclass(frozen=True)
class Topology:
    """Capacities of all directed links, (groups, routes), in any one unit. 0 means dead. Arrays must not be changed."""

    up: Ints
    down: Ints
    planes: int = 1

    def __post_init__(self) -> None:
        if self.up.ndim != _LINK_TABLE_DIMENSIONS or self.up.shape != self.down.shape or not self.up.size:
            raise InputError(
                f"fabric: uplinks {self.up.shape} and downlinks {self.down.shape} must both be groups × routes"
            )
        if self.planes < 1 or self.up.shape[1] % self.planes:
            raise InputError(f"fabric: {self.up.shape[1]} routes cannot be divided into {self.planes} planes")
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
        """Number of spines of each plane."""
        return self.routes // self.planes

    @property
    def unit(self) -> int:
        """Capacity of the best link. Loads of others are scaled as if they were as fast."""
        return max(1, int(self.up.max()), int(self.down.max()))

    @property
    def is_symmetric(self) -> bool:
        """Whether all links are alive and equal."""
        return bool((self.up == self.unit).all() and (self.down == self.unit).all())

    def fingerprint_live_routes(self, source: Ints, destination: Ints, routes: Ints) -> Ints:
        """Return for each flow a number for the live routes of its plane between its groups. 0 means all are alive.

        Leaves choose among these by a hash. If one dies or recovers, flows on other routes may change, too.
        """
        dead_up, dead_down = self.up == 0, self.down == 0
        fingerprints = np.zeros(len(routes), dtype=np.int64)
        fingerprint_by_ends: dict[tuple[int, int, int], int] = {}
        at_risk = (routes != NO_ROUTE) & (dead_up.any(axis=1)[source] | dead_down.any(axis=1)[destination])
        for flow in np.flatnonzero(at_risk).tolist():
            ends = int(source[flow]), int(destination[flow]), int(routes[flow]) // self.spines
            if ends not in fingerprint_by_ends:
                plane = slice(ends[2] * self.spines, (ends[2] + 1) * self.spines)
                dead = dead_up[ends[0], plane] | dead_down[ends[1], plane]
                fingerprint_by_ends[ends] = zlib.crc32(np.packbits(dead).tobytes()) if dead.any() else 0
            fingerprints[flow] = fingerprint_by_ends[ends]
        return fingerprints

    def with_dead_links(self, up: Iterable[tuple[int, int]] = (), down: Iterable[tuple[int, int]] = ()) -> Topology:
        """Return the topology with these links, (group, route), dead."""
        ups, downs = self.up.copy(), self.down.copy()
        for group, route in up:
            ups[group, route] = 0
        for group, route in down:
            downs[group, route] = 0
        return Topology(ups, downs, self.planes)


def build_uniform_topology(groups: int, spines: int, capacity: int = 1, planes: int = 1) -> Topology:
    """Build a topology in which all links are alive and equal."""
    if groups < 1 or spines < 1 or capacity < 1:
        raise InputError(f"fabric: {groups} groups, {spines} spines, capacity {capacity}: each must be at least 1")
    links = np.full((groups, planes * spines), capacity, dtype=np.int64)
    return Topology(links, links.copy(), planes)
