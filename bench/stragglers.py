"""Training under stragglers: DDP, torchft's LocalSGD and DiLoCo, and ours (shares, EDiT, A-EDiT), held to one bound.

Four ranks over gloo train the same tiny GPT on the same samples. What slows a rank down is drawn for each pair of rank
and sample, and slept, so that it does not depend on this machine; the real, single-threaded work is a small part of a
step, and how small is in the result (`compute_share`). A side's throughput is the samples that count in its result
(a rank's work beyond its weight does not), per second of wall time, as a share of the bound: the best integer schedule
that the draws allow (scripts/stragglers/bounds.py). Sides take turns; a repeat has the same draws, samples and initial
parameters for all of them, so that intervals are those of paired seeds.

Virtual time is what a side's schedule takes where only the draws take time, in units of a sample's cost on an
undisturbed rank.
QUICK=1: one repeat of short runs, a smoke test.
"""

from __future__ import annotations

import json
import os
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from bench.overlap import measure_overlap
from bench.scripts.stragglers import bounds, diaries
from bench.scripts.stragglers.draws import Scenario, draw_costs
from bench.scripts.stragglers.hosts import Hosts, RunFailedError, log_progress, start_hosts
from bench.scripts.stragglers.links import Network, create_network
from bench.scripts.stragglers.run import AEDIT_LEASE, GLOBAL_BATCH, LOCAL_BATCH, RANKS, Outcome, Run
from bench.scripts.stragglers.sides import (
    ALTERNATING_RUNS,
    LEAVING_OUT_SIDES,
    OUR_SIDES,
    SIDES,
    SYNCHRONOUS_SIDES,
    TORCHFT_SIDES,
)
from pacekeeper_analysis.stragglers.shares import optimize_shares


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    repeats: int
    unit_seconds: float
    """Of a sample on an undisturbed rank; seven of them make its step."""
    sync_every: int
    """Local steps; by the clock, what this many take an undisturbed rank."""
    drawn_sync_every: int
    """The same where ranks draw for themselves, and a rank that drew well waits at a synchronization."""
    drawn_unit_seconds: float
    """And there: of a sample, longer because the goals leave less margin for what a step costs on a busy machine."""
    periods: int
    """Of `sync_every` global batches that throughput is measured over. Of sides that synchronize in each step a quarter
    of one will do, behind another quarter that is left out."""
    loss_sync_every: int
    loss_periods: int
    loss_seeds: int
    learning_rates: tuple[float, ...]
    warmup_steps: int
    """Of our Local-SGD modes in the runs that measure the loss; torchft has no such thing."""
    cost_steps: int
    """Where DDP and ours alternate in the same processes; half of them are of each."""


FULL = Sizes(
    repeats=5,
    unit_seconds=0.03,
    sync_every=64,
    drawn_sync_every=96,
    drawn_unit_seconds=0.08,
    periods=1,
    loss_sync_every=12,
    loss_periods=40,
    loss_seeds=10,
    learning_rates=(4e-3, 8e-3),
    warmup_steps=96,
    cost_steps=480,
)
QUICK = Sizes(
    repeats=1,
    unit_seconds=0.01,
    sync_every=8,
    drawn_sync_every=8,
    drawn_unit_seconds=0.01,
    periods=2,
    loss_sync_every=8,
    loss_periods=6,
    loss_seeds=1,
    learning_rates=(4e-3,),
    warmup_steps=16,
    cost_steps=64,
)
SIZES = QUICK if os.environ.get("QUICK") else FULL
STEPS_BEHIND = 4
"""Global batches behind what is measured, so that each rank begins a step behind the last synchronization."""
LOSS_UNIT_SECONDS = 0.006
"""In the runs that measure the loss nothing is slept, but in A-EDiT, where time decides who does how much."""
SLOW_LINK_RATE = "16mbit"
"""The slow one's: DDP's all-reduces of a step (330 KB over it, in both directions) take longer than the step then."""
COST_DESCRIPTION = (
    "a sample's cost is drawn by a generator keyed by (rank, sample), since in A-EDiT the race decides who takes which "
    "sample; it is slept away but for the real work (compute_share)"
)
DRAWN_SCENARIOS = (Scenario.RANDOM, Scenario.NOISE)
"""Where ranks draw for themselves how long a sample takes."""
SWITCH_EVERY = 8
"""Steps between two synchronizations in the run that switches; half as many as in each mode."""
RUN_TIMEOUT_SECONDS = 300.0
"""Seconds; the longest run takes a third of it."""


