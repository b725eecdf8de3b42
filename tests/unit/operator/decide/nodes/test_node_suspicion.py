"""A suspected node: decisions for jobs, recorded evidence, and the removal of taints."""

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
TRUSTED: dict[str, Any] = {"witness": Witness.GPU_SERIES, "reason": "XID 79 (GPU has fallen off the bus)"}


def build_sign(at: float = START, namespace: str = "team-a", **changes: Any) -> NodeSuspicion:
    return replace(NodeSuspicion(namespace, f"i-{at:.0f}", "a rank hung on it", at), **changes)


def build_suspicion(*signs: NodeSuspicion, name: str = "node-1", approved: bool = False, **status: Any) -> Quarantine:
    spec = QuarantineSpec("XID 79", "uid-1", suspicions=signs or (build_sign(),), approved=approved)
    return Quarantine(name, f"q-{name}", spec, QuarantineStatus(**status), guarded=True)


def build_probes(passed: bool | None, at: float = START + 5, **changes: Any) -> tuple[ProbeResult, ...]:
    return (replace(ProbeResult("p", at - 4, at, passed, "7 pages failed"), **changes),)


def decide_step(
    quarantine: Quarantine, node: TargetNode = NODE, seconds: float = CONFIRMED_SUSPICION_HOLD_SECONDS, **context: Any
) -> WriteQuarantineStatus:
    """Return the status that is written for the quarantine `seconds` after START."""
    values: dict[str, Any] = {"node_count": 100, "rules": QuarantineRules(acts=False)}
    step = decide_quarantine_step(quarantine, node, None, QuarantineContext(**(values | context)), START + seconds)
    assert isinstance(step, WriteQuarantineStatus)
    return step


def read_condition(report: WriteQuarantineStatus, kind: QuarantineCondition) -> tuple[str, str, str]:
    found = next(condition for condition in report.status.conditions if condition.type == kind)
    return found.status, found.reason, found.message


class TestTaints:
    @pytest.mark.parametrize("tainted", [TargetNode("uid-1", tainted=True), TargetNode("uid-1", cordoned=True)])
    def test_taints_are_removed_without_approval(self, tainted: TargetNode) -> None:
        unapproved = ReleaseNode("its quarantine is not approved")
        assert decide_quarantine_step(build_suspicion(), tainted, None, QuarantineContext(), START) == unapproved
        manual = build_suspicion()
        manual = replace(manual, spec=replace(manual.spec, suspicions=()))
        assert decide_quarantine_step(manual, tainted, None, QuarantineContext(), START) == unapproved
        decided = decide_quarantine_step(build_suspicion(approved=True), tainted, None, QuarantineContext(), START)
        assert not isinstance(decided, ReleaseNode)


