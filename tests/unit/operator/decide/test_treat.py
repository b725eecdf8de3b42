"""Decisions are written down once, and acted upon where that is allowed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pacekeeper_operator.api import Cause, Class, Mode, Reason, Remedy
from pacekeeper_operator.decide import treat
from pacekeeper_operator.decide.remedies.fail_job import MAX_MESSAGE
from pacekeeper_operator.decide.treat import MAX_ALL, MAX_DECISIONS, MAX_PIECE
from pacekeeper_operator.decision import (
    Action,
    CountRestart,
    Decision,
    FailJob,
    QuarantineNode,
    ReplaceWorker,
    RestartRanks,
)
from pacekeeper_operator.observation import Observation, Policy
from pacekeeper_operator.state import Draft
from pacekeeper_operator.subject import Subject
from tests.support.worlds import NOW, policy, training

RECOMMEND = policy(mode=Mode.RECOMMEND)


def decision(*actions: Action, **changes: Any) -> Decision:
    values: dict[str, Any] = {
        "subject": Subject(Cause.HANG, 1),
        "class_": Class.UNKNOWN,
        "message": "m",
        "first_sign": NOW - 1,
        "remedy": Remedy.RESTART_RANKS,
    }
    return Decision(actions=actions, **(values | changes))


def treated(world: Observation, found: Decision, of_policy: Policy | None = None) -> Observation:
    """After one check has said so."""
    return world.with_draft(treat.step(world, of_policy or policy(), [lambda _observation, _policy: found]))


class TestOnce:
    def test_what_was_done_is_not_done_again(self) -> None:
        once = treated(training(), decision(CountRestart()))
        assert len(once.state.budget.restarts) == 1
        assert treated(once, decision(CountRestart())).draft is once.draft

    def test_nor_after_it_is_closed(self) -> None:
        once = treated(training(), decision(CountRestart()))
        (incident,) = once.state.incidents.current
        closed = once.with_draft(once.draft.with_incidents(current=(), closed=(incident.name,)))
        assert treated(closed, decision(CountRestart())).draft is closed.draft

    def test_what_was_recommended_waits_for_leave_to_act(self) -> None:
        once = treated(training(), decision(CountRestart()), RECOMMEND)
        (incident,) = once.state.incidents.current
        assert (incident.applied, once.state.budget.restarts) == (None, ())
        over = once.with_draft(once.draft.with_incidents(current=(), recommended=(incident.name, "other")))
        assert treated(over, decision(CountRestart()), RECOMMEND).draft is over.draft
        acted = treated(over, decision(CountRestart()))
        assert len(acted.state.budget.restarts) == 1
        assert acted.state.incidents.recommended == ("other",)

    def test_routine_remedies_are_applied_except_in_a_pause(self) -> None:
        routine = decision(CountRestart(), routine=True, class_=Class.PERFORMANCE)
        acted = treated(training(), routine, RECOMMEND)
        assert (acted.state.incidents.current[0].applied, acted.state.adaptation.vain) == (NOW, None)
        paused = treated(training(), routine, policy(paused="maintenance"))
        assert paused.state.incidents.current[0].applied is None

    def test_one_without_an_action_waits_for_one(self) -> None:
        once = treated(training(), decision(remedy=None))
        assert treated(once, decision(remedy=None)).draft is once.draft
        assert len(treated(once, decision(CountRestart())).state.budget.restarts) == 1

    def test_a_further_remedy_is_taken_once(self) -> None:
        once = treated(training(), decision(CountRestart()))
        (incident,) = once.state.incidents.current
        later = replace(once, now=NOW + 5)
        same = decision(CountRestart(), continues=incident.name)
        assert treated(later, same).draft is later.draft
        other = decision(CountRestart(), continues=incident.name, remedy=Remedy.REPLACE_WORKER)
        further = treated(later, other)
        assert len(further.state.budget.restarts) == 2
        (now,) = further.state.incidents.current
        assert (now.detected, now.decided) == (NOW, NOW + 5), "it was noticed when it was"

    def test_one_that_continues_what_nobody_knows_is_new(self) -> None:
        assert decisions_of(treated(training(), decision(CountRestart(), continues="unknown"))) == ["unknown"]


def decisions_of(world: Observation) -> list[str]:
    return [incident.name for incident in world.state.incidents.current if incident.decided == world.now]


def test_a_pass_ends_whatever_the_checks_say() -> None:
    asked: list[int] = []

    def endless(_observation: Observation, _policy: Policy) -> Decision:
        asked.append(0)
        return decision(CountRestart(), subject=Subject(Cause.HANG, 1, number=1 + len(asked)))

    draft = treat.step(training(), policy(), [endless])
    assert len(draft.state.budget.restarts) == MAX_DECISIONS


class TestBarren:
    @pytest.mark.parametrize(("barren", "acts", "remembered"), [(True, True, 1), (False, True, 0), (True, False, 0)])
    def test_a_round_that_led_nowhere_is_remembered_where_it_was_dealt_with(
        self, barren: bool, acts: bool, remembered: int
    ) -> None:
        found = decision(CountRestart(), barren=barren, error="e", worker="j-w1-0")
        budget = treated(training(), found, policy() if acts else RECOMMEND).state.budget
        assert budget.barren_round == remembered
        assert (budget.barren_error, budget.barren_worker) == (("e", "j-w1-0") if remembered else ("", ""))


class TestPerformance:
    @pytest.mark.parametrize(
        ("class_", "acts", "actions", "left_alone"),
        [
            (Class.PERFORMANCE, True, (), True),
            (Class.PERFORMANCE, False, (CountRestart(),), True),
            (Class.PERFORMANCE, True, (CountRestart(),), False),
            (Class.UNKNOWN, True, (), False),
            (Class.UNKNOWN, False, (CountRestart(),), False),
        ],
    )
    def test_trouble_without_a_remedy_is_not_looked_into_at_once_again(
        self, class_: Class, acts: bool, actions: tuple[Action, ...], left_alone: bool
    ) -> None:
        world = treated(training(), decision(*actions, class_=class_), policy() if acts else RECOMMEND)
        vain = world.state.adaptation.vain
        assert (vain is not None) is left_alone
        assert vain is None or vain.forbidden is not acts


class TestActions:
    def test_a_worker_that_is_not_known_any_more_is_left_out(self) -> None:
        world = treated(training(), decision(ReplaceWorker("j-w9-9", "gone", dead=True)))
        assert world.state.placement == training().state.placement
        assert world.state.budget.restarts == ()

    def test_only_who_holds_ranks_and_whom_nobody_wanted_gone_costs_a_restart(self) -> None:
        def restarts(worker: str, **changes: bool) -> int:
            action = ReplaceWorker(worker, "why", dead=True, **changes)
            return len(treated(training(), decision(action)).state.budget.restarts)

        assert restarts("j-w1-0") == 1
        assert restarts("j-w1-0", disruption=True) == 0
        assert restarts("j-w4-0") == 0
        assert restarts("j-w1-0", never_ready=True) == 0

    def test_a_quarantine_that_is_withheld_is_only_written_down(self) -> None:
        withheld = QuarantineNode("node-1", "uid", "why", withheld="it is not allowed")
        world = treated(training(), decision(withheld))
        assert world.state.incidents.quarantines == ()
        (incident,) = world.state.incidents.current
        assert incident.evidence == ("no quarantine of node-1: it is not allowed",)
        wanted = treated(training(), decision(QuarantineNode("node-1", "uid", "why"))).state.incidents.quarantines
        assert [(one.node, one.at) for one in wanted] == [("node-1", NOW)]

    def test_of_a_nodes_quarantine_the_last_word_counts(self) -> None:
        both = decision(QuarantineNode("node-1", "u", "one"), QuarantineNode("node-2", "u", "two"))
        again = decision(QuarantineNode("node-1", "u", "three"), subject=Subject(Cause.CRASH, 1))
        wanted = treated(treated(training(), both), again).state.incidents.quarantines
        assert [(one.node, one.reason) for one in wanted] == [("node-2", "two"), ("node-1", "three")]

    def test_the_end_of_a_long_message_matters(self) -> None:
        def message(letters: int) -> str:
            draft = treated(training(), decision(FailJob(Reason.SCRIPT_FAILED, "x" * letters + "!"))).draft
            return draft.state.life.failed_message

        assert message(MAX_MESSAGE - 1) == "x" * (MAX_MESSAGE - 1) + "!"
        assert message(MAX_MESSAGE) == "… " + "x" * (MAX_MESSAGE - 1) + "!"

    def test_the_same_members_keep_their_shares_in_the_next_round(self) -> None:
        world = training()
        world = world.with_draft(world.draft.with_plan(shares=(6, 8, 9, 9)))
        restarted = treated(world, decision(RestartRanks()))
        assert (restarted.plan.membership, restarted.plan.shares) == (2, (6, 8, 9, 9))


class TestEvidence:
    def kept(self, *pieces: str) -> tuple[str, ...]:
        (incident,) = treated(training(), decision(evidence=pieces)).state.incidents.current
        return incident.evidence

    def test_the_end_of_each_piece_and_as_many_as_there_is_room_for(self) -> None:
        assert self.kept("", "a" + "b" * MAX_PIECE) == ("b" * MAX_PIECE,)
        full = ["x" * MAX_PIECE] * (MAX_ALL // MAX_PIECE)
        assert self.kept(*full) == tuple(full)
        assert self.kept(*full, "y") == tuple(full)
        assert self.kept(*full[1:], "y" * 10, "x" * MAX_PIECE) == (*full[1:], "y" * 10)


def test_a_job_that_ends_is_treated_no_further() -> None:
    failed = decision(FailJob(Reason.SCRIPT_FAILED, "m"))
    world = treated(training(), failed)
    assert world.state.life.failed_reason == "ScriptFailed"
    later: Draft = treated(world, decision(CountRestart(), subject=Subject(Cause.CRASH, 1))).draft
    assert later is world.draft
