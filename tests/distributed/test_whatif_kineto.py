"""Two real jobs of four ranks under the PyTorch profiler: one healthy, one with a slow rank that the analysis finds.

The profiler's clock is the machine's, which others may keep busy: what is found is held against what the ranks have
measured of themselves, and in the healthy job all ranks have the trace of one.
"""

from __future__ import annotations

import gzip
import json
import time
from functools import partial
from pathlib import Path
from statistics import mean

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

from pacekeeper_analysis.whatif import TraceError, WhatIf, analyze_window
from pacekeeper_analysis.whatif.causes import SlowdownCause, diagnose_cause
from pacekeeper_analysis.whatif.inputs import load_window
from pacekeeper_analysis.whatif.scenario import IDEAL_SCENARIO, RECORDED, OperationSelection
from pacekeeper_analysis.whatif.trace import BACKWARD, FORWARD, OPTIMIZER, REDUCE_SCATTER
from testing.training.ranks import run_ranks

RANKS = 4
SLOW = 2
STEPS = 4

SECONDS, SLOW_SECONDS = 0.05, 0.5
"""The model's work is a sleep of this length, or somewhat more: ranks that share the processors of a small machine keep
pace."""


def run_rank(rank: int, folder: Path, slow: int | None) -> float:
    """Return the mean seconds of a forward pass."""
    seconds = []
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with profile(activities=[ProfilerActivity.CPU], schedule=schedule(wait=1, warmup=1, active=STEPS)) as profiler:
        for _ in range(STEPS + 2):
            began = time.perf_counter()
            loss = model(torch.randn(8, 64)).sum()
            time.sleep(SLOW_SECONDS if rank == slow else SECONDS)
            seconds.append(time.perf_counter() - began)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
    profiler.export_chrome_trace(f"{folder}/rank{rank}.json.gz")
    dist.destroy_process_group()
    return mean(seconds[2:])


def list_trace_paths(folder: Path) -> list[Path]:
    return [folder / f"rank{rank}.json.gz" for rank in range(RANKS)]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The traces of a job whose ranks are all like its first one."""
    folder = tmp_path_factory.mktemp("healthy")
    run_ranks(partial(run_rank, folder=folder, slow=None), RANKS)
    first, *others = list_trace_paths(folder)
    trace = json.loads(gzip.decompress(first.read_bytes()))
    for rank, path in enumerate(others, start=1):
        trace["distributedInfo"]["rank"] = rank
        path.write_bytes(gzip.compress(json.dumps(trace).encode(), compresslevel=1))
    return [first, *others]


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], list[float]]:
    """The traces of the job with a slow rank, and how long a forward pass has taken each rank (seconds)."""
    folder = tmp_path_factory.mktemp("slow")
    seconds = run_ranks(partial(run_rank, folder=folder, slow=SLOW), RANKS)
    return list_trace_paths(folder), seconds


def analyze_traces(paths: list[Path]) -> WhatIf:
    loaded = load_window(paths)
    return analyze_window(loaded.window, loaded.worker_ranks)


def test_the_slow_rank_is_found(slow: tuple[list[Path], list[float]]) -> None:
    whatif = analyze_traces(slow[0][::-1])
    assert len(whatif.steps) == STEPS
    assert whatif.slowdown > 1.4  # three times 50 ms and once 500 ms: 3 at most
    assert whatif.decomposition is not None
    assert whatif.decomposition.worst_workers.workers == ((SLOW, 0),)
    assert whatif.decomposition.slowdown_by_type[FORWARD] > 1.3
    finding = diagnose_cause(whatif)
    assert (finding.cause, finding.workers[0]) == (SlowdownCause.SLOW_WORKER, (SLOW, 0))


def test_no_rank_is_blamed_in_the_healthy_job(healthy: list[Path]) -> None:
    whatif = analyze_traces(healthy)
    # A busy machine makes single transfers longer, and the ideal of a transfer is the median.
    computing = OperationSelection(types=[FORWARD, BACKWARD, OPTIMIZER])
    step_s = whatif.simulate_scenario(IDEAL_SCENARIO.with_change(computing, takes=RECORDED))
    assert step_s.mean() == pytest.approx(whatif.ideal_step_s, rel=0.01)
    assert diagnose_cause(whatif).cause is not SlowdownCause.SLOW_WORKER


def test_own_work_is_distinguished_from_waiting(slow: tuple[list[Path], list[float]]) -> None:
    paths, seconds = slow
    window = analyze_traces(paths).window
    by_type = {operation.type: window.seconds[node].mean(axis=1) for node, operation in enumerate(window.operations)}
    assert {FORWARD, BACKWARD, REDUCE_SCATTER, OPTIMIZER} <= by_type.keys()
    waits = seconds[SLOW] - max(own for rank, own in enumerate(seconds) if rank != SLOW)
    assert by_type[FORWARD].tolist() == pytest.approx(seconds, abs=waits / 4)
    # What the peers wait is no rank's transfer.
    assert by_type[REDUCE_SCATTER].max() < waits / 2


def test_missing_traces_are_refused_and_damaged_ones_are_read_as_far_as_possible(
    healthy: list[Path], tmp_path: Path
) -> None:
    paths = healthy
    with pytest.raises(TraceError, match="4 ranks, the traces are of rank 0, 1, 3"):
        load_window([paths[0], paths[1], paths[3]])
    cut = tmp_path / "rank2.json.gz"
    content = paths[2].read_bytes()
    cut.write_bytes(content[:100])
    with pytest.raises(TraceError, match=r"rank2\.json\.gz is not a readable profiler trace"):
        load_window([paths[0], paths[1], cut, paths[3]])
    cut.write_bytes(content[: 3 * len(content) // 4])
    window = load_window([paths[0], paths[1], cut, paths[3]]).window
    assert window.notes[0].startswith("rank2.json.gz: the end is missing: what comes after")
    assert any(note.startswith("left out: step") for note in window.notes)
    whole = load_window(paths).window
    assert whole.notes == ()
    assert set(window.steps) < set(whole.steps)