class TestDecisions:
    """What the jobs that suspect the node receive."""

    def make_decision(
        self, uid: str = "uid-1", verdict: QuarantineVerdict = QuarantineVerdict.SUSPECTED, **changes: Any
    ) -> tuple[QuarantineVerdict, str]:
        message = changes.pop("message", "a probe decides")
        deleted = changes.pop("deleted", False)
        phase = changes.pop("phase", QuarantinePhase.SUSPECTED)
        found = build_suspicion(**changes)
        status = build_status_write(found, phase, verdict, message, START).status
        decision = build_quarantine_decision(replace(found, status=status, deleted=deleted), uid)
        return decision.verdict, decision.message

    def test_the_decision_is_suspected_until_a_witness_confirms_it(self) -> None:
        assert self.make_decision() == (QuarantineVerdict.SUSPECTED, "node-1 is untouched: a probe decides")
        assert self.make_decision(message="") == (
            QuarantineVerdict.SUSPECTED,
            "node-1 is untouched: its suspicion is new",
        )
        tripped = self.make_decision(verdict=QuarantineVerdict.BREAKER, message="the breaker has tripped")
        assert tripped == (QuarantineVerdict.BREAKER, "node-1 is untouched: the breaker has tripped")

    def test_the_decision_is_cleared_after_a_passed_probe(self) -> None:
        cleared = (QuarantineVerdict.CLEARED, "node-1 is untouched: it has passed")
        assert self.make_decision(verdict=QuarantineVerdict.CLEARED, message="it has passed") == cleared
        ending = self.make_decision(
            verdict=QuarantineVerdict.CLEARED, message="it has passed", phase=QuarantinePhase.RELEASED
        )
        assert ending == cleared

    def test_the_decision_is_quarantined_then_releasing(self) -> None:
        assert self.make_decision(approved=True) == (QuarantineVerdict.QUARANTINED, "node-1 is quarantined")
        releasing = (QuarantineVerdict.RELEASING, "an earlier quarantine of node-1 is being released")
        assert self.make_decision(approved=True, deleted=True) == releasing
        assert self.make_decision(approved=True, phase=QuarantinePhase.RELEASED) == releasing
        assert (
            self.make_decision(approved=True, verdict=QuarantineVerdict.CLEARED)[0] is QuarantineVerdict.QUARANTINED
        ), "it is no suspicion any more"

    def test_the_decision_is_releasing_for_an_earlier_node_of_the_same_name(self) -> None:
        assert self.make_decision(uid="another")[0] is QuarantineVerdict.RELEASING

    def test_the_decision_is_awaiting_approval(self) -> None:
        awaiting = (QuarantineVerdict.AWAITS_APPROVAL, "the quarantine of node-1 waits for approval")
        assert self.make_decision(verdict=QuarantineVerdict.AWAITS_APPROVAL) == awaiting
        manual = build_suspicion()
        manual = replace(manual, spec=replace(manual.spec, suspicions=()))
        assert build_quarantine_decision(manual, "uid-1").verdict is QuarantineVerdict.AWAITS_APPROVAL


class TestEvidence:
    """The content of the condition `Witnessed`: the deciding witness and its evidence."""

    def test_evidence_of_series_is_their_reason(self) -> None:
        report = decide_step(build_suspicion(build_sign(namespace="team-b"), build_sign(**TRUSTED)), DOWN)
        assert read_condition(report, QuarantineCondition.WITNESSED) == ("True", "GpuSeries", TRUSTED["reason"])

    def test_evidence_of_the_node_is_its_condition(self) -> None:
        report = decide_step(build_suspicion(probes=build_probes(False)), DOWN)
        assert read_condition(report, QuarantineCondition.WITNESSED) == (
            "True",
            "NodeCondition",
            "the node is not Ready",
        )

    def test_evidence_of_a_probe_is_its_message(self) -> None:
        report = decide_step(build_suspicion(probes=build_probes(False)))
        assert read_condition(report, QuarantineCondition.WITNESSED) == (
            "True",
            "Probe",
            "a probe pod failed: 7 pages failed",
        )

    def test_without_evidence_the_condition_names_what_is_awaited(self) -> None:
        unconfirmed = decide_step(build_suspicion(build_sign(weak=True)))
        assert read_condition(unconfirmed, QuarantineCondition.WITNESSED)[:2] == ("False", "NoWitness")
        inconclusive = build_suspicion(probes=build_probes(None, inconclusive=InconclusiveReason.IMAGE))
        status, reason, message = read_condition(decide_step(inconclusive), QuarantineCondition.WITNESSED)
        assert (status, reason) == ("Unknown", "ProbeInconclusive")
        assert "was inconclusive: 7 pages failed" in message

    def test_a_probe_that_fails_is_the_witness_at_once(self) -> None:
        running = build_suspicion(probes=(ProbeResult("p", START),))
        failed = ProbePod("Failed", "7 errors", group_peers=(ProbePod("Succeeded"),))
        step = decide_quarantine_step(running, NODE, failed, QuarantineContext(), START + 2)
        assert isinstance(step, WriteQuarantineStatus)
        assert (step.event, step.warning) == ("ProbeFailed", True)
        assert read_condition(step, QuarantineCondition.WITNESSED) == ("True", "Probe", "a probe pod failed: 7 errors")

    def test_the_approving_person_is_the_witness_unless_there_is_another(self) -> None:
        tainted = TargetNode("uid-1", tainted=True, cordoned=True)
        step = decide_quarantine_step(build_suspicion(approved=True), tainted, None, QuarantineContext(), START)
        assert isinstance(step, WriteQuarantineStatus)
        assert (step.event, step.warning) == ("NodeQuarantined", True)
        assert read_condition(step, QuarantineCondition.WITNESSED)[:2] == ("True", "Person")
        found = build_suspicion(approved=True)
        report = build_status_write(found, QuarantinePhase.SUSPECTED, QuarantineVerdict.SUSPECTED, "m", START)
        confirmed = add_witness_condition(found, report, Witness.PROBE, "it failed", START).status
        step = decide_quarantine_step(replace(found, status=confirmed), tainted, None, QuarantineContext(), START)
        assert isinstance(step, WriteQuarantineStatus)
        assert read_condition(step, QuarantineCondition.WITNESSED) == ("True", "Probe", "it failed")
        unconfirmed = add_witness_condition(found, report, None, "no witness has confirmed it", START).status
        step = decide_quarantine_step(replace(found, status=unconfirmed), tainted, None, QuarantineContext(), START)
        assert isinstance(step, WriteQuarantineStatus)
        assert read_condition(step, QuarantineCondition.WITNESSED)[:2] == ("True", "Person")


