"""The switches of the real fabric: their seeds, a cut cable, and what they themselves say of flows and links."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from pacekeeper_operator.api import FabricSpec, LevelSpec, UplinkSpec
from pacekeeper_operator.decide.wiring import LinkRates, format_spine_name, build_wiring
from pacekeeper_operator.network import Wiring
from pacekeeper_operator.observation import NodeView
from testcluster.shell import run_command
from tests.support.fabric import FabricHost, HostedLeafSpine

LABEL = "fabric.topograph.run/tier-0"


class Flow(NamedTuple):
    """What one end of a TCP connection sends to the other."""

    source: FabricHost
    destination: FabricHost
    source_port: int
    port: int


class Switches:
    """`rate`: bits a second that each link carries, each way."""

    def __init__(self, fabric: HostedLeafSpine, rate: float) -> None:
        self._fabric = fabric
        self._rate = f"{rate / 1e6:g}mbit"  # in tc's words
        self.spec = FabricSpec(
            spines=fabric.spines,
            levels=(LevelSpec(LABEL),),
            uplink=UplinkSpec(rate),
            hops={address: format_spine_name(int(name[1:])) for address, name in fabric.hops.items()},
        )
        self._nodes = [NodeView(host.namespace, host.namespace, labels=_labels(host)) for host in fabric.hosts]
        fabric.set_all_rates(self._rate)

    def wiring(self) -> Wiring:
        """The fabric as planning sees it now."""
        return build_wiring(self.spec, self._nodes, self._down())

    def draw(self, seed: int) -> None:
        """Other choices among equal paths, each leaf its own."""
        self._fabric.reseed_hashes(seed)

    def list_routes(self, flows: Sequence[Flow]) -> list[int]:
        """By which spine each goes, as its leaf answers."""
        found = [-1] * len(flows)
        for leaf in {flow.source.leaf for flow in flows}:
            places = [place for place, flow in enumerate(flows) if flow.source.leaf == leaf]
            questions = "\n".join(_question(flows[place]) for place in places)
            said = run_command("ip", "-n", self._fabric.get_leaf_namespace(leaf), "-json", "-batch", "-", stdin=questions)
            for place, line in zip(places, filter(str.strip, said.splitlines()), strict=True):
                found[place] = int(json.loads(line)[0]["dev"].removeprefix("up"))
        return found

    @contextmanager
    def cut(self, leaf: int, spine: int) -> Iterator[None]:
        """The cable between them. Both ends see it, and the other leaves are told, as by a routing protocol."""
        self._fabric.cut_link(leaf, spine)
        try:
            yield
        finally:
            self._fabric.heal_link(leaf, spine, self._rate)

    def sent(self) -> list[list[int]]:
        """Bytes that each leaf has sent up to each spine so far."""
        return [self._fabric.read_sent_bytes(leaf) for leaf in range(self._fabric.leaves)]

    def _down(self) -> LinkRates:
        """What an exporter of the switches would say, of links that are down."""
        return {(f"l{leaf}", format_spine_name(spine)): 0.0 for leaf, spine in self._fabric.find_broken().links}


def _labels(host: FabricHost) -> dict[str, str]:
    return {LABEL: f"l{host.leaf}"}


def _question(flow: Flow) -> str:
    """By which cable a packet comes in makes no difference, but some cable has to be named."""
    ends = f"{flow.destination.address} from {flow.source.address} iif up0"
    return f"route get {ends} ipproto tcp sport {flow.source_port} dport {flow.port}"
