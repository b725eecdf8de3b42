"""Batches come to a GPU while it computes, and their memory is not used again before it has."""

from __future__ import annotations

import unittest

from bench.scripts.gpu import batches
from bench.scripts.gpu.machine import ON_GPU
from bench.scripts.gpu.workers import run_workers


@unittest.skipUnless(ON_GPU, "a CPU has its batches at once")
class Batches(unittest.TestCase):
    """In processes of their own: this one forks others, and must not have used CUDA before."""

    def test_a_copy_is_asynchronous_and_its_consumer_waits_for_it(self) -> None:
        run_workers(f"{batches.__name__}:check_copies_during_work", 1)

    def test_memory_is_reused_only_after_its_last_use(self) -> None:
        run_workers(f"{batches.__name__}:check_memory_is_kept", 1)

    def test_a_loader_gives_batches_on_the_device_from_pinned_memory(self) -> None:
        for workers in (0, 2):
            with self.subTest(workers=workers):
                run_workers(f"{batches.__name__}:check_loader_batches", 1, workers=workers)
