"""What a job's flows show about their routes, and how the reports are recorded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from pacekeeper_operator.api.fabric import PathControl
from pacekeeper_operator.decide.evaluate import evaluate_job
from pacekeeper_operator.decide.network import paths, route_reports, slow_communication
from pacekeeper_operator.decide.network.link_state import ROUTE_REPORT_TTL_SECONDS, find_accused_links
from pacekeeper_operator.state import state_codec
from pacekeeper_operator.state.desired_state import MAX_ROUTE_OBSERVATIONS, DesiredState, RouteObservation
from pacekeeper_operator.state.network import JobTraffic, NetworkState, NodeRanks, RankPair
from pacekeeper_operator.state.observation import Observation
from testing.network.flows import (
    RING,
    answer_request,
    build_connection_answers,
    build_network_state,
    build_observation,
)
from testing.operators.observations import NOW, build_policy

AT_A: Mapping[RankPair, float] = {(0, 3): 4.0, (1, 0): 4.0}
"""The link of leaf a to the first spine: rank 0 sends over it to leaf d, and receives over it from leaf b."""


def build_measured(
    slow: Mapping[RankPair, float] | None = AT_A, network: NetworkState | None = None, **changes: object
) -> Observation:
    """Build a job with the answers of all ranks, recorded by `record_link_evidence`."""
    observation = build_observation(network or build_network_state(), **changes)  # type: ignore[arg-type]
    found = answer_request(observation, build_connection_answers(slow))
    return found.with_desired(slow_communication.record_link_evidence(found, build_policy()))


def map_ratios(desired: DesiredState) -> Mapping[tuple[str, str, str], float]:
    return {
        (report.source, report.spine, report.destination): report.ratio
        for report in desired.state.adaptation.route_observations
    }


class TestMeasured:
    def test_slow_and_fast_flows_are_reported(self) -> None:
        desired = route_reports.record_route_reports(build_measured(), build_policy())
        assert map_ratios(desired) == {
            ("a", "s1", "d"): pytest.approx(4.0),
            ("b", "s1", "a"): pytest.approx(4.0),
            ("c", "s1", "b"): 1.0,
            ("d", "s1", "c"): 1.0,
        }
        assert set(find_accused_links(desired.state.adaptation.route_observations, NOW)) == {("a", "s1")}

    def test_a_report_names_the_nodes_of_both_ends(self) -> None:
        found = {
            (report.sender, report.receiver)
            for report in route_reports.record_route_reports(
                build_measured(), build_policy()
            ).state.adaptation.route_observations
        }
        assert found == {(f"node-{source}", f"node-{destination}") for source, destination in RING}

    def test_without_slow_flows_all_ratios_are_one(self) -> None:
        assert set(map_ratios(route_reports.record_route_reports(build_measured({}), build_policy())).values()) == {1.0}

    def test_planned_sharing_of_a_link_is_no_slowness(self) -> None:
        """Four flows of other jobs use the uplink of leaf a, so the transfer takes five times as long."""
        four = tuple(
            JobTraffic(
                ("ns", f"o{n}"), (NodeRanks("node-4", (0,)), NodeRanks("node-7", (1,))), 1, {(0, 1): 0, (1, 0): 0}
            )
            for n in range(4)
        )
        found = map_ratios(
            route_reports.record_route_reports(
                build_measured({(0, 3): 5.0}, build_network_state(dict.fromkeys(RING, 0), *four)), build_policy()
            )
        )
        assert ("a", "s1", "d") not in found, "neither slow nor fast"
        found = map_ratios(
            route_reports.record_route_reports(
                build_measured({(0, 3): 25.0}, build_network_state(dict.fromkeys(RING, 0), *four)), build_policy()
            )
        )
        assert found["a", "s1", "d"] == pytest.approx(5.0)

    def test_only_flows_on_their_planned_route_are_reported(self) -> None:
        desired = route_reports.record_route_reports(build_measured(in_force=[(1, 0)]), build_policy())
        assert set(map_ratios(desired)) == {("b", "s1", "a")}

    def test_a_flow_that_was_slow_from_the_start_is_not_reported_as_fast(self) -> None:
        """In a round that began on a slow link, the first windows are slow, too."""
        before = build_observation(build_network_state())
        first, *others = build_connection_answers()
        ends = (
            replace(end, busy_seconds=4.0, early_busy_seconds=4.0) if end.acked_bytes else end for end in first.links
        )
        found = answer_request(before, (replace(first, links=tuple(ends)), *others))
        found = found.with_desired(slow_communication.record_link_evidence(found, build_policy()))
        assert ("a", "s1", "d") not in map_ratios(route_reports.record_route_reports(found, build_policy()))

    def test_one_slow_window_is_not_reported(self) -> None:
        slow, normal = build_connection_answers(AT_A), build_connection_answers()
        mixed = [
            replace(
                answer,
                links=(*(end for end in answer.links if not end.age), *(end for end in earlier.links if end.age)),
            )
            for answer, earlier in zip(slow, normal, strict=True)
        ]
        found = answer_request(build_observation(build_network_state()), mixed)
        found = found.with_desired(slow_communication.record_link_evidence(found, build_policy()))
        assert set(map_ratios(route_reports.record_route_reports(found, build_policy()))) == {
            ("c", "s1", "b"),
            ("d", "s1", "c"),
        }

    @pytest.mark.parametrize("mode", [PathControl.OFF, PathControl.REROLL])
    def test_without_planned_routes_nothing_is_reported(self, mode: PathControl) -> None:
        found = build_measured(network=build_network_state(mode=mode))
        assert route_reports.record_route_reports(found, build_policy()) is found.desired
        without_network = replace(found, cluster_view=replace(found.cluster_view, network=None))
        assert route_reports.record_route_reports(without_network, build_policy()) is without_network.desired

    def test_a_measurement_is_reported_once(self) -> None:
        found = build_measured()
        recorded = found.with_desired(route_reports.record_route_reports(found, build_policy()))
        later = replace(recorded, now=NOW + 2)
        assert route_reports.record_route_reports(later, build_policy()) is later.desired

    def test_a_whole_pass_records_reports(self) -> None:
        result = evaluate_job(
            answer_request(build_observation(build_network_state()), build_connection_answers(AT_A)), build_policy()
        )
        assert not result.failed_steps
        assert len(result.desired.state.adaptation.route_observations) == 4


class TestLostLink:
    """Leaf a has lost its link to one spine: it is unknown which of the others its flows use."""

    @pytest.mark.parametrize("dead", ["s1", "s2"])
    def test_flows_that_may_have_left_their_route_are_not_reported(self, dead: str) -> None:
        found = build_measured({(0, 3): 4.0, (2, 1): 4.0}, build_network_state(dead=[("a", dead)]))
        assert set(map_ratios(route_reports.record_route_reports(found, build_policy()))) == {
            ("c", "s1", "b"),
            ("d", "s1", "c"),
        }

    def test_recent_reports_are_dropped_when_a_link_is_lost(self) -> None:
        found = build_measured()
        found = found.with_desired(route_reports.record_route_reports(found, build_policy()))
        assert route_reports.has_new_slow_links(found)
        changed_view = replace(found.cluster_view, network=build_network_state(dead=[("a", "s1")]))
        for age, is_recorded in ((2.0, False), (2.0 * route_reports.NEW_ROUTE_REPORT_SECONDS, True)):
            later = replace(found, now=NOW + age, cluster_view=changed_view)
            later = later.with_desired(route_reports.record_route_reports(later, build_policy()))
            assert (("a", "s1", "d") in map_ratios(later.desired)) is is_recorded
            assert not route_reports.has_new_slow_links(later)

    def test_flows_are_reported_in_a_round_that_was_planned_after_the_loss(self) -> None:
        network = build_network_state(dict.fromkeys(RING, 1), dead=[("a", "s1")])
        found = build_measured({(0, 3): 4.0}, network, routes=dict.fromkeys(RING, 1))
        planned = paths.plan_job_paths(found, network)
        assert planned is not None
        found = found.with_desired(found.desired.with_plan(paths=planned))
        assert set(map_ratios(route_reports.record_route_reports(found, build_policy()))) >= {("a", "s2", "d")}


class TestDead:
    def test_a_link_that_drops_all_packets_is_reported_as_dead(self) -> None:
        found = build_observation(build_network_state(), black_holes=[(1, 0)])
        desired = route_reports.record_route_reports(found, build_policy())
        assert map_ratios(desired) == {("b", "s1", "a"): 0.0}
        assert find_accused_links(desired.state.adaptation.route_observations, NOW) == {("a", "s1"): 0.0}

    def test_a_dead_link_is_reported_again_before_the_report_expires(self) -> None:
        found = build_observation(build_network_state(), black_holes=[(1, 0)])
        found = found.with_desired(route_reports.record_route_reports(found, build_policy()))
        for age, is_renewed in ((5.0, False), (ROUTE_REPORT_TTL_SECONDS / 2, True)):
            desired = route_reports.record_route_reports(replace(found, now=NOW + age), build_policy())
            assert (desired.state.adaptation.route_observations[0].at == NOW + age) is is_renewed

    def test_reports_of_an_earlier_membership_are_ignored(self) -> None:
        """The reports are of the membership before."""
        found = build_observation(build_network_state(), black_holes=[(1, 0)])
        found = found.with_desired(found.desired.with_plan(membership=2))
        assert route_reports.record_route_reports(found, build_policy()) is found.desired


class TestRecorded:
    def build_report(self, number: int, ratio: float, at: float = NOW) -> RouteObservation:
        return RouteObservation(at, "a", "s1", "b", f"n{number}", "m", ratio)

    def build_with_reports(self, *reports: RouteObservation, now: float = NOW) -> Observation:
        found = build_observation(build_network_state())
        return replace(found.with_desired(found.desired.with_adaptation(route_observations=reports)), now=now)

    def test_reports_survive_encoding_and_decoding(self) -> None:
        desired = route_reports.record_route_reports(build_measured(), build_policy())
        assert state_codec.decode_state(state_codec.encode_state(desired, "j"), "j").desired.is_stored_as(desired)

    def test_reports_expire(self) -> None:
        old, new = (
            self.build_report(1, 4.0, NOW - ROUTE_REPORT_TTL_SECONDS),
            self.build_report(2, 4.0, NOW - ROUTE_REPORT_TTL_SECONDS + 1),
        )
        assert route_reports.record_route_reports(
            self.build_with_reports(old, new), build_policy()
        ).state.adaptation.route_observations == (new,)

    def test_the_number_of_reports_is_limited_and_slow_ones_take_precedence(self) -> None:
        fast = tuple(self.build_report(n, 1.0) for n in range(2 * MAX_ROUTE_OBSERVATIONS))
        slow = tuple(self.build_report(-n, 4.0, NOW - 60) for n in range(1, 4))
        recorded = route_reports.record_route_reports(
            self.build_with_reports(*slow, *fast), build_policy()
        ).state.adaptation.route_observations
        assert len(recorded) == MAX_ROUTE_OBSERVATIONS
        assert set(slow) <= set(recorded)


class TestNewReports:
    def build_with_report(self, report: RouteObservation, known: tuple[RouteObservation, ...] = ()) -> Observation:
        found = build_observation(build_network_state(route_observations=known))
        return found.with_desired(found.desired.with_adaptation(route_observations=(report,)))

    def test_a_new_slow_link_waits_for_joint_planning(self) -> None:
        report = RouteObservation(NOW - 1, "a", "s1", "b", "node-0", "node-1", 4.0)
        assert route_reports.has_new_slow_links(self.build_with_report(report))
        assert route_reports.has_unplanned_slow_links(self.build_with_report(report))
        assert not route_reports.has_unplanned_slow_links(self.build_with_report(report, known=(report,)))

    @pytest.mark.parametrize("changes", [{"ratio": 1.0}, {"at": NOW - route_reports.NEW_ROUTE_REPORT_SECONDS - 1}])
    def test_fast_or_old_reports_are_not_new(self, changes: dict[str, Any]) -> None:
        old = replace(RouteObservation(NOW - 1, "a", "s1", "b", "node-0", "node-1", 4.0), **changes)
        assert not route_reports.has_new_slow_links(self.build_with_report(old))
        assert not route_reports.has_unplanned_slow_links(self.build_with_report(old))
