"""Whether the clock of the operator agrees with that of the API server, and what waits for it."""

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


class ManualClock(OperatorRuntime):
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
        (CLOCK_TOLERANCE_SECONDS, True),
        (-CLOCK_TOLERANCE_SECONDS, True),
        (CLOCK_TOLERANCE_SECONDS + 1, False),
        (-3600.0, False),
        (10_800.0, False),
    ],
)
def test_the_clock_is_compared_with_the_newest_answer(ahead: float, agrees: bool) -> None:
    runtime = ManualClock()
    clock = ServerClock(runtime)
    clock.record_date(NOW - ahead)
    assert clock.agrees is agrees
    assert clock.seconds_ahead == ahead
    clock.record_date(NOW)
    assert clock.agrees


def test_a_clock_agrees_as_time_passes_until_it_is_set() -> None:
    runtime = ManualClock()
    clock = ServerClock(runtime)
    clock.record_date(NOW)
    runtime.pass_time(3600.0)
    assert clock.agrees
    runtime.wall += 3600.0
    assert not clock.agrees


def test_a_clock_agrees_where_no_answer_has_a_date() -> None:
    assert ServerClock(ManualClock()).agrees


@pytest.mark.parametrize("agrees", [True, False])
def test_a_job_that_has_ended_is_deleted_only_by_a_clock_that_agrees(agrees: bool) -> None:
    observation = build_training(job=build_job(run_policy=RunPolicySpec(ttl_seconds_after_finished=60)))
    ended = observation.with_desired(observation.desired.with_lifecycle(completed_at=NOW - 100, stopped_at=NOW - 100))
    found = list_effects(replace(ended, clock_agrees=agrees), build_policy(), {})
    assert any(isinstance(effect, DeleteJob) for effect in found) is agrees


def test_an_end_dated_by_a_wrong_clock_is_dated_again() -> None:
    """The clock was a day behind. By that date, the time to live would be over once the clock is set."""
    behind = NOW - 86400.0
    observation = build_training(job=build_job(run_policy=RunPolicySpec(ttl_seconds_after_finished=3600)))
    observation = observation.with_desired(observation.desired.with_lifecycle(completed_at=behind, stopped_at=behind))
    observation = observation.with_desired(
        lifecycle.advance_lifecycle(replace(observation, now=behind + 5.0, clock_agrees=False), build_policy())
    )
    assert (
        lifecycle.advance_lifecycle(replace(observation, now=behind + 10.0, clock_agrees=False), build_policy())
        == observation.desired
    )
    observation = observation.with_desired(lifecycle.advance_lifecycle(observation, build_policy()))
    assert observation.state.lifecycle.stopped_at == NOW
    assert lifecycle.advance_lifecycle(replace(observation, now=NOW + 10.0), build_policy()) == observation.desired


@pytest.mark.parametrize("agrees", [True, False])
def test_a_pod_is_deleted_by_force_only_by_a_clock_that_agrees(agrees: bool) -> None:
    """The grace period is over by the clock, but the pod may still save a checkpoint."""
    leaving_pod = {"deleting": True, "delete_by": NOW - POD_DELETION_OVERDUE_SECONDS - 1}
    observation = replace(change_worker(build_training(), "j-w4-0", pod=leaving_pod), clock_agrees=agrees)
    worker = workforce.update_workforce(observation, build_policy()).state.placement.find_worker("j-w4-0")
    assert worker is not None
    assert worker.force is agrees


def test_a_retry_time_written_by_a_clock_ahead_is_ignored() -> None:
    """Otherwise the next operator would wait for hours."""
    observation = build_training(spares=1)
    records = observation.state.placement.workers[:4]
    for at, waits in ((NOW + 60, True), (NOW + 10_800, False)):
        waiting = observation.with_desired(
            observation.desired.with_placement(workers=records, failed_starts=3, retry_at=at)
        )
        workers = workforce.update_workforce(waiting, build_policy()).state.placement.workers
        assert (len(workers) == 4) is waits
