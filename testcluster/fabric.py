"""The cluster's optional data network: leaves and spines between the nodes, in addition to the bridge.

Only traffic between pods of different nodes uses it, because only the routes to the pods' subnets lead there. The
bridge carries the API server, kubelets, and Prometheus. The network exists only on request (`up --fabric 1`): most
tests do not need it, and three more switches on each route would cost them CPU time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from testcluster import api, programs
from testcluster.cables import Cable
from testcluster.leaf_spine import LeafSpine, Link, Machine
from testcluster.settings import KUBECONFIG, STATE, ClusterNode, list_nodes
from testcluster.shell import ClusterError, run_command, write_if_changed

LEAVES, SPINES, MAX_PORTS = 3, 3, 2
NAME = "testcluster"
LABEL = "fabric.topograph.run/tier-0"
"""Label of a node: its leaf."""
UNLIMITED_RATE = "10G"
"""Capacity of links without a rate limit in the `Fabric`."""
_PREFIX = "pacekeeper-fabric"
_LAYOUT_FILE = STATE / "fabric.json"
_RATE_PATTERN = re.compile(r"([1-9]\d*)([mg])bit", re.ASCII)


@dataclass(frozen=True)
class FabricLayout:
    """The present fabric.

    `ports`: of each node; 0: there is none. `rate`: of all links, in tc's format; "": no limit.
    """

    nodes: int = 0
    ports: int = 0
    rate: str = ""


def ensure_fabric(members: Sequence[ClusterNode], ports: int | None) -> None:
    """Ensure a complete fabric with this number of ports per node (None: unchanged).

    With 0 ports, there is no fabric.
    """
    previous_layout = _read_layout()
    layout = FabricLayout(len(members), previous_layout.ports if ports is None else ports, previous_layout.rate)
    if previous_layout.ports and previous_layout.ports != layout.ports:
        _build_network(FabricLayout(previous_layout.nodes, MAX_PORTS)).remove()
    if layout.ports:
        write_if_changed(_LAYOUT_FILE, json.dumps(asdict(layout)))
        _build_network(layout).ensure(layout.rate)
    else:
        _LAYOUT_FILE.unlink(missing_ok=True)


def remove_fabric() -> None:
    """Remove the switches and all their cables. The rest goes with the nodes."""
    LeafSpine(_PREFIX, LEAVES, SPINES, planes=MAX_PORTS).remove()


def get_network() -> LeafSpine:
    """Return the fabric's network. Raises ClusterError if there is none."""
    layout = _read_layout()
    if not layout.ports:
        raise ClusterError("the cluster has no fabric: `python -m testcluster up --fabric 1` creates one")
    return _build_network(layout)


def list_cables(node: ClusterNode) -> list[Cable]:
    """Return the node's cables to its leaf; empty without a fabric."""
    layout = _read_layout()
    return _build_network(layout).list_cables(_build_machine(node)) if layout.ports else []


def update_routes() -> None:
    """Update all routes to the present state of the cables."""
    if _read_layout().ports:
        get_network().update_routes()


def set_all_rates(rate: str) -> None:
    """Set the rate of all links between leaves and spines, also of future ones.

    `rate`: in tc's format, like 50mbit; "": no limit. Raises ValueError for another format.
    """
    check_rate(rate)
    network, layout = get_network(), replace(_read_layout(), rate=rate)
    write_if_changed(_LAYOUT_FILE, json.dumps(asdict(layout)))
    network.set_all_rates(rate)


def get_rate() -> str:
    """Return the rate of links that are not slowed, in tc's format."""
    return _read_layout().rate


def label_nodes(members: Sequence[ClusterNode]) -> None:
    """Label each node with its leaf; without a fabric, remove the labels."""
    has_fabric = bool(_read_layout().ports)
    kubectl = (programs.find_kubectl(), f"--kubeconfig={KUBECONFIG}")
    for node in members:
        label = api.get_path(f"/api/v1/nodes/{node.name}")["metadata"]["labels"].get(LABEL)
        leaf = get_leaf(node.name) if has_fabric else None
        if label != leaf:
            change = f"{LABEL}={leaf}" if leaf else f"{LABEL}-"
            run_command(*kubectl, "label", "node", node.name, change, "--overwrite")


