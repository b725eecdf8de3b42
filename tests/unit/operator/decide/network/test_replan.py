"""Other routes for flows that collide: when a round begins for them, and its incident."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from pacekeeper_analysis.fabric.view import LinkState
from pacekeeper_analysis.protocol.plan import Hop, Paths, PlannedPath
from pacekeeper_analysis.protocol.reports import Evidence, LinkWindow
from pacekeeper_analysis.protocol.requests import EvidencePart
from pacekeeper_operator.api.fabric import FabricSpec, LevelSpec, LinkException, PathControl, PathControlSpec
from pacekeeper_operator.api.incident import IncidentCause, IncidentClass
from pacekeeper_operator.api.training_job import JobStatus, RemediationMode, Remedy
from pacekeeper_operator.decide.evaluate import evaluate_job
from pacekeeper_operator.decide.lifecycle.status import build_job_status
from pacekeeper_operator.decide.network import replan, traffic
from pacekeeper_operator.decide.network.slow_communication import REROUTE_EVIDENCE_WAIT_SECONDS
from pacekeeper_operator.decide.network.wiring import build_wiring
from pacekeeper_operator.decide.stragglers.pricing import build_plan_traffic_option, compute_traffic_slowdown
from pacekeeper_operator.state.cluster_view import NodeView
from pacekeeper_operator.state.desired_state import RouteChange
from pacekeeper_operator.state.network import JobTraffic, NetworkState, NodeRanks, RankPair
from pacekeeper_operator.state.observation import Observation
from pacekeeper_operator.state.routes import get_planned_routes
from testing.operators.observations import NOW, build_policy, build_training, change_members, list_decisions

HOPS = {"10.0.0.1": "s1", "10.0.0.2": "s2"}
COLLIDING: Mapping[RankPair, int] = {(1, 0): 0, (0, 1): 0}


def build_network(
    *,
    own_routes: Mapping[RankPair, int] = COLLIDING,
    mode: PathControl = PathControl.PROBE,
    waiting: float = 0.4,
    membership: int = 1,
    can_move: bool = True,
    **changes: Any,
) -> NetworkState:
    """Build a network: the job on node-0 and node-1, and another one over the first of two spines."""
    spec = FabricSpec(2, levels=(LevelSpec("leaf"),), hops=HOPS, path_control=PathControlSpec(mode), **changes)
    nodes = [NodeView(f"node-{n}", f"u{n}", labels={"leaf": "ab"[n % 2]}) for n in range(4)]
    wiring = build_wiring(spec, nodes, {})
    own_job = JobTraffic(("ns", "j"), (NodeRanks("node-0", (0,)), NodeRanks("node-1", (1,))), membership, own_routes)
    own_job = replace(own_job, wait_share=waiting, round_seconds=5.0, can_move=can_move)
    other_job = JobTraffic(
        ("ns", "o"),
        (NodeRanks("node-2", (0,)), NodeRanks("node-3", (1,))),
        1,
        COLLIDING,
        wait_share=0.4,
        round_seconds=900.0,
    )
    jobs = {job.name: job for job in (own_job, other_job)}
    return NetworkState(spec, wiring, jobs, traffic.plan_joint_traffic(wiring, list(jobs.values())))


def build_colliding(
    network: NetworkState | None,
    own_routes: Mapping[RankPair, int] = COLLIDING,
    *,
    requested_at: float = NOW - REROUTE_EVIDENCE_WAIT_SECONDS - 1,
) -> Observation:
    """Build a job whose routes collide. `requested_at`: when measurements were requested, which are unanswered."""
    found = build_training(2, 0)
    found = found.with_desired(found.desired.with_requests(connections_requested_at=requested_at))
    paths = Paths(
        tuple(PlannedPath(*pair, f"s{spine + 1}") for pair, spine in own_routes.items()),
        tuple(Hop(address, spine) for address, spine in HOPS.items()),
        20000,
        20511,
    )
    found = found.with_desired(found.desired.with_plan(paths=paths))
    return replace(found, cluster_view=replace(found.cluster_view, network=network))


class TestDecided:
    def test_a_new_round_of_the_same_workers_uses_other_routes(self) -> None:
        before = build_colliding(build_network())
        result = evaluate_job(before, build_policy())
        after = result.desired.plan
        assert not result.failed_steps
        assert (after.membership, after.members) == (2, before.plan.members)
        assert set(get_planned_routes(after).values()) == {1}
        assert after.paths is not None
        assert before.plan.paths is not None
        assert after.paths.first_port == before.plan.paths.first_port
        assert not result.desired.state.budget.restarts, "no worker failed"

    def test_the_incident_and_price_of_a_replanned_round(self) -> None:
        (incident,) = list_decisions(evaluate_job(build_colliding(build_network()), build_policy()))
        assert (incident.cause, incident.class_, incident.remedy, incident.live) == (
            IncidentCause.SLOW_COMMUNICATION,
            IncidentClass.PERFORMANCE,
            Remedy.PLAN_TRAFFIC,
            False,
        )
        (price,) = incident.remedies
        assert price.chosen
        assert price.gain_seconds == pytest.approx(2 * 2 * 600 * 0.4 * 0.5 / 2), (
            "the gain of both jobs, for each rank of this one"
        )
        assert incident.slowdown_before == pytest.approx(1 / 0.8)
        assert "wins all jobs 480 s" in incident.message

    def test_the_incident_recovers_with_the_first_step_and_is_then_measured(self) -> None:
        before = build_colliding(build_network())
        result = evaluate_job(before, build_policy())
        later = replace(before.with_desired(result.desired), now=NOW + 3)
        waiting = evaluate_job(later, build_policy())
        assert not list_decisions(waiting)
        trained = change_members(
            later, membership=2, round=2, start={"first_step_at": NOW + 2}, progress={"steps_in_round": 1}
        )
        desired = evaluate_job(trained, build_policy()).desired
        (incident,) = desired.state.incidents.current
        assert (incident.outcome, incident.live, incident.recovered) == (None, True, NOW + 2)
        assert desired.state.budget.measurements.round_seconds == pytest.approx(2.0)

    def test_the_route_trial_records_the_previous_routes(self) -> None:
        trial = evaluate_job(build_colliding(build_network()), build_policy()).desired.state.adaptation.route_trial
        assert trial is not None
        assert (trial.membership, trial.step_seconds) == (2, 0.1)
        assert trial.changes == (RouteChange(0, 1, "s1", 0, "s2", 0), RouteChange(1, 0, "s1", 0, "s2", 0))

    def test_a_job_that_gives_way_to_others_has_no_route_trial(self) -> None:
        network = build_network()
        assert network.traffic is not None
        due = {name: replace(job_due, slowdown=1.0) for name, job_due in network.traffic.due.items()}
        result = evaluate_job(
            build_colliding(replace(network, traffic=replace(network.traffic, due=due))), build_policy()
        )
        assert (result.desired.plan.membership, result.desired.state.adaptation.route_trial) == (2, None)

    def test_a_slow_link_is_avoided(self) -> None:
        slow = tuple(LinkException(leaf, "s1", LinkState.SLOW, 1e11) for leaf in "ab")
        slow_network = build_network(exceptions=slow)
        jobs = {("ns", "j"): slow_network.jobs["ns", "j"]}
        network = replace(
            slow_network, jobs=jobs, traffic=traffic.plan_joint_traffic(slow_network.wiring, list(jobs.values()))
        )
        assert set(
            get_planned_routes(evaluate_job(build_colliding(network), build_policy()).desired.plan).values()
        ) == {1}

    def test_no_round_begins_for_a_dead_link_without_a_gain(self) -> None:
        """The network has already moved its flows to the other link, next to a job that cannot move either. So a round
        gains nothing."""
        dead_network = build_network(exceptions=(LinkException("a", "s1"), LinkException("b", "s1")))
        assert dead_network.traffic is not None
        assert set(dead_network.traffic.routes["ns", "j"].values()) == {1}
        assert not list_decisions(evaluate_job(build_colliding(dead_network), build_policy()))


class TestMeasuredBefore:
    """The speed of the connections on the current routes is measured for comparison."""

    def build_requested(self) -> Observation:
        before = build_colliding(build_network(), requested_at=0.0)
        first = evaluate_job(before, build_policy())
        assert not list_decisions(first)
        assert first.desired.requests.connections_requested_at == NOW
        assert EvidencePart.LINKS in first.desired.requests.evidence_parts
        return before.with_desired(first.desired)

    def with_answers(self, found: Observation, seconds: float) -> Observation:
        ends = (("10.0.0.0:40", "10.0.0.1:50", 0), ("10.0.0.1:40", "10.0.0.0:50", 1))
        request = found.requests.evidence_name
        answers = []
        for local_address, remote_address, rank in ends:
            sender = LinkWindow(
                local_address, remote_address, rank, 0, 5.0, 10**8, 2.0, early_bytes=10**8, early_busy_seconds=1.0
            )
            receiver = LinkWindow(
                *(("10.0.0.0:50", "10.0.0.1:40", 0) if rank == 0 else ("10.0.0.1:50", "10.0.0.0:40", 1))
            )
            links = tuple(replace(end, age=age) for end in (sender, receiver) for age in range(2))
            answers.append(Evidence(request, f"j-w{rank}-0", 1, links=links))
        return replace(found, now=NOW + seconds, evidence=tuple(answers))

    def test_connections_are_measured_before_a_round(self) -> None:
        result = evaluate_job(self.with_answers(self.build_requested(), 1.0), build_policy())
        trial = result.desired.state.adaptation.route_trial
        assert result.desired.plan.membership == 2
        assert trial is not None
        assert [change.bytes_per_second for change in trial.changes] == [pytest.approx(50e6)] * 2

    def test_the_wait_for_measurements_is_limited(self) -> None:
        found = self.build_requested()
        for seconds, membership in ((REROUTE_EVIDENCE_WAIT_SECONDS, 1), (REROUTE_EVIDENCE_WAIT_SECONDS + 0.1, 2)):
            assert evaluate_job(replace(found, now=NOW + seconds), build_policy()).desired.plan.membership == membership

    def test_the_evidence_request_is_withdrawn_if_nothing_is_due(self) -> None:
        found = self.build_requested()
        not_due = replace(
            found, cluster_view=replace(found.cluster_view, network=build_network(waiting=0.0)), now=NOW + 4
        )
        assert evaluate_job(not_due, build_policy()).desired.requests.evidence_name == ""


class TestUnchanged:
    @pytest.mark.parametrize(
        "network",
        [
            None,
            build_network(mode=PathControl.OFF),
            build_network(mode=PathControl.REROLL),
            build_network(membership=7),
            build_network(waiting=0.0, own_routes={(1, 0): 1, (0, 1): 1}),
            replace(build_network(), traffic=None),
            replace(build_network(), jobs={}),
        ],
        ids=["unknown network", "off", "reroll", "another membership", "separate routes", "no plan", "unknown job"],
    )
    def test_no_round_begins_if_nothing_is_due(self, network: NetworkState | None) -> None:
        assert replan.check_replanned_routes(build_colliding(network), build_policy()) is None

    def test_no_round_begins_if_planned_routes_cannot_be_used(self) -> None:
        """A round would change nothing, and would be due again."""
        network = build_network()
        partial = replace(network, spec=replace(network.spec, hops={"10.0.0.1": "s1"}))
        before = build_colliding(partial, own_routes={})
        without_paths = before.with_desired(before.desired.with_plan(paths=None))
        assert replan.check_replanned_routes(without_paths, build_policy()) is None
        small_range = replace(
            network, spec=replace(network.spec, path_control=PathControlSpec(PathControl.PROBE, (20000, 20100)))
        )
        small_range_observation = build_colliding(small_range).with_desired(
            build_colliding(small_range).desired.with_plan(paths=None)
        )
        assert replan.check_replanned_routes(small_range_observation, build_policy()) is None

    def test_no_round_begins_if_the_remedy_is_not_allowed(self) -> None:
        others = frozenset(Remedy) - {Remedy.PLAN_TRAFFIC}
        assert replan.check_replanned_routes(build_colliding(build_network()), build_policy(allow=others)) is None

    def test_no_round_begins_before_the_speed_of_the_current_one_is_measured(self) -> None:
        young = change_members(build_colliding(build_network()), progress={"steps_in_round": 3})
        assert replan.check_replanned_routes(young, build_policy()) is None

    def test_in_mode_recommend_one_incident_is_opened(self) -> None:
        before = build_colliding(build_network())
        first = evaluate_job(before, build_policy(mode=RemediationMode.RECOMMEND))
        (incident,) = list_decisions(first)
        assert (incident.remedy, incident.applied) == (Remedy.PLAN_TRAFFIC, None)
        assert first.desired.plan.membership == 1
        current = before.with_desired(first.desired)
        for n in range(3):
            result = evaluate_job(replace(current, now=NOW + 1 + n), build_policy(mode=RemediationMode.RECOMMEND))
            assert not list_decisions(result)
            current = current.with_desired(result.desired)

    def test_a_move_that_is_not_allowed_is_recommended_and_not_planned(self) -> None:
        """The plan keeps the job's current routes: other jobs are not planned around a move that does not happen."""
        network = build_network(can_move=False)
        assert network.traffic is not None
        assert network.traffic.due == {}
        assert network.traffic.routes["ns", "j"] == COLLIDING
        result = evaluate_job(build_colliding(network), build_policy(mode=RemediationMode.RECOMMEND))
        (incident,) = list_decisions(result)
        assert (incident.remedy, incident.applied) == (Remedy.PLAN_TRAFFIC, None)
        assert "wins all jobs 480 s" in incident.message
        assert result.desired.plan.membership == 1

    def test_a_second_incident_of_the_round_has_a_separate_name(self) -> None:
        before = build_colliding(build_network())
        (incident,) = list_decisions(evaluate_job(before, build_policy()))
        live = replace(incident, live=True, remedy=Remedy.LOCAL_SGD)
        result = evaluate_job(before.with_desired(before.desired.with_incident(live)), build_policy())
        assert result.desired.plan.membership == 2
        names = {opened.name for opened in result.desired.state.incidents.current}
        assert len(names) == 2


