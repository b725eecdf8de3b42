"""What the estimator in shadow adds to a pass over a healthy job, by the real operator without a cluster.

Two jobs of the same size take turns: one with the estimator, and one for which it is left out. Seconds are of the
processor. Each worker reports every three seconds, as its sidecar does, and a pass follows every two.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import mean, median
from unittest.mock import patch

from pacekeeper_operator.decide.stragglers import shadow
from pacekeeper_operator.observe import rank_metrics
from pacekeeper_operator.runtime.job_context import JobContext

from .bare import Jobs
from .measurement import Measurement
from .passes import configure_operator_gc, log_progress

SIZES = ((4, 1), (8, 8), (64, 8))
"""Workers, and ranks of each."""
PAIRS, QUICK_PAIRS = 300, 30
MAX_RATIO = 1.1
"""Goal for a pass with the estimator over one without it."""


def run_measurements(quick: bool) -> Sequence[Measurement]:
    with configure_operator_gc():
        return [asyncio.run(_measure_ratio(*size, QUICK_PAIRS if quick else PAIRS)) for size in SIZES]


async def _measure_ratio(workers: int, ranks_each: int, pairs: int) -> Measurement:
    """Compare passes over a job of this size. Raise RuntimeError if the estimator has not seen it."""
    ranks = workers * ranks_each
    log_progress(f"two jobs of {ranks} ranks start")
    estimated, plain = _IdleJob(), _IdleJob()
    await estimated.start(workers, ranks_each)
    with _leave_estimator_out():
        await plain.start(workers, ranks_each)
    memory = estimated.context.cache.estimator
    if memory is None or not memory.estimator.knows_noise or plain.context.cache.estimator is not None:
        raise RuntimeError(f"the estimator has not taken part as it should: {memory}")
    with_seconds, without_seconds = list[float](), list[float]()
    for pair in range(pairs):
        for is_estimated in ((True, False), (False, True))[pair % 2]:
            if is_estimated:
                with_seconds.append(await estimated.run_turn(pair))
            else:
                with _leave_estimator_out():
                    without_seconds.append(await plain.run_turn(pair))
    with_ms, without_ms = median(with_seconds) * 1e3, median(without_seconds) * 1e3
    print(
        json.dumps(
            {
                "ranks": ranks,
                "with_ms": {"median": round(with_ms, 3), "mean": round(mean(with_seconds) * 1e3, 3)},
                "without_ms": {"median": round(without_ms, 3), "mean": round(mean(without_seconds) * 1e3, 3)},
            }
        ),
        file=sys.stderr,
    )
    note = f"{without_ms:.2f} and {with_ms:.2f} ms"
    return Measurement(
        f"pass of {ranks} ranks with the estimator over one without", with_ms / without_ms, MAX_RATIO, "×", note
    )


class _IdleJob:
    """A job that trains, with an operator of its own."""

    context: JobContext

    def __init__(self) -> None:
        self._jobs = Jobs()

    async def start(self, workers: int, ranks_each: int) -> None:
        self.context = await self._jobs.start("idle", workers, ranks_each)
        for turn in range(10):
            await self.run_turn(turn)
            if self.context.cache.requests.evidence is not None:
                self._jobs.answer_request(self.context)

    async def run_turn(self, turn: int) -> float:
        """Two thirds of the workers report, then a pass runs; its seconds."""
        self._jobs.clock.passed += 2.0
        await self._jobs.poll(self.context, skipped=slice(turn % 3, None, 3))
        return await self._jobs.run_pass(self.context)


@contextmanager
def _leave_estimator_out() -> Iterator[None]:
    with (
        patch.object(shadow, "advance_estimate", lambda memory, *_: memory),
        patch.object(rank_metrics, "build_means", lambda *_: None),
    ):
        yield
