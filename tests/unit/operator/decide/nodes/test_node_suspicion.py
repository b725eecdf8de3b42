"""A blamed node: what is answered to whom, what is written as evidence, and that nothing marked is forgotten."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pacekeeper_operator.api.conditions import QuarantineCondition
from pacekeeper_operator.api.node_probe import InconclusiveReason, ProbeResult
from pacekeeper_operator.api.node_quarantine import (
    NodeSuspicion,
    QuarantinePhase,
    QuarantineSpec,
    QuarantineStatus,
    QuarantineVerdict,
    Witness,
)
from pacekeeper_operator.decide.nodes.node_quarantine import build_quarantine_decision, decide_quarantine_step
from pacekeeper_operator.decide.nodes.node_suspicion import (
    BREAKER_LATCH_SECONDS,
    CLEARED_NODE_TTL_SECONDS,
    CONFIRMED_SUSPICION_HOLD_SECONDS,
    SUSPICION_TTL_SECONDS,
    find_witness,
    with_sign,
)
from pacekeeper_operator.decide.nodes.quarantine_steps import (
    DeleteQuarantine,
    ProbePod,
    Quarantine,
    QuarantineRules,
    ReleaseNode,
    TargetNode,
    WriteQuarantineStatus,
    add_witness_condition,
    build_status_write,
)
from pacekeeper_operator.decide.nodes.quarantine_usage import (
    SIMULTANEOUS_FAILURE_SECONDS,
    QuarantineContext,
    QuarantineUsage,
)

START = 1_000_000.0
NODE, DOWN = TargetNode("uid-1"), TargetNode("uid-1", ready=False)
VOUCHED: dict[str, Any] = {"witness": Witness.GPU_SERIES, "reason": "XID 79 (GPU has fallen off the bus)"}


def sign(at: float = START, namespace: str = "team-a", **changes: Any) -> NodeSuspicion:
    return replace(NodeSuspicion(namespace, f"i-{at:.0f}", "a rank hung on it", at), **changes)


def suspicion(*signs: NodeSuspicion, name: str = "node-1", approved: bool = False, **status: Any) -> Quarantine:
    spec = QuarantineSpec("XID 79", "uid-1", suspicions=signs or (sign(),), approved=approved)
    return Quarantine(name, f"q-{name}", spec, QuarantineStatus(**status), guarded=True)


def probed(passed: bool | None, at: float = START + 5, **changes: Any) -> tuple[ProbeResult, ...]:
    return (replace(ProbeResult("p", at - 4, at, passed, "so it said"), **changes),)


def judged(
    quarantine: Quarantine, node: TargetNode = NODE, seconds: float = CONFIRMED_SUSPICION_HOLD_SECONDS, **around: Any
) -> WriteQuarantineStatus:
    """What is written about it, so long after START."""
    values: dict[str, Any] = {"node_count": 100, "rules": QuarantineRules(acts=False)}
    step = decide_quarantine_step(quarantine, node, None, QuarantineContext(**(values | around)), START + seconds)
    assert isinstance(step, WriteQuarantineStatus)
    return step


def said(report: WriteQuarantineStatus, kind: QuarantineCondition) -> tuple[str, str, str]:
    found = next(condition for condition in report.status.conditions if condition.type == kind)
    return found.status, found.reason, found.message


class TestMarks:
    @pytest.mark.parametrize("marked", [TargetNode("uid-1", tainted=True), TargetNode("uid-1", cordoned=True)])
    def test_are_taken_away_where_nothing_is_approved(self, marked: TargetNode) -> None:
        unapproved = ReleaseNode("its quarantine is not approved")
        assert decide_quarantine_step(suspicion(), marked, None, QuarantineContext(), START) == unapproved
        by_hand = suspicion()
        by_hand = replace(by_hand, spec=replace(by_hand.spec, suspicions=()))
        assert decide_quarantine_step(by_hand, marked, None, QuarantineContext(), START) == unapproved
        decided = decide_quarantine_step(suspicion(approved=True), marked, None, QuarantineContext(), START)
        assert not isinstance(decided, ReleaseNode)


class TestRulings:
    """What the jobs that blame the node are told."""

    def of(
        self, uid: str = "uid-1", verdict: QuarantineVerdict = QuarantineVerdict.SUSPECTED, **changes: Any
    ) -> tuple[QuarantineVerdict, str]:
        message = changes.pop("message", "a probe decides")
        deleted = changes.pop("deleted", False)
        phase = changes.pop("phase", QuarantinePhase.SUSPECTED)
        found = suspicion(**changes)
        status = build_status_write(found, phase, verdict, message, START).status
        answer = build_quarantine_decision(replace(found, status=status, deleted=deleted), uid)
        return answer.verdict, answer.message

    def test_as_long_as_nobody_has_confirmed_it(self) -> None:
        assert self.of() == (QuarantineVerdict.SUSPECTED, "node-1 is untouched: a probe decides")
        assert self.of(message="") == (QuarantineVerdict.SUSPECTED, "node-1 is untouched: its suspicion is new")
        held = self.of(verdict=QuarantineVerdict.BREAKER, message="the breaker has tripped")
        assert held == (QuarantineVerdict.BREAKER, "node-1 is untouched: the breaker has tripped")

    def test_once_a_probe_has_cleared_it_even_while_that_ends(self) -> None:
        cleared = (QuarantineVerdict.CLEARED, "node-1 is untouched: it has passed")
        assert self.of(verdict=QuarantineVerdict.CLEARED, message="it has passed") == cleared
        ending = self.of(verdict=QuarantineVerdict.CLEARED, message="it has passed", phase=QuarantinePhase.RELEASED)
        assert ending == cleared

    def test_once_it_is_quarantined_and_while_that_ends(self) -> None:
        assert self.of(approved=True) == (QuarantineVerdict.QUARANTINED, "node-1 is quarantined")
        releasing = (QuarantineVerdict.RELEASING, "an earlier quarantine of node-1 is being released")
        assert self.of(approved=True, deleted=True) == releasing
        assert self.of(approved=True, phase=QuarantinePhase.RELEASED) == releasing
        assert self.of(approved=True, verdict=QuarantineVerdict.CLEARED)[0] is QuarantineVerdict.QUARANTINED, (
            "it is none any more"
        )

    def test_where_it_is_about_an_earlier_node_of_the_name(self) -> None:
        assert self.of(uid="another")[0] is QuarantineVerdict.RELEASING

    def test_where_it_waits_for_a_person(self) -> None:
        waits = (QuarantineVerdict.AWAITS_APPROVAL, "the quarantine of node-1 waits for approval")
        assert self.of(verdict=QuarantineVerdict.AWAITS_APPROVAL) == waits
        by_hand = suspicion()
        by_hand = replace(by_hand, spec=replace(by_hand.spec, suspicions=()))
        assert build_quarantine_decision(by_hand, "uid-1").verdict is QuarantineVerdict.AWAITS_APPROVAL


class TestEvidence:
    """What stands in the condition `Witnessed`: whose word decides, and that word."""

    def test_of_series_is_what_they_showed(self) -> None:
        report = judged(suspicion(sign(namespace="team-b"), sign(**VOUCHED)), DOWN)
        assert said(report, QuarantineCondition.WITNESSED) == ("True", "GpuSeries", VOUCHED["reason"])

    def test_of_the_node_is_its_condition(self) -> None:
        report = judged(suspicion(probes=probed(False)), DOWN)
        assert said(report, QuarantineCondition.WITNESSED) == ("True", "NodeCondition", "the node is not Ready")

    def test_of_a_probe_is_what_it_said(self) -> None:
        report = judged(suspicion(probes=probed(False)))
        assert said(report, QuarantineCondition.WITNESSED) == ("True", "Probe", "a probe pod failed: so it said")

    def test_of_nobody_is_what_is_waited_for(self) -> None:
        weak = judged(suspicion(sign(weak=True)))
        assert said(weak, QuarantineCondition.WITNESSED)[:2] == ("False", "NoWitness")
        vain = suspicion(probes=probed(None, inconclusive=InconclusiveReason.IMAGE))
        status, reason, message = said(judged(vain), QuarantineCondition.WITNESSED)
        assert (status, reason) == ("Unknown", "ProbeInconclusive")
        assert "was inconclusive: so it said" in message

    def test_a_probe_that_fails_while_it_is_watched_is_the_witness_at_once(self) -> None:
        running = suspicion(probes=(ProbeResult("p", START),))
        failed = ProbePod("Failed", "7 errors", group_peers=(ProbePod("Succeeded"),))
        step = decide_quarantine_step(running, NODE, failed, QuarantineContext(), START + 2)
        assert isinstance(step, WriteQuarantineStatus)
        assert (step.event, step.warning) == ("ProbeFailed", True)
        assert said(step, QuarantineCondition.WITNESSED) == ("True", "Probe", "a probe pod failed: 7 errors")

    def test_who_has_approved_it_by_hand_is_the_witness_unless_there_was_one(self) -> None:
        marked = TargetNode("uid-1", tainted=True, cordoned=True)
        begun = decide_quarantine_step(suspicion(approved=True), marked, None, QuarantineContext(), START)
        assert isinstance(begun, WriteQuarantineStatus)
        assert (begun.event, begun.warning) == ("NodeQuarantined", True)
        assert said(begun, QuarantineCondition.WITNESSED)[:2] == ("True", "Person")
        found = suspicion(approved=True)
        report = build_status_write(found, QuarantinePhase.SUSPECTED, QuarantineVerdict.SUSPECTED, "m", START)
        confirmed = add_witness_condition(found, report, Witness.PROBE, "it failed", START).status
        begun = decide_quarantine_step(replace(found, status=confirmed), marked, None, QuarantineContext(), START)
        assert isinstance(begun, WriteQuarantineStatus)
        assert said(begun, QuarantineCondition.WITNESSED) == ("True", "Probe", "it failed")
        unsure = add_witness_condition(found, report, None, "nobody has spoken", START).status
        begun = decide_quarantine_step(replace(found, status=unsure), marked, None, QuarantineContext(), START)
        assert isinstance(begun, WriteQuarantineStatus)
        assert said(begun, QuarantineCondition.WITNESSED)[:2] == ("True", "Person")


class TestHeldBack:
    def test_is_told_once_for_each_reason(self) -> None:
        paused = judged(suspicion(sign(**VOUCHED)), pause_reason="remedies are paused")
        assert (paused.event, paused.warning) == ("QuarantineBlocked", True)
        again = replace(suspicion(sign(**VOUCHED)), status=paused.status)
        longer = judged(again, pause_reason="remedies are still paused")
        assert (longer.event, said(longer, QuarantineCondition.QUARANTINED)[1]) == ("", "Paused")
        spent = judged(
            again, node_count=0, usage=QuarantineUsage.from_quarantines([suspicion(name="node-2", approved=True)])
        )
        assert spent.event == "QuarantineBlocked"

    def test_a_budget_is_spent_by_what_is_approved_and_where_people_decide_by_what_they_are_asked(self) -> None:
        asked = suspicion(name="node-2", phase=QuarantinePhase.PENDING)
        suspected = suspicion(name="node-3", phase=QuarantinePhase.SUSPECTED)
        approved = suspicion(name="node-4", approved=True)

        def verdict(*others: Quarantine, acts: bool) -> str:
            report = judged(
                suspicion(),
                DOWN,
                usage=QuarantineUsage.from_quarantines(others),
                rules=QuarantineRules(acts=acts, max_nodes=1, breaker_nodes=9),
            )
            return said(report, QuarantineCondition.QUARANTINED)[1]

        assert verdict(asked, suspected, acts=True) == "Suspected", "it is to be quarantined"
        assert verdict(asked, suspected, acts=False) == "BudgetSpent"
        assert verdict(suspected, acts=False) == "AwaitsApproval"
        assert verdict(approved, acts=True) == verdict(approved, acts=False) == "BudgetSpent"

    def test_the_first_sign_counts_for_the_moment_in_which_others_may_come(self) -> None:
        early = judged(suspicion(sign(**VOUCHED)), seconds=CONFIRMED_SUSPICION_HOLD_SECONDS - 1)
        assert said(early, QuarantineCondition.QUARANTINED)[1] == "Suspected"
        assert said(judged(suspicion(sign(**VOUCHED))), QuarantineCondition.QUARANTINED)[1] == "AwaitsApproval"


class TestBreaker:
    def test_counts_open_suspicions_of_the_same_time_that_are_worth_a_look(self) -> None:
        def count(*others: Quarantine) -> int:
            return QuarantineUsage.from_quarantines(others).count_failing_together(suspicion())

        other = suspicion(name="node-2")
        assert count() == 1
        assert count(other) == 2
        assert count(suspicion(sign(START + SIMULTANEOUS_FAILURE_SECONDS), name="node-2")) == 2
        assert count(suspicion(sign(START + SIMULTANEOUS_FAILURE_SECONDS + 1), name="node-2")) == 1
        assert count(replace(other, deleted=True)) == 1
        assert count(suspicion(name="node-2", probes=probed(True, START - 60))) == 1, "it had been cleared before"
        assert count(suspicion(sign(weak=True), name="node-2")) == 1
        both = sign(weak=True), sign(namespace="team-b", weak=True)
        assert count(suspicion(*both, name="node-2")) == 2

    def test_one_that_was_cleared_counts_on_and_is_settled(self) -> None:
        back = QuarantineUsage.from_quarantines([suspicion(name="node-2", probes=probed(True))])
        assert (back.count_failing_together(suspicion()), back.count_unsettled(suspicion())) == (2, 0)
        away = QuarantineUsage.from_quarantines([suspicion(name="node-2")])
        assert (away.count_failing_together(suspicion()), away.count_unsettled(suspicion())) == (2, 1)

    def test_what_is_said_again_later_takes_nothing_from_what_failed_at_once(self) -> None:
        again = suspicion(*with_sign((sign(),), sign(START + 90)), name="node-2")
        assert QuarantineUsage.from_quarantines([again]).count_failing_together(suspicion()) == 2
        assert QuarantineUsage.from_quarantines([suspicion()]).count_failing_together(again) == 2
        assert QuarantineUsage.from_quarantines([again]).count_failing_together(suspicion(sign(START + 150))) == 2, (
            "nor from what fails now"
        )

    def test_its_word_stays_once_it_has_stayed_for_long(self) -> None:
        found = suspicion(sign(**VOUCHED))
        status = build_status_write(
            found, QuarantinePhase.BLOCKED, QuarantineVerdict.BREAKER, "the breaker has tripped", START
        ).status
        tripped = replace(found, status=status)

        def verdict(seconds: float) -> str:
            return said(judged(tripped, seconds=seconds), QuarantineCondition.QUARANTINED)[1]

        assert verdict(BREAKER_LATCH_SECONDS - 1) == "AwaitsApproval"
        assert verdict(BREAKER_LATCH_SECONDS + 1) == "Breaker"
        late = judged(tripped, seconds=SUSPICION_TTL_SECONDS)
        assert (late.event, late.status.phase) == ("SuspicionDropped", QuarantinePhase.RELEASED)


class TestSigns:
    def test_what_is_said_again_is_no_news(self) -> None:
        known = (sign(),)
        assert with_sign(known, replace(sign(), at=START + 600)) is known, "the same incident"
        assert with_sign(known, sign(START + 59)) is known
        (later,) = with_sign(known, sign(START + 60))
        assert later == sign(START + 60, since=START), "and when it was said first stays known"
        assert with_sign((later,), sign(START + 120))[0].first_reported_at == START
        assert with_sign(known, sign(START + 1, **VOUCHED)) == (sign(START + 1, **VOUCHED, since=START),)
        assert with_sign((sign(weak=True),), sign(START + 1)) == (sign(START + 1, since=START),)

    def test_a_probe_refutes_what_was_said_before_it(self) -> None:
        cleared = suspicion(sign(**VOUCHED), probes=probed(True))
        assert cleared.open_signs == ()
        assert find_witness(cleared, DOWN) is None
        later = replace(cleared, spec=replace(cleared.spec, suspicions=(sign(START + 6, **VOUCHED),)))
        assert find_witness(later, NODE) is Witness.GPU_SERIES

    def test_and_what_is_said_after_it_is_not_looked_into_for_a_while(self) -> None:
        cleared = suspicion(sign(START + 60), probes=probed(True))
        keeps = judged(cleared, seconds=100)
        assert keeps.status.phase is QuarantinePhase.CLEARED
        over = decide_quarantine_step(
            replace(cleared, status=keeps.status), NODE, None, QuarantineContext(), START + 5 + CLEARED_NODE_TTL_SECONDS
        )
        assert over == DeleteQuarantine()
