"""Slow communication: from measurements of connections to a finding, a probe, a refined finding, and a replacement."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pacekeeper_analysis.failures.finding import FaultClass, Finding, Signal, SignalKind
from pacekeeper_analysis.network.delay_matrix import SpotKind
from pacekeeper_analysis.network.link_probe import LinkProbeVerdict
from pacekeeper_analysis.protocol.reports import Evidence, LinkProbe
from pacekeeper_analysis.protocol.requests import EvidencePart, EvidenceRequest
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
    Incident,
    LinkVerdict,
    LocalSgdChoice,
    StragglerInvestigation,
)
from pacekeeper_operator.state.job_requests import HottestPlace, LinkCheck
from pacekeeper_operator.state.observation import Observation
from testing.network.link_evidence import build_mesh, build_ring
from testing.operators.observations import NOW, build_policy, build_training, change_members, change_worker

PARTS = (EvidencePart.WINDOWS, EvidencePart.LINKS)
HOTTEST = HottestPlace(SpotKind.PAIR, 0, 1, 1e7)
CHECK = LinkCheck(NOW, "ask", HOTTEST, ("from rank 0 to rank 1: 10 MB/s",), conclusive=True)
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


def build_with_adaptation(replicas: int = 4, **adaptation: Any) -> Observation:
    """Build a job of four workers and a spare, one rank each, whose launchers answer probes.

    `adaptation` may also hold the `link_check`."""
    found = change_members(build_training(replicas, step=500), probe_port=40000)
    link_check = adaptation.pop("link_check", None)
    return found.with_desired(found.desired.with_adaptation(**adaptation).with_requests(link_check=link_check))


def build_with_evidence(evidence: tuple[Evidence, ...], **adaptation: Any) -> Observation:
    found = build_with_adaptation(**adaptation)
    found = found.with_desired(found.desired.with_requests(evidence=EvidenceRequest("ask", PARTS)))
    return replace(found, evidence=evidence)


def build_open(incident: Incident = INCIDENT, **adaptation: Any) -> Observation:
    found = build_with_adaptation(**{"link_check": CHECK, **adaptation})
    return found.with_desired(found.desired.with_incident(incident))


def advance_probe(found: Observation, **policy_values: Any) -> DesiredState:
    return slow_communication.advance_link_probe(found, build_policy(**policy_values))


def get_link_check(desired: DesiredState) -> LinkCheck:
    assert desired.requests.link_check is not None
    return desired.requests.link_check


def build_answered(slow: set[tuple[int, int]], incident: Incident = INCIDENT, **adaptation: Any) -> Observation:
    """Build a job whose probe of 0 → 1 was requested and answered; `slow`: pairs of ranks."""
    before = build_open(incident, **adaptation)
    after = before.with_desired(slow_communication.advance_link_probe(before, build_policy()))
    probe_task = after.requests.probe
    assert probe_task is not None
    slow_workers = {(f"j-w{source}-0", f"j-w{destination}-0") for source, destination in slow}
    return replace(
        after,
        now=NOW + 5,
        probes=tuple(
            Evidence(
                probe_task.name,
                source,
                1,
                probes=tuple(
                    LinkProbe(target.worker, SLOW if (source, target.worker) in slow_workers else FAST, 0.0005)
                    for target in targets
                ),
            )
            for source, targets in zip(probe_task.sources, probe_task.targets, strict=True)
        ),
    )


LINK = {(0, 1)}
SENDER = {(0, 1), (0, 2), (0, 3)}
RECEIVER = {(0, 1), (2, 1), (3, 1)}


class TestRequests:
    def test_the_second_request_about_communication_includes_connections(self) -> None:
        for bottleneck, is_requested in ((None, False), (Bottleneck.COMPUTE, False), (Bottleneck.COMMUNICATION, True)):
            desired = straggler._request_evidence(
                build_with_adaptation(), StragglerInvestigation(NOW - 10, last_bottleneck=bottleneck)
            )
            assert (EvidencePart.LINKS in desired.requests.evidence_parts) is is_requested

    def test_reverting_to_sync_requests_connections_until_a_hot_place_is_found(self) -> None:
        def request_parts(found: Observation) -> tuple[EvidencePart, ...]:
            mode = LocalSgdChoice(NOW - 30, Bottleneck.COMMUNICATION, "r", "i")
            found = found.with_desired(found.desired.with_adaptation(local_sgd=mode))
            return revert_to_sync._request_evidence(found, mode).requests.evidence_parts

        assert request_parts(build_open(link_check=None)) == PARTS
        assert request_parts(build_open(link_check=replace(CHECK, hot_places=(), hottest=None))) == PARTS
        assert request_parts(build_open()) == PARTS[:1]
        assert (
            request_parts(
                build_open(replace(INCIDENT, decided=NOW - LINK_EVIDENCE_REQUEST_SECONDS - 1), link_check=None)
            )
            == PARTS[:1]
        )
        assert (
            request_parts(build_open(replace(INCIDENT, outcome=IncidentOutcome.MITIGATED), link_check=None))
            == PARTS[:1]
        )
        assert request_parts(build_with_adaptation()) == PARTS[:1]


class TestRecord:
    def test_a_hot_pair_is_recorded_with_a_description(self) -> None:
        check = get_link_check(
            slow_communication.record_link_evidence(build_with_evidence(build_ring(slow=2)), build_policy())
        )
        assert check.hottest is not None
        assert (check.hottest.kind, check.hottest.source, check.hottest.destination) == (SpotKind.PAIR, 2, 3)
        assert check.conclusive
        assert check.hot_places[0].startswith("from rank 2 to rank 3: 12 MB/s while busy, the others 125 MB/s")

    def test_no_hot_place_differs_from_an_inconclusive_check(self) -> None:
        healthy, inactive = (
            get_link_check(
                slow_communication.record_link_evidence(build_with_evidence(build_ring(quiet=quiet)), build_policy())
            )
            for quiet in (False, True)
        )
        assert (healthy.hot_places, healthy.conclusive) == ((), True)
        assert (inactive.hot_places, inactive.conclusive) == ((), False)

    def test_all_ranks_have_to_answer_and_an_answer_is_recorded_once(self) -> None:
        partial = build_with_evidence(build_ring(slow=2)[:3])
        assert slow_communication.record_link_evidence(partial, build_policy()) is partial.desired
        checked = build_with_evidence(build_ring(slow=2), link_check=CHECK)
        assert slow_communication.record_link_evidence(checked, build_policy()) is checked.desired
        not_requested = build_with_evidence(build_ring(slow=2))
        other_request = EvidenceRequest("ask", PARTS[:1])
        not_requested = not_requested.with_desired(not_requested.desired.with_requests(evidence=other_request))
        assert slow_communication.record_link_evidence(not_requested, build_policy()) is not_requested.desired

    def test_a_check_that_is_being_probed_stays(self) -> None:
        found = build_with_evidence(build_ring(slow=2), link_check=replace(CHECK, request="older", probe="p"))
        assert slow_communication.record_link_evidence(found, build_policy()) is found.desired

    def test_only_the_slowest_sides_are_recorded(self) -> None:
        """The limit holds for any number of ranks, because each side is two gauges and a line of the state."""
        observation = build_with_evidence(build_mesh(ranks=12, slow=5), replicas=12)
        sides = get_link_check(slow_communication.record_link_evidence(observation, build_policy())).sides
        assert len(sides) == MAX_LINK_SIDES < 2 * 12
        assert (sides[0].rank, sides[0].sends) == (5, True)
        assert sides[0].ratio == pytest.approx(10.0, rel=0.1)
        assert [side.ratio for side in sides] == sorted((side.ratio for side in sides), reverse=True)
        assert sides[1].ratio == pytest.approx(1.0, rel=0.1)

    def test_verdicts_survive_a_change_of_the_leader_and_the_check_does_not(self) -> None:
        desired = slow_communication.record_link_evidence(build_with_evidence(build_ring(slow=2)), build_policy())
        recorded = desired.with_adaptation(
            link_verdicts=(LinkVerdict(NOW, LinkProbeVerdict.SENDER, "j-w0-0", "node-0"),)
        )
        read = state_codec.decode_state(state_codec.encode_state(recorded, "j"), "j").desired
        assert read.is_stored_as(recorded)
        assert read.requests.link_check is None


def build_diagnosis(bottleneck: Bottleneck) -> Diagnosis:
    return Diagnosis(bottleneck, 1.8, (), (), 0.1, 0.05, (1.0,) * 4, {}, None)  # type: ignore[arg-type]  # not read here


class TestFinding:
    def test_the_finding_contains_the_hottest_pair(self) -> None:
        found = slow_communication.build_communication_finding(
            build_with_adaptation(link_check=CHECK), build_diagnosis(Bottleneck.COMMUNICATION)
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
    def test_the_kind_of_the_hottest_place_determines_the_culprit(self, kind: SpotKind, culprit: str) -> None:
        found = slow_communication.build_communication_finding(
            build_with_adaptation(link_check=replace(CHECK, hottest=replace(HOTTEST, kind=kind))),
            build_diagnosis(Bottleneck.COMMUNICATION),
        )
        assert found is not None
        assert found.culprit == culprit

    @pytest.mark.parametrize(
        "check",
        [
            None,
            replace(CHECK, conclusive=False, hot_places=(), hottest=None),
            replace(CHECK, at=NOW - FRESH_LINK_EVIDENCE_SECONDS - 1),
        ],
    )
    def test_without_conclusive_evidence_of_transport_no_culprit_is_named(self, check: LinkCheck | None) -> None:
        found = slow_communication.build_communication_finding(
            build_with_adaptation(link_check=check), build_diagnosis(Bottleneck.COMMUNICATION)
        )
        assert found is not None
        assert found.culprit == ""
        assert found.signal_kinds == {SignalKind.TIMES, SignalKind.HISTORY}

    def test_connections_without_a_hot_place_are_a_signal_too(self) -> None:
        found = slow_communication.build_communication_finding(
            build_with_adaptation(link_check=replace(CHECK, hot_places=(), hottest=None)),
            build_diagnosis(Bottleneck.COMMUNICATION),
        )
        assert found is not None
        assert (found.culprit, SignalKind.TRANSPORT in found.signal_kinds) == ("", True)

    def test_other_bottlenecks_have_no_communication_finding(self) -> None:
        assert (
            slow_communication.build_communication_finding(
                build_with_adaptation(link_check=CHECK), build_diagnosis(Bottleneck.COMPUTE)
            )
            is None
        )


class TestProbe:
    def test_an_open_incident_with_a_hot_place_begins_a_probe_with_controls_on_other_nodes(self) -> None:
        desired = slow_communication.advance_link_probe(build_open(), build_policy())
        probe = desired.requests.probe
        assert probe is not None
        assert set(probe.sources) == {f"j-w{ordinal}-0" for ordinal in range(4)}
        assert probe.targets[0][0].address == "10.0.0.1:40000"
        assert (get_link_check(desired).incident, get_link_check(desired).probe, get_link_check(desired).probed_at) == (
            "i",
            probe.name,
            NOW,
        )
        task = desired.requests.build_worker_requests("j-w0-0", is_member=True).probe
        assert task is not None
        assert [target.worker for target in task.targets] == ["j-w1-0", "j-w2-0", "j-w3-0"]

    def test_ipv6_addresses_are_written_in_brackets(self) -> None:
        found = change_worker(build_open(), "j-w1-0", pod={"address": "fd00::1"})
        probe = slow_communication.advance_link_probe(found, build_policy()).requests.probe
        assert probe is not None
        assert probe.targets[0][0].address == "[fd00::1]:40000"

    @pytest.mark.parametrize(
        "observation",
        [
            build_open(link_check=replace(CHECK, hot_places=(), hottest=None)),
            build_open(link_check=replace(CHECK, incident="i")),
            build_open(link_check=replace(CHECK, at=NOW - FRESH_LINK_EVIDENCE_SECONDS - 1)),
            build_open(replace(INCIDENT, cause=IncidentCause.VOLATILE)),
            build_open(replace(INCIDENT, outcome=IncidentOutcome.RECOVERED)),
            build_open(
                link_verdicts=(
                    LinkVerdict(NOW - 3000, LinkProbeVerdict.LINK),
                    LinkVerdict(NOW - 3500, LinkProbeVerdict.LINK),
                )
            ),
            change_worker(build_open(), "j-w1-0", heartbeat={"probe_port": None}),
            change_worker(build_open(), "j-w0-0", silent_seconds=60.0),
            build_open(link_check=replace(CHECK, hottest=replace(HOTTEST, destination=0))),
        ],
    )
    def test_a_probe_does_not_begin_if_a_condition_is_missing(self, observation: Observation) -> None:
        assert slow_communication.advance_link_probe(observation, build_policy()) is observation.desired

    def test_a_probe_does_not_begin_in_a_pause_or_without_budget(self) -> None:
        assert advance_probe(build_open(), paused="maintenance").requests.probe is None
        assert advance_probe(build_open(), link_probes_per_hour=0).requests.probe is None

    def test_the_budget_for_probes_is_renewed_after_an_hour(self) -> None:
        old = (LinkVerdict(NOW - 3601, LinkProbeVerdict.LINK), LinkVerdict(NOW - 3000, LinkProbeVerdict.LINK))
        assert advance_probe(build_open(link_verdicts=old)).requests.probe is not None

    def test_an_old_check_expires(self) -> None:
        desired = slow_communication.advance_link_probe(
            build_open(link_check=replace(CHECK, at=NOW - LINK_EVIDENCE_TTL_SECONDS - 1)), build_policy()
        )
        assert desired.requests.link_check is None

    def test_the_wait_for_answers_is_limited(self) -> None:
        partial = build_answered(LINK)
        partial = replace(partial, probes=partial.probes[:1])
        assert slow_communication.advance_link_probe(partial, build_policy()) is partial.desired
        late = replace(partial, now=NOW + 4 + LINK_PROBE_ANSWER_SECONDS)
        desired = slow_communication.advance_link_probe(late, build_policy())
        assert desired.requests.probe is None
        assert desired.state.adaptation.link_verdicts[-1].verdict is LinkProbeVerdict.INCONCLUSIVE

    @pytest.mark.parametrize(
        ("slow", "verdict", "culprit", "worker"),
        [
            (LINK, LinkProbeVerdict.LINK, "link 0 → 1", ""),
            (SENDER, LinkProbeVerdict.SENDER, "the sender side of rank 0's worker", "j-w0-0"),
            (RECEIVER, LinkProbeVerdict.RECEIVER, "the receiver side of rank 1's worker", "j-w1-0"),
            (set(), LinkProbeVerdict.NOTHING, "", ""),
        ],
    )
    def test_the_probe_refines_the_finding(
        self, slow: set[tuple[int, int]], verdict: LinkProbeVerdict, culprit: str, worker: str
    ) -> None:
        desired = slow_communication.advance_link_probe(build_answered(slow), build_policy())
        (incident,) = desired.state.incidents.current
        assert incident.finding is not None
        assert (incident.finding.fault, incident.finding.culprit) == (FaultClass.NETWORK, culprit)
        assert incident.finding.signal_kinds == {SignalKind.TIMES, SignalKind.PROBE}
        assert incident.finding.advice
        assert f"{verdict}. j-w0-0 → j-w1-0" in incident.evidence[-1]
        assert desired.state.adaptation.link_verdicts[-1].worker == worker
        assert (desired.requests.probe, get_link_check(desired).probe) == (None, "")
        assert slow_communication.advance_link_probe(build_open().with_desired(desired), build_policy()) == desired, (
            "one check is probed once"
        )

    def test_an_inconclusive_probe_leaves_the_finding(self) -> None:
        (incident,) = slow_communication.advance_link_probe(
            build_answered({(0, 1), (0, 2)}), build_policy()
        ).state.incidents.current
        assert incident.finding == INCIDENT.finding
        assert "Inconclusive" in incident.evidence[-1]

    def test_if_the_reverse_direction_is_slow_it_is_probed_next(self) -> None:
        answered = build_answered({(1, 0)})
        other_direction = answered.with_desired(slow_communication.advance_link_probe(answered, build_policy()))
        hottest = get_link_check(other_direction.desired).hottest
        assert hottest is not None
        assert (hottest.source, hottest.destination) == (1, 0)
        next_probe = slow_communication.advance_link_probe(other_direction, build_policy()).requests.probe
        assert next_probe is not None
        assert (next_probe.sources[0], next_probe.targets[0][0].worker) == ("j-w1-0", "j-w0-0")

    def test_the_probe_of_the_reverse_direction_begins_at_once_and_the_incident_stays_open(self) -> None:
        answered = build_answered({(1, 0)})
        other_direction = answered.with_desired(slow_communication.advance_link_probe(answered, build_policy()))
        assert other_direction.requests.probe is not None
        (incident,) = other_direction.state.incidents.open
        assert verify.evaluate_incident(other_direction, incident) == incident

    def test_an_incident_without_a_remedy_stays_open_until_the_probe_ends(self) -> None:
        during = build_answered(LINK)
        during = replace(during, probes=())
        (incident,) = during.state.incidents.open
        assert verify.evaluate_incident(during, incident) == incident
        after = during.with_desired(slow_communication.advance_link_probe(build_answered(LINK), build_policy()))
        assert verify.evaluate_incident(after, after.state.incidents.open[0]).outcome is IncidentOutcome.INEFFECTIVE

    def test_a_closed_incident_receives_the_finding_too(self) -> None:
        found = build_answered(LINK)
        closed = found.with_desired(found.desired.with_incident(replace(INCIDENT, outcome=IncidentOutcome.RECOVERED)))
        closed = replace(closed, probes=found.probes)
        (incident,) = slow_communication.advance_link_probe(closed, build_policy()).state.incidents.current
        assert incident.finding is not None
        assert incident.finding.culprit == "link 0 → 1"

    def test_another_membership_ends_the_probe(self) -> None:
        after = rounds.begin_round(build_answered(LINK), build_with_adaptation().plan.members)
        assert (after.requests.probe, after.requests.link_check) == (None, None)


class TestNode:
    def test_a_side_that_is_slow_twice_requests_the_quarantine_of_its_node(self) -> None:
        earlier = (LinkVerdict(NOW - 1000, LinkProbeVerdict.RECEIVER, "j-w0-9", "node-0"),)
        assert (
            slow_communication.advance_link_probe(
                build_answered(SENDER), build_policy()
            ).state.incidents.quarantine_requests
            == ()
        )
        (request,) = slow_communication.advance_link_probe(
            build_answered(SENDER, link_verdicts=earlier), build_policy()
        ).state.incidents.quarantine_requests
        assert (request.node, request.incident) == ("node-0", "i")

    @pytest.mark.parametrize(
        "earlier",
        [
            LinkVerdict(NOW - 4000, LinkProbeVerdict.SENDER, "j-w0-0", "node-0"),
            LinkVerdict(NOW - 10, LinkProbeVerdict.SENDER, "j-w3-0", "node-3"),
            LinkVerdict(NOW - 10, LinkProbeVerdict.LINK),
        ],
    )
    def test_a_verdict_long_ago_or_elsewhere_requests_no_quarantine(self, earlier: LinkVerdict) -> None:
        found = build_answered(SENDER, link_verdicts=(earlier,))
        assert slow_communication.advance_link_probe(found, build_policy()).state.incidents.quarantine_requests == ()

    def test_a_slow_link_requests_no_quarantine(self) -> None:
        earlier = (LinkVerdict(NOW - 10, LinkProbeVerdict.LINK),)
        assert (
            slow_communication.advance_link_probe(
                build_answered(LINK, link_verdicts=earlier), build_policy()
            ).state.incidents.quarantine_requests
            == ()
        )

    def test_no_quarantine_is_requested_if_the_policy_does_not_allow_it(self) -> None:
        earlier = (LinkVerdict(NOW - 1000, LinkProbeVerdict.SENDER, "j-w0-0", "node-0"),)
        policy = build_policy(allow=frozenset(Remedy) - {Remedy.QUARANTINE_NODE})
        assert (
            slow_communication.advance_link_probe(
                build_answered(SENDER, link_verdicts=earlier), policy
            ).state.incidents.quarantine_requests
            == ()
        )


class TestSwap:
    @pytest.mark.parametrize(("slow", "worker"), [(SENDER, "j-w0-0"), (RECEIVER, "j-w1-0")])
    def test_a_slow_side_is_replaced_if_nothing_else_has_helped(self, slow: set[tuple[int, int]], worker: str) -> None:
        decision = slow_communication.check_slow_link_sides(build_answered(slow), build_policy())
        assert decision is not None
        assert (decision.remedy, decision.worker, decision.continued_incident) == (Remedy.REPLACE_WORKER, worker, "i")
        assert decision.finding is not None
        assert SignalKind.PROBE in decision.finding.signal_kinds
        assert decision.slowdown_before == 2.0

    @pytest.mark.parametrize("slow", [LINK, set(), {(1, 0)}])
    def test_a_slow_link_or_congestion_replaces_no_worker(self, slow: set[tuple[int, int]]) -> None:
        assert slow_communication.check_slow_link_sides(build_answered(slow), build_policy()) is None

    @pytest.mark.parametrize(
        "incident_changes",
        [
            {"remedy": Remedy.LOCAL_SGD, "applied": NOW - 9, "predicted_after": 1.05},
            {"slowdown_after": 1.05, "outcome": IncidentOutcome.RECOVERED},
        ],
    )
    def test_a_resolved_incident_needs_no_replacement(self, incident_changes: dict[str, Any]) -> None:
        assert slow_communication.check_slow_link_sides(build_answered_later(incident_changes), build_policy()) is None

    @pytest.mark.parametrize(
        "incident_changes",
        [
            {"remedy": Remedy.LOCAL_SGD, "applied": NOW - 9, "predicted_after": 1.5},
            {"remedy": Remedy.LOCAL_SGD, "applied": None, "predicted_after": 1.05},
        ],
    )
    def test_a_slowdown_that_remains_under_local_sgd_may_be_worth_a_replacement(
        self, incident_changes: dict[str, Any]
    ) -> None:
        decision = slow_communication.check_slow_link_sides(build_answered_later(incident_changes), build_policy())
        assert decision is not None
        assert decision.remedy is Remedy.REPLACE_WORKER

    def test_a_replacement_after_a_closed_incident_opens_another(self) -> None:
        decision = slow_communication.check_slow_link_sides(
            build_answered_later({"slowdown_after": 1.4, "outcome": IncidentOutcome.MITIGATED}), build_policy()
        )
        assert decision is not None
        assert (decision.continued_incident, decision.slowdown_before) == ("", 1.4)

    def test_without_a_spare_or_a_restart_left_no_worker_is_replaced(self) -> None:
        found = build_answered(SENDER)
        assert (
            slow_communication.check_slow_link_sides(
                change_worker(found, "j-w4-0", heartbeat={"state": "Starting"}), build_policy()
            )
            is None
        )
        assert slow_communication.check_slow_link_sides(found, build_policy(max_restarts=0)) is None

    def test_a_leaving_worker_is_not_replaced_again(self) -> None:
        found = build_answered(SENDER)
        leaving = replace(found.state.placement.workers[0], leaving="why")
        after = replace(found.with_desired(found.desired.with_worker(leaving)), probes=found.probes)
        assert slow_communication.check_slow_link_sides(after, build_policy()) is None

    def test_without_a_probe_no_worker_is_replaced(self) -> None:
        assert slow_communication.check_slow_link_sides(build_with_adaptation(), build_policy()) is None
        assert slow_communication.check_slow_link_sides(build_open(), build_policy()) is None


def build_answered_later(incident_changes: dict[str, Any]) -> Observation:
    """Build a job whose incident has changed by the time at which the probe of a slow sender is answered."""
    found = build_answered(SENDER)
    return found.with_desired(found.desired.with_incident(replace(INCIDENT, **incident_changes)))


def test_measurements_that_were_not_requested_are_ignored() -> None:
    answered = build_answered(LINK)
    unrequested = LinkProbe("unknown", failed="x" * 2000)
    extended = tuple(replace(answer, probes=(*answer.probes, unrequested)) for answer in answered.probes)
    assert slow_communication.advance_link_probe(
        replace(answered, probes=extended), build_policy()
    ) == slow_communication.advance_link_probe(answered, build_policy())


def test_link_evidence_is_analyzed_ahead_of_the_pass() -> None:
    observation = build_with_evidence(build_ring(slow=2))
    slow_communication.prefetch_delay_matrix(observation)
    misses = slow_communication._analyze_links.cache_info().misses
    assert get_link_check(slow_communication.record_link_evidence(observation, build_policy())).hot_places
    assert slow_communication._analyze_links.cache_info().misses == misses
