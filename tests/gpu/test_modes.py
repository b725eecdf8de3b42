"""Two ranks on the GPU train as one process does, in each mode and across live switches."""

from __future__ import annotations

import unittest
from collections import Counter
from collections.abc import Sequence
from typing import Any

from bench.scripts.gpu import training
from bench.scripts.gpu.machine import NCCL, ON_GPU
from bench.scripts.gpu.workers import run_workers

UNTIL = 24
TRAIN = f"{training.__name__}:train_rank"


class Modes(unittest.TestCase):
    def test_sync(self) -> None:
        ranks = self.check({0: "Sync"})
        self.assert_equal(ranks[0]["parameters"], training.train_in_one_process(UNTIL))

    def test_edit(self) -> None:
        ranks = self.check({0: "EDiT"})
        self.assertGreater(
            compute_distance(ranks[0]["parameters"], training.train_in_one_process(UNTIL)),
            1e-6,
            "the ranks train by themselves",
        )

    def test_aedit(self) -> None:
        ranks = self.check({0: "AsyncEDiT"})
        fast, slow = (len(rank["steps"]) for rank in ranks)
        self.assertGreater(fast, slow)

    def test_live_switches(self) -> None:
        self.check({0: "Sync", 4: "EDiT", 11: "AsyncEDiT", 19: "Sync"})

    def test_live_switches_over_nccl(self) -> None:
        self.check({0: "Sync", 4: "EDiT", 11: "AsyncEDiT", 19: "Sync"}, NCCL)

    def test_fully_sharded_over_nccl(self) -> None:
        """Two ranks share one replica."""
        ranks = run_workers(TRAIN, 2, until=UNTIL, modes={0: "Sync"}, sharded=True, backend=NCCL)
        for rank in ranks:
            self.assert_equal(rank["parameters"], training.train_in_one_process(UNTIL))

    def test_sync_of_a_single_rank_over_nccl(self) -> None:
        """Watched: of its collectives, those that are not asynchronous give no `Work`."""
        self.check_single_rank(sharded=False)

    def test_fully_sharded_single_rank_over_nccl(self) -> None:
        self.check_single_rank(sharded=True)

    @unittest.skipUnless(ON_GPU, "test_models has torch.compile on CPUs")
    def test_live_switches_of_a_compiled_model(self) -> None:
        self.check({0: "Sync", 4: "EDiT", 11: "AsyncEDiT", 19: "Sync"}, NCCL, compiled="default")

    @unittest.skipUnless(ON_GPU, "CUDA graphs")
    def test_cuda_graphs(self) -> None:
        self.check_single_rank(sharded=False, compiled="reduce-overhead")

    def check(self, modes: dict[int, str], backend: str = "gloo", compiled: str = "") -> list[Any]:
        ranks = run_workers(TRAIN, 2, until=UNTIL, modes=modes, backend=backend, compiled=compiled)
        expected = training.replay_in_one_process(UNTIL, [rank["steps"] for rank in ranks])
        for rank in ranks:
            self.assertEqual(rank["modes"], list(modes.values()))
            self.assert_equal(rank["parameters"], expected)
        used = Counter(sample for rank in ranks for _, samples in rank["steps"] for sample in samples)
        self.assertEqual(used, Counter(range(UNTIL * training.BATCH)), "each sample once")
        return ranks

    def check_single_rank(self, sharded: bool, compiled: str = "") -> None:
        how: dict[str, Any] = {"modes": {0: "Sync"}, "sharded": sharded, "backend": NCCL, "compiled": compiled}
        (rank,) = run_workers(TRAIN, 1, until=UNTIL, **how)
        self.assert_equal(rank["parameters"], training.train_in_one_process(UNTIL))
        self.assertGreater(rank["loss"], 0)

    def assert_equal(self, found: Sequence[Sequence[float]], expected: Sequence[Sequence[float]]) -> None:
        self.assertLess(compute_distance(found, expected), 1e-10)


def compute_distance(one: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> float:
    """The largest difference of two numbers."""
    return max(abs(a - b) for p, q in zip(one, other, strict=True) for a, b in zip(p, q, strict=True))
