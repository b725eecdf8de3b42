"""What outcomes come to, and what of it has to hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from .outcome import Decisions, Outcome
from .policies import NEVER

MIN_REMOVED_SHARE = 0.9
"""Of the slowdown that could be removed at all."""
PUBLISHED_REMOVED_SHARE = 0.589
"""Of injected slowdowns, by Greyhound (ATC'25)."""
MAX_TIMES_IN_MOST, MOST_SHARE, MAX_TIMES, MAX_MEAN_TIMES = 2.0, 0.95, 3.0, 1.3
NEAR_SHARE, NEAR_LOSS_RATE, MIN_PREDICTED_SHARE = 0.2, 0.01, 0.8
"""A gain is predicted where it is within NEAR_SHARE of the realized, or within NEAR_LOSS_RATE of a second a second."""
WORST_COUNT = 12
DEPTH_LIMITS = (1.1, 1.3, 1.6, 2.2, 3.1, 5.01)


@dataclass(frozen=True)
class OutcomeStatistics:
    """Of some outcomes, for one policy. Shares are of 1; `removed` of all that was lost under no policy at all."""

    policy: str
    scenarios: int
    removed: Mapping[str, float]
    removable: float
    goodput: Mapping[str, float]
    times_on_average: float
    times_in_most: float  # MOST_SHARE of them
    times_at_most: float

    @property
    def removed_of_removable(self) -> float:
        return self.removed[self.policy] / self.removable if self.removable else 1.0


def compute_statistics(outcomes: Sequence[Outcome], policy: str) -> OutcomeStatistics:
    injected = sum(outcome.injected for outcome in outcomes)
    seconds = sum(outcome.scenario.timeline.end for outcome in outcomes)
    lost = {name: sum(outcome.lost[name] for outcome in outcomes) for name in outcomes[0].lost}
    times = sorted(outcome.compute_times(policy) for outcome in outcomes)
    return OutcomeStatistics(
        policy,
        scenarios=len(outcomes),
        removed={name: 1 - cost / injected for name, cost in lost.items()},
        removable=1 - sum(outcome.least for outcome in outcomes) / injected,
        goodput={name: 1 - cost / seconds for name, cost in lost.items()},
        times_on_average=fmean(times),
        times_in_most=times[math.ceil(MOST_SHARE * len(times)) - 1],
        times_at_most=times[-1],
    )


def compute_aggregates(outcomes: Sequence[Outcome], policy: str) -> dict[str, float]:
    """Return the figures of a policy that name no scenario."""
    times = [outcome.compute_times(policy) for outcome in outcomes]
    statistics = compute_statistics(outcomes, policy)
    costs = {
        "scenarios": len(outcomes),
        "mean": statistics.times_on_average,
        "95 %": statistics.times_in_most,
        "most": statistics.times_at_most,
        **{f"above {limit:g}": sum(each > limit for each in times) for limit in (MAX_TIMES_IN_MOST, MAX_TIMES)},
    }
    if not _is_deciding(outcomes, policy):
        return costs
    return {
        **costs,
        **_count_actions(outcomes, policy),
        "requests a scenario": fmean(outcome.decisions[policy].questions for outcome in outcomes),
        "CPU seconds a scenario": fmean(outcome.cpu_seconds[policy] for outcome in outcomes),
    }


def compute_calm_rates(calm: Sequence[Outcome], policy: str) -> dict[str, float]:
    """Return what a deciding policy does in an hour without a fault."""
    hours = 24 * sum(outcome.days for outcome in calm)
    actions = _count_actions(calm, policy)
    return {
        "hours": hours,
        "alarms an hour": actions.pop("false alarms") / hours,
        "requests an hour": sum(outcome.decisions[policy].questions for outcome in calm) / hours,
        "seconds lost an hour": sum(outcome.lost[policy] for outcome in calm) / hours,
        **actions,
        "CPU seconds an hour": sum(outcome.cpu_seconds[policy] for outcome in calm) / hours,
    }


def _count_actions(outcomes: Sequence[Outcome], policy: str) -> dict[str, float]:
    decisions = [outcome.decisions[policy] for outcome in outcomes]
    return {
        "false alarms": sum(each.false_alarms for each in decisions),
        "wrong replacements": sum(each.wrong_exchanges for each in decisions),
        "wrong quarantines": sum(each.quarantines for each in decisions),  # for slowness, none is right
        "failures": sum(len(each.failures) for each in decisions),
    }


def format_markdown(rows: Mapping[str, Mapping[str, float]]) -> Iterable[str]:
    """A line for each row; a column for each figure that any of them has."""
    columns = [*dict.fromkeys(column for figures in rows.values() for column in figures)]
    yield f"| | {' | '.join(columns)} |"
    yield f"|{'---|' * (1 + len(columns))}"
    for name, figures in rows.items():
        cells = [f"{figures[column]:.4g}" if column in figures else "" for column in columns]
        yield f"| {name} | {' | '.join(cells)} |"


GROUPS: Mapping[str, Callable[[Outcome], object]] = {
    "kind": lambda outcome: outcome.scenario.kind,
    "depth": lambda outcome: next(f"< {top:g}" for top in DEPTH_LIMITS if outcome.scenario.depth < top),
    "end": lambda outcome: outcome.scenario.end,
    "ranks": lambda outcome: outcome.scenario.job.ranks,
    "spare": lambda outcome: outcome.scenario.job.spare.value,
    "restart": lambda outcome: outcome.scenario.job.restart_seconds,
    "restart known": lambda outcome: outcome.scenario.restart_known,
    "noise": lambda outcome: outcome.scenario.job.noise,
    "metrics late by": lambda outcome: outcome.scenario.evidence_delay_seconds,
    "noise model": lambda outcome: outcome.scenario.noise_model,
    "phases": lambda outcome: "some" if outcome.scenario.job.phase_seconds else "none",
}


def format_table(outcomes: Sequence[Outcome], policy: str) -> Iterable[str]:
    """A line for each value of each dimension."""
    yield f"{'':28} {'n':>4} {'removed':>8} {'could be':>8} {'times: mean':>11} {'95 %':>6} {'most':>7}"
    groups = {("all", ""): list(outcomes)}
    for name, get_value in GROUPS.items():
        for value in sorted({get_value(outcome) for outcome in outcomes}, key=str):
            groups[name, str(value)] = [outcome for outcome in outcomes if get_value(outcome) == value]
    for (name, value), group in groups.items():
        statistics = compute_statistics(group, policy)
        yield (
            f"{name + ' ' + value:28} {statistics.scenarios:4} {statistics.removed[policy]:8.1%} "
            f"{statistics.removable:8.1%} {statistics.times_on_average:11.2f} {statistics.times_in_most:6.2f} "
            f"{statistics.times_at_most:7.2f}"
        )


def format_worst(outcomes: Sequence[Outcome], policy: str) -> Iterable[str]:
    """Those that cost most times the clairvoyant's, and what was done in them."""
    for outcome in sorted(outcomes, key=lambda outcome: -outcome.compute_times(policy))[:WORST_COUNT]:
        yield (
            f"{outcome.compute_times(policy):6.2f} ×  {policy} {outcome.since[policy]:.0f} s, clairvoyant "
            f"{outcome.informed:.0f} s, {NEVER} {outcome.since[NEVER]:.0f} s | {outcome.scenario.description} | "
            f"{'; '.join(outcome.decisions[policy].remedies[:6]) or 'nothing'}"
        )


def count_predicted_gains(decisions: Iterable[Decisions]) -> dict[str, tuple[int, int]]:
    """By remedy, and of "all": those whose gain was predicted, and how many there were."""
    counts: dict[str, tuple[int, int]] = {"all": (0, 0)}
    for gain in (gain for each in decisions for gain in each.gains):
        is_right = abs(gain.predicted - gain.realized) <= max(NEAR_SHARE * abs(gain.realized), NEAR_LOSS_RATE)
        for name in ("all", gain.remedy):
            previous = counts.get(name, (0, 0))
            counts[name] = previous[0] + is_right, previous[1] + 1
    return counts


def find_best_online(outcomes: Sequence[Outcome]) -> str | None:
    """Of the policies without errors that lack the duration: the one that loses least, in hindsight."""
    names = [name for name in outcomes[0].lost if name.startswith("ski rental")]
    return min(names, key=lambda name: sum(outcome.lost[name] for outcome in outcomes), default=None)


def build_summary(outcomes: Sequence[Outcome], calm: Sequence[Outcome], policy: str) -> dict[str, object]:
    """The figures of a deciding policy, and `holds`: which of the goals are reached."""
    statistics = compute_statistics(outcomes, policy)
    slow_outcomes = [outcome for outcome in outcomes if outcome.is_slow]
    decisions = [outcome.decisions[policy] for outcome in outcomes]
    calm_decisions = [outcome.decisions[policy] for outcome in calm]
    all_decisions = [*decisions, *calm_decisions]
    gains = count_predicted_gains(decisions)
    predicted, total = gains["all"]
    all_outcomes = [*outcomes, *calm]
    days, calm_days = sum(outcome.days for outcome in all_outcomes), sum(outcome.days for outcome in calm)
    quarantines = sum(each.quarantines for each in all_decisions)

    def compute_per_calm_day(counts: Iterable[float]) -> float | None:
        return sum(counts) / calm_days if calm_days else None

    beaten = [
        f"{name}: {outcome.scenario.description}"
        for outcome in outcomes
        for name, lost in outcome.lost.items()
        if lost < outcome.least - 1e-6
    ]
    holds = {
        f"{MIN_REMOVED_SHARE:.0%} of the removable slowdown": statistics.removed_of_removable >= MIN_REMOVED_SHARE,
        **check_cost_goals(statistics),
        "no quarantine for slowness": quarantines == 0,
        f"{MIN_PREDICTED_SHARE:.0%} of gains within {NEAR_SHARE:.0%}": predicted >= MIN_PREDICTED_SHARE * total,
        "no policy beats the clairvoyant": not beaten,
        "no step of a pass failed": not any(each.failures for each in all_decisions),
    }
    return {
        "policy": policy,
        "scenarios": statistics.scenarios,
        "removed": statistics.removed[policy],
        "removed_at_most": statistics.removable,
        "removed_by_steps": 1 - sum(each.slowed for each in decisions) / sum(outcome.injected for outcome in outcomes),
        "removed_of_removable": statistics.removed_of_removable,
        "removed_published": PUBLISHED_REMOVED_SHARE,
        "removed_by": dict(statistics.removed),
        "goodput": dict(statistics.goodput),
        "best_online": find_best_online(outcomes),
        "times_the_clairvoyant": _format_times(statistics),
        "times_where_slow_by_its_spec": _format_times(compute_statistics(slow_outcomes, policy))
        if slow_outcomes
        else None,
        "gains_predicted": gains,
        "exchanges": sum(each.exchanges for each in decisions),
        "wrong_exchanges": sum(each.wrong_exchanges for each in all_decisions),
        "days": days,
        "calm_days": calm_days,
        "false_alarms_a_calm_day": compute_per_calm_day(each.false_alarms for each in calm_decisions),
        "false_alarms_between_faults": sum(each.false_alarms for each in decisions),
        "questions_a_calm_day": compute_per_calm_day(each.questions for each in calm_decisions),
        "lost_a_calm_day_seconds": compute_per_calm_day(outcome.lost[policy] for outcome in calm),
        "quarantines": quarantines,
        "clairvoyant_beaten_by": beaten[:10],
        "failures": sorted({failure for each in all_decisions for failure in each.failures})[:10],
        "holds": holds,
    }


def _is_deciding(outcomes: Sequence[Outcome], policy: str) -> bool:
    return all(policy in outcome.decisions for outcome in outcomes)


def check_cost_goals(statistics: OutcomeStatistics) -> dict[str, bool]:
    """Return which goals of the cost relative to the clairvoyant's are reached."""
    return {
        f"{MAX_TIMES_IN_MOST:g} × the clairvoyant's cost in {MOST_SHARE:.0%}": statistics.times_in_most
        <= MAX_TIMES_IN_MOST,
        f"{MAX_TIMES:g} × in all": statistics.times_at_most <= MAX_TIMES,
        f"{MAX_MEAN_TIMES:g} × on average": statistics.times_on_average <= MAX_MEAN_TIMES,
    }


def _format_times(statistics: OutcomeStatistics) -> dict[str, float]:
    return {"mean": statistics.times_on_average, "95 %": statistics.times_in_most, "most": statistics.times_at_most}
