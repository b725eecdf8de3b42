"""Which links are slow, by what flows have shown of their ways."""

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


def word(way: str, ends: str = "", ratio: float = SLOW, at: float = NOW) -> RouteObservation:
    """`a1b`: from leaf a by spine s1 to leaf b. `ends`: numbers of the nodes there, by default nobody else's."""
    source, destination = way[0], way[2]
    sender, receiver = (ends[0], ends[1]) if ends else (way, way)
    return RouteObservation(
        at, source, f"s{way[1]}", destination, f"{source}{sender}", f"{destination}{receiver}", ratio
    )


def fast(way: str, ends: str = "", at: float = NOW) -> RouteObservation:
    return word(way, ends, 1.0, at)


def accused(*words: RouteObservation, now: float = NOW) -> Mapping[LeafSpinePair, float]:
    return find_accused_links(words, now)


class TestIntersection:
    def test_one_slow_flow_leaves_both_its_links(self) -> None:
        assert set(accused(word("a1b"))) == {("a", "s1"), ("b", "s1")}

    def test_a_fast_flow_acquits_what_it_goes_by(self) -> None:
        assert set(accused(word("a1b"), fast("b1c"))) == {("a", "s1")}
        assert set(accused(word("a1b"), fast("c1a"))) == {("b", "s1")}
        assert set(accused(word("a1b"), fast("a2b"))) == {("a", "s1"), ("b", "s1")}, "another spine"

    def test_of_several_slow_flows_what_they_share_is_to_blame(self) -> None:
        assert set(accused(word("a1b"), word("a1c"), word("d1a"))) == {("a", "s1")}

    def test_two_links_that_each_explain_some(self) -> None:
        found = accused(word("a1b"), word("a1c"), word("d2e"), word("d2f"))
        assert set(found) == {("a", "s1"), ("d", "s2")}

    def test_all_that_it_goes_by_is_fast_for_others(self) -> None:
        assert accused(word("a1b"), fast("a1c"), fast("d1b")) == {}

    def test_it_carries_as_much_as_the_mildest_of_its_flows_says(self) -> None:
        assert accused(word("a1b", ratio=4.0), word("a1c", ratio=8.0)) == {("a", "s1"): 0.25}

    def test_nobody_says_anything(self) -> None:
        assert accused() == accused(fast("a1b")) == {}


class TestNodes:
    """A node's only link: all its flows are slow, whatever the spine."""

    def test_whose_flows_go_by_two_spines_is_slow_itself(self) -> None:
        assert accused(word("a1b", "07"), word("c2a", "70")) == {}
        assert accused(word("a1b", "07"), word("a2b", "07"), fast("a1c", "16")) == {}

    def test_where_it_may_be_either_the_link_is_gone_around(self) -> None:
        assert set(accused(word("a1b", "07"), word("c1a", "70"), fast("b1c", "89"))) == {("a", "s1")}

    def test_a_node_that_stays_slow_by_another_spine_clears_the_link(self) -> None:
        before = [word("a1b", "07", at=NOW - 100), word("c1a", "70", at=NOW - 100)]
        after = [word("a2b", "07"), word("c3a", "70")]
        assert set(accused(*before)) == {("a", "s1")}
        assert accused(*before, *after) == {}


class TestDead:
    def test_what_gets_no_further_than_the_spine_accuses_its_other_link_alone(self) -> None:
        assert accused(word("a1b", ratio=0.0)) == {("b", "s1"): 0.0}

    def test_what_passed_before_says_nothing(self) -> None:
        assert accused(word("a1b", ratio=0.0), fast("c1b", at=NOW - 1)) == {("b", "s1"): 0.0}
        assert accused(word("a1b", ratio=0.0, at=NOW - 1), fast("c1b")) == {}

    def test_nor_do_others_who_are_slow_there_make_it_alive(self) -> None:
        assert accused(word("a1b", ratio=0.0), word("c1b", ratio=2.0))["b", "s1"] == 0.5, "something passes"


