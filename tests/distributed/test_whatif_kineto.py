"""Two real jobs of four ranks under the PyTorch profiler: one healthy, one with a slow rank that the analysis finds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pacekeeper_analysis.whatif import TraceError, WhatIf, analyse
from pacekeeper_analysis.whatif.causes import Cause, diagnose
from pacekeeper_analysis.whatif.inputs import load
from pacekeeper_analysis.whatif.trace import BACKWARD, FORWARD, OPTIMIZER, REDUCE_SCATTER

# The profiler's clock is the machine's: a core that a neighbour takes for a while is no bug.
pytestmark = pytest.mark.flaky(reruns=1)

RANKS = 4
SLOW = 2
STEPS = 8

# The model's work is a sleep of fixed length, so that ranks which share the processors of a small machine keep pace.
# The ranks are forked from one process that has imported torch, and what DDP and optimizers import when they are first
# used (_dynamo): that takes longer than both jobs.
JOBS = """
import multiprocessing, sys, time
import torch
import torch._dynamo
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule


def work(rank, folder, slow):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with profile(activities=[ProfilerActivity.CPU], schedule=schedule(wait=1, warmup=1, active=8)) as profiler:
        for _ in range(10):
            loss = model(torch.randn(8, 64)).sum()
            time.sleep(0.12 if rank == slow else 0.04)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
    profiler.export_chrome_trace(f"{folder}/rank{rank}.json.gz")
    dist.destroy_process_group()


forks = multiprocessing.get_context("fork")
for folder, slow in zip(sys.argv[1::2], map(int, sys.argv[2::2])):
    ranks = [forks.Process(target=work, args=(rank, folder, slow)) for rank in range(4)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
        assert process.exitcode == 0
"""


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    """The traces of the ranks of both jobs."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("healthy", "slow")}
    arguments = [str(folders["healthy"]), "-1", str(folders["slow"]), str(SLOW)]
    subprocess.run([sys.executable, "-c", JOBS, *arguments], check=True, timeout=180)
    return {name: [folder / f"rank{rank}.json.gz" for rank in range(RANKS)] for name, folder in folders.items()}


def analysis(paths: list[Path]) -> WhatIf:
    loaded = load(paths)
    return analyse(loaded.window, loaded.worker_ranks)


def test_the_slow_rank_is_found(traces: dict[str, list[Path]]) -> None:
    whatif = analysis(traces["slow"][::-1])
    assert len(whatif.steps) == STEPS
    assert whatif.slowdown > 1.4  # three times 40 ms and once 120 ms: 2 at most
    assert whatif.decomposition is not None
    assert whatif.decomposition.worst_workers.workers == ((SLOW, 0),)
    assert whatif.decomposition.by_type[FORWARD] > 1.3
    finding = diagnose(whatif)
    assert (finding.cause, finding.workers[0]) == (Cause.SLOW_WORKER, (SLOW, 0))


def test_nobody_is_blamed_in_the_healthy_job(traces: dict[str, list[Path]]) -> None:
    whatif = analysis(traces["healthy"])
    assert whatif.slowdown < analysis(traces["slow"]).slowdown
    assert diagnose(whatif).cause is not Cause.SLOW_WORKER


def test_own_work_is_told_apart_from_waiting(traces: dict[str, list[Path]]) -> None:
    window = analysis(traces["slow"]).window
    by_type = {operation.type: window.seconds[node].mean(axis=1) for node, operation in enumerate(window.operations)}
    assert {FORWARD, BACKWARD, REDUCE_SCATTER, OPTIMIZER} <= by_type.keys()
    peers = [rank for rank in range(RANKS) if rank != SLOW]
    assert by_type[FORWARD][SLOW] == pytest.approx(0.12, abs=0.03)
    assert by_type[FORWARD][peers] == pytest.approx(0.04, abs=0.03)
    # The 80 ms that the peers wait are nobody's transfer.
    assert by_type[REDUCE_SCATTER].max() < 0.04


def test_missing_and_damaged_traces_are_refused(traces: dict[str, list[Path]], tmp_path: Path) -> None:
    paths = traces["healthy"]
    with pytest.raises(TraceError, match="4 ranks, the traces are of rank 0, 1, 3"):
        load([paths[0], paths[1], paths[3]])
    cut = tmp_path / "rank2.json.gz"
    cut.write_bytes(paths[2].read_bytes()[:5000])
    with pytest.raises(TraceError, match=r"rank2\.json\.gz is not a readable profiler trace"):
        load([paths[0], paths[1], cut, paths[3]])
