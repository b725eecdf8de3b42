"""How often evidence was right when it was tried: `bench/diagnosis.py` measures it, and its figures stand here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

MEASURED: Mapping[tuple[str, frozenset[str]], float] = {}
"""By class of fault and kinds of witnesses: the share of replayed faults of which such a verdict was right, culprit and
class, by the rule of succession (a few right answers are no certainty)."""


def confidence(fault: str, witnesses: Iterable[str]) -> float | None:
    """None where evidence like it was never tried: fewer kinds of witnesses than were tried are less than that.

    The best of what was tried with some of these witnesses: one more never makes a verdict less sure.
    """
    there = frozenset(witnesses)
    tried = [share for (of, kinds), share in MEASURED.items() if of == fault and kinds <= there]
    return max(tried, default=None)
