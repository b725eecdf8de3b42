"""A circle: probe pods on a few nodes that look at them together, and which of its pods are to be started when.

The first two nodes are its hosts: pods that start later are told their addresses, and measure the way to them. So
each node's ways are held against those of others at the same time, and no node is judged by one peer alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from .node_steps import ProbePod

PROBE_SERVERS_PER_GROUP = 2
MIN_PROBE_GROUP_NODES = 3
"""Nodes of a circle that can tell which of them is slow."""
MAX_PROBE_GROUP_NODES = 8
PROBE_SERVER_START_SECONDS = 10.0
"""So long a host may take to run; the others then start without it."""


@dataclass(frozen=True)
class ProbeGroupMember:
    """A pod of a circle, and the name of the node that it is for."""

    pod: str
    node: str


@dataclass(frozen=True)
class ProbeLaunch:
    """A pod to be started now. `peers`: node → address of the hosts that it measures the way to. `guests`: how many
    others measure the way to it."""

    member: ProbeGroupMember
    peers: Mapping[str, str]
    participants: int


def plan_probe_launches(group: Sequence[ProbeGroupMember], pods: Mapping[str, ProbePod], waited: float) -> Iterator[ProbeLaunch]:
    """`circle`: hosts first. `pods`: those that there are, by name. `waited`: seconds since the circle began."""
    peers: dict[str, str] = {}
    for i, seat in enumerate(group):
        pod = pods.get(seat.pod)
        if pod is None:
            yield ProbeLaunch(seat, dict(peers), len(group) - 1 - i if i < PROBE_SERVERS_PER_GROUP else 0)
        if i >= PROBE_SERVERS_PER_GROUP:
            continue
        if pod is not None and pod.address and pod.phase == "Running":
            peers[seat.node] = pod.address
        elif (pod is None or not pod.ended) and waited < PROBE_SERVER_START_SECONDS * (i + 1):
            return


def form_probe_groups(unchecked: Sequence[str], others: Sequence[str], kind: Callable[[str], object]) -> list[tuple[str, ...]]:
    """All unmet nodes, in circles of nodes of one kind. `others`: nodes that may be asked for company, best first."""
    found: list[tuple[str, ...]] = []
    for alike, group in groupby(sorted(unchecked, key=lambda node: (repr(kind(node)), node)), key=kind):
        nodes = list(group)
        company = [node for node in others if node not in nodes and kind(node) == alike]
        nodes = [*company[: max(0, MIN_PROBE_GROUP_NODES - len(nodes))], *nodes]
        count = -(-len(nodes) // MAX_PROBE_GROUP_NODES)
        found += [tuple(nodes[i::count]) for i in range(count)]
    return found
