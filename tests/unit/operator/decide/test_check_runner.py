"""Decisions are recorded once, and applied if that is allowed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pacekeeper_operator.api.conditions import Reason
from pacekeeper_operator.api.incident import IncidentCause, IncidentClass
from pacekeeper_operator.api.training_job import RemediationMode, Remedy
from pacekeeper_operator.decide import check_runner
from pacekeeper_operator.decide.check_runner import (
    MAX_DECISIONS_PER_PASS,
    MAX_EVIDENCE_PIECE_CHARACTERS,
    MAX_TOTAL_EVIDENCE_CHARACTERS,
)
from pacekeeper_operator.decide.decision import (
    Action,
    CountRestart,
    Decision,
    FailJob,
    QuarantineNode,
    ReplaceWorker,
    RestartRanks,
)
from pacekeeper_operator.decide.remedies.fail_job import MAX_FAILURE_MESSAGE_CHARACTERS
from pacekeeper_operator.state.desired_state import DesiredState
from pacekeeper_operator.state.incident_key import IncidentKey
from pacekeeper_operator.state.job_metrics import JobMetrics
from pacekeeper_operator.state.observation import Observation
from pacekeeper_operator.state.policy import Policy
from testing.operators.observations import NOW, build_policy, build_training

RECOMMEND = build_policy(mode=RemediationMode.RECOMMEND)


def build_decision(*actions: Action, **changes: Any) -> Decision:
    values: dict[str, Any] = {
        "incident_key": IncidentKey(IncidentCause.HANG, 1),
        "class_": IncidentClass.UNKNOWN,
        "message": "m",
        "first_sign": NOW - 1,
        "remedy": Remedy.RESTART_RANKS,
    }
    return Decision(actions=actions, **(values | changes))


def run_check(observation: Observation, found: Decision, policy: Policy | None = None) -> Observation:
    """Return the observation after one check has made this decision."""
    return observation.with_desired(
        check_runner.run_checks(observation, policy or build_policy(), [lambda _observation, _policy: found])
    )


class TestReference:
    @pytest.mark.parametrize(
        ("class_", "measured", "reference"),
        [
            (IncidentClass.UNKNOWN, 0.1, 0.1),
            (IncidentClass.UNKNOWN, None, 0.3),
            (IncidentClass.PERFORMANCE, 0.1, 0.2),
        ],
        ids=["before", "planned", "slow"],
    )
    def test_the_time_of_a_step_is_recorded_with_the_fault(
        self, class_: IncidentClass, measured: float | None, reference: float
    ) -> None:
        """The steps that a standstill costs are counted after it, when no rank has reported its time again."""
        observation = build_training(metrics=JobMetrics(step_seconds=measured))
        observation = observation.with_desired(observation.desired.with_plan(step_seconds=0.3))
        decision = build_decision(class_=class_, reference_seconds=None if class_ is IncidentClass.UNKNOWN else 0.2)
        (incident,) = run_check(observation, decision).state.incidents.current
        assert incident.reference_seconds == reference


class TestOnce:
    def test_an_applied_decision_is_not_applied_again(self) -> None:
        first = run_check(build_training(), build_decision(CountRestart()))
        assert len(first.state.budget.restarts) == 1
        assert run_check(first, build_decision(CountRestart())).desired is first.desired

    def test_a_closed_incident_is_not_opened_again(self) -> None:
        first = run_check(build_training(), build_decision(CountRestart()))
        (incident,) = first.state.incidents.current
        closed = first.with_desired(first.desired.with_incidents(current=(), closed=(incident.name,)))
        assert run_check(closed, build_decision(CountRestart())).desired is closed.desired

    def test_a_recommended_remedy_is_applied_once_it_is_allowed(self) -> None:
        first = run_check(build_training(), build_decision(CountRestart()), RECOMMEND)
        (incident,) = first.state.incidents.current
        assert (incident.applied, first.state.budget.restarts) == (None, ())
        closed = first.with_desired(first.desired.with_incidents(current=(), recommended=(incident.name, "other")))
        assert run_check(closed, build_decision(CountRestart()), RECOMMEND).desired is closed.desired
        applied = run_check(closed, build_decision(CountRestart()))
        assert len(applied.state.budget.restarts) == 1
        assert applied.state.incidents.recommended == ("other",)

    def test_routine_remedies_are_applied_except_in_a_pause(self) -> None:
        routine = build_decision(CountRestart(), routine=True, class_=IncidentClass.PERFORMANCE)
        applied = run_check(build_training(), routine, RECOMMEND)
        assert (applied.state.incidents.current[0].applied, applied.state.adaptation.fruitless_investigation) == (
            NOW,
            None,
        )
        paused = run_check(build_training(), routine, build_policy(paused="maintenance"))
        assert paused.state.incidents.current[0].applied is None

    def test_a_decision_without_an_action_is_applied_once_it_has_one(self) -> None:
        first = run_check(build_training(), build_decision(remedy=None))
        assert run_check(first, build_decision(remedy=None)).desired is first.desired
        assert len(run_check(first, build_decision(CountRestart())).state.budget.restarts) == 1

    def test_a_further_remedy_of_an_incident_is_applied_once(self) -> None:
        first = run_check(build_training(), build_decision(CountRestart()))
        (incident,) = first.state.incidents.current
        later = replace(first, now=NOW + 5)
        same = build_decision(CountRestart(), continued_incident=incident.name)
        assert run_check(later, same).desired is later.desired
        other = build_decision(CountRestart(), continued_incident=incident.name, remedy=Remedy.REPLACE_WORKER)
        further = run_check(later, other)
        assert len(further.state.budget.restarts) == 2
        (current,) = further.state.incidents.current
        assert (current.detected, current.decided) == (NOW, NOW + 5), "the time of detection stays"

    def test_a_decision_that_continues_an_unknown_incident_opens_it(self) -> None:
        assert list_decisions(
            run_check(build_training(), build_decision(CountRestart(), continued_incident="unknown"))
        ) == ["unknown"]


def list_decisions(observation: Observation) -> list[str]:
    return [incident.name for incident in observation.state.incidents.current if incident.decided == observation.now]


def test_the_number_of_decisions_per_pass_is_limited() -> None:
    calls: list[int] = []

    def decide_endlessly(_observation: Observation, _policy: Policy) -> Decision:
        calls.append(0)
        return build_decision(
            CountRestart(), incident_key=IncidentKey(IncidentCause.HANG, 1, occurrence=1 + len(calls))
        )

    desired = check_runner.run_checks(build_training(), build_policy(), [decide_endlessly])
    assert len(desired.state.budget.restarts) == MAX_DECISIONS_PER_PASS


class TestNoProgress:
    @pytest.mark.parametrize(
        ("no_progress", "is_act_mode", "recorded_round"), [(True, True, 1), (False, True, None), (True, False, None)]
    )
    def test_a_no_progress_round_is_recorded_if_the_decision_was_applied(
        self, no_progress: bool, is_act_mode: bool, recorded_round: int | None
    ) -> None:
        found = build_decision(CountRestart(), no_progress=no_progress, error="e", worker="j-w1-0")
        budget = run_check(build_training(), found, build_policy() if is_act_mode else RECOMMEND).state.budget
        assert budget.no_progress_round == recorded_round
        assert (budget.no_progress_error, budget.no_progress_worker) == (
            ("e", "j-w1-0") if recorded_round else ("", "")
        )


class TestPerformance:
    @pytest.mark.parametrize(
        ("class_", "is_act_mode", "actions", "is_suppressed"),
        [
            (IncidentClass.PERFORMANCE, True, (), True),
            (IncidentClass.PERFORMANCE, False, (CountRestart(),), True),
            (IncidentClass.PERFORMANCE, True, (CountRestart(),), False),
            (IncidentClass.UNKNOWN, True, (), False),
            (IncidentClass.UNKNOWN, False, (CountRestart(),), False),
        ],
    )
    def test_a_slowdown_without_a_remedy_is_suppressed(
        self, class_: IncidentClass, is_act_mode: bool, actions: tuple[Action, ...], is_suppressed: bool
    ) -> None:
        observation = run_check(
            build_training(), build_decision(*actions, class_=class_), build_policy() if is_act_mode else RECOMMEND
        )
        fruitless = observation.state.adaptation.fruitless_investigation
        assert (fruitless is not None) is is_suppressed
        assert fruitless is None or fruitless.forbidden is not is_act_mode


class TestActions:
    def test_an_unknown_worker_is_ignored(self) -> None:
        observation = run_check(build_training(), build_decision(ReplaceWorker("j-w9-9", "gone", dead=True)))
        assert observation.state.placement == build_training().state.placement
        assert observation.state.budget.restarts == ()

    def test_only_the_loss_of_a_member_without_a_disruption_counts_as_a_restart(self) -> None:
        def count_restarts(worker: str, **changes: bool) -> int:
            action = ReplaceWorker(worker, "why", dead=True, **changes)
            return len(run_check(build_training(), build_decision(action)).state.budget.restarts)

        assert count_restarts("j-w1-0") == 1
        assert count_restarts("j-w1-0", disruption=True) == 0
        assert count_restarts("j-w4-0") == 0
        assert count_restarts("j-w1-0", never_ready=True) == 0

    def test_a_withheld_quarantine_is_recorded_as_evidence_only(self) -> None:
        withheld = QuarantineNode("node-1", "uid", "why", withheld="it is not allowed")
        observation = run_check(build_training(), build_decision(withheld))
        assert observation.state.incidents.quarantine_requests == ()
        (incident,) = observation.state.incidents.current
        assert incident.evidence == ("no quarantine of node-1: it is not allowed",)
        requests = run_check(
            build_training(), build_decision(QuarantineNode("node-1", "uid", "why"))
        ).state.incidents.quarantine_requests
        assert [(request.node, request.at) for request in requests] == [("node-1", NOW)]

    def test_the_last_quarantine_request_of_a_node_counts(self) -> None:
        two_nodes = build_decision(QuarantineNode("node-1", "u", "one"), QuarantineNode("node-2", "u", "two"))
        later_decision = build_decision(
            QuarantineNode("node-1", "u", "three"), incident_key=IncidentKey(IncidentCause.CRASH, 1)
        )
        requests = run_check(run_check(build_training(), two_nodes), later_decision).state.incidents.quarantine_requests
        assert [(request.node, request.reason) for request in requests] == [("node-2", "two"), ("node-1", "three")]

    def test_a_long_message_is_cut_at_its_beginning(self) -> None:
        def record_message(letters: int) -> str:
            desired = run_check(
                build_training(), build_decision(FailJob(Reason.SCRIPT_FAILED, "x" * letters + "!"))
            ).desired
            return desired.state.lifecycle.failed_message

        assert record_message(MAX_FAILURE_MESSAGE_CHARACTERS - 1) == "x" * (MAX_FAILURE_MESSAGE_CHARACTERS - 1) + "!"
        assert record_message(MAX_FAILURE_MESSAGE_CHARACTERS) == "… " + "x" * (MAX_FAILURE_MESSAGE_CHARACTERS - 1) + "!"

    def test_the_same_members_keep_their_shares_in_the_next_round(self) -> None:
        observation = build_training()
        observation = observation.with_desired(observation.desired.with_plan(shares=(6, 8, 9, 9)))
        restarted = run_check(observation, build_decision(RestartRanks()))
        assert (restarted.plan.membership, restarted.plan.shares) == (2, (6, 8, 9, 9))


class TestEvidence:
    def record_evidence(self, *pieces: str) -> tuple[str, ...]:
        (incident,) = run_check(build_training(), build_decision(evidence=pieces)).state.incidents.current
        return incident.evidence

    def test_evidence_is_limited_per_piece_and_in_total(self) -> None:
        assert self.record_evidence("", "a" + "b" * MAX_EVIDENCE_PIECE_CHARACTERS) == (
            "b" * MAX_EVIDENCE_PIECE_CHARACTERS,
        )
        full = ["x" * MAX_EVIDENCE_PIECE_CHARACTERS] * (MAX_TOTAL_EVIDENCE_CHARACTERS // MAX_EVIDENCE_PIECE_CHARACTERS)
        assert self.record_evidence(*full) == tuple(full)
        assert self.record_evidence(*full, "y") == tuple(full)
        assert self.record_evidence(*full[1:], "y" * 10, "x" * MAX_EVIDENCE_PIECE_CHARACTERS) == (*full[1:], "y" * 10)


def test_no_checks_run_for_a_job_that_has_failed() -> None:
    failed = build_decision(FailJob(Reason.SCRIPT_FAILED, "m"))
    observation = run_check(build_training(), failed)
    assert observation.state.lifecycle.failed_reason == "ScriptFailed"
    later: DesiredState = run_check(
        observation, build_decision(CountRestart(), incident_key=IncidentKey(IncidentCause.CRASH, 1))
    ).desired
    assert later is observation.desired
