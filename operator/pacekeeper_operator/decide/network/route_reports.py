"""Reports of a job's flows about their planned routes, which are persisted with the job.

`link_state` computes the state of the fabric's links from the reports of all jobs.

A flow reports on a route on which its launcher has seen it, when the connections are asked for evidence. It is slow
where they take long compared with their own first windows, or are hot compared with the job's others. It is fast where
they are as fast as before, and not far from the job's fastest. Planned sharing of a route is no slowness. What a flow
shows while it may have left its route belongs to no known route. Launchers also report routes on which packets get no
further than the spine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pacekeeper_analysis.network.delay_matrix import MIN_HOT_RATIO
from pacekeeper_analysis.protocol.reports import PathFault

from ...api.fabric import PathControl
from ...state.desired_state import MAX_ROUTE_OBSERVATIONS, DesiredState, RouteObservation
from ...state.network import NetworkState, RankPair
from ...state.observation import Observation
from ...state.policy import Policy
from ...state.routes import format_spine_name, get_planned_routes
from . import paths, slow_communication
from .link_state import FAST_FLOW_RATIO, ROUTE_REPORT_TTL_SECONDS, find_accused_links, select_fresh_reports

FAST_FLOW_SHARE = 0.5
"""Share of the throughput of the job's fastest flow that a fast one reaches."""
NEW_ROUTE_REPORT_SECONDS = 20.0
"""Time that joint planning may take to avoid what has just been seen, and the ranks to be asked again."""


def record_route_reports(observation: Observation, _policy: Policy) -> DesiredState:
    """Return the state with new reports, and without those that are too old."""
    desired, recorded, flows = (
        observation.desired,
        observation.state.adaptation.route_observations,
        _get_planned_flows(observation),
    )
    new_reports = () if flows is None else (*_report_dead_routes(flows), *_report_measured_routes(flows))
    reports = select_fresh_reports((*recorded, *new_reports), observation.now)
    reports = _select_informative_reports(reports if flows is None else _drop_drifted_reports(flows, reports))
    return desired if reports == recorded else desired.with_adaptation(route_observations=reports)


def _drop_drifted_reports(flows: _PlannedFlows, reports: tuple[RouteObservation, ...]) -> tuple[RouteObservation, ...]:
    """Return the reports without recent ones of flows that have drifted by now.

    The failure of a link is reported some time after it.
    """
    observation = flows.observation
    recent = {report for report in reports if report.ratio and observation.now - report.at <= NEW_ROUTE_REPORT_SECONDS}
    if not recent:
        return reports
    drifted = (flows.build_report(pair, 1.0) for pair in paths.find_drifted_flows(observation, flows.network))
    drifted_flows = {report.flow for report in drifted if report is not None}
    return tuple(report for report in reports if report not in recent or report.flow not in drifted_flows)


def _select_informative_reports(reports: tuple[RouteObservation, ...]) -> tuple[RouteObservation, ...]:
    """Return as many reports as are kept. Those of fast flows are dropped first, then the oldest."""
    retained = sorted(reports, key=lambda report: (0 < report.ratio < FAST_FLOW_RATIO, -report.at))[
        :MAX_ROUTE_OBSERVATIONS
    ]
    return reports if len(retained) == len(reports) else tuple(sorted(retained, key=lambda report: report.at))


def has_new_slow_links(observation: Observation) -> bool:
    """Return whether flows of this job have just shown that links of its routes are slow.

    A remedy is weighed where the ranks' own evidence is.
    """
    reports, now = observation.state.adaptation.route_observations, observation.now
    recent = [
        report for report in reports if now - report.at <= NEW_ROUTE_REPORT_SECONDS and report.ratio >= FAST_FLOW_RATIO
    ]
    slow = find_accused_links(reports, now) if recent else {}
    return any((leaf, report.spine) in slow for report in recent for leaf in (report.source, report.destination))


def has_unplanned_slow_links(observation: Observation) -> bool:
    """Return whether flows have just shown slow links that joint planning has not read yet."""
    network, reports = observation.cluster_view.network, observation.state.adaptation.route_observations
    planned_job = None if network is None else network.jobs.get((observation.job.namespace, observation.job.name))
    planned_links = find_accused_links(() if planned_job is None else planned_job.route_observations, observation.now)
    return planned_links.keys() != find_accused_links(reports, observation.now).keys() and has_new_slow_links(
        observation
    )


