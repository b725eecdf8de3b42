"""The simulator's half of the bench: all planners on all fabrics and sets of jobs, with bounds; and planning's time.

Simulated at the level of flows, links shared fairly (`pacekeeper_analysis.fabric.load`). A speed is a part of what a
job reaches where no other holds it up: that of the `slowest` and the `mean` job where all communicate all the time, and
the mean one's `by_turns`, where they compute in between. All planners of a seed have the same jobs, draws and shifts.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from pacekeeper_analysis.fabric.route_assignment import compute_load_bound

from .bounds import compute_speed_bound
from .clusters import (
    HOSTS,
    NICS,
    SimulatedFabric,
    Traffic,
    TrafficJob,
    break_busiest_uplink,
    build_fabrics,
    build_one_large_job,
    build_traffic,
    damage_fabric,
    draw_eight_jobs,
    draw_hundred_jobs,
)
from .planners import PLANNERS, PlannerCase
from .speeds import SLOTS, compute_concurrent_speeds, compute_turn_speeds
from .timing import Timing, measure_timings

MIN_SHARE_OF_BEST, MIN_SHARE_OF_BEST_DEAD = 0.95, 0.99
DEAD_UPLINK = "one uplink dead"
MAX_PLAN_SECONDS, MAX_REPAIR_SECONDS, MAX_REPAIR_MOVES = 0.2, 0.005, 8


@dataclass(frozen=True)
class Outcome:
    """`level`: the largest load in whole flows' weights."""

    level: int
    load: float
    slowest: float
    mean: float
    by_turns: float


@dataclass(frozen=True)
class Result:
    """Of one scenario and seed. `bound`: of levels, for whole flows; `speed`: of the slowest job, at most."""

    symmetric: bool
    flows: int
    bound: int
    speed: float
    outcomes: Mapping[str, Outcome]


