"""The load of the links between leaves and spines of the test cluster, measured at its switches."""

from __future__ import annotations

import time

from pacekeeper_analysis.fabric.view import FabricLink, FabricView
from testcluster import fabric
from testcluster.leaf_spine import LeafSpine, Link

MEASURE_SECONDS = 3.0


def measure_links(flows: int, seconds: float = MEASURE_SECONDS) -> FabricView:
    """Measure the links' load in Mbit/s, over the next `seconds`."""
    network, start = fabric.get_network(), time.monotonic()
    before = _read_carried_bytes(network)
    time.sleep(seconds)
    after, elapsed = _read_carried_bytes(network), time.monotonic() - start

    def load(link: Link, direction: int) -> int:
        return round((after[link][direction] - before[link][direction]) * 8 / 1e6 / elapsed)

    links = tuple(
        FabricLink(fabric.format_leaf_name(link[0]), fabric.format_spine_name(link[1]), load(link, 0), load(link, 1))
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


def find_busy_spines(view: FabricView, leaf: str) -> set[str]:
    """Return the spines over which a leaf sends its load."""
    up = {link.spine: link.up for link in view.links if link.leaf == leaf}
    return {spine for spine, load in up.items() if load > 0.1 * sum(up.values())}


def _read_carried_bytes(network: LeafSpine) -> dict[Link, tuple[int, int]]:
    """Return the bytes that leaves have sent and received over each link so far."""
    leaves = range(network.leaves)
    sent = [count for leaf in leaves for count in network.read_sent_bytes(leaf)]
    received = [count for leaf in leaves for count in network.read_received_bytes(leaf)]
    return dict(zip(network.links, zip(sent, received, strict=True), strict=True))
