"""The test cluster's network between leaves and spines, as its switches see it: what its links carry."""

from __future__ import annotations

import time

from pacekeeper_analysis.fabric.view import FabricLink, FabricView
from testcluster import fabric
from testcluster.leaf_spine import LeafSpine, Link

SECONDS = 3.0


def measured(flows: int, seconds: float = SECONDS) -> FabricView:
    """In Mbit/s, over so many seconds from now on."""
    network, began = fabric.network(), time.monotonic()
    before = _carried(network)
    time.sleep(seconds)
    after, passed = _carried(network), time.monotonic() - began

    def load(link: Link, direction: int) -> int:
        return round((after[link][direction] - before[link][direction]) * 8 / 1e6 / passed)

    links = tuple(
        FabricLink(fabric.leaf_name(link[0]), fabric.spine_name(link[1]), load(link, 0), load(link, 1))
        for link in network.links
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


def _carried(network: LeafSpine) -> dict[Link, tuple[int, int]]:
    """Bytes so far that leaves have sent over each link, and got."""
    leaves = range(network.leaves)
    sent = [count for leaf in leaves for count in network.sent(leaf)]
    received = [count for leaf in leaves for count in network.received(leaf)]
    return dict(zip(network.links, zip(sent, received, strict=True), strict=True))
