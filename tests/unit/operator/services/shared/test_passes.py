"""When passes begin: one after the other, with time for other work in between, and never without the Lease."""

from __future__ import annotations

import asyncio

import pytest

from pacekeeper_operator.services.shared.node_priority import NODE_PRIORITY_THRESHOLD, NodePriorityGate
from pacekeeper_operator.services.shared.passes import LONG_PASS_REST_FACTOR, MAX_PASS_REST_SECONDS, PassScheduler
from testing.operators.fixed_time import FixedTimeRuntime
from testing.operators.virtual_time import Timeline, VirtualRuntime


class SchedulerBench:
    """A pass scheduler without an operator."""

    def __init__(self) -> None:
        self.timeline = Timeline()
        self.runtime = VirtualRuntime(self.timeline)
        self.gate = NodePriorityGate(self.runtime)
        self.passes = PassScheduler(self.runtime, self.gate, lambda: True)


@pytest.fixture
def bench() -> SchedulerBench:
    return SchedulerBench()


@pytest.mark.parametrize(
    ("compute_seconds", "backlog", "rest"),
    [
        (0.04, NODE_PRIORITY_THRESHOLD, 0.04),
        (0.04, NODE_PRIORITY_THRESHOLD + 1, 0.04 * LONG_PASS_REST_FACTOR),
        (0.1, NODE_PRIORITY_THRESHOLD, 0.1 * LONG_PASS_REST_FACTOR),
        (5.0, NODE_PRIORITY_THRESHOLD, MAX_PASS_REST_SECONDS),
    ],
    ids=["as much", "very many nodes wait", "a long pass", "a bound"],
)
async def test_other_work_has_as_much_time_as_passes_and_more_under_load(
    bench: SchedulerBench, compute_seconds: float, backlog: int, rest: float
) -> None:
    bench.gate.set_backlog(backlog)
    bench.passes.compute_seconds = compute_seconds
    waiter = bench.runtime.start_task(bench.passes.wait_for_pass(), "a pass")
    await bench.timeline.run(rest - 0.01)
    assert not waiter.done()
    await bench.timeline.run(0.02)
    assert waiter.done()
    waiter = bench.runtime.start_task(bench.passes.wait_for_pass(), "the next one")
    await bench.timeline.run(0.01)
    assert waiter.done(), "nothing has been computed since"


async def test_a_job_with_new_gpu_errors_does_not_wait_longer(bench: SchedulerBench) -> None:
    """No suspicion is raised until its pass has begun."""
    bench.passes.jobs_with_new_gpu_errors = {("ns", "job")}
    bench.gate.set_backlog(NODE_PRIORITY_THRESHOLD + 1)
    bench.passes.compute_seconds = 0.1
    waiter = bench.runtime.start_task(bench.passes.wait_for_pass(), "a pass")
    await bench.timeline.run(0.11)
    assert waiter.done()


async def test_a_lost_worker_has_a_pass_soon_but_after_hundreds_of_nodes(bench: SchedulerBench) -> None:
    bench.passes.jobs_with_lost_worker = {("ns", "job")}
    for backlog, rest in (
        (NODE_PRIORITY_THRESHOLD, 0.1),
        (NODE_PRIORITY_THRESHOLD + 1, 0.1 * LONG_PASS_REST_FACTOR),
    ):
        bench.gate.set_backlog(backlog)
        bench.passes.compute_seconds = 0.1
        waiter = bench.runtime.start_task(bench.passes.wait_for_pass(), "a pass")
        await bench.timeline.run(rest - 0.01)
        assert not waiter.done()
        await bench.timeline.run(0.02)
        assert waiter.done()


async def test_the_compute_time_of_a_pass_is_measured(bench: SchedulerBench) -> None:
    with bench.passes.measure_compute():
        bench.timeline.now += 0.5
    assert bench.passes.compute_seconds == pytest.approx(0.5)


async def test_passes_begin_in_different_turns_of_the_event_loop() -> None:
    """At most one pass begins in each turn of the event loop."""
    runtime = FixedTimeRuntime()
    passes = PassScheduler(runtime, NodePriorityGate(runtime), lambda: True)
    began, turns = list[int](), 0

    async def begin_pass() -> None:
        await passes.wait_for_pass()
        began.append(turns)

    beginning = asyncio.gather(*(begin_pass() for _ in range(50)))
    while not beginning.done():
        turns += 1
        await asyncio.sleep(0)
    assert len(set(began)) == len(began) == 50


async def test_without_the_lease_one_pass_polls_and_the_others_wait_for_it() -> None:
    runtime, waits, leads = FixedTimeRuntime(), list[float](), False
    passes = PassScheduler(runtime, NodePriorityGate(runtime), lambda: leads)

    async def sleep(seconds: float) -> None:
        nonlocal leads
        waits.append(seconds)
        leads = len(waits) >= 3

    runtime.sleep = sleep  # type: ignore[method-assign]
    await asyncio.gather(*(passes.wait_for_pass() for _ in range(5)))
    assert [seconds > 0 for seconds in waits] == [False, True, True, False, False, False, False]
