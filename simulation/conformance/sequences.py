"""The sequences of both worlds, side by side."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest

from .scenario import ConformanceScenario
from .scenario_run import SequenceEntry


@dataclass(frozen=True)
class Comparison:
    """The results of one scenario."""

    scenario: ConformanceScenario
    simulated: tuple[SequenceEntry, ...]
    real: tuple[SequenceEntry, ...]

    @property
    def agrees(self) -> bool:
        return self.simulated == self.real

    def format_lines(self) -> Iterator[str]:
        """Yield the common entries once, and entries that differ from both worlds."""
        yield f"seed {self.scenario.seed}: {self.scenario}: {'the same' if self.agrees else 'DIFFERENT'}"
        for simulated, real in zip_longest(self.simulated, self.real, fillvalue="(nothing)"):
            if simulated == real:
                yield f"    {real}"
            else:
                yield f"  - {simulated}"
                yield f"  + {real}"


def format_table(comparisons: Iterable[Comparison]) -> Iterator[str]:
    """Yield one line per seed."""
    for comparison in sorted(comparisons, key=lambda comparison: comparison.scenario.seed):
        verdict = "the same" if comparison.agrees else "DIFFERENT"
        yield f"{comparison.scenario.seed:4}  {verdict:9}  {len(comparison.real):3} lines  {comparison.scenario}"
