"""The progress of a job, and the estimated remaining time."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.protocol.plan import Stop
from pacekeeper_analysis.protocol.reports import Heartbeat
from pacekeeper_operator.api.formats import parse_duration
from pacekeeper_operator.api.training_job import JobStatus
from pacekeeper_operator.decide.evaluate import evaluate_job
from pacekeeper_operator.decide.lifecycle.progress import (
    TrainingSpeed,
    estimate_remaining_seconds,
    format_progress,
    round_remaining_seconds,
)
from pacekeeper_operator.decide.lifecycle.status import build_job_status
from pacekeeper_operator.state.job_metrics import JobMetrics
from pacekeeper_operator.state.observation import Observation
from testing.operators.observations import NOW, build_job, build_policy, build_training, change_members, change_worker


def build_at(step: int, total: int | None = 1000, **changes: object) -> Observation:
    """Build a job of 0.5 s a step that began at step 0, 300 s ago."""
    observation = change_members(build_training(**changes), progress={"step": step, "total_steps": total})  # type: ignore[arg-type]
    observation = observation.with_desired(observation.desired.with_lifecycle(progress_since=NOW - 300))
    return replace(observation, metrics=JobMetrics(throughput=32 / 0.5))


def read_progress(
    observation: Observation, before: JobStatus | None = None
) -> tuple[int | None, str | None, str | None]:
    status = build_job_status(observation, build_policy(), before or JobStatus())
    return status.total_steps, status.progress, status.remaining


def test_progress_and_remaining_time_at_the_current_speed() -> None:
    assert read_progress(build_at(600)) == (1000, "60%", "3m20s")


def test_interruptions_count_and_recent_steps_weigh_as_much_as_all_steps() -> None:
    steady = TrainingSpeed(steps=100, seconds=60.0)
    assert estimate_remaining_seconds(100, steady) == pytest.approx(60)
    interrupted = TrainingSpeed(steps=100, seconds=60.0, step_seconds=0.5, lasting_share=50 / 60)
    assert estimate_remaining_seconds(100, interrupted) == pytest.approx(60), "as often as before"
    slower = TrainingSpeed(steps=100, seconds=60.0, step_seconds=1.2)
    assert estimate_remaining_seconds(100, slower) == pytest.approx((60 + 120) / 2)


@pytest.mark.parametrize(
    ("steps", "speed", "seconds"),
    [
        (0, TrainingSpeed(10, 10.0), 0.0),
        (10, TrainingSpeed(0, 10.0), None),
        (10, TrainingSpeed(-5, 10.0), None),
        (10, TrainingSpeed(10, -1.0), None),
        (10, TrainingSpeed(10, 10.0, step_seconds=math.nan), None),
        (10, TrainingSpeed(10, 10.0, step_seconds=math.inf), None),
        (10, TrainingSpeed(10, 10.0, step_seconds=-1e300), None),
        (2**53, TrainingSpeed(10, 10.0), None),
    ],
)
def test_implausible_speeds_give_no_estimate(steps: int, speed: TrainingSpeed, seconds: float | None) -> None:
    assert estimate_remaining_seconds(steps, speed) == seconds


def test_throughput_of_some_ranks_is_ignored() -> None:
    partial = JobMetrics(throughput=16 / 0.5, unreported_members=("j-w2-0", "j-w3-0"))
    assert read_progress(replace(build_at(600), metrics=partial)) == (1000, "60%", "3m20s")


def test_without_total_steps_there_is_no_progress() -> None:
    assert read_progress(build_at(600, total=None), JobStatus(total_steps=1000)) == (None, None, None)


@pytest.mark.parametrize("total_steps", [7, 2**53])
def test_contradicting_totals_give_no_progress(total_steps: int) -> None:
    assert read_progress(
        change_worker(build_at(600), "j-w2-0", heartbeat={"progress": {"total_steps": total_steps}})
    ) == (None, None, None)


def test_a_step_beyond_the_total_gives_no_progress() -> None:
    assert read_progress(change_worker(build_at(600), "j-w2-0", heartbeat={"progress": {"step": 2**50}})) == (
        None,
        None,
        None,
    )


@pytest.mark.parametrize("total_steps", [-1, 0, 1e300, math.nan, "many", 2**60])
def test_an_invalid_total_is_refused(total_steps: object) -> None:
    with pytest.raises(InputError, match="total_steps"):
        Heartbeat.from_json({"progress": {"total_steps": total_steps}})


def test_a_worker_that_has_just_joined_keeps_the_progress() -> None:
    fresh = {"progress": {"total_steps": None, "steps_in_round": 0}}
    assert read_progress(change_worker(build_at(600), "j-w2-0", heartbeat=fresh)) == (1000, "60%", "3m20s")
    before = JobStatus(total_steps=1000)
    assert read_progress(change_members(build_at(600), **fresh), before) == (1000, "60%", "3m20s"), (
        "all of them begin a round"
    )


def test_a_suspended_job_has_progress_but_no_remaining_time() -> None:
    observation = build_at(600, job=build_job(4, 1, suspend=True))
    assert read_progress(observation.with_desired(observation.desired.with_plan(stop=Stop.SUSPEND))) == (
        1000,
        "60%",
        None,
    )


def test_a_complete_job_is_at_100_percent() -> None:
    observation = build_at(1000)
    assert read_progress(
        observation.with_desired(observation.desired.with_lifecycle(completed_at=NOW)), JobStatus(total_steps=1000)
    ) == (
        1000,
        "100%",
        None,
    )


def test_the_speed_is_measured_from_the_first_step_after_a_resumption() -> None:
    observation = change_members(
        build_training(step=500),
        start={"restored_step": 480, "first_step_at": NOW - 10},
        progress={"total_steps": 1000},
    )
    lifecycle_state = evaluate_job(observation, build_policy()).desired.state.lifecycle
    assert (lifecycle_state.progress_since, lifecycle_state.progress_step) == (NOW - 10, 480)
    later = change_members(
        replace(observation, now=NOW + 90),
        start={"restored_step": 490, "first_step_at": NOW + 80},
        progress={"step": 510},
    )
    unchanged = evaluate_job(
        later.with_desired(replace(later.desired, state=replace(later.state, lifecycle=lifecycle_state))),
        build_policy(),
    ).desired.state.lifecycle
    assert (unchanged.progress_since, unchanged.progress_step) == (NOW - 10, 480), (
        "another round does not restart the measurement"
    )


@pytest.mark.parametrize(
    ("done", "total", "progress"), [(0, 3, "0%"), (2, 3, "66%"), (999, 1000, "99%"), (-1, 3, None)]
)
def test_progress_is_formatted_as_a_percentage(done: int, total: int, progress: str | None) -> None:
    assert format_progress(done, total) == progress


@pytest.mark.parametrize(
    ("seconds", "rounded"), [(4.0, 0), (43.0, 40), (400.0, 420), (7300.0, 7200), (90_001.0, 90_000)]
)
def test_the_remaining_time_is_rounded(seconds: float, rounded: float) -> None:
    assert round_remaining_seconds(seconds) == rounded


def test_the_remaining_time_is_the_same_one_second_later() -> None:
    first = read_progress(build_at(600))
    assert read_progress(replace(build_at(600), now=NOW + 1.0)) == first
    assert parse_duration(first[2] or "") == 200
