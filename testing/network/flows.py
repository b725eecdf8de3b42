"""A job whose flows have planned routes through a fabric: what its connections and launchers report of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pacekeeper_analysis.protocol.plan import Hop, Paths, PlannedPath
from pacekeeper_analysis.protocol.reports import Evidence, LinkWindow, PathFault, PathReport
from pacekeeper_analysis.protocol.requests import EvidencePart, EvidenceRequest
from pacekeeper_operator.api.fabric import FabricSpec, LevelSpec, LinkException, PathControl, PathControlSpec
from pacekeeper_operator.decide.network import traffic
from pacekeeper_operator.decide.network.link_state import NO_DEGRADED_LINKS, DegradedLinks
from pacekeeper_operator.decide.network.wiring import build_wiring
from pacekeeper_operator.state.cluster_view import NodeView
from pacekeeper_operator.state.network import JobTraffic, NetworkState, NodeRanks, RankPair
from pacekeeper_operator.state.observation import Observation
from testing.operators.observations import build_training, change_worker

MB = 1_000_000
LEAVES = "abcd"
HOPS = {"10.98.0.1": "s1", "10.98.0.2": "s2", "10.98.0.3": "s3"}
RING: Sequence[RankPair] = ((0, 3), (1, 0), (2, 1), (3, 2))
"""Of gloo: each rank sends to the one before; rank n is in the n-th leaf."""
ALL_ON_FIRST_SPINE: Mapping[RankPair, int] = dict.fromkeys(RING, 0)


def build_network_state(
    routes: Mapping[RankPair, int] = ALL_ON_FIRST_SPINE,
    *others: JobTraffic,
    doubts: DegradedLinks = NO_DEGRADED_LINKS,
    mode: PathControl = PathControl.PROBE,
    wait_share: float = 0.5,
    hops: Mapping[str, str] = HOPS,
    dead: Sequence[tuple[str, str]] = (),
    **changes: Any,
) -> NetworkState:
    """Three spines, four leaves, and the job of `training(4, 0)`, as joint planning receives them.

    dead: links that the platform reports as dead.
    """
    exceptions = tuple(LinkException(*link) for link in dead)
    spec = FabricSpec(
        3, levels=(LevelSpec("leaf"),), exceptions=exceptions, hops=hops, path_control=PathControlSpec(mode)
    )
    nodes = [NodeView(f"node-{n}", f"u{n}", labels={"leaf": LEAVES[n % 4]}) for n in range(8)]
    wiring = build_wiring(spec, nodes, {}, doubts)
    assignments = tuple(NodeRanks(f"node-{n}", (n,)) for n in range(4))
    own_traffic = JobTraffic(
        ("ns", "j"), assignments, 1, routes, wait_share=wait_share, **{"round_seconds": 5.0, **changes}
    )
    jobs = (own_traffic, *others)
    return NetworkState(spec, wiring, {job.name: job for job in jobs}, traffic.plan_joint_traffic(wiring, jobs))


def build_paths(routes: Mapping[RankPair, int]) -> Paths:
    planned = tuple(PlannedPath(*pair, f"s{spine_index + 1}") for pair, spine_index in sorted(routes.items()))
    return Paths(planned, tuple(Hop(address, spine) for address, spine in HOPS.items()), 20000, 20511)


def build_observation(
    network_state: NetworkState | None,
    routes: Mapping[RankPair, int] = ALL_ON_FIRST_SPINE,
    *,
    in_force: Collection[RankPair] = RING,
    black_holes: Collection[RankPair] = (),
) -> Observation:
    """The job trains over these routes, as its launchers report."""
    observation = build_training(4, 0)
    observation = observation.with_desired(observation.desired.with_plan(paths=build_paths(routes)))
    for source, destination in RING:
        pair = source, destination
        fault = PathFault.BLACK_HOLE if pair in black_holes else PathFault.NONE
        report = PathReport(*pair, in_force=pair in in_force and pair not in black_holes, fault=fault)
        observation = change_worker(observation, f"j-w{source}-0", heartbeat={"paths": (report,)})
    return replace(observation, cluster_view=replace(observation.cluster_view, network=network_state))


def build_connection_answers(
    slow: Mapping[RankPair, float] | None = None, *, early: float = 0.4, request: str = "ask", times: float = 1.0
) -> tuple[Evidence, ...]:
    """What all members answer: three windows in which each sent 50 MB within 0.4 s of busy time, or a multiple of that.

    `early`: busy time in their first windows. `times`: of all.
    """

    def ends(rank: int) -> tuple[LinkWindow, ...]:
        receiver, sender = (rank - 1) % 4, (rank + 1) % 4
        address = f"10.0.0.{rank}"
        busy = 0.4 * times * (slow or {}).get((rank, receiver), 1.0)
        outgoing = LinkWindow(
            f"{address}:40",
            f"10.0.0.{receiver}:50",
            rank,
            0,
            5.0,
            50 * MB,
            busy,
            early_bytes=50 * MB,
            early_busy_seconds=early,
        )
        incoming = LinkWindow(f"{address}:50", f"10.0.0.{sender}:40", rank, 0, 5.0)
        return tuple(replace(end, age=age) for end in (outgoing, incoming) for age in range(3))

    return tuple(Evidence(request, f"j-w{rank}-0", 1, links=ends(rank)) for rank in range(4))


def answer_request(observation: Observation, evidence: Sequence[Evidence]) -> Observation:
    """The connections have been requested, and answered so."""
    parts = (EvidencePart.WINDOWS, EvidencePart.LINKS)
    observation = observation.with_desired(observation.desired.with_requests(evidence=EvidenceRequest("ask", parts)))
    return replace(observation, evidence=tuple(evidence))
