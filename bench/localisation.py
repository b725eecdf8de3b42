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

from pacekeeper_analysis.behaviour.localise import Localisation
from pacekeeper_analysis.behaviour.pattern import MOST_BYTES, Answer, Owner
from pacekeeper_operator.effects import Localise
from pacekeeper_operator.runtime import Runtime
from pacekeeper_operator.services.behaviour import leisurely, localised
from tests.support.patterns import SLOW, WORK, pattern

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
    found, seconds, idle, busy = asyncio.run(_localise(answers))
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
        "culprit": found.finding.culprit == f"{SLOW[0]} on rank {CULPRIT}",
        "bytes": MOST_BYTES / 2 <= size <= 2 * MOST_BYTES,
    }
    print(json.dumps({"bench": "localisation", "ranks": RANKS, "figures": figures, "holds": holds}))
    return 0 if all(holds.values()) else 1


def _answers() -> Iterator[tuple[int, bytes]]:
    draw = np.random.default_rng(1)
    for rank in range(RANKS):
        crumbs = {
            (f"model/block_{i}.py:Block.forward_{i}", Owner.PYTHON): float(draw.uniform(1e-4, 1e-3))
            for i in range(FUNCTIONS)
        }
        slow = {SLOW: 0.1} if rank == CULPRIT else {}
        mine = pattern(rank, {**WORK, **crumbs, **slow}, STEP_SECONDS)
        yield rank, Answer(mine, pattern(rank, {**WORK, **crumbs}, STEP_SECONDS - 0.1)).to_bytes()


async def _localise(answers: dict[int, bytes]) -> tuple[Localisation, float, float, float]:
    """What is found, how long it took, and how late the loop's turns came before and meanwhile, seconds."""
    runtime = Runtime(seed=0)

    idle = await _lateness(asyncio.create_task(asyncio.sleep(2.0)))
    began = time.monotonic()
    asked = Localise("bench", RANKS)
    work = runtime.compute(lambda: localised(asked, leisurely(runtime, answers), answers))
    task = asyncio.create_task(work)
    busy = await _lateness(task)
    return task.result().localisation, time.monotonic() - began, idle, busy


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
