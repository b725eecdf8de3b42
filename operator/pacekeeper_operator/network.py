"""The network between nodes and what all jobs send through it, as values: what planning reads, and what it comes to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from pacekeeper_analysis.fabric.topology import Ints, Topology

from .api import FabricSpec
from .state import RouteObservation

PortRange = tuple[int, int]
"""The first and the last."""
RankPair = tuple[int, int]
"""The rank that sends, and the one that receives."""
JobName = tuple[str, str]
"""Namespace and name of a job."""
LeafSpinePair = tuple[str, str]
"""Leaf and spine."""
LinkShares = Mapping[LeafSpinePair, float]
"""What links carry now, as parts of what they are built for; 0: nothing."""


class NodeRanks(NamedTuple):
    node: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class JobTraffic:
    """What planning knows of a job."""

    name: JobName
    seats: tuple[NodeRanks, ...]
    membership: int = 0
    ways: Mapping[RankPair, int] = field(default_factory=dict)  # that its plan names
    among: Mapping[RankPair, int] = field(default_factory=dict)  # what these were chosen among (Topology.among); 0: all
    sent: Mapping[RankPair, float] = field(default_factory=dict)  # bytes, where they were measured
    by_nccl: bool = False  # rather than by gloo
    ports: PortRange | None = None  # that its connections take; None: any
    waiting: float = 0.0  # share of its steps that its ranks wait in
    round_seconds: float = 0.0  # what a round for other ways costs it; 0: it does not train yet; inf: it is not due yet
    held: bool = False  # it leaves no way that is alive: other ones were tried in vain
    acts: bool = True  # False: it is moved by nobody, that is only recommended
    seen: tuple[RouteObservation, ...] = ()  # what its flows have shown of their ways

    @property
    def ranks(self) -> int:
        return sum(len(seat.ranks) for seat in self.seats)

    @property
    def round_cost(self) -> float:
        """Seconds of its ranks."""
        return self.ranks * self.round_seconds


@dataclass(frozen=True)
class ReplanProposal:
    """A job that should begin a round for other ways, which outweigh the rounds of all that change together."""

    slowdown: float  # of its steps by the ways that are in force, over those by the ones that are planned
    mends: float  # part of what its ways cost it, beside a fabric that it has to itself, that is won back
    gain_seconds: float  # of all jobs, in seconds of ranks, over the horizon
    cost_seconds: float  # of all rounds, likewise


@dataclass(frozen=True, eq=False)
class TrafficPlan:
    """What shall be. Loads are in units of the lightest flow."""

    ways: Mapping[JobName, Mapping[RankPair, int]]
    flows: int  # between leaves
    level: int  # load of the fullest link
    bound: int  # below which no plan comes
    moved: int  # flows that had a way which is alive, and get another
    lost: tuple[tuple[JobName, RankPair], ...]  # flows for which no way is alive
    up: Ints  # loads, (leaves, ways)
    down: Ints
    due: Mapping[JobName, ReplanProposal]  # of jobs that train; the others take their ways in their next round
    recommended: Mapping[JobName, ReplanProposal] = field(default_factory=dict)  # of those that nobody may move


@dataclass(frozen=True, eq=False)
class Wiring:
    """`topology`: None where there is none to plan with, for want of leaves or because of too many."""

    leaves: tuple[str, ...]  # a leaf's place here is its group in the topology
    leaf_of: Mapping[str, int]  # node → group; without nodes that do not say
    topology: Topology | None
    routes: Topology | None = None  # without what jobs' flows have shown, of which switches know nothing
    strange: tuple[str, ...] = ()  # links that something was said of, and that there are not
    slow: LinkShares = field(default_factory=dict)  # by what jobs' flows have shown
    views: Mapping[str, Topology] = field(default_factory=dict)  # namespace → with what its flows alone have shown, too

    @property
    def dead_links(self) -> int:
        """Links that carry nothing, one from each leaf to each spine and back."""
        return 0 if self.topology is None else int((self.topology.up == 0).sum())


@dataclass(frozen=True, eq=False)
class NetworkState:
    """The Fabric in force and all jobs' traffic, as the operator has looked at them last. Soft: made anew from what is
    written."""

    spec: FabricSpec
    wiring: Wiring
    jobs: Mapping[JobName, JobTraffic]
    traffic: TrafficPlan | None  # None: there is nothing to plan on


NO_FABRIC = NetworkState(FabricSpec(spines=1), Wiring((), {}, None), {}, None)
"""Paths are nobody's business."""