def build_manifest() -> dict[str, Any]:
    """Build the `Fabric` of this network, with the announced state of its links."""
    layout, network = _read_layout(), get_network()
    announced, rates = network.find_broken().announced, network.list_rates()
    exceptions: list[dict[str, str]] = []
    normal_rate = check_rate(layout.rate)
    for leaf, spine in network.links:
        link = {"leaf": format_leaf_name(leaf), "spine": format_spine_name(spine)}
        rate = rates.get((leaf, spine))
        if (leaf, spine) in announced:
            exceptions.append({**link, "state": "Down"})
        elif rate != normal_rate:
            exceptions.append({**link, "state": "Slow", "capacity": _format_capacity(rate)})
    return build_fabric_object(network, _format_capacity(normal_rate), exceptions)


def build_fabric_object(network: LeafSpine, capacity: str, exceptions: list[dict[str, str]]) -> dict[str, Any]:
    """Build a `Fabric` object. `capacity`: of a link, in the object's format."""
    spec: dict[str, Any] = {
        "levels": [{"nodeLabel": LABEL}],
        "planes": network.planes,
        "spines": network.spines,
        "uplink": {"capacity": capacity},
        "exceptions": exceptions,
        "hops": {address: format_spine_name(spine) for address, spine in network.spine_addresses.items()},
        "pathControl": {"mode": "Probe"},
    }
    return {
        "apiVersion": "pacekeeper.dev/v1alpha1",
        "kind": "Fabric",
        "metadata": {"name": NAME},
        "spec": spec,
    }


def get_leaf(node: str) -> str:
    """Return the name of a node's leaf: node-1 is below l1, and so is node-4."""
    return format_leaf_name(_choose_leaf(int(node.removeprefix("node-"))))


def format_leaf_name(number: int) -> str:
    """Format a leaf's name as in node labels and the `Fabric`, which count from 1."""
    return f"l{number + 1}"


def format_spine_name(number: int) -> str:
    return f"s{number + 1}"


def parse_link(leaf: str, spine: str) -> Link:
    """Parse a link's names. Raises ValueError if there is no such link."""
    links = {
        (format_leaf_name(leaf_index), format_spine_name(spine_index)): (leaf_index, spine_index)
        for leaf_index, spine_index in get_network().links
    }
    if (leaf, spine) not in links:
        raise ValueError(f"there is no link {leaf}–{spine}; the last one is {'–'.join(list(links)[-1])}")
    return links[leaf, spine]


def check_rate(rate: str) -> float | None:
    """Parse a rate in tc's format, like 50mbit, to bits per second; None: "", no limit. Raises ValueError otherwise."""
    if not rate:
        return None
    match = _RATE_PATTERN.fullmatch(rate)
    if match is None:
        raise ValueError(f"rate {rate!r}: give one like 50mbit or 1gbit")
    return int(match[1]) * {"m": 1e6, "g": 1e9}[match[2]]


def _read_layout() -> FabricLayout:
    return FabricLayout(**json.loads(_LAYOUT_FILE.read_text())) if _LAYOUT_FILE.exists() else FabricLayout()


def _build_network(layout: FabricLayout) -> LeafSpine:
    return LeafSpine(_PREFIX, LEAVES, SPINES, tuple(map(_build_machine, list_nodes(layout.nodes))), layout.ports)


def _build_machine(node: ClusterNode) -> Machine:
    # The address is the same as on the bridge: traffic of services comes from the node's address on either route.
    return Machine(node.namespace, _choose_leaf(node.index), node.index, node.address, node.pod_subnet)


def _choose_leaf(index: int) -> int:
    """Choose the leaf of a node. Nodes that are added later do not move others."""
    return (index - 1) % LEAVES


def _format_capacity(rate: float | None) -> str:
    """Format a rate as the capacity in a `Fabric`."""
    return UNLIMITED_RATE if rate is None else f"{round(rate / 1e6)}M"
