"""A slow link in a fabric that nobody knows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pacekeeper_analysis.diagnose.link_probe import Verdict
from pacekeeper_analysis.plan import Paths, PlannedPath
from pacekeeper_operator.api import FabricSpec, Mode, PathControl, PathControlSpec, Remedy
from pacekeeper_operator.decide import paths, reroll
from pacekeeper_operator.decide.reroll import MOST_DRAWS
from pacekeeper_operator.decide.think import think
from pacekeeper_operator.decide.wiring import wire
from pacekeeper_operator.network import JobTraffic, Network, Seat
from pacekeeper_operator.observation import Observation
from pacekeeper_operator.state import WayChange
from tests.support.worlds import change_worker, policy
from tests.unit.operator.decide.test_links import INCIDENT, answered

LINK = {(0, 1)}


def network(*others: JobTraffic, mode: PathControl = PathControl.REROLL, last_port: int = 29999) -> Network:
    spec = FabricSpec(2, path_control=PathControlSpec(mode, (20000, last_port)))
    return Network(spec, wire(spec, [], {}), {job.name: job for job in others}, None)


def world(slow: set[tuple[int, int]] = LINK, *, drawn: int = 0, seen: Network | None = None) -> Observation:
    """A probe of the way from rank 0 to rank 1 has been answered; its ports have been drawn so often."""
    found = answered(slow)
    if drawn:
        path = Paths((PlannedPath(0, 1, draw=drawn), PlannedPath(2, 3, draw=1)), (), 20000, 20511)
        found = found.with_draft(found.draft.with_plan(paths=path))
    return replace(found, surroundings=replace(found.surroundings, network=seen or network()))


def test_the_pair_gets_other_ports_in_a_round_by_the_same_workers() -> None:
    before = world()
    thought = think(before, policy())
    after = thought.draft.plan
    assert not thought.failures
    assert (after.membership, after.members) == (before.plan.membership + 1, before.plan.members)
    assert after.paths == Paths((PlannedPath(0, 1, draw=1),), (), 20000, 20511)
    assert not thought.draft.state.budget.restarts
    incident = thought.draft.state.incidents.find(INCIDENT.name)
    assert incident is not None
    assert (incident.remedy, incident.live) == (Remedy.PLAN_TRAFFIC, False)
    assert "the link 0 → 1 is slow" in incident.message


def test_what_it_was_before_is_kept_to_be_compared() -> None:
    before = world()
    look = before.state.adaptation.link
    assert look is not None
    before = before.with_draft(before.draft.with_adaptation(link=replace(look, bytes_per_second=12e6)))
    before = replace(before, probes=answered(LINK).probes)
    trial = think(before, policy()).draft.state.adaptation.way_trial
    assert trial is not None
    assert (trial.incident, trial.membership) == (INCIDENT.name, 2)
    assert trial.changes == (WayChange(0, 1, draw=1, bytes_per_second=12e6),)


def test_its_probe_counts_among_those_of_the_hour() -> None:
    verdicts = think(world(), policy()).draft.state.adaptation.link_verdicts
    assert [one.verdict for one in verdicts] == [Verdict.LINK]


def test_where_it_is_slow_again_they_are_drawn_again_and_others_stay() -> None:
    after = think(world(drawn=2), policy()).draft.plan.paths
    assert after is not None
    assert set(after.wanted) == {PlannedPath(0, 1, draw=3), PlannedPath(2, 3, draw=1)}


def test_but_not_for_ever() -> None:
    assert reroll.check(world(drawn=MOST_DRAWS), policy()) is None
    assert reroll.check(world(drawn=MOST_DRAWS - 1), policy()) is not None


@pytest.mark.parametrize(
    "slow",
    [{(0, 1), (0, 2), (0, 3)}, {(0, 1), (2, 1), (3, 1)}, set()],
    ids=["the sender's side", "the receiver's side", "nothing"],
)
def test_what_is_no_single_link_is_not_mended_by_other_ports(slow: set[tuple[int, int]]) -> None:
    assert reroll.check(world(slow), policy()) is None


@pytest.mark.parametrize("mode", [PathControl.OFF, PathControl.PROBE])
def test_where_it_is_not_wanted(mode: PathControl) -> None:
    assert reroll.check(world(seen=network(mode=mode)), policy()) is None
    unknown = world()
    assert reroll.check(replace(unknown, surroundings=replace(unknown.surroundings, network=None)), policy()) is None


def test_nor_where_the_job_does_not_allow_it() -> None:
    assert reroll.check(world(), policy(allow=frozenset(Remedy) - {Remedy.PLAN_TRAFFIC})) is None


def test_in_mode_recommend_it_is_only_said() -> None:
    thought = think(world(), policy(mode=Mode.RECOMMEND))
    assert thought.draft.plan.paths is None
    assert thought.draft.plan.membership == 1


def test_before_the_loss_has_reached_its_price_nothing_is_done() -> None:
    soon = world()
    incident = replace(INCIDENT, first_sign=soon.now - 1.0)
    assert reroll.check(soon.with_draft(soon.draft.with_incident(incident)), policy()) is None


def test_while_answers_are_awaited_nothing_is_known() -> None:
    waiting = replace(world(), probes=())
    assert reroll.check(waiting, policy()) is None


def test_without_ports_there_is_nothing_to_draw() -> None:
    assert reroll.check(world(seen=network(last_port=20100)), policy()) is None


class TestKept:
    """Drawn ports stay in the plan while the members do."""

    def drawn(self) -> Observation:
        return world(drawn=1)

    def test_as_they_are(self) -> None:
        found = self.drawn()
        assert paths.step(found, policy()) is found.draft

    def test_not_with_other_members(self) -> None:
        before = self.drawn()
        before = before.with_draft(before.draft.with_adaptation(link=None))
        thought = think(change_worker(before, "j-w3-0", gone=True), policy())
        assert thought.draft.plan.membership == 2
        assert thought.draft.plan.paths is None

    def test_nor_where_paths_are_planned_or_nobodys_business_by_now(self) -> None:
        off = network(mode=PathControl.OFF)
        found = replace(self.drawn(), surroundings=replace(self.drawn().surroundings, network=off))
        assert paths.step(found, policy()).plan.paths is None

    def test_ports_are_those_that_no_other_job_on_its_nodes_has(self) -> None:
        other = JobTraffic(("ns", "a"), (Seat("node-1", (0,)),), ports=(20000, 20511))
        after = think(world(seen=network(other)), policy()).draft.plan.paths
        assert after is not None
        assert after.first_port == 20512
