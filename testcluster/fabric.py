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
from testcluster.settings import KUBECONFIG, STATE, Node, nodes
from testcluster.shell import ClusterError, run, write

LEAVES, SPINES, MOST_PORTS = 3, 3, 2
NAME = "testcluster"
LABEL = "fabric.topograph.run/tier-0"
"""Of a node: its leaf."""
FAST = "10G"
"""What links that are as fast as memory count as."""
_PREFIX = "pacekeeper-fabric"
_RECORD = STATE / "fabric.json"
_RATE = re.compile(r"([1-9]\d*)([mg])bit", re.ASCII)


@dataclass(frozen=True)
class Laid:
    """What is there. ports: of each node; 0: nothing is. rate: of all links, in tc's words; "": as fast as memory."""

    nodes: int = 0
    ports: int = 0
    rate: str = ""


def ensure(members: Sequence[Node], ports: int | None) -> None:
    """So many ports a node (None: as many as there are), and everything whole. Without any, there is no fabric."""
    before = _laid()
    wanted = Laid(len(members), before.ports if ports is None else ports, before.rate)
    if before.ports and before.ports != wanted.ports:
        _network(Laid(before.nodes, MOST_PORTS)).remove()
    if wanted.ports:
        write(_RECORD, json.dumps(asdict(wanted)))
        _network(wanted).ensure(wanted.rate)
    else:
        _RECORD.unlink(missing_ok=True)


def remove() -> None:
    """Switches and all their cables; what else is on the nodes goes with them."""
    LeafSpine(_PREFIX, LEAVES, SPINES, planes=MOST_PORTS).remove()


def network() -> LeafSpine:
    """Raises ClusterError where there is none."""
    laid = _laid()
    if not laid.ports:
        raise ClusterError("the cluster has no fabric: `python -m testcluster up --fabric 1` lays one")
    return _network(laid)


def cables(node: Node) -> list[Cable]:
    """The node's cables to its leaf; none without a fabric."""
    laid = _laid()
    return _network(laid).cables(_machine(node)) if laid.ports else []


def reroute() -> None:
    """Everybody knows which cables carry something."""
    if _laid().ports:
        network().reroute()


def shape(rate: str) -> None:
    """All links between leaves and spines, also from now on. `rate`: in tc's words, like 50mbit; "": as fast as memory.

    Raises ValueError where it is neither.
    """
    check_rate(rate)
    found, laid = network(), replace(_laid(), rate=rate)
    write(_RECORD, json.dumps(asdict(laid)))
    found.shape(rate)


def rate() -> str:
    """Of links that nobody has slowed, in tc's words."""
    return _laid().rate


def label_nodes(members: Sequence[Node]) -> None:
    """Each says in which leaf it is; without a fabric none does."""
    there = bool(_laid().ports)
    kubectl = (programs.kubectl(), f"--kubeconfig={KUBECONFIG}")
    for node in members:
        label = api.get(f"/api/v1/nodes/{node.name}")["metadata"]["labels"].get(LABEL)
        wanted = leaf_of(node.name) if there else None
        if label != wanted:
            change = f"{LABEL}={wanted}" if wanted else f"{LABEL}-"
            run(*kubectl, "label", "node", node.name, change, "--overwrite")


def manifest() -> dict[str, Any]:
    """The `Fabric` of this network, with its links as everybody knows them to be now."""
    laid, found = _laid(), network()
    told, rates = found.broken().told, found.rates()
    exceptions: list[dict[str, str]] = []
    usual = check_rate(laid.rate)
    for leaf, spine in found.links:
        its = {"leaf": leaf_name(leaf), "spine": spine_name(spine)}
        rate = rates.get((leaf, spine))
        if (leaf, spine) in told:
            exceptions.append({**its, "state": "Down"})
        elif rate != usual:
            exceptions.append({**its, "state": "Slow", "capacity": _capacity(rate)})
    return describe(found, _capacity(usual), exceptions)


def describe(found: LeafSpine, capacity: str, exceptions: list[dict[str, str]]) -> dict[str, Any]:
    """As a `Fabric`. capacity: of a link, as it has it."""
    spec: dict[str, Any] = {
        "levels": [{"nodeLabel": LABEL}],
        "planes": found.planes,
        "spines": found.spines,
        "uplink": {"capacity": capacity},
        "exceptions": exceptions,
        "hops": {address: spine_name(spine) for address, spine in found.answers.items()},
        "pathControl": {"mode": "Probe"},
    }
    return {
        "apiVersion": "pacekeeper.dev/v1alpha1",
        "kind": "Fabric",
        "metadata": {"name": NAME},
        "spec": spec,
    }


def leaf_of(node: str) -> str:
    """Name of the leaf of a node: node-1 is below l1, node-4 again."""
    return leaf_name(_leaf(int(node.removeprefix("node-"))))


def leaf_name(number: int) -> str:
    """As nodes and the `Fabric` have it, which count from 1."""
    return f"l{number + 1}"


def spine_name(number: int) -> str:
    return f"s{number + 1}"


def link(leaf: str, spine: str) -> Link:
    """Raises ValueError where there is no such link."""
    found = {(leaf_name(one), spine_name(other)): (one, other) for one, other in network().links}
    if (leaf, spine) not in found:
        raise ValueError(f"there is no link {leaf}–{spine}; the last one is {'–'.join(list(found)[-1])}")
    return found[leaf, spine]


def check_rate(rate: str) -> float | None:
    """Bits a second of a rate in tc's words, like 50mbit; None: "", as fast as memory. Raises ValueError otherwise."""
    if not rate:
        return None
    match = _RATE.fullmatch(rate)
    if match is None:
        raise ValueError(f"rate {rate!r}: give one like 50mbit or 1gbit")
    return int(match[1]) * {"m": 1e6, "g": 1e9}[match[2]]


def _laid() -> Laid:
    return Laid(**json.loads(_RECORD.read_text())) if _RECORD.exists() else Laid()


def _network(laid: Laid) -> LeafSpine:
    return LeafSpine(_PREFIX, LEAVES, SPINES, tuple(map(_machine, nodes(laid.nodes))), laid.ports)


def _machine(node: Node) -> Machine:
    # It has the same address here as on the bridge: what a service sends on comes from the node, whichever way it goes.
    return Machine(node.namespace, _leaf(node.index), node.index, node.address, node.pod_subnet)


def _leaf(index: int) -> int:
    """Of a node: those that are added later move nobody."""
    return (index - 1) % LEAVES


def _capacity(rate: float | None) -> str:
    """As a `Fabric` has it."""
    return FAST if rate is None else f"{round(rate / 1e6)}M"