class TestPrice:
    def test_the_slowdown_by_traffic_follows_the_waiting_share(self) -> None:
        assert compute_traffic_slowdown(0.5, 1.0, 2.0) == pytest.approx(1 / 0.75)
        assert compute_traffic_slowdown(0.0, 1.0, 2.0) == 1.0
        assert compute_traffic_slowdown(0.5, 1.0, 1.0) == 1.0
        assert compute_traffic_slowdown(0.5, 2.0, 1.0) < 1.0, "the job gives way"
        assert compute_traffic_slowdown(0.5, 1.0, 0.0) == 1.0, "it sends nothing between leaves"
        assert compute_traffic_slowdown(1.0, 0.0, 1.0) == pytest.approx(100.0), "bounded"

    def test_the_option_is_exact_and_costs_a_restart(self) -> None:
        option = build_plan_traffic_option(build_colliding(build_network()), build_policy())
        assert (option.exact, option.slowdown_after, option.refused) == (True, 1.0, "")
        assert option.cost_seconds == build_colliding(build_network()).restarts.estimate_cost()
        assert (
            "remediation.allow"
            in build_plan_traffic_option(build_colliding(build_network()), build_policy(allow=frozenset())).refused
        )


def test_the_phase_during_the_round_is_a_recovery() -> None:
    before = build_colliding(build_network())
    later = before.with_desired(evaluate_job(before, build_policy()).desired)
    assert str(build_job_status(later, build_policy(), JobStatus()).phase) == "Recovering"
