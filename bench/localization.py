"""How long, and with how much memory, the patterns of 10,000 ranks are localized; and how polls fare at the same time.

Everything as in the operator: in a thread next to the loop that answers polls. 1,000 ranks with QUICK=1.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
import time
from collections.abc import Iterator

import numpy as np

from pacekeeper_analysis.profiling.localize import Localization
from pacekeeper_analysis.profiling.pattern import MAX_RANK_PATTERN_BYTES, ProfileAnswer, TimeOwner
from pacekeeper_operator.async_runtime import OperatorRuntime
from pacekeeper_operator.decide.effects import LocalizeProfile
from pacekeeper_operator.runtime.profiling import compute_localized_profile, yield_between_ranks
from testing.training.patterns import HEALTHY_WORK, SLOW_FUNCTION, build_pattern

RANKS = 1_000 if os.environ.get("QUICK") == "1" else 10_000
CULPRIT = RANKS // 3
FUNCTIONS = 110
"""Functions of a rank in addition to the named ones: its pattern is close to the largest size allowed."""
STEP_SECONDS = 0.6
TICK_SECONDS = 0.01
"""Requested seconds between two turns of the loop."""
MAX_SECONDS, MAX_MEGABYTES, MAX_LATE_SECONDS = 10.0, 500.0, 0.1


def main() -> int:
    start_mb = _read_resident_mb()
    answers = dict(_build_answers())
    size = max(map(len, answers.values()))
    print(f"{RANKS} answers of {size} bytes at most", file=sys.stderr, flush=True)
    localization, seconds, idle_lateness, busy_lateness = asyncio.run(_localize_answers(answers))
    megabytes = _read_resident_mb() - start_mb
    metrics = {
        "seconds": seconds,
        "megabytes": megabytes,
        "tick_late_p99_idle": idle_lateness,
        "tick_late_p99": busy_lateness,
        "bytes_a_rank": size,
        "culprit": localization.finding.culprit,
    }
    holds = {
        "seconds": seconds <= MAX_SECONDS,
        "megabytes": megabytes <= MAX_MEGABYTES,
        "polls": busy_lateness <= MAX_LATE_SECONDS,
        "culprit": localization.finding.culprit == f"{SLOW_FUNCTION[0]} on rank {CULPRIT}",
        "bytes": MAX_RANK_PATTERN_BYTES / 2 <= size <= 2 * MAX_RANK_PATTERN_BYTES,
    }
    print(json.dumps({"bench": "localization", "ranks": RANKS, "figures": metrics, "holds": holds}))
    return 0 if all(holds.values()) else 1


def _build_answers() -> Iterator[tuple[int, bytes]]:
    rng = np.random.default_rng(1)
    for rank in range(RANKS):
        small_functions = {
            (f"model/block_{i}.py:Block.forward_{i}", TimeOwner.PYTHON): float(rng.uniform(1e-4, 1e-3))
            for i in range(FUNCTIONS)
        }
        slow_function = {SLOW_FUNCTION: 0.1} if rank == CULPRIT else {}
        pattern = build_pattern(rank, {**HEALTHY_WORK, **small_functions, **slow_function}, STEP_SECONDS)
        yield (
            rank,
            ProfileAnswer(
                pattern, build_pattern(rank, {**HEALTHY_WORK, **small_functions}, STEP_SECONDS - 0.1)
            ).to_bytes(),
        )


async def _localize_answers(answers: dict[int, bytes]) -> tuple[Localization, float, float, float]:
    """What is found, how long it took, and how late the loop's turns came before and during it, seconds."""
    runtime = OperatorRuntime(seed=0)

    idle_lateness = await _measure_lateness(asyncio.create_task(asyncio.sleep(2.0)))
    start = time.monotonic()
    effect = LocalizeProfile("bench", RANKS)
    localizing = runtime.compute_in_thread(
        lambda: compute_localized_profile(effect, yield_between_ranks(runtime, answers), answers)
    )
    task = asyncio.create_task(localizing)
    busy_lateness = await _measure_lateness(task)
    return task.result().localization, time.monotonic() - start, idle_lateness, busy_lateness


async def _measure_lateness(work: asyncio.Task[object]) -> float:
    """Of the loop's turns until `work` is done, the 99th percentile."""
    lateness = [0.0]
    while not work.done():
        due = time.monotonic() + TICK_SECONDS
        await asyncio.sleep(TICK_SECONDS)
        lateness.append(time.monotonic() - due)
    return float(np.quantile(lateness, 0.99))


def _read_resident_mb() -> float:
    """MB, at most so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000


if __name__ == "__main__":
    sys.exit(main())
