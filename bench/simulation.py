"""Disasters by the thousand: the real operator in simulated clusters, 10,000 of them (or as many as an argument
gives), each of ten minutes with faults that its seed draws. Goals: every invariant holds, two runs per second and core.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter

from simulation import batch, coverage
from simulation.generator import generate_schedule

SCHEDULES = 10_000
MIN_RATE = 2.0
"""Schedules a second and core."""


def main(schedules: int = SCHEDULES) -> int:
    """Prints what breaks as it comes, and what was reached how often; the last line of the output is the summary."""
    cores, start = os.cpu_count() or 1, time.perf_counter()
    reached_counts: Counter[str] = Counter()
    violations: Counter[str] = Counter()
    broken: list[int] = []
    simulated = 0.0
    for count, outcome in enumerate(batch.run_schedules(map(generate_schedule, range(schedules)), cores), start=1):
        reached_counts.update(outcome.coverage)
        simulated += outcome.virtual_seconds
        if outcome.violations:
            broken.append(outcome.seed)
            violations.update(outcome.broken_rules)
            print(f"seed {outcome.seed}: {outcome.violations[0]}", file=sys.stderr, flush=True)
        if count % 500 == 0:
            print(f"{count} of {schedules}, {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    seconds = time.perf_counter() - start
    rate = schedules / seconds / cores
    targets = coverage.list_coverage_targets()
    for name in sorted(targets):
        print(f"{reached_counts[name]:7}  {name}")
    summary = {
        "bench": "simulation",
        "schedules": schedules,
        "simulated_hours": simulated / 3600,
        "a_second_and_core": rate,
        "violations": violations,
        "broken_seeds": sorted(broken)[:50],
        "reached": sum(1 for name in targets if reached_counts[name]),
        "to_be_reached": len(targets),
        "never_reached": sorted(name for name in targets if not reached_counts[name]),
        "seconds": seconds,
        "holds": {"every invariant": not broken, f"{MIN_RATE:g} schedules a second and core": rate >= MIN_RATE},
    }
    print(json.dumps(summary))
    return 0 if all(summary["holds"].values()) else 1  # type: ignore[attr-defined]  # it is a dictionary


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
