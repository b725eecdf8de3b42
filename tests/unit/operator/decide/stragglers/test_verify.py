"""When an incident closes, its outcome, and what is recorded of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pacekeeper_analysis.protocol.plan import Stop
from pacekeeper_analysis.protocol.reports import ReachedStage, StartStage
from pacekeeper_analysis.stragglers.windows import StepTimeSample
from pacekeeper_operator.api.incident import IncidentCause, IncidentClass, IncidentOutcome, RemedyPrice
from pacekeeper_operator.api.training_job import DetectionSpec, RemediationMode, Remedy
from pacekeeper_operator.decide.stragglers import verify
from pacekeeper_operator.decide.stragglers.verify import REMEDY_MEASURE_SECONDS
from pacekeeper_operator.state.desired_state import Incident, PastIncident
from pacekeeper_operator.state.job_metrics import JobMetrics
from pacekeeper_operator.state.observation import Observation
from pacekeeper_operator.state.restart_estimates import RestartMeasurements
from testing.operators.observations import NOW, build_job, build_policy, build_training, change_members

LAST_STEP = 400
"""The step at which a live remedy was applied; at step 448 a window and a half has passed, and the job is at 500."""


def build_incident(**changes: Any) -> Incident:
    default = Incident(
        "i",
        IncidentCause.HANG,
        IncidentClass.UNKNOWN,
        1,
        "m",
        NOW - 20,
        NOW - 18,
        NOW - 17,
        applied=NOW - 17,
        last_step=LAST_STEP,
    )
    return replace(default, **changes)


def build_straggler(**changes: Any) -> Incident:
    """Build a live incident of a straggler whose ranks got other shares."""
    values: dict[str, Any] = {
        "cause": IncidentCause.STRAGGLER,
        "class_": IncidentClass.PERFORMANCE,
        "live": True,
        "remedy": str(Remedy.REBALANCE),
        "slowdown_before": 2.0,
        "reference_seconds": 0.1,
        "steps_before": StepTimeSample(0.2, 0.02, 32),
    }
    return build_incident(**(values | changes))


def with_open_incident(open_incident: Incident, observation: Observation | None = None) -> Observation:
    observation = observation or build_training()
    return observation.with_desired(observation.desired.with_incident(open_incident))


def evaluate_outcome(open_incident: Incident, observation: Observation | None = None) -> Incident:
    return verify.evaluate_incident(observation or build_training(), open_incident)


def measure_steps(step_seconds: float, steps: int = 32, **metrics: Any) -> Observation:
    """Return a job of 32 samples a step whose metrics cover `steps` steps of this time."""
    values = {"step_seconds": step_seconds, "throughput": 32 / step_seconds, "steps": steps}
    return replace(build_training(), metrics=JobMetrics(**(values | metrics)))


def build_second_round(observation: Observation | None = None, **heartbeat: Any) -> Observation:
    start = {"first_step_at": NOW - 4, "restored_step": 490}
    return change_members(change_members(observation or build_training(), round=2, start=start), **heartbeat)


class TestEnd:
    @pytest.mark.parametrize("live", [True, False])
    def test_the_end_of_the_job_closes_any_incident(self, live: bool) -> None:
        observation, open_incident = build_training(), build_incident(live=live, mode=RemediationMode.RECOMMEND)
        failed = observation.with_desired(
            observation.desired.with_lifecycle(failed_reason="ScriptFailed", completed_at=NOW)
        )
        assert evaluate_outcome(open_incident, failed).outcome is IncidentOutcome.FAILED
        complete = observation.with_desired(observation.desired.with_lifecycle(completed_at=NOW))
        assert evaluate_outcome(open_incident, complete).outcome is IncidentOutcome.SUPERSEDED
        assert (
            evaluate_outcome(open_incident, replace(observation, job=build_job(suspend=True))).outcome
            is IncidentOutcome.SUPERSEDED
        )
        assert evaluate_outcome(open_incident, observation).outcome is IncidentOutcome.RECOMMENDED


class TestRound:
    def test_an_incident_recovers_with_the_first_step_of_a_later_round(self) -> None:
        assert evaluate_outcome(build_incident()).outcome is None, "the round that it happened in"
        assert evaluate_outcome(build_incident(), build_second_round(start={"first_step_at": None})).outcome is None
        closed = evaluate_outcome(build_incident(last_step=500), build_second_round())
        assert (closed.outcome, closed.recovered, closed.steps_lost) == (IncidentOutcome.RECOVERED, NOW - 4, 10)

    def test_the_parts_of_the_restart_add_up_to_the_recovery_time(self) -> None:
        start = (ReachedStage(StartStage.LOAD, 2.0, 0), ReachedStage(StartStage.FIRST_STEP, 3.0, 0))
        closed = evaluate_outcome(
            build_incident(),
            build_second_round(start={"stages": start, "teardown_seconds": 1.0, "origin": "CHECKPOINT"}),
        )
        assert closed.recovered is not None
        assert closed.restart is not None
        assert closed.restart.restored_from == "Checkpoint"
        seconds = {part.name: part.seconds for part in closed.restart.parts}
        assert seconds == {"Teardown": 1.0, "Wait": 12.0, "Load": 2.0, "FirstStep": 1.0}
        assert sum(seconds.values()) == closed.recovered - closed.first_sign
        assert evaluate_outcome(build_incident(), build_second_round()).restart is None, "older workers"

    def test_the_recovery_is_not_before_the_decision(self) -> None:
        assert (
            evaluate_outcome(build_incident(), build_second_round(start={"first_step_at": NOW - 60})).recovered
            == NOW - 17
        )

    def test_lost_steps_are_counted_from_the_restored_step(self) -> None:
        assert (
            evaluate_outcome(build_incident(last_step=None), build_second_round(start={"restored_step": 0})).steps_lost
            == 0
        )
        assert (
            evaluate_outcome(build_incident(last_step=0), build_second_round(start={"restored_step": None})).steps_lost
            == 0
        )
        assert (
            evaluate_outcome(build_incident(last_step=7), build_second_round(start={"restored_step": None})).steps_lost
            == 7
        )
        assert (
            evaluate_outcome(build_incident(last_step=7), build_second_round(start={"restored_step": 9})).steps_lost
            == 0
        )


def build_exchange(**changes: Any) -> Incident:
    """Build the incident of a straggler whose worker is exchanged: 13 s from the decision to the first step."""
    values: dict[str, Any] = {
        "live": False,
        "remedy": str(Remedy.REPLACE_WORKER),
        "remedies": (RemedyPrice("ReplaceWorker", 60.0, 5.0, chosen=True), RemedyPrice("Rebalance", 30.0, 0.0)),
        "predicted_after": 1.0,
        "predicted_gain": 60.0,
    }
    return build_straggler(**(values | changes))


class TestCost:
    @pytest.mark.parametrize(
        ("restored", "cost"),
        [(490, 4.0 + 9.0 - 9.1), (400, 13.0 - 0.1), (380, 13.0 + 1.9)],
        ids=["", "none", "repeated"],
    )
    def test_the_cost_is_the_time_without_its_useful_steps(self, restored: int, cost: float) -> None:
        """From the decision to the first step. Until the checkpoint, the job trains on."""
        observation = build_second_round(start={"restored_step": restored})
        training = evaluate_outcome(build_exchange(), observation)
        assert training.measured_cost == pytest.approx(cost)
        assert training.predicted_cost == 5.0

    def test_a_standstill_costs_its_time_and_the_repeated_steps(self) -> None:
        crash = build_incident(cause=IncidentCause.CRASH, last_step=500)
        closed = evaluate_outcome(crash, build_second_round(measure_steps(0.2)))
        assert closed.measured_cost == pytest.approx(16.0 + 9 * 0.2), "launchers restart before the decision"
        assert evaluate_outcome(build_incident(last_step=None), build_second_round()).measured_cost == pytest.approx(
            12.9
        )
        assert closed.predicted_cost is None


class TestExchange:
    def build_training_again(self, step_seconds: float = 0.1, **heartbeat: Any) -> tuple[Incident, Observation]:
        observation = build_second_round(measure_steps(step_seconds), progress={"steps_in_round": 10})
        incident = evaluate_outcome(build_exchange(), observation)
        return incident, change_members(observation, **({"progress": {"steps_in_round": 32}} | heartbeat))

    def test_the_first_step_ends_the_recovery_and_the_next_ones_are_measured(self) -> None:
        incident, observation = self.build_training_again()
        assert (incident.outcome, incident.live, incident.recovered, incident.steps_lost) == (None, True, NOW - 4, 0)
        young = change_members(observation, progress={"steps_in_round": 31})
        assert evaluate_outcome(incident, young) == incident
        closed = evaluate_outcome(incident, observation)
        assert (closed.outcome, closed.recovered, closed.slowdown_after) == (IncidentOutcome.RECOVERED, NOW - 4, 1.0)
        assert closed.measured_gain == pytest.approx(60.0)
        assert closed.measured_cost == incident.measured_cost

    def test_a_rank_that_is_slow_on_the_spare_too_shows(self) -> None:
        incident, observation = self.build_training_again(0.2)
        assert evaluate_outcome(incident, observation).outcome is IncidentOutcome.INEFFECTIVE

    def test_a_later_round_or_a_long_silence_ends_the_measurement(self) -> None:
        incident, observation = self.build_training_again(start={"first_step_at": NOW - 1})
        closed = evaluate_outcome(incident, observation)
        assert (closed.outcome, closed.measured_gain) == (IncidentOutcome.RECOVERED, None)
        incident, observation = self.build_training_again(start={"first_step_at": None})
        assert evaluate_outcome(incident, observation).outcome is None, "a young operator lacks reports"
        incident, observation = self.build_training_again()
        unmeasured = replace(observation, metrics=JobMetrics())
        assert evaluate_outcome(incident, unmeasured).outcome is None
        late = replace(unmeasured, now=NOW + REMEDY_MEASURE_SECONDS)
        assert evaluate_outcome(incident, late).outcome is IncidentOutcome.RECOVERED


class TestLive:
    def test_a_live_incident_without_a_slowdown_recovers_at_once(self) -> None:
        closed = evaluate_outcome(build_incident(live=True))
        assert (closed.outcome, closed.recovered) == (IncidentOutcome.RECOVERED, NOW)

    def test_a_slowdown_without_a_remedy_is_ineffective(self) -> None:
        assert evaluate_outcome(build_straggler(remedy=None)).outcome is IncidentOutcome.INEFFECTIVE

    def test_a_later_round_ends_the_measurement(self) -> None:
        closed = evaluate_outcome(
            build_straggler(), replace(build_second_round(), metrics=JobMetrics(step_seconds=0.1))
        )
        assert (closed.outcome, closed.recovered, closed.steps_lost) == (IncidentOutcome.SUPERSEDED, NOW, 0)

    def test_ranks_that_refuse_the_remedy_end_it_with_their_reason(self) -> None:
        closed = evaluate_outcome(
            build_straggler(), change_members(build_training(), training={"refused": "shares sum to 33"})
        )
        assert closed.outcome is IncidentOutcome.INEFFECTIVE
        assert closed.evidence[-1].endswith("shares sum to 33")

    @pytest.mark.parametrize(
        ("after", "outcome"),
        [
            (1.05, IncidentOutcome.RECOVERED),
            (1.1, IncidentOutcome.MITIGATED),
            (1.5, IncidentOutcome.MITIGATED),
            (1.97, IncidentOutcome.MITIGATED),
            (1.985, IncidentOutcome.INEFFECTIVE),
            (2.5, IncidentOutcome.INEFFECTIVE),
        ],
    )
    def test_the_remaining_slowdown_determines_the_outcome(self, after: float, outcome: IncidentOutcome) -> None:
        closed = evaluate_outcome(build_straggler(), measure_steps(0.1 * after))
        assert (closed.outcome, closed.recovered) == (outcome, NOW)
        assert closed.slowdown_after == pytest.approx(after)

    def test_a_job_that_is_faster_than_before_has_no_remaining_slowdown(self) -> None:
        closed = evaluate_outcome(build_straggler(), measure_steps(0.09))
        assert closed.slowdown_after == 1.0
        assert closed.measured_gain == pytest.approx(300.0), "half of ten minutes"
        predicted = build_straggler(predicted_after=1.25, predicted_gain=90.0)
        assert evaluate_outcome(predicted, measure_steps(0.125)).measured_gain == pytest.approx(90.0), (
            "the same horizon"
        )
        assert evaluate_outcome(predicted, measure_steps(0.1)).measured_gain == pytest.approx(150.0)
        assert closed.measured_cost == 0.0

    def test_metrics_of_steps_before_the_remedy_are_ignored(self) -> None:
        observation = change_members(measure_steps(0.1), progress={"step": LAST_STEP + 47})
        assert evaluate_outcome(build_straggler(), observation).outcome is None
        assert (
            evaluate_outcome(build_straggler(), change_members(observation, progress={"step": LAST_STEP + 48})).outcome
            is IncidentOutcome.RECOVERED
        )

    def test_an_unmeasured_remedy_is_ineffective_after_a_timeout(self) -> None:
        unmeasured = replace(build_training(), metrics=JobMetrics())
        assert evaluate_outcome(build_straggler(decided=NOW - REMEDY_MEASURE_SECONDS + 1), unmeasured).outcome is None
        assert (
            evaluate_outcome(build_straggler(decided=NOW - REMEDY_MEASURE_SECONDS - 1), unmeasured).outcome
            is IncidentOutcome.INEFFECTIVE
        )
        slow_steps = replace(unmeasured, metrics=JobMetrics(step_seconds=10.0))
        slow_steps = slow_steps.with_desired(slow_steps.desired.with_plan(shares=(9, 9, 5, 9)))
        assert evaluate_outcome(build_straggler(decided=NOW - 230), slow_steps).outcome is None, (
            "windows of 8 have not settled twice"
        )
        assert evaluate_outcome(build_straggler(decided=NOW - 250), slow_steps).outcome is IncidentOutcome.INEFFECTIVE

    def test_the_timeout_does_not_apply_while_some_ranks_do_not_report(self) -> None:
        unreported = replace(build_training(), metrics=JobMetrics(unreported_members=("j-w1-0",)))
        assert evaluate_outcome(build_straggler(decided=NOW - 10_000), unreported).outcome is None
        unavailable = replace(build_training(), metrics=JobMetrics(prometheus_error="unavailable"))
        assert (
            evaluate_outcome(build_straggler(decided=NOW - 10_000), unavailable).outcome is IncidentOutcome.INEFFECTIVE
        )

    def test_shares_are_evaluated_by_metrics_measured_under_them(self) -> None:
        def find_outcome(
            steps: int, step_seconds: float = 0.5, decided: float = NOW - 5, last_step: int = 480, after: float = 1.0
        ) -> IncidentOutcome | None:
            """Return the outcome 20 steps after the decision, or `500 - last_step`."""
            sample = StepTimeSample(2 * step_seconds / after, 0.02, 10)
            observation = measure_steps(step_seconds, steps=steps)
            observation = observation.with_desired(observation.desired.with_plan(shares=(9, 9, 5, 9)))
            return evaluate_outcome(
                build_straggler(decided=decided, last_step=last_step, steps_before=sample), observation
            ).outcome

        assert find_outcome(8) is IncidentOutcome.RECOVERED
        assert find_outcome(7, last_step=490) is None
        assert find_outcome(19, step_seconds=0.1) is None, "the time is too short"
        assert find_outcome(20, step_seconds=0.1) is IncidentOutcome.RECOVERED
        assert find_outcome(0) is None, "some rank has other shares still"
        assert find_outcome(32, decided=NOW, last_step=490) is None, "the metrics were compared with the previous plan"
        assert find_outcome(8, after=2.0, last_step=490) is None, "no gain shows, but a window is not complete"
        assert find_outcome(10, after=2.0) is IncidentOutcome.INEFFECTIVE

    @pytest.mark.parametrize(
        ("deviation", "after_seconds", "outcome"),
        [
            (0.05, 0.539, IncidentOutcome.RECOVERED),
            (0.1, 0.539, IncidentOutcome.RECOVERED),
            (0.05, 0.6, IncidentOutcome.INEFFECTIVE),
            (0.02, 0.57, IncidentOutcome.RECOVERED),
        ],
    )
    def test_shares_of_the_recorded_demo_have_helped(
        self, deviation: float, after_seconds: float, outcome: IncidentOutcome
    ) -> None:
        """Steps went from 610 to 539 ms, while S against the peers, which had more samples then, hardly moved."""
        incident = build_straggler(
            slowdown_before=1.307,
            reference_seconds=0.610 / 1.307,
            predicted_after=1.307 * 0.91,
            predicted_gain=45.6,
            steps_before=StepTimeSample(0.610, deviation, 8),
            last_step=480,
        )
        observation = measure_steps(after_seconds, steps=9, peer_slowdown=1.283)
        observation = replace(observation, job=build_job(detection=DetectionSpec(1.25, 20)))
        observation = observation.with_desired(observation.desired.with_plan(shares=(9, 9, 5, 9)))
        closed = evaluate_outcome(incident, observation)
        assert closed.outcome is outcome
        if after_seconds == 0.539:
            assert closed.slowdown_after == pytest.approx(1.155, rel=0.01)
            assert closed.measured_gain == pytest.approx(45.6 * 1.3, rel=0.05), "9 % predicted, 11.6 % measured"

    def test_a_gain_within_noise_must_only_not_have_become_a_loss(self) -> None:
        """With noise of 2 %, the means of 32 steps differ by 0.5 % by chance."""
        small = build_straggler(slowdown_before=1.008, steps_before=StepTimeSample(0.1, 0.02, 32))

        def find_outcome(seconds: float, open_incident: Incident = small) -> IncidentOutcome | None:
            return evaluate_outcome(open_incident, measure_steps(seconds, peer_slowdown=1.09)).outcome

        assert find_outcome(0.0995) is IncidentOutcome.RECOVERED
        assert find_outcome(0.1009) is IncidentOutcome.RECOVERED
        assert find_outcome(0.102) is IncidentOutcome.INEFFECTIVE, "longer by more than chance"
        larger = replace(small, slowdown_before=1.08)
        assert find_outcome(0.0995, larger) is IncidentOutcome.INEFFECTIVE, "more was predicted than chance is"

    def test_a_mode_is_evaluated_by_samples_per_second(self) -> None:
        mode = build_straggler(remedy=str(Remedy.LOCAL_SGD), steps_before=None)

        def find_outcome(open_incident: Incident = mode, steps: int = 500, **metrics: Any) -> IncidentOutcome | None:
            observation = replace(build_training(step=steps), metrics=JobMetrics(peer_slowdown=1.0, **metrics))
            return evaluate_outcome(open_incident, change_members(observation, progress={"step": 500})).outcome

        assert find_outcome(throughput=320.0) is IncidentOutcome.RECOVERED
        assert find_outcome(throughput=160.0) is IncidentOutcome.INEFFECTIVE
        assert find_outcome() is None
        assert find_outcome(replace(mode, reference_seconds=None), throughput=320.0) is None
        assert find_outcome(steps=3, throughput=320.0) is None, "the round is too young"


class TestRecorded:
    def verify_incident(self, open_incident: Incident, observation: Observation) -> Observation:
        observation = with_open_incident(open_incident, observation)
        return observation.with_desired(verify.verify_incidents(observation, build_policy()))

    def test_an_open_incident_leaves_the_desired_state_unchanged(self) -> None:
        observation = with_open_incident(build_incident())
        assert verify.verify_incidents(observation, build_policy()) is observation.desired

    @pytest.mark.parametrize(
        ("cause", "seconds"),
        [(IncidentCause.HANG, 13.0), (IncidentCause.CRASH, 16.0), (IncidentCause.WORKER_LOST, 13.0)],
    )
    def test_a_standstill_counts_as_lost_time_and_measures_a_restart(
        self, cause: IncidentCause, seconds: float
    ) -> None:
        """Launchers restart crashed ranks by themselves, before the operator decides."""
        observation = self.verify_incident(build_incident(cause=cause), build_second_round())
        assert observation.state.budget.lost_seconds == 16.0
        assert observation.state.budget.measurements.same_workers == (seconds,)
        assert observation.state.incidents.closed == ("i",)

    def test_the_wait_for_a_worker_is_not_part_of_the_restart_time(self) -> None:
        lost, observation = build_incident(cause=IncidentCause.WORKER_LOST), build_second_round()
        placed = observation.with_desired(observation.desired.with_placement(begun_at=lost.decided + 9.0))
        assert self.verify_incident(lost, placed).state.budget.measurements.same_workers == (4.0,)
        crash = build_incident(cause=IncidentCause.CRASH)
        assert self.verify_incident(crash, placed).state.budget.measurements.same_workers == (16.0,), (
            "no round was decided here"
        )
        later = observation.with_desired(observation.desired.with_placement(begun_at=lost.decided + 99.0))
        assert self.verify_incident(lost, later).state.budget.measurements.same_workers == (), (
            "by a worker's clock it began before"
        )

    def test_rounds_that_failed_in_between_are_not_the_cost_of_one_restart(self) -> None:
        """The storage was away, for example: the next decision would expect the same."""
        crash = build_incident(cause=IncidentCause.CRASH)
        observation = change_members(build_second_round(), round=3)
        recovered = self.verify_incident(crash, observation)
        assert recovered.state.incidents.closed == ("i",)
        assert recovered.state.budget.lost_seconds == 16.0
        assert recovered.state.budget.measurements == RestartMeasurements()
        assert evaluate_outcome(crash, observation).measured_cost is None

    def test_an_exchange_of_a_straggler_is_measured_as_one(self) -> None:
        """Before, the job trained slowly, so no time was lost completely."""
        observation = build_second_round()
        replaced = build_exchange()
        placed = observation.with_desired(observation.desired.with_placement(begun_at=replaced.decided + 9.0))
        budget = self.verify_incident(replaced, placed).state.budget
        assert budget.lost_seconds == 0.0
        measurements = budget.measurements
        assert (measurements.same_workers, measurements.exchange, measurements.replacement) == ((), (4.0,), ())
        assert measurements.checkpoint_wait_steps == (45.0,), "9 s of steps of 0.2 s"

    def test_a_worker_that_is_gone_is_measured_as_a_replacement(self) -> None:
        lost = build_incident(cause=IncidentCause.WORKER_LOST, remedy=str(Remedy.REPLACE_WORKER))
        measurements = self.verify_incident(lost, build_second_round()).state.budget.measurements
        assert (measurements.same_workers, measurements.exchange, measurements.replacement) == ((), (), (13.0,))

    @pytest.mark.parametrize(
        "open_incident",
        [
            build_incident(live=True),
            build_incident(mode=RemediationMode.RECOMMEND),
        ],
        ids=["live", "recommended"],
    )
    def test_live_and_recommended_incidents_count_no_lost_time(self, open_incident: Incident) -> None:
        observation = self.verify_incident(open_incident, build_second_round())
        assert not observation.state.incidents.open
        budget = observation.state.budget
        assert (budget.lost_seconds, budget.measurements.same_workers) == (0.0, ())

    def test_recommended_incidents_are_recorded_separately(self) -> None:
        incidents = self.verify_incident(
            build_incident(mode=RemediationMode.RECOMMEND), build_training()
        ).state.incidents
        assert (incidents.recommended, incidents.closed) == (("i",), ())

    def test_past_incidents_are_recorded_within_the_window(self) -> None:
        old, recent = (PastIncident(IncidentCause.HANG, NOW - age, 5.0) for age in (3700, 3500))
        observation = build_second_round()
        observation = observation.with_desired(observation.desired.with_incidents(past=(old, recent)))
        first, second = self.verify_incident(
            build_incident(rank=2, worker="j-w2-0", node="node-2"), observation
        ).state.incidents.past
        assert first == recent
        assert (second.at, second.seconds, second.rank, second.worker) == (NOW - 18, 16.0, 2, "j-w2-0")

    def test_a_failed_job_counts_no_more_lost_time(self) -> None:
        observation = build_training()
        failed = observation.with_desired(
            observation.desired.with_plan(stop=Stop.FINISH).with_lifecycle(failed_reason="ScriptFailed")
        )
        assert self.verify_incident(build_incident(), failed).state.budget.lost_seconds == 0.0
