"""NCCL itself loads our plugin, and the transfers that it reports are what ranks have exchanged."""

from __future__ import annotations

import unittest
from typing import Any

from bench.scripts.gpu import transfers
from bench.scripts.gpu.machine import ON_GPU
from bench.scripts.gpu.workers import run_workers
from pacekeeper.launcher.network.nccl_plugin import PROFILER_PLUGIN_PATH, explain_unusable_plugin
from pacekeeper_rank.records import Collective

NBYTES, COUNT = 16 << 20, 20


@unittest.skipUnless(ON_GPU, "it takes NCCL")
class Transport(unittest.TestCase):
    def setUp(self) -> None:
        self.assertEqual(explain_unusable_plugin(PROFILER_PLUGIN_PATH), "")

    def test_two_ranks_report_what_they_have_sent_to_each_other(self) -> None:
        ranks = self.run_all_reduces(2)
        for rank, found in enumerate(ranks):
            self.assertEqual(found["flows"].keys(), {str(1 - rank)})
            self.assert_sent(found["flows"][str(1 - rank)], NBYTES)

    def test_three_ranks_in_a_ring_report_sends_to_the_next_rank(self) -> None:
        ranks = self.run_all_reduces(3)
        for rank, found in enumerate(ranks):
            after, before = str((rank + 1) % 3), str((rank + 2) % 3)
            self.assertEqual(found["flows"].keys(), {after, before})
            self.assert_sent(found["flows"][after], NBYTES * 4 / 3)
            self.assertEqual(found["flows"][before], 0, "the other end reports what is received")

    def run_all_reduces(self, size: int) -> list[Any]:
        ranks = run_workers(f"{transfers.__name__}:trace_all_reduces", size, nbytes=NBYTES, count=COUNT)
        (identity,) = {found["communicators"][0][0] for found in ranks}  # the same on all its ranks
        for rank, found in enumerate(ranks):
            self.assertEqual(found["communicators"], [[identity, size, rank]])
            self.assertEqual(found["collectives"], [Collective.ALL_REDUCE])
            self.assertGreater(found["waits"]["network"], 0)
            self.assertLess(sum(found["waits"].values()), found["seconds"])
        return ranks

    def assert_sent(self, nbytes: int, of_each: float) -> None:
        """Exact where steps were measured, which begins with the second of them."""
        self.assertAlmostEqual(nbytes / (of_each * (COUNT - 1)), 1, delta=0.001)
