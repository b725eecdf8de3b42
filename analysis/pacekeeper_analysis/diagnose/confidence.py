"""How often evidence was right when it was tried: `bench/diagnosis.py` measures it, and its figures stand here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

MEASURED_CONFIDENCE: Mapping[tuple[str, frozenset[str]], float] = {
    ("Code", frozenset({"Behaviour", "History"})): 0.992,
    ("Code", frozenset({"Behaviour", "History", "Times", "Waits"})): 0.984,
    ("Code", frozenset({"Behaviour", "Times", "Waits"})): 0.984,
    ("Code", frozenset({"Process", "Stack", "Waits"})): 0.995,
    ("Code", frozenset({"Times", "Waits"})): 0.983,
    ("Configuration", frozenset({"Behaviour", "History", "Process"})): 0.981,
    ("Configuration", frozenset({"Behaviour", "History", "Process", "Times", "Transport"})): 0.972,
    ("Configuration", frozenset({"Behaviour", "Process", "Times"})): 0.970,
    ("Configuration", frozenset({"Behaviour", "Settings", "Times"})): 0.974,
    ("Configuration", frozenset({"Behaviour", "Settings", "Times", "Waits"})): 0.917,
    ("Data", frozenset({"Behaviour", "History"})): 0.984,
    ("Data", frozenset({"Behaviour", "Times"})): 0.950,
    ("Data", frozenset({"Behaviour", "Times", "Waits"})): 0.984,
    ("Data", frozenset({"Times", "Waits"})): 0.983,
    ("Network", frozenset({"Behaviour", "History"})): 0.077,
    ("Network", frozenset({"Behaviour", "History", "Probe", "Times", "Transport"})): 0.975,
    ("Network", frozenset({"Behaviour", "History", "Probe", "Times", "Transport", "Waits"})): 0.944,
    ("Network", frozenset({"History", "Probe", "Times", "Transport"})): 0.991,
    ("Network", frozenset({"History", "Probe", "Times", "Transport", "Waits"})): 0.974,
    ("Network", frozenset({"History", "Times", "Transport"})): 0.667,
    ("Network", frozenset({"Process", "Stack", "Transport", "Waits"})): 0.995,
}
"""By class of fault and kinds of witnesses: the share of replayed faults of which such a verdict was right, culprit and
class, by the rule of succession (a few right answers are no certainty)."""


def estimate_confidence(fault: str, witnesses: Iterable[str]) -> float | None:
    """None where evidence like it was never tried: fewer kinds of witnesses than were tried are less than that.

    The best of what was tried with some of these witnesses: one more never makes a verdict less sure.
    """
    there = frozenset(witnesses)
    tried = [share for (of, kinds), share in MEASURED_CONFIDENCE.items() if of == fault and kinds <= there]
    return max(tried, default=None)
