"""Probe groups: probe pods that check a few nodes together, and when to start which of them.

The pods on the first two nodes are servers. Pods that start later receive their addresses, and measure the network path
to them. So each node's paths are compared with those of others at the same time, and never by one peer alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from .quarantine_steps import ProbePod

PROBE_SERVERS_PER_GROUP = 2
MIN_PROBE_GROUP_NODES = 3
"""Least number of nodes in a group that can show which of them is slow."""
MAX_PROBE_GROUP_NODES = 8
PROBE_SERVER_START_SECONDS = 10.0
"""Seconds that a server may take until it runs. The other pods then start without it."""


@dataclass(frozen=True)
class ProbeGroupMember:
    """A pod of a group, and the name of the node that it checks."""

    pod: str
    node: str


@dataclass(frozen=True)
class ProbeLaunch:
    """A pod to start now.

    `peers`: node → address of the servers to which it measures the path. `participants`: how many other pods measure
    the path to it.
    """

    member: ProbeGroupMember
    peers: Mapping[str, str]
    participants: int


def plan_probe_launches(
    group: Sequence[ProbeGroupMember], pods: Mapping[str, ProbePod], waited: float
) -> Iterator[ProbeLaunch]:
    """Yield the pods of a group to start now.

    `group`: servers first. `pods`: the existing pods, by name. `waited`: seconds since the group began.
    """
    peers: dict[str, str] = {}
    for i, member in enumerate(group):
        pod = pods.get(member.pod)
        if pod is None:
            yield ProbeLaunch(member, dict(peers), len(group) - 1 - i if i < PROBE_SERVERS_PER_GROUP else 0)
        if i >= PROBE_SERVERS_PER_GROUP:
            continue
        if pod is not None and pod.address and pod.phase == "Running":
            peers[member.node] = pod.address
        elif (pod is None or not pod.ended) and waited < PROBE_SERVER_START_SECONDS * (i + 1):
            return


def form_probe_groups(
    unchecked: Sequence[str], others: Sequence[str], kind: Callable[[str], object]
) -> list[tuple[str, ...]]:
    """Return groups of nodes of one kind that contain all `unchecked` nodes.

    `others`: nodes that may be added to groups that are too small, best first.
    """
    groups: list[tuple[str, ...]] = []
    for node_kind, group in groupby(sorted(unchecked, key=lambda node: (repr(kind(node)), node)), key=kind):
        nodes = list(group)
        added = [node for node in others if node not in nodes and kind(node) == node_kind]
        nodes = [*added[: max(0, MIN_PROBE_GROUP_NODES - len(nodes))], *nodes]
        count = -(-len(nodes) // MAX_PROBE_GROUP_NODES)
        groups += [tuple(nodes[i::count]) for i in range(count)]
    return groups
