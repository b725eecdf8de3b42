"""How far a job is, and for how long it will train on."""

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


def at(step: int, total: int | None = 1000, **changes: object) -> Observation:
    """A job of 0.5 s a step that began at step 0, 300 s ago."""
    world = change_members(build_training(**changes), progress={"step": step, "total_steps": total})  # type: ignore[arg-type]
    world = world.with_desired(world.desired.with_lifecycle(progress_since=NOW - 300))
    return replace(world, metrics=JobMetrics(throughput=32 / 0.5))


def said(world: Observation, before: JobStatus | None = None) -> tuple[int | None, str | None, str | None]:
    status = build_job_status(world, build_policy(), before or JobStatus())
    return status.total_steps, status.progress, status.remaining


def test_at_its_pace() -> None:
    assert said(at(600)) == (1000, "60%", "3m20s")


def test_interruptions_count_and_the_recent_weighs_as_much_as_all() -> None:
    steady = TrainingSpeed(steps=100, seconds=60.0)
    assert estimate_remaining_seconds(100, steady) == pytest.approx(60)
    interrupted = TrainingSpeed(steps=100, seconds=60.0, step_seconds=0.5, lasting_share=50 / 60)
    assert estimate_remaining_seconds(100, interrupted) == pytest.approx(60), "as often as before"
    slower = TrainingSpeed(steps=100, seconds=60.0, step_seconds=1.2)
    assert estimate_remaining_seconds(100, slower) == pytest.approx((60 + 120) / 2)


@pytest.mark.parametrize(
    ("left", "pace", "seconds"),
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
def test_what_cannot_be_believed_is_not_said(left: int, pace: TrainingSpeed, seconds: float | None) -> None:
    assert estimate_remaining_seconds(left, pace) == seconds


def test_ranks_that_are_not_heard_say_nothing_of_the_pace() -> None:
    half = JobMetrics(throughput=16 / 0.5, unreported_members=("j-w2-0", "j-w3-0"))
    assert said(replace(at(600), metrics=half)) == (1000, "60%", "3m20s")


def test_where_the_script_does_not_say_there_is_nothing() -> None:
    assert said(at(600, total=None), JobStatus(total_steps=1000)) == (None, None, None)


@pytest.mark.parametrize("lie", [7, 2**53])
def test_ranks_that_contradict_each_other_show_nothing(lie: int) -> None:
    assert said(change_worker(at(600), "j-w2-0", heartbeat={"progress": {"total_steps": lie}})) == (None, None, None)


def test_nor_does_one_that_has_done_more_than_there_is_to_do() -> None:
    assert said(change_worker(at(600), "j-w2-0", heartbeat={"progress": {"step": 2**50}})) == (None, None, None)


@pytest.mark.parametrize("lie", [-1, 0, 1e300, math.nan, "many", 2**60])
def test_what_is_no_number_of_steps_is_refused(lie: object) -> None:
    with pytest.raises(InputError, match="total_steps"):
        Heartbeat.from_json({"progress": {"total_steps": lie}})


def test_a_worker_that_has_just_joined_takes_nothing_back() -> None:
    fresh = {"progress": {"total_steps": None, "steps_in_round": 0}}
    assert said(change_worker(at(600), "j-w2-0", heartbeat=fresh)) == (1000, "60%", "3m20s")
    told = JobStatus(total_steps=1000)
    assert said(change_members(at(600), **fresh), told) == (1000, "60%", "3m20s"), "all of them begin a round"


def test_a_suspended_job_says_how_far_it_is_but_not_for_how_long() -> None:
    world = at(600, job=build_job(4, 1, suspend=True))
    assert said(world.with_desired(world.desired.with_plan(stop=Stop.SUSPEND))) == (1000, "60%", None)


def test_a_complete_one_is_done() -> None:
    world = at(1000)
    assert said(world.with_desired(world.desired.with_lifecycle(completed_at=NOW)), JobStatus(total_steps=1000)) == (
        1000,
        "100%",
        None,
    )


def test_the_pace_is_counted_from_the_first_step_after_a_resumption() -> None:
    world = change_members(
        build_training(step=500),
        start={"restored_step": 480, "first_step_at": NOW - 10},
        progress={"total_steps": 1000},
    )
    life = evaluate_job(world, build_policy()).desired.state.lifecycle
    assert (life.progress_since, life.progress_step) == (NOW - 10, 480)
    later = change_members(
        replace(world, now=NOW + 90), start={"restored_step": 490, "first_step_at": NOW + 80}, progress={"step": 510}
    )
    kept = evaluate_job(
        later.with_desired(replace(later.desired, state=replace(later.state, lifecycle=life))), build_policy()
    ).desired.state.lifecycle
    assert (kept.progress_since, kept.progress_step) == (NOW - 10, 480), "another round is no new beginning"


@pytest.mark.parametrize(("done", "total", "words"), [(0, 3, "0%"), (2, 3, "66%"), (999, 1000, "99%"), (-1, 3, None)])
def test_of_steps(done: int, total: int, words: str | None) -> None:
    assert format_progress(done, total) == words


@pytest.mark.parametrize(("seconds", "shown"), [(4.0, 0), (43.0, 40), (400.0, 420), (7300.0, 7200), (90_001.0, 90_000)])
def test_what_is_shown_is_rounded(seconds: float, shown: float) -> None:
    assert round_remaining_seconds(seconds) == shown


def test_a_look_a_moment_later_says_the_same() -> None:
    first = said(at(600))
    assert said(replace(at(600), now=NOW + 1.0)) == first
    assert parse_duration(first[2] or "") == 200
