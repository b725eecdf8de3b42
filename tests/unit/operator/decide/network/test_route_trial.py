"""New routes are measured: they stay if they are better, and the previous ones are restored if they are worse."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from pacekeeper_analysis.protocol.plan import PlannedPath, SyncMode
from pacekeeper_analysis.protocol.requests import EvidencePart
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

NEW_ROUTES = {**ALL_ON_FIRST_SPINE, (1, 0): 1}
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
"""Seconds of a step before the change."""


def build_tried(
    step_seconds: float = 0.1,
    *,
    bytes_per_second: float | None = None,
    first_step_at: float | None = NOW - 5,
    routes: Mapping[RankPair, int] = NEW_ROUTES,
    incident: Incident = INCIDENT,
    changes: tuple[RouteChange, ...] | None = None,
    **trial: Any,
) -> Observation:
    """Build the second round, over other routes; `bytes_per_second`: of the changed pair before."""
    found = build_observation(build_network_state(routes), routes)
    changed = (replace(CHANGE, bytes_per_second=bytes_per_second),) if changes is None else changes
    route_trial = RouteTrial("i", 2, BEFORE, changes=changed, **trial)
    desired = (
        found.desired.with_plan(membership=2, round=2).with_incident(incident).with_adaptation(route_trial=route_trial)
    )
    found = replace(found.with_desired(desired), metrics=JobMetrics(step_seconds=step_seconds))
    return change_members(
        found, membership=2, round=2, start={"first_step_at": first_step_at}, progress={"steps_in_round": 100}
    )


def build_begun(*args: Any, **changes: Any) -> Observation:
    """Build a round over other routes after its first step, too young to be measured."""
    found, _ = run_pass(change_members(build_tried(*args, **changes), progress={"steps_in_round": 3}))
    return found


def run_pass(found: Observation) -> tuple[Observation, PassResult]:
    result = evaluate_job(found, build_policy())
    assert not result.failed_steps
    return found.with_desired(result.desired), result


def find_incident(found: Observation, name: str = "i") -> Incident:
    incident = found.state.incidents.find(name)
    assert incident is not None
    return incident


class TestMeasured:
    def test_the_recovery_ends_with_the_first_step_and_its_duration_is_the_price(self) -> None:
        found = build_begun()
        open_incident = find_incident(found)
        assert (open_incident.outcome, open_incident.live, open_incident.recovered) == (None, True, NOW - 5)
        assert (found.state.budget.measurements.same_workers, found.state.budget.lost_seconds) == ((5.0,), 5.0)
        assert found.state.adaptation.route_trial is not None
        assert found.state.adaptation.route_trial.since == NOW - 5
        assert build_job_status(found, build_policy(), JobStatus()).phase is JobPhase.RUNNING, "the job trains"

    def test_rounds_that_failed_before_it_are_not_the_price_of_a_round(self) -> None:
        found = build_tried()
        found, _ = run_pass(change_members(found, round=found.progress.round + 1, progress={"steps_in_round": 3}))
        assert find_incident(found).recovered == NOW - 5
        assert (found.state.budget.measurements.same_workers, found.state.budget.lost_seconds) == ((), 5.0)

    def test_before_the_first_step_the_incident_is_unchanged(self) -> None:
        found, _ = run_pass(build_tried(first_step_at=None))
        assert (find_incident(found).outcome, find_incident(found).live) == (None, False)

    def test_shorter_steps_keep_the_routes(self) -> None:
        found, _ = run_pass(build_tried(0.1))
        closed = find_incident(found)
        assert (closed.outcome, closed.slowdown_before, closed.slowdown_after) == (IncidentOutcome.RECOVERED, 2.0, 1.0)
        assert closed.measured_gain == pytest.approx(300.0)
        assert closed.remedy_result == "steps took 0.2 s before, and 0.1 s now: kept"
        assert found.state.adaptation.route_trial is None
        assert found.state.adaptation.failed_routes == ()
        assert get_planned_routes(found.plan)[1, 0] == 1
        assert found.state.incidents.past[-1].cause is IncidentCause.SLOW_COMMUNICATION

    def test_the_remaining_slowdown_determines_the_outcome(self) -> None:
        found, _ = run_pass(build_tried(0.15))
        assert find_incident(found).outcome is IncidentOutcome.MITIGATED
        assert find_incident(found).slowdown_after == pytest.approx(1.5)

    def test_the_status_of_the_incident_contains_the_result(self) -> None:
        found, _ = run_pass(build_tried(0.1))
        status = incidents.build_status(find_incident(found))
        assert (status.message, status.slowdown_after) == (find_incident(found).remedy_result, 1.0)

    def test_another_round_ends_the_trial(self) -> None:
        found = change_members(build_begun(), progress={"steps_in_round": 100})
        later = found.with_desired(found.desired.with_plan(membership=3))
        assert (
            route_trial.evaluate_route_trial(later, find_incident(found), get_trial(found)).outcome
            is IncidentOutcome.SUPERSEDED
        )

    def test_another_sync_mode_ends_the_trial(self) -> None:
        found = change_members(build_begun(), progress={"steps_in_round": 100}, training={"sync_mode": "EDiT"})
        later = found.with_desired(found.desired.with_plan(sync_mode=SyncMode.EDIT))
        assert (
            route_trial.evaluate_route_trial(later, find_incident(found), get_trial(found)).outcome
            is IncidentOutcome.SUPERSEDED
        )

    def test_routes_that_cannot_be_measured_stay_and_the_result_states_it(self) -> None:
        unmeasured = replace(build_begun(), now=NOW - 5 + ROUTE_TRIAL_MEASURE_SECONDS)
        assert (
            route_trial.evaluate_route_trial(unmeasured, find_incident(unmeasured), get_trial(unmeasured)).outcome
            is None
        )
        final = route_trial.evaluate_route_trial(
            replace(unmeasured, now=unmeasured.now + 1), find_incident(unmeasured), get_trial(unmeasured)
        )
        assert (final.outcome, "could not be measured" in final.remedy_result) == (IncidentOutcome.MITIGATED, True)
        unreported = replace(unmeasured, now=unmeasured.now + 1000, metrics=JobMetrics(unreported_members=("j-w1-0",)))
        assert (
            route_trial.evaluate_route_trial(unreported, find_incident(unmeasured), get_trial(unmeasured)).outcome
            is None
        )


def get_trial(found: Observation) -> RouteTrial:
    assert found.state.adaptation.route_trial is not None
    return found.state.adaptation.route_trial


class TestSpeed:
    """If the speed of the connections was known before, it decides."""

    def evaluate_pace(self, before: float | None, times: float = 1.0, step_seconds: float = 0.2) -> Incident:
        """Evaluate a trial in which each connection moves 50 MB in 0.4 s, `times` as fast."""
        found, _ = run_pass(build_tried(step_seconds, bytes_per_second=before))
        answered = answer_request(found, build_connection_answers(times=times))
        return route_trial.evaluate_route_trial(answered, find_incident(answered), get_trial(answered))

    def test_a_faster_pair_keeps_its_route_even_if_steps_are_not_shorter(self) -> None:
        found = self.evaluate_pace(30e6)
        assert found.outcome is IncidentOutcome.MITIGATED
        assert found.remedy_result.startswith(
            "from rank 1 to rank 0 30 MB/s before, and 125 MB/s now; steps took 0.2 s"
        )

    def test_a_pair_that_is_not_faster_is_ineffective(self) -> None:
        assert self.evaluate_pace(120e6, step_seconds=0.1).outcome is IncidentOutcome.INEFFECTIVE
        assert self.evaluate_pace(125e6 / 1.11).outcome is IncidentOutcome.MITIGATED

    def test_connection_speeds_are_requested_and_awaited(self) -> None:
        found, result = run_pass(build_tried(bytes_per_second=30e6))
        assert result.desired.requests.evidence_name == "", "connections are too young to be measured"
        old = NOW - 5 + THROUGHPUT_READY_SECONDS
        found, result = run_pass(replace(found, now=old))
        requests = result.desired.requests
        assert requests.evidence_name.startswith("routes-")
        assert EvidencePart.LINKS in requests.evidence_parts
        repeated, _ = run_pass(replace(found, now=old + 1))
        assert repeated.requests.evidence_name == requests.evidence_name
        assert find_incident(repeated).outcome is None
        young = tuple(replace(answer, links=()) for answer in build_connection_answers(request=requests.evidence_name))
        repeated, _ = run_pass(replace(repeated, now=old + ROUTE_EVIDENCE_PERIOD_SECONDS, evidence=young))
        assert repeated.requests.evidence_name not in ("", requests.evidence_name)
        answered = replace(
            repeated, now=old + 6, evidence=build_connection_answers(request=repeated.requests.evidence_name)
        )
        final, _ = run_pass(answered)
        assert find_incident(final).outcome is IncidentOutcome.RECOVERED
        later, _ = run_pass(replace(final, now=old + 6 + ROUTE_EVIDENCE_PERIOD_SECONDS))
        assert later.requests.evidence_name == "", "no more evidence is requested"

    def test_the_wait_for_connection_speeds_is_limited(self) -> None:
        found, _ = run_pass(build_tried(0.1, bytes_per_second=30e6))
        late = replace(found, now=NOW - 5 + THROUGHPUT_WAIT_SECONDS)
        assert route_trial.evaluate_route_trial(late, find_incident(late), get_trial(late)).outcome is None
        later = replace(late, now=late.now + 1)
        assert (
            route_trial.evaluate_route_trial(later, find_incident(later), get_trial(later)).outcome
            is IncidentOutcome.RECOVERED
        )

    def test_no_evidence_is_requested_without_a_previous_speed(self) -> None:
        found, _ = run_pass(build_tried(step_seconds=0.1))
        assert found.requests.evidence_name == ""


class TestNoImprovement:
    def build_worse(self, step_seconds: float = 0.4) -> Observation:
        return run_pass(build_tried(step_seconds))[0]

    def test_a_route_without_improvement_is_not_tried_again_for_some_time(self) -> None:
        found = self.build_worse(0.2)
        assert find_incident(found).outcome is IncidentOutcome.INEFFECTIVE
        assert "no better, and not tried again for a while" in find_incident(found).remedy_result
        assert found.state.adaptation.failed_routes == (FailedRoute(NOW, 1, 0, "s2"),)
        assert found.state.adaptation.route_trial is None, "steps are as before: restoring gains nothing"
        assert get_planned_routes(found.plan)[1, 0] == 1
        late = replace(found, now=NOW + TRIED_ROUTE_TTL_SECONDS)
        assert route_trial.advance_route_trial(late, build_policy()).state.adaptation.failed_routes == ()

    def test_worse_routes_are_restored_once_that_pays(self) -> None:
        """Half of all time is lost; a round costs 5 s, and 10 steps of 0.4 s since the last checkpoint."""
        found = self.build_worse()
        assert get_trial(found).slowdown == pytest.approx(2.0)
        early, _ = run_pass(replace(found, now=NOW + 12.9))
        assert early.plan.membership == 2
        restored, result = run_pass(replace(found, now=NOW + 13.1))
        assert (restored.plan.membership, get_planned_routes(restored.plan)) == (3, dict(ALL_ON_FIRST_SPINE))
        (restoring,) = [
            incident for incident in result.desired.state.incidents.current if incident.decided == NOW + 13.1
        ]
        assert restoring.remedy == Remedy.PLAN_TRAFFIC
        assert restoring.slowdown_before == pytest.approx(2.0)
        assert "are restored" in restoring.message
        (price,) = restoring.remedies
        assert price.chosen

    def test_restored_routes_stay_under_any_plan(self) -> None:
        restored, _ = run_pass(replace(self.build_worse(), now=NOW + 14))
        waiting = change_members(replace(restored, now=NOW + 15), start={"first_step_at": None})
        repeated, _ = run_pass(waiting)
        assert repeated.plan.paths == restored.plan.paths
        first_step = change_members(
            replace(repeated, now=NOW + 17),
            membership=3,
            round=3,
            start={"first_step_at": NOW + 16, "restored_step": 490},
        )
        final, _ = run_pass(first_step)
        assert final.state.adaptation.route_trial is None
        (last,) = [incident for incident in final.state.incidents.current if incident.name != "i"]
        assert last.outcome is IncidentOutcome.RECOVERED
        assert get_planned_routes(final.plan) == dict(ALL_ON_FIRST_SPINE)

    def test_routes_over_a_dead_link_are_not_restored(self) -> None:
        found = self.build_worse()
        network = found.cluster_view.network
        assert network is not None
        assert network.wiring.topology is not None
        cut = replace(network.wiring, topology=network.wiring.topology.with_dead_links(up=[(1, 0)]))
        dead = replace(found.cluster_view, network=replace(network, wiring=cut))
        assert route_trial.check_worse_routes(replace(found, now=NOW + 60, cluster_view=dead), build_policy()) is None

    def test_routes_are_not_restored_if_steps_have_recovered(self) -> None:
        recovered = replace(self.build_worse(), now=NOW + 60, metrics=JobMetrics(step_seconds=BEFORE))
        assert route_trial.check_worse_routes(recovered, build_policy()) is None

    def test_routes_are_not_restored_if_the_remedy_is_not_allowed(self) -> None:
        late = replace(self.build_worse(), now=NOW + 60)
        assert route_trial.check_worse_routes(late, build_policy()) is not None
        assert route_trial.check_worse_routes(late, build_policy(allow=frozenset())) is None

    def test_an_unused_trial_expires(self) -> None:
        late = replace(self.build_worse(), now=NOW + TRIED_ROUTE_TTL_SECONDS)
        assert route_trial.advance_route_trial(late, build_policy()).state.adaptation.route_trial is None

    def test_a_trial_ends_with_its_membership(self) -> None:
        found = self.build_worse()
        changed = found.with_desired(found.desired.with_plan(membership=3))
        assert route_trial.check_worse_routes(replace(changed, now=NOW + 60), build_policy()) is None
        assert route_trial.advance_route_trial(changed, build_policy()).state.adaptation.route_trial is None

    def test_without_recorded_changes_routes_are_not_restored(self) -> None:
        found, _ = run_pass(build_tried(0.4, changes=()))
        assert (find_incident(found).outcome, found.state.adaptation.route_trial) == (IncidentOutcome.INEFFECTIVE, None)

    def test_a_trial_survives_encoding_and_decoding(self) -> None:
        desired = self.build_worse().desired
        assert state_codec.decode_state(state_codec.encode_state(desired, "j"), "j").desired == desired


class TestDrawn:
    """A fabric of unknown topology."""

    def build_drawn(self, draw: int, failed_routes: tuple[FailedRoute, ...] = ()) -> Observation:
        found = build_observation(build_network_state(mode=PathControl.REROLL))
        path = replace(build_paths({}), wanted=(PlannedPath(1, 0, draw=draw),) if draw else ())
        return found.with_desired(found.desired.with_plan(paths=path).with_adaptation(failed_routes=failed_routes))

    def test_a_draw_without_improvement_is_skipped(self) -> None:
        after = paths.reroll_ports(self.build_drawn(1, (FailedRoute(NOW, 1, 0, draw=2),)), (1, 0))
        assert after is not None
        assert after.wanted == (PlannedPath(1, 0, draw=3),)

    def test_the_previous_draw_is_restored(self) -> None:
        change = RouteChange(1, 0, draw_before=1, draw=2)
        after = paths.restore_paths(self.build_drawn(2), (change,))
        assert after is not None
        assert after.wanted == (PlannedPath(1, 0, draw=1),)
        assert paths.restore_paths(self.build_drawn(1), (RouteChange(1, 0, draw=1),)) is None, "the network chose"


def test_path_changes_between_two_plans_are_listed() -> None:
    found = tuple(
        paths.list_path_changes(build_paths({(1, 0): 0, (2, 1): 0}), build_paths({(1, 0): 1, (2, 1): 0, (3, 2): 2}))
    )
    assert found == (RouteChange(1, 0, "s1", 0, "s2", 0), RouteChange(3, 2, "", 0, "s3", 0))
    assert list(paths.list_path_changes(None, None)) == []
