"""Paths through the fabric in a job's plan: those of the joint plan that can be followed.

They change with a membership. While ranks train, their connections stay where they are. A round only for other routes
is a remedy with a price (`replan`).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from pacekeeper_analysis.protocol.plan import MIN_JOB_PORTS, Hop, Paths, PlannedPath
from pacekeeper_analysis.protocol.reports import PathFault, PathReport

from ...api.fabric import FabricSpec, PathControl
from ...pods.manifests import uses_gpus
from ...state.desired_state import DesiredState, RouteChange
from ...state.network import JobTraffic, NetworkState, NodeRanks, PortRange, RankPair, ReplanProposal
from ...state.observation import Observation
from ...state.policy import Policy
from ...state.routes import (
    format_spine_name,
    get_planned_routes,
    get_port_range,
    get_route_fingerprints,
    parse_spine_name,
)
from . import traffic

PORTS_PER_JOB = 2 * MIN_JOB_PORTS
PATH_FAULT_ADVICE: Mapping[PathFault, str] = {
    PathFault.NO_SHIM: "the image has no shim for its C library or architecture",
    PathFault.PORTS_TAKEN: "another process on the node uses the job's ports: change the Fabric's pathControl.ports",
    PathFault.FILTERED: "no switch on the path reports where packets end: allow ICMP time exceeded",
    PathFault.NOT_FOUND: "no port leads to the wanted spine: compare the Fabric's hops, nodes' labels and traceroute",
    PathFault.BLACK_HOLE: "packets by the wanted spine get no further: a leaf does not know of a dead link",
    PathFault.TRANSLATED: "addresses are rewritten between pods",
    PathFault.NOT_TAKEN: "the connection was established from another port",
}
"""Why a flow is not on its planned route, and the user's remedy."""
MAX_PATHS_PER_JOB = 2**13
"""Paths of a job. Its bookkeeping must stay below what etcd accepts; a ring in order has two for each leaf."""


def update_planned_paths(observation: Observation, _policy: Policy) -> DesiredState:
    """Return the state with the plan's paths: none if no Fabric controls them, or there are no members."""
    network, desired = observation.cluster_view.network, observation.desired
    if network is None:
        return desired  # this operator has not read it yet
    mode, plan = network.spec.path_control.mode, desired.plan
    if mode is PathControl.PROBE and plan.members and _are_paths_restored(desired):
        wanted = plan.paths
    elif mode is PathControl.PROBE and plan.members:
        wanted = plan.paths if observation.progress.training_since is not None else plan_job_paths(observation, network)
    elif mode is PathControl.REROLL and plan.paths is not None:
        wanted = None if any(path.spine for path in plan.paths.wanted) else plan.paths
    else:
        wanted = None
    return desired if wanted == plan.paths else desired.with_plan(paths=wanted)


def get_due_reroute(observation: Observation) -> ReplanProposal | None:
    """Return the proposal of joint planning for this very membership; None: none that can be followed."""
    network, name = observation.cluster_view.network, (observation.job.namespace, observation.job.name)
    if network is None or network.traffic is None or network.spec.path_control.mode is not PathControl.PROBE:
        return None
    planned_job = network.jobs.get(name)
    if planned_job is None or planned_job.membership != observation.plan.membership:
        return None
    proposal = network.traffic.due.get(name) or network.traffic.recommended.get(name)
    # Ports or a spine's address may be missing. A proposal that is only recommended is in no plan.
    followed = name not in network.traffic.due or plan_job_paths(observation, network) != observation.plan.paths
    return proposal if followed else None


def find_drifted_flows(observation: Observation, network: NetworkState) -> frozenset[RankPair]:
    """Return the flows whose leaves choose among other spines than when their round was planned.

    They may have left their routes.
    """
    own = _build_own_traffic(observation)
    fingerprints = traffic.fingerprint_live_routes(network.wiring, own, own.routes)
    return frozenset(pair for pair in own.routes if fingerprints.get(pair, 0) != own.route_choices.get(pair, 0))


