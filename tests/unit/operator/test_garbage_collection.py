"""The operator returns unused memory, even when it is idle."""

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


class EnoughPolls(Exception):
    """The runtime has polled often enough."""


class CountingRuntime(OperatorRuntime):
    """A runtime whose full collections take `seconds` each."""

    def __init__(self, seconds: float, max_polls: int) -> None:
        super().__init__()
        self.seconds, self.max_polls = seconds, max_polls
        self.now_at = 0.0
        self.slept = list[float]()

    def monotonic(self) -> float:
        self.now_at += self.seconds
        return self.now_at

    async def sleep(self, seconds: float) -> None:
        if len(self.slept) == self.max_polls:
            raise EnoughPolls
        self.slept.append(seconds)


class ReferenceCycle:
    """One object that refers to itself."""

    def __init__(self) -> None:
        self.itself = self


async def test_an_unused_reference_cycle_is_freed_at_the_next_collection() -> None:
    circle = ReferenceCycle()
    gc.collect(1)  # it is among the older ones, of which the thresholds leave most for hours
    there = weakref.ref(circle)
    del circle
    gc.disable()
    try:
        with pytest.raises(EnoughPolls):
            await async_runtime.collect_garbage_periodically(CountingRuntime(0.02, max_polls=1))
    finally:
        gc.enable()
    assert there() is None


@GLIBC
async def test_free_memory_returns_to_the_kernel() -> None:
    pages = [bytes(4_000) for _ in range(10_000)]
    remaining = pages[::100]  # they lie between all others
    del pages
    before = read_resident_bytes()
    with pytest.raises(EnoughPolls):
        await async_runtime.collect_garbage_periodically(CountingRuntime(0.02, max_polls=1))
    assert len(remaining) == 100
    assert before - read_resident_bytes() > 20e6


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
def test_threads_share_one_heap(one: bool) -> None:
    command = [sys.executable, "-c", IN_A_THREAD, *["one"] * one]
    environment = {name: value for name, value in os.environ.items() if name != "MALLOC_ARENA_MAX"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == str(one)


def read_resident_bytes() -> int:
    """Return the resident memory in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize(("seconds", "pause"), [(0.02, 600.0), (1.2, 1_200.0)])
async def test_collections_take_at_most_a_thousandth_of_the_time(seconds: float, pause: float) -> None:
    clock = CountingRuntime(seconds, max_polls=3)
    with pytest.raises(EnoughPolls):
        await async_runtime.collect_garbage_periodically(clock)
    assert clock.slept == pytest.approx([600.0, pause, pause])
