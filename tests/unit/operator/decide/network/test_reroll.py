"""A slow link in a fabric of unknown topology."""

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
from tests.unit.operator.decide.network.test_slow_communication import INCIDENT, build_answered

LINK = {(0, 1)}


def build_network(*others: JobTraffic, mode: PathControl = PathControl.REROLL, last_port: int = 29999) -> NetworkState:
    spec = FabricSpec(2, path_control=PathControlSpec(mode, (20000, last_port)))
    return NetworkState(spec, build_wiring(spec, [], {}), {job.name: job for job in others}, None)


def build_drawn(
    slow: set[tuple[int, int]] = LINK, *, draws: int = 0, network: NetworkState | None = None
) -> Observation:
    """Build a job with an answered probe from rank 0 to rank 1; `draws`: how often its ports have been drawn."""
    found = build_answered(slow)
    if draws:
        path = Paths((PlannedPath(0, 1, draw=draws), PlannedPath(2, 3, draw=1)), (), 20000, 20511)
        found = found.with_desired(found.desired.with_plan(paths=path))
    return replace(found, cluster_view=replace(found.cluster_view, network=network or build_network()))


def test_a_new_round_of_the_same_workers_gives_the_pair_other_ports() -> None:
    before = build_drawn()
    result = evaluate_job(before, build_policy())
    after = result.desired.plan
    assert not result.failed_steps
    assert (after.membership, after.members) == (before.plan.membership + 1, before.plan.members)
    assert after.paths == Paths((PlannedPath(0, 1, draw=1),), (), 20000, 20511)
    assert not result.desired.state.budget.restarts
    incident = result.desired.state.incidents.find(INCIDENT.name)
    assert incident is not None
    assert (incident.remedy, incident.live) == (Remedy.PLAN_TRAFFIC, False)
    assert "the link 0 → 1 is slow" in incident.message


def test_the_route_trial_records_the_previous_speed() -> None:
    before = build_drawn()
    check = before.requests.link_check
    assert check is not None
    assert check.hottest is not None
    fast = replace(check, hottest=replace(check.hottest, bytes_per_second=12e6))
    before = before.with_desired(before.desired.with_requests(link_check=fast))
    before = replace(before, probes=build_answered(LINK).probes)
    trial = evaluate_job(before, build_policy()).desired.state.adaptation.route_trial
    assert trial is not None
    assert (trial.incident, trial.membership) == (INCIDENT.name, 2)
    assert trial.changes == (RouteChange(0, 1, draw=1, bytes_per_second=12e6),)


def test_the_probe_counts_against_the_budget_per_hour() -> None:
    verdicts = evaluate_job(build_drawn(), build_policy()).desired.state.adaptation.link_verdicts
    assert [verdict.verdict for verdict in verdicts] == [LinkProbeVerdict.LINK]


def test_a_pair_that_is_slow_again_gets_new_ports_and_others_stay() -> None:
    after = evaluate_job(build_drawn(draws=2), build_policy()).desired.plan.paths
    assert after is not None
    assert set(after.wanted) == {PlannedPath(0, 1, draw=3), PlannedPath(2, 3, draw=1)}


def test_the_number_of_draws_is_limited() -> None:
    assert reroll.check_port_reroll(build_drawn(draws=MAX_PORT_DRAWS), build_policy()) is None
    assert reroll.check_port_reroll(build_drawn(draws=MAX_PORT_DRAWS - 1), build_policy()) is not None


@pytest.mark.parametrize(
    "slow",
    [{(0, 1), (0, 2), (0, 3)}, {(0, 1), (2, 1), (3, 1)}, set()],
    ids=["the sender's side", "the receiver's side", "nothing"],
)
def test_ports_are_drawn_only_for_a_single_slow_link(slow: set[tuple[int, int]]) -> None:
    assert reroll.check_port_reroll(build_drawn(slow), build_policy()) is None


@pytest.mark.parametrize("mode", [PathControl.OFF, PathControl.PROBE])
def test_no_ports_are_drawn_in_other_modes_or_without_a_network(mode: PathControl) -> None:
    assert reroll.check_port_reroll(build_drawn(network=build_network(mode=mode)), build_policy()) is None
    unknown = build_drawn()
    assert (
        reroll.check_port_reroll(
            replace(unknown, cluster_view=replace(unknown.cluster_view, network=None)), build_policy()
        )
        is None
    )


def test_no_ports_are_drawn_if_the_remedy_is_not_allowed() -> None:
    assert (
        reroll.check_port_reroll(build_drawn(), build_policy(allow=frozenset(Remedy) - {Remedy.PLAN_TRAFFIC})) is None
    )


def test_in_mode_recommend_the_plan_stays() -> None:
    result = evaluate_job(build_drawn(), build_policy(mode=RemediationMode.RECOMMEND))
    assert result.desired.plan.paths is None
    assert result.desired.plan.membership == 1


def test_no_ports_are_drawn_before_the_loss_reaches_the_price() -> None:
    early = build_drawn()
    incident = replace(INCIDENT, first_sign=early.now - 1.0)
    assert reroll.check_port_reroll(early.with_desired(early.desired.with_incident(incident)), build_policy()) is None


def test_no_ports_are_drawn_while_answers_are_awaited() -> None:
    waiting = replace(build_drawn(), probes=())
    assert reroll.check_port_reroll(waiting, build_policy()) is None


def test_no_ports_are_drawn_if_the_range_is_too_small() -> None:
    assert reroll.check_port_reroll(build_drawn(network=build_network(last_port=20100)), build_policy()) is None


class TestDrawnPorts:
    """Drawn ports stay in the plan while the members do."""

    def build_drawn_once(self) -> Observation:
        return build_drawn(draws=1)

    def test_drawn_ports_stay(self) -> None:
        found = self.build_drawn_once()
        assert paths.update_planned_paths(found, build_policy()) is found.desired

    def test_drawn_ports_are_removed_with_other_members(self) -> None:
        before = self.build_drawn_once()
        before = before.with_desired(before.desired.with_requests(link_check=None))
        result = evaluate_job(change_worker(before, "j-w3-0", gone=True), build_policy())
        assert result.desired.plan.membership == 2
        assert result.desired.plan.paths is None

    def test_drawn_ports_are_removed_when_path_control_is_off(self) -> None:
        off = build_network(mode=PathControl.OFF)
        found = replace(
            self.build_drawn_once(), cluster_view=replace(self.build_drawn_once().cluster_view, network=off)
        )
        assert paths.update_planned_paths(found, build_policy()).plan.paths is None

    def test_drawn_ports_differ_from_those_of_other_jobs_on_the_nodes(self) -> None:
        other = JobTraffic(("ns", "a"), (NodeRanks("node-1", (0,)),), ports=(20000, 20511))
        after = evaluate_job(build_drawn(network=build_network(other)), build_policy()).desired.plan.paths
        assert after is not None
        assert after.first_port == 20512
