"""Thousands of polls are answered in order, and never block other tasks."""

from __future__ import annotations

import asyncio
from itertools import pairwise

from pacekeeper_operator.observe.waiters import MAX_NOTIFIED_PER_ITERATION, Waiters


async def _start_waiting(waiters: Waiters, workers: list[str], notified: list[str]) -> list[asyncio.Task[None]]:
    async def wait(worker: str) -> None:
        await waiters.wait(worker)
        notified.append(worker)

    tasks = [asyncio.create_task(wait(worker)) for worker in workers]
    await asyncio.sleep(0)
    return tasks


async def test_preferred_workers_are_notified_first_and_the_others_in_order() -> None:
    waiters, notified = Waiters(), list[str]()
    tasks = await _start_waiting(waiters, ["a", "b", "spare", "c"], notified)
    waiters.notify(first={"spare"})
    await asyncio.gather(*tasks)
    assert notified == ["spare", "a", "b", "c"]


async def test_other_tasks_run_between_notifications() -> None:
    waiters, notified, progress = Waiters(), list[str](), list[int]()
    tasks = await _start_waiting(waiters, [f"w{n}" for n in range(10 * MAX_NOTIFIED_PER_ITERATION)], notified)

    async def record_progress() -> None:
        while len(notified) < 10 * MAX_NOTIFIED_PER_ITERATION:
            progress.append(len(notified))
            await asyncio.sleep(0)

    waiters.notify()
    await asyncio.gather(record_progress(), *tasks)
    steps = [after - before for before, after in pairwise(progress)]
    assert max(steps) <= 2 * MAX_NOTIFIED_PER_ITERATION
    assert len(progress) >= 5


async def test_a_cancelled_waiter_delays_no_other_and_a_notification_reaches_only_current_waiters() -> None:
    waiters, notified = Waiters(), list[str]()
    tasks = await _start_waiting(waiters, ["a", "b", "c"], notified)
    tasks[0].cancel()
    waiters.notify()
    tasks[1].cancel()  # notified already, or about to be
    await asyncio.gather(*tasks, return_exceptions=True)
    assert notified == ["c"]
    (late,) = await _start_waiting(waiters, ["late"], notified)
    await asyncio.sleep(0)
    assert not late.done()
    waiters.notify()
    await asyncio.gather(late)
    assert notified == ["c", "late"]


async def test_two_overlapping_notifications_reach_every_waiter() -> None:
    waiters, notified = Waiters(), list[str]()
    workers = [f"w{n}" for n in range(3 * MAX_NOTIFIED_PER_ITERATION)]
    tasks = await _start_waiting(waiters, workers, notified)
    waiters.notify()
    await asyncio.sleep(0)
    tasks += await _start_waiting(waiters, ["late"], notified)
    waiters.notify(first={"late"})
    await asyncio.wait_for(asyncio.gather(*tasks), 60)
    assert sorted(notified) == sorted([*workers, "late"])


async def test_a_preferred_worker_does_not_wait_for_an_earlier_notification() -> None:
    waiters, notified = Waiters(), list[str]()
    tasks = await _start_waiting(
        waiters, [*(f"w{n}" for n in range(10 * MAX_NOTIFIED_PER_ITERATION)), "spare"], notified
    )
    waiters.notify()
    await asyncio.sleep(0)
    waiters.notify(first={"spare"})
    await asyncio.wait_for(asyncio.gather(*tasks), 60)
    assert notified.index("spare") <= 2 * MAX_NOTIFIED_PER_ITERATION
    assert len(notified) == len(set(notified)) == 10 * MAX_NOTIFIED_PER_ITERATION + 1


async def test_only_the_named_workers_are_notified() -> None:
    waiters, notified = Waiters(), list[str]()
    tasks = await _start_waiting(waiters, ["a", "b", "c"], notified)
    waiters.notify_workers({"b", "absent"})
    await tasks[1]
    await asyncio.sleep(0)
    assert notified == ["b"]
    waiters.notify()
    await asyncio.gather(*tasks)
    assert notified == ["b", "a", "c"]
