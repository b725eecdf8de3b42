"""When an incident is over, how it ended, and what is remembered of it."""

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
"""When a live remedy was taken; at step 448 a window and a half has passed, and the world is at 500."""


def incident(**changes: Any) -> Incident:
    known = Incident(
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
    return replace(known, **changes)


def slow(**changes: Any) -> Incident:
    """A straggler whose ranks got other shares, live."""
    values: dict[str, Any] = {
        "cause": IncidentCause.STRAGGLER,
        "class_": IncidentClass.PERFORMANCE,
        "live": True,
        "remedy": str(Remedy.REBALANCE),
        "slowdown_before": 2.0,
    }
    return incident(**(values | changes))


def world_with(open_: Incident, world: Observation | None = None) -> Observation:
    world = world or build_training()
    return world.with_desired(world.desired.with_incident(open_))


def judged(open_: Incident, world: Observation | None = None) -> Incident:
    return verify.evaluate_incident(world or build_training(), open_)


def second_round(world: Observation | None = None, **heartbeat: Any) -> Observation:
    start = {"first_step_at": NOW - 4, "restored_step": 490}
    return change_members(change_members(world or build_training(), round=2, start=start), **heartbeat)


class TestTheJobsEnd:
    @pytest.mark.parametrize("live", [True, False])
    def test_goes_before_all_else(self, live: bool) -> None:
        world, open_ = build_training(), incident(live=live, mode=RemediationMode.RECOMMEND)
        failed = world.with_desired(world.desired.with_lifecycle(failed_reason="ScriptFailed", completed_at=NOW))
        assert judged(open_, failed).outcome is IncidentOutcome.FAILED
        complete = world.with_desired(world.desired.with_lifecycle(completed_at=NOW))
        assert judged(open_, complete).outcome is IncidentOutcome.SUPERSEDED
        assert judged(open_, replace(world, job=build_job(suspend=True))).outcome is IncidentOutcome.SUPERSEDED
        assert judged(open_, world).outcome is IncidentOutcome.RECOMMENDED


class TestRound:
    def test_it_is_over_with_the_first_step_of_a_later_round(self) -> None:
        assert judged(incident()).outcome is None, "the round that it happened in"
        assert judged(incident(), second_round(start={"first_step_at": None})).outcome is None
        over = judged(incident(last_step=500), second_round())
        assert (over.outcome, over.recovered, over.steps_lost) == (IncidentOutcome.RECOVERED, NOW - 4, 10)

    def test_what_its_time_went_to_adds_up_to_it(self) -> None:
        start = (ReachedStage(StartStage.LOAD, 2.0, 0), ReachedStage(StartStage.FIRST_STEP, 3.0, 0))
        over = judged(
            incident(), second_round(start={"stages": start, "teardown_seconds": 1.0, "origin": "CHECKPOINT"})
        )
        assert over.recovered is not None
        assert over.restart is not None
        assert over.restart.restored_from == "Checkpoint"
        seconds = {part.name: part.seconds for part in over.restart.parts}
        assert seconds == {"Teardown": 1.0, "Wait": 12.0, "Load": 2.0, "FirstStep": 1.0}
        assert sum(seconds.values()) == over.recovered - over.first_sign
        assert judged(incident(), second_round()).restart is None, "older workers"

    def test_a_first_step_before_the_decision_recovers_nothing_earlier(self) -> None:
        assert judged(incident(), second_round(start={"first_step_at": NOW - 60})).recovered == NOW - 17

    def test_steps_that_were_lost(self) -> None:
        assert judged(incident(last_step=None), second_round(start={"restored_step": 0})).steps_lost == 0
        assert judged(incident(last_step=0), second_round(start={"restored_step": None})).steps_lost == 0
        assert judged(incident(last_step=7), second_round(start={"restored_step": None})).steps_lost == 7
        assert judged(incident(last_step=7), second_round(start={"restored_step": 9})).steps_lost == 0


class TestLive:
    def test_what_holds_nobody_up_is_over_at_once(self) -> None:
        over = judged(incident(live=True))
        assert (over.outcome, over.recovered) == (IncidentOutcome.RECOVERED, NOW)

    def test_trouble_without_a_remedy_is_not_mended(self) -> None:
        assert judged(slow(remedy=None)).outcome is IncidentOutcome.INEFFECTIVE

    def test_a_later_round_ends_the_measurement(self) -> None:
        over = judged(slow(), replace(second_round(), metrics=JobMetrics(peer_slowdown=1.0)))
        assert (over.outcome, over.recovered, over.steps_lost) == (IncidentOutcome.SUPERSEDED, NOW, 0)

    def test_ranks_that_do_not_follow_it_end_it_and_say_why(self) -> None:
        over = judged(slow(), change_members(build_training(), training={"refused": "shares sum to 33"}))
        assert over.outcome is IncidentOutcome.INEFFECTIVE
        assert over.evidence[-1].endswith("shares sum to 33")

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
    def test_by_what_is_left_of_the_slowdown(self, after: float, outcome: IncidentOutcome) -> None:
        over = judged(slow(), replace(build_training(), metrics=JobMetrics(peer_slowdown=after)))
        assert (over.outcome, over.slowdown_after, over.recovered) == (outcome, after, NOW)

    def test_a_job_that_is_faster_than_ever_has_no_slowdown_left(self) -> None:
        over = judged(slow(), replace(build_training(), metrics=JobMetrics(peer_slowdown=0.9)))
        assert over.slowdown_after == 1.0
        assert over.measured_gain == pytest.approx(300.0), "half of ten minutes"

    def test_figures_of_steps_before_it_say_nothing(self) -> None:
        world = change_members(
            replace(build_training(), metrics=JobMetrics(peer_slowdown=1.0)), progress={"step": LAST_STEP + 47}
        )
        assert judged(slow(), world).outcome is None
        assert (
            judged(slow(), change_members(world, progress={"step": LAST_STEP + 48})).outcome
            is IncidentOutcome.RECOVERED
        )

    def test_what_never_shows_has_not_helped(self) -> None:
        unmeasured = replace(build_training(), metrics=JobMetrics())
        assert judged(slow(decided=NOW - REMEDY_MEASURE_SECONDS + 1), unmeasured).outcome is None
        assert judged(slow(decided=NOW - REMEDY_MEASURE_SECONDS - 1), unmeasured).outcome is IncidentOutcome.INEFFECTIVE
        slow_steps = replace(unmeasured, metrics=JobMetrics(step_seconds=10.0))
        assert judged(slow(decided=NOW - 230), slow_steps).outcome is None, "windows of 8 have not settled twice"
        assert judged(slow(decided=NOW - 250), slow_steps).outcome is IncidentOutcome.INEFFECTIVE

    def test_but_not_while_some_ranks_tell_nothing(self) -> None:
        untold = replace(build_training(), metrics=JobMetrics(unreported_members=("j-w1-0",)))
        assert judged(slow(decided=NOW - 10_000), untold).outcome is None
        away = replace(build_training(), metrics=JobMetrics(prometheus_error="away"))
        assert judged(slow(decided=NOW - 10_000), away).outcome is IncidentOutcome.INEFFECTIVE

    def test_shares_are_judged_by_figures_that_are_of_them(self) -> None:
        def outcome(steps: int, step_seconds: float = 0.5, decided: float = NOW - 5) -> IncidentOutcome | None:
            metrics = JobMetrics(peer_slowdown=1.0, steps=steps, step_seconds=step_seconds)
            world = replace(build_training(), metrics=metrics)
            world = world.with_desired(world.desired.with_plan(shares=(9, 9, 5, 9)))
            return judged(slow(decided=decided), world).outcome

        assert outcome(8) is IncidentOutcome.RECOVERED
        assert outcome(7) is None
        assert outcome(19, step_seconds=0.1) is None, "not for long enough"
        assert outcome(20, step_seconds=0.1) is IncidentOutcome.RECOVERED
        assert outcome(0) is None, "some rank has other shares still"
        assert outcome(32, decided=NOW) is None, "they were held against the plan before"

    def test_shares_that_win_no_more_than_noise_are_judged_by_the_steps(self) -> None:
        """Among a thousand ranks the slowest of a window is at 1.09 by luck."""
        little = slow(slowdown_before=1.018, reference_seconds=0.1)

        def outcome(seconds: float, of: Incident = little) -> IncidentOutcome | None:
            return judged(
                of, replace(build_training(), metrics=JobMetrics(peer_slowdown=1.09, throughput=32 / seconds))
            ).outcome

        assert outcome(0.1) is IncidentOutcome.RECOVERED
        assert outcome(0.1038) is IncidentOutcome.RECOVERED
        assert outcome(0.104) is IncidentOutcome.INEFFECTIVE, "longer by more than noise"
        assert outcome(0.1, slow(slowdown_before=1.08, reference_seconds=0.1)) is IncidentOutcome.INEFFECTIVE

    def test_a_mode_is_judged_by_the_samples_a_second(self) -> None:
        mode = slow(remedy=str(Remedy.LOCAL_SGD), reference_seconds=0.1)

        def outcome(of: Incident = mode, steps: int = 500, **metrics: Any) -> IncidentOutcome | None:
            world = replace(build_training(step=steps), metrics=JobMetrics(peer_slowdown=1.0, **metrics))
            return judged(of, change_members(world, progress={"step": 500})).outcome

        assert outcome(throughput=320.0) is IncidentOutcome.RECOVERED
        assert outcome(throughput=160.0) is IncidentOutcome.INEFFECTIVE
        assert outcome() is None
        assert outcome(replace(mode, reference_seconds=None), throughput=320.0) is None
        assert outcome(steps=3, throughput=320.0) is None, "the round is too young"


class TestRemembered:
    def closed(self, open_: Incident, world: Observation) -> Observation:
        world = world_with(open_, world)
        return world.with_desired(verify.verify_incidents(world, build_policy()))

    def test_what_is_not_over_changes_nothing(self) -> None:
        world = world_with(incident())
        assert verify.verify_incidents(world, build_policy()) is world.desired

    @pytest.mark.parametrize(
        ("cause", "seconds"),
        [(IncidentCause.HANG, 13.0), (IncidentCause.CRASH, 16.0), (IncidentCause.WORKER_LOST, 13.0)],
    )
    def test_a_standstill_is_lost_time_and_shows_what_a_round_takes(self, cause: IncidentCause, seconds: float) -> None:
        """Launchers restart crashed ranks by themselves, before anything is decided here."""
        world = self.closed(incident(cause=cause), second_round())
        assert world.state.budget.lost_seconds == 16.0
        assert world.state.budget.restart_seconds == seconds
        assert world.state.incidents.closed == ("i",)

    def test_the_wait_for_a_worker_is_no_part_of_what_a_round_takes(self) -> None:
        lost, world = incident(cause=IncidentCause.WORKER_LOST), second_round()
        begun = world.with_desired(world.desired.with_placement(begun_at=lost.decided + 9.0))
        assert self.closed(lost, begun).state.budget.restart_seconds == 4.0
        crash = incident(cause=IncidentCause.CRASH)
        assert self.closed(crash, begun).state.budget.restart_seconds == 16.0, "no round was decided here"
        ahead = world.with_desired(world.desired.with_placement(begun_at=lost.decided + 99.0))
        assert self.closed(lost, ahead).state.budget.restart_seconds is None, "by a worker's clock it began before"

    def test_a_spare_for_a_straggler_shows_what_a_round_with_a_spare_takes(self) -> None:
        """Before, the job trained, if slowly: no time was lost altogether."""
        world = second_round()
        begun = world.with_desired(world.desired.with_placement(begun_at=incident().decided + 9.0))
        exchanged = incident(cause=IncidentCause.STRAGGLER, remedy=str(Remedy.REPLACE_WORKER))
        budget = self.closed(exchanged, begun).state.budget
        assert (budget.lost_seconds, budget.restart_seconds, budget.spare_restart_seconds) == (0.0, None, 4.0)

    @pytest.mark.parametrize(
        "open_",
        [
            incident(live=True),
            incident(mode=RemediationMode.RECOMMEND),
        ],
        ids=["live", "recommended"],
    )
    def test_all_else_is_not(self, open_: Incident) -> None:
        world = self.closed(open_, second_round())
        assert not world.state.incidents.open
        assert (world.state.budget.lost_seconds, world.state.budget.restart_seconds) == (0.0, None)

    def test_what_was_only_recommended_stands_apart(self) -> None:
        incidents = self.closed(incident(mode=RemediationMode.RECOMMEND), build_training()).state.incidents
        assert (incidents.recommended, incidents.closed) == (("i",), ())

    def test_the_past_goes_back_as_far_as_the_window(self) -> None:
        old, recent = (PastIncident(IncidentCause.HANG, NOW - age, 5.0) for age in (3700, 3500))
        world = second_round()
        world = world.with_desired(world.desired.with_incidents(past=(old, recent)))
        first, second = self.closed(incident(rank=2, worker="j-w2-0", node="node-2"), world).state.incidents.past
        assert first == recent
        assert (second.at, second.seconds, second.rank, second.worker) == (NOW - 18, 16.0, 2, "j-w2-0")

    def test_a_failed_job_loses_nothing_more(self) -> None:
        world = build_training()
        failed = world.with_desired(
            world.desired.with_plan(stop=Stop.FINISH).with_lifecycle(failed_reason="ScriptFailed")
        )
        assert self.closed(incident(), failed).state.budget.lost_seconds == 0.0
