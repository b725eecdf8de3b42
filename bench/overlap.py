"""What share of a synchronization of Local-SGD the forward pass hides, against the same with overlap off.

Two replicas meet over gloo. Both the computation and the link are made, so that neither depends on this machine: each
part of the model sleeps for its share of the forward pass, and what an all-reduce brings arrives after the time that
its bytes take on a link of given bandwidth, one all-reduce after the other. The link is as fast as makes a whole
synchronization take as long as one forward pass. Measured is the wall time from the beginning of the synchronization to
the end of the forward pass: with overlap on, with overlap off, and of the forward pass by itself, in turns.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import queue
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore

from pacekeeper.replication.local_sgd import ForwardPass, OuterSGD, Replicas

REPLICAS = 2
BLOCKS = 8
BLOCK_SECONDS = 0.02
"""Of a block's forward pass, and of its all-reduce. Embedding and head together take half of it."""
WIDTH = 128
REPEATS = 5 if os.environ.get("QUICK") else 15
TIMEOUT_SECONDS = 120.0
MIN_HIDDEN_SHARE = 0.7


def main() -> None:
    print(json.dumps(measure_overlap()))


def measure_overlap() -> dict[str, Any]:
    """Medians, of the slower replica in each repeat; `hidden`: the share of the synchronization that overlap hides."""
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_run_rank, args=(rank, Path(folder) / "store", results)) for rank in range(REPLICAS)
        ]
        for rank in ranks:
            rank.start()
        try:
            timings = [results.get(timeout=TIMEOUT_SECONDS) for _ in ranks]
        except queue.Empty:
            raise TimeoutError(f"the replicas have not measured anything in {TIMEOUT_SECONDS:.0f} s") from None
        finally:
            for rank in ranks:
                rank.join(timeout=10)
                rank.kill()
    seconds = {
        side: statistics.median(map(max, zip(*(timing[side] for timing in timings), strict=True)))
        for side in timings[0]
    }
    sync_seconds, exposed_seconds = seconds["off"] - seconds["alone"], seconds["on"] - seconds["alone"]
    return {
        "bench": "overlap",
        "made": "computation sleeps; the all-reduces of a synchronization arrive as by a serial link",
        "without": {"overlap_off_ms": round(seconds["off"] * 1e3, 1)},
        "with": {"overlap_on_ms": round(seconds["on"] * 1e3, 1)},
        "forward_alone_ms": round(seconds["alone"] * 1e3, 1),
        "synchronisation_ms": round(sync_seconds * 1e3, 1),
        "exposed_ms": round(exposed_seconds * 1e3, 1),
        "overlap_hidden": round(1 - exposed_seconds / sync_seconds, 3),
        "ratio": round(seconds["off"] / seconds["on"], 3),
        "repeats": REPEATS,
        "units": BLOCKS + 1,
        "prefetch": OuterSGD().prefetch,
        "goal": MIN_HIDDEN_SHARE,
        "holds": 1 - exposed_seconds / sync_seconds >= MIN_HIDDEN_SHARE,
    }


class Sleeping(nn.Module):
    """A layer that computes for `seconds` on any machine."""

    def __init__(self, inputs: int, outputs: int, seconds: float) -> None:
        super().__init__()
        self.inner = nn.Linear(inputs, outputs, bias=False)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        out: Tensor = self.inner(x)
        return out


def _build_model() -> nn.Sequential:
    """Embedding, blocks, head."""
    quarter = BLOCK_SECONDS / 4
    return nn.Sequential(
        Sleeping(WIDTH // 4, WIDTH, quarter),
        *[Sleeping(WIDTH, WIDTH, BLOCK_SECONDS) for _ in range(BLOCKS)],
        Sleeping(WIDTH, WIDTH // 4, quarter),
    )


def _run_rank(rank: int, store: Path, results: Any) -> None:
    """Puts the seconds of each repeat, by side."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=FileStore(str(store), REPLICAS),
        rank=rank,
        world_size=REPLICAS,
        timeout=timedelta(seconds=TIMEOUT_SECONDS),
    )
    group = dist.group.WORLD
    assert group is not None
    timings: dict[str, list[float]] = {"alone": [], "off": [], "on": []}
    models = {side: _build_model() for side in timings}
    replicas = {}
    for side, settings in {"off": OuterSGD(prefetch=0), "on": OuterSGD()}.items():
        replicas[side] = Replicas(ForwardPass(models[side], list(models[side])[1:-1]), group, None, settings)
        replicas[side].start()
    batch = torch.ones(4, WIDTH // 4)
    with simulate_slow_link(bytes_per_second=WIDTH * WIDTH * 4 / BLOCK_SECONDS):
        for repeat in range(1 + REPEATS):
            for side, seconds in timings.items():
                dist.barrier()
                start = time.perf_counter()
                if side in replicas:
                    replicas[side].begin(steps=1)
                models[side](batch)
                if repeat > 0:  # the first one warms up
                    seconds.append(time.perf_counter() - start)
    results.put(timings)
    dist.barrier()
    dist.destroy_process_group()


@contextmanager
def simulate_slow_link(bytes_per_second: float) -> Iterator[None]:
    """What asynchronous all-reduces bring arrives no sooner than its bytes take, one all-reduce after the other."""
    all_reduce = dist.all_reduce
    free_at = 0.0

    def delayed(tensor: Tensor, *args: Any, **options: Any) -> Any:
        nonlocal free_at
        work = all_reduce(tensor, *args, **options)
        if work is None:
            return None
        free_at = max(free_at, time.perf_counter()) + tensor.nbytes / bytes_per_second
        return _Arriving(work, free_at)

    with patch.object(dist, "all_reduce", delayed):
        yield


class _Arriving:
    """A collective that is not over before its time."""

    def __init__(self, work: dist.Work, arrives_at: float) -> None:
        self._work = work
        self._at = arrives_at

    def wait(self) -> None:
        self._work.wait()
        time.sleep(max(0.0, self._at - time.perf_counter()))


if __name__ == "__main__":
    main()
