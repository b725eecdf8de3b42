"""Many runs in several processes.

A tenth of the schedules run twice, in processes with different hash seeds. A run must be a function of its schedule: a
difference is a violation.
"""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, replace

from .checkers import Violation
from .run import RunOutcome, run_schedule
from .schedule import Schedule

REPEATED_RUN_INTERVAL = 10


def run_schedules(schedules: Iterable[Schedule], jobs: int, *, in_order: bool = False) -> Iterator[RunOutcome]:
    """Run schedules in `jobs` processes. Yield outcomes as they arrive, or in the order of the schedules."""
    with ExitStack() as stack:
        executors = [stack.enter_context(_start_executor(number)) for number in range(max(2, jobs))]
        outcomes = _iterate_outcomes(executors, jobs, list(schedules))
        if in_order:
            outcomes = iter(sorted(outcomes, key=lambda item: item[0]))
        for _, outcome in outcomes:
            yield outcome


def _start_executor(number: int) -> ProcessPoolExecutor:
    """Start one process with its own hash seed."""
    old_seed = os.environ.get("PYTHONHASHSEED")
    os.environ["PYTHONHASHSEED"] = str(number + 1)
    try:
        executor = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
        executor.submit(os.getpid)  # starts the process now
    finally:
        if old_seed is None:
            del os.environ["PYTHONHASHSEED"]
        else:
            os.environ["PYTHONHASHSEED"] = old_seed
    return executor


@dataclass(frozen=True)
class _BatchRun:
    """A run in progress, or finished."""

    index: int  # of the schedule
    executor: int
    first_outcome: RunOutcome | None = None  # of the same schedule in another process


def _iterate_outcomes(
    executors: list[ProcessPoolExecutor], jobs: int, schedules: list[Schedule]
) -> Iterator[tuple[int, RunOutcome]]:
    """Yield (index of the schedule, its outcome)."""
    running: dict[Future[RunOutcome], _BatchRun] = {}
    idle, pending = list(range(len(executors))), deque(range(len(schedules)))
    reruns: list[_BatchRun] = []  # to run a second time in another process
    while True:
        for index in list(idle):
            batch_run = _choose_next_run(index, pending, reruns) if len(running) < jobs else None
            if batch_run is not None:
                idle.remove(index)
                running[executors[index].submit(run_schedule, schedules[batch_run.index])] = batch_run
        if not running:
            return
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            batch_run, outcome = running.pop(future), future.result()
            idle.append(batch_run.executor)
            if batch_run.first_outcome is not None:
                yield batch_run.index, compare_outcomes(batch_run.first_outcome, outcome)
            elif batch_run.index % REPEATED_RUN_INTERVAL == 0:
                reruns.append(replace(batch_run, first_outcome=outcome))
            else:
                yield batch_run.index, outcome


def _choose_next_run(executor: int, pending: deque[int], reruns: list[_BatchRun]) -> _BatchRun | None:
    for batch_run in reruns:
        if batch_run.executor != executor:
            reruns.remove(batch_run)
            return replace(batch_run, executor=executor)
    return _BatchRun(pending.popleft(), executor) if pending else None


def compare_outcomes(first: RunOutcome, second: RunOutcome) -> RunOutcome:
    """Return the first outcome, with a violation if the second has another digest."""
    if first.digest == second.digest:
        return first
    message = f"two runs differ: {first.digest} and {second.digest}"
    violation = Violation(first.virtual_seconds, "a run is a function of its seed", message)
    return replace(first, violations=(*first.violations, violation))
