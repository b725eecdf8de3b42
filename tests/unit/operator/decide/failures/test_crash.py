"""Whose doing a crash is, whether it repeats itself, and what is said of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pacekeeper_analysis.failures.repetition import RepeatedFailure
from pacekeeper_operator.api.conditions import Reason
from pacekeeper_operator.api.incident import IncidentCause, IncidentClass
from pacekeeper_operator.api.training_job import ExitCodesSpec, Remedy
from pacekeeper_operator.decide.decision import CountRestart, Decision, FailJob, ReplaceWorker
from pacekeeper_operator.decide.evaluate import evaluate_job
from pacekeeper_operator.decide.failures import crash
from pacekeeper_operator.state.desired_state import PastIncident
from pacekeeper_operator.state.observation import Observation
from testing.operators import observations
from testing.operators.observations import NOW, build_policy, build_training, build_untrained, change_members

ERROR = "Traceback …\nValueError: no such file"
BARREN: dict[str, Any] = {"completed_step": False, "exit_code": 1, "error": ERROR}


def crashed(world: Observation, round_: int = 2, **changes: Any) -> Decision:
    """Rank 1 in that round, whose next one has begun."""
    fault = observations.build_crash("j-w1-0", 1, round_, **changes)
    decision = crash.check_crashes(replace(change_members(world, round=round_ + 1), faults=(fault,)), build_policy())
    assert decision is not None
    return decision


def after_a_barren_round(round_: int | None = 1, spares: int = 1) -> Observation:
    world = build_untrained(spares=spares)
    budget = {
        "no_progress_round": round_,
        "no_progress_error": "ValueError: no such file",
        "no_progress_worker": "j-w1-0",
    }
    return world.with_desired(world.desired.with_budget(**budget))


@pytest.mark.parametrize(
    ("how", "message", "class_"),
    [
        ({"exit_code": 3}, "exited with 3 after step 500", IncidentClass.APPLICATION),
        ({"exit_code": -9}, "was killed by signal 9 after step 500", IncidentClass.UNKNOWN),
        ({"exit_code": 1, "step": 0}, "exited with 1 after step 0", IncidentClass.APPLICATION),
        ({"exit_code": 1, "step": None}, "exited with 1 before its first step", IncidentClass.APPLICATION),
        ({"exit_code": 0, "step": None}, "exited with 0 before its first step", IncidentClass.UNKNOWN),
        (
            {"exit_code": -9, "out_of_memory": True},
            "was killed because it ran out of memory after step 500",
            IncidentClass.UNKNOWN,
        ),
    ],
)
def test_what_is_said_and_whose_doing_it_is(how: dict[str, Any], message: str, class_: IncidentClass) -> None:
    decision = crashed(build_training(), **how)
    assert decision.message == f"rank 1 on j-w1-0 {message}"
    assert decision.class_ is class_


def test_a_trainer_that_ended_well_too_early_is_known_by_that() -> None:
    ended = observations.build_crash("j-w1-0", 1, exit_code=0, error=" \n")
    assert crash.extract_error_signature(ended) == "exited with 0"
    assert crash.extract_error_signature(replace(ended, exit_code=-9)) == ""
    assert crash.extract_error_signature(replace(ended, error="a\nb \n")) == "b"


class TestRepetition:
    def test_the_same_error_again_is_tried_elsewhere_and_then_is_the_scripts(self) -> None:
        (moved,) = crashed(after_a_barren_round(), **BARREN).actions
        assert isinstance(moved, ReplaceWorker)
        failed = crashed(after_a_barren_round(spares=0), **BARREN)
        (end,) = failed.actions
        assert isinstance(end, FailJob)
        assert (failed.remedy, any(price.chosen for price in failed.remedies)) == (None, False)

    def test_a_spare_that_is_to_be_made_is_waited_for(self) -> None:
        """The one there was is lost at the same moment, as on a node that takes both."""
        world = replace(after_a_barren_round(spares=0), job=observations.build_job(4, 1))
        assert crashed(world, **BARREN).actions == (CountRestart(),)

    def test_a_step_in_between_begins_anew(self) -> None:
        assert crashed(after_a_barren_round(), **{**BARREN, "completed_step": True}).actions == (CountRestart(),)

    @pytest.mark.parametrize("round_", [None, 2, 3])
    def test_only_an_earlier_round_can_be_repeated(self, round_: int | None) -> None:
        """None: none has led nowhere. 2: its own round is told of twice."""
        for spares in (0, 1):
            assert crashed(after_a_barren_round(round_, spares), **BARREN).actions == (CountRestart(),)


class TestTheSameStep:
    """Rounds that end after a step which an earlier one has come to as well."""

    def after(self, ends: int, spares: int = 0) -> Observation:
        world = build_training(spares=spares)
        return world.with_desired(world.desired.with_budget(repetition=RepeatedFailure(500, ends, round=1)))

    def test_the_job_fails_by_the_limit_with_step_rank_code_and_words(self) -> None:
        decision = crashed(self.after(2), exit_code=3, error=ERROR)
        (end,) = decision.actions
        assert isinstance(end, FailJob)
        assert end.reason is Reason.NO_PROGRESS
        for part in ("3 rounds have ended after step 500", "rank 1 exited with 3", ERROR, "maxRoundsWithoutProgress"):
            assert part in end.message

    def test_before_that_another_worker_gets_one_try(self) -> None:
        (moved,) = crashed(self.after(2, spares=1), exit_code=3).actions
        assert isinstance(moved, ReplaceWorker)
        (end,) = crashed(self.after(3, spares=1), exit_code=3).actions
        assert isinstance(end, FailJob)

    @pytest.mark.parametrize("how", [{"step": 501}, {"step": 400}, {"exit_code": -9}, {"completed_step": False}])
    def test_other_ends_do_not_fail_it(self, how: dict[str, Any]) -> None:
        assert crashed(self.after(2), **{"exit_code": 3, "completed_step": True, **how}).actions == (CountRestart(),)

    def test_it_is_remembered(self) -> None:
        world = change_members(self.after(1), round=3)
        draft = evaluate_job(
            replace(world, faults=(observations.build_crash("j-w1-0", 1, 2, exit_code=3),)), build_policy()
        ).desired
        assert draft.state.budget.repetition == RepeatedFailure(500, 2, round=2)

    def test_without_a_limit_it_goes_on(self) -> None:
        world = replace(
            change_members(self.after(9), round=3), faults=(observations.build_crash("j-w1-0", 1, 2, exit_code=3),)
        )
        decision = crash.check_crashes(world, build_policy(rounds_without_progress=0))
        assert decision is not None
        assert decision.actions == (CountRestart(),)


@pytest.mark.parametrize(("spares", "code"), [(1, 42), (0, 42), (1, 43), (1, 44)])
def test_exit_codes_that_the_script_gives_a_meaning(spares: int, code: int) -> None:
    codes = ExitCodesSpec(do_not_retry=(43,), replace_node=(42,))
    world = replace(
        change_members(build_training(spares=spares), round=3),
        faults=(observations.build_crash("j-w1-0", 1, 2, exit_code=code),),
    )
    decision = crash.check_crashes(world, build_policy(exit_codes=codes))
    assert decision is not None
    (action,) = decision.actions
    expected = {42: ReplaceWorker if spares else CountRestart, 43: FailJob, 44: CountRestart}[code]
    assert isinstance(action, expected)
    if isinstance(action, FailJob):
        assert (action.reason, "doNotRetry" in action.message) == (Reason.SCRIPT_FAILED, True)


def test_who_waited_in_vain_for_a_rank_that_had_ended_well_is_told_so() -> None:
    decision = crashed(build_training(), exit_code=1, error="Connection closed by peer", ended_peer=0)
    assert "rank 0 had exited with code 0" in decision.message
    assert decision.repetition is not None
    assert decision.repetition.ends == 1


class TestOutOfMemory:
    def after(self, cause: IncidentCause, worker: str, rank: int = 1) -> Observation:
        world = build_training()
        past = PastIncident(cause, NOW - 60, 3.0, rank=rank, worker=worker)
        return world.with_desired(world.desired.with_incidents(past=(past,)))

    @pytest.mark.parametrize(
        ("cause", "worker", "rank"),
        [
            (IncidentCause.OUT_OF_MEMORY, "j-w1-0", 1),
            (IncidentCause.HANG, "j-w7-0", 1),
            (IncidentCause.OUT_OF_MEMORY, "j-w7-0", 2),
        ],
        ids=["on this worker", "another trouble", "another rank"],
    )
    def test_it_does_not_follow_the_rank(self, cause: IncidentCause, worker: str, rank: int) -> None:
        decision = crashed(self.after(cause, worker, rank), out_of_memory=True)
        assert (decision.remedy, decision.class_) == (Remedy.REPLACE_WORKER, IncidentClass.UNKNOWN)

    def test_it_does(self) -> None:
        decision = crashed(self.after(IncidentCause.OUT_OF_MEMORY, "j-w7-0"), out_of_memory=True)
        assert (decision.remedy, decision.class_) == (Remedy.RESTART_RANKS, IncidentClass.APPLICATION)

    def test_another_crash_does_not_follow_it(self) -> None:
        assert crashed(self.after(IncidentCause.OUT_OF_MEMORY, "j-w7-0")).class_ is IncidentClass.UNKNOWN


def test_without_any_remedy_that_is_allowed_none_is_named() -> None:
    world = replace(change_members(build_training(), round=2), faults=(observations.build_crash("j-w1-0", 1),))
    decision = crash.check_crashes(world, build_policy(allow=frozenset()))
    assert decision is not None
    assert decision.remedy is None
