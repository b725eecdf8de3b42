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

from pacekeeper_analysis.plan import Plan
from pacekeeper_operator.api import JobPhase
from pacekeeper_operator.runtime import reduce_gc_frequency
from pacekeeper_operator.services import bookkeeping
from pacekeeper_operator.services.desk import JobContext

from .bare import Jobs
from .figure import Measurement

WORKERS, QUICK_WORKERS = 5_000, 400
MANY, QUICK_MANY = 1_000, 60
"""Jobs, of MEMBERS workers each, which have had PAST incidents each."""
MEMBERS, PAST = 4, 10
TIMED_PASSES = 15
LINEAR = 1.6
"""Goal for a worker's part of a pass over four times as many workers. One that looked at each worker's peers would make
it four; 5,000 workers' objects do not stay in the caches in which those of a quarter do."""
GROWTH = 2.0
"""Goal for a pass among MANY jobs over one among a tenth of them. It calls the same functions as often: what grows is
the time of each, as a thousand jobs' objects do not stay in the processor's caches from one pass to the job's next. It
would be ten if a pass looked at all other jobs."""


def measured(quick: bool) -> Sequence[Measurement]:
    workers, many = (QUICK_WORKERS, QUICK_MANY) if quick else (WORKERS, MANY)
    with _configure_operator_gc():
        return [*asyncio.run(_large(workers)), *asyncio.run(_many(many))]


@contextmanager
def _configure_operator_gc() -> Iterator[None]:
    """Which its process looks for seldom."""
    usual = gc.get_threshold()
    reduce_gc_frequency()
    try:
        yield
    finally:
        gc.set_threshold(*usual)
        gc.unfreeze()


async def _large(workers: int) -> Sequence[Measurement]:
    """One job of so many workers, and one of a quarter."""
    quarter = await _idle(workers // 4)
    jobs = Jobs()
    desk = await _started(jobs, workers)
    whole = await _idle_of(jobs, desk)
    parts = min([_parts(desk) for _ in range(3)])
    stalls = await _stalls(jobs, desk)
    return [
        Measurement(f"idle pass of {workers} workers", whole / workers * 1e6, 20.0, "µs a worker", "today's: 124"),
        Measurement("its time a worker over that of a quarter of them", whole / (4 * quarter), LINEAR, "×"),
        Measurement(f"all parts of a version, {workers} workers, as JSON", parts, 0.2, "s", "today's: 2.3–4.7"),
        Measurement(f"{workers} stalls: the pass that deals with them", stalls[0], 1.0, "s", "today's: 2.5"),
        Measurement("stalls that are not acknowledged by then", stalls[1], 0.0, "", "today's: 4,500"),
    ]


async def _idle(workers: int) -> float:
    jobs = Jobs()
    return await _idle_of(jobs, await _started(jobs, workers))


async def _started(jobs: Jobs, workers: int) -> JobContext:
    log_progress(f"a job of {workers} workers starts")
    desk = await jobs.start("large", workers)
    await jobs.turn(desk)
    return desk


async def _idle_of(jobs: Jobs, desk: JobContext) -> float:
    """Seconds of a pass in which nothing has changed but the steps: of the fastest, as it is not slowed by others."""
    before = desk.cache.desired
    took = [await jobs.turn(desk) for _ in range(TIMED_PASSES)]
    if desk.cache.desired is not before or desk.cache.phase is not JobPhase.RUNNING:
        raise RuntimeError(f"the job is not idle: it is {desk.cache.phase}")
    return min(took)


def _parts(desk: JobContext) -> float:
    """Seconds for what all workers are told of a new version."""
    assert desk.cache.plan is not None
    plan = Plan.from_json(desk.cache.plan.to_json())
    gc.collect()
    began = time.process_time()
    for member in plan.members:
        json.dumps(plan.build_worker_plan(member.worker).to_json())
    return time.process_time() - began


async def _stalls(jobs: Jobs, desk: JobContext) -> tuple[float, int]:
    """(seconds of the pass, stalls that wait to be acknowledged after it)."""
    jobs.clock.passed += 2.0
    await jobs.poll(desk)
    await jobs.stall(desk)
    took = await jobs.run_pass(desk)
    assert desk.cache.desired is not None
    if not desk.cache.desired.state.incidents.open:
        raise RuntimeError("nobody has decided about the stalls")
    return took, len(desk.cache.faults)


async def _many(many: int) -> Sequence[Measurement]:
    few, passes = await _time_passes(many // 10), await _time_passes(many)
    log_progress(f"a pass among {many} jobs takes {median(passes) * 1e3:.2f} ms at the median")
    return [
        Measurement(f"a pass among {many} jobs, P99", passes[len(passes) * 99 // 100] * 1e3, 50.0, "ms", "today's: 526"),
        Measurement("its median over that among a tenth of them", median(passes) / median(few), GROWTH, "×"),
    ]


async def _time_passes(many: int) -> Sequence[float]:
    """Seconds of passes over each of so many jobs of one namespace, in rising order."""
    jobs = Jobs()
    log_progress(f"{many} jobs of {MEMBERS} workers start")
    desks = [await jobs.start(f"job-{number}", MEMBERS) for number in range(many)]
    await _live_through(jobs, desks)
    for desk in desks:
        await jobs.turn(desk)
    return sorted([await jobs.turn(desk) for _ in range(3) for desk in desks])


async def _live_through(jobs: Jobs, desks: Sequence[JobContext]) -> None:
    """The first job's ranks crash; what it then remembers of that, the others remember of their own."""
    first, *others = desks
    for _ in range(PAST):
        await jobs.crash(first)
    assert first.cache.desired is not None
    lived = first.cache.desired.state.incidents
    for desk in others:
        assert desk.cache.desired is not None
        past = tuple(replace(each, worker=f"{desk.job.name}-w0-0") for each in lived.past)
        remembers = desk.cache.desired.with_incidents(past=past)
        await bookkeeping.write_state(jobs.operator.cluster, desk.job, desk.cache, remembers)


def log_progress(words: str) -> None:
    print(words, file=sys.stderr, flush=True)
