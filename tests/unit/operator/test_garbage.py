"""What the operator does not use any more is given back, however little it does."""

from __future__ import annotations

import gc
import os
import platform
import resource
import subprocess
import sys
import weakref
from pathlib import Path

import pytest

from pacekeeper_operator import async_runtime
from pacekeeper_operator.async_runtime import OperatorRuntime

GLIBC = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of the GNU C library")


class Over(Exception):
    """Enough has been seen."""


class Clock(OperatorRuntime):
    """One whose looks at all objects take `seconds` each."""

    def __init__(self, seconds: float, looks: int) -> None:
        super().__init__()
        self.seconds, self.looks = seconds, looks
        self.now_at = 0.0
        self.slept = list[float]()

    def monotonic(self) -> float:
        self.now_at += self.seconds
        return self.now_at

    async def sleep(self, seconds: float) -> None:
        if len(self.slept) == self.looks:
            raise Over
        self.slept.append(seconds)


class Circle:
    """Of one object."""

    def __init__(self) -> None:
        self.itself = self


async def test_a_circle_that_was_in_use_at_the_last_look_goes_with_the_next() -> None:
    circle = Circle()
    gc.collect(1)  # it is among the older ones, of which the thresholds leave most for hours
    there = weakref.ref(circle)
    del circle
    gc.disable()
    try:
        with pytest.raises(Over):
            await async_runtime.collect_garbage_periodically(Clock(0.02, looks=1))
    finally:
        gc.enable()
    assert there() is None


@GLIBC
async def test_what_is_free_goes_back_to_the_kernel_wherever_it_lies() -> None:
    pages = [bytes(4_000) for _ in range(10_000)]
    few = pages[::100]  # they lie between all others
    del pages
    before = resident()
    with pytest.raises(Over):
        await async_runtime.collect_garbage_periodically(Clock(0.02, looks=1))
    assert len(few) == 100
    assert before - resident() > 20e6


IN_A_THREAD = """
import threading, sys
from pathlib import Path
from pacekeeper_operator.async_runtime import limit_malloc_arenas
if sys.argv[1:]:
    limit_malloc_arenas()
kept = []
thread = threading.Thread(target=lambda: kept.append(bytes(10_000)))
thread.start()
thread.join()
heap = next(line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines() if "[heap]" in line)
print(int(heap[0], 16) <= id(kept[0]) < int(heap[1], 16))
"""


@GLIBC
@pytest.mark.parametrize("one", [False, True])
def test_threads_have_no_heaps_of_their_own(one: bool) -> None:
    command = [sys.executable, "-c", IN_A_THREAD, *["one"] * one]
    environment = {name: value for name, value in os.environ.items() if name != "MALLOC_ARENA_MAX"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == str(one)


def resident() -> int:
    """Bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize(("seconds", "pause"), [(0.02, 600.0), (1.2, 1_200.0)])
async def test_it_takes_a_thousandth_of_the_time_at_most(seconds: float, pause: float) -> None:
    clock = Clock(seconds, looks=3)
    with pytest.raises(Over):
        await async_runtime.collect_garbage_periodically(clock)
    assert clock.slept == pytest.approx([600.0, pause, pause])
