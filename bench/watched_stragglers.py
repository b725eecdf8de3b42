"""What the operator writes about slow ranks of a watched job: false Incidents, and how long true ones take.

Jobs of four ranks are drawn as in the decisions bench, and observed through the steps of watched jobs, under each noise
model: fault-free hours, and jobs one rank of which becomes slow. HOURS=…, JOBS=…: fault-free hours per noise model,
and slow jobs per noise model and slowdown. QUICK=1: few of each, a smoke test.

Exit status 1: a noise model has more than MAX_ALARMS_PER_HOUR Incidents in a fault-free hour, or a rank that is slow by
NAMED_SLOWDOWNS or more is not named by an Incident.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from statistics import median
from typing import Any

from bench.decisions import CALM_LOT_HOURS, FREQUENT_PASSES, MAX_ALARMS_PER_HOUR
from bench.scripts.decisions import draw
from bench.scripts.decisions.draw import Scenario
from bench.scripts.decisions.noise import NoiseModel
from bench.scripts.decisions.policy_run import run_policy
from bench.scripts.decisions.watching import Watching
from bench.scripts.decisions.world import CALM, CostModel, Segment, Spare, Strain, Timeline
from pacekeeper_operator.api.incident import IncidentCause

RANKS = 4
SLOWDOWNS = (1.1, 1.3, 2.0)
FIRST_CALM_SEED, FIRST_SLOW_SEED = 30_000, 40_000
NAMED_SLOWDOWNS = {0: 2.0, 1200: 1.3}
"""By the seconds before the rank becomes slow: the slowdown from which on it must be named.

With 0, it is slow before the estimator begins, but not in the job's first steps.
"""
SLOW_SECONDS = 1800
"""Of a slow job, since then."""


@dataclass(frozen=True)
class JobResult:
    """What was written about one job. Seconds are from the onset of the slowness."""

    noise_model: NoiseModel
    slowdown: float  # 1: fault-free
    hours: float  # fault-free
    false_incidents: tuple[str, ...]  # causes
    named_after_seconds: float | None  # None: never, or nothing was slow
    questions: int
    failures: tuple[str, ...]


def main() -> int:
    quick, start = bool(os.environ.get("QUICK")), time.perf_counter()
    hours, jobs = _read_number("HOURS", 5 if quick else 100), _read_number("JOBS", 1 if quick else 20)
    scenarios = [*draw_calm_scenarios(hours), *draw_slow_scenarios(int(jobs))]
    with ProcessPoolExecutor() as pool:
        observed = list(_report_progress(pool.map(observe_job, scenarios), len(scenarios)))
    summary, holds = summarize_jobs(observed)
    print("\n".join(format_summary(summary)))
    seconds = round(time.perf_counter() - start, 1)
    print(json.dumps({"bench": "watched_stragglers", **summary, "seconds": seconds, "holds": holds}))
    return 0 if all(holds.values()) else 1


def draw_calm_scenarios(hours: float) -> Iterator[Scenario]:
    """Yield jobs in which nothing goes wrong, of CALM_LOT_HOURS each: jobs differ in noise, and in much else."""
    for lot in range(int(-(-hours // CALM_LOT_HOURS))):
        length = min(CALM_LOT_HOURS, hours - CALM_LOT_HOURS * lot)
        for model in NoiseModel:
            yield _remove_spare(draw.draw_healthy_scenario(FIRST_CALM_SEED + lot, length, RANKS, noise_model=model))


def draw_slow_scenarios(jobs: int) -> Iterator[Scenario]:
    """Yield jobs one rank of which becomes slow."""
    for number, slowdown, healthy in product(range(jobs), SLOWDOWNS, NAMED_SLOWDOWNS):
        slow = Segment(healthy, healthy + SLOW_SECONDS, Strain(slow=((number % RANKS, slowdown),)))
        timeline = Timeline((Segment(0, healthy, CALM), slow) if healthy else (slow,))
        for model in NoiseModel:
            job = draw.draw_healthy_scenario(FIRST_SLOW_SEED + number, 1.0, RANKS, noise_model=model)
            yield replace(_remove_spare(job), depth=slowdown, timeline=timeline)


def observe_job(scenario: Scenario) -> JobResult:
    """Play the operator's passes over the job, and judge its Incidents."""
    world = CostModel(scenario.job)
    policy = Watching(scenario, world, pass_intervals=FREQUENT_PASSES)
    run_policy(scenario, world, policy)
    onset, strain = scenario.timeline.onset, scenario.timeline.segments[-1].strain
    slow_ranks = {rank for rank, _ in strain.slow}
    right = [
        second
        for second, incident in policy.incidents
        if second >= onset and incident.cause is IncidentCause.STRAGGLER and incident.rank in slow_ranks
    ]
    wrong = [
        str(incident.cause)
        for second, incident in policy.incidents
        if second < onset or incident.cause is not IncidentCause.STRAGGLER or incident.rank not in slow_ranks
    ]
    return JobResult(
        scenario.noise_model,
        scenario.depth,
        onset / 3600,
        tuple(wrong),
        min(right) - onset if right else None,
        policy.questions,
        tuple(policy.failures),
    )