@dataclass(frozen=True)
class _PlannedFlows:
    """The flows for which the job's plan names routes."""

    observation: Observation
    network: NetworkState
    routes: Mapping[RankPair, int]

    def build_report(self, pair: RankPair, ratio: float) -> RouteObservation | None:
        """Return a report of the flow; None: a node is in no leaf, or both are in one."""
        ends = [self.observation.find_worker(self.observation.find_worker_of_rank(rank) or "") for rank in pair]
        sender, receiver = (view.node if view is not None else "" for view in ends)
        wiring = self.network.wiring
        source, destination = (wiring.leaf_of.get(node) for node in (sender, receiver))
        if source is None or destination is None or source == destination:
            return None
        leaves = wiring.leaves[source], wiring.leaves[destination]
        spine = format_spine_name(self.routes[pair])
        return RouteObservation(self.observation.now, leaves[0], spine, leaves[1], sender, receiver, ratio)


def _get_planned_flows(observation: Observation) -> _PlannedFlows | None:
    network = observation.cluster_view.network
    if network is None or network.wiring.topology is None or network.spec.path_control.mode is not PathControl.PROBE:
        return None
    routes = get_planned_routes(observation.plan)
    return _PlannedFlows(observation, network, routes) if routes else None


def _report_dead_routes(flows: _PlannedFlows) -> Iterator[RouteObservation]:
    """Yield a report of each dead route, and once more while it lasts, before the first one expires."""
    observation = flows.observation
    reported = {
        (report.source, report.spine, report.destination)
        for report in observation.state.adaptation.route_observations
        if not report.ratio and observation.now - report.at < ROUTE_REPORT_TTL_SECONDS / 2
    }
    for pair, path_report in paths.collect_path_reports(observation).items():
        report = (
            flows.build_report(pair, 0.0)
            if path_report.fault is PathFault.BLACK_HOLE and pair in flows.routes
            else None
        )
        if report is not None and (report.source, report.spine, report.destination) not in reported:
            yield report


def _report_measured_routes(flows: _PlannedFlows) -> Iterator[RouteObservation]:
    """Yield reports of the measured flows, in the pass in which the connections' evidence is recorded."""
    observation, link_check = flows.observation, flows.observation.requests.link_check
    if link_check is None or link_check.at != observation.now:
        return
    in_force = {
        pair
        for pair, path_report in paths.collect_path_reports(observation).items()
        if path_report.in_force and pair in flows.routes
    }
    shared_flows = _count_shared_flows(flows.network)
    hot, throughputs = (
        slow_communication.find_hot_pairs(observation),
        slow_communication.measure_pair_throughputs(observation),
    )
    unshared: dict[RankPair, tuple[int, float]] = {}  # flows on its route, and its throughput if it had that to itself
    for pair in sorted(in_force & throughputs.keys()):
        report = flows.build_report(pair, 1.0)
        if report is not None:
            sharing = max(
                shared_flows[report.source, report.spine, True],
                shared_flows[report.destination, report.spine, False],
                1,
            )
            unshared[pair] = sharing, throughputs[pair].bytes_per_second * sharing
    fastest = max((throughput for _, throughput in unshared.values()), default=0.0)
    for pair, (sharing, throughput) in unshared.items():
        ratio = max(throughputs[pair].min_ratio, hot.get(pair, 0.0)) / sharing
        fast = (
            throughputs[pair].max_ratio < FAST_FLOW_RATIO
            and pair not in hot
            and throughput >= FAST_FLOW_SHARE * fastest
        )
        report = flows.build_report(pair, ratio if ratio >= MIN_HOT_RATIO else 1.0)
        if report is not None and (fast or ratio >= MIN_HOT_RATIO):
            yield report


def _count_shared_flows(network: NetworkState) -> Counter[tuple[str, str, bool]]:
    """Count the planned flows of each uplink (True) and downlink."""
    counts = Counter[tuple[str, str, bool]]()
    for job in network.jobs.values():
        node_of_rank = {rank: node_ranks.node for node_ranks in job.node_ranks for rank in node_ranks.ranks}
        for pair, route in job.routes.items():
            for rank, sends in zip(pair, (True, False), strict=True):
                leaf = network.wiring.leaf_of.get(node_of_rank.get(rank, ""))
                if leaf is not None:
                    counts[network.wiring.leaves[leaf], format_spine_name(route), sends] += 1
    return counts
