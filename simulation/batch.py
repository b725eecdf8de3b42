"""Many runs in several processes. A tenth of them run twice, in processes whose hashes differ: a run is a function of
its schedule, and where it is not, that is a violation of its own."""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, replace

from .judges import Violation
from .run import RunOutcome, run_schedule
from .schedule import Schedule

REPEATED_RUN_INTERVAL = 10


def run_schedules(schedules: Iterable[Schedule], jobs: int, *, in_order: bool = False) -> Iterator[RunOutcome]:
    """`jobs`: processes that work at the same time. As they come, or in the order of the schedules."""
    with ExitStack() as stack:
        hands = [stack.enter_context(_start_executor(number)) for number in range(max(2, jobs))]
        outcomes = _iterate_outcomes(hands, jobs, list(schedules))
        if in_order:
            outcomes = iter(sorted(outcomes, key=lambda found: found[0]))
        for _, outcome in outcomes:
            yield outcome


def _start_executor(number: int) -> ProcessPoolExecutor:
    """One process, with hashes of its own."""
    before = os.environ.get("PYTHONHASHSEED")
    os.environ["PYTHONHASHSEED"] = str(number + 1)
    try:
        executor = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
        executor.submit(os.getpid)  # it starts now
    finally:
        if before is None:
            del os.environ["PYTHONHASHSEED"]
        else:
            os.environ["PYTHONHASHSEED"] = before
    return executor


@dataclass(frozen=True)
class _BatchRun:
    """A run that is under way, or done."""

    index: int  # of the schedule
    executor: int
    first_outcome: RunOutcome | None = None  # the same run's, by another hand


def _iterate_outcomes(hands: list[ProcessPoolExecutor], jobs: int, schedules: list[Schedule]) -> Iterator[tuple[int, RunOutcome]]:
    """(place of the schedule, its outcome)."""
    under_way: dict[Future[RunOutcome], _BatchRun] = {}
    idle, fresh = list(range(len(hands))), deque(range(len(schedules)))
    again: list[_BatchRun] = []  # to be run a second time, by another hand
    while True:
        for hand in list(idle):
            work = _choose_next_run(hand, fresh, again) if len(under_way) < jobs else None
            if work is not None:
                idle.remove(hand)
                under_way[hands[hand].submit(run_schedule, schedules[work.index])] = work
        if not under_way:
            return
        for future in wait(under_way, return_when=FIRST_COMPLETED).done:
            work, outcome = under_way.pop(future), future.result()
            idle.append(work.executor)
            if work.first_outcome is not None:
                yield work.index, compare_outcomes(work.first_outcome, outcome)
            elif work.index % REPEATED_RUN_INTERVAL == 0:
                again.append(replace(work, first=outcome))
            else:
                yield work.index, outcome


def _choose_next_run(hand: int, fresh: deque[int], again: list[_BatchRun]) -> _BatchRun | None:
    for done in again:
        if done.executor != hand:
            again.remove(done)
            return replace(done, hand=hand)
    return _BatchRun(fresh.popleft(), hand) if fresh else None


def compare_outcomes(one: RunOutcome, other: RunOutcome) -> RunOutcome:
    """The first, with a violation where the second is another one."""
    if one.digest == other.digest:
        return one
    words = f"two runs differ: {one.digest} and {other.digest}"
    violation = Violation(one.virtual_seconds, "a run is a function of its seed", words)
    return replace(one, violations=(*one.violations, violation))
