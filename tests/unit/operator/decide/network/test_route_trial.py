"""Other ways are measured: kept where they are better, put back where they have made it worse."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from pacekeeper_analysis.protocol.plan import EvidencePart, PlannedPath, SyncMode
from pacekeeper_operator.api.fabric import PathControl
from pacekeeper_operator.api.incident import IncidentCause, IncidentClass, IncidentOutcome
from pacekeeper_operator.api.training_job import JobPhase, JobStatus, Remedy
from pacekeeper_operator.decide.evaluate import PassResult, evaluate_job
from pacekeeper_operator.decide.lifecycle.status import build_job_status
from pacekeeper_operator.decide.network import paths, route_trial
from pacekeeper_operator.decide.network.route_trial import (
    ROUTE_EVIDENCE_PERIOD_SECONDS,
    ROUTE_TRIAL_MEASURE_SECONDS,
    THROUGHPUT_WAIT_SECONDS,
)
from pacekeeper_operator.decide.network.slow_communication import THROUGHPUT_READY_SECONDS
from pacekeeper_operator.services import incidents
from pacekeeper_operator.state import state_codec
from pacekeeper_operator.state.desired_state import FailedRoute, Incident, RouteChange, RouteTrial
from pacekeeper_operator.state.job_metrics import JobMetrics
from pacekeeper_operator.state.network import RankPair
from pacekeeper_operator.state.observation import Observation
from pacekeeper_operator.state.routes import TRIED_ROUTE_TTL_SECONDS, get_planned_routes
from testing.network.flows import (
    ALL_ON_FIRST_SPINE,
    answer_request,
    build_connection_answers,
    build_network_state,
    build_observation,
    build_paths,
)
from testing.operators.observations import NOW, build_policy, change_members

NEW = {**ALL_ON_FIRST_SPINE, (1, 0): 1}
CHANGE = RouteChange(1, 0, "s1", 0, "s2", 0)
INCIDENT = Incident(
    "i",
    IncidentCause.SLOW_COMMUNICATION,
    IncidentClass.PERFORMANCE,
    1,
    "m",
    NOW - 30,
    NOW - 20,
    NOW - 10,
    remedy=Remedy.PLAN_TRAFFIC,
    applied=NOW - 10,
    last_step=400,
    slowdown_before=2.0,
    predicted_after=1.0,
)
BEFORE = 0.2
"""Seconds of a step."""


def tried(
    step_seconds: float = 0.1,
    *,
    pace: float | None = None,
    first_step_at: float | None = NOW - 5,
    ways: Mapping[RankPair, int] = NEW,
    incident: Incident = INCIDENT,
    changes: tuple[RouteChange, ...] | None = None,
    **trial: Any,
) -> Observation:
    """The second round, by other ways; `pace`: bytes a second of what goes by them before."""
    found = build_observation(build_network_state(ways), ways)
    changed = (replace(CHANGE, bytes_per_second=pace),) if changes is None else changes
    open_ = RouteTrial("i", 2, BEFORE, changes=changed, **trial)
    draft = found.desired.with_plan(membership=2, round=2).with_incident(incident).with_adaptation(route_trial=open_)
    found = replace(found.with_desired(draft), metrics=JobMetrics(step_seconds=step_seconds))
    return change_members(
        found, membership=2, round=2, start={"first_step_at": first_step_at}, progress={"steps_in_round": 100}
    )


def begun(*args: Any, **changes: Any) -> Observation:
    """The first step by them has been seen, and the round is too young to be measured."""
    found, _ = goes_on(change_members(tried(*args, **changes), progress={"steps_in_round": 3}))
    return found


def goes_on(found: Observation) -> tuple[Observation, PassResult]:
    thought = evaluate_job(found, build_policy())
    assert not thought.failed_steps
    return found.with_desired(thought.desired), thought


def incident(found: Observation, name: str = "i") -> Incident:
    known = found.state.incidents.find(name)
    assert known is not None
    return known


class TestMeasured:
    def test_the_round_is_over_with_its_first_step_and_what_it_took_is_its_price(self) -> None:
        found = begun()
        now = incident(found)
        assert (now.outcome, now.live, now.recovered) == (None, True, NOW - 5)
        assert (found.state.budget.restart_seconds, found.state.budget.lost_seconds) == (5.0, 5.0)
        assert found.state.adaptation.route_trial is not None
        assert found.state.adaptation.route_trial.since == NOW - 5
        assert build_job_status(found, build_policy(), JobStatus()).phase is JobPhase.RUNNING, "meanwhile it trains"

    def test_before_the_first_step_nothing_is_known(self) -> None:
        found, _ = goes_on(tried(first_step_at=None))
        assert (incident(found).outcome, incident(found).live) == (None, False)

    def test_steps_that_have_become_shorter_keep_the_ways(self) -> None:
        found, _ = goes_on(tried(0.1))
        now = incident(found)
        assert (now.outcome, now.slowdown_before, now.slowdown_after) == (IncidentOutcome.RECOVERED, 2.0, 1.0)
        assert now.measured_gain == pytest.approx(300.0)
        assert now.remedy_result == "steps took 0.2 s before, and 0.1 s now: kept"
        assert found.state.adaptation.route_trial is None
        assert found.state.adaptation.failed_routes == ()
        assert get_planned_routes(found.plan)[1, 0] == 1
        assert found.state.incidents.past[-1].cause is IncidentCause.SLOW_COMMUNICATION

    def test_what_is_left_of_the_slowdown_says_how_well(self) -> None:
        found, _ = goes_on(tried(0.15))
        assert incident(found).outcome is IncidentOutcome.MITIGATED
        assert incident(found).slowdown_after == pytest.approx(1.5)

    def test_people_are_told(self) -> None:
        found, _ = goes_on(tried(0.1))
        shown = incidents.build_status(incident(found))
        assert (shown.message, shown.slowdown_after) == (incident(found).remedy_result, 1.0)

    def test_another_round_ends_it(self) -> None:
        found = change_members(begun(), progress={"steps_in_round": 100})
        later = found.with_desired(found.desired.with_plan(membership=3))
        assert (
            route_trial.evaluate_route_trial(later, incident(found), trial_of(found)).outcome
            is IncidentOutcome.SUPERSEDED
        )

    def test_so_does_another_way_to_train(self) -> None:
        found = change_members(begun(), progress={"steps_in_round": 100}, training={"sync_mode": "EDiT"})
        later = found.with_desired(found.desired.with_plan(sync_mode=SyncMode.EDIT))
        assert (
            route_trial.evaluate_route_trial(later, incident(found), trial_of(found)).outcome
            is IncidentOutcome.SUPERSEDED
        )

    def test_what_cannot_be_measured_stays_and_says_so(self) -> None:
        dark = replace(begun(), now=NOW - 5 + ROUTE_TRIAL_MEASURE_SECONDS)
        assert route_trial.evaluate_route_trial(dark, incident(dark), trial_of(dark)).outcome is None
        over = route_trial.evaluate_route_trial(replace(dark, now=dark.now + 1), incident(dark), trial_of(dark))
        assert (over.outcome, "could not be measured" in over.remedy_result) == (IncidentOutcome.MITIGATED, True)
        untold = replace(dark, now=dark.now + 1000, metrics=JobMetrics(unreported_members=("j-w1-0",)))
        assert route_trial.evaluate_route_trial(untold, incident(dark), trial_of(dark)).outcome is None


def trial_of(found: Observation) -> RouteTrial:
    assert found.state.adaptation.route_trial is not None
    return found.state.adaptation.route_trial


class TestPace:
    """Where the pace of the connections was known before, it decides."""

    def measured(self, before: float | None, times: float = 1.0, step_seconds: float = 0.2) -> Incident:
        """Now each connection moves 50 MB in 0.4 s, or so many times that."""
        found, _ = goes_on(tried(step_seconds, pace=before))
        told = answer_request(found, build_connection_answers(times=times))
        return route_trial.evaluate_route_trial(told, incident(told), trial_of(told))

    def test_a_faster_pair_keeps_its_way_whatever_else_holds_the_steps_up(self) -> None:
        found = self.measured(30e6)
        assert found.outcome is IncidentOutcome.MITIGATED
        assert found.remedy_result.startswith(
            "from rank 1 to rank 0 30 MB/s before, and 125 MB/s now; steps took 0.2 s"
        )

    def test_one_that_is_not_does_not(self) -> None:
        assert self.measured(120e6, step_seconds=0.1).outcome is IncidentOutcome.INEFFECTIVE
        assert self.measured(125e6 / 1.11).outcome is IncidentOutcome.MITIGATED

    def test_it_is_asked_for_and_awaited(self) -> None:
        found, thought = goes_on(tried(pace=30e6))
        assert thought.desired.plan.evidence_request == "", "connections so young tell nothing"
        old = NOW - 5 + THROUGHPUT_READY_SECONDS
        found, thought = goes_on(replace(found, now=old))
        plan = thought.desired.plan
        assert plan.evidence_request.startswith("routes-")
        assert EvidencePart.LINKS in plan.evidence_parts
        again, _ = goes_on(replace(found, now=old + 1))
        assert again.plan.evidence_request == plan.evidence_request
        assert incident(again).outcome is None
        young = tuple(replace(one, links=()) for one in build_connection_answers(request=plan.evidence_request))
        again, _ = goes_on(replace(again, now=old + ROUTE_EVIDENCE_PERIOD_SECONDS, evidence=young))
        assert again.plan.evidence_request not in ("", plan.evidence_request)
        told = replace(again, now=old + 6, evidence=build_connection_answers(request=again.plan.evidence_request))
        over, _ = goes_on(told)
        assert incident(over).outcome is IncidentOutcome.RECOVERED
        later, _ = goes_on(replace(over, now=old + 6 + ROUTE_EVIDENCE_PERIOD_SECONDS))
        assert later.plan.evidence_request == "", "nobody asks any more"

    def test_not_for_ever(self) -> None:
        found, _ = goes_on(tried(0.1, pace=30e6))
        late = replace(found, now=NOW - 5 + THROUGHPUT_WAIT_SECONDS)
        assert route_trial.evaluate_route_trial(late, incident(late), trial_of(late)).outcome is None
        later = replace(late, now=late.now + 1)
        assert (
            route_trial.evaluate_route_trial(later, incident(later), trial_of(later)).outcome
            is IncidentOutcome.RECOVERED
        )

    def test_nobody_asks_where_it_was_not_known_before(self) -> None:
        found, _ = goes_on(tried(step_seconds=0.1))
        assert found.plan.evidence_request == ""


class TestNoBetter:
    def worse(self, step_seconds: float = 0.4) -> Observation:
        return goes_on(tried(step_seconds))[0]

    def test_it_is_not_tried_again_for_a_while(self) -> None:
        found = self.worse(0.2)
        assert incident(found).outcome is IncidentOutcome.INEFFECTIVE
        assert "no better, and not tried again for a while" in incident(found).remedy_result
        assert found.state.adaptation.failed_routes == (FailedRoute(NOW, 1, 0, "s2"),)
        assert found.state.adaptation.route_trial is None, "as it was: a way back wins nothing"
        assert get_planned_routes(found.plan)[1, 0] == 1
        late = replace(found, now=NOW + TRIED_ROUTE_TTL_SECONDS)
        assert route_trial.advance_route_trial(late, build_policy()).state.adaptation.failed_routes == ()

    def test_worse_ones_go_back_once_that_pays(self) -> None:
        """Half of all time is lost; a round costs 5 s, and 10 steps of 0.4 s since the last checkpoint."""
        found = self.worse()
        assert trial_of(found).slowdown == pytest.approx(2.0)
        early, _ = goes_on(replace(found, now=NOW + 12.9))
        assert early.plan.membership == 2
        back, thought = goes_on(replace(found, now=NOW + 13.1))
        assert (back.plan.membership, get_planned_routes(back.plan)) == (3, dict(ALL_ON_FIRST_SPINE))
        (decided,) = [one for one in thought.desired.state.incidents.current if one.decided == NOW + 13.1]
        assert decided.remedy == Remedy.PLAN_TRAFFIC
        assert decided.slowdown_before == pytest.approx(2.0)
        assert "are restored" in decided.message
        (price,) = decided.remedies
        assert price.chosen

    def test_what_is_put_back_stays_whatever_is_planned(self) -> None:
        back, _ = goes_on(replace(self.worse(), now=NOW + 14))
        waiting = change_members(replace(back, now=NOW + 15), start={"first_step_at": None})
        again, _ = goes_on(waiting)
        assert again.plan.paths == back.plan.paths
        done = change_members(replace(again, now=NOW + 17), membership=3, round=3, start={"first_step_at": NOW + 16})
        over, _ = goes_on(done)
        assert over.state.adaptation.route_trial is None
        (last,) = [one for one in over.state.incidents.current if one.name != "i"]
        assert last.outcome is IncidentOutcome.RECOVERED
        assert get_planned_routes(over.plan) == dict(ALL_ON_FIRST_SPINE)

    def test_nobody_goes_back_to_a_dead_link(self) -> None:
        found = self.worse()
        seen = found.cluster_view.network
        assert seen is not None
        assert seen.wiring.topology is not None
        cut = replace(seen.wiring, topology=seen.wiring.topology.with_dead_links(up=[(1, 0)]))
        dead = replace(found.cluster_view, network=replace(seen, wiring=cut))
        assert route_trial.check_worse_routes(replace(found, now=NOW + 60, cluster_view=dead), build_policy()) is None

    def test_nor_where_steps_are_as_they_were_by_now(self) -> None:
        over = replace(self.worse(), now=NOW + 60, metrics=JobMetrics(step_seconds=BEFORE))
        assert route_trial.check_worse_routes(over, build_policy()) is None

    def test_nor_where_remedies_are_not_allowed(self) -> None:
        late = replace(self.worse(), now=NOW + 60)
        assert route_trial.check_worse_routes(late, build_policy()) is not None
        assert route_trial.check_worse_routes(late, build_policy(allow=frozenset())) is None

    def test_a_way_back_that_nobody_needed_is_forgotten(self) -> None:
        late = replace(self.worse(), now=NOW + TRIED_ROUTE_TTL_SECONDS)
        assert route_trial.advance_route_trial(late, build_policy()).state.adaptation.route_trial is None

    def test_nor_does_it_outlive_its_membership(self) -> None:
        found = self.worse()
        other = found.with_desired(found.desired.with_plan(membership=3))
        assert route_trial.check_worse_routes(replace(other, now=NOW + 60), build_policy()) is None
        assert route_trial.advance_route_trial(other, build_policy()).state.adaptation.route_trial is None

    def test_where_more_has_changed_than_is_kept_there_is_no_way_back(self) -> None:
        found, _ = goes_on(tried(0.4, changes=()))
        assert (incident(found).outcome, found.state.adaptation.route_trial) == (IncidentOutcome.INEFFECTIVE, None)

    def test_all_of_it_is_written_and_read_back(self) -> None:
        draft = self.worse().desired
        assert state_codec.decode_state(state_codec.encode_state(draft, "j"), "j").desired == draft


class TestDrawn:
    """Where nobody knows the fabric."""

    def drawn(self, draw: int, tried: tuple[FailedRoute, ...] = ()) -> Observation:
        found = build_observation(build_network_state(mode=PathControl.REROLL))
        path = replace(build_paths({}), wanted=(PlannedPath(1, 0, draw=draw),) if draw else ())
        return found.with_desired(found.desired.with_plan(paths=path).with_adaptation(failed_routes=tried))

    def test_a_draw_that_was_no_better_is_not_drawn_again(self) -> None:
        after = paths.reroll_ports(self.drawn(1, (FailedRoute(NOW, 1, 0, draw=2),)), (1, 0))
        assert after is not None
        assert after.wanted == (PlannedPath(1, 0, draw=3),)

    def test_the_one_before_comes_back(self) -> None:
        change = RouteChange(1, 0, draw_before=1, draw=2)
        after = paths.restore_paths(self.drawn(2), (change,))
        assert after is not None
        assert after.wanted == (PlannedPath(1, 0, draw=1),)
        assert paths.restore_paths(self.drawn(1), (RouteChange(1, 0, draw=1),)) is None, "the network chose"


def test_what_has_changed_between_two_plans() -> None:
    found = tuple(
        paths.list_path_changes(build_paths({(1, 0): 0, (2, 1): 0}), build_paths({(1, 0): 1, (2, 1): 0, (3, 2): 2}))
    )
    assert found == (RouteChange(1, 0, "s1", 0, "s2", 0), RouteChange(3, 2, "", 0, "s3", 0))
    assert list(paths.list_path_changes(None, None)) == []
