"""Slow communication: from the connections' figures to a finding, a probe, a better finding, a swap where it pays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from pacekeeper_analysis.adapt import Diagnosis, Trouble
from pacekeeper_analysis.diagnose.finding import FaultClass, Finding, Witness, WitnessKind
from pacekeeper_analysis.diagnose.link_probe import Verdict
from pacekeeper_analysis.diagnose.links import SpotKind
from pacekeeper_analysis.plan import EvidencePart
from pacekeeper_analysis.reports import Evidence, LinkProbe, LinkWindow
from pacekeeper_operator import ledger, rounds
from pacekeeper_operator.api import Cause, Class, Outcome, Remedy
from pacekeeper_operator.decide import links, straggler, verify, way_back
from pacekeeper_operator.decide.links import (
    ANSWER_SECONDS,
    FRESH_LOOK_SECONDS,
    LOOK_KEPT_SECONDS,
    LOOK_SECONDS,
    MOST_SIDES,
)
from pacekeeper_operator.observation import Observation
from pacekeeper_operator.state import Draft, Incident, LinkLook, LinkVerdict, LocalSgd, Suspicion
from tests.support.worlds import NOW, change_members, change_worker, policy, training

MB = 1_000_000
PARTS = (EvidencePart.WINDOWS, EvidencePart.LINKS)
LOOK = LinkLook(NOW, "ask", SpotKind.PAIR, 0, 1, ("from rank 0 to rank 1: 10 MB/s",), known=True)
INCIDENT = Incident(
    "i",
    Cause.SLOW_COMMUNICATION,
    Class.PERFORMANCE,
    1,
    "m",
    NOW - 20,
    NOW - 10,
    NOW - 10,
    live=True,
    slowdown_before=2.0,
    finding=Finding(FaultClass.NETWORK, "between rank 0 and rank 1", (Witness(WitnessKind.TIMES, "w"),)),
)
FAST, SLOW = 400e6, 50e6


def world(replicas: int = 4, **adaptation: Any) -> Observation:
    """Four workers and a spare, one rank each, whose launchers answer probes."""
    found = change_members(training(replicas, step=500), probe_port=40000)
    return found.with_draft(found.draft.with_adaptation(**adaptation))


def ring(slow: int = -1, quiet: bool = False) -> tuple[Evidence, ...]:
    """Rank i sends to i + 1; what rank `slow` sends takes ten times as long."""

    def ends(rank: int) -> tuple[LinkWindow, ...]:
        here, after, before = (f"10.0.0.{(rank + step) % 4}" for step in (0, 1, -1))
        busy = 4.0 if rank == slow else 0.4
        sent = 0 if quiet else 50 * MB
        out = LinkWindow(f"{here}:40", f"{after}:50", rank, 0, 5.0, sent, busy)
        back = LinkWindow(f"{here}:50", f"{before}:40", rank, 0, 5.0)
        return tuple(replace(end, age=age) for end in (out, back) for age in range(3))

    return tuple(Evidence("ask", f"j-w{rank}-0", 1, links=ends(rank)) for rank in range(4))


def mesh(ranks: int, slow: int) -> tuple[Evidence, ...]:
    """Each rank sends to each; what rank `slow` sends takes ten times as long."""

    def ends(rank: int) -> Iterator[LinkWindow]:
        here, busy = f"10.0.0.{rank}", 4.0 if rank == slow else 0.4
        for peer in (peer for peer in range(ranks) if peer != rank):
            yield LinkWindow(f"{here}:{100 + peer}", f"10.0.0.{peer}:{200 + rank}", rank, 0, 5.0, 50 * MB, busy)
            yield LinkWindow(f"{here}:{200 + peer}", f"10.0.0.{peer}:{100 + rank}", rank, 0, 5.0)

    def windows(rank: int) -> tuple[LinkWindow, ...]:
        return tuple(replace(end, age=age) for end in ends(rank) for age in range(3))

    return tuple(Evidence("ask", f"j-w{rank}-0", 1, links=windows(rank)) for rank in range(ranks))


def asked(evidence: tuple[Evidence, ...], **adaptation: Any) -> Observation:
    found = world(**adaptation)
    found = found.with_draft(found.draft.with_plan(evidence_request="ask", evidence_parts=PARTS))
    return replace(found, evidence=evidence)


def opened(incident: Incident = INCIDENT, **adaptation: Any) -> Observation:
    found = world(**{"link": LOOK, **adaptation})
    return found.with_draft(found.draft.with_incident(incident))


def seen(draft: Draft) -> LinkLook:
    assert draft.state.adaptation.link is not None
    return draft.state.adaptation.link


def answered(slow: set[tuple[int, int]], incident: Incident = INCIDENT, **adaptation: Any) -> Observation:
    """The probe of 0 → 1 has been asked for and answered; `slow`: pairs of ranks."""
    before = opened(incident, **adaptation)
    after = before.with_draft(links.probe(before, policy()))
    asked_for = after.plan.probe
    assert asked_for is not None
    slow_workers = {(f"j-w{s}-0", f"j-w{d}-0") for s, d in slow}
    return replace(
        after,
        now=NOW + 5,
        probes=tuple(
            Evidence(
                asked_for.name,
                source,
                1,
                probes=tuple(
                    LinkProbe(t.worker, SLOW if (source, t.worker) in slow_workers else FAST, 0.0005) for t in targets
                ),
            )
            for source, targets in zip(asked_for.sources, asked_for.targets, strict=True)
        ),
    )


LINK = {(0, 1)}
SENDER = {(0, 1), (0, 2), (0, 3)}
RECEIVER = {(0, 1), (2, 1), (3, 1)}


class TestQuestions:
    def test_the_second_question_about_communication_asks_for_connections(self) -> None:
        for shown, asked_for in ((None, False), (Trouble.COMPUTE, False), (Trouble.COMMUNICATION, True)):
            draft = straggler._ask(world(), Suspicion(NOW - 10, shown=shown))
            assert (EvidencePart.LINKS in draft.plan.evidence_parts) is asked_for

    def test_the_way_back_asks_for_them_until_something_hot_is_seen(self) -> None:
        def parts(found: Observation) -> tuple[EvidencePart, ...]:
            mode = LocalSgd(NOW - 30, Trouble.COMMUNICATION, "r", "i")
            found = found.with_draft(found.draft.with_adaptation(local_sgd=mode))
            return way_back._ask(found, mode).plan.evidence_parts

        assert parts(opened(link=None)) == PARTS
        assert parts(opened(link=replace(LOOK, hot=()))) == PARTS
        assert parts(opened()) == PARTS[:1]
        assert parts(opened(replace(INCIDENT, decided=NOW - LOOK_SECONDS - 1), link=None)) == PARTS[:1]
        assert parts(opened(replace(INCIDENT, outcome=Outcome.MITIGATED), link=None)) == PARTS[:1]
        assert parts(world()) == PARTS[:1]


class TestSee:
    def test_a_hot_pair_is_kept_with_words(self) -> None:
        look = seen(links.see(asked(ring(slow=2)), policy()))
        assert (look.kind, look.source, look.destination, look.known) == (SpotKind.PAIR, 2, 3, True)
        assert look.hot[0].startswith("from rank 2 to rank 3: 12 MB/s while busy, the others 125 MB/s")

    def test_nothing_hot_and_nothing_known_are_two_things(self) -> None:
        calm, dark = (seen(links.see(asked(ring(quiet=quiet)), policy())) for quiet in (False, True))
        assert (calm.hot, calm.known) == ((), True)
        assert (dark.hot, dark.known) == ((), False)

    def test_all_have_to_answer_and_one_answer_is_looked_at_once(self) -> None:
        part = asked(ring(slow=2)[:3])
        assert links.see(part, policy()) is part.draft
        known = asked(ring(slow=2), link=LOOK)
        assert links.see(known, policy()) is known.draft
        unasked = asked(ring(slow=2))
        unasked = unasked.with_draft(unasked.draft.with_plan(evidence_parts=PARTS[:1]))
        assert links.see(unasked, policy()) is unasked.draft

    def test_what_is_being_probed_stays(self) -> None:
        found = asked(ring(slow=2), link=replace(LOOK, request="older", probe="p"))
        assert links.see(found, policy()) is found.draft

    def test_of_all_sides_the_slowest_are_kept(self) -> None:
        """However many ranks there are: a side is two gauges, and a line of the bookkeeping."""
        world = asked(mesh(ranks=12, slow=5), replicas=12)
        sides = seen(links.see(world, policy())).sides
        assert len(sides) == MOST_SIDES < 2 * 12
        assert (sides[0].rank, sides[0].sends) == (5, True)
        assert sides[0].ratio == pytest.approx(10.0, rel=0.1)
        assert [side.ratio for side in sides] == sorted((side.ratio for side in sides), reverse=True)
        assert sides[1].ratio == pytest.approx(1.0, rel=0.1)

    def test_it_is_written_down_and_read_back(self) -> None:
        draft = links.see(asked(ring(slow=2)), policy())
        told = draft.with_adaptation(link_verdicts=(LinkVerdict(NOW, Verdict.SENDER, "j-w0-0", "node-0"),))
        assert ledger.read(ledger.write(told, "j"), "j").draft == told


def diagnosis(trouble: Trouble) -> Diagnosis:
    return Diagnosis(trouble, 1.8, (), (), 0.1, 0.05, (1.0,) * 4, {}, None)  # type: ignore[arg-type]  # not looked at


class TestFinding:
    def test_with_what_the_connections_show(self) -> None:
        found = links.finding(world(link=LOOK), diagnosis(Trouble.COMMUNICATION))
        assert found is not None
        assert (found.fault, found.culprit) == (FaultClass.NETWORK, "between rank 0 and rank 1")
        assert found.kinds == {WitnessKind.TIMES, WitnessKind.HISTORY, WitnessKind.TRANSPORT}

    @pytest.mark.parametrize(
        ("kind", "culprit"),
        [
            (SpotKind.LINK, "link 0 → 1"),
            (SpotKind.SENDER, "the sender side of rank 0's worker"),
            (SpotKind.RECEIVER, "the receiver side of rank 1's worker"),
        ],
    )
    def test_who_is_named(self, kind: SpotKind, culprit: str) -> None:
        found = links.finding(world(link=replace(LOOK, kind=kind)), diagnosis(Trouble.COMMUNICATION))
        assert found is not None
        assert found.culprit == culprit

    @pytest.mark.parametrize(
        "look", [None, replace(LOOK, known=False, hot=(), kind=None), replace(LOOK, at=NOW - FRESH_LOOK_SECONDS - 1)]
    )
    def test_of_transport_unknown_two_witnesses_are_left_and_nobody_is_named(self, look: LinkLook | None) -> None:
        found = links.finding(world(link=look), diagnosis(Trouble.COMMUNICATION))
        assert found is not None
        assert found.culprit == ""
        assert found.kinds == {WitnessKind.TIMES, WitnessKind.HISTORY}

    def test_connections_that_are_alike_are_a_witness_too(self) -> None:
        found = links.finding(world(link=replace(LOOK, hot=(), kind=None)), diagnosis(Trouble.COMMUNICATION))
        assert found is not None
        assert (found.culprit, WitnessKind.TRANSPORT in found.kinds) == ("", True)

    def test_other_troubles_are_others_business(self) -> None:
        assert links.finding(world(link=LOOK), diagnosis(Trouble.COMPUTE)) is None


class TestProbe:
    def test_an_open_incident_and_something_hot_begin_one_with_controls_on_other_nodes(self) -> None:
        draft = links.probe(opened(), policy())
        probe = draft.plan.probe
        assert probe is not None
        assert set(probe.sources) == {f"j-w{i}-0" for i in range(4)}
        assert probe.targets[0][0].address == "10.0.0.1:40000"
        assert (seen(draft).incident, seen(draft).probe, seen(draft).probed_at) == ("i", probe.name, NOW)
        task = draft.plan.part("j-w0-0").probe
        assert task is not None
        assert [target.worker for target in task.targets] == ["j-w1-0", "j-w2-0", "j-w3-0"]

    def test_six_addresses_are_written_as_such(self) -> None:
        found = change_worker(opened(), "j-w1-0", pod={"address": "fd00::1"})
        probe = links.probe(found, policy()).plan.probe
        assert probe is not None
        assert probe.targets[0][0].address == "[fd00::1]:40000"

    @pytest.mark.parametrize(
        "why_not",
        [
            opened(link=replace(LOOK, hot=())),
            opened(link=replace(LOOK, incident="i")),
            opened(link=replace(LOOK, at=NOW - FRESH_LOOK_SECONDS - 1)),
            opened(replace(INCIDENT, cause=Cause.VOLATILE)),
            opened(replace(INCIDENT, outcome=Outcome.RECOVERED)),
            opened(link_verdicts=(LinkVerdict(NOW - 3000, Verdict.LINK), LinkVerdict(NOW - 3500, Verdict.LINK))),
            change_worker(opened(), "j-w1-0", heartbeat={"probe_port": 0}),
            change_worker(opened(), "j-w0-0", silent_seconds=60.0),
            opened(link=replace(LOOK, destination=0)),
        ],
    )
    def test_what_keeps_it_from_beginning(self, why_not: Observation) -> None:
        assert links.probe(why_not, policy()) is why_not.draft

    def test_not_where_nothing_may_be_done(self) -> None:
        assert links.probe(opened(), policy(paused="maintenance")).plan.probe is None
        assert links.probe(opened(), policy(link_probes_an_hour=0)).plan.probe is None

    def test_after_an_hour_there_is_budget_again(self) -> None:
        old = (LinkVerdict(NOW - 3601, Verdict.LINK), LinkVerdict(NOW - 3000, Verdict.LINK))
        assert links.probe(opened(link_verdicts=old), policy()).plan.probe is not None

    def test_an_old_look_is_forgotten(self) -> None:
        draft = links.probe(opened(link=replace(LOOK, at=NOW - LOOK_KEPT_SECONDS - 1)), policy())
        assert draft.state.adaptation.link is None

    def test_it_waits_for_answers_but_not_for_ever(self) -> None:
        some = answered(LINK)
        some = replace(some, probes=some.probes[:1])
        assert links.probe(some, policy()) is some.draft
        late = replace(some, now=NOW + 4 + ANSWER_SECONDS)
        draft = links.probe(late, policy())
        assert draft.plan.probe is None
        assert draft.state.adaptation.link_verdicts[-1].verdict is Verdict.UNTOLD

    @pytest.mark.parametrize(
        ("slow", "verdict", "culprit", "worker"),
        [
            (LINK, Verdict.LINK, "link 0 → 1", ""),
            (SENDER, Verdict.SENDER, "the sender side of rank 0's worker", "j-w0-0"),
            (RECEIVER, Verdict.RECEIVER, "the receiver side of rank 1's worker", "j-w1-0"),
            (set(), Verdict.NOTHING, "", ""),
        ],
    )
    def test_the_finding_becomes_better(
        self, slow: set[tuple[int, int]], verdict: Verdict, culprit: str, worker: str
    ) -> None:
        draft = links.probe(answered(slow), policy())
        (incident,) = draft.state.incidents.current
        assert incident.finding is not None
        assert (incident.finding.fault, incident.finding.culprit) == (FaultClass.NETWORK, culprit)
        assert incident.finding.kinds == {WitnessKind.TIMES, WitnessKind.PROBE}
        assert incident.finding.advice
        assert f"{verdict}. j-w0-0 → j-w1-0" in incident.evidence[-1]
        assert draft.state.adaptation.link_verdicts[-1].worker == worker
        assert (draft.plan.probe, seen(draft).probe) == (None, "")
        assert links.probe(opened().with_draft(draft), policy()) == draft, "one look is probed once"

    def test_one_that_could_not_tell_is_no_witness(self) -> None:
        (incident,) = links.probe(answered({(0, 1), (0, 2)}), policy()).state.incidents.current
        assert incident.finding == INCIDENT.finding
        assert "Untold" in incident.evidence[-1]

    def test_where_the_way_back_is_slow_that_is_asked_next(self) -> None:
        after = answered({(1, 0)})
        turned = after.with_draft(links.probe(after, policy()))
        assert (seen(turned.draft).source, seen(turned.draft).destination) == (1, 0)
        again = links.probe(turned, policy()).plan.probe
        assert again is not None
        assert (again.sources[0], again.targets[0][0].worker) == ("j-w1-0", "j-w0-0")

    def test_at_once_as_the_incident_closes_without_it(self) -> None:
        after = answered({(1, 0)})
        turned = after.with_draft(links.probe(after, policy()))
        assert turned.plan.probe is not None
        (incident,) = turned.state.incidents.open
        assert verify.judge(turned, incident) == incident

    def test_an_incident_without_a_remedy_stays_open_for_it(self) -> None:
        during = answered(LINK)
        during = replace(during, probes=())
        (incident,) = during.state.incidents.open
        assert verify.judge(during, incident) == incident
        after = during.with_draft(links.probe(answered(LINK), policy()))
        assert verify.judge(after, after.state.incidents.open[0]).outcome is Outcome.NOT_HELPED

    def test_one_that_has_closed_is_told_all_the_same(self) -> None:
        found = answered(LINK)
        closed = found.with_draft(found.draft.with_incident(replace(INCIDENT, outcome=Outcome.RECOVERED)))
        closed = replace(closed, probes=found.probes)
        (incident,) = links.probe(closed, policy()).state.incidents.current
        assert incident.finding is not None
        assert incident.finding.culprit == "link 0 → 1"

    def test_another_membership_ends_it(self) -> None:
        after = rounds.begin(answered(LINK), world().plan.members)
        assert (after.plan.probe, after.state.adaptation.link) == (None, None)


class TestNode:
    def test_a_side_that_is_slow_once_more_makes_its_node_a_suspect(self) -> None:
        once = (LinkVerdict(NOW - 1000, Verdict.RECEIVER, "j-w0-9", "node-0"),)
        assert links.probe(answered(SENDER), policy()).state.incidents.quarantines == ()
        (wanted,) = links.probe(answered(SENDER, link_verdicts=once), policy()).state.incidents.quarantines
        assert (wanted.node, wanted.incident) == ("node-0", "i")

    @pytest.mark.parametrize(
        "earlier",
        [
            LinkVerdict(NOW - 4000, Verdict.SENDER, "j-w0-0", "node-0"),
            LinkVerdict(NOW - 10, Verdict.SENDER, "j-w3-0", "node-3"),
            LinkVerdict(NOW - 10, Verdict.LINK),
        ],
    )
    def test_long_ago_or_elsewhere_is_another_matter(self, earlier: LinkVerdict) -> None:
        found = answered(SENDER, link_verdicts=(earlier,))
        assert links.probe(found, policy()).state.incidents.quarantines == ()

    def test_a_link_blames_no_node(self) -> None:
        twice = (LinkVerdict(NOW - 10, Verdict.LINK),)
        assert links.probe(answered(LINK, link_verdicts=twice), policy()).state.incidents.quarantines == ()

    def test_nor_where_the_policy_does_not_allow_it(self) -> None:
        once = (LinkVerdict(NOW - 1000, Verdict.SENDER, "j-w0-0", "node-0"),)
        rules = policy(allow=frozenset(Remedy) - {Remedy.QUARANTINE_NODE})
        assert links.probe(answered(SENDER, link_verdicts=once), rules).state.incidents.quarantines == ()


class TestSwap:
    @pytest.mark.parametrize(("slow", "worker"), [(SENDER, "j-w0-0"), (RECEIVER, "j-w1-0")])
    def test_a_slow_side_is_replaced_where_nothing_else_has_helped(
        self, slow: set[tuple[int, int]], worker: str
    ) -> None:
        decision = links.check(answered(slow), policy())
        assert decision is not None
        assert (decision.remedy, decision.worker, decision.continues) == (Remedy.REPLACE_WORKER, worker, "i")
        assert decision.finding is not None
        assert WitnessKind.PROBE in decision.finding.kinds
        assert decision.slowdown_before == 2.0

    @pytest.mark.parametrize("slow", [LINK, set(), {(1, 0)}])
    def test_a_link_or_congestion_replaces_nobody(self, slow: set[tuple[int, int]]) -> None:
        assert links.check(answered(slow), policy()) is None

    @pytest.mark.parametrize(
        "of_incident",
        [
            {"remedy": Remedy.LOCAL_SGD, "applied": NOW - 9, "predicted_after": 1.05},
            {"slowdown_after": 1.05, "outcome": Outcome.RECOVERED},
        ],
    )
    def test_what_is_mended_needs_no_swap(self, of_incident: dict[str, Any]) -> None:
        assert links.check(answered_later(of_incident), policy()) is None

    @pytest.mark.parametrize(
        "of_incident",
        [
            {"remedy": Remedy.LOCAL_SGD, "applied": NOW - 9, "predicted_after": 1.5},
            {"remedy": Remedy.LOCAL_SGD, "applied": None, "predicted_after": 1.05},
        ],
    )
    def test_what_local_sgd_leaves_may_be_worth_one(self, of_incident: dict[str, Any]) -> None:
        decision = links.check(answered_later(of_incident), policy())
        assert decision is not None
        assert decision.remedy is Remedy.REPLACE_WORKER

    def test_an_incident_that_has_closed_is_followed_by_another(self) -> None:
        decision = links.check(answered_later({"slowdown_after": 1.4, "outcome": Outcome.MITIGATED}), policy())
        assert decision is not None
        assert (decision.continues, decision.slowdown_before) == ("", 1.4)

    def test_without_a_spare_or_a_restart_left_there_is_none(self) -> None:
        found = answered(SENDER)
        assert links.check(change_worker(found, "j-w4-0", heartbeat={"state": "Starting"}), policy()) is None
        assert links.check(found, policy(max_restarts=0)) is None

    def test_who_leaves_already_is_not_replaced_again(self) -> None:
        found = answered(SENDER)
        leaving = replace(found.state.placement.workers[0], leaving="why")
        after = replace(found.with_draft(found.draft.with_worker(leaving)), probes=found.probes)
        assert links.check(after, policy()) is None

    def test_a_world_without_a_probe_is_calm(self) -> None:
        assert links.check(world(), policy()) is None
        assert links.check(opened(), policy()) is None


def answered_later(of_incident: dict[str, Any]) -> Observation:
    """What has become of the incident by the time at which the probe of a slow sender is answered."""
    found = answered(SENDER)
    return found.with_draft(found.draft.with_incident(replace(INCIDENT, **of_incident)))


def test_what_a_worker_measured_unasked_counts_for_nothing() -> None:
    asked_for = answered(LINK)
    strange = LinkProbe("nobody", failed="x" * 2000)
    more = tuple(replace(told, probes=(*told.probes, strange)) for told in asked_for.probes)
    assert links.probe(replace(asked_for, probes=more), policy()) == links.probe(asked_for, policy())


def test_what_connections_show_is_found_ahead_of_the_pass() -> None:
    observation = asked(ring(slow=2))
    links.look_ahead(observation)
    found = links._judged.cache_info().misses
    assert seen(links.see(observation, policy())).hot
    assert links._judged.cache_info().misses == found