def collect_path_reports(observation: Observation) -> Mapping[RankPair, PathReport]:
    """Return what the senders' launchers report of the plan's paths in this membership."""
    wanted = observation.plan.paths.wanted if observation.plan.paths is not None else ()
    pairs = {(path.source, path.destination) for path in wanted}
    heartbeats = [view.heartbeat for view in observation.members if view.heartbeat is not None]
    reports = (
        report
        for heartbeat in heartbeats
        if heartbeat.membership == observation.plan.membership
        for report in heartbeat.paths
    )
    return {
        (report.source, report.destination): report
        for report in reports
        if (report.source, report.destination) in pairs
    }


def list_path_changes(before: Paths | None, after: Paths | None) -> Iterator[RouteChange]:
    """Yield the change of each pair whose path differs."""
    old_paths, new_paths = _index_paths(before), _index_paths(after)
    for pair in sorted(old_paths.keys() | new_paths.keys()):
        old, new = old_paths.get(pair, PlannedPath(*pair)), new_paths.get(pair, PlannedPath(*pair))
        if old != new:
            yield RouteChange(*pair, old.spine, old.draw, new.spine, new.draw)


def restore_paths(observation: Observation, changes: tuple[RouteChange, ...]) -> Paths | None:
    """Return the plan's paths as they were before these changes, as far as they can be followed."""
    present, network = observation.plan.paths, observation.cluster_view.network
    if present is None or network is None:
        return present
    earlier = (
        PlannedPath(change.source, change.destination, change.spine_before, change.draw_before) for change in changes
    )
    own = _build_own_traffic(observation)
    is_alive = _make_liveness_test(network, own)
    spines = {hop.spine for hop in present.hops}
    wanted = _index_paths(present) | {pair: path for pair, path in _index_by_pair(earlier).items() if is_alive(path)}
    restored = tuple(path for _, path in sorted(wanted.items()) if path.spine in spines or path.draw)
    restored = _refresh_fingerprints(network, own, restored)
    return Paths(restored, present.hops, present.first_port, present.last_port) if restored else None


def _make_liveness_test(network: NetworkState, own: JobTraffic) -> Callable[[PlannedPath], bool]:
    """Return a test of whether a path carries anything. A path without a spine takes any live route."""
    topology, leaf_of = network.wiring.topology, network.wiring.leaf_of
    leaf = {rank: leaf_of.get(node_ranks.node) for node_ranks in own.node_ranks for rank in node_ranks.ranks}

    def alive(path: PlannedPath) -> bool:
        route, source, destination = parse_spine_name(path.spine), leaf.get(path.source), leaf.get(path.destination)
        if route is None:
            return True
        if topology is None or source is None or destination is None or route >= topology.routes:
            return False
        return bool(topology.up[source, route] and topology.down[destination, route])

    return alive


def _refresh_fingerprints(
    network: NetworkState, own: JobTraffic, wanted: Sequence[PlannedPath]
) -> tuple[PlannedPath, ...]:
    """Return the paths with the fingerprints of the routes that are alive now."""
    routes = {(path.source, path.destination): parse_spine_name(path.spine) for path in wanted}
    fingerprints = traffic.fingerprint_live_routes(
        network.wiring, own, {pair: route for pair, route in routes.items() if route is not None}
    )
    return tuple(
        replace(path, live_spines_fingerprint=fingerprints.get((path.source, path.destination), 0)) for path in wanted
    )


def _index_paths(paths: Paths | None) -> dict[RankPair, PlannedPath]:
    return {} if paths is None else _index_by_pair(paths.wanted)


def _index_by_pair(paths: Iterable[PlannedPath]) -> dict[RankPair, PlannedPath]:
    return {(path.source, path.destination): path for path in paths}


def _are_paths_restored(desired: DesiredState) -> bool:
    """Return whether this membership takes the restored routes, regardless of the joint plan."""
    trial = desired.state.adaptation.route_trial
    return trial is not None and not trial.incident and trial.membership == desired.plan.membership


def reroll_ports(observation: Observation, pair: RankPair) -> Paths | None:
    """Return the plan's paths with other ports drawn for this pair of ranks; None: there are no ports."""
    network, present = observation.cluster_view.network, observation.plan.paths
    ports = get_port_range(observation.plan) or (
        None if network is None else _choose_port_range(network, _build_own_traffic(observation))
    )
    if ports is None:
        return None
    other_paths = [path for path in (present.wanted if present else ()) if (path.source, path.destination) != pair]
    path = PlannedPath(*pair, draw=count_port_draws(observation, pair) + 1)
    return Paths((*other_paths, path)[-MAX_PATHS_PER_JOB:], present.hops if present else (), *ports)


