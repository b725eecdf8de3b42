"""Both worlds' sequences side by side."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest

from .disaster import Disaster
from .performance import Entry


@dataclass(frozen=True)
class Comparison:
    """Of one disaster."""

    disaster: Disaster
    simulated: tuple[Entry, ...]
    real: tuple[Entry, ...]

    @property
    def agrees(self) -> bool:
        return self.simulated == self.real

    def lines(self) -> Iterator[str]:
        """What both say; where they differ, both."""
        yield f"seed {self.disaster.seed}: {self.disaster}: {'the same' if self.agrees else 'DIFFERENT'}"
        for simulated, real in zip_longest(self.simulated, self.real, fillvalue="(nothing)"):
            if simulated == real:
                yield f"    {real}"
            else:
                yield f"  - {simulated}"
                yield f"  + {real}"


def table(comparisons: Iterable[Comparison]) -> Iterator[str]:
    """One line a seed."""
    for found in sorted(comparisons, key=lambda found: found.disaster.seed):
        verdict = "the same" if found.agrees else "DIFFERENT"
        yield f"{found.disaster.seed:4}  {verdict:9}  {len(found.real):3} lines  {found.disaster}"
