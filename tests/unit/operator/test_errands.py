"""What passes want done is done apart from them, each by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import kopf
import pytest

from pacekeeper_operator.effects import CreatePod, DeletePod, Effect
from pacekeeper_operator.runtime import Runtime
from pacekeeper_operator.services.errands import AT_ONCE, FIRST_BACKOFF_SECONDS, LONGEST_BACKOFF_SECONDS, Errands
from pacekeeper_operator.state import Worker

A, B = (CreatePod(Worker(f"j-w{n}-0", n, 0)) for n in range(2))


class StandingClock(Runtime):
    """Time goes on when the test says so."""

    at = 1000.0

    def monotonic(self) -> float:
        return self.at

    def random(self) -> float:
        return 0.5


class Doing:
    def __init__(self) -> None:
        self.runtime = StandingClock()
        self.done: list[str] = []
        self.woken = 0
        self.answers: dict[str, Callable[[], float]] = {}
        self.held: dict[str, asyncio.Event] = {}
        self.errands = Errands(self.runtime, self.carry_out, self.wake, "job ns/j")

    async def carry_out(self, effect: Effect) -> float:
        if held := self.held.get(effect.key):
            await held.wait()
        self.done.append(effect.key)
        return self.answers.get(effect.key, lambda: 0.0)()

    def wake(self) -> None:
        self.woken += 1

    def fails(self, effect: Effect, error: Exception) -> None:
        def answer() -> float:
            raise error

        self.answers[effect.key] = answer

    async def sent(self, *effects: Effect) -> None:
        await self.errands.send(effects)
        await self.errands.settled()


@pytest.fixture
def doing() -> Doing:
    return Doing()


async def test_one_that_is_slow_holds_up_no_other_and_no_pass(doing: Doing) -> None:
    doing.held[A.key] = asyncio.Event()
    await doing.errands.send([A, B])  # returns all the same
    assert doing.done == [B.key]
    assert doing.errands.busy
    await doing.errands.send([A, B])
    doing.held[A.key].set()
    await doing.errands.settled()
    assert doing.done.count(A.key) == 1, "it was under way already"


async def test_what_fails_is_told_and_tried_again_ever_more_slowly(doing: Doing) -> None:
    doing.fails(A, kopf.TemporaryError("exceeded quota: pods=1"))
    pauses = []
    for _ in range(12):
        await doing.sent(A, B)
        (trouble,) = doing.errands.hindrances
        assert trouble.pods
        assert trouble.why == "exceeded quota: pods=1"
        pauses.append(doing.errands.due_in())
        tries = doing.done.count(A.key)
        await doing.sent(A)
        assert doing.done.count(A.key) == tries, "not before its time"
        doing.runtime.at += pauses[-1]
    assert pauses[0] == pytest.approx(FIRST_BACKOFF_SECONDS)
    assert pauses == sorted(pauses)
    assert pauses[-1] == pytest.approx(LONGEST_BACKOFF_SECONDS)
    del doing.answers[A.key]
    await doing.sent(A)
    assert doing.errands.hindrances == ()


async def test_what_nobody_wants_any_more_is_no_trouble(doing: Doing) -> None:
    doing.fails(A, kopf.PermanentError("no such service account"))
    await doing.sent(A)
    assert doing.errands.hindrances
    await doing.sent(B)
    assert doing.errands.hindrances == ()
    assert doing.errands.due_in() == float("inf")


async def test_a_bug_in_one_is_a_trouble_like_others(doing: Doing) -> None:
    doing.fails(A, ZeroDivisionError("of ours"))
    await doing.sent(A, B)
    assert "of ours" in doing.errands.hindrances[0].why
    assert B.key in doing.done
    assert not doing.runtime.failed.is_set()


async def test_what_is_quick_is_done_when_the_pass_goes_on(doing: Doing) -> None:
    """A status that says Failed finds its incident written."""
    await doing.errands.send([A, B])
    assert set(doing.done) == {A.key, B.key}
    assert not doing.errands.busy


async def test_what_is_done_rests_until_it_shows(doing: Doing) -> None:
    doing.answers[A.key] = lambda: 2.0
    await doing.sent(A)
    await doing.sent(A)
    assert doing.done.count(A.key) == 1
    doing.runtime.at += 2.0
    await doing.sent(A)
    assert doing.done.count(A.key) == 2


async def test_a_pass_is_wanted_whenever_something_is_done(doing: Doing) -> None:
    await doing.sent(A, DeletePod("j-w1-0", "uid"))
    assert doing.woken == 2


async def test_creations_that_hang_hold_up_nothing_else_and_are_left_once_nobody_wants_them(doing: Doing) -> None:
    creations = [CreatePod(Worker(f"j-w{n}-0", n, 0)) for n in range(AT_ONCE + 3)]
    for creation in creations:
        doing.held[creation.key] = asyncio.Event()
    await doing.errands.send(creations)
    deletion = DeletePod("j-w99-0", "uid")
    await doing.errands.send([deletion])
    assert doing.done == [deletion.key]
    for held in doing.held.values():
        held.set()
    await doing.errands.settled()
    assert sum(key.startswith(CreatePod.PREFIX) for key in doing.done) == AT_ONCE, "the others were not wanted any more"


async def test_closing_ends_what_is_under_way(doing: Doing) -> None:
    doing.held[A.key] = asyncio.Event()
    await doing.errands.send([A])
    await doing.errands.close()
    assert not doing.errands.busy
    assert not doing.runtime.failed.is_set()


async def test_draining_waits_for_what_was_sent_and_begins_nothing_more(doing: Doing) -> None:
    waiting = [CreatePod(Worker(f"j-w{number}-0", number, 0)) for number in range(AT_ONCE + 1)]
    for effect in waiting:
        doing.held[effect.key] = asyncio.Event()
    await doing.errands.send(waiting)
    draining = asyncio.create_task(doing.errands.drain(600))
    for effect in waiting:
        await asyncio.sleep(0)
        assert not draining.done()
        doing.held[effect.key].set()
    await asyncio.wait_for(draining, 10)
    assert doing.done == [effect.key for effect in waiting[:AT_ONCE]]


async def test_draining_does_not_wait_for_ever(doing: Doing) -> None:
    doing.held[A.key] = asyncio.Event()
    await doing.errands.send([A])
    await asyncio.wait_for(doing.errands.drain(0.01), 10)
    assert doing.errands.busy
    await doing.errands.close()
