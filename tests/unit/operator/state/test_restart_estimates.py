"""What a restart costs a job, as measured last or estimated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pacekeeper_operator.decide.stragglers.pricing import build_replace_option
from pacekeeper_operator.state.job_metrics import JobMetrics
from pacekeeper_operator.state.observation import Observation
from pacekeeper_operator.state.restart_estimates import (
    COLD_SPARE_SECONDS,
    MAX_MEASURED_RESTARTS,
    RestartKind,
    RestartMeasurements,
    SavedState,
)
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

    @pytest.mark.parametrize(
        ("members", "replicated", "lost"),
        [
            ({}, 495, 0.5),  # what another worker has survives the loss of any one
            ({}, None, 2.0),
            ({"j-w1-0": None}, 495, 2.0),  # one worker has sent none
            ({"j-w1-0": 493}, 495, 0.7),
            ({"j-w1-0": 470}, 495, 2.0),  # the checkpoint is newer
        ],
    )
    def test_the_loss_of_a_worker_costs_the_training_since_what_others_have(
        self, members: dict[str, int | None], replicated: int | None, lost: float
    ) -> None:
        checkpoint = {"step": 480, "snapshot_step": 500}
        observation = change_members(build_training(), checkpoint={**checkpoint, "replicated_step": replicated})
        for name, step in members.items():
            heartbeat = {"checkpoint": {**checkpoint, "replicated_step": step}}
            observation = change_worker(observation, name, heartbeat=heartbeat)
        estimates = observation.restarts
        seconds = estimates.estimate_cost(RestartKind.REPLACEMENT, SavedState.REPLICA)
        assert seconds - estimates.estimate_round_seconds(RestartKind.REPLACEMENT) == pytest.approx(lost)

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
        assert measure_restarts(same_workers=(3.0,)).restarts.restart_seconds == 3.0

    @pytest.mark.parametrize(
        ("restart", "replacement", "longer", "restarts"),
        [
            (3.0, None, COLD_SPARE_SECONDS, 3.0),
            (3.0, 4.5, 1.5, 3.0),
            (5.0, 4.5, 0.0, 5.0),
            (None, 4.5, 0.0, 4.5),
        ],
    )
    def test_a_replacement_is_measured_separately(
        self, restart: float | None, replacement: float | None, longer: float, restarts: float
    ) -> None:
        observation = measure_restarts(
            same_workers=() if restart is None else (restart,),
            replacement=() if replacement is None else (replacement,),
        )
        assert observation.restarts.restart_seconds == restarts
        assert build_replace_option(observation, build_policy()).cost_seconds == pytest.approx(
            observation.restarts.estimate_cost() + longer
        )


class TestExchange:
    def test_the_price_is_that_of_exchanges_whatever_came_last(self) -> None:
        """As recorded in the demo: exchanges took 4.7 to 5.4 s, and were priced by the last restart of any kind."""
        measurements = RestartMeasurements()
        for kind, seconds in (
            (RestartKind.SAME_WORKERS, 2.1),
            (RestartKind.EXCHANGE, 4.7),
            (RestartKind.SAME_WORKERS, 1.6),
            (RestartKind.EXCHANGE, 5.4),
            (RestartKind.REPLACEMENT, 1.9),
        ):
            measurements = measurements.add_restart(kind, seconds)
        estimates = measure_restarts(measurements).restarts
        assert estimates.estimate_exchange_seconds() == pytest.approx(5.05)
        assert estimates.restart_seconds == pytest.approx(1.85)

    @pytest.mark.parametrize(("restart", "price"), [(None, 5.0), (2.1, 5.0), (4.6, 5.1), (300.0, 300.5)])
    def test_before_the_first_exchange_the_price_is_unmeasured_and_no_less_than_a_restart(
        self, restart: float | None, price: float
    ) -> None:
        """In the demo, restarts took 2.1 s, and exchanges 4.7 to 5.4 s; in the simulator 4.5 and 4.4 to 4.9 s."""
        estimate = measure_restarts(same_workers=() if restart is None else (restart,)).restarts
        assert estimate.estimate_exchange_seconds() == pytest.approx(price)

    @pytest.mark.parametrize(("waits", "wait_steps"), [((), 3.0), ((4.0, 9.0, 5.0), 5.0)])
    def test_the_way_to_the_checkpoint_costs_what_the_slowdown_costs(
        self, waits: tuple[float, ...], wait_steps: float
    ) -> None:
        observation = measure_restarts(exchange=(5.0,), checkpoint_wait_steps=waits)
        observation = replace(observation, metrics=JobMetrics(step_seconds=2.5))
        assert observation.restarts.estimate_exchange_seconds(5.0) == pytest.approx(5.0 + wait_steps * 2.5 * 0.8)
        assert observation.restarts.estimate_exchange_seconds() == 5.0

    def test_one_long_exchange_sets_no_price_and_old_ones_are_dropped(self) -> None:
        measurements = RestartMeasurements()
        for seconds in (90.0, 5.0, 5.2, 60.0, 5.1, 5.3):
            measurements = measurements.add_restart(RestartKind.EXCHANGE, seconds)
        assert len(measurements.exchange) == MAX_MEASURED_RESTARTS
        assert measure_restarts(measurements).restarts.estimate_exchange_seconds() == 5.2


def measure_restarts(measurements: RestartMeasurements | None = None, **durations: tuple[float, ...]) -> Observation:
    """Return a job that trains and has measured these restarts."""
    desired = build_training().desired.with_budget(measurements=measurements or RestartMeasurements(**durations))
    return build_training().with_desired(desired)
