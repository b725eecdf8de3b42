"""Other ways for flows that collide: when a round is begun for them, and what is written of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from pacekeeper_analysis.fabric.view import LinkState
from pacekeeper_analysis.protocol.plan import EvidencePart, Hop, Paths, PlannedPath
from pacekeeper_analysis.protocol.reports import Evidence, LinkWindow
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


def network(
    *,
    own: Mapping[RankPair, int] = COLLIDING,
    mode: PathControl = PathControl.PROBE,
    waiting: float = 0.4,
    membership: int = 1,
    acts: bool = True,
    **changes: Any,
) -> NetworkState:
    """The job of `training` on node-0 and node-1 beside another one that uses the first of two spines."""
    spec = FabricSpec(2, levels=(LevelSpec("leaf"),), hops=HOPS, path_control=PathControlSpec(mode), **changes)
    nodes = [NodeView(f"node-{n}", f"u{n}", labels={"leaf": "ab"[n % 2]}) for n in range(4)]
    wiring = build_wiring(spec, nodes, {})
    mine = JobTraffic(("ns", "j"), (NodeRanks("node-0", (0,)), NodeRanks("node-1", (1,))), membership, own)
    mine = replace(mine, wait_share=waiting, round_seconds=5.0, can_move=acts)
    other = JobTraffic(
        ("ns", "o"),
        (NodeRanks("node-2", (0,)), NodeRanks("node-3", (1,))),
        1,
        COLLIDING,
        wait_share=0.4,
        round_seconds=900.0,
    )
    jobs = {job.name: job for job in (mine, other)}
    return NetworkState(spec, wiring, jobs, traffic.plan_joint_traffic(wiring, list(jobs.values())))


def world(
    seen: NetworkState | None,
    own: Mapping[RankPair, int] = COLLIDING,
    *,
    asked_at: float = NOW - REROUTE_EVIDENCE_WAIT_SECONDS - 1,
) -> Observation:
    """`asked_at`: when its connections were asked for their pace, which they have not told."""
    found = build_training(2, 0)
    found = found.with_desired(found.desired.with_adaptation(connections_requested_at=asked_at))
    paths = Paths(
        tuple(PlannedPath(*pair, f"s{way + 1}") for pair, way in own.items()),
        tuple(Hop(address, spine) for address, spine in HOPS.items()),
        20000,
        20511,
    )
    found = found.with_desired(found.desired.with_plan(paths=paths))
    return replace(found, cluster_view=replace(found.cluster_view, network=seen))


class TestDecided:
    def test_a_round_by_the_same_workers_over_other_ways(self) -> None:
        before = world(network())
        thought = evaluate_job(before, build_policy())
        after = thought.desired.plan
        assert not thought.failed_steps
        assert (after.membership, after.members) == (2, before.plan.members)
        assert set(get_planned_routes(after).values()) == {1}
        assert after.paths is not None
        assert before.plan.paths is not None
        assert after.paths.first_port == before.plan.paths.first_port
        assert not thought.desired.state.budget.restarts, "nothing was broken"

    def test_what_is_written_of_it(self) -> None:
        (incident,) = list_decisions(evaluate_job(world(network()), build_policy()))
        assert (incident.cause, incident.class_, incident.remedy, incident.live) == (
            IncidentCause.SLOW_COMMUNICATION,
            IncidentClass.PERFORMANCE,
            Remedy.PLAN_TRAFFIC,
            False,
        )
        (price,) = incident.remedies
        assert price.chosen
        assert price.gain_seconds == pytest.approx(2 * 2 * 600 * 0.4 * 0.5 / 2), (
            "of both jobs, for each rank of this one"
        )
        assert incident.slowdown_before == pytest.approx(1 / 0.8)
        assert "wins all jobs 480 s" in incident.message

    def test_its_round_is_over_with_the_first_step_and_then_it_is_measured(self) -> None:
        before = world(network())
        thought = evaluate_job(before, build_policy())
        later = replace(before.with_desired(thought.desired), now=NOW + 3)
        waiting = evaluate_job(later, build_policy())
        assert not list_decisions(waiting)
        done = change_members(
            later, membership=2, round=2, start={"first_step_at": NOW + 2}, progress={"steps_in_round": 1}
        )
        draft = evaluate_job(done, build_policy()).desired
        (incident,) = draft.state.incidents.current
        assert (incident.outcome, incident.live, incident.recovered) == (None, True, NOW + 2)
        assert draft.state.budget.restart_seconds == pytest.approx(2.0)

    def test_what_is_to_be_found_out_is_kept_with_the_way_back(self) -> None:
        trial = evaluate_job(world(network()), build_policy()).desired.state.adaptation.route_trial
        assert trial is not None
        assert (trial.membership, trial.step_seconds) == (2, 0.1)
        assert trial.changes == (RouteChange(0, 1, "s1", 0, "s2", 0), RouteChange(1, 0, "s1", 0, "s2", 0))

    def test_nothing_of_a_job_that_makes_way_for_others(self) -> None:
        seen = network()
        assert seen.traffic is not None
        due = {name: replace(one, slowdown=1.0) for name, one in seen.traffic.due.items()}
        thought = evaluate_job(world(replace(seen, traffic=replace(seen.traffic, due=due))), build_policy())
        assert (thought.desired.plan.membership, thought.desired.state.adaptation.route_trial) == (2, None)

    def test_a_slow_link_is_gone_around(self) -> None:
        slow = tuple(LinkException(leaf, "s1", LinkState.SLOW, 1e11) for leaf in "ab")
        alone = network(exceptions=slow)
        jobs = {("ns", "j"): alone.jobs["ns", "j"]}
        seen = replace(alone, jobs=jobs, traffic=traffic.plan_joint_traffic(alone.wiring, list(jobs.values())))
        assert set(get_planned_routes(evaluate_job(world(seen), build_policy()).desired.plan).values()) == {1}

    def test_a_dead_one_too(self) -> None:
        """Its flows are on the other one by now, where the network has put them: nothing is to be won beside a job that
        cannot go elsewhere either."""
        dead = network(exceptions=(LinkException("a", "s1"), LinkException("b", "s1")))
        assert dead.traffic is not None
        assert set(dead.traffic.routes["ns", "j"].values()) == {1}
        assert not list_decisions(evaluate_job(world(dead), build_policy()))


class TestMeasuredBefore:
    """What the connections are worth by the ways so far, to be compared."""

    def asked(self) -> Observation:
        before = world(network(), asked_at=0.0)
        first = evaluate_job(before, build_policy())
        assert not list_decisions(first)
        assert first.desired.state.adaptation.connections_requested_at == NOW
        assert EvidencePart.LINKS in first.desired.plan.evidence_parts
        return before.with_desired(first.desired)

    def told(self, found: Observation, seconds: float) -> Observation:
        ends = (("10.0.0.0:40", "10.0.0.1:50", 0), ("10.0.0.1:40", "10.0.0.0:50", 1))
        request = found.plan.evidence_request
        answers = []
        for local, remote, rank in ends:
            sent = LinkWindow(local, remote, rank, 0, 5.0, 10**8, 2.0, early_bytes=10**8, early_busy_seconds=1.0)
            heard = LinkWindow(*(("10.0.0.0:50", "10.0.0.1:40", 0) if rank == 0 else ("10.0.0.1:50", "10.0.0.0:40", 1)))
            links = tuple(replace(end, age=age) for end in (sent, heard) for age in range(2))
            answers.append(Evidence(request, f"j-w{rank}-0", 1, links=links))
        return replace(found, now=NOW + seconds, evidence=tuple(answers))

    def test_they_are_asked_before_a_round(self) -> None:
        thought = evaluate_job(self.told(self.asked(), 1.0), build_policy())
        trial = thought.desired.state.adaptation.route_trial
        assert thought.desired.plan.membership == 2
        assert trial is not None
        assert [one.bytes_per_second for one in trial.changes] == [pytest.approx(50e6)] * 2

    def test_but_not_waited_for_long(self) -> None:
        found = self.asked()
        for seconds, membership in ((REROUTE_EVIDENCE_WAIT_SECONDS, 1), (REROUTE_EVIDENCE_WAIT_SECONDS + 0.1, 2)):
            assert evaluate_job(replace(found, now=NOW + seconds), build_policy()).desired.plan.membership == membership

    def test_and_the_question_is_taken_back_where_nothing_is_due_any_more(self) -> None:
        found = self.asked()
        over = replace(found, cluster_view=replace(found.cluster_view, network=network(waiting=0.0)), now=NOW + 4)
        assert evaluate_job(over, build_policy()).desired.plan.evidence_request == ""


class TestLeftAlone:
    @pytest.mark.parametrize(
        "seen",
        [
            None,
            network(mode=PathControl.OFF),
            network(mode=PathControl.REROLL),
            network(membership=7),
            network(waiting=0.0, own={(1, 0): 1, (0, 1): 1}),
            replace(network(), traffic=None),
            replace(network(), jobs={}),
        ],
        ids=["not looked", "off", "reroll", "another membership", "apart already", "no plan", "not known"],
    )
    def test_where_nothing_is_due(self, seen: NetworkState | None) -> None:
        assert replan.check_replanned_routes(world(seen), build_policy()) is None

    def test_where_what_is_planned_cannot_be_followed(self) -> None:
        """A round for it would change nothing, and would be due again."""
        seen = network()
        unheard = replace(seen, spec=replace(seen.spec, hops={"10.0.0.1": "s1"}))
        before = world(unheard, own={})
        bare = before.with_desired(before.desired.with_plan(paths=None))
        assert replan.check_replanned_routes(bare, build_policy()) is None
        crowded = replace(
            seen, spec=replace(seen.spec, path_control=PathControlSpec(PathControl.PROBE, (20000, 20100)))
        )
        without = world(crowded).with_desired(world(crowded).desired.with_plan(paths=None))
        assert replan.check_replanned_routes(without, build_policy()) is None

    def test_where_it_is_not_allowed(self) -> None:
        others = frozenset(Remedy) - {Remedy.PLAN_TRAFFIC}
        assert replan.check_replanned_routes(world(network()), build_policy(allow=others)) is None

    def test_before_the_round_has_shown_its_pace(self) -> None:
        young = change_members(world(network()), progress={"steps_in_round": 3})
        assert replan.check_replanned_routes(young, build_policy()) is None

    def test_in_mode_recommend_it_is_said_once(self) -> None:
        before = world(network())
        first = evaluate_job(before, build_policy(mode=RemediationMode.RECOMMEND))
        (incident,) = list_decisions(first)
        assert (incident.remedy, incident.applied) == (Remedy.PLAN_TRAFFIC, None)
        assert first.desired.plan.membership == 1
        again = before.with_desired(first.desired)
        for n in range(3):
            thought = evaluate_job(replace(again, now=NOW + 1 + n), build_policy(mode=RemediationMode.RECOMMEND))
            assert not list_decisions(thought)
            again = again.with_desired(thought.desired)

    def test_what_is_recommended_for_it_alone_is_said_and_not_done(self) -> None:
        """Its plan holds the ways that it has: nobody plans around a move that will not come."""
        seen = network(acts=False)
        assert seen.traffic is not None
        assert seen.traffic.due == {}
        assert seen.traffic.routes["ns", "j"] == COLLIDING
        thought = evaluate_job(world(seen), build_policy(mode=RemediationMode.RECOMMEND))
        (incident,) = list_decisions(thought)
        assert (incident.remedy, incident.applied) == (Remedy.PLAN_TRAFFIC, None)
        assert "wins all jobs 480 s" in incident.message
        assert thought.desired.plan.membership == 1

    def test_beside_an_incident_of_the_round_it_gets_a_name_of_its_own(self) -> None:
        before = world(network())
        (incident,) = list_decisions(evaluate_job(before, build_policy()))
        live = replace(incident, live=True, remedy=Remedy.LOCAL_SGD)
        thought = evaluate_job(before.with_desired(before.desired.with_incident(live)), build_policy())
        assert thought.desired.plan.membership == 2
        names = {one.name for one in thought.desired.state.incidents.current}
        assert len(names) == 2


class TestPrice:
    def test_what_waits_for_the_ring_shrinks_with_it(self) -> None:
        assert compute_traffic_slowdown(0.5, 1.0, 2.0) == pytest.approx(1 / 0.75)
        assert compute_traffic_slowdown(0.0, 1.0, 2.0) == 1.0
        assert compute_traffic_slowdown(0.5, 1.0, 1.0) == 1.0
        assert compute_traffic_slowdown(0.5, 2.0, 1.0) < 1.0, "of a job that gives way"
        assert compute_traffic_slowdown(0.5, 1.0, 0.0) == 1.0, "it sends nothing between leaves"
        assert compute_traffic_slowdown(1.0, 0.0, 1.0) == pytest.approx(100.0), "bounded"

    def test_it_is_exact_and_costs_a_round(self) -> None:
        option = build_plan_traffic_option(world(network()), build_policy())
        assert (option.exact, option.slowdown_after, option.refused) == (True, 1.0, "")
        assert option.cost_seconds == world(network()).restarts.estimate_cost()
        assert (
            "remediation.allow" in build_plan_traffic_option(world(network()), build_policy(allow=frozenset())).refused
        )


def test_the_phase_meanwhile_is_a_recovery() -> None:
    before = world(network())
    later = before.with_desired(evaluate_job(before, build_policy()).desired)
    assert str(build_job_status(later, build_policy(), JobStatus()).phase) == "Recovering"
