"""NVML reports a healthy GPU under load as healthy to a launcher."""

from __future__ import annotations

import unittest

from bench.scripts.gpu import health
from bench.scripts.gpu.machine import ON_GPU
from bench.scripts.gpu.workers import run_workers


@unittest.skipUnless(ON_GPU, "there is no GPU to query")
class Health(unittest.TestCase):
    def test_a_healthy_gpu_under_load_reports_no_fault(self) -> None:
        (found,) = run_workers(f"{health.__name__}:watch_health", 1, seconds=12.0)
        self.assertEqual(found["events"], [])
        gpu = found["health"][0]
        self.assertRegex(gpu["gpu"], "^(GPU|MIG)-")
        self.assertEqual((gpu["signs"], gpu["memory_errors"]), ([], 0))
        self.assertGreater(gpu["pcie_width"], 0)
        self.assertTrue(10 < gpu["temperature"] < 100, gpu)
        self.assertTrue(10 < gpu["power"] < 2000, gpu)
        self.assertTrue(0.3 < gpu["clock_share"] <= 1.05, gpu)
