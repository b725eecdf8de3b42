"""Effects that passes request are carried out separately from them and from each other."""

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


class ManualClock(OperatorRuntime):
    """A clock that the test moves."""

    at = 1000.0

    def monotonic(self) -> float:
        return self.at

    def random(self) -> float:
        return 0.5


class RunnerBench:
    def __init__(self) -> None:
        self.runtime = ManualClock()
        self.handled: list[str] = []
        self.wakes = 0
        self.results: dict[str, Callable[[], float]] = {}
        self.blocked: dict[str, asyncio.Event] = {}
        self.runner = EffectRunner(self.runtime, self.handle, self.wake, "job ns/j")

    async def handle(self, effect: Effect) -> float:
        if blocked := self.blocked.get(effect.key):
            await blocked.wait()
        self.handled.append(effect.key)
        return self.results.get(effect.key, lambda: 0.0)()

    def wake(self) -> None:
        self.wakes += 1

    def set_failure(self, effect: Effect, error: Exception) -> None:
        def fail() -> float:
            raise error

        self.results[effect.key] = fail

    async def submit_and_wait(self, *effects: Effect) -> None:
        await self.runner.submit(effects)
        await self.runner.wait_until_idle()


@pytest.fixture
def bench() -> RunnerBench:
    return RunnerBench()


async def test_a_slow_effect_delays_no_other_and_no_pass(bench: RunnerBench) -> None:
    bench.blocked[A.key] = asyncio.Event()
    await bench.runner.submit([A, B])  # returns nevertheless
    assert bench.handled == [B.key]
    assert bench.runner.is_busy
    await bench.runner.submit([A, B])
    bench.blocked[A.key].set()
    await bench.runner.wait_until_idle()
    assert bench.handled.count(A.key) == 1, "it was running already"


async def test_a_failing_effect_is_reported_and_retried_with_back_off(bench: RunnerBench) -> None:
    bench.set_failure(A, kopf.TemporaryError("exceeded quota: pods=1"))
    pauses = []
    for _ in range(12):
        await bench.submit_and_wait(A, B)
        (action,) = bench.runner.blocked_actions
        assert action.is_pod_creation
        assert action.reason == "exceeded quota: pods=1"
        pauses.append(bench.runner.get_retry_delay())
        tries = bench.handled.count(A.key)
        await bench.submit_and_wait(A)
        assert bench.handled.count(A.key) == tries, "not before its time"
        bench.runtime.at += pauses[-1]
    assert pauses[0] == pytest.approx(FIRST_EFFECT_BACKOFF_SECONDS)
    assert pauses == sorted(pauses)
    assert pauses[-1] == pytest.approx(LONGEST_EFFECT_BACKOFF_SECONDS)
    del bench.results[A.key]
    await bench.submit_and_wait(A)
    assert bench.runner.blocked_actions == ()


async def test_a_failing_effect_that_is_no_longer_requested_is_not_reported(bench: RunnerBench) -> None:
    bench.set_failure(A, kopf.PermanentError("no such service account"))
    await bench.submit_and_wait(A)
    assert bench.runner.blocked_actions
    await bench.submit_and_wait(B)
    assert bench.runner.blocked_actions == ()
    assert bench.runner.get_retry_delay() == float("inf")


async def test_a_bug_in_an_effect_is_reported_like_other_failures(bench: RunnerBench) -> None:
    bench.set_failure(A, ZeroDivisionError("a bug"))
    await bench.submit_and_wait(A, B)
    assert "a bug" in bench.runner.blocked_actions[0].reason
    assert B.key in bench.handled
    assert not bench.runtime.failed.is_set()


async def test_a_fast_effect_is_done_before_the_pass_continues(bench: RunnerBench) -> None:
    """The incident of a failed job is written before its status."""
    await bench.runner.submit([A, B])
    assert set(bench.handled) == {A.key, B.key}
    assert not bench.runner.is_busy


async def test_a_done_effect_is_not_repeated_until_its_delay_is_over(bench: RunnerBench) -> None:
    bench.results[A.key] = lambda: 2.0
    await bench.submit_and_wait(A)
    await bench.submit_and_wait(A)
    assert bench.handled.count(A.key) == 1
    bench.runtime.at += 2.0
    await bench.submit_and_wait(A)
    assert bench.handled.count(A.key) == 2


async def test_each_done_effect_wakes_the_loop(bench: RunnerBench) -> None:
    await bench.submit_and_wait(A, DeletePod("j-w1-0", "uid"))
    assert bench.wakes == 2


async def test_hanging_creations_delay_no_other_effect_and_are_dropped_once_not_requested(bench: RunnerBench) -> None:
    creations = [CreatePod(WorkerRecord(f"j-w{n}-0", n, 0)) for n in range(MAX_CREATIONS_PER_JOB + 3)]
    for creation in creations:
        bench.blocked[creation.key] = asyncio.Event()
    await bench.runner.submit(creations)
    deletion = DeletePod("j-w99-0", "uid")
    await bench.runner.submit([deletion])
    assert bench.handled == [deletion.key]
    for blocked in bench.blocked.values():
        blocked.set()
    await bench.runner.wait_until_idle()
    assert sum(key.startswith(CreatePod.PREFIX) for key in bench.handled) == MAX_CREATIONS_PER_JOB, (
        "the others were no longer requested"
    )


async def test_closing_ends_running_effects(bench: RunnerBench) -> None:
    bench.blocked[A.key] = asyncio.Event()
    await bench.runner.submit([A])
    await bench.runner.close()
    assert not bench.runner.is_busy
    assert not bench.runtime.failed.is_set()


async def test_draining_waits_for_running_effects_and_starts_no_others(bench: RunnerBench) -> None:
    waiting = [CreatePod(WorkerRecord(f"j-w{number}-0", number, 0)) for number in range(MAX_CREATIONS_PER_JOB + 1)]
    for effect in waiting:
        bench.blocked[effect.key] = asyncio.Event()
    await bench.runner.submit(waiting)
    draining = asyncio.create_task(bench.runner.drain(600))
    for effect in waiting:
        await asyncio.sleep(0)
        assert not draining.done()
        bench.blocked[effect.key].set()
    await asyncio.wait_for(draining, 60)
    assert bench.handled == [effect.key for effect in waiting[:MAX_CREATIONS_PER_JOB]]


async def test_draining_has_a_timeout(bench: RunnerBench) -> None:
    bench.blocked[A.key] = asyncio.Event()
    await bench.runner.submit([A])
    await asyncio.wait_for(bench.runner.drain(0.01), 60)
    assert bench.runner.is_busy
    await bench.runner.close()
