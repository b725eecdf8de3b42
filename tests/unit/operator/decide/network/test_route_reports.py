"""What a job's flows show of their ways, and how it is kept."""

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


def looked_at(
    slow: Mapping[RankPair, float] | None = AT_A, seen: NetworkState | None = None, **changes: object
) -> Observation:
    """All have answered, and `links.see` has looked at it."""
    found = answer_request(build_observation(seen or build_network_state(), **changes), build_connection_answers(slow))  # type: ignore[arg-type]
    return found.with_desired(slow_communication.record_link_evidence(found, build_policy()))


def words(draft: DesiredState) -> Mapping[tuple[str, str, str], float]:
    return {(one.source, one.spine, one.destination): one.ratio for one in draft.state.adaptation.route_observations}


class TestMeasured:
    def test_who_is_slow_and_who_is_fast(self) -> None:
        draft = route_reports.record_route_reports(looked_at(), build_policy())
        assert words(draft) == {
            ("a", "s1", "d"): pytest.approx(4.0),
            ("b", "s1", "a"): pytest.approx(4.0),
            ("c", "s1", "b"): 1.0,
            ("d", "s1", "c"): 1.0,
        }
        assert set(find_accused_links(draft.state.adaptation.route_observations, NOW)) == {("a", "s1")}

    def test_nodes_are_those_of_the_ends(self) -> None:
        found = {
            (one.sender, one.receiver)
            for one in route_reports.record_route_reports(
                looked_at(), build_policy()
            ).state.adaptation.route_observations
        }
        assert found == {(f"node-{source}", f"node-{destination}") for source, destination in RING}

    def test_nothing_is_slow(self) -> None:
        assert set(words(route_reports.record_route_reports(looked_at({}), build_policy())).values()) == {1.0}

    def test_what_its_way_is_shared_by_plan_is_no_slowness(self) -> None:
        """Four flows of other jobs go by the uplink of leaf a; that takes five times as long."""
        four = tuple(
            JobTraffic(
                ("ns", f"o{n}"), (NodeRanks("node-4", (0,)), NodeRanks("node-7", (1,))), 1, {(0, 1): 0, (1, 0): 0}
            )
            for n in range(4)
        )
        found = words(
            route_reports.record_route_reports(
                looked_at({(0, 3): 5.0}, build_network_state(dict.fromkeys(RING, 0), *four)), build_policy()
            )
        )
        assert ("a", "s1", "d") not in found, "neither slow nor fast"
        found = words(
            route_reports.record_route_reports(
                looked_at({(0, 3): 25.0}, build_network_state(dict.fromkeys(RING, 0), *four)), build_policy()
            )
        )
        assert found["a", "s1", "d"] == pytest.approx(5.0)

    def test_only_a_flow_that_is_seen_on_its_way_speaks_of_it(self) -> None:
        draft = route_reports.record_route_reports(looked_at(in_force=[(1, 0)]), build_policy())
        assert set(words(draft)) == {("b", "s1", "a")}

    def test_who_is_as_slow_as_ever_beside_the_others_is_not_called_fast(self) -> None:
        """Of a round that has begun on a slow link, its first windows are slow, too."""
        before = build_observation(build_network_state())
        first, *others = build_connection_answers()
        ends = (replace(e, busy_seconds=4.0, early_busy_seconds=4.0) if e.acked_bytes else e for e in first.links)
        found = answer_request(before, (replace(first, links=tuple(ends)), *others))
        found = found.with_desired(slow_communication.record_link_evidence(found, build_policy()))
        assert ("a", "s1", "d") not in words(route_reports.record_route_reports(found, build_policy()))

    def test_one_slow_window_is_luck(self) -> None:
        slow, usual = build_connection_answers(AT_A), build_connection_answers()
        lately = [
            replace(one, links=(*(e for e in one.links if not e.age), *(e for e in before.links if e.age)))
            for one, before in zip(slow, usual, strict=True)
        ]
        found = answer_request(build_observation(build_network_state()), lately)
        found = found.with_desired(slow_communication.record_link_evidence(found, build_policy()))
        assert set(words(route_reports.record_route_reports(found, build_policy()))) == {
            ("c", "s1", "b"),
            ("d", "s1", "c"),
        }

    @pytest.mark.parametrize("mode", [PathControl.OFF, PathControl.REROLL])
    def test_where_nobody_plans_ways_nothing_is_said(self, mode: PathControl) -> None:
        found = looked_at(seen=build_network_state(mode=mode))
        assert route_reports.record_route_reports(found, build_policy()) is found.desired
        unseen = replace(found, cluster_view=replace(found.cluster_view, network=None))
        assert route_reports.record_route_reports(unseen, build_policy()) is unseen.desired

    def test_it_is_said_once_in_the_pass_in_which_it_is_looked_at(self) -> None:
        found = looked_at()
        said = found.with_desired(route_reports.record_route_reports(found, build_policy()))
        later = replace(said, now=NOW + 2)
        assert route_reports.record_route_reports(later, build_policy()) is later.desired

    def test_a_pass_does_it_all(self) -> None:
        thought = evaluate_job(
            answer_request(build_observation(build_network_state()), build_connection_answers(AT_A)), build_policy()
        )
        assert not thought.failed_steps
        assert len(thought.desired.state.adaptation.route_observations) == 4


