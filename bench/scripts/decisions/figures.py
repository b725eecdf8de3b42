"""What outcomes come to, and what of it has to hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from .outcome import Outcome
from .policies import OURS, POLICIES

REMOVED = 0.9
"""Of the slowdown that could be removed at all."""
PUBLISHED = 0.589
"""Of injected slowdowns, by Greyhound (ATC'25)."""
TIMES_IN_MOST, MOST, TIMES_AT_MOST, TIMES_ON_AVERAGE = 2.0, 0.95, 3.0, 1.3
NEAR, SLACK, PREDICTED = 0.2, 0.01, 0.8
"""A gain is predicted where it is within NEAR of the realised, or within SLACK of a second a second."""
WORST = 12
DEPTHS = (1.1, 1.3, 1.6, 2.2, 3.1, 5.01)


@dataclass(frozen=True)
class OutcomeStatistics:
    """Of some outcomes. Shares are of 1; `removed` of all that was lost under no policy at all."""

    scenarios: int
    removed: Mapping[str, float]
    removable: float
    goodput: Mapping[str, float]
    times_on_average: float
    times_in_most: float  # MOST of them
    times_at_most: float

    @property
    def removed_of_removable(self) -> float:
        return self.removed[OURS] / self.removable if self.removable else 1.0


def compute_statistics(outcomes: Sequence[Outcome]) -> OutcomeStatistics:
    injected = sum(each.injected for each in outcomes)
    seconds = sum(each.scenario.timeline.end for each in outcomes)
    lost = {name: sum(each.lost[name] for each in outcomes) for name in POLICIES}
    times = sorted(each.times for each in outcomes)
    return OutcomeStatistics(
        scenarios=len(outcomes),
        removed={name: 1 - cost / injected for name, cost in lost.items()},
        removable=1 - sum(each.least for each in outcomes) / injected,
        goodput={name: 1 - cost / seconds for name, cost in lost.items()},
        times_on_average=fmean(times),
        times_in_most=times[math.ceil(MOST * len(times)) - 1],
        times_at_most=times[-1],
    )


GROUPS: Mapping[str, Callable[[Outcome], object]] = {
    "kind": lambda each: each.scenario.kind,
    "depth": lambda each: next(f"< {top:g}" for top in DEPTHS if each.scenario.depth < top),
    "end": lambda each: each.scenario.end,
    "ranks": lambda each: each.scenario.job.ranks,
    "spare": lambda each: each.scenario.job.spare.value,
    "restart": lambda each: each.scenario.job.restart_seconds,
    "restart known": lambda each: each.scenario.restart_known,
    "noise": lambda each: each.scenario.job.noise,
    "metrics late by": lambda each: each.scenario.evidence_delay_seconds,
    "phases": lambda each: "some" if each.scenario.job.phase_seconds else "none",
}


def table(outcomes: Sequence[Outcome]) -> Iterable[str]:
    """A line for each value of each dimension."""
    yield f"{'':28} {'n':>4} {'removed':>8} {'could be':>8} {'times: mean':>11} {'95 %':>6} {'most':>7}"
    groups = {("all", ""): list(outcomes)}
    for name, of in GROUPS.items():
        for value in sorted({of(each) for each in outcomes}, key=str):
            groups[name, str(value)] = [each for each in outcomes if of(each) == value]
    for (name, value), some in groups.items():
        found = compute_statistics(some)
        yield (
            f"{name + ' ' + value:28} {found.scenarios:4} {found.removed[OURS]:8.1%} {found.removable:8.1%} "
            f"{found.times_on_average:11.2f} {found.times_in_most:6.2f} {found.times_at_most:7.2f}"
        )


def worst(outcomes: Sequence[Outcome]) -> Iterable[str]:
    """Those that cost most times the clairvoyant's, and what was done in them."""
    for each in sorted(outcomes, key=lambda each: -each.times)[:WORST]:
        yield (
            f"{each.times:6.2f} ×  ours {each.since[OURS]:.0f} s, clairvoyant {each.informed:.0f} s, never act "
            f"{each.since['never act']:.0f} s | {each.scenario.description} | {'; '.join(each.remedies[:6]) or 'nothing'}"
        )


def predicted(outcomes: Iterable[Outcome]) -> dict[str, tuple[int, int]]:
    """By remedy, and of "all": those whose gain was predicted, and how many there were."""
    found: dict[str, tuple[int, int]] = {"all": (0, 0)}
    for gain in (gain for each in outcomes for gain in each.gains):
        right = abs(gain.predicted - gain.realised) <= max(NEAR * abs(gain.realised), SLACK)
        for name in ("all", gain.remedy):
            before = found.get(name, (0, 0))
            found[name] = before[0] + right, before[1] + 1
    return found


def best_online(outcomes: Sequence[Outcome]) -> str:
    """Of those who err in nothing and do not know how long it lasts: who loses least, in hindsight."""
    names = [name for name in POLICIES if name.startswith("ski rental")]
    return min(names, key=lambda name: sum(each.lost[name] for each in outcomes))


def summary(outcomes: Sequence[Outcome], calm: Sequence[Outcome]) -> dict[str, object]:
    """The figures, and `holds`: which of the goals are reached."""
    found, slow = compute_statistics(outcomes), [each for each in outcomes if each.is_slow]
    gains = predicted(outcomes)
    right, told = gains["all"]
    every = [*outcomes, *calm]
    days, calm_days = sum(each.days for each in every), sum(each.days for each in calm)
    quarantines = sum(each.quarantines for each in every)

    def a_calm_day(counts: Iterable[float]) -> float | None:
        return sum(counts) / calm_days if calm_days else None

    beaten = [
        f"{name}: {each.scenario.description}"
        for each in outcomes
        for name, lost in each.lost.items()
        if lost < each.least - 1e-6
    ]
    holds = {
        f"{REMOVED:.0%} of the removable slowdown": found.removed_of_removable >= REMOVED,
        f"{TIMES_IN_MOST:g} × the clairvoyant's cost in {MOST:.0%}": found.times_in_most <= TIMES_IN_MOST,
        f"{TIMES_AT_MOST:g} × in all": found.times_at_most <= TIMES_AT_MOST,
        f"{TIMES_ON_AVERAGE:g} × on average": found.times_on_average <= TIMES_ON_AVERAGE,
        "no quarantine for slowness": quarantines == 0,
        f"{PREDICTED:.0%} of gains within {NEAR:.0%}": right >= PREDICTED * told,
        "nobody beats the clairvoyant": not beaten,
        "no step of a pass failed": not any(each.failures for each in every),
    }
    return {
        "scenarios": found.scenarios,
        "removed": found.removed[OURS],
        "removed_at_most": found.removable,
        "removed_by_steps": 1 - sum(each.slowed for each in outcomes) / sum(each.injected for each in outcomes),
        "removed_of_removable": found.removed_of_removable,
        "removed_published": PUBLISHED,
        "removed_by": dict(found.removed),
        "goodput": dict(found.goodput),
        "best_online": best_online(outcomes),
        "times_the_clairvoyant": _times(found),
        "times_where_slow_by_its_spec": _times(compute_statistics(slow)) if slow else None,
        "gains_predicted": gains,
        "exchanges": sum(each.exchanges for each in outcomes),
        "wrong_exchanges": sum(each.wrong_exchanges for each in every),
        "days": days,
        "calm_days": calm_days,
        "false_alarms_a_calm_day": a_calm_day(each.false_alarms for each in calm),
        "false_alarms_between_faults": sum(each.false_alarms for each in outcomes),
        "questions_a_calm_day": a_calm_day(each.questions for each in calm),
        "lost_a_calm_day_seconds": a_calm_day(each.lost[OURS] for each in calm),
        "quarantines": quarantines,
        "clairvoyant_beaten_by": beaten[:10],
        "failures": sorted({failure for each in every for failure in each.failures})[:10],
        "holds": holds,
    }


def _times(found: OutcomeStatistics) -> dict[str, float]:
    return {"mean": found.times_on_average, "95 %": found.times_in_most, "most": found.times_at_most}
