"""What the job's flows show of the ways that are planned for them, in words that are kept with the job: `link_state`
makes the state of the fabric's links of the words of all jobs.

A flow speaks of a way that its launcher has seen it on, when the connections have been asked for: it is slow where they
take long beside their own first windows, or are hot beside the job's others; fast where they are as fast as ever, and
not far from the job's fastest. What its way is shared by plan is no slowness. What a flow shows while it may have left
its way is of no way that anybody knows. And launchers speak, where what goes by a spine gets no further.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pacekeeper_analysis.diagnose.links import MIN_HOT_RATIO
from pacekeeper_analysis.reports import PathFault

from ..api import PathControl
from ..network import NetworkState, RankPair
from ..observation import Observation, Policy
from ..state import MAX_ROUTE_OBSERVATIONS, DesiredState, RouteObservation
from . import links, paths
from .link_state import FAST_FLOW_RATIO, ROUTE_REPORT_TTL_SECONDS, find_accused_links, select_fresh_reports
from .wiring import format_spine_name

FAST_FLOW_SHARE = 0.5
"""Part of the pace of the job's fastest flow that a fast one reaches."""
NEW_ROUTE_REPORT_SECONDS = 20.0
"""So long joint planning may take to go around what has just been seen, and the ranks to be asked again."""


def record_route_reports(observation: Observation, _policy: Policy) -> DesiredState:
    """The draft with what is new, and without what is too old."""
    draft, known, flows = observation.desired, observation.state.adaptation.ways_seen, _get_planned_flows(observation)
    heard = () if flows is None else (*_report_dead_routes(flows), *_report_measured_routes(flows))
    words = select_fresh_reports((*known, *heard), observation.now)
    words = _select_informative_reports(words if flows is None else _drop_drifted_reports(flows, words))
    return draft if words == known else draft.with_adaptation(ways_seen=words)


def _drop_drifted_reports(flows: _PlannedFlows, reports: tuple[RouteObservation, ...]) -> tuple[RouteObservation, ...]:
    """A link's end is told some time after it: what flows that are adrift by now have shown lately goes, too."""
    observation = flows.observation
    news = {word for word in reports if word.ratio and observation.now - word.at <= NEW_ROUTE_REPORT_SECONDS}
    if not news:
        return reports
    adrift = (flows.build_report(pair, 1.0) for pair in paths.find_drifted_flows(observation, flows.network))
    strays = {word.flow for word in adrift if word is not None}
    return tuple(word for word in reports if word not in news or word.flow not in strays)


def _select_informative_reports(reports: tuple[RouteObservation, ...]) -> tuple[RouteObservation, ...]:
    """As many as are kept: who is fast goes first, then who is slow for longest."""
    kept = sorted(reports, key=lambda word: (0 < word.ratio < FAST_FLOW_RATIO, -word.at))[:MAX_ROUTE_OBSERVATIONS]
    return reports if len(kept) == len(reports) else tuple(sorted(kept, key=lambda word: word.at))


def has_new_slow_links(observation: Observation) -> bool:
    """Flows of this job have shown just now that links which its ways go by are slow: what to do about it is weighed
    where the ranks' own evidence is."""
    words, now = observation.state.adaptation.ways_seen, observation.now
    news = [word for word in words if now - word.at <= NEW_ROUTE_REPORT_SECONDS and word.ratio >= FAST_FLOW_RATIO]
    slow = find_accused_links(words, now) if news else {}
    return any((leaf, word.spine) in slow for word in news for leaf in (word.source, word.destination))


def has_unplanned_slow_links(observation: Observation) -> bool:
    """The same, and joint planning has not heard of it yet."""
    network, words = observation.cluster_view.network, observation.state.adaptation.ways_seen
    known = None if network is None else network.jobs.get((observation.job.namespace, observation.job.name))
    heard = find_accused_links(() if known is None else known.seen, observation.now)
    return heard.keys() != find_accused_links(words, observation.now).keys() and has_new_slow_links(observation)


@dataclass(frozen=True)
class _PlannedFlows:
    """That the job's plan names ways for."""

    observation: Observation
    network: NetworkState
    routes: Mapping[RankPair, int]

    def build_report(self, pair: RankPair, ratio: float) -> RouteObservation | None:
        """None: a node has left the fabric, or the leaf."""
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
    ways = paths.get_planned_routes(observation.plan)
    return _PlannedFlows(observation, network, ways) if ways else None


def _report_dead_routes(flows: _PlannedFlows) -> Iterator[RouteObservation]:
    """Said once, and once more while it lasts before it is forgotten."""
    observation = flows.observation
    said = {
        (word.source, word.spine, word.destination)
        for word in observation.state.adaptation.ways_seen
        if not word.ratio and observation.now - word.at < ROUTE_REPORT_TTL_SECONDS / 2
    }
    for pair, told in paths.collect_path_reports(observation).items():
        word = flows.build_report(pair, 0.0) if told.fault is PathFault.BLACK_HOLE and pair in flows.routes else None
        if word is not None and (word.source, word.spine, word.destination) not in said:
            yield word


def _report_measured_routes(flows: _PlannedFlows) -> Iterator[RouteObservation]:
    """In the pass in which the connections have been looked at."""
    observation, look = flows.observation, flows.observation.state.adaptation.link
    if look is None or look.at != observation.now:
        return
    in_force = {pair for pair, told in paths.collect_path_reports(observation).items() if told.in_force and pair in flows.routes}
    shared = _count_shared_flows(flows.network)
    hot, paces = links.find_hot_pairs(observation), links.measure_pair_throughputs(observation)
    alone: dict[RankPair, tuple[int, float]] = {}  # flows on its way, and its pace if it had that to itself
    for pair in sorted(in_force & paces.keys()):
        word = flows.build_report(pair, 1.0)
        if word is not None:
            by = max(shared[word.source, word.spine, True], shared[word.destination, word.spine, False], 1)
            alone[pair] = by, paces[pair].bytes_per_second * by
    fastest = max((pace for _, pace in alone.values()), default=0.0)
    for pair, (by, pace) in alone.items():
        ratio = max(paces[pair].min_ratio, hot.get(pair, 0.0)) / by
        fast = paces[pair].max_ratio < FAST_FLOW_RATIO and pair not in hot and pace >= FAST_FLOW_SHARE * fastest
        word = flows.build_report(pair, ratio if ratio >= MIN_HOT_RATIO else 1.0)
        if word is not None and (fast or ratio >= MIN_HOT_RATIO):
            yield word


def _count_shared_flows(network: NetworkState) -> Counter[tuple[str, str, bool]]:
    """How many planned flows each uplink (True) and downlink carries."""
    found = Counter[tuple[str, str, bool]]()
    for job in network.jobs.values():
        node = {rank: seat.node for seat in job.seats for rank in seat.ranks}
        for pair, way in job.ways.items():
            for rank, sends in zip(pair, (True, False), strict=True):
                leaf = network.wiring.leaf_of.get(node.get(rank, ""))
                if leaf is not None:
                    found[network.wiring.leaves[leaf], format_spine_name(way), sends] += 1
    return found