class TestBlocked:
    def test_a_blocked_quarantine_is_reported_once_for_each_reason(self) -> None:
        paused = decide_step(build_suspicion(build_sign(**TRUSTED)), pause_reason="remedies are paused")
        assert (paused.event, paused.warning) == ("QuarantineBlocked", True)
        blocked = replace(build_suspicion(build_sign(**TRUSTED)), status=paused.status)
        repeated = decide_step(blocked, pause_reason="remedies are still paused")
        assert (repeated.event, read_condition(repeated, QuarantineCondition.QUARANTINED)[1]) == ("", "Paused")
        over_budget = decide_step(
            blocked,
            node_count=0,
            usage=QuarantineUsage.from_quarantines([build_suspicion(name="node-2", approved=True)]),
        )
        assert over_budget.event == "QuarantineBlocked"

    def test_approved_quarantines_use_the_budget_and_pending_ones_if_people_decide(self) -> None:
        pending = build_suspicion(name="node-2", phase=QuarantinePhase.PENDING)
        suspected = build_suspicion(name="node-3", phase=QuarantinePhase.SUSPECTED)
        approved = build_suspicion(name="node-4", approved=True)

        def read_verdict(*others: Quarantine, is_act_mode: bool) -> str:
            report = decide_step(
                build_suspicion(),
                DOWN,
                usage=QuarantineUsage.from_quarantines(others),
                rules=QuarantineRules(acts=is_act_mode, max_nodes=1, breaker_nodes=9),
            )
            return read_condition(report, QuarantineCondition.QUARANTINED)[1]

        assert read_verdict(pending, suspected, is_act_mode=True) == "Suspected", "it is to be quarantined"
        assert read_verdict(pending, suspected, is_act_mode=False) == "BudgetSpent"
        assert read_verdict(suspected, is_act_mode=False) == "AwaitsApproval"
        assert read_verdict(approved, is_act_mode=True) == read_verdict(approved, is_act_mode=False) == "BudgetSpent"

    def test_a_suspicion_is_held_until_other_nodes_may_have_failed(self) -> None:
        early = decide_step(build_suspicion(build_sign(**TRUSTED)), seconds=CONFIRMED_SUSPICION_HOLD_SECONDS - 1)
        assert read_condition(early, QuarantineCondition.QUARANTINED)[1] == "Suspected"
        assert (
            read_condition(decide_step(build_suspicion(build_sign(**TRUSTED))), QuarantineCondition.QUARANTINED)[1]
            == "AwaitsApproval"
        )


