"""How often evidence was right in tests. `bench/diagnosis.py` measures it, and this module holds the results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

MEASURED_CONFIDENCE: Mapping[tuple[str, frozenset[str]], float] = {
    ("Code", frozenset({"History", "Profile"})): 0.992,
    ("Code", frozenset({"History", "Profile", "Times", "Waits"})): 0.984,
    ("Code", frozenset({"Profile", "Times", "Waits"})): 0.984,
    ("Code", frozenset({"Process", "Stack", "Waits"})): 0.995,
    ("Code", frozenset({"Times", "Waits"})): 0.983,
    ("Configuration", frozenset({"History", "Process", "Profile"})): 0.981,
    ("Configuration", frozenset({"History", "Process", "Profile", "Times", "Transport"})): 0.972,
    ("Configuration", frozenset({"Process", "Profile", "Times"})): 0.970,
    ("Configuration", frozenset({"Profile", "Settings", "Times"})): 0.974,
    ("Configuration", frozenset({"Profile", "Settings", "Times", "Waits"})): 0.917,
    ("Data", frozenset({"History", "Profile"})): 0.984,
    ("Data", frozenset({"Profile", "Times"})): 0.950,
    ("Data", frozenset({"Profile", "Times", "Waits"})): 0.984,
    ("Data", frozenset({"Times", "Waits"})): 0.983,
    ("Network", frozenset({"History", "Profile"})): 0.077,
    ("Network", frozenset({"History", "Probe", "Profile", "Times", "Transport"})): 0.975,
    ("Network", frozenset({"History", "Probe", "Profile", "Times", "Transport", "Waits"})): 0.944,
    ("Network", frozenset({"History", "Probe", "Times", "Transport"})): 0.991,
    ("Network", frozenset({"History", "Probe", "Times", "Transport", "Waits"})): 0.974,
    ("Network", frozenset({"History", "Times", "Transport"})): 0.667,
    ("Network", frozenset({"Process", "Stack", "Transport", "Waits"})): 0.995,
}
"""Share of replayed faults that were diagnosed correctly, by class of fault and kinds of signals.

Correct means the right culprit and class. The share follows the rule of succession, because a few right answers are not
certainty.
"""


def estimate_confidence(fault: str, signals: Iterable[str]) -> float | None:
    """Return the measured confidence of these signals. None if such evidence, or a part of it, was never tried.

    The result is the best of all tried combinations that these signals include, so that one more signal never reduces
    the confidence.
    """
    present = frozenset(signals)
    tried = [share for (cause, kinds), share in MEASURED_CONFIDENCE.items() if cause == fault and kinds <= present]
    return max(tried, default=None)