class TestAdrift:
    """Leaf a has lost its link to one spine: by which of the others its flows go, nobody knows."""

    @pytest.mark.parametrize("dead", ["s1", "s2"])
    def test_who_may_have_left_its_way_says_nothing_of_it(self, dead: str) -> None:
        found = looked_at({(0, 3): 4.0, (2, 1): 4.0}, build_network_state(dead=[("a", dead)]))
        assert set(words(route_reports.record_route_reports(found, build_policy()))) == {
            ("c", "s1", "b"),
            ("d", "s1", "c"),
        }

    def test_what_it_has_said_before_that_was_told_is_forgotten(self) -> None:
        found = looked_at()
        found = found.with_desired(route_reports.record_route_reports(found, build_policy()))
        assert route_reports.has_new_slow_links(found)
        told = replace(found.cluster_view, network=build_network_state(dead=[("a", "s1")]))
        for age, kept in ((2.0, False), (2.0 * route_reports.NEW_ROUTE_REPORT_SECONDS, True)):
            later = replace(found, now=NOW + age, cluster_view=told)
            later = later.with_desired(route_reports.record_route_reports(later, build_policy()))
            assert (("a", "s1", "d") in words(later.desired)) is kept
            assert not route_reports.has_new_slow_links(later)

    def test_by_a_round_that_knows_of_it_a_flow_is_on_its_way(self) -> None:
        seen = build_network_state(dict.fromkeys(RING, 1), dead=[("a", "s1")])
        found = looked_at({(0, 3): 4.0}, seen, routes=dict.fromkeys(RING, 1))
        planned = paths.plan_job_paths(found, seen)
        assert planned is not None
        found = found.with_desired(found.desired.with_plan(paths=planned))
        assert set(words(route_reports.record_route_reports(found, build_policy()))) >= {("a", "s2", "d")}


class TestDead:
    def test_a_leaf_that_swallows_what_goes_by_a_spine(self) -> None:
        found = build_observation(build_network_state(), black_holes=[(1, 0)])
        draft = route_reports.record_route_reports(found, build_policy())
        assert words(draft) == {("b", "s1", "a"): 0.0}
        assert find_accused_links(draft.state.adaptation.route_observations, NOW) == {("a", "s1"): 0.0}

    def test_it_is_said_again_before_it_is_forgotten(self) -> None:
        found = build_observation(build_network_state(), black_holes=[(1, 0)])
        found = found.with_desired(route_reports.record_route_reports(found, build_policy()))
        for age, again in ((5.0, False), (ROUTE_REPORT_TTL_SECONDS / 2, True)):
            draft = route_reports.record_route_reports(replace(found, now=NOW + age), build_policy())
            assert (draft.state.adaptation.route_observations[0].at == NOW + age) is again

    def test_of_another_way_by_now_it_says_nothing(self) -> None:
        """The reports are of the membership before."""
        found = build_observation(build_network_state(), black_holes=[(1, 0)])
        found = found.with_desired(found.desired.with_plan(membership=2))
        assert route_reports.record_route_reports(found, build_policy()) is found.desired


class TestKept:
    def word(self, number: int, ratio: float, at: float = NOW) -> RouteObservation:
        return RouteObservation(at, "a", "s1", "b", f"n{number}", "m", ratio)

    def under(self, *known: RouteObservation, now: float = NOW) -> Observation:
        found = build_observation(build_network_state())
        return replace(found.with_desired(found.desired.with_adaptation(route_observations=known)), now=now)

    def test_with_the_job_and_read_back(self) -> None:
        draft = route_reports.record_route_reports(looked_at(), build_policy())
        assert state_codec.decode_state(state_codec.encode_state(draft, "j"), "j").desired == draft

    def test_for_a_while(self) -> None:
        old, new = (
            self.word(1, 4.0, NOW - ROUTE_REPORT_TTL_SECONDS),
            self.word(2, 4.0, NOW - ROUTE_REPORT_TTL_SECONDS + 1),
        )
        assert route_reports.record_route_reports(
            self.under(old, new), build_policy()
        ).state.adaptation.route_observations == (new,)

    def test_not_more_than_so_many_and_the_slow_ones_first(self) -> None:
        fast = tuple(self.word(n, 1.0) for n in range(2 * MAX_ROUTE_OBSERVATIONS))
        slow = tuple(self.word(-n, 4.0, NOW - 60) for n in range(1, 4))
        kept = route_reports.record_route_reports(
            self.under(*slow, *fast), build_policy()
        ).state.adaptation.route_observations
        assert len(kept) == MAX_ROUTE_OBSERVATIONS
        assert set(slow) <= set(kept)


class TestBlamed:
    def under(self, word: RouteObservation, known: tuple[RouteObservation, ...] = ()) -> Observation:
        found = build_observation(build_network_state(route_observations=known))
        return found.with_desired(found.desired.with_adaptation(route_observations=(word,)))

    def test_news_of_a_slow_link_are_looked_at_by_joint_planning_first(self) -> None:
        news = RouteObservation(NOW - 1, "a", "s1", "b", "node-0", "node-1", 4.0)
        assert route_reports.has_new_slow_links(self.under(news))
        assert route_reports.has_unplanned_slow_links(self.under(news))
        assert not route_reports.has_unplanned_slow_links(self.under(news, known=(news,)))

    @pytest.mark.parametrize("changes", [{"ratio": 1.0}, {"at": NOW - route_reports.NEW_ROUTE_REPORT_SECONDS - 1}])
    def test_what_is_fast_or_old_is_no_news(self, changes: dict[str, Any]) -> None:
        old = replace(RouteObservation(NOW - 1, "a", "s1", "b", "node-0", "node-1", 4.0), **changes)
        assert not route_reports.has_new_slow_links(self.under(old))
        assert not route_reports.has_unplanned_slow_links(self.under(old))
