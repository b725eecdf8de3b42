"""Which paths through the fabric stand in a job's plan: those that joint planning wants, where they can be followed.

They change with a membership: while ranks train, their connections stay where they are, and a round only for other ways
is a remedy with a price (`replan`).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from pacekeeper_analysis.plan import MIN_JOB_PORTS, Hop, Paths, Plan, PlannedPath
from pacekeeper_analysis.reports import PathFault, PathReport

from ..api import FabricSpec, PathControl
from ..manifests import uses_gpus
from ..network import JobTraffic, NetworkState, RankPair, PortRange, ReplanProposal, NodeRanks
from ..observation import Observation, Policy
from ..state import DesiredState, RouteChange
from . import traffic
from .wiring import format_spine_name, parse_spine_name

PORTS_PER_JOB = 2 * MIN_JOB_PORTS
"""Of a job."""
PATH_FAULT_ADVICE: Mapping[PathFault, str] = {
    PathFault.NO_SHIM: "the image has no shim for its C library or architecture",
    PathFault.PORTS_TAKEN: "somebody on the node has the job's ports: choose others in the Fabric's pathControl.ports",
    PathFault.FILTERED: "no switch on the way says where packets end: let ICMP time exceeded through",
    PathFault.NOT_FOUND: "no port leads by the wanted spine: compare the Fabric's hops, nodes' labels and traceroute",
    PathFault.BLACK_HOLE: "what goes by the wanted spine gets no further: a leaf has not been told of a dead link",
    PathFault.TRANSLATED: "addresses are rewritten between pods",
    PathFault.NOT_TAKEN: "the connection has come about from another port",
}
"""Why a flow is not on its planned way, and what to do, for people."""
MAX_PATHS_PER_JOB = 2**13
"""Paths of a job, so that its bookkeeping stays below what etcd takes; a ring in order has two for each leaf."""


def update_planned_paths(observation: Observation, _policy: Policy) -> DesiredState:
    """The plan with its paths: none where no Fabric controls them, or there are no members."""
    network, draft = observation.cluster_view.network, observation.desired
    if network is None:
        return draft  # this operator has not looked yet
    mode, plan = network.spec.path_control.mode, draft.plan
    if mode is PathControl.PROBE and plan.members and _are_paths_restored(draft):
        wanted = plan.paths
    elif mode is PathControl.PROBE and plan.members:
        wanted = plan.paths if observation.training_since is not None else plan_job_paths(observation, network)
    elif mode is PathControl.REROLL and plan.paths is not None:
        wanted = None if any(path.spine for path in plan.paths.wanted) else plan.paths
    else:
        wanted = None
    return draft if wanted == plan.paths else draft.with_plan(paths=wanted)


def get_due_reroute(observation: Observation) -> ReplanProposal | None:
    """What joint planning has found for this very membership, and what of it can be followed; None: nothing is."""
    network, name = observation.cluster_view.network, (observation.job.namespace, observation.job.name)
    if network is None or network.traffic is None or network.spec.path_control.mode is not PathControl.PROBE:
        return None
    looked_at = network.jobs.get(name)
    if looked_at is None or looked_at.membership != observation.plan.membership:
        return None
    found = network.traffic.due.get(name) or network.traffic.recommended.get(name)
    # For want of ports, or of a spine's address; what is only recommended stands in no plan.
    followed = name not in network.traffic.due or plan_job_paths(observation, network) != observation.plan.paths
    return found if followed else None


def find_drifted_flows(observation: Observation, network: NetworkState) -> frozenset[RankPair]:
    """Flows whose leaves choose among other spines than when their round was planned: they may have left their ways."""
    own = _build_own_traffic(observation)
    now = traffic.fingerprint_live_routes(network.wiring, own, own.ways)
    return frozenset(pair for pair in own.ways if now.get(pair, 0) != own.among.get(pair, 0))


def collect_path_reports(observation: Observation) -> Mapping[RankPair, PathReport]:
    """What has become of the plan's paths, as senders' launchers tell it of this membership."""
    wanted = observation.plan.paths.wanted if observation.plan.paths is not None else ()
    pairs = {(path.source, path.destination) for path in wanted}
    beats = [view.heartbeat for view in observation.members if view.heartbeat is not None]
    reports = (one for beat in beats if beat.membership == observation.plan.membership for one in beat.paths)
    return {(one.source, one.destination): one for one in reports if (one.source, one.destination) in pairs}


def list_path_changes(before: Paths | None, after: Paths | None) -> Iterator[RouteChange]:
    """Of each pair whose path is another one."""
    was, now = _index_paths(before), _index_paths(after)
    for pair in sorted(was.keys() | now.keys()):
        one, other = was.get(pair, PlannedPath(*pair)), now.get(pair, PlannedPath(*pair))
        if one != other:
            yield RouteChange(*pair, one.spine, one.draw, other.spine, other.draw)


def restore_paths(observation: Observation, changed: tuple[RouteChange, ...]) -> Paths | None:
    """The plan's paths as they were before these changes, as far as they can be followed."""
    present, network = observation.plan.paths, observation.cluster_view.network
    if present is None or network is None:
        return present
    before = (PlannedPath(one.source, one.destination, one.spine_before, one.draw_before) for one in changed)
    own = _build_own_traffic(observation)
    alive = _make_liveness_test(network, own)
    spines = {hop.spine for hop in present.hops}
    wanted = _index_paths(present) | {pair: path for pair, path in _index_by_pair(before).items() if alive(path)}
    kept = tuple(path for _, path in sorted(wanted.items()) if path.spine in spines or path.draw)
    kept = _refresh_fingerprints(network, own, kept)
    return Paths(kept, present.hops, present.first_port, present.last_port) if kept else None


