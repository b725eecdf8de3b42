"""A synchronisation's all-reduces go on while the GPU computes the forward pass."""

from __future__ import annotations

import unittest
from typing import Any

from bench.scripts.gpu import measures
from bench.scripts.gpu.machine import ON_GPU
from bench.scripts.gpu.workers import run_workers


class Overlap(unittest.TestCase):
    def test_at_least_half_of_a_synchronization_is_hidden(self) -> None:
        size: dict[str, Any] = (
            {"blocks": 8, "width": 2048, "repeats": 5} if ON_GPU else {"blocks": 2, "width": 64, "repeats": 1}
        )
        for rank in run_workers(f"{measures.__name__}:measure_overlap", 2, **size):
            whole, exposed = rank["off"] - rank["alone"], rank["on"] - rank["alone"]
            if ON_GPU:
                self.assertGreater(whole, 0)
                self.assertGreater(1 - exposed / whole, 0.5, rank)
