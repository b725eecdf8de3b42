"""Which links are slow, according to the flows on their routes."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

import pytest

from pacekeeper_operator.decide.network.link_state import (
    ACQUITTAL_WINDOW_SECONDS,
    ROUTE_REPORT_TTL_SECONDS,
    find_accused_links,
    find_degraded_links,
)
from pacekeeper_operator.state.desired_state import RouteObservation
from pacekeeper_operator.state.network import LeafSpinePair
from testing.operators.observations import NOW

SLOW = 4.0


def build_slow(route: str, ends: str = "", ratio: float = SLOW, time: float = NOW) -> RouteObservation:
    """Build a report. `a1b`: from leaf a over spine s1 to leaf b. `ends`: numbers of the nodes, unique by default."""
    source, destination = route[0], route[2]
    sender, receiver = (ends[0], ends[1]) if ends else (route, route)
    return RouteObservation(
        time, source, f"s{route[1]}", destination, f"{source}{sender}", f"{destination}{receiver}", ratio
    )


def build_fast(route: str, ends: str = "", time: float = NOW) -> RouteObservation:
    return build_slow(route, ends, 1.0, time)


def find_accused(*reports: RouteObservation, now: float = NOW) -> Mapping[LeafSpinePair, float]:
    return find_accused_links(reports, now)


class TestIntersection:
    def test_one_slow_flow_accuses_both_of_its_links(self) -> None:
        assert set(find_accused(build_slow("a1b"))) == {("a", "s1"), ("b", "s1")}

    def test_a_fast_flow_acquits_its_links(self) -> None:
        assert set(find_accused(build_slow("a1b"), build_fast("b1c"))) == {("a", "s1")}
        assert set(find_accused(build_slow("a1b"), build_fast("c1a"))) == {("b", "s1")}
        assert set(find_accused(build_slow("a1b"), build_fast("a2b"))) == {("a", "s1"), ("b", "s1")}, "another spine"

    def test_several_slow_flows_accuse_the_link_that_they_share(self) -> None:
        assert set(find_accused(build_slow("a1b"), build_slow("a1c"), build_slow("d1a"))) == {("a", "s1")}

    def test_two_links_are_accused_if_each_explains_some_flows(self) -> None:
        found = find_accused(build_slow("a1b"), build_slow("a1c"), build_slow("d2e"), build_slow("d2f"))
        assert set(found) == {("a", "s1"), ("d", "s2")}

    def test_no_link_is_accused_if_others_are_fast_on_all_of_them(self) -> None:
        assert find_accused(build_slow("a1b"), build_fast("a1c"), build_fast("d1b")) == {}

    def test_the_share_of_a_link_follows_its_least_slow_flow(self) -> None:
        assert find_accused(build_slow("a1b", ratio=4.0), build_slow("a1c", ratio=8.0)) == {("a", "s1"): 0.25}

    def test_without_slow_flows_no_link_is_accused(self) -> None:
        assert find_accused() == find_accused(build_fast("a1b")) == {}


class TestNodes:
    """The only link of a node: all of its flows are slow over any spine."""

    def test_a_node_that_is_slow_over_two_spines_is_slow_itself(self) -> None:
        assert find_accused(build_slow("a1b", "07"), build_slow("c2a", "70")) == {}
        assert find_accused(build_slow("a1b", "07"), build_slow("a2b", "07"), build_fast("a1c", "16")) == {}

    def test_if_node_or_link_may_be_slow_the_link_is_accused(self) -> None:
        assert set(find_accused(build_slow("a1b", "07"), build_slow("c1a", "70"), build_fast("b1c", "89"))) == {
            ("a", "s1")
        }

    def test_a_node_that_stays_slow_over_another_spine_clears_the_link(self) -> None:
        before = [build_slow("a1b", "07", time=NOW - 100), build_slow("c1a", "70", time=NOW - 100)]
        after = [build_slow("a2b", "07"), build_slow("c3a", "70")]
        assert set(find_accused(*before)) == {("a", "s1")}
        assert find_accused(*before, *after) == {}


class TestDead:
    def test_a_flow_that_ends_at_the_spine_accuses_only_the_link_behind_it(self) -> None:
        assert find_accused(build_slow("a1b", ratio=0.0)) == {("b", "s1"): 0.0}

    def test_a_fast_flow_before_a_dead_report_does_not_count(self) -> None:
        assert find_accused(build_slow("a1b", ratio=0.0), build_fast("c1b", time=NOW - 1)) == {("b", "s1"): 0.0}
        assert find_accused(build_slow("a1b", ratio=0.0, time=NOW - 1), build_fast("c1b")) == {}

    def test_a_slow_flow_on_a_dead_link_makes_it_a_slow_link(self) -> None:
        assert find_accused(build_slow("a1b", ratio=0.0), build_slow("c1b", ratio=2.0))["b", "s1"] == 0.5, (
            "some traffic passes"
        )


class TestTime:
    def test_reports_expire(self) -> None:
        assert find_accused(build_slow("a1b"), now=NOW + ROUTE_REPORT_TTL_SECONDS - 1)
        assert find_accused(build_slow("a1b"), now=NOW + ROUTE_REPORT_TTL_SECONDS) == {}

    def test_reports_from_the_future_are_ignored(self) -> None:
        assert find_accused(build_slow("a1b"), now=NOW - 1) == {}

    def test_the_newest_report_of_a_flow_counts(self) -> None:
        assert find_accused(build_slow("a1b", time=NOW - 5), build_fast("a1b")) == {}
        assert set(find_accused(build_fast("a1b", time=NOW - 5), build_slow("a1b"))) == {("a", "s1"), ("b", "s1")}

    def test_a_fast_flow_long_before_acquits_no_link(self) -> None:
        assert set(find_accused(build_slow("a1b"), build_fast("b1c", time=NOW - ACQUITTAL_WINDOW_SECONDS))) == {
            ("a", "s1")
        }
        assert len(find_accused(build_slow("a1b"), build_fast("b1c", time=NOW - ACQUITTAL_WINDOW_SECONDS - 1))) == 2

    def test_a_link_that_is_fast_again_is_not_accused(self) -> None:
        assert find_accused(build_slow("a1b", time=NOW - 600), build_fast("a1c"), build_fast("c1b")) == {}


class TestTenants:
    def test_reports_of_one_namespace_count_for_that_namespace(self) -> None:
        found = find_degraded_links({"liar": [build_slow("a1b", ratio=9.0)], "other": []}, NOW)
        assert found.agreed_shares == {}
        assert set(found.shares_by_namespace) == {"liar"}
        assert set(found.shares_by_namespace["liar"]) == {("a", "s1"), ("b", "s1")}

    def test_reports_of_two_namespaces_count_for_all_by_the_milder_one(self) -> None:
        found = find_degraded_links(
            {"one": [build_slow("a1b", ratio=2.0)], "two": [build_slow("c1a", ratio=0.0)], "third": []}, NOW
        )
        assert found.agreed_shares == {("a", "s1"): 0.5}
        assert set(found.shares_by_namespace) == {"one"}
        assert set(found.shares_by_namespace["one"]) == {("b", "s1")}

    def test_reports_of_the_only_namespace_count_at_once(self) -> None:
        found = find_degraded_links({"one": [build_slow("a1b"), build_fast("b1c")]}, NOW)
        assert (found.agreed_shares, found.shares_by_namespace) == ({("a", "s1"): 0.25}, {})

    def test_fast_reports_of_one_namespace_acquit_no_link_of_another(self) -> None:
        """Otherwise false reports would keep other jobs on the slow link."""
        praise = [build_fast("a1b"), build_fast("b1a")]
        without_praise = find_degraded_links({"honest": [build_slow("a1b")], "liar": []}, NOW)
        assert find_degraded_links({"honest": [build_slow("a1b")], "liar": praise}, NOW) == without_praise

    def test_without_jobs_no_link_is_degraded(self) -> None:
        assert find_degraded_links({}, NOW) == find_degraded_links({"one": []}, NOW)


@pytest.mark.parametrize("seed", range(30))
def test_a_slow_link_is_found_among_many_flows(seed: int) -> None:
    """64 flows over 6 leaves and 4 spines; one link is slow, and every flow over it reports that."""
    draw = random.Random(seed)
    slow_link = draw.choice("abcdef"), f"s{draw.randint(1, 4)}"
    reports = []
    for number in range(64):
        source, destination = draw.sample("abcdef", 2)
        spine = f"s{draw.randint(1, 4)}"
        is_slow = slow_link in ((source, spine), (destination, spine))
        report = RouteObservation(NOW, source, spine, destination, f"{source}{number}", f"{destination}{number}")
        reports.append(replace(report, ratio=3.0 if is_slow else 1.0))
    if any(each.ratio > 1 for each in reports):
        assert find_accused_links(reports, NOW) == {slow_link: pytest.approx(1 / 3)}
