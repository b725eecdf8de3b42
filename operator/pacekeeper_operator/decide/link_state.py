"""Which links of a fabric are slow or dead, by what jobs' own flows have shown of their ways. Pure, and made anew from
what is written with the jobs: an operator that dies forgets nothing, and words that are old count for nothing.

A flow that is slow has several suspects: its uplink, its downlink, and the two nodes at its ends. A flow that is fast
acquits all that it goes by. What explains most of the slow flows is to blame (the tomography of binary link states:
Duffield, IEEE Trans. Inf. Theory 52, 2006); where that may be a link or a node, the link is, since a plan can try
to go around it. Suspects that nothing tells apart are all avoided: another spine avoids them anyway.

A tenant may lie, and then hurts itself: a link that one namespace accuses is slow for its own flows, one that two
accuse for everybody, and as much as the milder of them says. Nobody's praise of a link counts for another namespace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ..network import LeafSpinePair, LinkShares
from ..state import RouteObservation

ROUTE_REPORT_TTL_SECONDS = 1800.0
"""So long a word counts: a link that is mended is tried again then, where that pays."""
ACQUITTAL_WINDOW_SECONDS = 15.0
"""A fast flow acquits of what another one has shown so much later at most: links become slow."""
FAST_FLOW_RATIO = 1.25
"""A flow that takes less than so many times the usual time for a byte is fast."""
MIN_ACCUSING_NAMESPACES = 2
"""Namespaces whose word counts for all."""

_Suspect = LeafSpinePair | str
"""A link, or a node by its name."""


@dataclass(frozen=True)
class DegradedLinks:
    """Links that carry less than they are built for."""

    agreed_shares: LinkShares = field(default_factory=dict)
    shares_by_namespace: Mapping[str, LinkShares] = field(default_factory=dict)  # what one namespace alone says


NO_DEGRADED_LINKS = DegradedLinks()


def find_degraded_links(reports: Mapping[str, Sequence[RouteObservation]], now: float) -> DegradedLinks:
    """`words`: of all namespaces whose jobs use the fabric; where there is one, its word is everybody's."""
    accused = {tenant: find_accused_links(said, now) for tenant, said in reports.items()}
    accusers = Counter(link for links in accused.values() for link in links)
    needed = min(MIN_ACCUSING_NAMESPACES, len(reports))
    agreed = {
        link: max(links[link] for links in accused.values() if link in links)
        for link, count in sorted(accusers.items())
        if count >= needed
    }
    alone = {
        tenant: {link: share for link, share in links.items() if link not in agreed}
        for tenant, links in accused.items()
    }
    return DegradedLinks(agreed, {tenant: links for tenant, links in alone.items() if links})


def find_accused_links(reports: Iterable[RouteObservation], now: float) -> LinkShares:
    """By the words of one namespace."""
    fresh = select_fresh_reports(reports, now)
    innocent: dict[_Suspect, float] = {}
    for word in fresh:
        if 0 < word.ratio < FAST_FLOW_RATIO:
            innocent |= {suspect: max(word.at, innocent.get(suspect, 0.0)) for suspect in _list_suspects(word)}
    slow = [
        (word, frozenset(one for one in _list_suspects(word) if innocent.get(one, 0.0) < _get_acquittal_start(word)))
        for word in fresh
        if not 0 < word.ratio < FAST_FLOW_RATIO
    ]
    found: dict[LeafSpinePair, float] = {}
    while count := Counter(one for _, suspects in slow for one in suspects):
        most = {suspect for suspect, explained in count.items() if explained == max(count.values())}
        links = {one for one in most if isinstance(one, tuple)}
        blamed: set[_Suspect] = {*links} or most
        for link in links:
            # The mildest of what it explains: the others have something else beside.
            found[link] = max(1.0 / word.ratio if word.ratio else 0.0 for word, suspects in slow if link in suspects)
        slow = [(word, suspects) for word, suspects in slow if not suspects & blamed]
    return found


def select_fresh_reports(reports: Iterable[RouteObservation], now: float) -> tuple[RouteObservation, ...]:
    """The newest of each flow and way that is not too old, oldest first."""
    newest: dict[tuple[str, ...], RouteObservation] = {}
    for word in sorted(reports, key=lambda word: word.at):
        if 0 <= now - word.at < ROUTE_REPORT_TTL_SECONDS:
            newest[word.flow] = word
    return tuple(sorted(newest.values(), key=lambda word: word.at))


def _get_acquittal_start(report: RouteObservation) -> float:
    """On: what has passed before a link died says nothing."""
    return report.at - ACQUITTAL_WINDOW_SECONDS if report.ratio else report.at


def _list_suspects(report: RouteObservation) -> Iterator[_Suspect]:
    """Where nothing passes the spine, the packets have come to it: its link to the other leaf is dead."""
    comes = report.destination, report.spine
    yield comes
    if report.ratio:
        yield from ((report.source, report.spine), report.sender, report.receiver)
