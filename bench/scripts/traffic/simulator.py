"""The simulator's half of the bench: all planners on all fabrics and sets of jobs, beside bounds; and planning's time.

Simulated at the level of flows, links shared fairly (`pacekeeper_analysis.fabric.load`). A speed is a part of what a
job reaches where nobody holds it up: that of the `slowest` and the `mean` job where all communicate all the time, and
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

from pacekeeper_analysis.fabric.assign import compute_load_bound

from .bounds import speed_bound
from .clusters import (
    HOSTS,
    NICS,
    SimulatedFabric,
    TrafficJob,
    Traffic,
    damaged,
    eight_jobs,
    fabrics,
    hundred_jobs,
    one_large_job,
    one_uplink_dead,
    traffic_of,
)
from .planners import PLANNERS, PlannerCase
from .speeds import SLOTS, compute_concurrent_speeds, compute_turn_speeds
from .timing import Timing, timings

OF_BEST, OF_BEST_DEAD = 0.95, 0.99
DEAD = "one uplink dead"
PLAN_SECONDS, REPAIR_SECONDS, REPAIR_MOVES = 0.2, 0.005, 8


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


def simulated(seeds: int) -> tuple[dict[str, Any], dict[str, bool]]:
    """Figures, and which goals hold."""
    began = time.monotonic()
    results: dict[str, list[Result]] = {}
    timed: list[Mapping[str, Timing]] = []
    for seed in range(seeds):
        for name, case in cases(seed):
            results.setdefault(name, []).append(result(case, seed))
            print(f"seed {seed}: {name}, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        timed.append(timings(np.random.default_rng(seed)))
    scenarios = {name: _compute_statistics(of_seeds) for name, of_seeds in results.items()}
    _print_table(scenarios)
    figures = {"gpus": HOSTS * NICS, "seeds": seeds, "scenarios": scenarios, "times": _times(timed)}
    return figures, _holds(results, timed)


def cases(seed: int) -> Iterator[tuple[str, PlannerCase]]:
    for jobs_name, jobs in (
        ("one large job", one_large_job()),
        ("8 jobs", eight_jobs(np.random.default_rng(seed))),
        ("100 jobs packed", hundred_jobs(np.random.default_rng(seed), packed=True)),
        ("100 jobs spread", hundred_jobs(np.random.default_rng(seed), packed=False)),
    ):
        for name, fabric, traffic in _fabrics(jobs, seed):
            happen = np.random.default_rng(seed).integers(SLOTS, size=len(jobs))
            yield f"{jobs_name}, {name}", PlannerCase(fabric, jobs, traffic, speed_bound(fabric, traffic), happen)


def _fabrics(jobs: Sequence[TrafficJob], seed: int) -> Iterator[tuple[str, SimulatedFabric, Traffic]]:
    for name, fabric in fabrics().items():
        traffic = traffic_of(fabric, jobs).split_flows(fabric.topology.planes)
        yield name, fabric, traffic
        if name == "8 trunks":
            yield f"{name}, {DEAD}", one_uplink_dead(fabric, traffic), traffic
        if name in ("1:1", "8 trunks"):
            yield f"{name}, damaged", damaged(fabric, np.random.default_rng(seed)), traffic


def result(case: PlannerCase, seed: int) -> Result:
    outcomes = {}
    for name, planner in PLANNERS.items():
        plan = planner(case, np.random.default_rng(seed))
        used = plan.usage(case.fabric)
        speeds = compute_concurrent_speeds(used, len(case.jobs))
        turns = compute_turn_speeds(used, case.jobs, case.happen if plan.shifts is None else plan.shifts)
        level, load = plan.level(case.fabric), plan.load(case.fabric)
        outcomes[name] = Outcome(level, load, float(speeds.min()), float(speeds.mean()), float(turns.mean()))
    topology, flows = case.fabric.topology, case.traffic.flows
    return Result(topology.is_symmetric, len(flows), compute_load_bound(topology, flows), case.speed, outcomes)


def _compute_statistics(of_seeds: Sequence[Result]) -> dict[str, Any]:
    """Medians."""

    def outcome(name: str) -> dict[str, float]:
        found = [result.outcomes[name] for result in of_seeds]
        return {
            field: round(median(getattr(one, field) for one in found), 4)
            for field in ("level", "load", "slowest", "mean", "by_turns")
        }

    return {
        "flows": median(result.flows for result in of_seeds),
        "bound": median(result.bound for result in of_seeds),
        "best_speed": round(median(result.speed for result in of_seeds), 4),
        "planners": {name: outcome(name) for name in PLANNERS},
    }


def _times(timed: Sequence[Mapping[str, Timing]]) -> dict[str, dict[str, float]]:
    return {
        name: {
            "plan_seconds": round(median(of[name].plan for of in timed), 4),
            "repair_seconds": round(median(seconds for of in timed for seconds in of[name].repairs), 5),
            "repair_moves": max(moved for of in timed for moved in of[name].moved),
        }
        for name in timed[0]
    }


def _holds(results: Mapping[str, Sequence[Result]], timed: Sequence[Mapping[str, Timing]]) -> dict[str, bool]:
    """All seeds count; of times the medians."""
    every = [result for of_seeds in results.values() for result in of_seeds]
    times = _times(timed).values()
    return {
        "optimal_where_symmetric": all(_level(result) == result.bound for result in every if result.symmetric),
        "one_above_elsewhere": all(_level(result) <= result.bound + 1 for result in every),
        "near_the_best_in_parts": all(_compute_share_of_best(result) >= OF_BEST for result in every),
        "dead_uplink": all(
            _compute_share_of_best(result) >= OF_BEST_DEAD
            for name, of_seeds in results.items()
            for result in of_seeds
            if name.endswith(DEAD)
        ),
        "plan_seconds": max(of["plan_seconds"] for of in times) <= PLAN_SECONDS,
        "repair_seconds": max(of["repair_seconds"] for of in times) <= REPAIR_SECONDS,
        "repair_moves": max(of["repair_moves"] for of in times) <= REPAIR_MOVES,
    }


def _level(result: Result) -> int:
    return result.outcomes["ours"].level


def _compute_share_of_best(result: Result) -> float:
    return result.outcomes["ours in parts"].slowest / result.speed


def _print_table(figures: Mapping[str, Mapping[str, Any]]) -> None:
    for name, of in figures.items():
        print(f"{name}: {of['flows']} flows, bound {of['bound']}, best speed {of['best_speed']}")
        for planner, outcome in of["planners"].items():
            print(
                f"  {planner:14} level {outcome['level']:3}  load {outcome['load']:5.2f}  "
                f"slowest {outcome['slowest']:6.1%}  mean {outcome['mean']:6.1%}  by turns {outcome['by_turns']:6.1%}"
            )
