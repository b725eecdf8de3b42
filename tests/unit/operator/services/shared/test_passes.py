"""When passes begin: one after the other, with time for all else in between, and never without the Lease."""

from __future__ import annotations

import asyncio

import pytest

from pacekeeper_operator.services.shared.node_priority import NODE_PRIORITY_THRESHOLD, NodePriorityGate
from pacekeeper_operator.services.shared.passes import LONG_PASS_REST_FACTOR, MAX_PASS_REST_SECONDS, PassScheduler
from testing.operators.fixed_time import FixedTimeRuntime
from testing.operators.virtual_time import Timeline, VirtualRuntime


class Place:
    """A scheduler on its own."""

    def __init__(self) -> None:
        self.timeline = Timeline()
        self.runtime = VirtualRuntime(self.timeline)
        self.gate = NodePriorityGate(self.runtime)
        self.passes = PassScheduler(self.runtime, self.gate, lambda: True)


@pytest.fixture
def place() -> Place:
    return Place()


@pytest.mark.parametrize(
    ("took", "waiting", "rest"),
    [
        (0.04, NODE_PRIORITY_THRESHOLD, 0.04),
        (0.04, NODE_PRIORITY_THRESHOLD + 1, 0.04 * LONG_PASS_REST_FACTOR),
        (0.1, NODE_PRIORITY_THRESHOLD, 0.1 * LONG_PASS_REST_FACTOR),
        (5.0, NODE_PRIORITY_THRESHOLD, MAX_PASS_REST_SECONDS),
    ],
    ids=["as much", "very many nodes wait", "a long pass", "a bound"],
)
async def test_all_else_has_as_much_time_as_passes_take_and_more_where_it_has_much_to_do(
    place: Place, took: float, waiting: int, rest: float
) -> None:
    place.gate.set_backlog(waiting)
    place.passes.compute_seconds = took
    turn = place.runtime.start_task(place.passes.wait_for_pass(), "a pass")
    await place.timeline.run(rest - 0.01)
    assert not turn.done()
    await place.timeline.run(0.02)
    assert turn.done()
    turn = place.runtime.start_task(place.passes.wait_for_pass(), "the next one")
    await place.timeline.run(0.01)
    assert turn.done(), "nothing has been computed since"


async def test_a_job_whose_gpus_show_something_new_is_not_kept_waiting(place: Place) -> None:
    """Until its pass has begun, no suspicion is raised."""
    place.passes.jobs_with_new_gpu_errors = {("ns", "job")}
    place.gate.set_backlog(NODE_PRIORITY_THRESHOLD + 1)
    place.passes.compute_seconds = 0.1
    turn = place.runtime.start_task(place.passes.wait_for_pass(), "a pass")
    await place.timeline.run(0.11)
    assert turn.done()


async def test_after_a_long_pass_a_lost_worker_is_looked_at_soon_but_behind_hundreds_of_nodes(place: Place) -> None:
    place.passes.jobs_with_lost_worker = {("ns", "job")}
    for waiting, rest in (
        (NODE_PRIORITY_THRESHOLD, 0.1),
        (NODE_PRIORITY_THRESHOLD + 1, 0.1 * LONG_PASS_REST_FACTOR),
    ):
        place.gate.set_backlog(waiting)
        place.passes.compute_seconds = 0.1
        turn = place.runtime.start_task(place.passes.wait_for_pass(), "a pass")
        await place.timeline.run(rest - 0.01)
        assert not turn.done()
        await place.timeline.run(0.02)
        assert turn.done()


async def test_what_a_pass_computes_is_counted(place: Place) -> None:
    with place.passes.measure_compute():
        place.timeline.now += 0.5
    assert place.passes.compute_seconds == pytest.approx(0.5)


async def test_passes_begin_one_after_the_other_with_all_else_in_between() -> None:
    """A clock that ticks in each turn of the event loop sees none in which two begin."""
    runtime = FixedTimeRuntime()
    passes = PassScheduler(runtime, NodePriorityGate(runtime), lambda: True)
    began, turns = list[int](), 0

    async def begin() -> None:
        await passes.wait_for_pass()
        began.append(turns)

    beginning = asyncio.gather(*(begin() for _ in range(50)))
    while not beginning.done():
        turns += 1
        await asyncio.sleep(0)
    assert len(set(began)) == len(began) == 50


async def test_without_the_lease_all_wait_for_one_that_asks() -> None:
    runtime, waits, leads = FixedTimeRuntime(), list[float](), False
    passes = PassScheduler(runtime, NodePriorityGate(runtime), lambda: leads)

    async def sleep(seconds: float) -> None:
        nonlocal leads
        waits.append(seconds)
        leads = len(waits) >= 3

    runtime.sleep = sleep  # type: ignore[method-assign]
    await asyncio.gather(*(passes.wait_for_pass() for _ in range(5)))
    assert [seconds > 0 for seconds in waits] == [False, True, True, False, False, False, False]
