"""What keeping a GPU's state costs its steps, and how soon it is back: ours against torch's own checkpoints (DCP).

Each function runs in the one rank of `run_workers`. Layers of one size train under AdamW; a step has a kernel of a
known length in it, so that it takes as long as a step of a larger model. What holds a step up is measured by its end:
from a moment at which the GPU has nothing to do until it has done the step, with something kept before it or not.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import async_save

from bench.scripts.state import dcp
from bench.scripts.state.workload import (
    LAYER_BYTES,
    compute_digest,
    count_layers,
    list_tensors,
    make_net,
    make_optimizer,
    train_step,
)
from pacekeeper.checkpointing.state_store import StateStore
from pacekeeper.checkpointing.storage.checkpoint_folder import CheckpointFolder
from pacekeeper.checkpointing.storage.checkpoint_writer import WriteOutcome
from pacekeeper.checkpointing.training_state import TrainingState
from pacekeeper.environment import Environment
from pacekeeper.observe.collectives.cpu_group import CpuGroup, new_cpu_group
from pacekeeper.replication.replication import Replication
from pacekeeper.runtime_folder import RuntimeFolder
from pacekeeper.sync.state_saver import compute_snapshot_interval
from pacekeeper_rank.recorder import NoRing, Recorder

from .machine import DEVICE, NCCL, ON_GPU, Busy, wait_until_done

WARM_UP_STEPS = 3
MAKE_SLOTS = 2
"""Snapshots that take memory."""
SETTLE_STEPS = 8
"""Behind a snapshot, in which it becomes valid."""
MAX_STEPS = 1000
OURS, DCP = "ours", "dcp"


class Rank:
    """The only one of its job."""

    def __init__(self, nbytes: int, step_seconds: float) -> None:
        dist.init_process_group(NCCL)
        self.busy, self.step_seconds = Busy(), step_seconds
        replication = Replication(0, {"sync": 1, "shard": 1}, DEVICE)
        self.net = make_net(count_layers(nbytes), DEVICE)
        self.optimizer = make_optimizer(self.net)
        self.state = TrainingState({"model": self.net, "optimizer": self.optimizer}, replication, rank=0)

    @property
    def nbytes(self) -> int:
        return len(self.net) * LAYER_BYTES

    def open_store(self, runtime: str | None, volume: str | None) -> StateStore:
        runtime_folder = None if runtime is None else RuntimeFolder(Path(runtime)).create()
        folder = CheckpointFolder(Path(volume), round_=1) if volume is not None else None
        if folder is not None:
            folder.claim()
        return StateStore(
            Environment(round=1, runtime=runtime_folder), CpuGroup(Recorder(NoRing())), self.state, folder
        )

    def step(self, number: int, prepare: Callable[[], None] | None = None) -> float:
        """Seconds until the GPU has done it, with what is called before it."""
        wait_until_done()
        start = time.perf_counter()
        if prepare is not None:
            prepare()
        self.busy(self.step_seconds)
        train_step(self.net, self.optimizer, number)
        wait_until_done()
        return time.perf_counter() - start


def measure_snapshots(nbytes: int, step_seconds: float, runtime: str, count: int) -> dict[str, Any]:
    """Seconds of steps that begin with a snapshot which is kept (`with`), the first MAKE_SLOTS of which have memory
    that no snapshot had before; of making each valid during the steps after it (`settle`); of the longest of these
    (`longest`), and of plain steps (`plain`). `longest_making`: of steps while memory is taken. `interval`: steps that
    the job would have between two snapshots. `digest`: of the state that the last one holds."""
    rank = Rank(nbytes, step_seconds)
    store = rank.open_store(runtime, None)
    for number in range(WARM_UP_STEPS):
        rank.step(number)
    timings: dict[str, list[float]] = {"with": [], "settle": [], "longest": [], "plain": []}
    longest_making, number, kept_digest = 0.0, WARM_UP_STEPS, []
    while len(timings["with"]) < MAKE_SLOTS + count and number < MAX_STEPS:
        number, digest = number + 1, compute_digest(rank.net, rank.optimizer)
        first_seconds = rank.step(number, partial(store.snapshot, number, number))
        settle_seconds, settled_step, steps = 0.0, None, [0.0]
        for _ in range(SETTLE_STEPS):
            start = time.perf_counter()
            settled_step = store.settle()
            settle_seconds += time.perf_counter() - start
            if settled_step is not None:
                break
            number += 1
            steps.append(rank.step(number))
        if settled_step is None:  # there is no memory for it yet
            longest_making = max(longest_making, first_seconds, *steps)
            continue
        kept_digest = digest
        for name, seconds in (("with", first_seconds), ("settle", settle_seconds), ("longest", max(steps))):
            timings[name].append(seconds)
        number += 1
        timings["plain"].append(rank.step(number))
    interval = compute_snapshot_interval(store.snapshot_seconds, statistics.median(timings["plain"]))
    return timings | {
        "bytes": rank.nbytes,
        "longest_making": longest_making,
        "interval": interval,
        "digest": kept_digest,
    }


def measure_checkpoints(nbytes: int, step_seconds: float, volume: str, count: int) -> dict[str, Any]:
    """Seconds of steps that begin with a checkpoint of ours, or DCP's asynchronous one, or the bare copy of the state
    to pinned memory, or nothing (`plain`); in turns, the first time for memory. Each is over before the next."""
    rank = Rank(nbytes, step_seconds)
    folder, group = Path(volume), new_cpu_group("bench")
    store = rank.open_store(None, str(folder / OURS))
    for number in range(WARM_UP_STEPS):
        rank.step(number)
    pinned = [
        torch.empty_like(tensor, device="cpu", pin_memory=ON_GPU) for tensor in list_tensors(rank.net, rank.optimizer)
    ]

    def save_ours(number: int) -> float:
        seconds = rank.step(number, lambda: store.checkpoint(number, number, on_published=lambda _: None))
        if (outcome := store.wait_for_checkpoint()) is not WriteOutcome.PUBLISHED:
            raise RuntimeError(f"the checkpoint is {outcome.name}")
        return seconds

    def save_with_dcp(number: int) -> float:
        shutil.rmtree(folder / DCP, ignore_errors=True)
        futures: list[Future[Any]] = []

        def save() -> None:
            future = async_save(
                dcp.build_state_dict(rank.net, rank.optimizer), checkpoint_id=folder / DCP, process_group=group
            )
            assert isinstance(future, Future), "its stager is no asynchronous one"
            futures.append(future)

        seconds = rank.step(number, save)
        futures[0].result()
        return seconds

    def copy_bare(number: int) -> float:
        def copy() -> None:
            for target, tensor in zip(pinned, list_tensors(rank.net, rank.optimizer), strict=True):
                target.copy_(tensor, non_blocking=True)
            wait_until_done()

        return rank.step(number, copy)

    sides: dict[str, Callable[[int], float]] = {
        OURS: save_ours,
        DCP: save_with_dcp,
        "copy": copy_bare,
        "plain": rank.step,
    }
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    digests: dict[str, list[int]] = {}
    number = WARM_UP_STEPS
    for turn in range(1 + count):
        order = [*sides][turn % len(sides) :] + [*sides][: turn % len(sides)]
        for side in order:
            number += 1
            digests[side] = compute_digest(rank.net, rank.optimizer)
            seconds[side].append(sides[side](number))
    return {"bytes": rank.nbytes, "seconds": seconds, "digest": digests}


def restore_state(nbytes: int, runtime: str | None, volume: str | None) -> tuple[float, list[int]]:
    """Seconds until a new process has its state back on the GPU, and what it is like. From the snapshot in `runtime`,
    or from our checkpoint in `volume`."""
    rank = Rank(nbytes, 0.0)
    return _time_restore(
        rank, lambda: rank.open_store(runtime, None if volume is None else f"{volume}/{OURS}").restore()
    )


def load_dcp(nbytes: int, volume: str) -> tuple[float, list[int]]:
    """As `restore_state`, by DCP, as its documentation has it."""
    rank = Rank(nbytes, 0.0)

    def load() -> bool:
        dcp.load_state(rank.net, rank.optimizer, Path(volume) / DCP)
        return True

    return _time_restore(rank, load)


def _time_restore(rank: Rank, restore: Callable[[], object]) -> tuple[float, list[int]]:
    wait_until_done()
    start = time.perf_counter()
    is_restored = restore()
    wait_until_done()
    seconds = time.perf_counter() - start
    if not is_restored:
        raise RuntimeError("nothing was brought back")
    return seconds, compute_digest(rank.net, rank.optimizer)


def find_memory_folder() -> str | None:
    """For snapshots: what a pod's runtime folder lies on."""
    shared = Path("/dev/shm")
    return str(shared) if os.access(shared, os.W_OK) else None
