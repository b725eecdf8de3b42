"""The switches of the real fabric: their seeds, a cut cable, and what they report of flows and links."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from pacekeeper_operator.api.fabric import FabricSpec, LevelSpec, UplinkSpec
from pacekeeper_operator.decide.network.wiring import LinkRates, build_wiring
from pacekeeper_operator.state.cluster_view import NodeView
from pacekeeper_operator.state.network import Wiring
from pacekeeper_operator.state.routes import format_spine_name
from testcluster.shell import run_command
from testing.network.fabric import FabricHost, HostedLeafSpine

LABEL = "fabric.topograph.run/tier-0"


class Flow(NamedTuple):
    """What one end of a TCP connection sends to the other."""

    source: FabricHost
    destination: FabricHost
    source_port: int
    port: int


class Switches:
    """`rate`: bits per second that each link carries in each direction."""

    def __init__(self, fabric: HostedLeafSpine, rate: float) -> None:
        self._fabric = fabric
        self._rate = f"{rate / 1e6:g}mbit"  # in tc's syntax
        self.spec = FabricSpec(
            spines=fabric.spines,
            levels=(LevelSpec(LABEL),),
            uplink=UplinkSpec(rate),
            hops={address: format_spine_name(int(name[1:])) for address, name in fabric.hops.items()},
        )
        self._nodes = [NodeView(host.namespace, host.namespace, labels=_build_labels(host)) for host in fabric.hosts]
        fabric.set_all_rates(self._rate)

    def build_wiring(self) -> Wiring:
        """The fabric as planning sees it now."""
        return build_wiring(self.spec, self._nodes, self._list_down_rates())

    def draw(self, seed: int) -> None:
        """Other choices among equal paths, each leaf its own."""
        self._fabric.reseed_hashes(seed)

    def list_routes(self, flows: Sequence[Flow]) -> list[int]:
        """By which spine each goes, as its leaf answers."""
        routes = [-1] * len(flows)
        for leaf in {flow.source.leaf for flow in flows}:
            indices = [index for index, flow in enumerate(flows) if flow.source.leaf == leaf]
            queries = "\n".join(_format_route_query(flows[index]) for index in indices)
            output = run_command(
                "ip", "-n", self._fabric.get_leaf_namespace(leaf), "-json", "-batch", "-", stdin=queries
            )
            for index, line in zip(indices, filter(str.strip, output.splitlines()), strict=True):
                routes[index] = int(json.loads(line)[0]["dev"].removeprefix("up"))
        return routes

    @contextmanager
    def cut(self, leaf: int, spine: int) -> Iterator[None]:
        """The cable between them. Both ends detect it, and the other leaves are updated, as by a routing protocol."""
        self._fabric.cut_link(leaf, spine)
        try:
            yield
        finally:
            self._fabric.heal_link(leaf, spine, self._rate)

    def read_sent_bytes(self) -> list[list[int]]:
        """Bytes that each leaf has sent up to each spine so far."""
        return [self._fabric.read_sent_bytes(leaf) for leaf in range(self._fabric.leaves)]

    def _list_down_rates(self) -> LinkRates:
        """What an exporter of the switches would report of links that are down."""
        return {(f"l{leaf}", format_spine_name(spine)): 0.0 for leaf, spine in self._fabric.find_broken().links}


def _build_labels(host: FabricHost) -> dict[str, str]:
    return {LABEL: f"l{host.leaf}"}


def _format_route_query(flow: Flow) -> str:
    """By which cable a packet comes in makes no difference, but some cable has to be named."""
    ends = f"{flow.destination.address} from {flow.source.address} iif up0"
    return f"route get {ends} ipproto tcp sport {flow.source_port} dport {flow.port}"
