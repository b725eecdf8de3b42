"""Slow and dead links of a fabric, by what jobs' own flows have shown of their routes. Pure functions.

They are computed again from what is persisted with the jobs. An operator that dies loses nothing, and old reports do
not count.

A slow flow has several suspects: its uplink, its downlink, and the two nodes at its ends. A fast flow acquits all that
is on its route. The suspects that explain most of the slow flows are blamed (the tomography of binary link states:
Duffield, IEEE Trans. Inf. Theory 52, 2006). Between a link and a node, the link is blamed, since a plan can try to
avoid it. Suspects that nothing tells apart are all avoided: another spine avoids them anyway.

A tenant may report falsely, and then harms itself. A link that one namespace accuses is slow for its own flows. A link
that two accuse is slow for all, by as much as the milder report. An acquittal does not count for other namespaces.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ...state.desired_state import RouteObservation
from ...state.network import LeafSpinePair, LinkShares

ROUTE_REPORT_TTL_SECONDS = 1800.0
"""Time that a report counts. After that, a repaired link is tried again, where that pays."""
ACQUITTAL_WINDOW_SECONDS = 15.0
"""A fast flow acquits suspects of a report that is later by this time at most, since links become slow."""
FAST_FLOW_RATIO = 1.25
"""Ratio to the usual time per byte below which a flow is fast."""
MIN_ACCUSING_NAMESPACES = 2
"""Namespaces whose agreeing reports count for all."""

_Suspect = LeafSpinePair | str
"""A link, or a node by its name."""


@dataclass(frozen=True)
class DegradedLinks:
    """Links that carry less than they are built for."""

    agreed_shares: LinkShares = field(default_factory=dict)
    shares_by_namespace: Mapping[str, LinkShares] = field(default_factory=dict)  # what only one namespace reports


NO_DEGRADED_LINKS = DegradedLinks()


def find_degraded_links(reports: Mapping[str, Sequence[RouteObservation]], now: float) -> DegradedLinks:
    """Return the links that carry less. `reports`: of all namespaces whose jobs use the fabric.

    If there is only one namespace, its reports count for all.
    """
    accused = {tenant: find_accused_links(tenant_reports, now) for tenant, tenant_reports in reports.items()}
    accusers = Counter(link for links in accused.values() for link in links)
    needed = min(MIN_ACCUSING_NAMESPACES, len(reports))
    agreed = {
        link: max(links[link] for links in accused.values() if link in links)
        for link, count in sorted(accusers.items())
        if count >= needed
    }
    unconfirmed = {
        tenant: {link: share for link, share in links.items() if link not in agreed}
        for tenant, links in accused.items()
    }
    return DegradedLinks(agreed, {tenant: links for tenant, links in unconfirmed.items() if links})


def find_accused_links(reports: Iterable[RouteObservation], now: float) -> LinkShares:
    """Return the links that the reports of one namespace accuse, with the share that they still carry."""
    fresh = select_fresh_reports(reports, now)
    innocent: dict[_Suspect, float] = {}
    for report in fresh:
        if 0 < report.ratio < FAST_FLOW_RATIO:
            innocent |= {suspect: max(report.at, innocent.get(suspect, 0.0)) for suspect in _list_suspects(report)}
    slow = [
        (
            report,
            frozenset(
                candidate
                for candidate in _list_suspects(report)
                if innocent.get(candidate, 0.0) < _get_acquittal_start(report)
            ),
        )
        for report in fresh
        if not 0 < report.ratio < FAST_FLOW_RATIO
    ]
    shares: dict[LeafSpinePair, float] = {}
    while counts := Counter(candidate for _, suspects in slow for candidate in suspects):
        likeliest = {suspect for suspect, explained in counts.items() if explained == max(counts.values())}
        links = {candidate for candidate in likeliest if isinstance(candidate, tuple)}
        blamed: set[_Suspect] = {*links} or likeliest
        for link in links:
            # The mildest report that it explains: the others have an additional cause.
            shares[link] = max(
                1.0 / report.ratio if report.ratio else 0.0 for report, suspects in slow if link in suspects
            )
        slow = [(report, suspects) for report, suspects in slow if not suspects & blamed]
    return shares


def select_fresh_reports(reports: Iterable[RouteObservation], now: float) -> tuple[RouteObservation, ...]:
    """Return the newest report of each flow and route that is not too old, oldest first."""
    newest: dict[tuple[str, ...], RouteObservation] = {}
    for report in sorted(reports, key=lambda report: report.at):
        if 0 <= now - report.at < ROUTE_REPORT_TTL_SECONDS:
            newest[report.flow] = report
    return tuple(sorted(newest.values(), key=lambda report: report.at))


def _get_acquittal_start(report: RouteObservation) -> float:
    """Return the time from which a fast flow acquits. What passed before a link died is no evidence."""
    return report.at - ACQUITTAL_WINDOW_SECONDS if report.ratio else report.at


def _list_suspects(report: RouteObservation) -> Iterator[_Suspect]:
    """Yield the suspects of a report.

    Where nothing passes the spine, packets have reached it: its link to the other leaf is dead.
    """
    downlink = report.destination, report.spine
    yield downlink
    if report.ratio:
        yield from ((report.source, report.spine), report.sender, report.receiver)
