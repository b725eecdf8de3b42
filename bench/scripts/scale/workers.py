"""One job of 5,000 workers: what the operator takes while it trains, and how soon a lost worker is replaced.

A worker is lost when its pod is deleted at once, without a word; it is replaced when the spare has taken its ranks,
which its sidecar has from its plan. Spares' sidecars have a process of their own: that of the others needs some seconds
of a processor to take in what 5,000 are told of a new plan, up to 4.2 of them without looking up.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence

from .figure import Measurement
from .world import NAMESPACE, PATIENT, TAKEN_AT, ScaleTestbed, made, log_progress

NAME = "large"
IDLE_SECONDS = 30.0
SETTLE_SECONDS = 60.0
"""All are back, and polls are as long as they become."""
CALM_SECONDS = 30.0
"""After a loss: the job trains again, and all have heard so."""
APART, IN_A_ROW = 3, 5
"""Losses."""
PATIENCE_SECONDS = 120.0


def measured(quick: bool) -> Sequence[Measurement]:
    return asyncio.run(_measure(*((40, 2.0) if quick else (5000, CALM_SECONDS))))


async def _measure(workers: int, calm: float) -> list[Measurement]:
    async with made(workers + IN_A_ROW, spares_apart=True) as world:
        world.start_operator(PATIENT)
        await world.make_job(NAME, workers, spares=IN_A_ROW)
        await world.wait_until_training(workers, workers + IN_A_ROW)
        world.restart_operator({})
        await asyncio.sleep(SETTLE_SECONDS)
        share = await world.idle_share(IDLE_SECONDS)
        memory = world.memory_mb()
        log_progress(f"{workers} workers train: {share:.3f} of a core, {memory:.0f} MB")
        apart = []
        for index in range(1, APART + 1):
            apart.append(await _lose(world, index))
            await asyncio.sleep(calm)
        in_a_row = [await _lose(world, APART + index) for index in range(1, IN_A_ROW + 1)]
    return [
        Measurement(f"cores while {workers} workers of one job train", share, 0.5, "cores"),
        Measurement(f"memory with {workers} workers of one job", memory, 600.0, "MB"),
        Measurement("a lost worker to the plan that replaces it, the longest", max(apart), 3.0, "s"),
        Measurement("the same, one loss right after the other", max(in_a_row), 3.0, "s"),
    ]


async def _lose(world: ScaleTestbed, index: int) -> float:
    """Seconds; infinite where it takes longer than PATIENCE_SECONDS."""
    path = f"/api/v1/namespaces/{NAMESPACE}/pods/{NAME}-w{index}-0"
    taken, began = world.sidecars.get("taken", 0), time.monotonic()
    await world.api.call("DELETE", path, {"gracePeriodSeconds": 0})
    if not await world.wait_until(lambda told: told.get("taken", 0) > taken, PATIENCE_SECONDS):
        log_progress(f"worker {index} is not replaced within {PATIENCE_SECONDS:.0f} s: {world.sidecars}")
        return math.inf
    seconds = world.sidecars[TAKEN_AT] - began
    log_progress(f"worker {index} is replaced after {seconds:.2f} s")
    return seconds
