"""What is measured on a GPU. Each function here runs in the ranks of `run_workers`, but for `recovery`."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import pacekeeper as pk
from pacekeeper.observe.rank_history import RankHistory
from pacekeeper.observe.ring_reader import RingReader
from pacekeeper.replication.local_sgd import ForwardPass, OuterSGD, Replicas
from pacekeeper.runtime_folder import RuntimeFolder

from .machine import DEVICE, Busy, wait_until_done

BATCH = 8
FIRST_STEPS = 6
"""Left out: what is compiled, allocated and connected in them."""


class Slow(nn.Module):
    """Linear layers, the first of which keeps the device busy for `seconds` before it computes."""

    def __init__(self, busy: Busy, seconds: float, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.seconds = seconds
        self._busy = busy

    def forward(self, x: Tensor) -> Tensor:
        self._busy(self.seconds)
        for layer in self.layers:
            x = layer(x)
        return x


def measure_steps(
    own_seconds: Sequence[float], count: int, backend: str = "gloo", layers: int = 2, width: int = 64
) -> dict[str, Any]:
    """A steered job in Sync whose ranks have a kernel of `own_seconds[rank]` a step.

    Returns seconds of each step but the first ones: as recorded (`step`, and `own`: without waits for peers; both empty
    where nothing is recorded), of the host until the optimizer's step is launched (`host`), and of all of them together
    by the clock of the host (`mean`). `records`: of a step.
    """
    rank = int(os.environ["RANK"])
    busy = Busy()
    job = pk.init(backend=backend)
    model = job.replicate(Slow(busy, own_seconds[rank], layers, width).to(DEVICE))
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    launched: list[float] = []
    sgd.register_step_post_hook(lambda *_: launched.append(time.perf_counter()))
    optimizer = job.optimizer(sgd)  # its hook comes behind ours: in it, the host waits for a device two steps behind
    loader = job.dataloader(torch.utils.data.TensorDataset(torch.randn(BATCH * 4, width)), BATCH, max_microbatch=BATCH)
    host_seconds: list[float] = []
    measured_from = 0.0
    for step in job.steps(loader, until=FIRST_STEPS + count):
        start = time.perf_counter()
        if step.number == FIRST_STEPS + 1:
            wait_until_done()
            measured_from = start = time.perf_counter()
        for (x,) in step.microbatches():
            loss = model(x.to(DEVICE, non_blocking=True)).square().sum()
            step.add_loss(loss.detach())
            (loss / step.total_weight).backward()
        optimizer.step()
        optimizer.zero_grad()
        host_seconds.append(launched[-1] - start)
    wait_until_done()
    result: dict[str, Any] = {"host": host_seconds[FIRST_STEPS:], "mean": (time.perf_counter() - measured_from) / count}
    step_seconds, own_work, records = _read_recorded_steps(rank, count)
    dist.barrier()
    return result | {"step": step_seconds, "own": own_work, "records": records}


def _read_recorded_steps(rank: int, count: int) -> tuple[list[float], list[float], float]:
    if "PACEKEEPER_RUNTIME" not in os.environ:
        return [], [], 0.0
    records = RingReader(RuntimeFolder.from_environment().ring(0)).records()
    history = RankHistory(window_steps=count)
    history.add(records)
    window = history.build_window(rank)
    return list(window.step_seconds), list(window.compute_seconds), len(records) / (count + FIRST_STEPS)


def measure_overlap(blocks: int, width: int, repeats: int) -> dict[str, float]:
    """Seconds of a forward pass without a synchronization, and with one whose all-reduces it overlaps, or not.

    Each block keeps the device as busy as the all-reduce of one block takes.
    """
    busy = Busy()
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    block_seconds = _measure_all_reduce_seconds(width)

    def make_model() -> nn.Sequential:
        layers = [nn.Linear(width, width, bias=False) for _ in range(blocks + 2)]
        return nn.Sequential(*[_Block(busy, block_seconds, layer) for layer in layers]).to(DEVICE)

    sides: dict[str, tuple[nn.Sequential, Replicas | None]] = {"alone": (make_model(), None)}
    for name, settings in {"off": OuterSGD(prefetch=0), "on": OuterSGD()}.items():
        model = make_model()
        replicas = Replicas(ForwardPass(model, list(model)[1:-1]), group, None, settings)
        replicas.start()
        sides[name] = model, replicas
    timings: dict[str, list[float]] = {name: [] for name in sides}
    batch = torch.ones(4, width, device=DEVICE)
    for repeat in range(1 + repeats):
        for name, (model, side_replicas) in sides.items():
            wait_until_done()
            dist.barrier()
            start = time.perf_counter()
            if side_replicas is not None:
                side_replicas.begin(steps=1)
            model(batch)
            wait_until_done()
            if repeat:  # the first one warms up
                timings[name].append(time.perf_counter() - start)
    dist.barrier()
    return {name: statistics.median(values) for name, values in timings.items()} | {"block": block_seconds}


class _Block(nn.Module):
    def __init__(self, busy: Busy, seconds: float, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self._busy, self._seconds = busy, seconds

    def forward(self, x: Tensor) -> Tensor:
        self._busy(self._seconds)
        out: Tensor = self.inner(x)
        return out


def _measure_all_reduce_seconds(width: int) -> float:
    """Of one block's parameters, the same on all ranks: the first one's median."""
    tensor = torch.ones(width, width, device=DEVICE)
    durations = []
    for _ in range(5):
        wait_until_done()
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(tensor)
        wait_until_done()
        durations.append(time.perf_counter() - start)
    seconds = torch.tensor([statistics.median(durations[1:])], dtype=torch.float64)
    dist.broadcast(seconds, 0)
    return float(seconds)
