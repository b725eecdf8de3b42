"""Decisions are written down once, and acted upon where that is allowed."""

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
from pacekeeper_operator.state.observation import Observation
from pacekeeper_operator.state.policy import Policy
from testing.operators.observations import NOW, build_policy, build_training

RECOMMEND = build_policy(mode=RemediationMode.RECOMMEND)


def decision(*actions: Action, **changes: Any) -> Decision:
    values: dict[str, Any] = {
        "incident_key": IncidentKey(IncidentCause.HANG, 1),
        "class_": IncidentClass.UNKNOWN,
        "message": "m",
        "first_sign": NOW - 1,
        "remedy": Remedy.RESTART_RANKS,
    }
    return Decision(actions=actions, **(values | changes))


def treated(world: Observation, found: Decision, of_policy: Policy | None = None) -> Observation:
    """After one check has said so."""
    return world.with_desired(
        check_runner.run_checks(world, of_policy or build_policy(), [lambda _observation, _policy: found])
    )


class TestOnce:
    def test_what_was_done_is_not_done_again(self) -> None:
        once = treated(build_training(), decision(CountRestart()))
        assert len(once.state.budget.restarts) == 1
        assert treated(once, decision(CountRestart())).desired is once.desired

    def test_nor_after_it_is_closed(self) -> None:
        once = treated(build_training(), decision(CountRestart()))
        (incident,) = once.state.incidents.current
        closed = once.with_desired(once.desired.with_incidents(current=(), closed=(incident.name,)))
        assert treated(closed, decision(CountRestart())).desired is closed.desired

    def test_what_was_recommended_waits_for_leave_to_act(self) -> None:
        once = treated(build_training(), decision(CountRestart()), RECOMMEND)
        (incident,) = once.state.incidents.current
        assert (incident.applied, once.state.budget.restarts) == (None, ())
        over = once.with_desired(once.desired.with_incidents(current=(), recommended=(incident.name, "other")))
        assert treated(over, decision(CountRestart()), RECOMMEND).desired is over.desired
        acted = treated(over, decision(CountRestart()))
        assert len(acted.state.budget.restarts) == 1
        assert acted.state.incidents.recommended == ("other",)

    def test_routine_remedies_are_applied_except_in_a_pause(self) -> None:
        routine = decision(CountRestart(), routine=True, class_=IncidentClass.PERFORMANCE)
        acted = treated(build_training(), routine, RECOMMEND)
        assert (acted.state.incidents.current[0].applied, acted.state.adaptation.fruitless_investigation) == (NOW, None)
        paused = treated(build_training(), routine, build_policy(paused="maintenance"))
        assert paused.state.incidents.current[0].applied is None

    def test_one_without_an_action_waits_for_one(self) -> None:
        once = treated(build_training(), decision(remedy=None))
        assert treated(once, decision(remedy=None)).desired is once.desired
        assert len(treated(once, decision(CountRestart())).state.budget.restarts) == 1

    def test_a_further_remedy_is_taken_once(self) -> None:
        once = treated(build_training(), decision(CountRestart()))
        (incident,) = once.state.incidents.current
        later = replace(once, now=NOW + 5)
        same = decision(CountRestart(), continued_incident=incident.name)
        assert treated(later, same).desired is later.desired
        other = decision(CountRestart(), continued_incident=incident.name, remedy=Remedy.REPLACE_WORKER)
        further = treated(later, other)
        assert len(further.state.budget.restarts) == 2
        (now,) = further.state.incidents.current
        assert (now.detected, now.decided) == (NOW, NOW + 5), "it was noticed when it was"

    def test_one_that_continues_what_nobody_knows_is_new(self) -> None:
        assert decisions_of(treated(build_training(), decision(CountRestart(), continued_incident="unknown"))) == [
            "unknown"
        ]


def decisions_of(world: Observation) -> list[str]:
    return [incident.name for incident in world.state.incidents.current if incident.decided == world.now]


def test_a_pass_ends_whatever_the_checks_say() -> None:
    asked: list[int] = []

    def endless(_observation: Observation, _policy: Policy) -> Decision:
        asked.append(0)
        return decision(CountRestart(), incident_key=IncidentKey(IncidentCause.HANG, 1, occurrence=1 + len(asked)))

    draft = check_runner.run_checks(build_training(), build_policy(), [endless])
    assert len(draft.state.budget.restarts) == MAX_DECISIONS_PER_PASS


class TestBarren:
    @pytest.mark.parametrize(
        ("barren", "acts", "remembered"), [(True, True, 1), (False, True, None), (True, False, None)]
    )
    def test_a_round_that_led_nowhere_is_remembered_where_it_was_dealt_with(
        self, barren: bool, acts: bool, remembered: int | None
    ) -> None:
        found = decision(CountRestart(), no_progress=barren, error="e", worker="j-w1-0")
        budget = treated(build_training(), found, build_policy() if acts else RECOMMEND).state.budget
        assert budget.no_progress_round == remembered
        assert (budget.no_progress_error, budget.no_progress_worker) == (("e", "j-w1-0") if remembered else ("", ""))


