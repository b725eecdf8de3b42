"""How often evidence was right when it was tried: `bench/diagnosis.py` measures it, and its figures stand here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

MEASURED: Mapping[tuple[str, frozenset[str]], float] = {
    ("Code", frozenset({"Behaviour", "History"})): 0.986,
    ("Code", frozenset({"Behaviour", "History", "Times", "Waits"})): 0.953,
    ("Code", frozenset({"Behaviour", "Times"})): 0.952,
    ("Code", frozenset({"Behaviour", "Times", "Waits"})): 0.976,
    ("Code", frozenset({"Process", "Stack", "Waits"})): 0.995,
    ("Code", frozenset({"Times", "Waits"})): 0.982,
    ("Configuration", frozenset({"Behaviour", "History", "Process"})): 0.976,
    ("Configuration", frozenset({"Behaviour", "History", "Process", "Times", "Transport"})): 0.979,
    ("Configuration", frozenset({"Behaviour", "History", "Process", "Times", "Transport", "Waits"})): 0.941,
    ("Configuration", frozenset({"Behaviour", "History", "Process", "Times", "Waits"})): 0.667,
    ("Configuration", frozenset({"Behaviour", "History", "Settings", "Times", "Transport"})): 0.667,
    ("Configuration", frozenset({"Behaviour", "Process", "Times"})): 0.950,
    ("Configuration", frozenset({"Behaviour", "Settings", "Times"})): 0.971,
    ("Configuration", frozenset({"Behaviour", "Settings", "Times", "Waits"})): 0.962,
    ("Data", frozenset({"Behaviour", "History"})): 0.984,
    ("Data", frozenset({"Behaviour", "Times"})): 0.971,
    ("Data", frozenset({"Behaviour", "Times", "Waits"})): 0.978,
    ("Data", frozenset({"Times", "Waits"})): 0.982,
    ("Network", frozenset({"Behaviour", "History"})): 0.250,
    ("Network", frozenset({"Behaviour", "History", "Probe", "Times", "Transport"})): 0.992,
    ("Network", frozenset({"Behaviour", "History", "Probe", "Times", "Transport", "Waits"})): 0.875,
    ("Network", frozenset({"History", "Probe", "Times", "Transport"})): 0.987,
    ("Network", frozenset({"History", "Probe", "Times", "Transport", "Waits"})): 0.938,
    ("Network", frozenset({"Process", "Stack", "Transport", "Waits"})): 0.995,
}
"""By class of fault and kinds of witnesses: the share of replayed faults of which such a verdict was right, culprit and
class, by the rule of succession (a few right answers are no certainty)."""


def confidence(fault: str, witnesses: Iterable[str]) -> float | None:
    """None where evidence like it was never tried: fewer kinds of witnesses than were tried are less than that.

    The best of what was tried with some of these witnesses: one more never makes a verdict less sure.
    """
    there = frozenset(witnesses)
    tried = [share for (of, kinds), share in MEASURED.items() if of == fault and kinds <= there]
    return max(tried, default=None)
