"""The network between nodes and all jobs' traffic, as values: the input and the result of joint planning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from pacekeeper_analysis.fabric.topology import Ints, Topology

from ..api.fabric import FabricSpec
from .desired_state import RouteObservation

PortRange = tuple[int, int]
"""The first and the last port."""
RankPair = tuple[int, int]
"""The rank that sends, and the one that receives."""
JobName = tuple[str, str]
"""Namespace and name of a job."""
LeafSpinePair = tuple[str, str]
"""Names of a leaf and a spine."""
LinkShares = Mapping[LeafSpinePair, float]
"""The present capacity of links, as shares of the built capacity; 0: nothing passes."""


class NodeRanks(NamedTuple):
    node: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class JobTraffic:
    """A job's traffic, as joint planning sees it."""

    name: JobName
    node_ranks: tuple[NodeRanks, ...]
    membership: int = 0
    routes: Mapping[RankPair, int] = field(default_factory=dict)  # those that its plan names
    route_choices: Mapping[RankPair, int] = field(
        default_factory=dict
    )  # fingerprints of the then live routes; 0: all were
    bytes_sent: Mapping[RankPair, float] = field(default_factory=dict)  # bytes, where they were measured
    uses_nccl: bool = False  # rather than by gloo
    ports: PortRange | None = None  # of its connections; None: any
    wait_share: float = 0.0  # share of its steps that its ranks wait
    round_seconds: float | None = (
        None  # cost of a round for other routes; None: it does not train; inf: not allowed yet
    )
    keeps_routes: bool = False  # it leaves no route that is alive: others were tried without result
    can_move: bool = True  # False: other routes are only recommended
    route_observations: tuple[RouteObservation, ...] = ()  # what its flows have shown of their routes

    @property
    def ranks(self) -> int:
        return sum(len(node.ranks) for node in self.node_ranks)

    @property
    def round_cost(self) -> float:
        """Cost of a round, in seconds of its ranks."""
        return self.ranks * (self.round_seconds or 0.0)


@dataclass(frozen=True)
class ReplanProposal:
    """A proposal that a job begins a round for other routes. These outweigh the cost of all proposed rounds."""

    slowdown: float  # its step time by the present routes over that by the planned ones
    recovered_share: float  # share of its loss, against a fabric without other jobs, that is won back
    gain_seconds: float  # of all jobs, in seconds of ranks, over the horizon
    cost_seconds: float  # of all rounds, in seconds of ranks


@dataclass(frozen=True, eq=False)
class TrafficPlan:
    """The joint plan. Loads are in units of the lightest flow."""

    routes: Mapping[JobName, Mapping[RankPair, int]]
    flows: int  # between leaves
    max_load: int  # load of the fullest link
    lower_bound: int  # no plan has a lower `level`
    moved_flows: int  # flows that leave a route that is alive
    unroutable_flows: tuple[tuple[JobName, RankPair], ...]  # flows without a route that is alive
    up: Ints  # loads, (leaves, routes)
    down: Ints
    due: Mapping[JobName, ReplanProposal]  # of jobs that train; the others take their routes in their next round
    recommended: Mapping[JobName, ReplanProposal] = field(default_factory=dict)  # of jobs that must not be moved


@dataclass(frozen=True, eq=False)
class Wiring:
    """A Fabric's leaves and links. `topology` is None where it has no leaves, or too many to plan."""

    leaves: tuple[str, ...]  # a leaf's index is its group in the topology
    leaf_of: Mapping[str, int]  # node → group; without nodes that have no label for it
    topology: Topology | None
    switch_topology: Topology | None = None  # without what jobs' flows have shown, which switches do not know
    unknown_links: tuple[str, ...] = ()  # links that were named and do not exist
    slow_links: LinkShares = field(default_factory=dict)  # by what jobs' flows have shown
    namespace_topologies: Mapping[str, Topology] = field(
        default_factory=dict
    )  # namespace → with what only its flows have shown

    @property
    def dead_links(self) -> int:
        """Number of links that carry nothing, counted from each leaf to each spine."""
        return 0 if self.topology is None else int((self.topology.up == 0).sum())


@dataclass(frozen=True, eq=False)
class NetworkState:
    """The Fabric in force and all jobs' traffic, as the operator has read them last.

    It is not persisted: it is rebuilt from what is.
    """

    spec: FabricSpec
    wiring: Wiring
    jobs: Mapping[JobName, JobTraffic]
    traffic: TrafficPlan | None  # None: there is nothing to plan


NO_FABRIC = NetworkState(FabricSpec(spines=1), Wiring((), {}, None), {}, None)
"""The state of a cluster without a Fabric: the operator controls no paths."""
