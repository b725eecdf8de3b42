"""What the runs on the real fabric come to, and which goals hold.

Where the fabric has room for all, a job that is planned has links of its own, and no luck of ECMP's gives it more:
there no job may lose. Where it has not, a job that ECMP has left alone gives half of its link away: there it is all
jobs of a run together that may not lose, and what they get is held to what the simulator says that there is to get.

The simulator is judged by means. A job collides or it does not, so that the median is the speed of whichever kind has
one job more: it jumps between the two by a single run, and says nothing of either. It is told beside.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

import numpy as np

RATIO, NEVER_BELOW = 1.5, 0.97
REPLANNED_SECONDS, PAUSE_SECONDS = 10.0, 5.0
AGREEMENT = 0.1
IN_FORCE_RATIO = 0.95
"""Of the flows: of as few ports as may be tried, with a chance of 2 % none fits both directions of a connection."""
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


def compute_statistics(
    alone: float, runs: Sequence[Run], crowded: Sequence[Run], cuts: Sequence[Cut]
) -> tuple[dict[str, Any], dict[str, bool]]:
    """And which goals hold. `alone`: Mbit/s of a job that nobody holds up. crowded: where there are too few links."""
    by_count = {count: [run for run in runs if run.jobs == count] for count in sorted({run.jobs for run in runs})}
    roomy = {count: _compute_count_statistics(those, alone) for count, those in by_count.items()}
    tight = _compute_count_statistics(crowded, alone)
    flows = sum(2 * run.jobs for run in (*runs, *crowded) if run.planned)
    in_force = 1.0 - sum(run.strays for run in (*runs, *crowded)) / flows
    load = max(median(run.load for run in those) for those in (*by_count.values(), crowded))
    found = {
        "alone_mbits": round(alone, 1),
        "jobs": {str(count): of for count, of in roomy.items()},
        "crowded": tight,
        "in_force": round(in_force, 4),
        "processors": round(load, 3),
        "cuts": [_cut(cut) for cut in cuts],
    }
    compared = [of[side] for of in (*roomy.values(), tight) for side in ("ecmp", "planned")]
    holds = {
        "faster_where_jobs_collide": all(_reaches_goal(RATIO, of["ratio"]) for of in roomy.values()),
        "no_job_slower": all(_reaches_goal(NEVER_BELOW, of["least_ratio_of_a_job"]) for of in roomy.values()),
        "never_slower": all(_reaches_goal(NEVER_BELOW, of["min_ratio"]) for of in (*roomy.values(), tight)),
        "paths_in_force": in_force >= IN_FORCE_RATIO,
        "simulator_agrees": all(abs(of["mean_mbits"] / of["mean_simulated"] - 1) <= AGREEMENT for of in compared),
        "replanned_after_cut": all(cut.recovered <= REPLANNED_SECONDS for cut in cuts),
        "trains_through_cut": all(cut.pause <= PAUSE_SECONDS for cut in cuts),
        "processors_are_free": load <= LOAD,
    }
    return found, holds


def _compute_count_statistics(runs: Sequence[Run], alone: float) -> dict[str, Any]:
    """Of runs of so many jobs. A job *collides* where ECMP gives it a link with more flows than the plan has on any.
    Ratios are planned over ECMP; the least ones of runs where all flows went as planned. None: there is no such run."""
    ecmp, planned = ([run for run in runs if run.planned is side] for side in (False, True))
    by_seed = {run.seed: run for run in planned}
    pairs = [(run, by_seed[run.seed]) for run in ecmp]
    collide = [
        (before, after, job)
        for before, after in pairs
        for job, load in enumerate(before.fullest)
        if load > before.level
    ]
    in_force = [(before.speeds, after.speeds) for before, after in pairs if not after.strays]
    return {
        "level": planned[0].level,
        "collide": round(len(collide) / sum(run.jobs for run in ecmp), 3),
        "ratio": _ratio((before.speeds[job], after.speeds[job]) for before, after, job in collide),
        "ratio_simulated": _ratio((before.simulated[job], after.simulated[job]) for before, after, job in collide),
        "min_ratio": _least(mean(after) / mean(before) for before, after in in_force),
        "least_ratio_of_slowest": _least(min(after) / min(before) for before, after in in_force),
        "least_ratio_of_a_job": _least(
            will / was for before, after in in_force for was, will in zip(before, after, strict=True)
        ),
        "strays": sum(run.strays for run in planned),
        "ecmp": _compared(ecmp, alone),
        "planned": _compared(planned, alone),
    }


def _ratio(pairs: Iterable[tuple[float, float]]) -> float | None:
    """Of the sum of the second ones to that of the first ones."""
    was, will = np.array(list(pairs)).reshape(-1, 2).sum(axis=0).tolist()
    return round(will / was, 3) if was else None


def _reaches_goal(goal: float, found: float | None) -> bool:
    return found is None or found >= goal


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
