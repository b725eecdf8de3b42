"""What a pass over a job costs, by the real operator without a cluster: of one large job, and of one among many.

Seconds are of the processor; what lies behind the API server and the sidecars is not there (`bare`).
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import median

from pacekeeper_analysis.protocol.plan import Plan
from pacekeeper_operator.api.training_job import JobPhase
from pacekeeper_operator.async_runtime import reduce_gc_frequency
from pacekeeper_operator.runtime import job_state
from pacekeeper_operator.runtime.job_context import JobContext

from .bare import Jobs
from .measurement import Measurement

WORKERS, QUICK_WORKERS = 5_000, 400
MANY_JOBS, QUICK_MANY_JOBS = 1_000, 60
"""Jobs, of WORKERS_PER_JOB workers each, which have had PAST_INCIDENTS incidents each."""
WORKERS_PER_JOB, PAST_INCIDENTS = 4, 10
TIMED_PASSES = 15
MAX_WORKER_COST_RATIO = 1.6
"""Goal for a worker's part of a pass over four times as many workers. One that visited each worker's peers would make
it four; 5,000 workers' objects do not stay in the caches in which those of a quarter do."""
MAX_MANY_JOBS_RATIO = 2.0
"""Goal for a pass among MANY_JOBS jobs over one among a tenth of them. It calls the same functions as often: what grows
is the time of each, as a thousand jobs' objects do not stay in the processor's caches from one pass to the job's next.
It would be ten if a pass visited all other jobs."""


def run_measurements(quick: bool) -> Sequence[Measurement]:
    workers, job_count = (QUICK_WORKERS, QUICK_MANY_JOBS) if quick else (WORKERS, MANY_JOBS)
    with configure_operator_gc():
        return [*asyncio.run(_measure_large_job(workers)), *asyncio.run(_measure_many_jobs(job_count))]


@contextmanager
def configure_operator_gc() -> Iterator[None]:
    """Make collections as rare as in the operator's process."""
    thresholds = gc.get_threshold()
    reduce_gc_frequency()
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


async def _measure_large_job(workers: int) -> Sequence[Measurement]:
    """One job of `workers` workers, and one of a quarter."""
    quarter_seconds = await _measure_idle_pass(workers // 4)
    jobs = Jobs()
    context = await _start_job(jobs, workers)
    full_seconds = await _time_idle_pass(jobs, context)
    plan_seconds = min([_time_plan_parts(context) for _ in range(3)])
    stalls = await _time_stalls(jobs, context)
    return [
        Measurement(
            f"idle pass of {workers} workers", full_seconds / workers * 1e6, 20.0, "µs a worker", "today's: 124"
        ),
        Measurement(
            "its time a worker over that of a quarter of them",
            full_seconds / (4 * quarter_seconds),
            MAX_WORKER_COST_RATIO,
            "×",
        ),
        Measurement(f"all parts of a version, {workers} workers, as JSON", plan_seconds, 0.2, "s", "today's: 2.3–4.7"),
        Measurement(f"{workers} stalls: the pass that deals with them", stalls[0], 1.0, "s", "today's: 2.5"),
        Measurement("stalls that are not acknowledged by then", stalls[1], 0.0, "", "today's: 4,500"),
    ]


async def _measure_idle_pass(workers: int) -> float:
    jobs = Jobs()
    return await _time_idle_pass(jobs, await _start_job(jobs, workers))


async def _start_job(jobs: Jobs, workers: int) -> JobContext:
    log_progress(f"a job of {workers} workers starts")
    context = await jobs.start("large", workers)
    await jobs.run_turn(context)
    return context


async def _time_idle_pass(jobs: Jobs, context: JobContext) -> float:
    """Seconds of a pass in which nothing has changed but the steps: of the fastest, as it is not slowed by others."""
    desired_before = context.cache.desired
    seconds = [await jobs.run_turn(context) for _ in range(TIMED_PASSES)]
    if context.cache.desired is not desired_before or context.cache.phase is not JobPhase.RUNNING:
        raise RuntimeError(f"the job is not idle: it is {context.cache.phase}")
    return min(seconds)


def _time_plan_parts(context: JobContext) -> float:
    """Seconds until all workers' plans of a new version are built."""
    assert context.cache.plan is not None
    plan = Plan.from_json(context.cache.plan.to_json())
    gc.collect()
    start = time.process_time()
    for member in plan.members:
        json.dumps(plan.build_worker_plan(member.worker).to_json())
    return time.process_time() - start


async def _time_stalls(jobs: Jobs, context: JobContext) -> tuple[float, int]:
    """(seconds of the pass, stalls that wait to be acknowledged after it)."""
    jobs.clock.passed += 2.0
    await jobs.poll(context)
    await jobs.stall(context)
    seconds = await jobs.run_pass(context)
    assert context.cache.desired is not None
    if not context.cache.desired.state.incidents.open:
        raise RuntimeError("the operator has not decided about the stalls")
    return seconds, len(context.cache.faults)


async def _measure_many_jobs(job_count: int) -> Sequence[Measurement]:
    few_passes, passes = await _time_passes(job_count // 10), await _time_passes(job_count)
    log_progress(f"a pass among {job_count} jobs takes {median(passes) * 1e3:.2f} ms at the median")
    return [
        Measurement(
            f"a pass among {job_count} jobs, P99", passes[len(passes) * 99 // 100] * 1e3, 50.0, "ms", "today's: 526"
        ),
        Measurement(
            "its median over that among a tenth of them", median(passes) / median(few_passes), MAX_MANY_JOBS_RATIO, "×"
        ),
    ]


async def _time_passes(job_count: int) -> Sequence[float]:
    """Seconds of passes over each of `job_count` jobs of one namespace, in rising order."""
    jobs = Jobs()
    log_progress(f"{job_count} jobs of {WORKERS_PER_JOB} workers start")
    contexts = [await jobs.start(f"job-{number}", WORKERS_PER_JOB) for number in range(job_count)]
    await _add_past_incidents(jobs, contexts)
    for context in contexts:
        await jobs.run_turn(context)
    return sorted([await jobs.run_turn(context) for _ in range(3) for context in contexts])


async def _add_past_incidents(jobs: Jobs, contexts: Sequence[JobContext]) -> None:
    """The first job's ranks crash; what it then remembers of that, the others remember of their own."""
    first, *others = contexts
    for _ in range(PAST_INCIDENTS):
        await jobs.crash(first)
    assert first.cache.desired is not None
    incidents = first.cache.desired.state.incidents
    for context in others:
        assert context.cache.desired is not None
        past = tuple(replace(incident, worker=f"{context.job.name}-w0-0") for incident in incidents.past)
        desired = context.cache.desired.with_incidents(past=past)
        await job_state.write_state(jobs.operator.cluster, context.job, context.cache, desired)


def log_progress(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
