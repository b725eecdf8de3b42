"""What passes want done is done apart from them, each by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import kopf
import pytest

from pacekeeper_operator.async_runtime import OperatorRuntime
from pacekeeper_operator.decide.effects import CreatePod, DeletePod, Effect
from pacekeeper_operator.runtime.effect_runner import (
    FIRST_EFFECT_BACKOFF_SECONDS,
    LONGEST_EFFECT_BACKOFF_SECONDS,
    MAX_CREATIONS_PER_JOB,
    EffectRunner,
)
from pacekeeper_operator.state.desired_state import WorkerRecord

A, B = (CreatePod(WorkerRecord(f"j-w{n}-0", n, 0)) for n in range(2))


class StandingClock(OperatorRuntime):
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
        self.errands = EffectRunner(self.runtime, self.carry_out, self.wake, "job ns/j")

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
        await self.errands.submit(effects)
        await self.errands.wait_until_idle()


@pytest.fixture
def doing() -> Doing:
    return Doing()


async def test_one_that_is_slow_holds_up_no_other_and_no_pass(doing: Doing) -> None:
    doing.held[A.key] = asyncio.Event()
    await doing.errands.submit([A, B])  # returns all the same
    assert doing.done == [B.key]
    assert doing.errands.is_busy
    await doing.errands.submit([A, B])
    doing.held[A.key].set()
    await doing.errands.wait_until_idle()
    assert doing.done.count(A.key) == 1, "it was under way already"


async def test_what_fails_is_told_and_tried_again_ever_more_slowly(doing: Doing) -> None:
    doing.fails(A, kopf.TemporaryError("exceeded quota: pods=1"))
    pauses = []
    for _ in range(12):
        await doing.sent(A, B)
        (trouble,) = doing.errands.blocked_actions
        assert trouble.is_pod_creation
        assert trouble.reason == "exceeded quota: pods=1"
        pauses.append(doing.errands.get_retry_delay())
        tries = doing.done.count(A.key)
        await doing.sent(A)
        assert doing.done.count(A.key) == tries, "not before its time"
        doing.runtime.at += pauses[-1]
    assert pauses[0] == pytest.approx(FIRST_EFFECT_BACKOFF_SECONDS)
    assert pauses == sorted(pauses)
    assert pauses[-1] == pytest.approx(LONGEST_EFFECT_BACKOFF_SECONDS)
    del doing.answers[A.key]
    await doing.sent(A)
    assert doing.errands.blocked_actions == ()


async def test_what_nobody_wants_any_more_is_no_trouble(doing: Doing) -> None:
    doing.fails(A, kopf.PermanentError("no such service account"))
    await doing.sent(A)
    assert doing.errands.blocked_actions
    await doing.sent(B)
    assert doing.errands.blocked_actions == ()
    assert doing.errands.get_retry_delay() == float("inf")


async def test_a_bug_in_one_is_a_trouble_like_others(doing: Doing) -> None:
    doing.fails(A, ZeroDivisionError("of ours"))
    await doing.sent(A, B)
    assert "of ours" in doing.errands.blocked_actions[0].reason
    assert B.key in doing.done
    assert not doing.runtime.failed.is_set()


async def test_what_is_quick_is_done_when_the_pass_goes_on(doing: Doing) -> None:
    """A status that says Failed finds its incident written."""
    await doing.errands.submit([A, B])
    assert set(doing.done) == {A.key, B.key}
    assert not doing.errands.is_busy


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
    creations = [CreatePod(WorkerRecord(f"j-w{n}-0", n, 0)) for n in range(MAX_CREATIONS_PER_JOB + 3)]
    for creation in creations:
        doing.held[creation.key] = asyncio.Event()
    await doing.errands.submit(creations)
    deletion = DeletePod("j-w99-0", "uid")
    await doing.errands.submit([deletion])
    assert doing.done == [deletion.key]
    for held in doing.held.values():
        held.set()
    await doing.errands.wait_until_idle()
    assert sum(key.startswith(CreatePod.PREFIX) for key in doing.done) == MAX_CREATIONS_PER_JOB, (
        "the others were not wanted any more"
    )


async def test_closing_ends_what_is_under_way(doing: Doing) -> None:
    doing.held[A.key] = asyncio.Event()
    await doing.errands.submit([A])
    await doing.errands.close()
    assert not doing.errands.is_busy
    assert not doing.runtime.failed.is_set()


async def test_draining_waits_for_what_was_sent_and_begins_nothing_more(doing: Doing) -> None:
    waiting = [CreatePod(WorkerRecord(f"j-w{number}-0", number, 0)) for number in range(MAX_CREATIONS_PER_JOB + 1)]
    for effect in waiting:
        doing.held[effect.key] = asyncio.Event()
    await doing.errands.submit(waiting)
    draining = asyncio.create_task(doing.errands.drain(600))
    for effect in waiting:
        await asyncio.sleep(0)
        assert not draining.done()
        doing.held[effect.key].set()
    await asyncio.wait_for(draining, 10)
    assert doing.done == [effect.key for effect in waiting[:MAX_CREATIONS_PER_JOB]]


async def test_draining_does_not_wait_for_ever(doing: Doing) -> None:
    doing.held[A.key] = asyncio.Event()
    await doing.errands.submit([A])
    await asyncio.wait_for(doing.errands.drain(0.01), 10)
    assert doing.errands.is_busy
    await doing.errands.close()
