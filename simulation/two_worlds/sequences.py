"""Both worlds' sequences side by side."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest

from .disaster import ConformanceScenario
from .performance import SequenceEntry


@dataclass(frozen=True)
class Comparison:
    """Of one disaster."""

    scenario: ConformanceScenario
    simulated: tuple[SequenceEntry, ...]
    real: tuple[SequenceEntry, ...]

    @property
    def agrees(self) -> bool:
        return self.simulated == self.real

    def format_lines(self) -> Iterator[str]:
        """What both say; where they differ, both."""
        yield f"seed {self.scenario.seed}: {self.scenario}: {'the same' if self.agrees else 'DIFFERENT'}"
        for simulated, real in zip_longest(self.simulated, self.real, fillvalue="(nothing)"):
            if simulated == real:
                yield f"    {real}"
            else:
                yield f"  - {simulated}"
                yield f"  + {real}"


def format_table(comparisons: Iterable[Comparison]) -> Iterator[str]:
    """One line a seed."""
    for found in sorted(comparisons, key=lambda found: found.scenario.seed):
        verdict = "the same" if found.agrees else "DIFFERENT"
        yield f"{found.scenario.seed:4}  {verdict:9}  {len(found.real):3} lines  {found.scenario}"
