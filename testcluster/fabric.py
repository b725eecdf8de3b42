"""The cluster's data network, where one is wanted: leaves and spines between the nodes, beside the bridge.

Only what pods of different nodes send one another goes over it, since only the routes to pods' subnets lead there; the
bridge keeps the API server, kubelets and Prometheus. It is laid when asked for (`up --fabric 1`): most tests are about
other things, and three more switches on each way cost them processor time for nothing.
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
"""Of a node: its leaf."""
UNLIMITED_RATE = "10G"
"""What links that are as fast as memory count as."""
_PREFIX = "pacekeeper-fabric"
_LAYOUT_FILE = STATE / "fabric.json"
_RATE_PATTERN = re.compile(r"([1-9]\d*)([mg])bit", re.ASCII)


@dataclass(frozen=True)
class FabricLayout:
    """What is there. ports: of each node; 0: nothing is. rate: of all links, in tc's words; "": as fast as memory."""

    nodes: int = 0
    ports: int = 0
    rate: str = ""


def ensure_fabric(members: Sequence[ClusterNode], ports: int | None) -> None:
    """So many ports a node (None: as many as there are), and everything whole. Without any, there is no fabric."""
    before = _read_layout()
    wanted = FabricLayout(len(members), before.ports if ports is None else ports, before.rate)
    if before.ports and before.ports != wanted.ports:
        _build_network(FabricLayout(before.nodes, MAX_PORTS)).remove()
    if wanted.ports:
        write_if_changed(_LAYOUT_FILE, json.dumps(asdict(wanted)))
        _build_network(wanted).ensure(wanted.rate)
    else:
        _LAYOUT_FILE.unlink(missing_ok=True)


def remove_fabric() -> None:
    """Switches and all their cables; what else is on the nodes goes with them."""
    LeafSpine(_PREFIX, LEAVES, SPINES, planes=MAX_PORTS).remove()


def get_network() -> LeafSpine:
    """Raises ClusterError where there is none."""
    laid = _read_layout()
    if not laid.ports:
        raise ClusterError("the cluster has no fabric: `python -m testcluster up --fabric 1` lays one")
    return _build_network(laid)


def list_cables(node: ClusterNode) -> list[Cable]:
    """The node's cables to its leaf; none without a fabric."""
    laid = _read_layout()
    return _build_network(laid).list_cables(_build_machine(node)) if laid.ports else []


def update_routes() -> None:
    """Everybody knows which cables carry something."""
    if _read_layout().ports:
        get_network().update_routes()


def set_all_rates(rate: str) -> None:
    """All links between leaves and spines, also from now on. `rate`: in tc's words, like 50mbit; "": as fast as memory.

    Raises ValueError where it is neither.
    """
    check_rate(rate)
    found, laid = get_network(), replace(_read_layout(), rate=rate)
    write_if_changed(_LAYOUT_FILE, json.dumps(asdict(laid)))
    found.set_all_rates(rate)


def get_rate() -> str:
    """Of links that nobody has slowed, in tc's words."""
    return _read_layout().rate


def label_nodes(members: Sequence[ClusterNode]) -> None:
    """Each says in which leaf it is; without a fabric none does."""
    there = bool(_read_layout().ports)
    kubectl = (programs.find_kubectl(), f"--kubeconfig={KUBECONFIG}")
    for node in members:
        label = api.get_path(f"/api/v1/nodes/{node.name}")["metadata"]["labels"].get(LABEL)
        wanted = get_leaf(node.name) if there else None
        if label != wanted:
            change = f"{LABEL}={wanted}" if wanted else f"{LABEL}-"
            run_command(*kubectl, "label", "node", node.name, change, "--overwrite")


def build_manifest() -> dict[str, Any]:
    """The `Fabric` of this network, with its links as everybody knows them to be now."""
    laid, found = _read_layout(), get_network()
    told, rates = found.find_broken().announced, found.list_rates()
    exceptions: list[dict[str, str]] = []
    usual = check_rate(laid.rate)
    for leaf, spine in found.links:
        its = {"leaf": format_leaf_name(leaf), "spine": format_spine_name(spine)}
        rate = rates.get((leaf, spine))
        if (leaf, spine) in told:
            exceptions.append({**its, "state": "Down"})
        elif rate != usual:
            exceptions.append({**its, "state": "Slow", "capacity": _format_capacity(rate)})
    return build_fabric_object(found, _format_capacity(usual), exceptions)


def build_fabric_object(found: LeafSpine, capacity: str, exceptions: list[dict[str, str]]) -> dict[str, Any]:
    """As a `Fabric`. capacity: of a link, as it has it."""
    spec: dict[str, Any] = {
        "levels": [{"nodeLabel": LABEL}],
        "planes": found.planes,
        "spines": found.spines,
        "uplink": {"capacity": capacity},
        "exceptions": exceptions,
        "hops": {address: format_spine_name(spine) for address, spine in found.spine_addresses.items()},
        "pathControl": {"mode": "Probe"},
    }
    return {
        "apiVersion": "pacekeeper.dev/v1alpha1",
        "kind": "Fabric",
        "metadata": {"name": NAME},
        "spec": spec,
    }


def get_leaf(node: str) -> str:
    """Name of the leaf of a node: node-1 is below l1, node-4 again."""
    return format_leaf_name(_choose_leaf(int(node.removeprefix("node-"))))


def format_leaf_name(number: int) -> str:
    """As nodes and the `Fabric` have it, which count from 1."""
    return f"l{number + 1}"


def format_spine_name(number: int) -> str:
    return f"s{number + 1}"


def parse_link(leaf: str, spine: str) -> Link:
    """Raises ValueError where there is no such link."""
    found = {(format_leaf_name(one), format_spine_name(other)): (one, other) for one, other in get_network().links}
    if (leaf, spine) not in found:
        raise ValueError(f"there is no link {leaf}–{spine}; the last one is {'–'.join(list(found)[-1])}")
    return found[leaf, spine]


def check_rate(rate: str) -> float | None:
    """Bits a second of a rate in tc's words, like 50mbit; None: "", as fast as memory. Raises ValueError otherwise."""
    if not rate:
        return None
    match = _RATE_PATTERN.fullmatch(rate)
    if match is None:
        raise ValueError(f"rate {rate!r}: give one like 50mbit or 1gbit")
    return int(match[1]) * {"m": 1e6, "g": 1e9}[match[2]]


def _read_layout() -> FabricLayout:
    return FabricLayout(**json.loads(_LAYOUT_FILE.read_text())) if _LAYOUT_FILE.exists() else FabricLayout()


def _build_network(laid: FabricLayout) -> LeafSpine:
    return LeafSpine(_PREFIX, LEAVES, SPINES, tuple(map(_build_machine, list_nodes(laid.nodes))), laid.ports)


def _build_machine(node: ClusterNode) -> Machine:
    # It has the same address here as on the bridge: what a service sends on comes from the node, whichever way it goes.
    return Machine(node.namespace, _choose_leaf(node.index), node.index, node.address, node.pod_subnet)


def _choose_leaf(index: int) -> int:
    """Of a node: those that are added later move nobody."""
    return (index - 1) % LEAVES


def _format_capacity(rate: float | None) -> str:
    """As a `Fabric` has it."""
    return UNLIMITED_RATE if rate is None else f"{round(rate / 1e6)}M"
