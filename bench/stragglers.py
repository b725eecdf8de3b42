"""Training under stragglers: DDP, torchft's LocalSGD and DiLoCo, and ours (shares, EDiT, A-EDiT), held to one bound.

Four ranks over gloo train the same tiny GPT on the same samples. What slows a rank down is drawn for each pair of rank
and sample, and slept, so that it does not depend on this machine; the real, single-threaded work is a small part of a
step, and how small is in the result (`compute_share`). A side's throughput is the samples that count in its result
(a rank's work beyond its weight does not), per second of wall time, as a share of the bound: the best integer schedule
that the draws allow (scripts/stragglers/bounds.py). Sides take turns; a repeat has the same draws, samples and initial
parameters for all of them, so that intervals are those of paired seeds.

Virtual time is what a side's schedule takes where only the draws take time, in units of a sample's cost on an
undisturbed rank.
QUICK=1: one repeat of short runs, which says whether it works and not more.
"""

from __future__ import annotations

import json
import os
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bench.scripts.stragglers import bounds, diaries
from bench.scripts.stragglers.draws import Scenario, draw_costs
from bench.scripts.stragglers.hosts import Hosts, hosts, say
from bench.scripts.stragglers.links import Network, network
from bench.scripts.stragglers.run import GLOBAL_BATCH, LOCAL_BATCH, RANKS, Outcome, Run
from bench.scripts.stragglers.sides import SIDES, TORCHFT
from pacekeeper_analysis.shares import balance


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    repeats: int
    unit_seconds: float
    """Of a sample on an undisturbed rank; seven of them make its step."""
    sync_every: int
    periods: int
    """Of `sync_every` global batches in a run that measures throughput; the first one is left out."""
    loss_periods: int
    learning_rates: tuple[float, ...]
    block_pairs: int
    """Of steps with DDP and with ours alternating in one process."""


FULL = Sizes(5, 0.02, 24, 3, 40, (1e-3, 2e-3, 4e-3, 8e-3), 24)
QUICK = Sizes(1, 0.01, 8, 3, 6, (4e-3,), 4)
SIZES = QUICK if os.environ.get("QUICK") else FULL
LOSS_UNIT_SECONDS = 0.004
"""In the runs that measure the loss nothing is slept, but in A-EDiT, where time decides who does how much."""
LINK = "16mbit"
"""The slow one's: DDP's all-reduces of a step (330 KB over it, both ways) take longer than the step then."""
RUN_TIMEOUT = 600.0

Figures = dict[str, list[float]]
"""Side → its figure in each repeat."""


def main() -> None:
    with hosts() as started, network(RANKS, LINK) as links:
        throughput = {scenario: defaultdict[str, list[float]](list) for scenario in Scenario}
        details: dict[str, dict[str, Any]] = {scenario: {} for scenario in Scenario}
        for repeat in range(SIZES.repeats):
            for scenario in Scenario:
                if scenario is Scenario.SLOW_LINK and links is None:
                    say("slow_link: left out, it needs root and iproute2")
                    continue
                for side in turns(repeat):
                    figures = measure_throughput(started, side, scenario, repeat, links)
                    throughput[scenario][side].append(figures["of_bound"])
                    details[scenario].setdefault(side, []).append(figures)
        loss = measure_loss(started)
    for scenario in Scenario:
        print(throughput_table(scenario, throughput[scenario], details[scenario]))
    print(loss_table(loss))
    print(json.dumps({"bench": "stragglers", **summary(throughput, details), "loss": loss}))


def turns(repeat: int) -> list[str]:
    """The sides in the order in which they take their turns; another one each time."""
    first = repeat % len(SIDES)
    return [*SIDES[first:], *SIDES[:first]]


# Throughput


def measure_throughput(
    started: Hosts, side: str, scenario: Scenario, repeat: int, links: Network | None
) -> dict[str, Any]:
    """One run's figures."""
    run = Run(
        side,
        scenario,
        seed=repeat + 1,
        steps=SIZES.periods * SIZES.sync_every,
        unit_seconds=SIZES.unit_seconds,
        sync_every=SIZES.sync_every,
        shares=operators_shares(scenario, repeat) if side == "shares" else None,
    )
    if scenario is Scenario.SLOW_LINK:
        assert links is not None
        run = replace(run, addresses=links.addresses, namespaces=links.namespaces, interface=links.interface)
    outcomes = started.perform(run, RUN_TIMEOUT)
    figures = throughput_figures(run, outcomes)
    say(
        f"repeat {repeat + 1} of {SIZES.repeats}, {scenario}, {side}: {figures['of_bound']:.3f} of the bound, "
        f"weights {' '.join(f'{weight:.2f}' for weight in figures['weights'])}"
    )
    return figures


