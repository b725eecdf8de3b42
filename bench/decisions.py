"""How well the operator decides, in two parts.

*Decisions alone*, on a coarse clock: slowdowns whose kind, depth and length are drawn (`scripts/decisions/draw.py`),
and the operator's own passes upon what is seen of the job; beside it other policies, and a clairvoyant by dynamic
programming whom none of them can beat. And days on which nothing goes wrong.

*In the simulator* (`scripts/decisions/simulated.py`): the whole operator, four ranks, one of them slow. Some of these
cases are played on the coarse clock as well, which says how real that is.

QUICK=1: few scenarios of each, which say whether it works and not more. The last line of the output is the summary.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from bench.scripts.decisions import agreement, draw, figures, simulated
from bench.scripts.decisions.draw import Scenario
from bench.scripts.decisions.outcome import Outcome, outcome, quiet

Result = TypeVar("Result")


@dataclass(frozen=True)
class Sizes:
    """How much is played. scenarios: by ranks. calm_hours: each by ranks, looked at as often as usual; calm_days: of
    four ranks, looked at every five minutes, in lots of ten."""

    scenarios: dict[int, int]
    calm_hours: dict[int, float]
    calm_days: int
    worlds: int
    """Of the simulator, for each of its cases; 0: those alone that are compared, in one."""


FULL = Sizes({4: 240, 64: 120, 1024: 20}, {4: 100.0, 64: 100.0, 1024: 1.0}, 1000, simulated.SEEDS)
QUICK = Sizes({4: 14, 64: 5, 1024: 0}, {4: 2.0, 64: 0.5}, 0, 0)
LOT_DAYS = 10
LOOK_SECONDS, SELDOM_SECONDS = 6, 300
"""Between two looks at a job in which nothing happens: a window of steps is hardly longer."""


def main() -> int:
    sizes, began = QUICK if os.environ.get("QUICK") else FULL, time.perf_counter()
    with ProcessPoolExecutor(initializer=_begin) as pool:
        outcomes = list(_told("scenarios", pool.map(outcome, _scenarios(sizes))))
        print("\n".join([*figures.table(outcomes), "\nworst:", *figures.worst(outcomes)]), flush=True)
        calm = list(_told("days without a fault", pool.map(_calm, _calm_scenarios(sizes))))
        played = list(_told("simulated", pool.map(simulated.play, simulated.cases(sizes.worlds))))
    found = simulated.results(played)
    compared = agreement.compare(found)
    print("\nin the simulator, and on the coarse clock:")
    print("\n".join(each.words for each in compared))
    alone = figures.summary(outcomes, calm)
    holds = dict(alone.pop("holds"))  # type: ignore[call-overload]  # it is a dictionary
    holds[f"the simulator within {agreement.NEAR:.0%}"] = all(each.agrees for each in compared)
    told: dict[str, object] = {}
    if sizes.worlds:
        print()
        told, more = simulated.report(found)
        holds |= more
    seconds = time.perf_counter() - began
    summary = {"bench": "decisions", **alone, "simulated": told, "seconds": seconds, "holds": holds}
    print(json.dumps(summary))
    return 0 if all(holds.values()) else 1


def _begin() -> None:
    gc.freeze()
    logging.getLogger("pacekeeper_operator").setLevel(logging.CRITICAL)


def _told(name: str, results: Iterator[Result]) -> Iterator[Result]:
    """The same, and how far they are."""
    began = time.perf_counter()
    for done, result in enumerate(results, start=1):
        if done % 10 == 0:
            print(f"{name}: {done}, {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
        yield result


def _scenarios(sizes: Sizes) -> list[Scenario]:
    """The longest first, so that no processor is left alone with one at the end."""
    return [
        draw.scenario(1000 * ranks + seed, ranks=ranks)
        for ranks, count in sorted(sizes.scenarios.items(), reverse=True)
        for seed in range(count)
    ]


def _calm_scenarios(sizes: Sizes) -> list[tuple[Scenario, int]]:
    often = [
        (draw.healthy(ranks, hours, ranks), LOOK_SECONDS) for ranks, hours in sorted(sizes.calm_hours.items())[::-1]
    ]
    lots = sizes.calm_days // LOT_DAYS
    return often + [(draw.healthy(10_000 + lot, 24.0 * LOT_DAYS, 4), SELDOM_SECONDS) for lot in range(lots)]


def _calm(of: tuple[Scenario, int]) -> Outcome:
    return quiet(*of)


if __name__ == "__main__":
    sys.exit(main())
