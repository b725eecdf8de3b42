"""Rounds that end at the same step again, and what counts as such an end."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce

import pytest

from pacekeeper_analysis.diagnose.hang import HangKind, HangVerdict
from pacekeeper_analysis.diagnose.repetition import PATIENCE_SECONDS, Repetition, is_too_early
from pacekeeper_analysis.reports import Fault, FaultKind
from tests.unit.analysis.test_hang import OUTSIDE, stalls

FAILED = Fault("f", FaultKind.RANK_FAILED, "w", 1, 0.0, rank=1, exit_code=3, completed_step=True, step=59)


def ends(*faults: Fault) -> int:
    """After rounds that end by these."""
    numbered = [replace(fault, round=number) for number, fault in enumerate(faults, 1)]
    return reduce(Repetition.after, numbered, Repetition()).ends


def test_ends_at_the_same_step_are_counted_and_one_further_on_begins_anew() -> None:
    further = replace(FAILED, step=80)
    assert ends(FAILED, FAILED, FAILED) == 3
    assert ends(FAILED, FAILED, further) == 1
    assert ends(FAILED, FAILED, further, FAILED, further) == 2


def test_a_round_is_counted_once() -> None:
    once = Repetition().after(FAILED)
    assert once.after(FAILED) == once


@pytest.mark.parametrize(
    "other",
    [
        {"exit_code": -9},
        {"exit_code": -15},
        {"error": "RuntimeError: [10.0.0.7]:4711: Connection reset by peer"},
        {"completed_step": False},
        {"step": 20},
        {"step": -1},
    ],
)
def test_what_something_else_may_have_caused_does_not_count(other: dict[str, object]) -> None:
    assert ends(FAILED, FAILED, replace(FAILED, **other)) == 2  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "other",
    [
        {"exit_code": -9, "out_of_memory": True},
        {"exit_code": -11},
        {"error": "Connection closed by peer", "ended_peer": 0},
    ],
)
def test_what_the_script_does_counts(other: dict[str, object]) -> None:
    assert ends(FAILED, FAILED, replace(FAILED, **other)) == 3  # type: ignore[arg-type]


def hangs(kind: HangKind, rounds: int) -> Repetition:
    verdict, repetition = HangVerdict(kind, (0,), ("…",)), Repetition()
    for number in range(1, rounds + 1):
        told = [replace(fault, completed_step=True) for fault in stalls(OUTSIDE, round_number=number)]
        repetition = repetition.after_hang(verdict, told)
    return repetition


@pytest.mark.parametrize("kind", list(HangKind))
def test_hangs_of_the_script_count_as_well(kind: HangKind) -> None:
    counts = kind not in (HangKind.STOPPED, HangKind.COMMUNICATION)
    assert hangs(kind, 3) == (Repetition(41, 3, 3) if counts else Repetition())


def test_the_third_hang_at_a_step_is_waited_out() -> None:
    verdict = HangVerdict(HangKind.NEVER_ENTERED, (0,), ("…",))
    late = stalls(replace(OUTSIDE, waiting_seconds=PATIENCE_SECONDS))
    assert [is_too_early(verdict, stalls(OUTSIDE), number) for number in (1, 2, 3, 4)] == [False, False, True, True]
    assert not is_too_early(verdict, late, 3)
