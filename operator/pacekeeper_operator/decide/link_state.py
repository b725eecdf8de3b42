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

from ..network import Link, Shares
from ..state import WaySeen

KEPT_SECONDS = 1800.0
"""So long a word counts: a link that is mended is tried again then, where that pays."""
TOGETHER_SECONDS = 15.0
"""A fast flow acquits of what another one has shown so much later at most: links become slow."""
FAST = 1.25
"""A flow that takes less than so many times the usual time for a byte is fast."""
ACCUSERS = 2
"""Namespaces whose word counts for all."""

_Suspect = Link | str
"""A link, or a node by its name."""


@dataclass(frozen=True)
class Doubts:
    """Links that carry less than they are built for."""

    of_all: Shares = field(default_factory=dict)
    of_one: Mapping[str, Shares] = field(default_factory=dict)  # what one namespace alone says


NO_DOUBTS = Doubts()


def judge(words: Mapping[str, Sequence[WaySeen]], now: float) -> Doubts:
    """`words`: of all namespaces whose jobs use the fabric; where there is one, its word is everybody's."""
    accused = {tenant: accuse(said, now) for tenant, said in words.items()}
    accusers = Counter(link for links in accused.values() for link in links)
    needed = min(ACCUSERS, len(words))
    agreed = {
        link: max(links[link] for links in accused.values() if link in links)
        for link, count in sorted(accusers.items())
        if count >= needed
    }
    alone = {
        tenant: {link: share for link, share in links.items() if link not in agreed}
        for tenant, links in accused.items()
    }
    return Doubts(agreed, {tenant: links for tenant, links in alone.items() if links})


def accuse(words: Iterable[WaySeen], now: float) -> Shares:
    """By the words of one namespace."""
    fresh = fresh_words(words, now)
    innocent: dict[_Suspect, float] = {}
    for word in fresh:
        if 0 < word.ratio < FAST:
            innocent |= {suspect: max(word.at, innocent.get(suspect, 0.0)) for suspect in _suspects(word)}
    slow = [
        (word, frozenset(one for one in _suspects(word) if innocent.get(one, 0.0) < _acquitted_from(word)))
        for word in fresh
        if not 0 < word.ratio < FAST
    ]
    found: dict[Link, float] = {}
    while count := Counter(one for _, suspects in slow for one in suspects):
        most = {suspect for suspect, explained in count.items() if explained == max(count.values())}
        links = {one for one in most if isinstance(one, tuple)}
        blamed: set[_Suspect] = {*links} or most
        for link in links:
            # The mildest of what it explains: the others have something else beside.
            found[link] = max(1.0 / word.ratio if word.ratio else 0.0 for word, suspects in slow if link in suspects)
        slow = [(word, suspects) for word, suspects in slow if not suspects & blamed]
    return found


def fresh_words(words: Iterable[WaySeen], now: float) -> tuple[WaySeen, ...]:
    """The newest of each flow and way that is not too old, oldest first."""
    newest: dict[tuple[str, ...], WaySeen] = {}
    for word in sorted(words, key=lambda word: word.at):
        if 0 <= now - word.at < KEPT_SECONDS:
            newest[word.flow] = word
    return tuple(sorted(newest.values(), key=lambda word: word.at))


def _acquitted_from(word: WaySeen) -> float:
    """On: what has passed before a link died says nothing."""
    return word.at - TOGETHER_SECONDS if word.ratio else word.at


def _suspects(word: WaySeen) -> Iterator[_Suspect]:
    """Where nothing passes the spine, the packets have come to it: its link to the other leaf is dead."""
    comes = word.destination, word.spine
    yield comes
    if word.ratio:
        yield from ((word.source, word.spine), word.sender, word.receiver)