def run_simulations(seeds: int) -> tuple[dict[str, Any], dict[str, bool]]:
    """Figures, and which goals hold."""
    start = time.monotonic()
    results: dict[str, list[Result]] = {}
    timings: list[Mapping[str, Timing]] = []
    for seed in range(seeds):
        for name, case in iterate_cases(seed):
            results.setdefault(name, []).append(build_result(case, seed))
            print(f"seed {seed}: {name}, {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
        timings.append(measure_timings(np.random.default_rng(seed)))
    scenarios = {name: _compute_statistics(seed_results) for name, seed_results in results.items()}
    _print_table(scenarios)
    metrics = {"gpus": HOSTS * NICS, "seeds": seeds, "scenarios": scenarios, "times": _compute_times(timings)}
    return metrics, _check_goals(results, timings)


def iterate_cases(seed: int) -> Iterator[tuple[str, PlannerCase]]:
    for jobs_name, jobs in (
        ("one large job", build_one_large_job()),
        ("8 jobs", draw_eight_jobs(np.random.default_rng(seed))),
        ("100 jobs packed", draw_hundred_jobs(np.random.default_rng(seed), packed=True)),
        ("100 jobs spread", draw_hundred_jobs(np.random.default_rng(seed), packed=False)),
    ):
        for name, fabric, traffic in _iterate_fabrics(jobs, seed):
            default_shifts = np.random.default_rng(seed).integers(SLOTS, size=len(jobs))
            yield (
                f"{jobs_name}, {name}",
                PlannerCase(fabric, jobs, traffic, compute_speed_bound(fabric, traffic), default_shifts),
            )


def _iterate_fabrics(jobs: Sequence[TrafficJob], seed: int) -> Iterator[tuple[str, SimulatedFabric, Traffic]]:
    for name, fabric in build_fabrics().items():
        traffic = build_traffic(fabric, jobs).split_flows(fabric.topology.planes)
        yield name, fabric, traffic
        if name == "8 trunks":
            yield f"{name}, {DEAD_UPLINK}", break_busiest_uplink(fabric, traffic), traffic
        if name in ("1:1", "8 trunks"):
            yield f"{name}, damaged", damage_fabric(fabric, np.random.default_rng(seed)), traffic


def build_result(case: PlannerCase, seed: int) -> Result:
    outcomes = {}
    for name, planner in PLANNERS.items():
        plan = planner(case, np.random.default_rng(seed))
        usage = plan.compute_usage(case.fabric)
        speeds = compute_concurrent_speeds(usage, len(case.jobs))
        turn_speeds = compute_turn_speeds(usage, case.jobs, case.happen if plan.shifts is None else plan.shifts)
        level, load = plan.compute_level(case.fabric), plan.compute_load(case.fabric)
        outcomes[name] = Outcome(level, load, float(speeds.min()), float(speeds.mean()), float(turn_speeds.mean()))
    topology, flows = case.fabric.topology, case.traffic.flows
    return Result(topology.is_symmetric, len(flows), compute_load_bound(topology, flows), case.speed, outcomes)


def _compute_statistics(seed_results: Sequence[Result]) -> dict[str, Any]:
    """Medians."""

    def summarize_planner(name: str) -> dict[str, float]:
        outcomes = [result.outcomes[name] for result in seed_results]
        return {
            field: round(median(getattr(outcome, field) for outcome in outcomes), 4)
            for field in ("level", "load", "slowest", "mean", "by_turns")
        }

    return {
        "flows": median(result.flows for result in seed_results),
        "bound": median(result.bound for result in seed_results),
        "best_speed": round(median(result.speed for result in seed_results), 4),
        "planners": {name: summarize_planner(name) for name in PLANNERS},
    }


def _compute_times(timings: Sequence[Mapping[str, Timing]]) -> dict[str, dict[str, float]]:
    return {
        name: {
            "plan_seconds": round(median(timing[name].plan for timing in timings), 4),
            "repair_seconds": round(median(seconds for timing in timings for seconds in timing[name].repairs), 5),
            "repair_moves": max(moved for timing in timings for moved in timing[name].moved),
        }
        for name in timings[0]
    }


def _check_goals(results: Mapping[str, Sequence[Result]], timings: Sequence[Mapping[str, Timing]]) -> dict[str, bool]:
    """All seeds count; of times the medians."""
    all_results = [result for seed_results in results.values() for result in seed_results]
    times = _compute_times(timings).values()
    return {
        "optimal_where_symmetric": all(
            _get_level(result) == result.bound for result in all_results if result.symmetric
        ),
        "one_above_elsewhere": all(_get_level(result) <= result.bound + 1 for result in all_results),
        "near_the_best_in_parts": all(_compute_share_of_best(result) >= MIN_SHARE_OF_BEST for result in all_results),
        "dead_uplink": all(
            _compute_share_of_best(result) >= MIN_SHARE_OF_BEST_DEAD
            for name, seed_results in results.items()
            for result in seed_results
            if name.endswith(DEAD_UPLINK)
        ),
        "plan_seconds": max(case_times["plan_seconds"] for case_times in times) <= MAX_PLAN_SECONDS,
        "repair_seconds": max(case_times["repair_seconds"] for case_times in times) <= MAX_REPAIR_SECONDS,
        "repair_moves": max(case_times["repair_moves"] for case_times in times) <= MAX_REPAIR_MOVES,
    }


def _get_level(result: Result) -> int:
    return result.outcomes["ours"].level


def _compute_share_of_best(result: Result) -> float:
    return result.outcomes["ours in parts"].slowest / result.speed


def _print_table(scenarios: Mapping[str, Mapping[str, Any]]) -> None:
    for name, scenario in scenarios.items():
        print(f"{name}: {scenario['flows']} flows, bound {scenario['bound']}, best speed {scenario['best_speed']}")
        for planner, outcome in scenario["planners"].items():
            print(
                f"  {planner:14} level {outcome['level']:3}  load {outcome['load']:5.2f}  "
                f"slowest {outcome['slowest']:6.1%}  mean {outcome['mean']:6.1%}  by turns {outcome['by_turns']:6.1%}"
            )
