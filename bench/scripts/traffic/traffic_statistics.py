"""What the runs on the real fabric come to, and which goals hold.

Where the fabric has capacity for all, a job that is planned has links of its own, and no draw of ECMP gives it more:
there no job may lose. Where it has not, a job without collisions under ECMP gives half of its link away. There all jobs
of a run together may not lose, and what they get is compared with the optimum of the simulator.

Results of the simulator are compared by their means. A job collides or it does not, so that the median is the speed of
whichever kind has one job more: it jumps between the two by a single run, and represents neither. It is reported for
comparison.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

import numpy as np

MIN_RATIO, MIN_LEAST_RATIO = 1.5, 0.97
MAX_REPLAN_SECONDS, MAX_PAUSE_SECONDS = 10.0, 5.0
MAX_SIMULATION_ERROR = 0.1
MIN_IN_FORCE_RATIO = 0.95
"""Of the flows: of as few ports as may be tried, with a chance of 2 % none fits both directions of a connection."""
MAX_LOAD = 0.8
"""Of the processors, above which they might hold up what links do not."""


@dataclass(frozen=True)
class Run:
    """Some jobs at once, for a few seconds."""

    seed: int
    planned: bool
    speeds: tuple[float, ...]  # Mbit/s, of each job
    simulated: tuple[float, ...]  # part of a link, of each job
    fullest: tuple[int, ...]  # flows on the fullest link that each job crosses
    level: int  # of the joint plan of these jobs, followed or not
    strays: int  # flows that do not go as planned
    load: float  # of the processors, 0 … 1

    @property
    def jobs(self) -> int:
        return len(self.speeds)


@dataclass(frozen=True)
class Cut:
    """What came of a link's end. Seconds."""

    recovered: float  # from the cut until all jobs were at the new best speed, and stayed there
    pause: float  # the longest between two all-reduces' ends
    moved: int  # jobs that began a round over other routes
    strays: int


def compute_statistics(
    single_speed: float, runs: Sequence[Run], crowded: Sequence[Run], cuts: Sequence[Cut]
) -> tuple[dict[str, Any], dict[str, bool]]:
    """And which goals hold. `single_speed`: Mbit/s of a job that no other job holds up. `crowded`: where there are too
    few links."""
    by_count = {count: [run for run in runs if run.jobs == count] for count in sorted({run.jobs for run in runs})}
    roomy = {count: _compute_count_statistics(count_runs, single_speed) for count, count_runs in by_count.items()}
    crowded_statistics = _compute_count_statistics(crowded, single_speed)
    flows = sum(2 * run.jobs for run in (*runs, *crowded) if run.planned)
    in_force = 1.0 - sum(run.strays for run in (*runs, *crowded)) / flows
    load = max(median(run.load for run in count_runs) for count_runs in (*by_count.values(), crowded))
    result = {
        "alone_mbits": round(single_speed, 1),
        "jobs": {str(count): count_statistics for count, count_statistics in roomy.items()},
        "crowded": crowded_statistics,
        "in_force": round(in_force, 4),
        "processors": round(load, 3),
        "cuts": [_format_cut(cut) for cut in cuts],
    }
    side_statistics = [
        count_statistics[side]
        for count_statistics in (*roomy.values(), crowded_statistics)
        for side in ("ecmp", "planned")
    ]
    holds = {
        "faster_where_jobs_collide": all(
            _reaches_goal(MIN_RATIO, count_statistics["ratio"]) for count_statistics in roomy.values()
        ),
        "no_job_slower": all(
            _reaches_goal(MIN_LEAST_RATIO, count_statistics["least_ratio_of_a_job"])
            for count_statistics in roomy.values()
        ),
        "never_slower": all(
            _reaches_goal(MIN_LEAST_RATIO, count_statistics["least_ratio"])
            for count_statistics in (*roomy.values(), crowded_statistics)
        ),
        "paths_in_force": in_force >= MIN_IN_FORCE_RATIO,
        "simulator_agrees": all(
            abs(count_statistics["mean_mbits"] / count_statistics["mean_simulated"] - 1) <= MAX_SIMULATION_ERROR
            for count_statistics in side_statistics
        ),
        "replanned_after_cut": all(cut.recovered <= MAX_REPLAN_SECONDS for cut in cuts),
        "trains_through_cut": all(cut.pause <= MAX_PAUSE_SECONDS for cut in cuts),
        "processors_are_free": load <= MAX_LOAD,
    }
    return result, holds


