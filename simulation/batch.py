"""Many runs in several processes. A tenth of them run twice, in processes whose hashes differ: a run is a function of
its schedule, and where it is not, that is a violation of its own."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, replace

from .run import Outcome, Violation, run
from .schedule import Schedule

TWICE_EVERY = 10


def run_all(schedules: Iterable[Schedule], jobs: int, *, in_order: bool = False) -> Iterator[Outcome]:
    """`jobs`: processes that work at the same time. As they come, or in the order of the schedules."""
    with ExitStack() as stack:
        hands = [stack.enter_context(_hand(number)) for number in range(max(2, jobs))]
        outcomes = _work(hands, jobs, list(schedules))
        if not in_order:
            for _, outcome in outcomes:
                yield outcome
            return
        done: dict[int, Outcome] = {}
        for place, outcome in outcomes:
            done[place] = outcome
        for place in sorted(done):
            yield done[place]


def _hand(number: int) -> ProcessPoolExecutor:
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
class _Work:
    """A run that is under way."""

    place: int
    hand: int
    first: Outcome | None = None  # the same run's, by another hand


def _work(hands: list[ProcessPoolExecutor], jobs: int, schedules: list[Schedule]) -> Iterator[tuple[int, Outcome]]:
    """(place of the schedule, its outcome)."""
    under_way: dict[Future[Outcome], _Work] = {}
    again: list[tuple[int, Outcome]] = []  # to be run a second time
    idle, next_place = list(range(len(hands))), 0
    while True:
        while idle and len(under_way) < jobs and (again or next_place < len(schedules)):
            hand = idle.pop(0)
            fitting = next((item for item in again if _first_hand[item[0]] != hand), None)
            if fitting is not None:
                again.remove(fitting)
                work = _Work(fitting[0], hand, fitting[1])
            elif next_place < len(schedules):
                work = _Work(next_place, hand)
                next_place += 1
            else:
                idle.append(hand)
                if len(under_way) or len(idle) == 1:
                    break
                continue
            under_way[hands[hand].submit(run, schedules[work.place])] = work
        if not under_way:
            return
        for future in wait(under_way, return_when=FIRST_COMPLETED).done:
            work, outcome = under_way.pop(future), future.result()
            idle.append(work.hand)
            if work.first is None and work.place % TWICE_EVERY == 0:
                again.append((work.place, outcome))
            else:
                yield work.place, outcome if work.first is None else compared(work.first, outcome)


def compared(one: Outcome, other: Outcome) -> Outcome:
    """The first, with a violation where the second is another one."""
    if one.digest == other.digest:
        return one
    words = f"two runs differ: {one.digest} and {other.digest}"
    violation = Violation(one.virtual_seconds, "a run is a function of its seed", words)
    return replace(one, violations=(*one.violations, violation))
