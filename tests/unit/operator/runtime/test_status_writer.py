"""A status is written beside the passes: one word after the other, and none is lost."""

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


class Saying:
    def __init__(self) -> None:
        self.timeline = Timeline()
        self.runtime = VirtualRuntime(self.timeline)
        self.written: list[str] = []
        self.woken = 0
        self.writer = StatusWriter(self.runtime, self._wake, "job ns/j")

    def _wake(self) -> None:
        self.woken += 1

    async def say(
        self, word: str, seconds: float = 0.0, failure: Exception | None = None, *, waits: bool = True
    ) -> float:
        """How long that held up whoever said it, where writing takes so many seconds."""

        if self.writer.defer_if_busy():
            return 0.0

        async def write() -> None:
            await self.runtime.sleep(seconds)
            if failure is not None:
                raise failure
            self.written.append(word)

        began = self.runtime.monotonic()
        if not waits:
            await self.writer.write(write, waits=False)
            return self.runtime.monotonic() - began
        saying = asyncio.create_task(self.writer.write(write))
        await self.timeline.run(STATUS_WRITE_WAIT_SECONDS)
        await saying
        return self.runtime.monotonic() - began


@pytest.fixture
def saying() -> Saying:
    return Saying()


async def test_what_is_quick_is_written_when_the_pass_goes_on(saying: Saying) -> None:
    await saying.say("a")
    await saying.say("b")
    assert (saying.written, saying.woken) == (["a", "b"], 0)


async def test_a_slow_api_server_holds_up_no_pass(saying: Saying) -> None:
    assert await saying.say("a", seconds=5.0) == STATUS_WRITE_WAIT_SECONDS
    assert saying.written == []
    await saying.timeline.run(5.0)
    assert (saying.written, saying.woken) == (["a"], 0), "it is as its pass wanted it: nobody is woken"


async def test_what_is_no_news_to_anybody_holds_up_no_pass_at_all(saying: Saying) -> None:
    assert await saying.say("a", seconds=0.01, waits=False) == 0.0
    await saying.timeline.run(0.01)
    assert (saying.written, saying.woken) == (["a"], 0)


async def test_no_later_word_overtakes_an_earlier_one_and_the_last_is_asked_for(saying: Saying) -> None:
    await saying.say("a", seconds=5.0)
    await saying.say("b")
    assert saying.written == []
    await saying.timeline.run(5.0)
    assert (saying.written, saying.woken) == (["a"], 1)
    await saying.say("b")
    assert saying.written == ["a", "b"]
    assert not saying.writer.has_failed


@pytest.mark.parametrize("seconds", [0.0, 5.0])
async def test_what_fails_is_asked_for_again_ever_more_slowly_and_fails_no_pass(saying: Saying, seconds: float) -> None:
    """An API server that refuses all that there is to say must not be asked without end."""
    for failures in range(10):
        pause = min(LONGEST_STATUS_BACKOFF_SECONDS, FIRST_STATUS_BACKOFF_SECONDS * 2.0**failures)
        await saying.say("a", seconds, kopf.TemporaryError("429"))
        await saying.timeline.run(seconds + pause - 3 * STATUS_WRITE_WAIT_SECONDS)
        await saying.say("too early")
        assert saying.woken == failures
        await saying.timeline.run(2 * STATUS_WRITE_WAIT_SECONDS)
        assert saying.woken == failures + 1
    await saying.say("a")
    await saying.say("b", failure=KeyError("a bug"))
    await saying.timeline.run(FIRST_STATUS_BACKOFF_SECONDS)
    assert (saying.written, saying.woken) == (["a"], 11), "and soon again after one that was written"
    assert not saying.runtime.failed.is_set()


async def test_nothing_is_written_when_it_is_closed(saying: Saying) -> None:
    await saying.writer.close()
    await saying.say("a", seconds=5.0)
    await saying.writer.close()
    await saying.timeline.run(5.0)
    assert saying.written == []
