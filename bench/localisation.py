"""How long, and with how much memory, the patterns of 10,000 ranks are localised; and how polls fare meanwhile.

Everything as in the operator: in a thread beside the loop that answers polls. 1,000 ranks with QUICK=1.
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

from pacekeeper_analysis.behaviour.localise import Localization
from pacekeeper_analysis.behaviour.pattern import MAX_RANK_PATTERN_BYTES, ProfileAnswer, TimeOwner
from pacekeeper_operator.effects import LocalizeProfile
from pacekeeper_operator.runtime import OperatorRuntime
from pacekeeper_operator.services.behaviour import yield_between_ranks, compute_localized_profile
from tests.support.patterns import SLOW_FUNCTION, HEALTHY_WORK, build_pattern

RANKS = 1_000 if os.environ.get("QUICK") == "1" else 10_000
CULPRIT = RANKS // 3
FUNCTIONS = 110
"""Of a rank, beside those with names of their own: its pattern is close to what it may be."""
STEP_SECONDS = 0.6
TICK = 0.01
"""Seconds between two turns of the loop that are asked for."""
MOST_SECONDS, MOST_MEGABYTES, MOST_LATE = 10.0, 500.0, 0.1


def main() -> int:
    began = _resident()
    answers = dict(_answers())
    size = max(map(len, answers.values()))
    print(f"{RANKS} answers of {size} bytes at most", file=sys.stderr, flush=True)
    found, seconds, idle, busy = asyncio.run(_localize_answers(answers))
    megabytes = _resident() - began
    figures = {
        "seconds": seconds,
        "megabytes": megabytes,
        "tick_late_p99_idle": idle,
        "tick_late_p99": busy,
        "bytes_a_rank": size,
        "culprit": found.finding.culprit,
    }
    holds = {
        "seconds": seconds <= MOST_SECONDS,
        "megabytes": megabytes <= MOST_MEGABYTES,
        "polls": busy <= MOST_LATE,
        "culprit": found.finding.culprit == f"{SLOW_FUNCTION[0]} on rank {CULPRIT}",
        "bytes": MAX_RANK_PATTERN_BYTES / 2 <= size <= 2 * MAX_RANK_PATTERN_BYTES,
    }
    print(json.dumps({"bench": "localisation", "ranks": RANKS, "figures": figures, "holds": holds}))
    return 0 if all(holds.values()) else 1


def _answers() -> Iterator[tuple[int, bytes]]:
    draw = np.random.default_rng(1)
    for rank in range(RANKS):
        crumbs = {
            (f"model/block_{i}.py:Block.forward_{i}", TimeOwner.PYTHON): float(draw.uniform(1e-4, 1e-3))
            for i in range(FUNCTIONS)
        }
        slow = {SLOW_FUNCTION: 0.1} if rank == CULPRIT else {}
        mine = build_pattern(rank, {**HEALTHY_WORK, **crumbs, **slow}, STEP_SECONDS)
        yield rank, ProfileAnswer(mine, build_pattern(rank, {**HEALTHY_WORK, **crumbs}, STEP_SECONDS - 0.1)).to_bytes()


async def _localize_answers(answers: dict[int, bytes]) -> tuple[Localization, float, float, float]:
    """What is found, how long it took, and how late the loop's turns came before and meanwhile, seconds."""
    runtime = OperatorRuntime(seed=0)

    idle = await _lateness(asyncio.create_task(asyncio.sleep(2.0)))
    began = time.monotonic()
    asked = LocalizeProfile("bench", RANKS)
    work = runtime.compute_in_thread(lambda: compute_localized_profile(asked, yield_between_ranks(runtime, answers), answers))
    task = asyncio.create_task(work)
    busy = await _lateness(task)
    return task.result().localization, time.monotonic() - began, idle, busy


async def _lateness(work: asyncio.Task[object]) -> float:
    """Of the loop's turns until `work` is done, the 99th percentile."""
    late = [0.0]
    while not work.done():
        due = time.monotonic() + TICK
        await asyncio.sleep(TICK)
        late.append(time.monotonic() - due)
    return float(np.quantile(late, 0.99))


def _resident() -> float:
    """MB, at most so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000


if __name__ == "__main__":
    sys.exit(main())
