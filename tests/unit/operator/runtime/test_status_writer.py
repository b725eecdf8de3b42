"""A status is written concurrently with passes, in order, and none is lost."""

from __future__ import annotations

import asyncio

import kopf
import pytest

from pacekeeper_operator.runtime.status_writer import (
    FIRST_STATUS_BACKOFF_SECONDS,
    LONGEST_STATUS_BACKOFF_SECONDS,
    STATUS_WRITE_WAIT_SECONDS,
    StatusWriter,
)
from testing.operators.virtual_time import Timeline, VirtualRuntime


class WriterBench:
    def __init__(self) -> None:
        self.timeline = Timeline()
        self.runtime = VirtualRuntime(self.timeline)
        self.written: list[str] = []
        self.wakes = 0
        self.writer = StatusWriter(self.runtime, self._wake, "job ns/j")

    def _wake(self) -> None:
        self.wakes += 1

    async def write_status(
        self, text: str, seconds: float = 0.0, failure: Exception | None = None, *, waits: bool = True
    ) -> float:
        """Write a status in `seconds`, and return how long the caller was delayed."""

        if self.writer.defer_if_busy():
            return 0.0

        async def write() -> None:
            await self.runtime.sleep(seconds)
            if failure is not None:
                raise failure
            self.written.append(text)

        began = self.runtime.monotonic()
        if not waits:
            await self.writer.write(write, waits=False)
            return self.runtime.monotonic() - began
        writing = asyncio.create_task(self.writer.write(write))
        await self.timeline.run(STATUS_WRITE_WAIT_SECONDS)
        await writing
        return self.runtime.monotonic() - began


@pytest.fixture
def bench() -> WriterBench:
    return WriterBench()


async def test_a_fast_write_is_done_before_the_pass_continues(bench: WriterBench) -> None:
    await bench.write_status("a")
    await bench.write_status("b")
    assert (bench.written, bench.wakes) == (["a", "b"], 0)


async def test_a_slow_api_server_does_not_delay_a_pass(bench: WriterBench) -> None:
    assert await bench.write_status("a", seconds=5.0) == STATUS_WRITE_WAIT_SECONDS
    assert bench.written == []
    await bench.timeline.run(5.0)
    assert (bench.written, bench.wakes) == (["a"], 0), "the status is as its pass requested, so the loop is not woken"


async def test_an_unimportant_write_does_not_delay_a_pass_at_all(bench: WriterBench) -> None:
    assert await bench.write_status("a", seconds=0.01, waits=False) == 0.0
    await bench.timeline.run(0.01)
    assert (bench.written, bench.wakes) == (["a"], 0)


async def test_no_later_status_overtakes_an_earlier_one_and_the_last_is_requested(bench: WriterBench) -> None:
    await bench.write_status("a", seconds=5.0)
    await bench.write_status("b")
    assert bench.written == []
    await bench.timeline.run(5.0)
    assert (bench.written, bench.wakes) == (["a"], 1)
    await bench.write_status("b")
    assert bench.written == ["a", "b"]
    assert not bench.writer.has_failed


@pytest.mark.parametrize("seconds", [0.0, 5.0])
async def test_a_failing_write_is_requested_again_with_back_off(bench: WriterBench, seconds: float) -> None:
    """An API server that refuses each write must not be called without a pause."""
    for failures in range(10):
        pause = min(LONGEST_STATUS_BACKOFF_SECONDS, FIRST_STATUS_BACKOFF_SECONDS * 2.0**failures)
        await bench.write_status("a", seconds, kopf.TemporaryError("429"))
        await bench.timeline.run(seconds + pause - 3 * STATUS_WRITE_WAIT_SECONDS)
        await bench.write_status("too early")
        assert bench.wakes == failures
        await bench.timeline.run(2 * STATUS_WRITE_WAIT_SECONDS)
        assert bench.wakes == failures + 1
    await bench.write_status("a")
    await bench.write_status("b", failure=KeyError("a bug"))
    await bench.timeline.run(FIRST_STATUS_BACKOFF_SECONDS)
    assert (bench.written, bench.wakes) == (["a"], 11), "the back-off begins again after a success"
    assert not bench.runtime.failed.is_set()


async def test_a_closed_writer_writes_nothing(bench: WriterBench) -> None:
    await bench.writer.close()
    await bench.write_status("a", seconds=5.0)
    await bench.writer.close()
    await bench.timeline.run(5.0)
    assert bench.written == []
