"""Naive rules on the same answers, to compare with: a rank far from the median, and NVRx's two scores.

All of them read the ranks' own work in the windows that the operator received, once a second.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from .hosts import RANKS
from .record import Recording

MAX_DEVIATIONS = 5.0
MIN_RELATIVE_SCORE, MIN_INDIVIDUAL_SCORE = 0.75, 0.75
"""NVRx's thresholds: a score below is a straggler (NVIDIA Resiliency Extension, straggler detection)."""
MIN_STEPS = 8

Floats = NDArray[np.float64]
Rule = Callable[[Floats, Floats], frozenset[int]]
"""Ranks that it blames, by their median own work and that of their early steps, seconds."""


def blame_far_from_median(now: Floats, _early: Floats) -> frozenset[int]:
    """Median + 5 median absolute deviations."""
    middle = np.median(now)
    return _list_ranks(now > middle + MAX_DEVIATIONS * np.median(np.abs(now - middle)))


def blame_by_relative_score(now: Floats, _early: Floats) -> frozenset[int]:
    """The fastest rank's time over one's own."""
    return _list_ranks(now.min() / now < MIN_RELATIVE_SCORE)


def blame_by_individual_score(now: Floats, early: Floats) -> frozenset[int]:
    """One's own early time over that of now."""
    return _list_ranks((early / now < MIN_INDIVIDUAL_SCORE) & (early > 0))


RULES: Mapping[str, Rule] = {
    "median + 5 MAD": blame_far_from_median,
    "NVRx relative": blame_by_relative_score,
    "NVRx individual": blame_by_individual_score,
}


def find_first_blamed(recording: Recording, rule: Rule, after: float) -> tuple[float, frozenset[int]] | None:
    """When (seconds after its beginning) a rule first blames a rank from `after` seconds on, and which."""
    windows: dict[int, tuple[float, float]] = {}
    for report in recording.reports:
        for window in report.get("evidence", {}).get("windows", ()):
            if len(window["steps"]) >= MIN_STEPS:
                windows[window["rank"]] = float(np.median(window["compute_seconds"])), window["baseline_own_seconds"]
        since = report["at"] - (recording.began or recording.reports[0]["at"])
        if "evidence" in report and since >= after and len(windows) == RANKS:
            now, early = (np.array(column) for column in zip(*(windows[rank] for rank in range(RANKS)), strict=True))
            if blamed := rule(now, early):
                return since, blamed
    return None


def count_alarms(now: Floats, early: Floats, rule: Rule) -> int:
    """Times that a rule begins to blame a rank. now: (windows, ranks), in order."""
    blames = [bool(rule(row, early)) for row in now]
    return sum(blame and not was_blamed for was_blamed, blame in zip([False, *blames], blames, strict=False))


def _list_ranks(slow: Sequence[bool] | NDArray[np.bool_]) -> frozenset[int]:
    return frozenset(int(rank) for rank in np.flatnonzero(np.asarray(slow)))
