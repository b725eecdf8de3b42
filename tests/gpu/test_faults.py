"""Ranks that die or hang with the GPU at work: under real launchers, one for each rank."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from bench.scripts.gpu.machine import NCCL, ON_GPU
from bench.scripts.gpu.recovery import STAGES, measure_recovery
from bench.scripts.gpu.workers import build_host_environment
from pacekeeper_analysis.failures.hang import HangKind, diagnose_hang
from pacekeeper_analysis.protocol.plan import Plan
from pacekeeper_analysis.protocol.reports import FaultKind, FaultReport
from testing.training.launchers import LauncherTeam, create_team

PATIENCE_SECONDS = 180.0
PORT = 29571

CAPTURING = """
import json, threading
import torch
import torch.distributed as dist
from pacekeeper import torch_internals
from pacekeeper_rank import torch_internals as recorded
from pacekeeper_rank.collectives.flight_recorder import query_flight_recorder

gpu = torch.device("cuda", 0)
torch.cuda.set_device(gpu)
dist.init_process_group("nccl", store=torch_internals.HashStore(), rank=0, world_size=1, device_id=gpu)
x, y, side, graph = torch.ones(1024, device=gpu), torch.ones(8, device=gpu), torch.cuda.Stream(), torch.cuda.CUDAGraph()
dist.all_reduce(x)
y *= 1  # CUDA loads a kernel when it is used first, and waits for the GPU then
torch.cuda.synchronize()
assert recorded.list_used_gpus() == [0], recorded.list_used_gpus()
records = []
torch.cuda._sleep(10_000_000_000)  # clock ticks
work = dist.all_reduce(x, async_op=True)
with torch.cuda.stream(side):
    graph.capture_begin()
    y *= 3
    thread = threading.Thread(target=lambda: records.append(query_flight_recorder()))
    thread.start()
    thread.join()
    graph.capture_end()
assert [entry["state"] for entry in json.loads(records[0])["entries"]] == ["scheduled"], records
work.wait()
graph.replay()
torch.cuda.synchronize()
assert y.tolist() == [3.0] * 8, y
dist.destroy_process_group()
"""
"""A rank captures a CUDA graph while its collective waits for a kernel, and the flight recorder is read."""


class FlightRecorder(unittest.TestCase):
    def test_health_is_read_while_a_graph_is_captured(self) -> None:
        if not ON_GPU:
            self.skipTest("it takes NCCL")
        recorder = {"TORCH_FR_BUFFER_SIZE": "100", "TORCH_NCCL_ENABLE_TIMING": "1"}
        subprocess.run([sys.executable, "-c", CAPTURING], env=os.environ | recorder, check=True, timeout=120)


class Faults(unittest.TestCase):
    def test_a_rank_killed_within_a_kernel_trains_again(self) -> None:
        found = measure_recovery()
        print(found, flush=True)
        self.assertEqual(tuple(found.parts), STAGES)
        self.assertLessEqual(found.lost_steps, 2)
        self.assertLess(found.seconds, 30.0)

    def test_a_rank_that_waits_for_its_endless_kernel_is_named(self) -> None:
        """It reads its loss, so it never comes to the collective that its peer waits in."""
        self.check_hang("gloo", reads_loss=True, kind=HangKind.NEVER_ENTERED)

    def test_a_rank_whose_endless_kernel_holds_up_its_collective_is_named(self) -> None:
        """Both have entered it: NCCL's flight recorder has which of them has not started it."""
        if not ON_GPU:
            self.skipTest("it takes NCCL")
        stalls = self.check_hang(NCCL, reads_loss=False, kind=HangKind.KERNEL)
        self.assertIn("1 communicator: all ranks alike", {fault.ras for fault in stalls}, "RAS has been queried")
        for fault in stalls:
            peer = {"a": 1, "b": 0}[fault.worker]
            self.assertRegex(fault.transfers, rf"(sends to|receives from) rank {peer} in a communicator of 2")

    def check_hang(self, backend: str, *, reads_loss: bool, kind: HangKind) -> list[FaultReport]:
        """Rank 1 hangs: it is named, ended, and the job trains on. Returns what the launchers reported."""
        fault = {"rank": 1, "round": 1, "step": 9, "reads_loss": reads_loss}
        script = Path(__file__).with_name("hanging.py")
        # Not a TemporaryDirectory: ranks are forks of this process, and one that ends in order would remove it.
        folder = Path(tempfile.mkdtemp(prefix="pacekeeper-gpu-"))
        self.addCleanup(shutil.rmtree, folder)
        settings = {} if ON_GPU else {"hang_deadline": 3.0}  # the stand-in sleeps where a GPU is waited for
        with create_team(folder, steps=12, faults=[fault], script=script, **settings) as one:
            one.environment |= {"BACKEND": backend, "GLOO_SOCKET_IFNAME": "lo"}
            for rank, name in enumerate("ab"):
                one.environment |= build_host_environment(rank)
                one.start(name)
            members = one.build_members(a=[0], b=[1])
            one.give_plan(Plan(version=1, membership=1, members=members, store_port=PORT, restarts=5))
            one.wait_for(lambda: "round 1 kernel" in one.read_diary(1), "the kernel", PATIENCE_SECONDS)
            found = one.wait_for(lambda: diagnose_hang(list_stalls(one), world_size=2), "a verdict", PATIENCE_SECONDS)
            self.assertEqual(found.ranks, (1,), found)
            self.assertEqual(found.kind, kind, found)
            stalls = list_stalls(one)
            one.give_plan(Plan(version=2, membership=2, round=2, members=members, store_port=PORT, restarts=5))
            one.wait_for(lambda: "round 2 end" in one.read_diary(0), "round 2 trains to the end", PATIENCE_SECONDS)
        return stalls


def list_stalls(one: LauncherTeam) -> list[FaultReport]:
    return [fault for worker in one.workers.values() for fault in worker.read_faults(FaultKind.STALLED)]
