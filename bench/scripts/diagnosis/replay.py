"""Perturbed copies of all recordings, diagnosed; what is right of the verdicts, by fault."""

from __future__ import annotations

import logging
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import repeat

from pacekeeper_analysis.failures.finding import FaultClass, Finding

from . import rules
from .faults import InjectedFault, Truth, list_faults
from .operator_replay import replay_operator
from .perturb import Beginning, perturb_recording
from .record import HEALTHY, Recording, get_recording_path

MIN_CONFIDENCE = 0.9
NAIVE_VERDICT_SECONDS = 2.0
"""Seconds that a naive rule may observe the fault before its first answer counts."""

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
    first: ReplayVerdict | None  # that names a worker; None: no worker was named
    last: ReplayVerdict | None
    naive: Mapping[str, tuple[bool, bool]]  # rule → it blamed a rank, and rightly


Beginnings = Mapping[str, Sequence[Beginning]]
"""By fault, of all its recordings."""
Case = tuple[str, int]
"""Fault and place."""


def replay_all_recordings(places: int, copies: int) -> list[Outcome]:
    """Of all recordings that there are, the faults in the catalogue's order."""
    with ProcessPoolExecutor() as pool:
        by_recording = list(
            pool.map(replay_recording, list_cases(places), repeat(collect_beginnings(places)), repeat(copies))
        )
    return [outcome for outcomes in by_recording for outcome in outcomes]


def list_cases(places: int) -> list[Case]:
    return [(fault.name, place) for fault in list_faults() for place in range(places)]


def replay_recording(case: Case, beginnings: Beginnings, copies: int) -> list[Outcome]:
    logging.disable(logging.CRITICAL)
    name, place = case
    fault = next(fault for fault in list_faults() if fault.name == name)
    recording = Recording.load_from(get_recording_path(name, place))
    other_beginnings = [
        beginning
        for other_name, fault_beginnings in beginnings.items()
        if other_name != name
        for beginning in fault_beginnings
    ]
    return [_replay_copy(fault, place, copy, recording, other_beginnings) for copy in range(copies)]


def collect_beginnings(places: int) -> Beginnings:
    by_fault: dict[str, list[Beginning]] = defaultdict(list)
    for fault in list_faults():
        for place in range(places):
            beginning = (
                None
                if fault.hangs
                else Beginning.from_recording(Recording.load_from(get_recording_path(fault.name, place)))
            )
            if beginning is not None:
                by_fault[fault.name].append(beginning)
    return dict(by_fault)


def _replay_copy(
    fault: InjectedFault, place: int, copy: int, recording: Recording, beginnings: Sequence[Beginning]
) -> Outcome:
    perturbed = recording if copy == 0 else perturb_recording(recording, beginnings, seed=1000 * place + copy)
    truths = fault.truths(place)
    versions = replay_operator(perturbed)
    verdicts = [
        _check_finding(version.finding, truths, version.reported_at - recording.began)
        for version in versions
        if version.finding is not None and version.finding.culprit and version.reported_at > recording.began
    ]
    return Outcome(
        fault=fault.name,
        hangs=fault.hangs,
        place=place,
        copy=copy,
        early=any(version.reported_at <= recording.began for version in versions),
        first=verdicts[0] if verdicts else None,
        last=verdicts[-1] if verdicts else None,
        naive={name: _check_naive_rule(perturbed, rule, truths) for name, rule in rules.RULES.items()},
    )


def _check_finding(finding: Finding, truths: Sequence[Truth], after: float) -> ReplayVerdict:
    named_truths = [truth for truth in truths if truth.is_named(finding)]
    return ReplayVerdict(
        after=after,
        culprit=finding.culprit,
        fault=finding.fault.value,
        kinds=frozenset(kind.value for kind in finding.signal_kinds),
        named=bool(named_truths),
        classed=any(truth.is_class(finding) for truth in named_truths or truths),
    )


def _check_naive_rule(recording: Recording, rule: rules.Rule, truths: Sequence[Truth]) -> tuple[bool, bool]:
    blamed = rules.find_first_blamed(recording, rule, NAIVE_VERDICT_SECONDS)
    return blamed is not None, blamed is not None and any(truth.is_blamed(blamed[1]) for truth in truths)


def count_right_verdicts(outcomes: Iterable[Outcome]) -> dict[Key, tuple[int, int]]:
    """By class and witnesses of a last verdict: how many there were, and how many were right."""
    counts: dict[Key, list[int]] = defaultdict(lambda: [0, 0])
    for outcome in outcomes:
        if outcome.last is not None and outcome.last.fault != FaultClass.UNKNOWN:
            counts[outcome.last.key][0] += 1
            counts[outcome.last.key][1] += outcome.last.right
    return {key: (total, correct) for key, (total, correct) in counts.items()}


def apply_succession_rule(total: int, correct: int) -> float:
    """Laplace's rule."""
    return (correct + 1) / (total + 2)


def count_confident_and_wrong(outcomes: Sequence[Outcome]) -> int:
    """Last verdicts that are wrong, and of a kind that was right in MIN_CONFIDENCE of all *other* faults' copies."""
    count = 0
    for name in {outcome.fault for outcome in outcomes}:
        shares = count_right_verdicts(outcome for outcome in outcomes if outcome.fault != name)
        for outcome in outcomes:
            if outcome.fault == name and outcome.last is not None and not outcome.last.right:
                confidences = [
                    apply_succession_rule(*share)
                    for (fault, kinds), share in shares.items()
                    if fault == outcome.last.fault and kinds <= outcome.last.kinds
                ]
                count += max(confidences, default=0.0) >= MIN_CONFIDENCE
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


def build_table(outcomes: Sequence[Outcome]) -> list[Row]:
    rows = []
    for name in dict.fromkeys(outcome.fault for outcome in outcomes):
        fault_outcomes = [outcome for outcome in outcomes if outcome.fault == name]
        verdict_counts = Counter(
            "nothing" if replayed.last is None else f"{replayed.last.fault}: {_describe_verdict(replayed.last)}"
            for replayed in fault_outcomes
        )
        rows.append(
            Row(
                fault=name,
                first_named=sum(replayed.first is not None and replayed.first.named for replayed in fault_outcomes)
                / len(fault_outcomes),
                last_named=sum(replayed.last is not None and replayed.last.named for replayed in fault_outcomes)
                / len(fault_outcomes),
                classed=sum(replayed.last is not None and replayed.last.right for replayed in fault_outcomes)
                / len(fault_outcomes),
                silent=sum(replayed.last is None for replayed in fault_outcomes) / len(fault_outcomes),
                seconds=compute_quantile(
                    [math.inf if replayed.first is None else replayed.first.after for replayed in fault_outcomes], 0.5
                ),
                last_verdicts=", ".join(f"{verdict} ({count})" for verdict, count in verdict_counts.most_common(3)),
            )
        )
    return rows


def _describe_verdict(verdict: ReplayVerdict) -> str:
    return "right" if verdict.named else verdict.culprit


def compute_quantile(values: Sequence[float], part: float) -> float:
    """Of values that may be infinite; infinity where there are none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else math.inf


def load_healthy_recordings(places: int) -> list[Recording]:
    return [Recording.load_from(get_recording_path(HEALTHY, place)) for place in range(places)]