def main() -> None:
    throughput = {scenario: defaultdict[str, dict[int, Measured]](dict) for scenario in Scenario}
    with start_hosts() as hosts, start_hosts() as other_hosts, create_network(RANKS, SLOW_LINK_RATE) as network:
        for repeat in range(SIZES.repeats):
            for scenario in Scenario:
                if scenario is Scenario.SLOW_LINK and network is None:
                    log_progress("slow_link: left out, it needs root and iproute2")
                    continue
                for side in order_sides(repeat, scenario):
                    with count_failures():
                        throughput[scenario][side][repeat] = measure_throughput(hosts, side, scenario, repeat, network)
        costs: dict[str, Any] = {}
        for side in ALTERNATING_RUNS:
            with count_failures():
                costs[side] = measure_cost(hosts, side)
        stalls = []
        for repeat in range(SIZES.repeats):
            with count_failures():
                stalls.append(measure_stall(hosts, repeat))
        loss = measure_loss(hosts, other_hosts)
        failures = hosts.failures + other_hosts.failures
    log_progress("overlap …")
    try:
        hidden_share = measure_overlap()["overlap_hidden"]
    except TimeoutError as error:
        log_progress(f"left out: {error}")
        hidden_share = None
    for scenario, by_side in throughput.items():
        if by_side:
            print(format_throughput_table(scenario, by_side))
    print(format_loss_table(loss))
    result: dict[str, Any] = {
        scenario: summarize_scenario(scenario, measured_sides)
        for scenario, measured_sides in throughput.items()
        if measured_sides
    }
    result["cost_against_ddp"] = costs
    stall = {"median": statistics.median(stalls), "longest": max(stalls)} if stalls else {}
    result |= {"switch_stall_steps": stall, "overlap_hidden": hidden_share, "loss": loss}
    result |= {
        "failed_runs": [asdict(failure) for failure in failures],
        "made": COST_DESCRIPTION,
        "sizes": asdict(SIZES),
    }
    result |= {"holds": check_goals(result)}
    print(json.dumps({"bench": "stragglers", **result}))


@contextmanager
def count_failures() -> Iterator[None]:
    """A run that fails is counted (`failed_runs`); what else is measured is not lost by it."""
    try:
        yield
    except RunFailedError as error:
        log_progress(f"left out: {error}")


def order_sides(repeat: int, scenario: Scenario) -> list[str]:
    """The sides in the order in which they take their turns; another one each time."""
    sides = [*SIDES, *(LEAVING_OUT_SIDES if scenario is Scenario.CONSTANT else ())]
    first = repeat % len(sides)
    return [*sides[first:], *sides[:first]]


# Throughput


@dataclass(frozen=True)
class Measured:
    """One run's throughput."""

    of_bound: float
    """Samples a second that count in the result, as a share of the bound."""
    samples_s: float
    """As they came."""
    counted: float
    """The share of them that counts."""
    weights: list[float]
    """Of each rank's data in the result."""
    compute_share: float
    """Real work, as a share of the drawn seconds."""
    used_twice: int
    """Samples."""


