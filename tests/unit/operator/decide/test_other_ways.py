"""A slow link in a known fabric: another way around it, or another way to train, whichever is worth more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from pacekeeper_analysis.plan import EvidencePart, SyncMode
from pacekeeper_operator.api import Cause, Mode, Outcome, Remedy
from pacekeeper_operator.decide import other_ways, replan
from pacekeeper_operator.decide.link_state import judge
from pacekeeper_operator.decide.links import BEFORE_SECONDS
from pacekeeper_operator.decide.paths import ways_of
from pacekeeper_operator.decide.think import Thought, think
from pacekeeper_operator.decide.ways_seen import NEWS_SECONDS
from pacekeeper_operator.network import Network, Pair
from pacekeeper_operator.observation import Observation, Policy
from pacekeeper_operator.state import Incident
from tests.support.flows import ALL_ON_THE_FIRST, connections, network, world
from tests.support.worlds import change_members, decisions, policy
from tests.unit.operator.test_adapting import SLOW_LINK, windows

AT_A: Mapping[Pair, float] = {(0, 3): 4.0, (1, 0): 4.0}
"""All that rank 0 sends and receives is slow."""
TWO_SPINES: Mapping[Pair, int] = {**ALL_ON_THE_FIRST, (0, 3): 1}
"""Rank 0 sends by the second spine, and receives by the first."""


def suffering(ways: Mapping[Pair, int], seen: Network | None = None) -> Observation:
    found = replace(world(seen or network(ways), ways), metrics=SLOW_LINK)
    return change_members(found, sync_mode="Sync")


def answered(found: Observation, thought: Thought, slow: Mapping[Pair, float], seconds: float = 1.0) -> Observation:
    """The ranks have answered the question that is out, with all that it asks for."""
    plan = thought.draft.plan
    assert plan.evidence_request
    told = windows(plan.evidence_request, exposed=0.25)
    if EvidencePart.LINKS in plan.evidence_parts:
        links = connections(slow, request=plan.evidence_request)
        told = tuple(replace(one, links=also.links) for one, also in zip(told, links, strict=True))
    return replace(found.with_draft(thought.draft), now=found.now + seconds, evidence=told)


def looked_into(
    ways: Mapping[Pair, int],
    slow: Mapping[Pair, float] = AT_A,
    rules: Policy | None = None,
    seen: Network | None = None,
) -> tuple[Observation, Thought]:
    """Until the connections have told, and what is thought of it."""
    rules = rules or policy()
    found = suffering(ways, seen)
    thought = think(found, rules)
    for seconds in (1.0, 6.0, 6.0):
        found = answered(found, thought, slow, seconds)
        thought = think(found, rules)
        if found.evidence[0].links or decisions(thought):
            return found, thought
        found = replace(found.with_draft(thought.draft), now=found.now + 6)
        thought = think(found, rules)
    raise AssertionError("nobody has asked for connections")


def planned_around(found: Observation, thought: Thought, ways: Mapping[Pair, int]) -> Observation:
    """As the keeper of the Fabric looks at it next."""
    words = thought.draft.state.adaptation.ways_seen
    seen = network(ways, doubts=judge({"ns": words}, found.now), seen=words)
    around = replace(found.surroundings, network=seen)
    return replace(found.with_draft(thought.draft), now=found.now + 2, surroundings=around)


def asked_again(
    found: Observation, slow: Mapping[Pair, float] = AT_A, rules: Policy | None = None
) -> tuple[Observation, Thought]:
    """Until something is decided, after joint planning has looked: the loss has to reach the price of a round."""
    rules = rules or policy()
    for _ in range(4):
        thought = think(found, rules)
        if decisions(thought):
            break
        if thought.draft.plan.evidence_request:
            found = answered(found, thought, slow, 2.0)
        else:
            found = replace(found.with_draft(thought.draft), now=found.now + 2)
    return found, thought


def prices(incident: Incident) -> dict[str, str]:
    return {str(price.name): price.reason for price in incident.remedies}


class TestSlowLink:
    def test_another_mode_waits_for_joint_planning(self) -> None:
        _, thought = looked_into(ALL_ON_THE_FIRST)
        assert not thought.failures
        assert not decisions(thought)
        assert thought.draft.plan.sync_mode is SyncMode.SYNC
        assert thought.draft.state.adaptation.ways_seen

    def test_and_gives_way_to_another_way_in_one_choice(self) -> None:
        found, thought = looked_into(ALL_ON_THE_FIRST)
        _, after = asked_again(planned_around(found, thought, ALL_ON_THE_FIRST))
        (incident,) = decisions(after)
        assert (incident.cause, incident.remedy, incident.live) == (
            Cause.SLOW_COMMUNICATION,
            Remedy.PLAN_TRAFFIC,
            False,
        )
        assert {price.name for price in incident.remedies} == {Remedy.LOCAL_SGD, Remedy.PLAN_TRAFFIC}
        assert [price.name for price in incident.remedies if price.chosen] == [Remedy.PLAN_TRAFFIC]
        assert incident.slowdown_before == pytest.approx(3.2, rel=0.1)
        assert incident.predicted_after == pytest.approx(1.0)
        ways = ways_of(after.draft.plan)
        assert ways[0, 3] != 0
        assert ways[1, 0] != 0
        assert (ways[2, 1], ways[3, 2]) == (0, 0), "nobody else is moved"
        assert (after.draft.plan.sync_mode, after.draft.plan.membership) == (SyncMode.SYNC, 2)

    def test_what_is_to_be_measured_is_written_down_with_it(self) -> None:
        found, thought = looked_into(ALL_ON_THE_FIRST)
        _, after = asked_again(planned_around(found, thought, ALL_ON_THE_FIRST))
        trial = after.draft.state.adaptation.way_trial
        assert trial is not None
        assert {(one.source, one.destination): one.bytes_per_second for one in trial.changes} == {
            (0, 3): pytest.approx(50e6 / 1.6),
            (1, 0): pytest.approx(50e6 / 1.6),
        }

    def test_planning_that_is_late_holds_up_nothing_for_ever(self) -> None:
        found, thought = looked_into(ALL_ON_THE_FIRST)
        late = replace(found.with_draft(thought.draft), now=found.now + NEWS_SECONDS + 1, metrics=SLOW_LINK)
        thought = think(late, policy())
        late = answered(late, thought, {}, 3.0)  # the connections say nothing new
        (incident,) = decisions(think(late, policy()))
        assert incident.remedy == Remedy.LOCAL_SGD

    def test_the_joint_plan_alone_does_not_decide_it_beside(self) -> None:
        found, thought = looked_into(ALL_ON_THE_FIRST)
        seen = planned_around(found, thought, ALL_ON_THE_FIRST)
        assert seen.surroundings.network is not None
        assert seen.surroundings.network.traffic is not None
        assert seen.surroundings.network.traffic.due
        assert replan.check(seen, policy()) is None
        late = replace(seen, now=seen.now + NEWS_SECONDS)
        known = late.with_draft(late.draft.with_adaptation(ways_asked_at=late.now - BEFORE_SECONDS - 1))
        assert replan.check(known, policy()) is not None

    def test_a_round_that_is_not_allowed_leaves_the_mode(self) -> None:
        rules = policy(allow=frozenset(Remedy) - {Remedy.PLAN_TRAFFIC})
        _, thought = looked_into(ALL_ON_THE_FIRST, rules=rules)
        (incident,) = decisions(thought)
        assert incident.remedy == Remedy.LOCAL_SGD
        assert "remediation.allow" in prices(incident)[Remedy.PLAN_TRAFFIC]

    def test_where_it_is_only_recommended_nothing_moves(self) -> None:
        rules = policy(mode=Mode.RECOMMEND)
        found, thought = looked_into(ALL_ON_THE_FIRST, rules=rules)
        _, thought = asked_again(planned_around(found, thought, ALL_ON_THE_FIRST), rules=rules)
        (incident,) = decisions(thought)
        assert (incident.remedy, incident.applied, incident.outcome) == (
            Remedy.PLAN_TRAFFIC,
            None,
            Outcome.RECOMMENDED,
        )
        assert thought.draft.plan.membership == 1


class TestSlowNode:
    """Its only link: whatever the spine, all its flows are slow, and no path mends that."""

    def test_local_sgd_as_ever(self) -> None:
        _, thought = looked_into(TWO_SPINES)
        (incident,) = decisions(thought)
        assert incident.remedy == Remedy.LOCAL_SGD
        assert prices(incident)[Remedy.PLAN_TRAFFIC] == "no other way through the fabric wins what it costs"
        assert thought.draft.plan.membership == 1

    def test_where_nobody_plans_ways_their_price_is_no_matter(self) -> None:
        found = suffering(ALL_ON_THE_FIRST)
        bare = replace(found, surroundings=replace(found.surroundings, network=None))
        assert other_ways.option(bare, policy(), 3.0) is None

    def test_after_ways_that_were_tried_in_vain_the_mode_is_left_all_the_same(self) -> None:
        """By the first spine it might have been the link; by the second one it is slow, too."""
        found, thought = looked_into(ALL_ON_THE_FIRST)
        _, after = asked_again(planned_around(found, thought, ALL_ON_THE_FIRST))
        ways = ways_of(after.draft.plan)
        words = after.draft.state.adaptation.ways_seen
        seen = network(ways, doubts=judge({"ns": words}, found.now), seen=words, held=True)
        told = suffering(ways, seen)
        told = told.with_draft(told.draft.with_adaptation(ways_seen=words))
        _, thought = asked_again(replace(told, now=found.now + 30))
        (incident,) = decisions(thought)
        assert incident.remedy == Remedy.LOCAL_SGD
