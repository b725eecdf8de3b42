"""A slow link in a known fabric: another route or another training strategy, the one that is worth more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from pacekeeper_analysis.protocol.plan import SyncMode
from pacekeeper_analysis.protocol.requests import EvidencePart
from pacekeeper_operator.api.incident import IncidentCause, IncidentOutcome
from pacekeeper_operator.api.training_job import RemediationMode, Remedy
from pacekeeper_operator.decide.evaluate import PassResult, evaluate_job
from pacekeeper_operator.decide.network import replan, route_alternatives
from pacekeeper_operator.decide.network.link_state import find_degraded_links
from pacekeeper_operator.decide.network.route_reports import NEW_ROUTE_REPORT_SECONDS
from pacekeeper_operator.decide.network.slow_communication import REROUTE_EVIDENCE_WAIT_SECONDS
from pacekeeper_operator.state.desired_state import Incident
from pacekeeper_operator.state.network import NetworkState, RankPair
from pacekeeper_operator.state.observation import Observation
from pacekeeper_operator.state.policy import Policy
from pacekeeper_operator.state.routes import get_planned_routes
from testing.network.flows import ALL_ON_FIRST_SPINE, build_connection_answers, build_network_state, build_observation
from testing.operators.observations import build_policy, change_members, list_decisions
from tests.unit.operator.test_adapting import SLOW_LINK, windows

AT_A: Mapping[RankPair, float] = {(0, 3): 4.0, (1, 0): 4.0}
"""All that rank 0 sends and receives is slow."""
TWO_SPINES: Mapping[RankPair, int] = {**ALL_ON_FIRST_SPINE, (0, 3): 1}
"""Rank 0 sends by the second spine, and receives by the first."""


def build_slow(routes: Mapping[RankPair, int], network: NetworkState | None = None) -> Observation:
    found = replace(build_observation(network or build_network_state(routes), routes), metrics=SLOW_LINK)
    return change_members(found, training={"sync_mode": "Sync"})


def with_answers(
    found: Observation, result: PassResult, slow: Mapping[RankPair, float], seconds: float = 1.0
) -> Observation:
    """Return the observation with an answer of all ranks to the current evidence request."""
    requests = result.desired.requests
    assert requests.evidence_name
    answers = windows(requests.evidence_name, exposed=0.25)
    if EvidencePart.LINKS in requests.evidence_parts:
        links = build_connection_answers(slow, request=requests.evidence_name)
        answers = tuple(
            replace(answer, links=connections.links) for answer, connections in zip(answers, links, strict=True)
        )
    return replace(found.with_desired(result.desired), now=found.now + seconds, evidence=answers)


def run_investigation(
    routes: Mapping[RankPair, int],
    slow: Mapping[RankPair, float] = AT_A,
    policy: Policy | None = None,
    network: NetworkState | None = None,
) -> tuple[Observation, PassResult]:
    """Run passes until connection measurements are there; return the observation and the last result."""
    policy = policy or build_policy()
    found = build_slow(routes, network)
    result = evaluate_job(found, policy)
    for seconds in (1.0, 6.0, 6.0):
        found = with_answers(found, result, slow, seconds)
        result = evaluate_job(found, policy)
        if found.evidence[0].links or list_decisions(result):
            return found, result
        found = replace(found.with_desired(result.desired), now=found.now + 6)
        result = evaluate_job(found, policy)
    raise AssertionError("no pass has requested connections")


def with_joint_plan(found: Observation, result: PassResult, routes: Mapping[RankPair, int]) -> Observation:
    """Return the observation after the next joint planning of the Fabric."""
    reports = result.desired.state.adaptation.route_observations
    network = build_network_state(
        routes, doubts=find_degraded_links({"ns": reports}, found.now), route_observations=reports
    )
    cluster_view = replace(found.cluster_view, network=network)
    return replace(found.with_desired(result.desired), now=found.now + 2, cluster_view=cluster_view)


def run_until_decision(
    found: Observation, slow: Mapping[RankPair, float] = AT_A, policy: Policy | None = None
) -> tuple[Observation, PassResult]:
    """Run passes until there is a decision: the loss has to reach the price of a round."""
    policy = policy or build_policy()
    for _ in range(4):
        result = evaluate_job(found, policy)
        if list_decisions(result):
            break
        if result.desired.requests.evidence_name:
            found = with_answers(found, result, slow, 2.0)
        else:
            found = replace(found.with_desired(result.desired), now=found.now + 2)
    return found, result


def map_prices(incident: Incident) -> dict[str, str]:
    return {str(price.name): price.reason for price in incident.remedies}


class TestSlowLink:
    def test_local_sgd_waits_for_joint_planning(self) -> None:
        _, result = run_investigation(ALL_ON_FIRST_SPINE)
        assert not result.failed_steps
        assert not list_decisions(result)
        assert result.desired.plan.sync_mode is SyncMode.SYNC
        assert result.desired.state.adaptation.route_observations

    def test_another_route_is_chosen_over_local_sgd_if_it_is_worth_more(self) -> None:
        found, result = run_investigation(ALL_ON_FIRST_SPINE)
        _, after = run_until_decision(with_joint_plan(found, result, ALL_ON_FIRST_SPINE))
        (incident,) = list_decisions(after)
        assert (incident.cause, incident.remedy, incident.live) == (
            IncidentCause.SLOW_COMMUNICATION,
            Remedy.PLAN_TRAFFIC,
            False,
        )
        assert {price.name for price in incident.remedies} == {Remedy.LOCAL_SGD, Remedy.PLAN_TRAFFIC}
        assert [price.name for price in incident.remedies if price.chosen] == [Remedy.PLAN_TRAFFIC]
        assert incident.slowdown_before == pytest.approx(3.2, rel=0.1)
        assert incident.predicted_after == pytest.approx(1.0)
        routes = get_planned_routes(after.desired.plan)
        assert routes[0, 3] != 0
        assert routes[1, 0] != 0
        assert (routes[2, 1], routes[3, 2]) == (0, 0), "no other route is moved"
        assert (after.desired.plan.sync_mode, after.desired.plan.membership) == (SyncMode.SYNC, 2)

    def test_the_route_trial_records_the_previous_speeds(self) -> None:
        found, result = run_investigation(ALL_ON_FIRST_SPINE)
        _, after = run_until_decision(with_joint_plan(found, result, ALL_ON_FIRST_SPINE))
        trial = after.desired.state.adaptation.route_trial
        assert trial is not None
        assert {(change.source, change.destination): change.bytes_per_second for change in trial.changes} == {
            (0, 3): pytest.approx(50e6 / 1.6),
            (1, 0): pytest.approx(50e6 / 1.6),
        }

    def test_the_wait_for_joint_planning_is_limited(self) -> None:
        found, result = run_investigation(ALL_ON_FIRST_SPINE)
        late = replace(
            found.with_desired(result.desired), now=found.now + NEW_ROUTE_REPORT_SECONDS + 1, metrics=SLOW_LINK
        )
        result = evaluate_job(late, build_policy())
        late = with_answers(late, result, {}, 3.0)  # the connections are as before
        (incident,) = list_decisions(evaluate_job(late, build_policy()))
        assert incident.remedy == Remedy.LOCAL_SGD

    def test_the_joint_plan_does_not_decide_while_the_investigation_may(self) -> None:
        found, result = run_investigation(ALL_ON_FIRST_SPINE)
        planned = with_joint_plan(found, result, ALL_ON_FIRST_SPINE)
        assert planned.cluster_view.network is not None
        assert planned.cluster_view.network.traffic is not None
        assert planned.cluster_view.network.traffic.due
        assert replan.check_replanned_routes(planned, build_policy()) is None
        late = replace(planned, now=planned.now + NEW_ROUTE_REPORT_SECONDS)
        measured = late.with_desired(
            late.desired.with_requests(connections_requested_at=late.now - REROUTE_EVIDENCE_WAIT_SECONDS - 1)
        )
        assert replan.check_replanned_routes(measured, build_policy()) is not None

    def test_local_sgd_is_chosen_if_new_routes_are_not_allowed(self) -> None:
        policy = build_policy(allow=frozenset(Remedy) - {Remedy.PLAN_TRAFFIC})
        _, result = run_investigation(ALL_ON_FIRST_SPINE, policy=policy)
        (incident,) = list_decisions(result)
        assert incident.remedy == Remedy.LOCAL_SGD
        assert "remediation.allow" in map_prices(incident)[Remedy.PLAN_TRAFFIC]

    def test_in_mode_recommend_the_membership_stays(self) -> None:
        policy = build_policy(mode=RemediationMode.RECOMMEND)
        found, result = run_investigation(ALL_ON_FIRST_SPINE, policy=policy)
        _, result = run_until_decision(with_joint_plan(found, result, ALL_ON_FIRST_SPINE), policy=policy)
        (incident,) = list_decisions(result)
        assert (incident.remedy, incident.applied, incident.outcome) == (
            Remedy.PLAN_TRAFFIC,
            None,
            IncidentOutcome.RECOMMENDED,
        )
        assert result.desired.plan.membership == 1


class TestSlowNode:
    """The only link of a node: all flows are slow over any spine, and no path resolves that."""

    def test_local_sgd_is_chosen_if_no_route_helps(self) -> None:
        _, result = run_investigation(TWO_SPINES)
        (incident,) = list_decisions(result)
        assert incident.remedy == Remedy.LOCAL_SGD
        assert map_prices(incident)[Remedy.PLAN_TRAFFIC] == "no other way through the fabric wins what it costs"
        assert result.desired.plan.membership == 1

    def test_without_a_network_there_is_no_option_of_routes(self) -> None:
        found = build_slow(ALL_ON_FIRST_SPINE)
        without_network = replace(found, cluster_view=replace(found.cluster_view, network=None))
        assert route_alternatives.build_alternative_option(without_network, build_policy(), 3.0) is None

    def test_local_sgd_is_chosen_after_routes_that_did_not_help(self) -> None:
        """Over the first spine, the link might have been slow; over the second one, the flow is slow, too."""
        found, result = run_investigation(ALL_ON_FIRST_SPINE)
        _, after = run_until_decision(with_joint_plan(found, result, ALL_ON_FIRST_SPINE))
        routes = get_planned_routes(after.desired.plan)
        reports = after.desired.state.adaptation.route_observations
        network = build_network_state(
            routes,
            doubts=find_degraded_links({"ns": reports}, found.now),
            route_observations=reports,
            keeps_routes=True,
        )
        slow = build_slow(routes, network)
        slow = slow.with_desired(slow.desired.with_adaptation(route_observations=reports))
        _, result = run_until_decision(replace(slow, now=found.now + 30))
        (incident,) = list_decisions(result)
        assert incident.remedy == Remedy.LOCAL_SGD