def measure_throughput(hosts: Hosts, side: str, scenario: Scenario, repeat: int, network: Network | None) -> Measured:
    sync_every = SIZES.drawn_sync_every if scenario in DRAWN_SCENARIOS else SIZES.sync_every
    run = Run(
        side,
        scenario,
        seed=repeat + 1,
        steps=SIZES.sync_every // 2 if side in SYNCHRONOUS_SIDES else sync_every * SIZES.periods + STEPS_BEHIND,
        unit_seconds=SIZES.drawn_unit_seconds if scenario in DRAWN_SCENARIOS else SIZES.unit_seconds,
        sync_every=sync_every,
        shares=compute_operator_shares(scenario, repeat) if side == "shares" else None,
    )
    if scenario is Scenario.SLOW_LINK:
        assert network is not None
        run = replace(run, addresses=network.addresses, namespaces=network.namespaces, interface=network.interface)
    measured = measure_run(run, hosts.perform(run, RUN_TIMEOUT_SECONDS), SIZES.periods)
    log_progress(
        f"repeat {repeat + 1} of {SIZES.repeats}, {scenario}, {side}: {measured.of_bound:.3f} of the bound, "
        f"weights {' '.join(f'{weight:.2f}' for weight in measured.weights)}"
    )
    return measured


def measure_run(run: Run, outcomes: Sequence[Outcome], periods: int) -> Measured:
    """Over the first `periods`; of sides that synchronize in each step, over the second half of the run."""
    rank_diaries = [outcome.diary for outcome in outcomes]
    weights = list(zip(*(outcome.weights for outcome in outcomes), strict=False))
    if run.side in SYNCHRONOUS_SIDES:
        half = slice(run.steps // 2, run.steps)
        measured, weights = diaries.list_complete_periods(rank_diaries)[run.steps // 2 - 1 :], weights[half]
    else:
        measured, weights = diaries.list_begun_periods(rank_diaries, run.unit_seconds)[:periods], weights[:periods]
    period_samples = [period.samples for period in measured]
    rate = sum(map(sum, period_samples)) / sum(period.seconds for period in measured)
    counted_share = diaries.compute_counted_share(period_samples, weights)
    entries = [entry for diary in rank_diaries for entry in diary]
    used_samples = [sample for entry in entries for sample in entry.samples]
    return Measured(
        of_bound=rate * counted_share * run.unit_seconds / bounds.compute_bound(run.draw_costs(), GLOBAL_BATCH),
        samples_s=rate,
        counted=counted_share,
        weights=[round(weight, 4) for weight in diaries.compute_rank_weights(period_samples, weights)],
        compute_share=sum(entry.compute for entry in entries)
        / (sum(entry.cost for entry in entries) * run.unit_seconds),
        used_twice=len(used_samples) - len(set(used_samples)),
    )


def compute_operator_shares(scenario: Scenario, repeat: int) -> tuple[int, ...]:
    """What the operator would give, who has seen 32 steps of other draws of the same kind."""
    costs = draw_costs(scenario, RANKS, 32 * GLOBAL_BATCH, GLOBAL_BATCH, seed=1000 + repeat)
    mean_costs = costs.reshape(RANKS, 32, GLOBAL_BATCH).mean(axis=2).T
    return optimize_shares(np.ascontiguousarray(mean_costs), (LOCAL_BATCH,) * RANKS).shares


def measure_cost(hosts: Hosts, side: str) -> dict[str, float | None]:
    """What ours adds to a step of DDP where nothing is wrong, as a share of it, from pairs of blocks."""
    run = Run(side, Scenario.NONE, 1, SIZES.cost_steps, SIZES.unit_seconds, SIZES.sync_every)
    blocks = hosts.perform(run, RUN_TIMEOUT_SECONDS)[0].blocks
    added_shares = [ours / theirs - 1 for theirs, ours in blocks]
    log_progress(f"{side}: {statistics.fmean(added_shares):+.4f} of a step of DDP")
    return {
        "mean": round(statistics.fmean(added_shares), 5),
        "interval": compute_half_width(added_shares),
        "pairs": len(added_shares),
    }


def measure_stall(hosts: Hosts, repeat: int) -> float:
    """The longest time between two steps of a rank that goes through all modes and back, beyond an usual one, in steps.

    Synchronizations are among them; the bytes that a switch must move are few in this small model.
    """
    run = Run("switches", Scenario.NONE, repeat + 1, 8 * SWITCH_EVERY, SIZES.unit_seconds, SWITCH_EVERY)
    longest = 0.0
    for outcome in hosts.perform(run, RUN_TIMEOUT_SECONDS):
        ends = [entry.at for entry in outcome.diary[SWITCH_EVERY // 2 :]]
        gaps = [after - before for before, after in pairwise(ends)]
        longest = max(longest, max(gaps) / statistics.median(gaps) - 1)
    log_progress(f"repeat {repeat + 1} of {SIZES.repeats}, switching: {longest:.2f} steps at most")
    return round(longest, 3)


def summarize_scenario(scenario: Scenario, by_side: Mapping[str, Mapping[int, Measured]]) -> dict[str, Any]:
    """Each side's throughput as a share of the bound, and what is made of them; sides that always failed are left out.

    `by_side`: by repeat.
    """
    values = {side: {repeat: run.of_bound for repeat, run in runs.items()} for side, runs in by_side.items() if runs}
    means = {side: statistics.fmean(side_values.values()) for side, side_values in values.items()}
    best_side = max((side for side in TORCHFT_SIDES if side in means), key=lambda side: means[side], default=None)
    costs = draw_costs(scenario, RANKS, 400 * GLOBAL_BATCH, GLOBAL_BATCH, seed=1)
    bound = bounds.compute_bound(costs, GLOBAL_BATCH)
    sync_every = SIZES.drawn_sync_every if scenario in DRAWN_SCENARIOS else SIZES.sync_every
    runs = [run for side_runs in by_side.values() for run in side_runs.values()]
    return {
        **{side: round(mean, 4) for side, mean in means.items()},
        "torchft_best": round(means[best_side], 4) if best_side else None,
        "torchft_best_is": best_side,
        "bound": 1.0,
        "interval": {side: compute_half_width(list(side_values.values())) for side, side_values in values.items()},
        "against_ddp": {
            side: compute_ratio(values[side], values.get("ddp", {})) for side in OUR_SIDES if side in values
        },
        "against_torchft_best": {
            side: compute_ratio(values[side], values[best_side]) for side in OUR_SIDES if best_side and side in values
        },
        "weights": {side: next(iter(side_runs.values())).weights for side, side_runs in by_side.items() if side_runs},
        "compute_share": round(max(run.compute_share for run in runs), 4) if runs else None,
        "samples_used_twice": sum(run.used_twice for run in runs),
        "of_bound_within_reach": {  # of schedules that cannot foresee, with no overhead
            "equal_shares": round(bounds.compute_shares_rate(costs, (LOCAL_BATCH,) * RANKS) / bound, 4),
            "best_fixed_shares": round(bounds.find_fixed_shares(costs, GLOBAL_BATCH)[1] / bound, 4),
            "leases_of_a_local_batch": round(bounds.compute_lease_rate(costs, LOCAL_BATCH) / bound, 4),
            **{
                f"aedit_with_leases_of_{lease}": round(
                    bounds.compute_local_sgd_rate(costs, lease, LOCAL_BATCH, sync_every) / bound, 4
                )
                for lease in (1, AEDIT_LEASE, LOCAL_BATCH)
            },
        },
    }


def compute_ratio(values: Mapping[int, float], others: Mapping[int, float]) -> dict[str, Any]:
    """Of pairs, by repeat or seed: mean, and half the width of the interval, of the ratios; None: there is no pair."""
    ratios = [values[key] / others[key] for key in values.keys() & others.keys()]
    return {"ratio": round(statistics.fmean(ratios), 4) if ratios else None, "interval": compute_half_width(ratios)}


def compute_half_width(values: Sequence[float]) -> float | None:
    """Of the 95 % interval; None where there is one value only."""
    return round(diaries.compute_interval(values)[1], 5) if len(values) > 1 else None


def check_goals(result: Mapping[str, Any]) -> dict[str, bool]:
    """The figures to reach. What was not measured is not reached."""

    def reaches_goal(goal: Callable[[], bool]) -> bool:
        try:
            return goal()
        except (KeyError, TypeError):  # a side, or a pair of sides, has no figure
            return False

    def find_our_least() -> float:
        return float(min(result["constant"]["shares"], result["constant"]["aedit"]))

    def shares_loss_as_ddp() -> bool:
        losses, spread = result["loss"]["equal_samples"], result["loss"]["seed_to_seed"]["ddp"]
        return bool(abs(losses["shares"] - losses["ddp"]) <= (spread or 0.0) + 1e-3)

    def compute_upper_end(ratio: Mapping[str, Any]) -> Any:
        return ratio["ratio"] + ratio["interval"]

    goals: dict[str, Callable[[], bool]] = {
        "constant_95_percent": lambda: find_our_least() >= 0.95,
        "constant_1.4_ddp": lambda: find_our_least() >= 1.4 * result["constant"]["ddp"],
        "constant_1.4_torchft": lambda: find_our_least() >= 1.4 * result["constant"]["torchft_best"],
        "random_95_percent": lambda: result["random"]["aedit"] >= 0.95,
        "noise_98_percent": lambda: result["noise"]["aedit"] >= 0.98,
        "none_1_percent": lambda: result["cost_against_ddp"]["cost_of_sync"]["mean"] <= 0.01,
        "aedit_loss_1_percent": lambda: compute_upper_end(result["loss"]["against_ddp"]["aedit"]) <= 1.01,
        "shares_loss_as_ddp": shares_loss_as_ddp,
        "switch_2_steps": lambda: result["switch_stall_steps"]["median"] <= 2,
        "overlap_70_percent": lambda: result["overlap_hidden"] >= 0.7,
    }
    return {name: reaches_goal(goal) for name, goal in goals.items()}


# Loss

Curve = Sequence[tuple[float, float, float]]
"""Samples of the job, virtual time and held-out loss, along one run."""


def measure_loss(hosts: Hosts, other_hosts: Hosts) -> dict[str, Any]:
    """Held-out loss with a constant straggler, against samples and against virtual time.

    Each side takes the learning rate of the grid with which its first seed ends best; then come the other seeds. Two
    sides run at once where nothing depends on time; A-EDiT by itself.
    """
    with ThreadPoolExecutor(2) as pool:
        halves = (SIDES[0:-1:2], hosts), (SIDES[1:-1:2], other_hosts)
        half_results = pool.map(lambda half: {side: measure_loss_curves(half[1], side) for side in half[0]}, halves)
        by_side = {side: rate_and_curves for half in half_results for side, rate_and_curves in half.items()}
    by_side = {side: by_side.get(side) or measure_loss_curves(hosts, side) for side in SIDES}
    by_side = {side: result for side, result in by_side.items() if result[1]}
    rates = {side: rate for side, (rate, _) in by_side.items()}
    curves = {side: side_curves for side, (_, side_curves) in by_side.items()}
    final_losses = {
        side: {seed: curve[-1][2] for seed, curve in side_curves.items()} for side, side_curves in curves.items()
    }
    earliest_end = min((curve[-1][1] for side_curves in curves.values() for curve in side_curves.values()), default=0.0)
    losses_in_time = {
        side: [interpolate_loss(curve, earliest_end) for curve in side_curves.values()]
        for side, side_curves in curves.items()
    }
    return {
        "samples": SIZES.loss_periods * SIZES.loss_sync_every * GLOBAL_BATCH,
        "synchronizations": SIZES.loss_periods,
        "learning_rates": rates,
        "equal_samples": {side: round(statistics.fmean(values.values()), 4) for side, values in final_losses.items()},
        "seed_to_seed": {side: compute_half_width(list(values.values())) for side, values in final_losses.items()},
        "against_ddp": {
            side: compute_ratio(values, final_losses.get("ddp", {})) for side, values in final_losses.items()
        },
        "virtual_time": round(earliest_end),
        "equal_time": {side: round(statistics.fmean(values), 4) for side, values in losses_in_time.items()},
        "curves": {
            side: [[round(value, 4) for value in point] for point in next(iter(seed_curves.values()))]
            for side, seed_curves in curves.items()
        },
    }


def measure_loss_curves(hosts: Hosts, side: str) -> tuple[float, dict[int, Curve]]:
    """The learning rate with which the first seed ends best, and the curve of each seed with it.

    No curve: all of the first seed's runs have failed.
    """
    by_rate: dict[float, Curve] = {}
    for rate in SIZES.learning_rates:
        with count_failures():
            by_rate[rate] = measure_loss_curve(hosts, side, 1, rate)
    if not by_rate:
        return 0.0, {}
    best = min(by_rate, key=lambda rate: by_rate[rate][-1][2])
    curves = {1: by_rate[best]}
    for seed in range(2, SIZES.loss_seeds + 1):
        with count_failures():
            curves[seed] = measure_loss_curve(hosts, side, seed, best)
    return best, curves


def measure_loss_curve(hosts: Hosts, side: str, seed: int, learning_rate: float) -> Curve:
    """Of one run."""
    scenario, steps = Scenario.CONSTANT, SIZES.loss_periods * SIZES.loss_sync_every
    run = Run(
        side,
        scenario,
        seed,
        steps,
        unit_seconds=LOSS_UNIT_SECONDS if side == "aedit" else 0.0,
        sync_every=SIZES.loss_sync_every,
        learning_rate=learning_rate,
        decays=True,
        shares=compute_operator_shares(scenario, seed) if side == "shares" else None,
        snapshot_every=SIZES.loss_sync_every,
        warmup_steps=SIZES.warmup_steps,
    )
    outcomes = hosts.perform(run, RUN_TIMEOUT_SECONDS)
    rank_diaries = [outcome.diary for outcome in outcomes]
    curve = [
        (float(diaries.count_samples(rank_diaries, period)), diaries.compute_virtual_time(rank_diaries, period), loss)
        for period, loss in outcomes[0].losses
    ]
    log_progress(
        f"loss, {side}, seed {seed}, learning rate {learning_rate}: {curve[-1][2]:.4f} after {curve[-1][0]:.0f} samples"
    )
    return curve


def interpolate_loss(curve: Curve, time: float) -> float:
    """At a virtual time, between two snapshots by a straight line."""
    return float(np.interp(time, [point[1] for point in curve], [point[2] for point in curve]))


# Tables


def format_throughput_table(scenario: str, by_side: Mapping[str, Mapping[int, Measured]]) -> str:
    lines = [f"\n{scenario:<22}{'of the bound':>14}{'samples/s':>11}{'counted':>9}   weight of each rank's data"]
    for side, side_runs in by_side.items():
        if not side_runs:
            lines.append(f"{side:<22}{'failed':>8}")
            continue
        runs = list(side_runs.values())
        mean, half_interval = diaries.compute_interval([run.of_bound for run in runs])
        interval = f" ±{half_interval:.3f}" if len(runs) > 1 else ""
        rate, counted = statistics.fmean(run.samples_s for run in runs), statistics.fmean(run.counted for run in runs)
        weights = " ".join(f"{weight:.3f}" for weight in runs[0].weights)
        lines.append(f"{side:<22}{mean:>8.3f}{interval:<6}{rate:>11.1f}{counted:>9.3f}   {weights}")
    return "\n".join(lines)


def format_loss_table(loss: Mapping[str, Any]) -> str:
    title = "held-out loss with a constant straggler"
    samples, units = f"{loss['samples']:,} samples", f"{loss['virtual_time']:,} units"
    lines = [f"\n{title}{'rate':>9}{samples:>18}{units:>16}"]
    for side, at_samples in loss["equal_samples"].items():
        rate, at_time = loss["learning_rates"][side], loss["equal_time"][side]
        lines.append(f"{side:<39}{rate:>9}{at_samples:>18}{at_time:>16}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
