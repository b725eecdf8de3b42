"""How well the operator decides, in two parts.

*Decisions alone*, on a coarse clock: slowdowns whose kind, depth and length are drawn (`scripts/decisions/draw.py`),
and the operator's own passes upon what is seen of the job; beside it other policies, and a clairvoyant by dynamic
programming whom none of them can beat. And days on which nothing goes wrong.

*In the simulator* (`scripts/decisions/simulated.py`): the whole operator, four ranks, one of them slow. Some of these
cases are played on the coarse clock as well, which says how real that is.

QUICK=1: few scenarios of each, which say whether it works and not more. SEEDS=4109-4158,64030: these scenarios on the
coarse clock alone; a seed is a thousand times the ranks (4, 64 or 1024), and a number below a thousand. The last line
of the output is the summary.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from bench.scripts.decisions import agreement, draw, figures, simulated
from bench.scripts.decisions.draw import Scenario
from bench.scripts.decisions.ours import PassIntervals
from bench.scripts.decisions.outcome import Outcome, outcome, quiet

Result = TypeVar("Result")


@dataclass(frozen=True)
class Sizes:
    """How much is played."""

    seeds: Sequence[int]
    """Of scenarios: a thousand times the ranks, and a number below a thousand."""
    calm_hours: Mapping[int, float] = field(default_factory=dict)
    """By ranks, looked at as often as usual."""
    calm_days: int = 0
    """Of four ranks, looked at for a minute and a half twice an hour, in lots of LOT_DAYS."""
    worlds: int | None = 0
    """Of the simulator, for each of its cases; 0: those alone that are compared, in one; None: none."""


FULL = Sizes(
    (*range(1_024_000, 1_024_020), *range(64_000, 64_120), *range(4000, 4240)),
    {1024: 1.0, 64: 100.0, 4: 100.0},
    1000,
    simulated.SEEDS,
)
QUICK = Sizes((*range(64_000, 64_005), *range(4000, 4014)), {64: 0.5, 4: 2.0})
LOT_DAYS = 10
OFTEN = PassIntervals(every=6)
"""At a job in which nothing happens: a window of steps is hardly longer."""
SELDOM = PassIntervals(every=12, row=8, rest=1710)
"""Enough in a row for ranks that are a little slow, window after window, to be told from luck (`observe.lasting`)."""


def main() -> int:
    sizes, began = read_sizes(os.environ), time.perf_counter()
    with ProcessPoolExecutor(initializer=_begin) as pool:
        outcomes = list(_report_progress("scenarios", pool.map(outcome, _scenarios(sizes))))
        print("\n".join([*figures.table(outcomes), "\nworst:", *figures.worst(outcomes)]), flush=True)
        calm = list(_report_progress("days without a fault", pool.map(_calm, _calm_scenarios(sizes))))
        cases = [] if sizes.worlds is None else simulated.cases(sizes.worlds)
        played = list(_report_progress("simulated", pool.map(simulated.play, cases)))
    alone = figures.summary(outcomes, calm)
    holds = dict(alone.pop("holds"))  # type: ignore[call-overload]  # it is a dictionary
    told: dict[str, object] = {}
    if found := simulated.results(played):
        compared = agreement.compare(found)
        print("\nin the simulator, and on the coarse clock:")
        print("\n".join(each.description for each in compared))
        holds[f"the simulator within {agreement.NEAR:.0%}"] = all(each.agrees for each in compared)
    if sizes.worlds:
        print()
        told, more = simulated.report(found)
        holds |= more
    seconds = time.perf_counter() - began
    summary = {"bench": "decisions", **alone, "simulated": told, "seconds": seconds, "holds": holds}
    print(json.dumps(summary))
    return 0 if all(holds.values()) else 1


def read_sizes(environment: Mapping[str, str]) -> Sizes:
    if "SEEDS" in environment:
        return Sizes(_seeds(environment["SEEDS"]), worlds=None)
    return QUICK if environment.get("QUICK") else FULL


def _seeds(words: str) -> list[int]:
    ends = [part.partition("-") for part in words.split(",")]
    try:
        seeds = [seed for first, _, last in ends for seed in range(int(first), int(last or first) + 1)]
    except ValueError:
        seeds = []
    if not seeds or not {seed // 1000 for seed in seeds} <= set(FULL.calm_hours):
        sys.exit(
            f"SEEDS={words}: each is a thousand times 4, 64 or 1024, and a number below a thousand: 4109-4158,64030"
        )
    return seeds


def _begin() -> None:
    gc.freeze()
    logging.getLogger("pacekeeper_operator").setLevel(logging.CRITICAL)


def _report_progress(name: str, results: Iterator[Result]) -> Iterator[Result]:
    """The same, and how far they are."""
    began = time.perf_counter()
    for done, result in enumerate(results, start=1):
        if done % 10 == 0:
            print(f"{name}: {done}, {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
        yield result


def _scenarios(sizes: Sizes) -> list[Scenario]:
    """The longest first, so that no processor is left alone with one at the end."""
    return [draw.scenario(seed, ranks=seed // 1000) for seed in sorted(sizes.seeds, reverse=True)]


def _calm_scenarios(sizes: Sizes) -> list[tuple[Scenario, PassIntervals]]:
    often = [(draw.healthy(ranks, hours, ranks), OFTEN) for ranks, hours in sizes.calm_hours.items()]
    lots = sizes.calm_days // LOT_DAYS
    return often + [(draw.healthy(10_000 + lot, 24.0 * LOT_DAYS, 4), SELDOM) for lot in range(lots)]


def _calm(of: tuple[Scenario, PassIntervals]) -> Outcome:
    return quiet(*of)


if __name__ == "__main__":
    sys.exit(main())