def summarize_jobs(observed: Sequence[JobResult]) -> tuple[dict[str, Any], dict[str, bool]]:
    """Return the figures, and which goals hold."""
    fault_free, slow, holds = dict[str, Any](), dict[str, Any](), dict[str, bool]()
    for model in NoiseModel:
        jobs = [job for job in observed if job.noise_model is model]
        calm = [job for job in jobs if job.slowdown == 1.0]
        hours = sum(job.hours for job in calm)
        false = [cause for job in calm for cause in job.false_incidents]
        fault_free[model.value] = {
            "hours": round(hours, 1),
            "false Incidents": len(false),
            "an hour": round(len(false) / hours, 4),
            "causes": sorted(set(false)),
            "requests an hour": round(sum(job.questions for job in calm) / hours, 1),
        }
        holds[f"{model}: false Incidents"] = len(false) <= MAX_ALARMS_PER_HOUR * hours
        for slowdown, healthy in product(SLOWDOWNS, NAMED_SLOWDOWNS):
            same = [job for job in jobs if (job.slowdown, job.hours) == (slowdown, healthy / 3600)]
            kind = f"{slowdown:g} ×" if healthy else f"{slowdown:g} × from the start"
            named = sorted(job.named_after_seconds for job in same if job.named_after_seconds is not None)
            slow[f"{model.value}, {kind}"] = {
                "jobs": len(same),
                "named": len(named),
                "median seconds": median(named) if named else None,
                "longest": named[-1] if named else None,
                "wrong Incidents": sum(len(job.false_incidents) for job in same),
            }
            if slowdown >= NAMED_SLOWDOWNS[healthy]:
                holds[f"{model}: {kind} is named"] = len(named) == len(same)
    holds["no step fails"] = not any(job.failures for job in observed)
    return {"fault-free": fault_free, "slow": slow}, holds


def format_summary(summary: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Iterable[str]:
    """Yield each table of the summary in Markdown."""
    for name, rows in summary.items():
        columns = list(next(iter(rows.values())))
        yield f"| {name} | {' | '.join(columns)} |"
        yield f"|{'---|' * (1 + len(columns))}"
        for row, figures in rows.items():
            yield f"| {row} | {' | '.join(str(figures[column]) for column in columns)} |"
        yield ""


def _remove_spare(scenario: Scenario) -> Scenario:
    return replace(scenario, job=replace(scenario.job, spare=Spare.NONE))


def _report_progress(results: Iterable[JobResult], count: int) -> Iterator[JobResult]:
    start = time.perf_counter()
    for number, result in enumerate(results, start=1):
        if number % 10 == 0:
            print(f"{number} of {count} jobs, {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
        yield result


def _read_number(name: str, default: float) -> float:
    try:
        value = float(os.environ.get(name) or default)
    except ValueError:
        value = 0.0
    if not 1 <= value <= 1e5:
        sys.exit(f"{name}={os.environ[name]}: give a number from 1 to 100000")
    return value


if __name__ == "__main__":
    sys.exit(main())
