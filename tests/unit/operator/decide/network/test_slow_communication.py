"""Slow communication: from the connections' figures to a finding, a probe, a better finding, a swap where it pays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from pacekeeper_analysis.failures.finding import FaultClass, Finding, Signal, SignalKind
from pacekeeper_analysis.network.delay_matrix import SpotKind
from pacekeeper_analysis.network.link_probe import LinkProbeVerdict
from pacekeeper_analysis.protocol.plan import EvidencePart
from pacekeeper_analysis.protocol.reports import Evidence, LinkProbe, LinkWindow
from pacekeeper_analysis.stragglers.strategies import Bottleneck, Diagnosis
from pacekeeper_operator.api.incident import IncidentCause, IncidentClass, IncidentOutcome
from pacekeeper_operator.api.training_job import Remedy
from pacekeeper_operator.decide.network import slow_communication
from pacekeeper_operator.decide.network.slow_communication import (
    FRESH_LINK_EVIDENCE_SECONDS,
    LINK_EVIDENCE_REQUEST_SECONDS,
    LINK_EVIDENCE_TTL_SECONDS,
    LINK_PROBE_ANSWER_SECONDS,
    MAX_LINK_SIDES,
)
from pacekeeper_operator.decide.stragglers import revert_to_sync, straggler, verify
from pacekeeper_operator.state import rounds, state_codec
from pacekeeper_operator.state.desired_state import (
    DesiredState,
    HottestPlace,
    Incident,
    LinkCheck,
    LinkVerdict,
    LocalSgdChoice,
    StragglerInvestigation,
)
from pacekeeper_operator.state.observation import Observation
from testing.operators.observations import NOW, build_policy, build_training, change_members, change_worker

MB = 1_000_000
PARTS = (EvidencePart.WINDOWS, EvidencePart.LINKS)
HOTTEST = HottestPlace(SpotKind.PAIR, 0, 1, 1e7)
LOOK = LinkCheck(NOW, "ask", HOTTEST, ("from rank 0 to rank 1: 10 MB/s",), conclusive=True)
INCIDENT = Incident(
    "i",
    IncidentCause.SLOW_COMMUNICATION,
    IncidentClass.PERFORMANCE,
    1,
    "m",
    NOW - 20,
    NOW - 10,
    NOW - 10,
    live=True,
    slowdown_before=2.0,
    finding=Finding(FaultClass.NETWORK, "between rank 0 and rank 1", (Signal(SignalKind.TIMES, "w"),)),
)
FAST, SLOW = 400e6, 50e6


def world(replicas: int = 4, **adaptation: Any) -> Observation:
    """Four workers and a spare, one rank each, whose launchers answer probes."""
    found = change_members(build_training(replicas, step=500), probe_port=40000)
    return found.with_desired(found.desired.with_adaptation(**adaptation))


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
    found = found.with_desired(found.desired.with_plan(evidence_request="ask", evidence_parts=PARTS))
    return replace(found, evidence=evidence)


def opened(incident: Incident = INCIDENT, **adaptation: Any) -> Observation:
    found = world(**{"link_check": LOOK, **adaptation})
    return found.with_desired(found.desired.with_incident(incident))


def seen(draft: DesiredState) -> LinkCheck:
    assert draft.state.adaptation.link_check is not None
    return draft.state.adaptation.link_check


def answered(slow: set[tuple[int, int]], incident: Incident = INCIDENT, **adaptation: Any) -> Observation:
    """The probe of 0 → 1 has been asked for and answered; `slow`: pairs of ranks."""
    before = opened(incident, **adaptation)
    after = before.with_desired(slow_communication.advance_link_probe(before, build_policy()))
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
        for shown, asked_for in ((None, False), (Bottleneck.COMPUTE, False), (Bottleneck.COMMUNICATION, True)):
            draft = straggler._request_evidence(world(), StragglerInvestigation(NOW - 10, last_bottleneck=shown))
            assert (EvidencePart.LINKS in draft.plan.evidence_parts) is asked_for

    def test_the_way_back_asks_for_them_until_something_hot_is_seen(self) -> None:
        def parts(found: Observation) -> tuple[EvidencePart, ...]:
            mode = LocalSgdChoice(NOW - 30, Bottleneck.COMMUNICATION, "r", "i")
            found = found.with_desired(found.desired.with_adaptation(local_sgd=mode))
            return revert_to_sync._request_evidence(found, mode).plan.evidence_parts

        assert parts(opened(link_check=None)) == PARTS
        assert parts(opened(link_check=replace(LOOK, hot_places=(), hottest=None))) == PARTS
        assert parts(opened()) == PARTS[:1]
        assert (
            parts(opened(replace(INCIDENT, decided=NOW - LINK_EVIDENCE_REQUEST_SECONDS - 1), link_check=None))
            == PARTS[:1]
        )
        assert parts(opened(replace(INCIDENT, outcome=IncidentOutcome.MITIGATED), link_check=None)) == PARTS[:1]
        assert parts(world()) == PARTS[:1]


class TestSee:
    def test_a_hot_pair_is_kept_with_words(self) -> None:
        look = seen(slow_communication.record_link_evidence(asked(ring(slow=2)), build_policy()))
        assert look.hottest is not None
        assert (look.hottest.kind, look.hottest.source, look.hottest.destination) == (SpotKind.PAIR, 2, 3)
        assert look.conclusive
        assert look.hot_places[0].startswith("from rank 2 to rank 3: 12 MB/s while busy, the others 125 MB/s")

    def test_nothing_hot_and_nothing_known_are_two_things(self) -> None:
        calm, dark = (
            seen(slow_communication.record_link_evidence(asked(ring(quiet=quiet)), build_policy()))
            for quiet in (False, True)
        )
        assert (calm.hot_places, calm.conclusive) == ((), True)
        assert (dark.hot_places, dark.conclusive) == ((), False)

    def test_all_have_to_answer_and_one_answer_is_looked_at_once(self) -> None:
        part = asked(ring(slow=2)[:3])
        assert slow_communication.record_link_evidence(part, build_policy()) is part.desired
        known = asked(ring(slow=2), link_check=LOOK)
        assert slow_communication.record_link_evidence(known, build_policy()) is known.desired
        unasked = asked(ring(slow=2))
        unasked = unasked.with_desired(unasked.desired.with_plan(evidence_parts=PARTS[:1]))
        assert slow_communication.record_link_evidence(unasked, build_policy()) is unasked.desired

    def test_what_is_being_probed_stays(self) -> None:
        found = asked(ring(slow=2), link_check=replace(LOOK, request="older", probe="p"))
        assert slow_communication.record_link_evidence(found, build_policy()) is found.desired

    def test_of_all_sides_the_slowest_are_kept(self) -> None:
        """However many ranks there are: a side is two gauges, and a line of the bookkeeping."""
        world = asked(mesh(ranks=12, slow=5), replicas=12)
        sides = seen(slow_communication.record_link_evidence(world, build_policy())).sides
        assert len(sides) == MAX_LINK_SIDES < 2 * 12
        assert (sides[0].rank, sides[0].sends) == (5, True)
        assert sides[0].ratio == pytest.approx(10.0, rel=0.1)
        assert [side.ratio for side in sides] == sorted((side.ratio for side in sides), reverse=True)
        assert sides[1].ratio == pytest.approx(1.0, rel=0.1)

    def test_it_is_written_down_and_read_back(self) -> None:
        draft = slow_communication.record_link_evidence(asked(ring(slow=2)), build_policy())
        told = draft.with_adaptation(link_verdicts=(LinkVerdict(NOW, LinkProbeVerdict.SENDER, "j-w0-0", "node-0"),))
        assert state_codec.decode_state(state_codec.encode_state(told, "j"), "j").desired == told


def diagnosis(trouble: Bottleneck) -> Diagnosis:
    return Diagnosis(trouble, 1.8, (), (), 0.1, 0.05, (1.0,) * 4, {}, None)  # type: ignore[arg-type]  # not looked at


class TestFinding:
    def test_with_what_the_connections_show(self) -> None:
        found = slow_communication.build_communication_finding(
            world(link_check=LOOK), diagnosis(Bottleneck.COMMUNICATION)
        )
        assert found is not None
        assert (found.fault, found.culprit) == (FaultClass.NETWORK, "between rank 0 and rank 1")
        assert found.signal_kinds == {SignalKind.TIMES, SignalKind.HISTORY, SignalKind.TRANSPORT}

    @pytest.mark.parametrize(
        ("kind", "culprit"),
        [
            (SpotKind.LINK, "link 0 → 1"),
            (SpotKind.SENDER, "the sender side of rank 0's worker"),
            (SpotKind.RECEIVER, "the receiver side of rank 1's worker"),
        ],
    )
    def test_who_is_named(self, kind: SpotKind, culprit: str) -> None:
        found = slow_communication.build_communication_finding(
            world(link_check=replace(LOOK, hottest=replace(HOTTEST, kind=kind))), diagnosis(Bottleneck.COMMUNICATION)
        )
        assert found is not None
        assert found.culprit == culprit

    @pytest.mark.parametrize(
        "look",
        [
            None,
            replace(LOOK, conclusive=False, hot_places=(), hottest=None),
            replace(LOOK, at=NOW - FRESH_LINK_EVIDENCE_SECONDS - 1),
        ],
    )
    def test_of_transport_unknown_two_witnesses_are_left_and_nobody_is_named(self, look: LinkCheck | None) -> None:
        found = slow_communication.build_communication_finding(
            world(link_check=look), diagnosis(Bottleneck.COMMUNICATION)
        )
        assert found is not None
        assert found.culprit == ""
        assert found.signal_kinds == {SignalKind.TIMES, SignalKind.HISTORY}

    def test_connections_that_are_alike_are_a_witness_too(self) -> None:
        found = slow_communication.build_communication_finding(
            world(link_check=replace(LOOK, hot_places=(), hottest=None)), diagnosis(Bottleneck.COMMUNICATION)
        )
        assert found is not None
        assert (found.culprit, SignalKind.TRANSPORT in found.signal_kinds) == ("", True)

    def test_other_troubles_are_others_business(self) -> None:
        assert (
            slow_communication.build_communication_finding(world(link_check=LOOK), diagnosis(Bottleneck.COMPUTE))
            is None
        )


class TestProbe:
    def test_an_open_incident_and_something_hot_begin_one_with_controls_on_other_nodes(self) -> None:
        draft = slow_communication.advance_link_probe(opened(), build_policy())
        probe = draft.plan.probe
        assert probe is not None
        assert set(probe.sources) == {f"j-w{i}-0" for i in range(4)}
        assert probe.targets[0][0].address == "10.0.0.1:40000"
        assert (seen(draft).incident, seen(draft).probe, seen(draft).probed_at) == ("i", probe.name, NOW)
        task = draft.plan.build_worker_plan("j-w0-0").probe
        assert task is not None
        assert [target.worker for target in task.targets] == ["j-w1-0", "j-w2-0", "j-w3-0"]

    def test_six_addresses_are_written_as_such(self) -> None:
        found = change_worker(opened(), "j-w1-0", pod={"address": "fd00::1"})
        probe = slow_communication.advance_link_probe(found, build_policy()).plan.probe
        assert probe is not None
        assert probe.targets[0][0].address == "[fd00::1]:40000"

    @pytest.mark.parametrize(
        "why_not",
        [
            opened(link_check=replace(LOOK, hot_places=(), hottest=None)),
            opened(link_check=replace(LOOK, incident="i")),
            opened(link_check=replace(LOOK, at=NOW - FRESH_LINK_EVIDENCE_SECONDS - 1)),
            opened(replace(INCIDENT, cause=IncidentCause.VOLATILE)),
            opened(replace(INCIDENT, outcome=IncidentOutcome.RECOVERED)),
            opened(
                link_verdicts=(
                    LinkVerdict(NOW - 3000, LinkProbeVerdict.LINK),
                    LinkVerdict(NOW - 3500, LinkProbeVerdict.LINK),
                )
            ),
            change_worker(opened(), "j-w1-0", heartbeat={"probe_port": None}),
            change_worker(opened(), "j-w0-0", silent_seconds=60.0),
            opened(link_check=replace(LOOK, hottest=replace(HOTTEST, destination=0))),
        ],
    )
    def test_what_keeps_it_from_beginning(self, why_not: Observation) -> None:
        assert slow_communication.advance_link_probe(why_not, build_policy()) is why_not.desired

    def test_not_where_nothing_may_be_done(self) -> None:
        assert slow_communication.advance_link_probe(opened(), build_policy(paused="maintenance")).plan.probe is None
        assert slow_communication.advance_link_probe(opened(), build_policy(link_probes_per_hour=0)).plan.probe is None

    def test_after_an_hour_there_is_budget_again(self) -> None:
        old = (LinkVerdict(NOW - 3601, LinkProbeVerdict.LINK), LinkVerdict(NOW - 3000, LinkProbeVerdict.LINK))
        assert slow_communication.advance_link_probe(opened(link_verdicts=old), build_policy()).plan.probe is not None

    def test_an_old_look_is_forgotten(self) -> None:
        draft = slow_communication.advance_link_probe(
            opened(link_check=replace(LOOK, at=NOW - LINK_EVIDENCE_TTL_SECONDS - 1)), build_policy()
        )
        assert draft.state.adaptation.link_check is None

    def test_it_waits_for_answers_but_not_for_ever(self) -> None:
        some = answered(LINK)
        some = replace(some, probes=some.probes[:1])
        assert slow_communication.advance_link_probe(some, build_policy()) is some.desired
        late = replace(some, now=NOW + 4 + LINK_PROBE_ANSWER_SECONDS)
        draft = slow_communication.advance_link_probe(late, build_policy())
        assert draft.plan.probe is None
        assert draft.state.adaptation.link_verdicts[-1].verdict is LinkProbeVerdict.INCONCLUSIVE

    @pytest.mark.parametrize(
        ("slow", "verdict", "culprit", "worker"),
        [
            (LINK, LinkProbeVerdict.LINK, "link 0 → 1", ""),
            (SENDER, LinkProbeVerdict.SENDER, "the sender side of rank 0's worker", "j-w0-0"),
            (RECEIVER, LinkProbeVerdict.RECEIVER, "the receiver side of rank 1's worker", "j-w1-0"),
            (set(), LinkProbeVerdict.NOTHING, "", ""),
        ],
    )
    def test_the_finding_becomes_better(
        self, slow: set[tuple[int, int]], verdict: LinkProbeVerdict, culprit: str, worker: str
    ) -> None:
        draft = slow_communication.advance_link_probe(answered(slow), build_policy())
        (incident,) = draft.state.incidents.current
        assert incident.finding is not None
        assert (incident.finding.fault, incident.finding.culprit) == (FaultClass.NETWORK, culprit)
        assert incident.finding.signal_kinds == {SignalKind.TIMES, SignalKind.PROBE}
        assert incident.finding.advice
        assert f"{verdict}. j-w0-0 → j-w1-0" in incident.evidence[-1]
        assert draft.state.adaptation.link_verdicts[-1].worker == worker
        assert (draft.plan.probe, seen(draft).probe) == (None, "")
        assert slow_communication.advance_link_probe(opened().with_desired(draft), build_policy()) == draft, (
            "one look is probed once"
        )

    def test_one_that_could_not_tell_is_no_witness(self) -> None:
        (incident,) = slow_communication.advance_link_probe(
            answered({(0, 1), (0, 2)}), build_policy()
        ).state.incidents.current
        assert incident.finding == INCIDENT.finding
        assert "Inconclusive" in incident.evidence[-1]

    def test_where_the_way_back_is_slow_that_is_asked_next(self) -> None:
        after = answered({(1, 0)})
        turned = after.with_desired(slow_communication.advance_link_probe(after, build_policy()))
        hottest = seen(turned.desired).hottest
        assert hottest is not None
        assert (hottest.source, hottest.destination) == (1, 0)
        again = slow_communication.advance_link_probe(turned, build_policy()).plan.probe
        assert again is not None
        assert (again.sources[0], again.targets[0][0].worker) == ("j-w1-0", "j-w0-0")

    def test_at_once_as_the_incident_closes_without_it(self) -> None:
        after = answered({(1, 0)})
        turned = after.with_desired(slow_communication.advance_link_probe(after, build_policy()))
        assert turned.plan.probe is not None
        (incident,) = turned.state.incidents.open
        assert verify.evaluate_incident(turned, incident) == incident

    def test_an_incident_without_a_remedy_stays_open_for_it(self) -> None:
        during = answered(LINK)
        during = replace(during, probes=())
        (incident,) = during.state.incidents.open
        assert verify.evaluate_incident(during, incident) == incident
        after = during.with_desired(slow_communication.advance_link_probe(answered(LINK), build_policy()))
        assert verify.evaluate_incident(after, after.state.incidents.open[0]).outcome is IncidentOutcome.INEFFECTIVE

    def test_one_that_has_closed_is_told_all_the_same(self) -> None:
        found = answered(LINK)
        closed = found.with_desired(found.desired.with_incident(replace(INCIDENT, outcome=IncidentOutcome.RECOVERED)))
        closed = replace(closed, probes=found.probes)
        (incident,) = slow_communication.advance_link_probe(closed, build_policy()).state.incidents.current
        assert incident.finding is not None
        assert incident.finding.culprit == "link 0 → 1"

    def test_another_membership_ends_it(self) -> None:
        after = rounds.begin_round(answered(LINK), world().plan.members)
        assert (after.plan.probe, after.state.adaptation.link_check) == (None, None)


class TestNode:
    def test_a_side_that_is_slow_once_more_makes_its_node_a_suspect(self) -> None:
        once = (LinkVerdict(NOW - 1000, LinkProbeVerdict.RECEIVER, "j-w0-9", "node-0"),)
        assert (
            slow_communication.advance_link_probe(answered(SENDER), build_policy()).state.incidents.quarantine_requests
            == ()
        )
        (wanted,) = slow_communication.advance_link_probe(
            answered(SENDER, link_verdicts=once), build_policy()
        ).state.incidents.quarantine_requests
        assert (wanted.node, wanted.incident) == ("node-0", "i")

    @pytest.mark.parametrize(
        "earlier",
        [
            LinkVerdict(NOW - 4000, LinkProbeVerdict.SENDER, "j-w0-0", "node-0"),
            LinkVerdict(NOW - 10, LinkProbeVerdict.SENDER, "j-w3-0", "node-3"),
            LinkVerdict(NOW - 10, LinkProbeVerdict.LINK),
        ],
    )
    def test_long_ago_or_elsewhere_is_another_matter(self, earlier: LinkVerdict) -> None:
        found = answered(SENDER, link_verdicts=(earlier,))
        assert slow_communication.advance_link_probe(found, build_policy()).state.incidents.quarantine_requests == ()

    def test_a_link_blames_no_node(self) -> None:
        twice = (LinkVerdict(NOW - 10, LinkProbeVerdict.LINK),)
        assert (
            slow_communication.advance_link_probe(
                answered(LINK, link_verdicts=twice), build_policy()
            ).state.incidents.quarantine_requests
            == ()
        )

    def test_nor_where_the_policy_does_not_allow_it(self) -> None:
        once = (LinkVerdict(NOW - 1000, LinkProbeVerdict.SENDER, "j-w0-0", "node-0"),)
        rules = build_policy(allow=frozenset(Remedy) - {Remedy.QUARANTINE_NODE})
        assert (
            slow_communication.advance_link_probe(
                answered(SENDER, link_verdicts=once), rules
            ).state.incidents.quarantine_requests
            == ()
        )


class TestSwap:
    @pytest.mark.parametrize(("slow", "worker"), [(SENDER, "j-w0-0"), (RECEIVER, "j-w1-0")])
    def test_a_slow_side_is_replaced_where_nothing_else_has_helped(
        self, slow: set[tuple[int, int]], worker: str
    ) -> None:
        decision = slow_communication.check_slow_link_sides(answered(slow), build_policy())
        assert decision is not None
        assert (decision.remedy, decision.worker, decision.continued_incident) == (Remedy.REPLACE_WORKER, worker, "i")
        assert decision.finding is not None
        assert SignalKind.PROBE in decision.finding.signal_kinds
        assert decision.slowdown_before == 2.0

    @pytest.mark.parametrize("slow", [LINK, set(), {(1, 0)}])
    def test_a_link_or_congestion_replaces_nobody(self, slow: set[tuple[int, int]]) -> None:
        assert slow_communication.check_slow_link_sides(answered(slow), build_policy()) is None

    @pytest.mark.parametrize(
        "of_incident",
        [
            {"remedy": Remedy.LOCAL_SGD, "applied": NOW - 9, "predicted_after": 1.05},
            {"slowdown_after": 1.05, "outcome": IncidentOutcome.RECOVERED},
        ],
    )
    def test_what_is_mended_needs_no_swap(self, of_incident: dict[str, Any]) -> None:
        assert slow_communication.check_slow_link_sides(answered_later(of_incident), build_policy()) is None

    @pytest.mark.parametrize(
        "of_incident",
        [
            {"remedy": Remedy.LOCAL_SGD, "applied": NOW - 9, "predicted_after": 1.5},
            {"remedy": Remedy.LOCAL_SGD, "applied": None, "predicted_after": 1.05},
        ],
    )
    def test_what_local_sgd_leaves_may_be_worth_one(self, of_incident: dict[str, Any]) -> None:
        decision = slow_communication.check_slow_link_sides(answered_later(of_incident), build_policy())
        assert decision is not None
        assert decision.remedy is Remedy.REPLACE_WORKER

    def test_an_incident_that_has_closed_is_followed_by_another(self) -> None:
        decision = slow_communication.check_slow_link_sides(
            answered_later({"slowdown_after": 1.4, "outcome": IncidentOutcome.MITIGATED}), build_policy()
        )
        assert decision is not None
        assert (decision.continued_incident, decision.slowdown_before) == ("", 1.4)

    def test_without_a_spare_or_a_restart_left_there_is_none(self) -> None:
        found = answered(SENDER)
        assert (
            slow_communication.check_slow_link_sides(
                change_worker(found, "j-w4-0", heartbeat={"state": "Starting"}), build_policy()
            )
            is None
        )
        assert slow_communication.check_slow_link_sides(found, build_policy(max_restarts=0)) is None

    def test_who_leaves_already_is_not_replaced_again(self) -> None:
        found = answered(SENDER)
        leaving = replace(found.state.placement.workers[0], leaving="why")
        after = replace(found.with_desired(found.desired.with_worker(leaving)), probes=found.probes)
        assert slow_communication.check_slow_link_sides(after, build_policy()) is None

    def test_a_world_without_a_probe_is_calm(self) -> None:
        assert slow_communication.check_slow_link_sides(world(), build_policy()) is None
        assert slow_communication.check_slow_link_sides(opened(), build_policy()) is None


def answered_later(of_incident: dict[str, Any]) -> Observation:
    """What has become of the incident by the time at which the probe of a slow sender is answered."""
    found = answered(SENDER)
    return found.with_desired(found.desired.with_incident(replace(INCIDENT, **of_incident)))


def test_what_a_worker_measured_unasked_counts_for_nothing() -> None:
    asked_for = answered(LINK)
    strange = LinkProbe("nobody", failed="x" * 2000)
    more = tuple(replace(told, probes=(*told.probes, strange)) for told in asked_for.probes)
    assert slow_communication.advance_link_probe(
        replace(asked_for, probes=more), build_policy()
    ) == slow_communication.advance_link_probe(asked_for, build_policy())


def test_what_connections_show_is_found_ahead_of_the_pass() -> None:
    observation = asked(ring(slow=2))
    slow_communication.prefetch_delay_matrix(observation)
    found = slow_communication._analyze_links.cache_info().misses
    assert seen(slow_communication.record_link_evidence(observation, build_policy())).hot_places
    assert slow_communication._analyze_links.cache_info().misses == found
