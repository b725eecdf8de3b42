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

from pacekeeper_analysis.diagnose.links import HOT
from pacekeeper_analysis.reports import PathFault

from ..api import PathControl
from ..network import Network, Pair
from ..observation import Observation, Policy
from ..state import MAX_WAYS_SEEN, Draft, WaySeen
from . import links, paths
from .link_state import FAST, KEPT_SECONDS, accuse, fresh_words
from .wiring import spine_of

NEAR = 0.5
"""Part of the pace of the job's fastest flow that a fast one reaches."""
NEWS_SECONDS = 20.0
"""So long joint planning may take to go around what has just been seen, and the ranks to be asked again."""


def step(observation: Observation, _policy: Policy) -> Draft:
    """The draft with what is new, and without what is too old."""
    draft, known, flows = observation.draft, observation.state.adaptation.ways_seen, _planned(observation)
    heard = () if flows is None else (*_dead(flows), *_measured(flows))
    words = fresh_words((*known, *heard), observation.now)
    words = _most_telling(words if flows is None else _without_strays(flows, words))
    return draft if words == known else draft.with_adaptation(ways_seen=words)


def _without_strays(flows: _Flows, words: tuple[WaySeen, ...]) -> tuple[WaySeen, ...]:
    """A link's end is told some time after it: what flows that are adrift by now have shown lately goes, too."""
    observation = flows.observation
    news = {word for word in words if word.ratio and observation.now - word.at <= NEWS_SECONDS}
    if not news:
        return words
    adrift = (flows.word(pair, 1.0) for pair in paths.adrift(observation, flows.network))
    strays = {word.flow for word in adrift if word is not None}
    return tuple(word for word in words if word not in news or word.flow not in strays)


def _most_telling(words: tuple[WaySeen, ...]) -> tuple[WaySeen, ...]:
    """As many as are kept: who is fast goes first, then who is slow for longest."""
    kept = sorted(words, key=lambda word: (0 < word.ratio < FAST, -word.at))[:MAX_WAYS_SEEN]
    return words if len(kept) == len(words) else tuple(sorted(kept, key=lambda word: word.at))


def blamed(observation: Observation) -> bool:
    """Flows of this job have shown just now that links which its ways go by are slow: what to do about it is weighed
    where the ranks' own evidence is."""
    words, now = observation.state.adaptation.ways_seen, observation.now
    news = [word for word in words if now - word.at <= NEWS_SECONDS and word.ratio >= FAST]
    slow = accuse(words, now) if news else {}
    return any((leaf, word.spine) in slow for word in news for leaf in (word.source, word.destination))


def to_be_looked_at(observation: Observation) -> bool:
    """The same, and joint planning has not heard of it yet."""
    network, words = observation.surroundings.network, observation.state.adaptation.ways_seen
    known = None if network is None else network.jobs.get((observation.job.namespace, observation.job.name))
    heard = accuse(() if known is None else known.seen, observation.now)
    return heard.keys() != accuse(words, observation.now).keys() and blamed(observation)


@dataclass(frozen=True)
class _Flows:
    """That the job's plan names ways for."""

    observation: Observation
    network: Network
    ways: Mapping[Pair, int]

    def word(self, pair: Pair, ratio: float) -> WaySeen | None:
        """None: a node has left the fabric, or the leaf."""
        ends = [self.observation.worker(self.observation.worker_of_rank(rank) or "") for rank in pair]
        sender, receiver = (view.node if view is not None else "" for view in ends)
        wiring = self.network.wiring
        source, destination = (wiring.leaf_of.get(node) for node in (sender, receiver))
        if source is None or destination is None or source == destination:
            return None
        leaves = wiring.leaves[source], wiring.leaves[destination]
        spine = spine_of(self.ways[pair])
        return WaySeen(self.observation.now, leaves[0], spine, leaves[1], sender, receiver, ratio)


def _planned(observation: Observation) -> _Flows | None:
    network = observation.surroundings.network
    if network is None or network.wiring.topology is None or network.spec.path_control.mode is not PathControl.PROBE:
        return None
    ways = paths.ways_of(observation.plan)
    return _Flows(observation, network, ways) if ways else None


def _dead(flows: _Flows) -> Iterator[WaySeen]:
    """Said once, and once more while it lasts before it is forgotten."""
    observation = flows.observation
    said = {
        (word.source, word.spine, word.destination)
        for word in observation.state.adaptation.ways_seen
        if not word.ratio and observation.now - word.at < KEPT_SECONDS / 2
    }
    for pair, told in paths.told(observation).items():
        word = flows.word(pair, 0.0) if told.fault is PathFault.BLACK_HOLE and pair in flows.ways else None
        if word is not None and (word.source, word.spine, word.destination) not in said:
            yield word


def _measured(flows: _Flows) -> Iterator[WaySeen]:
    """In the pass in which the connections have been looked at."""
    observation, look = flows.observation, flows.observation.state.adaptation.link
    if look is None or look.at != observation.now:
        return
    in_force = {pair for pair, told in paths.told(observation).items() if told.in_force and pair in flows.ways}
    shared = _shared(flows.network)
    hot, paces = links.hot_pairs(observation), links.paces(observation)
    alone: dict[Pair, tuple[int, float]] = {}  # flows on its way, and its pace if it had that to itself
    for pair in sorted(in_force & paces.keys()):
        word = flows.word(pair, 1.0)
        if word is not None:
            by = max(shared[word.source, word.spine, True], shared[word.destination, word.spine, False], 1)
            alone[pair] = by, paces[pair].bytes_per_second * by
    fastest = max((pace for _, pace in alone.values()), default=0.0)
    for pair, (by, pace) in alone.items():
        ratio = max(paces[pair].least_ratio, hot.get(pair, 0.0)) / by
        fast = paces[pair].most_ratio < FAST and pair not in hot and pace >= NEAR * fastest
        word = flows.word(pair, ratio if ratio >= HOT else 1.0)
        if word is not None and (fast or ratio >= HOT):
            yield word


def _shared(network: Network) -> Counter[tuple[str, str, bool]]:
    """How many planned flows each uplink (True) and downlink carries."""
    found = Counter[tuple[str, str, bool]]()
    for job in network.jobs.values():
        node = {rank: seat.node for seat in job.seats for rank in seat.ranks}
        for pair, way in job.ways.items():
            for rank, sends in zip(pair, (True, False), strict=True):
                leaf = network.wiring.leaf_of.get(node.get(rank, ""))
                if leaf is not None:
                    found[network.wiring.leaves[leaf], spine_of(way), sends] += 1
    return found
