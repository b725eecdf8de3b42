"""How well the operator decides, in two parts.

*Decisions only*, on a coarse clock: slowdowns whose kind, depth and length are drawn (`scripts/decisions/draw.py`),
and the operator's own passes over what is observed of the job. For comparison: other policies, and a clairvoyant by
dynamic programming, the lower bound of the cost. And days without faults.

*In the simulator* (`scripts/decisions/simulated.py`): the whole operator, four ranks, one of them slow. Some of these
cases are played on the coarse clock as well, which shows how realistic that is.

QUICK=1: few scenarios of each, a smoke test. SEEDS=4109-4158,64030: these scenarios on the
coarse clock only; a seed is a thousand times the ranks (4, 64 or 1024), and a number below a thousand. The last line
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

from bench.scripts.decisions import agreement, draw, outcome_statistics, simulated
from bench.scripts.decisions.draw import Scenario
from bench.scripts.decisions.ours import PassIntervals
from bench.scripts.decisions.outcome import Outcome, run_calm_scenario, run_policies

Result = TypeVar("Result")


@dataclass(frozen=True)
class Sizes:
    """How much is played."""

    seeds: Sequence[int]
    """Of scenarios: a thousand times the ranks, and a number below a thousand."""
    calm_hours: Mapping[int, float] = field(default_factory=dict)
    """By ranks, sampled as often as usual."""
    calm_days: int = 0
    """Of four ranks, sampled for a minute and a half twice an hour, in lots of DAYS_PER_LOT."""
    worlds: int | None = 0
    """Of the simulator, for each of its cases; 0: only those that are compared, in one; None: none."""


FULL = Sizes(
    (*range(1_024_000, 1_024_020), *range(64_000, 64_120), *range(4000, 4240)),
    {1024: 1.0, 64: 100.0, 4: 100.0},
    1000,
    simulated.SEED_COUNT,
)
QUICK = Sizes((*range(64_000, 64_005), *range(4000, 4014)), {64: 0.5, 4: 2.0})
DAYS_PER_LOT = 10
FREQUENT_PASSES = PassIntervals(every=6)
"""At a job in which nothing happens: a window of steps is hardly longer."""
RARE_PASSES = PassIntervals(every=12, row=8, rest=1710)
"""Enough in a row to distinguish ranks that are slightly slow in each window from chance
(`observe.persistent_slowness`)."""


def main() -> int:
    sizes, start = read_sizes(os.environ), time.perf_counter()
    with ProcessPoolExecutor(initializer=_init_worker) as pool:
        outcomes = list(_report_progress("scenarios", pool.map(run_policies, _draw_scenarios(sizes))))
        print(
            "\n".join(
                [*outcome_statistics.format_table(outcomes), "\nworst:", *outcome_statistics.format_worst(outcomes)]
            ),
            flush=True,
        )
        calm_outcomes = list(
            _report_progress("days without a fault", pool.map(_run_calm_scenario, _draw_calm_scenarios(sizes)))
        )
        cases = [] if sizes.worlds is None else simulated.list_cases(sizes.worlds)
        played = list(_report_progress("simulated", pool.map(simulated.play_case, cases)))
    summary_of_scenarios = outcome_statistics.build_summary(outcomes, calm_outcomes)
    holds = dict(summary_of_scenarios.pop("holds"))  # type: ignore[call-overload]  # it is a dictionary
    simulated_metrics: dict[str, object] = {}
    if results := simulated.build_results(played):
        comparisons = agreement.compare_results(results)
        print("\nin the simulator, and on the coarse clock:")
        print("\n".join(comparison.description for comparison in comparisons))
        holds[f"the simulator within {agreement.MAX_DIFFERENCE:.0%}"] = all(
            comparison.agrees for comparison in comparisons
        )
    if sizes.worlds:
        print()
        simulated_metrics, simulated_holds = simulated.print_report(results)
        holds |= simulated_holds
    seconds = time.perf_counter() - start
    summary = {
        "bench": "decisions",
        **summary_of_scenarios,
        "simulated": simulated_metrics,
        "seconds": seconds,
        "holds": holds,
    }
    print(json.dumps(summary))
    return 0 if all(holds.values()) else 1


def read_sizes(environment: Mapping[str, str]) -> Sizes:
    if "SEEDS" in environment:
        return Sizes(_parse_seeds(environment["SEEDS"]), worlds=None)
    return QUICK if environment.get("QUICK") else FULL


def _parse_seeds(text: str) -> list[int]:
    ranges = [part.partition("-") for part in text.split(",")]
    try:
        seeds = [seed for first, _, last in ranges for seed in range(int(first), int(last or first) + 1)]
    except ValueError:
        seeds = []
    if not seeds or not {seed // 1000 for seed in seeds} <= set(FULL.calm_hours):
        sys.exit(
            f"SEEDS={text}: each is a thousand times 4, 64 or 1024, and a number below a thousand: 4109-4158,64030"
        )
    return seeds


def _init_worker() -> None:
    gc.freeze()
    logging.getLogger("pacekeeper_operator").setLevel(logging.CRITICAL)


def _report_progress(name: str, results: Iterator[Result]) -> Iterator[Result]:
    """The same, and how far they are."""
    start = time.perf_counter()
    for count, result in enumerate(results, start=1):
        if count % 10 == 0:
            print(f"{name}: {count}, {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
        yield result


def _draw_scenarios(sizes: Sizes) -> list[Scenario]:
    """The longest first, so that no processor has a long one at the end."""
    return [draw.draw_scenario(seed, ranks=seed // 1000) for seed in sorted(sizes.seeds, reverse=True)]


def _draw_calm_scenarios(sizes: Sizes) -> list[tuple[Scenario, PassIntervals]]:
    frequent = [
        (draw.draw_healthy_scenario(ranks, hours, ranks), FREQUENT_PASSES) for ranks, hours in sizes.calm_hours.items()
    ]
    lot_count = sizes.calm_days // DAYS_PER_LOT
    return frequent + [
        (draw.draw_healthy_scenario(10_000 + lot, 24.0 * DAYS_PER_LOT, 4), RARE_PASSES) for lot in range(lot_count)
    ]


def _run_calm_scenario(case: tuple[Scenario, PassIntervals]) -> Outcome:
    return run_calm_scenario(*case)


if __name__ == "__main__":
    sys.exit(main())