def throughput_figures(run: Run, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Of one run, without its first period and those that began within its first half `sync_every` global batches.

    Returns: samples_s, as they came; counted, the share of them that counts in the result; of_bound; weights, of each
    rank's data; samples_per_rank; compute_share, of the drawn seconds.
    """
    written = [outcome.diary for outcome in outcomes]
    steady = diaries.complete_periods(written)
    warm_up = run.sync_every * GLOBAL_BATCH // 2
    skipped = sum(diaries.samples_until(written, period) < warm_up for period in range(1, len(steady) + 1))
    steady = steady[skipped:]
    samples = [period.samples for period in steady]
    weights = outcomes[0].weights[1 + skipped : 1 + skipped + len(steady)]
    seconds = sum(period.seconds for period in steady)
    rate = sum(map(sum, samples)) / seconds
    counted = diaries.counted(samples, weights)
    best = bounds.bound(run.costs(), GLOBAL_BATCH) / run.unit_seconds
    entries = [entry for diary in written for entry in diary]
    used = [sample for entry in entries for sample in entry.samples]
    return {
        "of_bound": rate * counted / best,
        "samples_s": rate,
        "counted": counted,
        "bound_samples_s": best,
        "weights": diaries.weight_per_rank(samples, weights),
        "samples_per_rank": [sum(of_rank) for of_rank in zip(*samples, strict=True)],
        "compute_share": sum(entry.compute for entry in entries)
        / (sum(entry.cost for entry in entries) * run.unit_seconds),
        "samples_used_twice": len(used) - len(set(used)),
    }


def operators_shares(scenario: Scenario, repeat: int) -> tuple[int, ...]:
    """What the operator would give, who has seen 32 steps of other draws of the same kind."""
    seen = draw_costs(scenario, RANKS, 32 * GLOBAL_BATCH, GLOBAL_BATCH, seed=1000 + repeat)
    a_sample = seen.reshape(RANKS, 32, GLOBAL_BATCH).mean(axis=2).T
    return balance(np.ascontiguousarray(a_sample), (LOCAL_BATCH,) * RANKS).shares


def summary(
    throughput: Mapping[Scenario, Figures], details: Mapping[str, Mapping[str, list[dict[str, Any]]]]
) -> dict[str, Any]:
    """Of each scenario: each side's throughput as a share of the bound, and what is made of them."""
    result: dict[str, Any] = {}
    for scenario, of_sides in throughput.items():
        if not of_sides:
            continue
        means = {side: statistics.fmean(values) for side, values in of_sides.items()}
        best = max(TORCHFT, key=lambda side: means[side])
        costs = draw_costs(scenario, RANKS, 400 * GLOBAL_BATCH, GLOBAL_BATCH, seed=1)
        known = bounds.bound(costs, GLOBAL_BATCH)
        result[scenario] = {
            **{side: round(mean, 4) for side, mean in means.items()},
            "torchft_best": round(means[best], 4),
            "torchft_best_is": best,
            "bound": 1.0,
            "interval": {side: half_width(values) for side, values in of_sides.items()},
            "against_ddp": {side: ratio(values, of_sides["ddp"]) for side, values in of_sides.items() if side != "ddp"},
            "against_torchft": {
                side: ratio(values, of_sides[best]) for side, values in of_sides.items() if side not in TORCHFT
            },
            "weights": {side: details[scenario][side][0]["weights"] for side in of_sides},
            "compute_share": max(figures["compute_share"] for side in of_sides for figures in details[scenario][side]),
            "within_reach": {  # of the bound, by schedules that cannot foresee
                "best_fixed_shares": round(bounds.fixed_shares(costs, GLOBAL_BATCH)[1] / known, 4),
                "equal_shares": round(bounds.shares_rate(costs, (LOCAL_BATCH,) * RANKS) / known, 4),
                "leases_of_a_local_batch": round(bounds.leases(costs, LOCAL_BATCH) / known, 4),
            },
        }
    return result


def ratio(values: Sequence[float], others: Sequence[float]) -> dict[str, float | None]:
    """Of paired values: mean and half the width of the interval of the ratios."""
    ratios = [value / other for value, other in zip(values, others, strict=True)]
    return {"ratio": round(statistics.fmean(ratios), 4), "interval": half_width(ratios)}


def half_width(values: Sequence[float]) -> float | None:
    """Of the 95 % interval; None where there is one value only."""
    return round(diaries.interval(values)[1], 4) if len(values) > 1 else None


# Loss


def measure_loss(started: Hosts) -> dict[str, Any]:
    """Held-out loss with a constant straggler, against samples and against virtual time.

    Each side takes the learning rate of the grid with which its first seed ends best; then come the other seeds.
    """
    steps = SIZES.loss_periods * SIZES.sync_every
    curves: dict[str, list[list[tuple[float, float, float]]]] = {}
    rates: dict[str, float] = {}
    for side in SIDES:
        by_rate = {rate: loss_curve(started, side, 1, steps, rate) for rate in SIZES.learning_rates}
        rates[side] = min(by_rate, key=lambda rate: by_rate[rate][-1][2])
        curves[side] = [by_rate[rates[side]]]
    for seed in range(2, SIZES.repeats + 1):
        for side in SIDES:
            curves[side].append(loss_curve(started, side, seed, steps, rates[side]))
    last = {side: [curve[-1][2] for curve in of_side] for side, of_side in curves.items()}
    soonest = min(curve[-1][1] for of_side in curves.values() for curve in of_side)
    in_time = {side: [loss_at(curve, soonest) for curve in of_side] for side, of_side in curves.items()}
    return {
        "samples": steps * GLOBAL_BATCH,
        "synchronisations": SIZES.loss_periods,
        "learning_rates": rates,
        "equal_samples": {side: round(statistics.fmean(values), 4) for side, values in last.items()},
        "seed_to_seed": {side: half_width(values) for side, values in last.items()},
        "against_ddp": {side: ratio(values, last["ddp"]) for side, values in last.items()},
        "virtual_time": round(soonest),
        "equal_time": {side: round(statistics.fmean(values), 4) for side, values in in_time.items()},
        "curves": {side: [[round(value, 4) for value in point] for point in of[0]] for side, of in curves.items()},
    }


def loss_curve(
    started: Hosts, side: str, seed: int, steps: int, learning_rate: float
) -> list[tuple[float, float, float]]:
    """Samples of the job, virtual time and held-out loss, along one run."""
    scenario = Scenario.CONSTANT
    synchronous = side in ("ddp", "shares")
    run = Run(
        side,
        scenario,
        seed,
        steps,
        unit_seconds=LOSS_UNIT_SECONDS if side == "aedit" else 0.0,
        sync_every=SIZES.sync_every,
        learning_rate=learning_rate,
        shares=operators_shares(scenario, seed) if side == "shares" else None,
        snapshots=SIZES.sync_every if synchronous else 1,
    )
    outcomes = started.perform(run, RUN_TIMEOUT)
    written = [outcome.diary for outcome in outcomes]
    curve = [
        (float(diaries.samples_until(written, period)), diaries.virtual_time(written, period), loss)
        for period, loss in outcomes[0].losses
    ]
    say(
        f"loss, {side}, seed {seed}, learning rate {learning_rate}: {curve[-1][2]:.4f} after {curve[-1][0]:.0f} samples"
    )
    return curve


def loss_at(curve: Sequence[tuple[float, float, float]], time: float) -> float:
    """At a virtual time, between two snapshots by a straight line."""
    return float(np.interp(time, [point[1] for point in curve], [point[2] for point in curve]))


# Tables


def throughput_table(scenario: str, of_sides: Figures, details: Mapping[str, list[dict[str, Any]]]) -> str:
    lines = [f"\n{scenario:<22}{'of the bound':>14}{'samples/s':>11}{'counted':>9}   weight of each rank's data"]
    for side in of_sides:
        figures = details[side]
        weights = " ".join(f"{weight:.3f}" for weight in figures[0]["weights"])
        mean, half = diaries.interval(of_sides[side])
        interval = f" ±{half:.3f}" if len(of_sides[side]) > 1 else ""
        rate = statistics.fmean(figure["samples_s"] for figure in figures)
        counted = statistics.fmean(figure["counted"] for figure in figures)
        lines.append(f"{side:<22}{mean:>8.3f}{interval:<6}{rate:>11.1f}{counted:>9.3f}   {weights}")
    return "\n".join(lines)


def loss_table(loss: Mapping[str, Any]) -> str:
    title = "held-out loss with a constant straggler"
    samples, units = f"{loss['samples']:,} samples", f"{loss['virtual_time']:,} units"
    lines = [f"\n{title}{'rate':>9}{samples:>18}{units:>16}"]
    for side, at_samples in loss["equal_samples"].items():
        rate, at_time = loss["learning_rates"][side], loss["equal_time"][side]
        lines.append(f"{side:<39}{rate:>9}{at_samples:>18}{at_time:>16}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