def _make_liveness_test(network: NetworkState, own: JobTraffic) -> Callable[[PlannedPath], bool]:
    """Whether what a path goes by carries anything; what names no spine goes by whatever does."""
    topology, leaf_of = network.wiring.topology, network.wiring.leaf_of
    leaf = {rank: leaf_of.get(seat.node) for seat in own.seats for rank in seat.ranks}

    def alive(path: PlannedPath) -> bool:
        way, source, destination = parse_spine_name(path.spine), leaf.get(path.source), leaf.get(path.destination)
        if way is None:
            return True
        if topology is None or source is None or destination is None or way >= topology.routes:
            return False
        return bool(topology.up[source, way] and topology.down[destination, way])

    return alive


def _refresh_fingerprints(network: NetworkState, own: JobTraffic, wanted: Sequence[PlannedPath]) -> tuple[PlannedPath, ...]:
    """As they are chosen now."""
    ways = {(path.source, path.destination): parse_spine_name(path.spine) for path in wanted}
    among = traffic.fingerprint_live_routes(network.wiring, own, {pair: way for pair, way in ways.items() if way is not None})
    return tuple(replace(path, among=among.get((path.source, path.destination), 0)) for path in wanted)


def _index_paths(paths: Paths | None) -> dict[RankPair, PlannedPath]:
    return {} if paths is None else _index_by_pair(paths.wanted)


def _index_by_pair(paths: Iterable[PlannedPath]) -> dict[RankPair, PlannedPath]:
    return {(path.source, path.destination): path for path in paths}


def _are_paths_restored(draft: DesiredState) -> bool:
    """This membership goes by the ways of before, whatever is planned by now."""
    trial = draft.state.adaptation.way_trial
    return trial is not None and not trial.incident and trial.membership == draft.plan.membership


def reroll_ports(observation: Observation, pair: RankPair) -> Paths | None:
    """The plan's paths with other ports drawn for what goes from one rank to another; None: there are no ports."""
    network, present = observation.cluster_view.network, observation.plan.paths
    ports = get_port_range(observation.plan) or (None if network is None else _choose_port_range(network, _build_own_traffic(observation)))
    if ports is None:
        return None
    others = [path for path in (present.wanted if present else ()) if (path.source, path.destination) != pair]
    path = PlannedPath(*pair, draw=count_port_draws(observation, pair) + 1)
    return Paths((*others, path)[-MAX_PATHS_PER_JOB:], present.hops if present else (), *ports)


def count_port_draws(observation: Observation, pair: RankPair) -> int:
    """How often ports have been drawn for it, those that were put back counted."""
    wanted = observation.plan.paths.wanted if observation.plan.paths is not None else ()
    tried = observation.state.adaptation.ways_tried
    drawn = [path.draw for path in wanted if (path.source, path.destination) == pair]
    in_vain = [path.draw for path in tried if (path.source, path.destination) == pair]
    return max([*drawn, *in_vain], default=0)


