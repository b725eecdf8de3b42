"""What a restart costs a job, as measured last or estimated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pacekeeper_operator.decide.stragglers.pricing import (
    DEFAULT_SPARE_SECONDS,
    build_replace_option,
)
from pacekeeper_operator.state.job_metrics import JobMetrics
from pacekeeper_operator.state.observation import Observation
from testing.operators.observations import (
    NOW,
    build_policy,
    build_training,
    change_members,
    change_worker,
)


class TestRestartCost:
    def measure_lost_seconds(self, observation: Observation | None = None, **heartbeat: Any) -> float:
        observation = change_members(observation or build_training(), **heartbeat)
        return observation.restarts.estimate_cost() - observation.restarts.restart_seconds

    def test_the_cost_is_the_training_since_the_newest_saved_state(self) -> None:
        assert self.measure_lost_seconds(checkpoint={"step": 490}) == pytest.approx(1.0)
        assert self.measure_lost_seconds(checkpoint={"step": 490, "snapshot_step": 495}) == pytest.approx(0.5)
        assert self.measure_lost_seconds(checkpoint={"step": None}) == pytest.approx(50.0), "from the beginning"

    @pytest.mark.parametrize("checkpoint", [500, 501])
    def test_the_cost_is_zero_without_training_since_the_checkpoint(self, checkpoint: int) -> None:
        assert self.measure_lost_seconds(checkpoint={"step": checkpoint, "age_seconds": 700.0}) == 0.0
        unmeasured = replace(build_training(), metrics=JobMetrics())
        assert self.measure_lost_seconds(unmeasured, checkpoint={"step": checkpoint, "age_seconds": 700.0}) == 0.0

    @pytest.mark.parametrize(("snapshot", "lost"), [(489, 700.0), (490, 700.0), (491, 0.0)])
    def test_without_a_step_time_the_cost_is_the_age_of_the_checkpoint(self, snapshot: int, lost: float) -> None:
        unmeasured = replace(build_training(), metrics=JobMetrics())
        assert (
            self.measure_lost_seconds(unmeasured, checkpoint={"snapshot_step": snapshot, "age_seconds": 700.0}) == lost
        )

    def test_an_unmeasured_restart_is_estimated_by_the_start_of_the_round(self) -> None:
        def estimate_seconds(*starts: float) -> float:
            observation = build_training()
            for view, start in zip(observation.members, starts, strict=False):
                heartbeat = {"start": {"first_step_at": NOW - 100, "started_at": NOW - 100 - start}}
                observation = change_worker(observation, view.name, heartbeat=heartbeat)
            return observation.restarts.restart_seconds

        assert estimate_seconds(60.0, 61.0, 63.0, 900.0) == 60.0, "no report of a worker makes it longer"
        assert estimate_seconds(2.0, 2.0, 2.0, 2.0) == 5.0, "the start of a round does not include what precedes it"
        assert change_members(build_training(), start={"started_at": None}).restarts.restart_seconds == 5.0, (
            "not reported"
        )
        measured = build_training().desired.with_budget(restart_seconds=3.0)
        assert build_training().with_desired(measured).restarts.restart_seconds == 3.0

    @pytest.mark.parametrize(
        ("restart", "exchange", "longer", "restarts"),
        [
            (3.0, None, DEFAULT_SPARE_SECONDS, 3.0),
            (3.0, 4.5, 1.5, 3.0),
            (5.0, 4.5, 0.0, 5.0),
            (None, 4.5, 0.0, 4.5),
        ],
    )
    def test_a_restart_with_a_spare_is_measured_separately(
        self, restart: float | None, exchange: float | None, longer: float, restarts: float
    ) -> None:
        desired = build_training().desired.with_budget(restart_seconds=restart, spare_restart_seconds=exchange)
        observation = build_training().with_desired(desired)
        assert observation.restarts.restart_seconds == restarts
        assert build_replace_option(observation, build_policy()).cost_seconds == pytest.approx(
            observation.restarts.estimate_cost() + longer
        )
