"""What is recorded of a rank's steps is what its GPU did, while the host has long gone on."""

from __future__ import annotations

import statistics
import unittest

from bench.scripts.gpu import measures
from bench.scripts.gpu.machine import NCCL, ON_GPU
from bench.scripts.gpu.workers import run_workers

STEPS = f"{measures.__name__}:measure_steps"
COUNT = 20 if ON_GPU else 4
TOLERANCE = 0.03


class Times(unittest.TestCase):
    def test_own_work_of_a_rank_that_no_rank_waits_for(self) -> None:
        own = 0.1
        (found,) = run_workers(STEPS, 1, own_seconds=[own], count=COUNT, backend=NCCL)
        self.assertEqual(len(found["own"]), COUNT)
        if ON_GPU:
            self.assert_near(statistics.median(found["own"]), own)
            self.assert_near(statistics.median(found["step"]), own)
            self.assert_near(found["mean"], own)

    def test_own_work_and_waits_of_a_slow_rank_and_its_peer(self) -> None:
        """Two processes take turns on the GPU, by milliseconds: hence the long steps."""
        fast, slow = (0.4, 0.6) if ON_GPU else (0.02, 0.03)
        ranks = run_workers(STEPS, 2, own_seconds=[fast, slow], count=COUNT)
        if not ON_GPU:
            return
        for rank, own in zip(ranks, (fast, slow), strict=True):
            self.assert_near(statistics.median(rank["step"]), slow)
            self.assert_near(statistics.median(rank["own"]), own)
            waits = [step - its for step, its in zip(rank["step"], rank["own"], strict=True)]
            self.assertAlmostEqual(statistics.median(waits), slow - own, delta=TOLERANCE * slow)

    def test_the_host_runs_ahead_by_two_steps_at_most(self) -> None:
        """So it is kept waiting at the end of steps, and not within them."""
        own = 0.05
        (found,) = run_workers(STEPS, 1, own_seconds=[own], count=COUNT, backend=NCCL)
        if ON_GPU:
            self.assertLess(statistics.median(found["host"]), own / 2, "a step's launches wait for the GPU")
            self.assert_near(found["mean"], own)

    def assert_near(self, found: float, expected: float) -> None:
        self.assertAlmostEqual(found, expected, delta=TOLERANCE * expected)
