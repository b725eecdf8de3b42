"""When an incident closes, its outcome, and what is recorded of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pacekeeper_analysis.protocol.plan import Stop
from pacekeeper_analysis.protocol.reports import ReachedStage, StartStage
from pacekeeper_operator.api.incident import IncidentCause, IncidentClass, IncidentOutcome
from pacekeeper_operator.api.training_job import RemediationMode, Remedy
from pacekeeper_operator.decide.stragglers import verify
from pacekeeper_operator.decide.stragglers.verify import HELPED_RATIO, REMEDY_MEASURE_SECONDS
from pacekeeper_operator.state.desired_state import Incident, PastIncident
from pacekeeper_operator.state.job_metrics import JobMetrics
from pacekeeper_operator.state.observation import Observation
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
    }
    return build_incident(**(values | changes))


def with_open_incident(open_incident: Incident, observation: Observation | None = None) -> Observation:
    observation = observation or build_training()
    return observation.with_desired(observation.desired.with_incident(open_incident))


def evaluate_outcome(open_incident: Incident, observation: Observation | None = None) -> Incident:
    return verify.evaluate_incident(observation or build_training(), open_incident)


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


class TestLive:
    def test_a_live_incident_without_a_slowdown_recovers_at_once(self) -> None:
        closed = evaluate_outcome(build_incident(live=True))
        assert (closed.outcome, closed.recovered) == (IncidentOutcome.RECOVERED, NOW)

    def test_a_slowdown_without_a_remedy_is_ineffective(self) -> None:
        assert evaluate_outcome(build_straggler(remedy=None)).outcome is IncidentOutcome.INEFFECTIVE

    def test_a_later_round_ends_the_measurement(self) -> None:
        closed = evaluate_outcome(
            build_straggler(), replace(build_second_round(), metrics=JobMetrics(peer_slowdown=1.0))
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
            (2 * HELPED_RATIO, IncidentOutcome.INEFFECTIVE),
            (2.5, IncidentOutcome.INEFFECTIVE),
        ],
    )
    def test_the_remaining_slowdown_determines_the_outcome(self, after: float, outcome: IncidentOutcome) -> None:
        closed = evaluate_outcome(build_straggler(), replace(build_training(), metrics=JobMetrics(peer_slowdown=after)))
        assert (closed.outcome, closed.slowdown_after, closed.recovered) == (outcome, after, NOW)

    def test_a_job_that_is_faster_than_before_has_no_remaining_slowdown(self) -> None:
        closed = evaluate_outcome(build_straggler(), replace(build_training(), metrics=JobMetrics(peer_slowdown=0.9)))
        assert closed.slowdown_after == 1.0
        assert closed.measured_gain == pytest.approx(300.0), "half of ten minutes"

    def test_metrics_of_steps_before_the_remedy_are_ignored(self) -> None:
        observation = change_members(
            replace(build_training(), metrics=JobMetrics(peer_slowdown=1.0)), progress={"step": LAST_STEP + 47}
        )
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
        def find_outcome(steps: int, step_seconds: float = 0.5, decided: float = NOW - 5) -> IncidentOutcome | None:
            metrics = JobMetrics(peer_slowdown=1.0, steps=steps, step_seconds=step_seconds)
            observation = replace(build_training(), metrics=metrics)
            observation = observation.with_desired(observation.desired.with_plan(shares=(9, 9, 5, 9)))
            return evaluate_outcome(build_straggler(decided=decided), observation).outcome

        assert find_outcome(8) is IncidentOutcome.RECOVERED
        assert find_outcome(7) is None
        assert find_outcome(19, step_seconds=0.1) is None, "the time is too short"
        assert find_outcome(20, step_seconds=0.1) is IncidentOutcome.RECOVERED
        assert find_outcome(0) is None, "some rank has other shares still"
        assert find_outcome(32, decided=NOW) is None, "the metrics were compared with the previous plan"

    def test_shares_with_a_gain_within_noise_are_evaluated_by_the_step_time(self) -> None:
        """Among a thousand ranks, the slowest of a window is at 1.09 by chance."""
        small = build_straggler(slowdown_before=1.018, reference_seconds=0.1)

        def find_outcome(seconds: float, open_incident: Incident = small) -> IncidentOutcome | None:
            return evaluate_outcome(
                open_incident,
                replace(build_training(), metrics=JobMetrics(peer_slowdown=1.09, throughput=32 / seconds)),
            ).outcome

        assert find_outcome(0.1) is IncidentOutcome.RECOVERED
        assert find_outcome(0.1038) is IncidentOutcome.RECOVERED
        assert find_outcome(0.104) is IncidentOutcome.INEFFECTIVE, "longer by more than noise"
        assert (
            find_outcome(0.1, build_straggler(slowdown_before=1.08, reference_seconds=0.1))
            is IncidentOutcome.INEFFECTIVE
        )

    def test_a_mode_is_evaluated_by_samples_per_second(self) -> None:
        mode = build_straggler(remedy=str(Remedy.LOCAL_SGD), reference_seconds=0.1)

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
        assert observation.state.budget.restart_seconds == seconds
        assert observation.state.incidents.closed == ("i",)

    def test_the_wait_for_a_worker_is_not_part_of_the_restart_time(self) -> None:
        lost, observation = build_incident(cause=IncidentCause.WORKER_LOST), build_second_round()
        placed = observation.with_desired(observation.desired.with_placement(begun_at=lost.decided + 9.0))
        assert self.verify_incident(lost, placed).state.budget.restart_seconds == 4.0
        crash = build_incident(cause=IncidentCause.CRASH)
        assert self.verify_incident(crash, placed).state.budget.restart_seconds == 16.0, "no round was decided here"
        later = observation.with_desired(observation.desired.with_placement(begun_at=lost.decided + 99.0))
        assert self.verify_incident(lost, later).state.budget.restart_seconds is None, (
            "by a worker's clock it began before"
        )

    def test_a_spare_for_a_straggler_measures_a_restart_with_a_spare(self) -> None:
        """Before, the job trained slowly, so no time was lost completely."""
        observation = build_second_round()
        placed = observation.with_desired(observation.desired.with_placement(begun_at=build_incident().decided + 9.0))
        replaced = build_incident(cause=IncidentCause.STRAGGLER, remedy=str(Remedy.REPLACE_WORKER))
        budget = self.verify_incident(replaced, placed).state.budget
        assert (budget.lost_seconds, budget.restart_seconds, budget.spare_restart_seconds) == (0.0, None, 4.0)

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
        assert (observation.state.budget.lost_seconds, observation.state.budget.restart_seconds) == (0.0, None)

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