def _compute_count_statistics(runs: Sequence[Run], single_speed: float) -> dict[str, Any]:
    """Of runs with this number of jobs. A job *collides* if ECMP gives it a link with more flows than any of the plan.
    Ratios are planned over ECMP; the least ones of runs where all flows went as planned. None: there is no such run."""
    ecmp, planned = ([run for run in runs if run.planned is side] for side in (False, True))
    by_seed = {run.seed: run for run in planned}
    pairs = [(run, by_seed[run.seed]) for run in ecmp]
    collisions = [
        (before, after, job)
        for before, after in pairs
        for job, load in enumerate(before.fullest)
        if load > before.level
    ]
    in_force = [(before.speeds, after.speeds) for before, after in pairs if not after.strays]
    return {
        "level": planned[0].level,
        "collide": round(len(collisions) / sum(run.jobs for run in ecmp), 3),
        "ratio": _compute_ratio((before.speeds[job], after.speeds[job]) for before, after, job in collisions),
        "ratio_simulated": _compute_ratio(
            (before.simulated[job], after.simulated[job]) for before, after, job in collisions
        ),
        "least_ratio": _round_least(mean(after) / mean(before) for before, after in in_force),
        "least_ratio_of_slowest": _round_least(min(after) / min(before) for before, after in in_force),
        "least_ratio_of_a_job": _round_least(
            new_speed / old_speed
            for before, after in in_force
            for old_speed, new_speed in zip(before, after, strict=True)
        ),
        "strays": sum(run.strays for run in planned),
        "ecmp": _compare_with_simulation(ecmp, single_speed),
        "planned": _compare_with_simulation(planned, single_speed),
    }


def _compute_ratio(pairs: Iterable[tuple[float, float]]) -> float | None:
    """Of the sum of the second ones to that of the first ones."""
    first_sum, second_sum = np.array(list(pairs)).reshape(-1, 2).sum(axis=0).tolist()
    return round(second_sum / first_sum, 3) if first_sum else None


def _reaches_goal(goal: float, value: float | None) -> bool:
    return value is None or value >= goal


def _round_least(ratios: Iterable[float]) -> float | None:
    least = min(ratios, default=None)
    return None if least is None else round(least, 3)


def _compare_with_simulation(runs: Sequence[Run], single_speed: float) -> dict[str, float]:
    """Against the simulator: the median job, the slowest of each run, and how far apart they are job by job."""
    speeds = [speed for run in runs for speed in run.speeds]
    expected = [single_speed * part for run in runs for part in run.simulated]
    errors = sorted(abs(speed / expected_speed - 1) for speed, expected_speed in zip(speeds, expected, strict=True))
    return {
        "mean_mbits": round(mean(speeds), 2),
        "mean_simulated": round(mean(expected), 2),
        "median_mbits": round(median(speeds), 2),
        "median_simulated": round(median(expected), 2),
        "slowest_mbits": round(median(min(run.speeds) for run in runs), 2),
        "slowest_simulated": round(median(single_speed * min(run.simulated) for run in runs), 2),
        "median_error": round(median(errors), 3),
        "worst_error": round(errors[-1], 3),
    }


def _format_cut(cut: Cut) -> dict[str, float | None]:
    return {
        "recovered_seconds": round(cut.recovered, 1) if math.isfinite(cut.recovered) else None,
        "pause_seconds": round(cut.pause, 2),
        "moved": cut.moved,
        "strays": cut.strays,
    }
