"""A slow link in a known fabric: another way around it, or another way to train, whichever is worth more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from pacekeeper_analysis.protocol.plan import EvidencePart, SyncMode
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


def suffering(ways: Mapping[RankPair, int], seen: NetworkState | None = None) -> Observation:
    found = replace(build_observation(seen or build_network_state(ways), ways), metrics=SLOW_LINK)
    return change_members(found, training={"sync_mode": "Sync"})


def answered(
    found: Observation, thought: PassResult, slow: Mapping[RankPair, float], seconds: float = 1.0
) -> Observation:
    """The ranks have answered the question that is out, with all that it asks for."""
    plan = thought.desired.plan
    assert plan.evidence_request
    told = windows(plan.evidence_request, exposed=0.25)
    if EvidencePart.LINKS in plan.evidence_parts:
        links = build_connection_answers(slow, request=plan.evidence_request)
        told = tuple(replace(one, links=also.links) for one, also in zip(told, links, strict=True))
    return replace(found.with_desired(thought.desired), now=found.now + seconds, evidence=told)


def looked_into(
    ways: Mapping[RankPair, int],
    slow: Mapping[RankPair, float] = AT_A,
    rules: Policy | None = None,
    seen: NetworkState | None = None,
) -> tuple[Observation, PassResult]:
    """Until the connections have told, and what is thought of it."""
    rules = rules or build_policy()
    found = suffering(ways, seen)
    thought = evaluate_job(found, rules)
    for seconds in (1.0, 6.0, 6.0):
        found = answered(found, thought, slow, seconds)
        thought = evaluate_job(found, rules)
        if found.evidence[0].links or list_decisions(thought):
            return found, thought
        found = replace(found.with_desired(thought.desired), now=found.now + 6)
        thought = evaluate_job(found, rules)
    raise AssertionError("nobody has asked for connections")


def planned_around(found: Observation, thought: PassResult, ways: Mapping[RankPair, int]) -> Observation:
    """As the keeper of the Fabric looks at it next."""
    words = thought.desired.state.adaptation.route_observations
    seen = build_network_state(ways, doubts=find_degraded_links({"ns": words}, found.now), route_observations=words)
    around = replace(found.cluster_view, network=seen)
    return replace(found.with_desired(thought.desired), now=found.now + 2, cluster_view=around)


def asked_again(
    found: Observation, slow: Mapping[RankPair, float] = AT_A, rules: Policy | None = None
) -> tuple[Observation, PassResult]:
    """Until something is decided, after joint planning has looked: the loss has to reach the price of a round."""
    rules = rules or build_policy()
    for _ in range(4):
        thought = evaluate_job(found, rules)
        if list_decisions(thought):
            break
        if thought.desired.plan.evidence_request:
            found = answered(found, thought, slow, 2.0)
        else:
            found = replace(found.with_desired(thought.desired), now=found.now + 2)
    return found, thought


def prices(incident: Incident) -> dict[str, str]:
    return {str(price.name): price.reason for price in incident.remedies}


class TestSlowLink:
    def test_another_mode_waits_for_joint_planning(self) -> None:
        _, thought = looked_into(ALL_ON_FIRST_SPINE)
        assert not thought.failed_steps
        assert not list_decisions(thought)
        assert thought.desired.plan.sync_mode is SyncMode.SYNC
        assert thought.desired.state.adaptation.route_observations

    def test_and_gives_way_to_another_way_in_one_choice(self) -> None:
        found, thought = looked_into(ALL_ON_FIRST_SPINE)
        _, after = asked_again(planned_around(found, thought, ALL_ON_FIRST_SPINE))
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
        ways = get_planned_routes(after.desired.plan)
        assert ways[0, 3] != 0
        assert ways[1, 0] != 0
        assert (ways[2, 1], ways[3, 2]) == (0, 0), "nobody else is moved"
        assert (after.desired.plan.sync_mode, after.desired.plan.membership) == (SyncMode.SYNC, 2)

    def test_what_is_to_be_measured_is_written_down_with_it(self) -> None:
        found, thought = looked_into(ALL_ON_FIRST_SPINE)
        _, after = asked_again(planned_around(found, thought, ALL_ON_FIRST_SPINE))
        trial = after.desired.state.adaptation.route_trial
        assert trial is not None
        assert {(one.source, one.destination): one.bytes_per_second for one in trial.changes} == {
            (0, 3): pytest.approx(50e6 / 1.6),
            (1, 0): pytest.approx(50e6 / 1.6),
        }

    def test_planning_that_is_late_holds_up_nothing_for_ever(self) -> None:
        found, thought = looked_into(ALL_ON_FIRST_SPINE)
        late = replace(
            found.with_desired(thought.desired), now=found.now + NEW_ROUTE_REPORT_SECONDS + 1, metrics=SLOW_LINK
        )
        thought = evaluate_job(late, build_policy())
        late = answered(late, thought, {}, 3.0)  # the connections say nothing new
        (incident,) = list_decisions(evaluate_job(late, build_policy()))
        assert incident.remedy == Remedy.LOCAL_SGD

    def test_the_joint_plan_alone_does_not_decide_it_beside(self) -> None:
        found, thought = looked_into(ALL_ON_FIRST_SPINE)
        seen = planned_around(found, thought, ALL_ON_FIRST_SPINE)
        assert seen.cluster_view.network is not None
        assert seen.cluster_view.network.traffic is not None
        assert seen.cluster_view.network.traffic.due
        assert replan.check_replanned_routes(seen, build_policy()) is None
        late = replace(seen, now=seen.now + NEW_ROUTE_REPORT_SECONDS)
        known = late.with_desired(
            late.desired.with_adaptation(connections_requested_at=late.now - REROUTE_EVIDENCE_WAIT_SECONDS - 1)
        )
        assert replan.check_replanned_routes(known, build_policy()) is not None

    def test_a_round_that_is_not_allowed_leaves_the_mode(self) -> None:
        rules = build_policy(allow=frozenset(Remedy) - {Remedy.PLAN_TRAFFIC})
        _, thought = looked_into(ALL_ON_FIRST_SPINE, rules=rules)
        (incident,) = list_decisions(thought)
        assert incident.remedy == Remedy.LOCAL_SGD
        assert "remediation.allow" in prices(incident)[Remedy.PLAN_TRAFFIC]

    def test_where_it_is_only_recommended_nothing_moves(self) -> None:
        rules = build_policy(mode=RemediationMode.RECOMMEND)
        found, thought = looked_into(ALL_ON_FIRST_SPINE, rules=rules)
        _, thought = asked_again(planned_around(found, thought, ALL_ON_FIRST_SPINE), rules=rules)
        (incident,) = list_decisions(thought)
        assert (incident.remedy, incident.applied, incident.outcome) == (
            Remedy.PLAN_TRAFFIC,
            None,
            IncidentOutcome.RECOMMENDED,
        )
        assert thought.desired.plan.membership == 1


class TestSlowNode:
    """Its only link: whatever the spine, all its flows are slow, and no path mends that."""

    def test_local_sgd_as_ever(self) -> None:
        _, thought = looked_into(TWO_SPINES)
        (incident,) = list_decisions(thought)
        assert incident.remedy == Remedy.LOCAL_SGD
        assert prices(incident)[Remedy.PLAN_TRAFFIC] == "no other way through the fabric wins what it costs"
        assert thought.desired.plan.membership == 1

    def test_where_nobody_plans_ways_their_price_is_no_matter(self) -> None:
        found = suffering(ALL_ON_FIRST_SPINE)
        bare = replace(found, cluster_view=replace(found.cluster_view, network=None))
        assert route_alternatives.build_alternative_option(bare, build_policy(), 3.0) is None

    def test_after_ways_that_were_tried_in_vain_the_mode_is_left_all_the_same(self) -> None:
        """By the first spine it might have been the link; by the second one it is slow, too."""
        found, thought = looked_into(ALL_ON_FIRST_SPINE)
        _, after = asked_again(planned_around(found, thought, ALL_ON_FIRST_SPINE))
        ways = get_planned_routes(after.desired.plan)
        words = after.desired.state.adaptation.route_observations
        seen = build_network_state(
            ways, doubts=find_degraded_links({"ns": words}, found.now), route_observations=words, keeps_routes=True
        )
        told = suffering(ways, seen)
        told = told.with_desired(told.desired.with_adaptation(route_observations=words))
        _, thought = asked_again(replace(told, now=found.now + 30))
        (incident,) = list_decisions(thought)
        assert incident.remedy == Remedy.LOCAL_SGD
