"""The verdict on a bench comes from its exit status and its last line."""

from __future__ import annotations

import json

import pytest

from bench import __main__ as benches
from bench.__main__ import NOT_RUN, Verdict, build_verdict
from bench.scripts.guard import TIMED_OUT


@pytest.mark.parametrize(
    ("holds", "failure"),
    [
        (True, ""),
        (False, "not reached: holds"),
        ({"one": True, "two": True}, ""),
        ({"one": True, "two": False, "three": None}, "not reached: two, three"),
    ],
)
def test_a_goal_that_is_not_reached_is_a_failure(holds: object, failure: str) -> None:
    assert build_verdict(0, json.dumps({"bench": "b", "holds": holds})) == Verdict(failure=failure)


def test_a_result_without_goals_is_no_failure() -> None:
    assert build_verdict(0, json.dumps({"bench": "b"})) == Verdict()


@pytest.mark.parametrize("line", ["", "Traceback", "3"])
def test_no_result_is_a_failure(line: str) -> None:
    assert build_verdict(0, line).failure == "no result"


def test_a_failing_exit_status_is_a_failure() -> None:
    assert build_verdict(1, json.dumps({"holds": True})).failure == build_verdict(1, "").failure == "exit status 1"
    assert build_verdict(TIMED_OUT, "").failure == "not done in time"
    assert build_verdict(NOT_RUN, "") == Verdict(ran=False)


@pytest.mark.parametrize(
    ("verdicts", "status"),
    [
        ((Verdict(), Verdict()), 0),
        ((Verdict(), Verdict(ran=False)), 0),
        ((Verdict(ran=False),), NOT_RUN),
        ((Verdict(failure="f"), Verdict()), 1),
        ((Verdict(failure="f"), Verdict(ran=False)), 1),
    ],
)
def test_the_exit_status_covers_all_benches(
    verdicts: tuple[Verdict, ...], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["causes", "overlap", "whatif"][: len(verdicts)]
    monkeypatch.setattr(benches, "run_bench", dict(zip(names, verdicts, strict=True)).get)
    assert benches.main(names) == status


def test_an_unknown_bench_is_refused() -> None:
    assert benches.main(["no-such"]) == 2
