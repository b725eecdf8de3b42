"""One job of 5,000 workers: what the operator takes while it trains, and how soon a lost worker is replaced.

A worker is lost when its pod is deleted at once, without a word; it is replaced when the spare has taken its ranks,
which its sidecar has from its plan. That counts when it is taken: to tell of it, the one process of all sidecars needs
some seconds more, for all the others' plans.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence

from .figure import Figure
from .world import NAMESPACE, PATIENT, World, made, say

NAME = "large"
IDLE_SECONDS = 30.0
SETTLE_SECONDS = 60.0
"""All are back, and polls are as long as they become."""
PATIENCE_SECONDS = 120.0


def measured(quick: bool) -> Sequence[Figure]:
    return asyncio.run(_measure(*((40, 3) if quick else (5000, 5))))


async def _measure(workers: int, losses: int) -> list[Figure]:
    async with made(workers + losses) as world:
        world.start_operator(PATIENT)
        await world.make_job(NAME, workers, spares=losses)
        await world.wait_until_training(workers, workers + losses)
        world.restart_operator({})
        await asyncio.sleep(SETTLE_SECONDS)
        share = await world.idle_share(IDLE_SECONDS)
        memory = world.memory_mb()
        say(f"{workers} workers train: {share:.3f} of a core, {memory:.0f} MB")
        seconds = [await _lose(world, index) for index in range(1, losses + 1)]
    return [
        Figure(f"cores while {workers} workers of one job train", share, 0.5, "cores"),
        Figure(f"memory with {workers} workers of one job", memory, 600.0, "MB"),
        Figure("a lost worker to the plan that replaces it, the longest", max(seconds), 3.0, "s"),
    ]


async def _lose(world: World, index: int) -> float:
    """Seconds; infinite where it takes longer than PATIENCE_SECONDS."""
    path = f"/api/v1/namespaces/{NAMESPACE}/pods/{NAME}-w{index}-0"
    taken, began = world.sidecars.get("taken", 0), time.monotonic()
    await world.api.call("DELETE", path, {"gracePeriodSeconds": 0})
    if not await world.until(lambda told: told.get("taken", 0) > taken, PATIENCE_SECONDS):
        say(f"worker {index} is not replaced within {PATIENCE_SECONDS:.0f} s: {world.sidecars}")
        return math.inf
    seconds = world.sidecars["taken_at"] - began
    say(f"worker {index} is replaced after {seconds:.2f} s")
    return seconds
