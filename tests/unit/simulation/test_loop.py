"""Virtual time, and processes that are killed and paused within it."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from simulation.loop import LoopStuck, Process, VirtualLoop, get_current_process


@pytest.fixture
def loop() -> VirtualLoop:
    return VirtualLoop()  # type: ignore[abstract]  # asyncio itself needs no more of a loop


def test_time_jumps_to_what_comes_next(loop: VirtualLoop) -> None:
    async def main() -> float:
        await asyncio.sleep(3600)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(10):
                await asyncio.sleep(60)
        return loop.time()

    assert loop.run(main()) == 3610


def test_callbacks_of_one_moment_run_in_the_order_of_their_requests(loop: VirtualLoop) -> None:
    seen: list[int] = []

    async def main() -> None:
        for n in range(20):
            loop.call_later(1.0, seen.append, n)
        await asyncio.sleep(2)

    loop.run(main())
    assert seen == list(range(20))


def test_waiting_for_an_event_that_never_comes_is_an_error(loop: VirtualLoop) -> None:
    async def main() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(LoopStuck):
        loop.run(main())


def test_a_moment_that_never_ends_is_an_error(loop: VirtualLoop) -> None:
    async def main() -> None:
        while True:
            await asyncio.wait([asyncio.create_task(asyncio.sleep(0))])

    with pytest.raises(LoopStuck, match="endlessly"):
        loop.run(main())


def test_a_killed_process_runs_no_more_code_not_even_cleanup(loop: VirtualLoop) -> None:
    events: list[str] = []
    process = Process(loop, "p")

    async def child() -> None:
        try:
            await asyncio.sleep(1)
            events.append("child")
        finally:
            events.append("last words")

    async def parent() -> None:
        asyncio.create_task(child())  # noqa: RUF006 # the loop holds it while it runs
        loop.call_later(1, events.append, "timer")
        await asyncio.sleep(5)

    async def main() -> None:
        process.spawn(parent(), "parent")
        await asyncio.sleep(0.5)
        process.add_death_callback(lambda: events.append("mourned"))
        process.kill()
        await asyncio.sleep(10)

    loop.run(main())
    assert events == ["mourned"]


def test_a_paused_process_continues_later(loop: VirtualLoop) -> None:
    ticks: list[float] = []
    process = Process(loop, "p")

    async def tick() -> None:
        while True:
            await asyncio.sleep(1)
            ticks.append(loop.time())

    async def main() -> None:
        process.spawn(tick(), "tick")
        await asyncio.sleep(2.5)
        process.pause()
        await asyncio.sleep(10)
        process.resume()
        await asyncio.sleep(1.5)

    loop.run(main())
    assert ticks == [1, 2, 12.5, 13.5]


def test_a_paused_process_can_be_killed(loop: VirtualLoop) -> None:
    events: list[str] = []
    process = Process(loop, "p")

    async def work() -> None:
        events.append("work")

    async def main() -> None:
        process.pause()
        process.spawn(work(), "begun while it stands still")
        await asyncio.sleep(1)
        process.kill()
        gc.collect()
        process.resume()
        await asyncio.sleep(1)

    loop.run(main())
    loop.close()
    assert (events, loop.errors) == ([], [])


def test_all_tasks_of_a_process_belong_to_it(loop: VirtualLoop) -> None:
    owners: list[Process | None] = []
    process = Process(loop, "p")

    async def inner() -> None:
        owners.append(get_current_process())

    async def outer() -> None:
        await asyncio.gather(inner(), asyncio.create_task(inner()))

    async def main() -> None:
        owners.append(get_current_process())
        await process.spawn(outer(), "outer")

    loop.run(main())
    assert owners == [None, process, process]


def test_a_connection_goes_where_the_hook_decides(loop: VirtualLoop) -> None:
    async def connect(host: str, port: int) -> None:
        if port != 10250:
            raise ConnectionRefusedError(host)

    async def main() -> None:
        loop.connect = connect
        _, writer = await asyncio.open_connection("192.0.2.1", 10250)
        writer.close()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("192.0.2.1", 1)

    loop.run(main())


def test_tasks_left_at_the_end_are_cancelled_without_errors_or_warnings(
    loop: VirtualLoop, recwarn: pytest.WarningsRecorder
) -> None:
    ends: list[str] = []
    unraisable: list[object] = []

    async def numbers() -> AsyncGenerator[int]:
        try:
            while True:
                yield 1
                await asyncio.sleep(60)
        finally:
            ends.append("generator")

    async def follow() -> None:
        while True:
            try:
                async with aclosing(numbers()) as found:
                    async for _ in found:
                        pass
            except Exception as error:
                ends.append(repr(error))

    async def last_words() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            async with asyncio.timeout(1):
                await asyncio.create_task(asyncio.sleep(5))

    async def main() -> None:
        dead = Process(loop, "p")
        dead.spawn(follow(), "killed")
        loop.create_task(follow())
        loop.create_task(last_words())
        await asyncio.sleep(1)
        dead.kill()
        dead.spawn(follow(), "too late")
        loop.create_task(follow())

    loop.run(main())
    hook, sys.unraisablehook = sys.unraisablehook, unraisable.append
    try:
        loop.close()
        gc.collect()
    finally:
        sys.unraisablehook = hook
    assert ends == 3 * ["generator"], "of all tasks except the one that never begins"
    assert ([str(warning.message) for warning in recwarn], unraisable, loop.errors) == ([], [], [])
