"""Perturbed copies of all recordings, judged; what is right of the verdicts, by fault."""

from __future__ import annotations

import logging
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import repeat

from pacekeeper_analysis.diagnose.finding import FaultClass, Finding

from . import rules
from .faults import InjectedFault, Truth, catalogue
from .judge import replay_operator
from .perturb import Beginning, perturbed
from .record import HEALTHY, Recording, path_of

CONFIDENT = 0.9
NAIVE_VERDICT_SECONDS = 2.0
"""Seconds that a naive rule is let look at the fault before its first answer counts."""

Key = tuple[str, frozenset[str]]
"""Class and kinds of witnesses of a verdict."""


@dataclass(frozen=True)
class ReplayVerdict:
    """What a finding is worth: does it name the culprit, and the class?"""

    after: float  # seconds since the fault's beginning
    culprit: str
    fault: str  # class
    kinds: frozenset[str]  # of its witnesses
    named: bool
    classed: bool  # the class is the culprit's

    @property
    def right(self) -> bool:
        return self.named and self.classed

    @property
    def key(self) -> Key:
        return self.fault, self.kinds


@dataclass(frozen=True)
class Outcome:
    """Of one copy."""

    fault: str
    hangs: bool
    place: int
    copy: int
    early: bool  # something was blamed before the fault began
    first: ReplayVerdict | None  # that names somebody; None: nobody was
    last: ReplayVerdict | None
    naive: Mapping[str, tuple[bool, bool]]  # rule → it blamed somebody, and rightly


Beginnings = Mapping[str, Sequence[Beginning]]
"""By fault, of all its recordings."""
Case = tuple[str, int]
"""Fault and place."""


def outcomes(places: int, copies: int) -> list[Outcome]:
    """Of all recordings that there are, the faults in the catalogue's order."""
    with ProcessPoolExecutor() as pool:
        found = list(pool.map(replay_recording, cases(places), repeat(beginnings(places)), repeat(copies)))
    return [outcome for of in found for outcome in of]


def cases(places: int) -> list[Case]:
    return [(fault.name, place) for fault in catalogue() for place in range(places)]


def replay_recording(case: Case, beginnings: Beginnings, copies: int) -> list[Outcome]:
    logging.disable(logging.CRITICAL)
    name, place = case
    fault = next(fault for fault in catalogue() if fault.name == name)
    recording = Recording.load_from(path_of(name, place))
    others = [beginning for other, of in beginnings.items() if other != name for beginning in of]
    return [_outcome(fault, place, copy, recording, others) for copy in range(copies)]


def beginnings(places: int) -> Beginnings:
    found: dict[str, list[Beginning]] = defaultdict(list)
    for fault in catalogue():
        for place in range(places):
            beginning = None if fault.hangs else Beginning.from_recording(Recording.load_from(path_of(fault.name, place)))
            if beginning is not None:
                found[fault.name].append(beginning)
    return dict(found)


def _outcome(fault: InjectedFault, place: int, copy: int, recording: Recording, others: Sequence[Beginning]) -> Outcome:
    changed = recording if copy == 0 else perturbed(recording, others, seed=1000 * place + copy)
    truths = fault.truths(place)
    told = replay_operator(changed)
    verdicts = [
        _verdict(each.finding, truths, each.reported_at - recording.began)
        for each in told
        if each.finding is not None and each.finding.culprit and each.reported_at > recording.began
    ]
    return Outcome(
        fault=fault.name,
        hangs=fault.hangs,
        place=place,
        copy=copy,
        early=any(each.reported_at <= recording.began for each in told),
        first=verdicts[0] if verdicts else None,
        last=verdicts[-1] if verdicts else None,
        naive={name: _naive(changed, rule, truths) for name, rule in rules.RULES.items()},
    )


def _verdict(finding: Finding, truths: Sequence[Truth], after: float) -> ReplayVerdict:
    of = [truth for truth in truths if truth.is_named(finding)]
    return ReplayVerdict(
        after=after,
        culprit=finding.culprit,
        fault=finding.fault.value,
        kinds=frozenset(kind.value for kind in finding.signal_kinds),
        named=bool(of),
        classed=any(truth.is_class(finding) for truth in of or truths),
    )


def _naive(recording: Recording, rule: rules.Rule, truths: Sequence[Truth]) -> tuple[bool, bool]:
    found = rules.first_blamed(recording, rule, NAIVE_VERDICT_SECONDS)
    return found is not None, found is not None and any(truth.is_blamed(found[1]) for truth in truths)


def measured(found: Iterable[Outcome]) -> dict[Key, tuple[int, int]]:
    """By class and witnesses of a last verdict: how many there were, and how many were right."""
    counts: dict[Key, list[int]] = defaultdict(lambda: [0, 0])
    for outcome in found:
        if outcome.last is not None and outcome.last.fault != FaultClass.UNKNOWN:
            counts[outcome.last.key][0] += 1
            counts[outcome.last.key][1] += outcome.last.right
    return {key: (tried, right) for key, (tried, right) in counts.items()}


def succession(tried: int, right: int) -> float:
    """Laplace's rule."""
    return (right + 1) / (tried + 2)


def confident_and_wrong(found: Sequence[Outcome]) -> int:
    """Last verdicts that are wrong, and of a kind that was right in CONFIDENT of all *other* faults' copies."""
    count = 0
    for name in {outcome.fault for outcome in found}:
        shares = measured(outcome for outcome in found if outcome.fault != name)
        for outcome in found:
            if outcome.fault == name and outcome.last is not None and not outcome.last.right:
                tried = [
                    succession(*share)
                    for (fault, kinds), share in shares.items()
                    if fault == outcome.last.fault and kinds <= outcome.last.kinds
                ]
                count += max(tried, default=0.0) >= CONFIDENT
    return count


@dataclass(frozen=True)
class Row:
    """A fault in the table of confusion; shares of its copies, and seconds."""

    fault: str
    first_named: float
    last_named: float
    classed: float  # and named
    silent: float
    seconds: float  # median to the first answer
    last_verdicts: str  # the commonest last verdicts


def table(found: Sequence[Outcome]) -> list[Row]:
    rows = []
    for name in dict.fromkeys(outcome.fault for outcome in found):
        of = [outcome for outcome in found if outcome.fault == name]
        said = Counter("nothing" if o.last is None else f"{o.last.fault}: {_kind(o.last)}" for o in of)
        rows.append(
            Row(
                fault=name,
                first_named=sum(o.first is not None and o.first.named for o in of) / len(of),
                last_named=sum(o.last is not None and o.last.named for o in of) / len(of),
                classed=sum(o.last is not None and o.last.right for o in of) / len(of),
                silent=sum(o.last is None for o in of) / len(of),
                seconds=quantile([math.inf if o.first is None else o.first.after for o in of], 0.5),
                last_verdicts=", ".join(f"{words} ({count})" for words, count in said.most_common(3)),
            )
        )
    return rows


def _kind(verdict: ReplayVerdict) -> str:
    return "right" if verdict.named else verdict.culprit


def quantile(values: Sequence[float], part: float) -> float:
    """Of values that may be infinite; infinity where there are none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else math.inf


def healthy(places: int) -> list[Recording]:
    return [Recording.load_from(path_of(HEALTHY, place)) for place in range(places)]
