"""Whether the operator's clock agrees with the API server's, and what waits until it does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pacekeeper_operator.api.training_job import RunPolicySpec
from pacekeeper_operator.async_runtime import OperatorRuntime
from pacekeeper_operator.decide.effects import DeleteJob
from pacekeeper_operator.decide.evaluate import list_effects
from pacekeeper_operator.decide.lifecycle import lifecycle
from pacekeeper_operator.decide.placement import workforce
from pacekeeper_operator.decide.placement.workforce import POD_DELETION_OVERDUE_SECONDS
from pacekeeper_operator.kube.server_clock import CLOCK_TOLERANCE_SECONDS, ServerClock
from testing.operators.observations import NOW, build_job, build_policy, build_training, change_worker


class Clock(OperatorRuntime):
    def __init__(self) -> None:
        super().__init__()
        self.wall, self.elapsed = NOW, 5.0

    def now(self) -> float:
        return self.wall

    def monotonic(self) -> float:
        return self.elapsed

    def pass_time(self, seconds: float) -> None:
        self.wall += seconds
        self.elapsed += seconds


@pytest.mark.parametrize(
    ("ahead", "agrees"),
    [
        (0.0, True),
        (CLOCK_TOLERANCE_SECONDS - 1, True),
        (CLOCK_TOLERANCE_SECONDS + 1, False),
        (-3600.0, False),
        (10_800.0, False),
    ],
)
def test_it_is_compared_with_the_newest_answer(ahead: float, agrees: bool) -> None:
    runtime = Clock()
    clock = ServerClock(runtime)
    clock.record_date(NOW - ahead)
    assert clock.agrees is agrees
    assert clock.seconds_ahead == ahead
    clock.record_date(NOW)
    assert clock.agrees


def test_time_that_passes_after_an_answer_changes_nothing_and_a_step_of_the_clock_shows_at_once() -> None:
    runtime = Clock()
    clock = ServerClock(runtime)
    clock.record_date(NOW)
    runtime.pass_time(3600.0)
    assert clock.agrees
    runtime.wall += 3600.0
    assert not clock.agrees


def test_a_server_that_dates_nothing_contradicts_nobody() -> None:
    assert ServerClock(Clock()).agrees


@pytest.mark.parametrize("agrees", [True, False])
def test_a_job_that_has_ended_is_deleted_only_by_a_clock_that_agrees(agrees: bool) -> None:
    world = build_training(job=build_job(run_policy=RunPolicySpec(ttl_seconds_after_finished=60)))
    over = world.with_desired(world.desired.with_lifecycle(completed_at=NOW - 100, stopped_at=NOW - 100))
    found = list_effects(replace(over, clock_agrees=agrees), build_policy(), {})
    assert any(isinstance(effect, DeleteJob) for effect in found) is agrees


def test_an_end_that_a_wrong_clock_has_dated_is_dated_again_once_it_is_right() -> None:
    """While the clock was a day behind: by that date, the time to live would be over as soon as it is set."""
    behind = NOW - 86400.0
    world = build_training(job=build_job(run_policy=RunPolicySpec(ttl_seconds_after_finished=3600)))
    world = world.with_desired(world.desired.with_lifecycle(completed_at=behind, stopped_at=behind))
    world = world.with_desired(
        lifecycle.advance_lifecycle(replace(world, now=behind + 5.0, clock_agrees=False), build_policy())
    )
    assert (
        lifecycle.advance_lifecycle(replace(world, now=behind + 10.0, clock_agrees=False), build_policy())
        == world.desired
    )
    world = world.with_desired(lifecycle.advance_lifecycle(world, build_policy()))
    assert world.state.lifecycle.stopped_at == NOW
    assert lifecycle.advance_lifecycle(replace(world, now=NOW + 10.0), build_policy()) == world.desired


@pytest.mark.parametrize("agrees", [True, False])
def test_so_is_a_pod_by_force(agrees: bool) -> None:
    """Its grace period is over by the clock: it may be writing a checkpoint."""
    going = {"deleting": True, "delete_by": NOW - POD_DELETION_OVERDUE_SECONDS - 1}
    world = replace(change_worker(build_training(), "j-w4-0", pod=going), clock_agrees=agrees)
    worker = workforce.update_workforce(world, build_policy()).state.placement.find_worker("j-w4-0")
    assert worker is not None
    assert worker.force is agrees


def test_a_wait_that_a_clock_ahead_has_written_is_over() -> None:
    """The operator after it would wait for hours."""
    world = build_training(spares=1)
    records = world.state.placement.workers[:4]
    for at, waits in ((NOW + 60, True), (NOW + 10_800, False)):
        waiting = world.with_desired(world.desired.with_placement(workers=records, failed_starts=3, retry_at=at))
        made = workforce.update_workforce(waiting, build_policy()).state.placement.workers
        assert (len(made) == 4) is waits
