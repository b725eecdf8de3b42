"""The class of a crash, whether it repeats, and its message."""

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
NO_PROGRESS: dict[str, Any] = {"completed_step": False, "exit_code": 1, "error": ERROR}


def decide_crash(observation: Observation, round_: int = 2, **changes: Any) -> Decision:
    """Return the decision on a crash of rank 1 in `round_`; the next round has begun."""
    fault = observations.build_crash("j-w1-0", 1, round_, **changes)
    decision = crash.check_crashes(
        replace(change_members(observation, round=round_ + 1), faults=(fault,)), build_policy()
    )
    assert decision is not None
    return decision


def build_after_no_progress_round(round_: int | None = 1, spares: int = 1) -> Observation:
    observation = build_untrained(spares=spares)
    budget = {
        "no_progress_round": round_,
        "no_progress_error": "ValueError: no such file",
        "no_progress_worker": "j-w1-0",
    }
    return observation.with_desired(observation.desired.with_budget(**budget))


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
def test_message_and_class_of_a_crash(how: dict[str, Any], message: str, class_: IncidentClass) -> None:
    decision = decide_crash(build_training(), **how)
    assert decision.message == f"rank 1 on j-w1-0 {message}"
    assert decision.class_ is class_


def test_error_signature_of_an_early_exit_with_zero() -> None:
    ended = observations.build_crash("j-w1-0", 1, exit_code=0, error=" \n")
    assert crash.extract_error_signature(ended) == "exited with 0"
    assert crash.extract_error_signature(replace(ended, exit_code=-9)) == ""
    assert crash.extract_error_signature(replace(ended, error="a\nb \n")) == "b"


class TestRepetition:
    def test_a_repeated_error_moves_the_rank_and_without_a_spare_fails_the_job(self) -> None:
        (moved,) = decide_crash(build_after_no_progress_round(), **NO_PROGRESS).actions
        assert isinstance(moved, ReplaceWorker)
        failed = decide_crash(build_after_no_progress_round(spares=0), **NO_PROGRESS)
        (end,) = failed.actions
        assert isinstance(end, FailJob)
        assert (failed.remedy, any(price.chosen for price in failed.remedies)) == (None, False)

    def test_a_spare_that_is_being_created_is_awaited(self) -> None:
        """The existing spare is lost at the same moment, for example on the same node."""
        observation = replace(build_after_no_progress_round(spares=0), job=observations.build_job(4, 1))
        assert decide_crash(observation, **NO_PROGRESS).actions == (CountRestart(),)

    def test_a_completed_step_resets_the_repetition(self) -> None:
        assert decide_crash(build_after_no_progress_round(), **{**NO_PROGRESS, "completed_step": True}).actions == (
            CountRestart(),
        )

    @pytest.mark.parametrize("round_", [None, 2, 3])
    def test_only_an_earlier_round_counts_as_repeated(self, round_: int | None) -> None:
        """None: every round made progress. 2: the same round is reported twice."""
        for spares in (0, 1):
            assert decide_crash(build_after_no_progress_round(round_, spares), **NO_PROGRESS).actions == (
                CountRestart(),
            )


class TestTheSameStep:
    """Rounds that end after the same step as an earlier round."""

    def build_repeated_failure(self, ends: int, spares: int = 0) -> Observation:
        observation = build_training(spares=spares)
        return observation.with_desired(observation.desired.with_budget(repetition=RepeatedFailure(500, ends, round=1)))

    def test_the_job_fails_at_the_limit_and_the_message_names_step_rank_and_error(self) -> None:
        decision = decide_crash(self.build_repeated_failure(2), exit_code=3, error=ERROR)
        (end,) = decision.actions
        assert isinstance(end, FailJob)
        assert end.reason is Reason.NO_PROGRESS
        for part in ("3 rounds have ended after step 500", "rank 1 exited with 3", ERROR, "maxRoundsWithoutProgress"):
            assert part in end.message

    def test_a_spare_gets_one_try_before_the_job_fails(self) -> None:
        (moved,) = decide_crash(self.build_repeated_failure(2, spares=1), exit_code=3).actions
        assert isinstance(moved, ReplaceWorker)
        (end,) = decide_crash(self.build_repeated_failure(3, spares=1), exit_code=3).actions
        assert isinstance(end, FailJob)

    @pytest.mark.parametrize("how", [{"step": 501}, {"step": 400}, {"exit_code": -9}, {"completed_step": False}])
    def test_rounds_that_end_differently_do_not_fail_the_job(self, how: dict[str, Any]) -> None:
        assert decide_crash(
            self.build_repeated_failure(2), **{"exit_code": 3, "completed_step": True, **how}
        ).actions == (CountRestart(),)

    def test_the_repetition_is_recorded(self) -> None:
        observation = change_members(self.build_repeated_failure(1), round=3)
        desired = evaluate_job(
            replace(observation, faults=(observations.build_crash("j-w1-0", 1, 2, exit_code=3),)), build_policy()
        ).desired
        assert desired.state.budget.repetition == RepeatedFailure(500, 2, round=2)

    def test_without_a_limit_the_job_continues(self) -> None:
        observation = replace(
            change_members(self.build_repeated_failure(9), round=3),
            faults=(observations.build_crash("j-w1-0", 1, 2, exit_code=3),),
        )
        decision = crash.check_crashes(observation, build_policy(rounds_without_progress=0))
        assert decision is not None
        assert decision.actions == (CountRestart(),)