def get_planned_routes(plan: Plan) -> Mapping[RankPair, int]:
    """That it names, by pairs of ranks."""
    named = plan.paths.wanted if plan.paths is not None else ()
    ways = ((path.source, path.destination, parse_spine_name(path.spine)) for path in named)
    return {(source, destination): way for source, destination, way in ways if way is not None}


def get_route_fingerprints(plan: Plan) -> Mapping[RankPair, int]:
    """What each of them was chosen among, where not among all."""
    named = plan.paths.wanted if plan.paths is not None else ()
    return {(path.source, path.destination): path.among for path in named if path.among}


def get_port_range(plan: Plan) -> PortRange | None:
    return None if plan.paths is None else (plan.paths.first_port, plan.paths.last_port)


def list_spine_hops(spec: FabricSpec) -> tuple[Hop, ...]:
    """Addresses that answer for spines that there are; what is no address answers for nobody."""
    known = {format_spine_name(way) for way in range(spec.planes * spec.spines)}
    named = {_normalize_address(text): spine for text, spine in sorted(spec.hops.items()) if spine in known}
    hops = (Hop(address, spine) for address, spine in named.items() if address)
    return tuple(sorted(hops, key=lambda hop: (hop.spine, hop.address)))


def _normalize_address(text: str) -> str:
    """As the kernel writes it; "": it is none."""
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return ""


def plan_job_paths(observation: Observation, network: NetworkState) -> Paths | None:
    """What the job's next round is to follow of the joint plan; None: nothing."""
    own = _build_own_traffic(observation)
    hops, ports = list_spine_hops(network.spec), _choose_port_range(network, own)
    answering = {hop.spine for hop in hops}
    paths = [
        PlannedPath(*pair, format_spine_name(way))
        for pair, way in sorted(_get_joint_routes(network, own).items())
        if format_spine_name(way) in answering
    ]
    return None if ports is None or not paths else Paths(_refresh_fingerprints(network, own, paths[:MAX_PATHS_PER_JOB]), hops, *ports)


def _build_own_traffic(observation: Observation) -> JobTraffic:
    job, plan = observation.job, observation.plan
    node = {view.name: view.node for view in observation.workers}
    return JobTraffic(
        (job.namespace, job.name),
        tuple(NodeRanks(node.get(member.worker, ""), member.ranks) for member in plan.members),
        plan.membership,
        get_planned_routes(plan),
        get_route_fingerprints(plan),
        by_nccl=uses_gpus(job),
        ports=get_port_range(plan),
    )


def _get_joint_routes(network: NetworkState, own: JobTraffic) -> Mapping[RankPair, int]:
    looked_at, planned = network.jobs.get(own.name), network.traffic
    if planned is not None and looked_at is not None and looked_at.seats == own.seats and own.name in planned.ways:
        return planned.ways[own.name]
    # Its members have just changed.
    return traffic.plan_job_routes(network.wiring, (job for name, job in network.jobs.items() if name != own.name), own)


def _choose_port_range(network: NetworkState, own: JobTraffic) -> PortRange | None:
    """A range that no other job has on its nodes: its own as long as it is one, else the first; None: there is none."""
    first, last = network.spec.path_control.ports
    nodes = {seat.node for seat in own.seats}
    taken = {
        name: job.ports
        for name, job in network.jobs.items()
        if name != own.name and job.ports is not None and not nodes.isdisjoint(seat.node for seat in job.seats)
    }
    ranges = [(start, start + PORTS_PER_JOB - 1) for start in range(first, last - PORTS_PER_JOB + 2, PORTS_PER_JOB)]
    # Of two jobs that have taken the same at once, one gives way.
    before = [ports for name, ports in taken.items() if name < own.name]
    if own.ports in ranges and not any(_are_overlapping(own.ports, other) for other in before):
        return own.ports
    return next((one for one in ranges if not any(_are_overlapping(one, other) for other in taken.values())), None)


def _are_overlapping(one: PortRange, other: PortRange) -> bool:
    return one[0] <= other[1] and other[0] <= one[1]
