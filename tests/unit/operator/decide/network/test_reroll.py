"""A slow link in a fabric that nobody knows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pacekeeper_analysis.network.link_probe import LinkProbeVerdict
from pacekeeper_analysis.protocol.plan import Paths, PlannedPath
from pacekeeper_operator.api.fabric import FabricSpec, PathControl, PathControlSpec
from pacekeeper_operator.api.training_job import RemediationMode, Remedy
from pacekeeper_operator.decide.evaluate import evaluate_job
from pacekeeper_operator.decide.network import paths, reroll
from pacekeeper_operator.decide.network.reroll import MAX_PORT_DRAWS
from pacekeeper_operator.decide.network.wiring import build_wiring
from pacekeeper_operator.state.desired_state import RouteChange
from pacekeeper_operator.state.network import JobTraffic, NetworkState, NodeRanks
from pacekeeper_operator.state.observation import Observation
from testing.operators.observations import build_policy, change_worker
from tests.unit.operator.decide.network.test_slow_communication import INCIDENT, answered

LINK = {(0, 1)}


def network(*others: JobTraffic, mode: PathControl = PathControl.REROLL, last_port: int = 29999) -> NetworkState:
    spec = FabricSpec(2, path_control=PathControlSpec(mode, (20000, last_port)))
    return NetworkState(spec, build_wiring(spec, [], {}), {job.name: job for job in others}, None)


def world(slow: set[tuple[int, int]] = LINK, *, drawn: int = 0, seen: NetworkState | None = None) -> Observation:
    """A probe of the way from rank 0 to rank 1 has been answered; its ports have been drawn so often."""
    found = answered(slow)
    if drawn:
        path = Paths((PlannedPath(0, 1, draw=drawn), PlannedPath(2, 3, draw=1)), (), 20000, 20511)
        found = found.with_desired(found.desired.with_plan(paths=path))
    return replace(found, cluster_view=replace(found.cluster_view, network=seen or network()))


def test_the_pair_gets_other_ports_in_a_round_by_the_same_workers() -> None:
    before = world()
    thought = evaluate_job(before, build_policy())
    after = thought.desired.plan
    assert not thought.failed_steps
    assert (after.membership, after.members) == (before.plan.membership + 1, before.plan.members)
    assert after.paths == Paths((PlannedPath(0, 1, draw=1),), (), 20000, 20511)
    assert not thought.desired.state.budget.restarts
    incident = thought.desired.state.incidents.find(INCIDENT.name)
    assert incident is not None
    assert (incident.remedy, incident.live) == (Remedy.PLAN_TRAFFIC, False)
    assert "the link 0 → 1 is slow" in incident.message


def test_what_it_was_before_is_kept_to_be_compared() -> None:
    before = world()
    look = before.state.adaptation.link_check
    assert look is not None
    assert look.hottest is not None
    fast = replace(look, hottest=replace(look.hottest, bytes_per_second=12e6))
    before = before.with_desired(before.desired.with_adaptation(link_check=fast))
    before = replace(before, probes=answered(LINK).probes)
    trial = evaluate_job(before, build_policy()).desired.state.adaptation.route_trial
    assert trial is not None
    assert (trial.incident, trial.membership) == (INCIDENT.name, 2)
    assert trial.changes == (RouteChange(0, 1, draw=1, bytes_per_second=12e6),)


def test_its_probe_counts_among_those_of_the_hour() -> None:
    verdicts = evaluate_job(world(), build_policy()).desired.state.adaptation.link_verdicts
    assert [one.verdict for one in verdicts] == [LinkProbeVerdict.LINK]


def test_where_it_is_slow_again_they_are_drawn_again_and_others_stay() -> None:
    after = evaluate_job(world(drawn=2), build_policy()).desired.plan.paths
    assert after is not None
    assert set(after.wanted) == {PlannedPath(0, 1, draw=3), PlannedPath(2, 3, draw=1)}


def test_but_not_for_ever() -> None:
    assert reroll.check_port_reroll(world(drawn=MAX_PORT_DRAWS), build_policy()) is None
    assert reroll.check_port_reroll(world(drawn=MAX_PORT_DRAWS - 1), build_policy()) is not None


@pytest.mark.parametrize(
    "slow",
    [{(0, 1), (0, 2), (0, 3)}, {(0, 1), (2, 1), (3, 1)}, set()],
    ids=["the sender's side", "the receiver's side", "nothing"],
)
def test_what_is_no_single_link_is_not_mended_by_other_ports(slow: set[tuple[int, int]]) -> None:
    assert reroll.check_port_reroll(world(slow), build_policy()) is None


@pytest.mark.parametrize("mode", [PathControl.OFF, PathControl.PROBE])
def test_where_it_is_not_wanted(mode: PathControl) -> None:
    assert reroll.check_port_reroll(world(seen=network(mode=mode)), build_policy()) is None
    unknown = world()
    assert (
        reroll.check_port_reroll(
            replace(unknown, cluster_view=replace(unknown.cluster_view, network=None)), build_policy()
        )
        is None
    )


def test_nor_where_the_job_does_not_allow_it() -> None:
    assert reroll.check_port_reroll(world(), build_policy(allow=frozenset(Remedy) - {Remedy.PLAN_TRAFFIC})) is None


def test_in_mode_recommend_it_is_only_said() -> None:
    thought = evaluate_job(world(), build_policy(mode=RemediationMode.RECOMMEND))
    assert thought.desired.plan.paths is None
    assert thought.desired.plan.membership == 1


def test_before_the_loss_has_reached_its_price_nothing_is_done() -> None:
    soon = world()
    incident = replace(INCIDENT, first_sign=soon.now - 1.0)
    assert reroll.check_port_reroll(soon.with_desired(soon.desired.with_incident(incident)), build_policy()) is None


def test_while_answers_are_awaited_nothing_is_known() -> None:
    waiting = replace(world(), probes=())
    assert reroll.check_port_reroll(waiting, build_policy()) is None


def test_without_ports_there_is_nothing_to_draw() -> None:
    assert reroll.check_port_reroll(world(seen=network(last_port=20100)), build_policy()) is None


class TestKept:
    """Drawn ports stay in the plan while the members do."""

    def drawn(self) -> Observation:
        return world(drawn=1)

    def test_as_they_are(self) -> None:
        found = self.drawn()
        assert paths.update_planned_paths(found, build_policy()) is found.desired

    def test_not_with_other_members(self) -> None:
        before = self.drawn()
        before = before.with_desired(before.desired.with_adaptation(link_check=None))
        thought = evaluate_job(change_worker(before, "j-w3-0", gone=True), build_policy())
        assert thought.desired.plan.membership == 2
        assert thought.desired.plan.paths is None

    def test_nor_where_paths_are_planned_or_nobodys_business_by_now(self) -> None:
        off = network(mode=PathControl.OFF)
        found = replace(self.drawn(), cluster_view=replace(self.drawn().cluster_view, network=off))
        assert paths.update_planned_paths(found, build_policy()).plan.paths is None

    def test_ports_are_those_that_no_other_job_on_its_nodes_has(self) -> None:
        other = JobTraffic(("ns", "a"), (NodeRanks("node-1", (0,)),), ports=(20000, 20511))
        after = evaluate_job(world(seen=network(other)), build_policy()).desired.plan.paths
        assert after is not None
        assert after.first_port == 20512
