"""Thousands of polls are answered in an order, and never keep everything else waiting."""

from __future__ import annotations

import asyncio
from itertools import pairwise

from pacekeeper_operator.observe.waiters import MAX_NOTIFIED_PER_ITERATION, Waiters


async def _waiting(readers: Waiters, workers: list[str], told: list[str]) -> list[asyncio.Task[None]]:
    async def wait(worker: str) -> None:
        await readers.wait(worker)
        told.append(worker)

    tasks = [asyncio.create_task(wait(worker)) for worker in workers]
    await asyncio.sleep(0)
    return tasks


async def test_whoever_joins_or_leaves_is_told_first_and_the_others_as_they_came() -> None:
    readers, told = Waiters(), list[str]()
    tasks = await _waiting(readers, ["a", "b", "spare", "c"], told)
    readers.notify(first={"spare"})
    await asyncio.gather(*tasks)
    assert told == ["spare", "a", "b", "c"]


async def test_between_answers_everything_else_has_its_turn() -> None:
    readers, told, seen = Waiters(), list[str](), list[int]()
    tasks = await _waiting(readers, [f"w{n}" for n in range(10 * MAX_NOTIFIED_PER_ITERATION)], told)

    async def look() -> None:
        while len(told) < 10 * MAX_NOTIFIED_PER_ITERATION:
            seen.append(len(told))
            await asyncio.sleep(0)

    readers.notify()
    await asyncio.gather(look(), *tasks)
    steps = [after - before for before, after in pairwise(seen)]
    assert max(steps) <= 2 * MAX_NOTIFIED_PER_ITERATION
    assert len(seen) >= 5


async def test_one_that_has_left_keeps_nobody_waiting_and_news_wakes_only_those_who_wait_then() -> None:
    readers, told = Waiters(), list[str]()
    tasks = await _waiting(readers, ["a", "b", "c"], told)
    tasks[0].cancel()
    readers.notify()
    tasks[1].cancel()  # told already, or about to be
    await asyncio.gather(*tasks, return_exceptions=True)
    assert told == ["c"]
    (late,) = await _waiting(readers, ["late"], told)
    await asyncio.sleep(0)
    assert not late.done()
    readers.notify()
    await asyncio.gather(late)
    assert told == ["c", "late"]


async def test_two_pieces_of_news_at_once_leave_nobody_behind() -> None:
    readers, told = Waiters(), list[str]()
    workers = [f"w{n}" for n in range(3 * MAX_NOTIFIED_PER_ITERATION)]
    tasks = await _waiting(readers, workers, told)
    readers.notify()
    await asyncio.sleep(0)
    tasks += await _waiting(readers, ["late"], told)
    readers.notify(first={"late"})
    await asyncio.wait_for(asyncio.gather(*tasks), 60)
    assert sorted(told) == sorted([*workers, "late"])


async def test_who_joins_by_the_next_plan_does_not_wait_until_all_have_heard_of_the_one_before() -> None:
    readers, told = Waiters(), list[str]()
    tasks = await _waiting(readers, [*(f"w{n}" for n in range(10 * MAX_NOTIFIED_PER_ITERATION)), "spare"], told)
    readers.notify()
    await asyncio.sleep(0)
    readers.notify(first={"spare"})
    await asyncio.wait_for(asyncio.gather(*tasks), 60)
    assert told.index("spare") <= 2 * MAX_NOTIFIED_PER_ITERATION
    assert len(told) == len(set(told)) == 10 * MAX_NOTIFIED_PER_ITERATION + 1
