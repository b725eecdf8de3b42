"""One job of 5,000 workers: what the operator takes while it trains, and how soon a lost worker is replaced.

A worker is lost when its pod is deleted at once, without a shutdown; it is replaced when the spare has its ranks,
which its sidecar has from its plan. Spares' sidecars have a process of their own: that of the others needs some seconds
of a processor to process a new plan for 5,000 workers, up to 4.2 of them without other work.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence

from .measurement import Measurement
from .world import JOB_NAMESPACE, PATIENT_SETTINGS, TAKEN_AT, ScaleTestbed, create_testbed, log_progress

NAME = "large"
IDLE_SECONDS = 30.0
SETTLE_SECONDS = 60.0
"""All are back, and polls are as long as they become."""
CALM_SECONDS = 30.0
"""After a loss: the job trains again, and all workers have received the plan."""
SPACED_LOSSES, CONSECUTIVE_LOSSES = 3, 5
"""Losses."""
TIMEOUT_SECONDS = 120.0


def run_measurements(quick: bool) -> Sequence[Measurement]:
    return asyncio.run(_measure_workers(*((40, 2.0) if quick else (5000, CALM_SECONDS))))


async def _measure_workers(workers: int, calm_seconds: float) -> list[Measurement]:
    async with create_testbed(workers + CONSECUTIVE_LOSSES, spares_apart=True) as testbed:
        testbed.start_operator(PATIENT_SETTINGS)
        await testbed.make_job(NAME, workers, spares=CONSECUTIVE_LOSSES)
        await testbed.wait_until_training(workers, workers + CONSECUTIVE_LOSSES)
        testbed.restart_operator({})
        await asyncio.sleep(SETTLE_SECONDS)
        share = await testbed.measure_idle_share(IDLE_SECONDS)
        memory = testbed.read_memory_mb()
        log_progress(f"{workers} workers train: {share:.3f} of a core, {memory:.0f} MB")
        spaced_seconds = []
        for index in range(1, SPACED_LOSSES + 1):
            spaced_seconds.append(await _lose_worker(testbed, index))
            await asyncio.sleep(calm_seconds)
        consecutive_seconds = [
            await _lose_worker(testbed, SPACED_LOSSES + index) for index in range(1, CONSECUTIVE_LOSSES + 1)
        ]
    return [
        Measurement(f"cores while {workers} workers of one job train", share, 0.5, "cores"),
        Measurement(f"memory with {workers} workers of one job", memory, 600.0, "MB"),
        Measurement("a lost worker to the plan that replaces it, the longest", max(spaced_seconds), 3.0, "s"),
        Measurement("the same, one loss right after the other", max(consecutive_seconds), 3.0, "s"),
    ]


async def _lose_worker(testbed: ScaleTestbed, index: int) -> float:
    """Seconds; infinite where it takes longer than TIMEOUT_SECONDS."""
    path = f"/api/v1/namespaces/{JOB_NAMESPACE}/pods/{NAME}-w{index}-0"
    taken_before, start = testbed.sidecars.get("taken", 0), time.monotonic()
    await testbed.api.call("DELETE", path, {"gracePeriodSeconds": 0})
    if not await testbed.wait_until(lambda counts: counts.get("taken", 0) > taken_before, TIMEOUT_SECONDS):
        log_progress(f"worker {index} is not replaced within {TIMEOUT_SECONDS:.0f} s: {testbed.sidecars}")
        return math.inf
    seconds = testbed.sidecars[TAKEN_AT] - start
    log_progress(f"worker {index} is replaced after {seconds:.2f} s")
    return seconds
