"""The test cluster's network between leaves and spines, as its switches see it: what its links carry."""

from __future__ import annotations

import time
from collections.abc import Sequence

from pacekeeper_analysis.fabric.view import FabricLink, FabricView
from testcluster import fabric

SECONDS = 3.0


def measured(flows: int, seconds: float = SECONDS) -> FabricView:
    """In Mbit/s, over so many seconds from now on."""
    network, began = fabric.network(), time.monotonic()
    before = _carried()
    time.sleep(seconds)
    passed = time.monotonic() - began
    loads = [[_mbits(now - was, passed) for now, was in zip(*both, strict=True)] for both in zip(_carried(), before)]
    links = tuple(
        FabricLink(fabric.leaf_name(leaf), fabric.spine_name(spine), up, down)
        for (leaf, spine), up, down in zip(network.links, *loads, strict=True)
    )
    return FabricView(
        fabric.NAME,
        network.spines * network.planes,
        network.leaves,
        flows,
        max(link.load for link in links),
        links=links,
        unit="Mbit/s",
    )


def busy(view: FabricView, leaf: str) -> set[str]:
    """The spines that a leaf sends its load by."""
    up = {link.spine: link.up for link in view.links if link.leaf == leaf}
    return {spine for spine, load in up.items() if load > 0.1 * sum(up.values())}


def _carried() -> tuple[Sequence[int], Sequence[int]]:
    """Bytes so far that leaves have sent over each link, and got."""
    network = fabric.network()
    leaves = range(network.leaves)
    sent = [count for leaf in leaves for count in network.sent(leaf)]
    return sent, [count for leaf in leaves for count in network.received(leaf)]


def _mbits(count: int, seconds: float) -> int:
    return round(count * 8 / 1e6 / seconds)
