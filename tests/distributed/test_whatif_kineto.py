"""Two real jobs of four ranks under the PyTorch profiler: one healthy, one with a slow rank that the analysis finds."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

from pacekeeper_analysis.whatif import TraceError, WhatIf, analyse
from pacekeeper_analysis.whatif.causes import Cause, diagnose
from pacekeeper_analysis.whatif.inputs import load
from pacekeeper_analysis.whatif.trace import BACKWARD, FORWARD, OPTIMIZER, REDUCE_SCATTER
from tests.support.ranks import run_ranks

# The profiler's clock is the machine's: a core that a neighbour takes for a while is no bug.
pytestmark = pytest.mark.flaky(reruns=1)

RANKS = 4
SLOW = 2
STEPS = 8

SECONDS, SLOW_SECONDS = 0.04, 0.12
"""The model's work is a sleep of fixed length: ranks that share the processors of a small machine keep pace."""


def work(rank: int, folder: Path, slow: int | None) -> None:
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with profile(activities=[ProfilerActivity.CPU], schedule=schedule(wait=1, warmup=1, active=STEPS)) as profiler:
        for _ in range(STEPS + 2):
            loss = model(torch.randn(8, 64)).sum()
            time.sleep(SLOW_SECONDS if rank == slow else SECONDS)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
    profiler.export_chrome_trace(f"{folder}/rank{rank}.json.gz")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    """The traces of the ranks of both jobs."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("healthy", "slow")}
    for name, slow in (("healthy", None), ("slow", SLOW)):
        run_ranks(partial(work, folder=folders[name], slow=slow), RANKS)
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
