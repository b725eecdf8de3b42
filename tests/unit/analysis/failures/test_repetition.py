"""Rounds that end at the same step again, and which ends count."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce

import pytest

from pacekeeper_analysis.failures.hang import OUTSIDE_COLLECTIVES_SECONDS, HangKind, HangVerdict
from pacekeeper_analysis.failures.repetition import RepeatedFailure
from pacekeeper_analysis.protocol.reports import FaultKind, FaultReport
from tests.unit.analysis.failures.test_hang import OUTSIDE, build_stalls

FAILED = FaultReport("f", FaultKind.RANK_FAILED, "w", 1, 0.0, rank=1, exit_code=3, completed_step=True, step=59)


def count_ends(*faults: FaultReport) -> int:
    """Count after rounds that end by these faults."""
    numbered = [replace(fault, round=number) for number, fault in enumerate(faults, 1)]
    return reduce(RepeatedFailure.with_failure, numbered, RepeatedFailure()).ends


def test_ends_at_the_same_step_are_counted_and_one_further_on_restarts_the_count() -> None:
    further = replace(FAILED, step=80)
    assert count_ends(FAILED, FAILED, FAILED) == 3
    assert count_ends(FAILED, FAILED, further) == 1
    assert count_ends(FAILED, FAILED, further, FAILED, further) == 2


def test_a_round_is_counted_once() -> None:
    once = RepeatedFailure().with_failure(FAILED)
    assert once.with_failure(FAILED) == once


@pytest.mark.parametrize(
    "other",
    [
        {"exit_code": -9},
        {"exit_code": -15},
        {"error": "RuntimeError: [10.0.0.7]:4711: Connection reset by peer"},
        {"completed_step": False},
        {"step": 20},
        {"step": None},
    ],
)
def test_an_end_with_another_possible_cause_does_not_count(other: dict[str, object]) -> None:
    assert count_ends(FAILED, FAILED, replace(FAILED, **other)) == 2  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "other",
    [
        {"exit_code": -9, "out_of_memory": True},
        {"exit_code": -11},
        {"error": "Connection closed by peer", "ended_peer": 0},
    ],
)
def test_an_end_by_the_script_counts(other: dict[str, object]) -> None:
    assert count_ends(FAILED, FAILED, replace(FAILED, **other)) == 3  # type: ignore[arg-type]


def repeat_hang(kind: HangKind, *waited: float) -> RepeatedFailure | None:
    """Repeat a round that ends by a rank that has waited for these seconds."""
    verdict, repetition = HangVerdict(kind, (0,), ("…",)), RepeatedFailure()
    for number, seconds in enumerate(waited, 1):
        state = replace(OUTSIDE, waiting_seconds=seconds)
        faults = [replace(fault, completed_step=True) for fault in build_stalls(state, round_number=number)]
        after = repetition.with_hang(verdict, faults)
        if after is None:
            return None
        repetition = after
    return repetition


@pytest.mark.parametrize("kind", list(HangKind))
def test_hangs_of_the_script_count_as_well(kind: HangKind) -> None:
    counts = kind not in (HangKind.STOPPED, HangKind.COMMUNICATION)
    assert repeat_hang(kind, 3.0, 3.0, OUTSIDE_COLLECTIVES_SECONDS) == (
        RepeatedFailure(41, 3, 3) if counts else RepeatedFailure()
    )


def test_the_third_hang_at_a_step_is_waited_out() -> None:
    kind = HangKind.NEVER_ENTERED
    assert repeat_hang(kind, 3.0) == RepeatedFailure(41, 1, 1)
    assert repeat_hang(kind, 3.0, 3.0) == RepeatedFailure(41, 2, 2)
    assert repeat_hang(kind, 3.0, 3.0, 3.0) is None
    assert repeat_hang(kind, 3.0, 3.0, OUTSIDE_COLLECTIVES_SECONDS, 3.0) is None
    assert repeat_hang(HangKind.STOPPED, 3.0, 3.0, 3.0) == RepeatedFailure(), "no script makes it"


def test_a_limit_of_zero_is_no_limit() -> None:
    three = RepeatedFailure(59, 3)
    assert [three.reaches_limit(limit) for limit in (0, 2, 3, 4)] == [False, True, True, False]
    assert [three.has_just_reached_limit(limit) for limit in (0, 2, 3, 4)] == [False, False, True, False]
    assert not RepeatedFailure().has_just_reached_limit(0)
