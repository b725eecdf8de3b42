"""Two ranks on the GPU train as one process does, in each mode and across live switches."""

from __future__ import annotations

import unittest
from collections import Counter
from collections.abc import Sequence
from typing import Any

from bench.scripts.gpu import training
from bench.scripts.gpu.machine import ON_GPU
from bench.scripts.gpu.workers import run_workers

UNTIL = 16
TRAIN = f"{training.__name__}:train"


class Modes(unittest.TestCase):
    def test_sync(self) -> None:
        self.check({0: "Sync"})

    def test_edit(self) -> None:
        self.check({0: "EDiT"})

    def test_aedit(self) -> None:
        self.check({0: "AsyncEDiT"})

    def test_live_switches(self) -> None:
        self.check({0: "Sync", 3: "EDiT", 7: "AsyncEDiT", 11: "Sync"})

    def test_edit_of_many_local_steps(self) -> None:
        ranks = run_workers(TRAIN, 2, until=UNTIL, modes={0: "EDiT"}, sync_every=4)
        for rank in ranks:
            self.assert_equal(rank["parameters"], training.local_sgd(UNTIL, 2, 4))
        self.assertGreater(
            distance(training.local_sgd(UNTIL, 2, 4), training.single_process(UNTIL)), 1e-6, "too easy a test"
        )

    def test_sync_of_a_single_rank_over_nccl(self) -> None:
        """Watched: of its collectives, those that are not asynchronous give no `Work`."""
        self.check_alone(sharded=False)

    def test_fully_sharded_single_rank_over_nccl(self) -> None:
        self.check_alone(sharded=True)

    def check(self, modes: dict[int, str]) -> None:
        """A synchronisation after each step, which takes the mean: the same as whole global batches."""
        ranks = run_workers(TRAIN, 2, until=UNTIL, modes=modes)
        for rank in ranks:
            self.assertEqual(rank["modes"], list(modes.values()))
            self.assert_equal(rank["parameters"], training.single_process(UNTIL))
        used = Counter(sample for rank in ranks for sample in rank["used"])
        self.assertEqual(used, Counter(range(UNTIL * training.BATCH)))

    def check_alone(self, sharded: bool) -> None:
        (rank,) = run_workers(
            TRAIN, 1, until=UNTIL, modes={0: "Sync"}, sharded=sharded, backend="cuda:nccl,cpu:gloo" if ON_GPU else "gloo"
        )
        self.assert_equal(rank["parameters"], training.single_process(UNTIL))
        self.assertGreater(rank["loss"], 0)

    def assert_equal(self, found: Any, wanted: Sequence[Sequence[float]]) -> None:
        self.assertLess(distance(found, wanted), 1e-10)


def distance(one: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> float:
    """The largest difference of two numbers."""
    return max(abs(a - b) for p, q in zip(one, other, strict=True) for a, b in zip(p, q, strict=True))
