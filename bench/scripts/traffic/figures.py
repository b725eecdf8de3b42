"""What the runs on the real fabric come to, and which goals hold."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

RATIO, NEVER_BELOW = 1.5, 0.97
REPLANNED_SECONDS, PAUSE_SECONDS = 10.0, 5.0
AGREEMENT = 0.1
IN_FORCE = 0.95
"""Of the flows: of as few ports as may be tried, with a chance of 1.5 % none fits both directions of a connection."""
LOAD = 0.8
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
    moved: int  # jobs that began a round over other ways
    strays: int


def figures(alone: float, runs: Sequence[Run], cuts: Sequence[Cut]) -> tuple[dict[str, Any], dict[str, bool]]:
    """And which goals hold. `alone`: Mbit/s of a job that nobody holds up."""
    of_counts = {
        count: _of_count([run for run in runs if run.jobs == count], alone)
        for count in sorted({run.jobs for run in runs})
    }
    flows = sum(2 * run.jobs for run in runs if run.planned)
    in_force = 1.0 - sum(run.strays for run in runs) / flows
    load = max(median(run.load for run in runs if run.jobs == count) for count in of_counts)
    found = {
        "alone_mbits": round(alone, 1),
        "jobs": {str(count): of for count, of in of_counts.items()},
        "in_force": round(in_force, 4),
        "processors": round(load, 3),
        "cuts": [_cut(cut) for cut in cuts],
    }
    compared = [of[side] for of in of_counts.values() for side in ("ecmp", "planned")]
    holds = {
        "faster_where_jobs_collide": all(of["ratio"] is None or of["ratio"] >= RATIO for of in of_counts.values()),
        "never_slower": all(of["least_ratio"] is None or of["least_ratio"] >= NEVER_BELOW for of in of_counts.values()),
        "paths_in_force": in_force >= IN_FORCE,
        "simulator_agrees": all(
            abs(of[f"{which}_mbits"] / of[f"{which}_simulated"] - 1) <= AGREEMENT
            for of in compared
            for which in ("mean", "median")
        ),
        "replanned_after_cut": all(cut.recovered <= REPLANNED_SECONDS for cut in cuts),
        "trains_through_cut": all(cut.pause <= PAUSE_SECONDS for cut in cuts),
        "processors_are_free": load <= LOAD,
    }
    return found, holds


def _of_count(runs: Sequence[Run], alone: float) -> dict[str, Any]:
    """Of runs of so many jobs. A job *collides* where ECMP gives it a link with more flows than the plan has on any.
    Ratios are planned over ECMP; of runs as a whole where all flows went as planned. None: there is no such run."""
    ecmp, planned = ([run for run in runs if run.planned is side] for side in (False, True))
    by_seed = {run.seed: run for run in planned}
    pairs = [(run, by_seed[run.seed]) for run in ecmp]
    collide = [
        (was, will)
        for before, after in pairs
        for was, will, load in zip(before.speeds, after.speeds, before.fullest, strict=True)
        if load > before.level
    ]
    in_force = [(before.speeds, after.speeds) for before, after in pairs if not after.strays]
    return {
        "level": planned[0].level,
        "collide": round(len(collide) / sum(run.jobs for run in ecmp), 3),
        "ratio": round(sum(will for _, will in collide) / sum(was for was, _ in collide), 3) if collide else None,
        "least_ratio": _least(mean(after) / mean(before) for before, after in in_force),
        "least_ratio_of_slowest": _least(min(after) / min(before) for before, after in in_force),
        "strays": sum(run.strays for run in planned),
        "ecmp": _compared(ecmp, alone),
        "planned": _compared(planned, alone),
    }


def _least(ratios: Iterable[float]) -> float | None:
    least = min(ratios, default=None)
    return None if least is None else round(least, 3)


def _compared(runs: Sequence[Run], alone: float) -> dict[str, float]:
    """Beside the simulator: the median job, the slowest of each run, and how far apart they are job by job."""
    speeds = [speed for run in runs for speed in run.speeds]
    expected = [alone * part for run in runs for part in run.simulated]
    errors = sorted(abs(speed / its - 1) for speed, its in zip(speeds, expected, strict=True))
    return {
        "mean_mbits": round(mean(speeds), 2),
        "mean_simulated": round(mean(expected), 2),
        "median_mbits": round(median(speeds), 2),
        "median_simulated": round(median(expected), 2),
        "slowest_mbits": round(median(min(run.speeds) for run in runs), 2),
        "slowest_simulated": round(median(alone * min(run.simulated) for run in runs), 2),
        "median_error": round(median(errors), 3),
        "worst_error": round(errors[-1], 3),
    }


def _cut(cut: Cut) -> dict[str, float | None]:
    return {
        "recovered_seconds": round(cut.recovered, 1) if math.isfinite(cut.recovered) else None,
        "pause_seconds": round(cut.pause, 2),
        "moved": cut.moved,
        "strays": cut.strays,
    }