class TestTime:
    def test_words_are_forgotten(self) -> None:
        assert accused(word("a1b"), now=NOW + ROUTE_REPORT_TTL_SECONDS - 1)
        assert accused(word("a1b"), now=NOW + ROUTE_REPORT_TTL_SECONDS) == {}

    def test_words_of_times_to_come_count_for_nothing(self) -> None:
        assert accused(word("a1b"), now=NOW - 1) == {}

    def test_the_newest_word_of_a_flow_counts(self) -> None:
        assert accused(word("a1b", at=NOW - 5), fast("a1b")) == {}
        assert set(accused(fast("a1b", at=NOW - 5), word("a1b"))) == {("a", "s1"), ("b", "s1")}

    def test_who_was_fast_long_before_acquits_of_nothing(self) -> None:
        assert set(accused(word("a1b"), fast("b1c", at=NOW - ACQUITTAL_WINDOW_SECONDS))) == {("a", "s1")}
        assert len(accused(word("a1b"), fast("b1c", at=NOW - ACQUITTAL_WINDOW_SECONDS - 1))) == 2

    def test_a_link_that_is_found_fast_again_is_well(self) -> None:
        assert accused(word("a1b", at=NOW - 600), fast("a1c"), fast("c1b")) == {}


class TestTenants:
    def test_what_one_namespace_says_counts_for_itself(self) -> None:
        found = find_degraded_links({"liar": [word("a1b", ratio=9.0)], "other": []}, NOW)
        assert found.agreed_shares == {}
        assert set(found.shares_by_namespace) == {"liar"}
        assert set(found.shares_by_namespace["liar"]) == {("a", "s1"), ("b", "s1")}

    def test_what_two_say_counts_for_all_as_the_milder_one_has_it(self) -> None:
        found = find_degraded_links(
            {"one": [word("a1b", ratio=2.0)], "two": [word("c1a", ratio=0.0)], "third": []}, NOW
        )
        assert found.agreed_shares == {("a", "s1"): 0.5}
        assert set(found.shares_by_namespace) == {"one"}
        assert set(found.shares_by_namespace["one"]) == {("b", "s1")}

    def test_where_there_is_nobody_else_it_counts_at_once(self) -> None:
        found = find_degraded_links({"one": [word("a1b"), fast("b1c")]}, NOW)
        assert (found.agreed_shares, found.shares_by_namespace) == ({("a", "s1"): 0.25}, {})

    def test_praise_helps_no_slow_link_of_others(self) -> None:
        """Or a liar would keep its neighbors on it."""
        flatterer = [fast("a1b"), fast("b1a")]
        alone = find_degraded_links({"honest": [word("a1b")], "liar": []}, NOW)
        assert find_degraded_links({"honest": [word("a1b")], "liar": flatterer}, NOW) == alone

    def test_no_jobs(self) -> None:
        assert find_degraded_links({}, NOW) == find_degraded_links({"one": []}, NOW)


@pytest.mark.parametrize("seed", range(30))
def test_a_slow_link_is_found_among_many_flows(seed: int) -> None:
    """64 flows over 6 leaves and 4 spines; one link is slow, and whoever goes by it says so."""
    draw = random.Random(seed)
    guilty = draw.choice("abcdef"), f"s{draw.randint(1, 4)}"
    words = []
    for number in range(64):
        source, destination = draw.sample("abcdef", 2)
        spine = f"s{draw.randint(1, 4)}"
        is_slow = guilty in ((source, spine), (destination, spine))
        seen = RouteObservation(NOW, source, spine, destination, f"{source}{number}", f"{destination}{number}")
        words.append(replace(seen, ratio=3.0 if is_slow else 1.0))
    if any(one.ratio > 1 for one in words):
        assert find_accused_links(words, NOW) == {guilty: pytest.approx(1 / 3)}