@pytest.mark.parametrize(("spares", "code"), [(1, 42), (0, 42), (1, 43), (1, 44)])
def test_exit_codes_of_the_spec_select_the_action(spares: int, code: int) -> None:
    codes = ExitCodesSpec(do_not_retry=(43,), replace_node=(42,))
    observation = replace(
        change_members(build_training(spares=spares), round=3),
        faults=(observations.build_crash("j-w1-0", 1, 2, exit_code=code),),
    )
    decision = crash.check_crashes(observation, build_policy(exit_codes=codes))
    assert decision is not None
    (action,) = decision.actions
    expected = {42: ReplaceWorker if spares else CountRestart, 43: FailJob, 44: CountRestart}[code]
    assert isinstance(action, expected)
    if isinstance(action, FailJob):
        assert (action.reason, "doNotRetry" in action.message) == (Reason.SCRIPT_FAILED, True)


def test_the_message_names_the_peer_that_had_exited_with_zero() -> None:
    decision = decide_crash(build_training(), exit_code=1, error="Connection closed by peer", ended_peer=0)
    assert "rank 0 had exited with code 0" in decision.message
    assert decision.repetition is not None
    assert decision.repetition.ends == 1


class TestOutOfMemory:
    def build_with_past_incident(self, cause: IncidentCause, worker: str, rank: int = 1) -> Observation:
        observation = build_training()
        past = PastIncident(cause, NOW - 60, 3.0, rank=rank, worker=worker)
        return observation.with_desired(observation.desired.with_incidents(past=(past,)))

    @pytest.mark.parametrize(
        ("cause", "worker", "rank"),
        [
            (IncidentCause.OUT_OF_MEMORY, "j-w1-0", 1),
            (IncidentCause.HANG, "j-w7-0", 1),
            (IncidentCause.OUT_OF_MEMORY, "j-w7-0", 2),
        ],
        ids=["on this worker", "another cause", "another rank"],
    )
    def test_out_of_memory_does_not_follow_the_rank(self, cause: IncidentCause, worker: str, rank: int) -> None:
        decision = decide_crash(self.build_with_past_incident(cause, worker, rank), out_of_memory=True)
        assert (decision.remedy, decision.class_) == (Remedy.REPLACE_WORKER, IncidentClass.UNKNOWN)

    def test_out_of_memory_follows_the_rank(self) -> None:
        decision = decide_crash(
            self.build_with_past_incident(IncidentCause.OUT_OF_MEMORY, "j-w7-0"), out_of_memory=True
        )
        assert (decision.remedy, decision.class_) == (Remedy.RESTART_RANKS, IncidentClass.APPLICATION)

    def test_another_crash_after_out_of_memory_is_of_unknown_class(self) -> None:
        assert (
            decide_crash(self.build_with_past_incident(IncidentCause.OUT_OF_MEMORY, "j-w7-0")).class_
            is IncidentClass.UNKNOWN
        )


def test_no_remedy_is_named_if_none_is_allowed() -> None:
    observation = replace(change_members(build_training(), round=2), faults=(observations.build_crash("j-w1-0", 1),))
    decision = crash.check_crashes(observation, build_policy(allow=frozenset()))
    assert decision is not None
    assert decision.remedy is None