def count_port_draws(observation: Observation, pair: RankPair) -> int:
    """Return how often ports have been drawn for this pair, including draws that were reverted."""
    wanted = observation.plan.paths.wanted if observation.plan.paths is not None else ()
    failed_routes = observation.state.adaptation.failed_routes
    draws = [path.draw for path in wanted if (path.source, path.destination) == pair]
    failed_draws = [path.draw for path in failed_routes if (path.source, path.destination) == pair]
    return max([*draws, *failed_draws], default=0)


def list_spine_hops(spec: FabricSpec) -> tuple[Hop, ...]:
    """Return the addresses that answer for existing spines, without texts that are no address."""
    spines = {format_spine_name(route) for route in range(spec.planes * spec.spines)}
    spine_of_address = {_normalize_address(text): spine for text, spine in sorted(spec.hops.items()) if spine in spines}
    hops = (Hop(address, spine) for address, spine in spine_of_address.items() if address)
    return tuple(sorted(hops, key=lambda hop: (hop.spine, hop.address)))


def _normalize_address(text: str) -> str:
    """Return the address as the kernel writes it; "": it is none."""
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return ""


def plan_job_paths(observation: Observation, network: NetworkState) -> Paths | None:
    """Return the paths of the joint plan that the job's next round is to follow; None: there are none."""
    own = _build_own_traffic(observation)
    hops, ports = list_spine_hops(network.spec), _choose_port_range(network, own)
    answering = {hop.spine for hop in hops}
    paths = [
        PlannedPath(*pair, format_spine_name(route))
        for pair, route in sorted(_get_joint_routes(network, own).items())
        if format_spine_name(route) in answering
    ]
    return (
        None
        if ports is None or not paths
        else Paths(_refresh_fingerprints(network, own, paths[:MAX_PATHS_PER_JOB]), hops, *ports)
    )


def _build_own_traffic(observation: Observation) -> JobTraffic:
    job, plan = observation.job, observation.plan
    node_of_worker = {view.name: view.node for view in observation.workers}
    return JobTraffic(
        (job.namespace, job.name),
        tuple(NodeRanks(node_of_worker.get(member.worker, ""), member.ranks) for member in plan.members),
        plan.membership,
        get_planned_routes(plan),
        get_route_fingerprints(plan),
        uses_nccl=uses_gpus(job),
        ports=get_port_range(plan),
    )


def _get_joint_routes(network: NetworkState, own: JobTraffic) -> Mapping[RankPair, int]:
    planned_job, joint_plan = network.jobs.get(own.name), network.traffic
    if (
        joint_plan is not None
        and planned_job is not None
        and planned_job.node_ranks == own.node_ranks
        and own.name in joint_plan.routes
    ):
        return joint_plan.routes[own.name]
    # Its members have just changed.
    return traffic.plan_job_routes(network.wiring, (job for name, job in network.jobs.items() if name != own.name), own)


def _choose_port_range(network: NetworkState, own: JobTraffic) -> PortRange | None:
    """Return a range of ports that no other job has on its nodes; None: there is none.

    The job keeps its own range as long as that is one. Otherwise it gets the first.
    """
    first, last = network.spec.path_control.ports
    nodes = {node_ranks.node for node_ranks in own.node_ranks}
    taken = {
        name: job.ports
        for name, job in network.jobs.items()
        if name != own.name
        and job.ports is not None
        and not nodes.isdisjoint(node_ranks.node for node_ranks in job.node_ranks)
    }
    ranges = [(start, start + PORTS_PER_JOB - 1) for start in range(first, last - PORTS_PER_JOB + 2, PORTS_PER_JOB)]
    # If two jobs have taken the same range at once, one of them gives way.
    preceding = [ports for name, ports in taken.items() if name < own.name]
    if own.ports in ranges and not any(_are_overlapping(own.ports, taken_range) for taken_range in preceding):
        return own.ports
    return next(
        (
            candidate
            for candidate in ranges
            if not any(_are_overlapping(candidate, taken_range) for taken_range in taken.values())
        ),
        None,
    )


def _are_overlapping(first: PortRange, second: PortRange) -> bool:
    return first[0] <= second[1] and second[0] <= first[1]
