"""When passes over jobs begin: one at a time, with rests for all other work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ...async_runtime import OperatorRuntime
from ...state.network import JobName
from .node_priority import NodePriorityGate

LONG_PASS_SECONDS, LONG_PASS_REST_FACTOR = 0.05, 4.0
"""A pass longer than the first is followed by a rest of the second times its duration.

Such passes are of jobs with thousands of workers. The same rest follows each pass while hundreds of nodes wait to be
held. During the rest, the endpoint serves what all workers report at once after a restart.
"""
MAX_PASS_REST_SECONDS = 1.0
LEADERSHIP_POLL_SECONDS = 0.25
"""Seconds between two checks whether the Lease is held again."""
MAX_CONCURRENT_POD_CREATIONS = 16
"""Concurrent pod creations of all jobs: a slow webhook leaves half of the calls to everything else."""


@dataclass
class PassScheduler:
    """Lets passes begin, the urgent ones soon."""

    runtime: OperatorRuntime
    priority_gate: NodePriorityGate
    is_leader: Callable[[], bool]
    active_jobs: int = 0  # jobs in progress, as last counted
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a pass waits for its turn."""
    jobs_with_new_gpu_errors: set[JobName] = field(default_factory=set)
    """Jobs that have not evaluated the newest GPU errors of their nodes yet."""
    jobs_with_lost_worker: set[JobName] = field(default_factory=set)
    """Jobs that have not evaluated a lost worker yet."""
    compute_seconds: float = 0.0  # seconds that passes blocked the event loop since the last one began
    creation_slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_CONCURRENT_POD_CREATIONS))

    def get_interval_seconds(self, per_second: float, min_seconds: float) -> float:
        """Return the seconds between two turns of an active job, so that all jobs together have `per_second` turns."""
        return max(min_seconds, self.active_jobs / per_second)

    async def wait_for_pass(self) -> None:
        """Return when a pass may begin.

        Passes run one at a time, and each is followed by a rest of the same duration for all other work. The rest is
        four times as long after a long pass, unless a worker was lost, and while hundreds of nodes wait to be held. It
        is never extended while some job has not evaluated new GPU errors. Without rests, a thousand jobs that wake
        together would block polls and the Lease for seconds.

        Without the Lease no pass begins, so that passes need not check it themselves.
        """
        async with self.lock:
            elapsed, self.compute_seconds = self.compute_seconds, 0.0
            is_long = elapsed > LONG_PASS_SECONDS and not self.jobs_with_lost_worker
            needs_long_rest = (is_long or self.priority_gate.is_closed) and not self.jobs_with_new_gpu_errors
            await self.runtime.sleep(
                min(MAX_PASS_REST_SECONDS, elapsed * (LONG_PASS_REST_FACTOR if needs_long_rest else 1.0))
            )
            while not self.is_leader():
                await self.runtime.sleep(LEADERSHIP_POLL_SECONDS)

    def mark_evaluated(self, job: JobName) -> None:
        """Record that the job's pass considers everything known by now."""
        self.jobs_with_new_gpu_errors.discard(job)
        self.jobs_with_lost_worker.discard(job)

    @contextmanager
    def measure_compute(self) -> Iterator[None]:
        """Measure a part of a pass that does not await."""
        began = self.runtime.monotonic()
        try:
            yield
        finally:
            self.compute_seconds += self.runtime.monotonic() - began