class TestPerformance:
    @pytest.mark.parametrize(
        ("class_", "acts", "actions", "left_alone"),
        [
            (IncidentClass.PERFORMANCE, True, (), True),
            (IncidentClass.PERFORMANCE, False, (CountRestart(),), True),
            (IncidentClass.PERFORMANCE, True, (CountRestart(),), False),
            (IncidentClass.UNKNOWN, True, (), False),
            (IncidentClass.UNKNOWN, False, (CountRestart(),), False),
        ],
    )
    def test_trouble_without_a_remedy_is_not_looked_into_at_once_again(
        self, class_: IncidentClass, acts: bool, actions: tuple[Action, ...], left_alone: bool
    ) -> None:
        world = treated(build_training(), decision(*actions, class_=class_), build_policy() if acts else RECOMMEND)
        vain = world.state.adaptation.fruitless_investigation
        assert (vain is not None) is left_alone
        assert vain is None or vain.forbidden is not acts


class TestActions:
    def test_a_worker_that_is_not_known_any_more_is_left_out(self) -> None:
        world = treated(build_training(), decision(ReplaceWorker("j-w9-9", "gone", dead=True)))
        assert world.state.placement == build_training().state.placement
        assert world.state.budget.restarts == ()

    def test_only_who_holds_ranks_and_whom_nobody_wanted_gone_costs_a_restart(self) -> None:
        def restarts(worker: str, **changes: bool) -> int:
            action = ReplaceWorker(worker, "why", dead=True, **changes)
            return len(treated(build_training(), decision(action)).state.budget.restarts)

        assert restarts("j-w1-0") == 1
        assert restarts("j-w1-0", disruption=True) == 0
        assert restarts("j-w4-0") == 0
        assert restarts("j-w1-0", never_ready=True) == 0

    def test_a_quarantine_that_is_withheld_is_only_written_down(self) -> None:
        withheld = QuarantineNode("node-1", "uid", "why", withheld="it is not allowed")
        world = treated(build_training(), decision(withheld))
        assert world.state.incidents.quarantine_requests == ()
        (incident,) = world.state.incidents.current
        assert incident.evidence == ("no quarantine of node-1: it is not allowed",)
        wanted = treated(
            build_training(), decision(QuarantineNode("node-1", "uid", "why"))
        ).state.incidents.quarantine_requests
        assert [(one.node, one.at) for one in wanted] == [("node-1", NOW)]

    def test_of_a_nodes_quarantine_the_last_word_counts(self) -> None:
        both = decision(QuarantineNode("node-1", "u", "one"), QuarantineNode("node-2", "u", "two"))
        again = decision(QuarantineNode("node-1", "u", "three"), incident_key=IncidentKey(IncidentCause.CRASH, 1))
        wanted = treated(treated(build_training(), both), again).state.incidents.quarantine_requests
        assert [(one.node, one.reason) for one in wanted] == [("node-2", "two"), ("node-1", "three")]

    def test_the_end_of_a_long_message_matters(self) -> None:
        def message(letters: int) -> str:
            draft = treated(build_training(), decision(FailJob(Reason.SCRIPT_FAILED, "x" * letters + "!"))).desired
            return draft.state.lifecycle.failed_message

        assert message(MAX_FAILURE_MESSAGE_CHARACTERS - 1) == "x" * (MAX_FAILURE_MESSAGE_CHARACTERS - 1) + "!"
        assert message(MAX_FAILURE_MESSAGE_CHARACTERS) == "… " + "x" * (MAX_FAILURE_MESSAGE_CHARACTERS - 1) + "!"

    def test_the_same_members_keep_their_shares_in_the_next_round(self) -> None:
        world = build_training()
        world = world.with_desired(world.desired.with_plan(shares=(6, 8, 9, 9)))
        restarted = treated(world, decision(RestartRanks()))
        assert (restarted.plan.membership, restarted.plan.shares) == (2, (6, 8, 9, 9))


class TestEvidence:
    def kept(self, *pieces: str) -> tuple[str, ...]:
        (incident,) = treated(build_training(), decision(evidence=pieces)).state.incidents.current
        return incident.evidence

    def test_the_end_of_each_piece_and_as_many_as_there_is_room_for(self) -> None:
        assert self.kept("", "a" + "b" * MAX_EVIDENCE_PIECE_CHARACTERS) == ("b" * MAX_EVIDENCE_PIECE_CHARACTERS,)
        full = ["x" * MAX_EVIDENCE_PIECE_CHARACTERS] * (MAX_TOTAL_EVIDENCE_CHARACTERS // MAX_EVIDENCE_PIECE_CHARACTERS)
        assert self.kept(*full) == tuple(full)
        assert self.kept(*full, "y") == tuple(full)
        assert self.kept(*full[1:], "y" * 10, "x" * MAX_EVIDENCE_PIECE_CHARACTERS) == (*full[1:], "y" * 10)


def test_a_job_that_ends_is_treated_no_further() -> None:
    failed = decision(FailJob(Reason.SCRIPT_FAILED, "m"))
    world = treated(build_training(), failed)
    assert world.state.lifecycle.failed_reason == "ScriptFailed"
    later: DesiredState = treated(
        world, decision(CountRestart(), incident_key=IncidentKey(IncidentCause.CRASH, 1))
    ).desired
    assert later is world.desired
