"""What a restart costs a job, as measured last or guessed."""

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
    def of(self, world: Observation | None = None, **heartbeat: Any) -> float:
        world = change_members(world or build_training(), **heartbeat)
        return world.restarts.estimate_cost() - world.restarts.restart_seconds

    def test_is_what_was_trained_since_the_state_was_kept(self) -> None:
        assert self.of(checkpoint={"step": 490}) == pytest.approx(1.0)
        assert self.of(checkpoint={"step": 490, "snapshot_step": 495}) == pytest.approx(0.5)
        assert self.of(checkpoint={"step": None}) == pytest.approx(50.0), "from the beginning"

    @pytest.mark.parametrize("checkpoint", [500, 501])
    def test_nothing_is_lost_where_nothing_was_trained_since(self, checkpoint: int) -> None:
        assert self.of(checkpoint={"step": checkpoint, "age_seconds": 700.0}) == 0.0
        unmeasured = replace(build_training(), metrics=JobMetrics())
        assert self.of(unmeasured, checkpoint={"step": checkpoint, "age_seconds": 700.0}) == 0.0

    @pytest.mark.parametrize(("snapshot", "lost"), [(489, 700.0), (490, 700.0), (491, 0.0)])
    def test_without_the_time_of_a_step_by_the_age_of_the_checkpoint(self, snapshot: int, lost: float) -> None:
        unmeasured = replace(build_training(), metrics=JobMetrics())
        assert self.of(unmeasured, checkpoint={"snapshot_step": snapshot, "age_seconds": 700.0}) == lost

    def test_before_a_restart_was_measured_it_is_guessed_by_the_start_of_the_round(self) -> None:
        def seconds(*starts: float) -> float:
            world = build_training()
            for view, start in zip(world.members, starts, strict=False):
                beat = {"start": {"first_step_at": NOW - 100, "started_at": NOW - 100 - start}}
                world = change_worker(world, view.name, heartbeat=beat)
            return world.restarts.restart_seconds

        assert seconds(60.0, 61.0, 63.0, 900.0) == 60.0, "nobody's word makes it longer"
        assert seconds(2.0, 2.0, 2.0, 2.0) == 5.0, "it says nothing of what comes before a restart"
        assert change_members(build_training(), start={"started_at": None}).restarts.restart_seconds == 5.0, "not told"
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
    def test_what_a_round_with_a_spare_takes_is_measured_too(
        self, restart: float | None, exchange: float | None, longer: float, restarts: float
    ) -> None:
        draft = build_training().desired.with_budget(restart_seconds=restart, spare_restart_seconds=exchange)
        world = build_training().with_desired(draft)
        assert world.restarts.restart_seconds == restarts
        assert build_replace_option(world, build_policy()).cost_seconds == pytest.approx(
            world.restarts.estimate_cost() + longer
        )