class TestBreaker:
    def test_open_suspicions_of_the_same_time_that_are_worth_probing_count(self) -> None:
        def count_failing(*others: Quarantine) -> int:
            return QuarantineUsage.from_quarantines(others).count_failing_together(build_suspicion())

        other = build_suspicion(name="node-2")
        assert count_failing() == 1
        assert count_failing(other) == 2
        assert count_failing(build_suspicion(build_sign(START + SIMULTANEOUS_FAILURE_SECONDS), name="node-2")) == 2
        assert count_failing(build_suspicion(build_sign(START + SIMULTANEOUS_FAILURE_SECONDS + 1), name="node-2")) == 1
        assert count_failing(replace(other, deleted=True)) == 1
        assert count_failing(build_suspicion(name="node-2", probes=build_probes(True, START - 60))) == 1, (
            "it had been cleared before"
        )
        assert count_failing(build_suspicion(build_sign(weak=True), name="node-2")) == 1
        both = build_sign(weak=True), build_sign(namespace="team-b", weak=True)
        assert count_failing(build_suspicion(*both, name="node-2")) == 2

    def test_a_cleared_suspicion_counts_and_is_settled(self) -> None:
        cleared = QuarantineUsage.from_quarantines([build_suspicion(name="node-2", probes=build_probes(True))])
        assert (cleared.count_failing_together(build_suspicion()), cleared.count_unsettled(build_suspicion())) == (2, 0)
        suspected = QuarantineUsage.from_quarantines([build_suspicion(name="node-2")])
        assert (suspected.count_failing_together(build_suspicion()), suspected.count_unsettled(build_suspicion())) == (
            2,
            1,
        )

    def test_a_repeated_sign_does_not_change_what_failed_together(self) -> None:
        repeated = build_suspicion(*with_sign((build_sign(),), build_sign(START + 90)), name="node-2")
        assert QuarantineUsage.from_quarantines([repeated]).count_failing_together(build_suspicion()) == 2
        assert QuarantineUsage.from_quarantines([build_suspicion()]).count_failing_together(repeated) == 2
        assert (
            QuarantineUsage.from_quarantines([repeated]).count_failing_together(
                build_suspicion(build_sign(START + 150))
            )
            == 2
        ), "what fails now counts too"

    def test_a_breaker_verdict_is_latched_after_some_time(self) -> None:
        found = build_suspicion(build_sign(**TRUSTED))
        status = build_status_write(
            found, QuarantinePhase.BLOCKED, QuarantineVerdict.BREAKER, "the breaker has tripped", START
        ).status
        tripped = replace(found, status=status)

        def read_verdict(seconds: float) -> str:
            return read_condition(decide_step(tripped, seconds=seconds), QuarantineCondition.QUARANTINED)[1]

        assert read_verdict(BREAKER_LATCH_SECONDS - 1) == "AwaitsApproval"
        assert read_verdict(BREAKER_LATCH_SECONDS + 1) == "Breaker"
        late = decide_step(tripped, seconds=SUSPICION_TTL_SECONDS)
        assert (late.event, late.status.phase) == ("SuspicionDropped", QuarantinePhase.RELEASED)


class TestSigns:
    def test_a_repeated_sign_is_not_new(self) -> None:
        known = (build_sign(),)
        assert with_sign(known, replace(build_sign(), at=START + 600)) is known, "the same incident"
        assert with_sign(known, build_sign(START + 59)) is known
        (later,) = with_sign(known, build_sign(START + 60))
        assert later == build_sign(START + 60, since=START), "the time of the first report stays"
        assert with_sign((later,), build_sign(START + 120))[0].first_reported_at == START
        assert with_sign(known, build_sign(START + 1, **TRUSTED)) == (build_sign(START + 1, **TRUSTED, since=START),)
        assert with_sign((build_sign(weak=True),), build_sign(START + 1)) == (build_sign(START + 1, since=START),)

    def test_a_passed_probe_refutes_earlier_signs(self) -> None:
        cleared = build_suspicion(build_sign(**TRUSTED), probes=build_probes(True))
        assert cleared.open_signs == ()
        assert find_witness(cleared, DOWN) is None
        later = replace(cleared, spec=replace(cleared.spec, suspicions=(build_sign(START + 6, **TRUSTED),)))
        assert find_witness(later, NODE) is Witness.GPU_SERIES

    def test_signs_shortly_after_a_passed_probe_are_not_probed(self) -> None:
        cleared = build_suspicion(build_sign(START + 60), probes=build_probes(True))
        report = decide_step(cleared, seconds=100)
        assert report.status.phase is QuarantinePhase.CLEARED
        final = decide_quarantine_step(
            replace(cleared, status=report.status),
            NODE,
            None,
            QuarantineContext(),
            START + 5 + CLEARED_NODE_TTL_SECONDS,
        )
        assert final == DeleteQuarantine()
