"""What keeping a GPU's state costs its steps, and how soon it is back: ours beside torch's own checkpoints (DCP).

Each function runs in the one rank of `run_workers`. Layers of one size train under AdamW; a step has a kernel of a
known length in it, so that it takes as long as a step of a larger model. What holds a step up is told by its own end:
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
from bench.scripts.state.workload import LAYER_BYTES, digest, layers_for, make_net, make_optimizer, tensors_of, train
from pacekeeper.environment import Environment
from pacekeeper.keep.checkpoint_writer import WriteOutcome
from pacekeeper.keep.checkpoints import CheckpointFolder
from pacekeeper.keep.state import TrainingState
from pacekeeper.keep.store import StateStore
from pacekeeper.modes.retention import compute_snapshot_interval
from pacekeeper.observe.cpu_group import CpuGroup, new_cpu_group
from pacekeeper.observe.recorder import NoRing, Recorder
from pacekeeper.replication.replication import Replication
from pacekeeper.runtime import RuntimeFolder

from .machine import DEVICE, NCCL, ON_GPU, Busy, wait_until_done

WARM_UP_STEPS = 3
MAKE_SLOTS = 2
"""Snapshots that take memory."""
SETTLE_STEPS = 8
"""Behind a snapshot, in which it becomes valid."""
MOST_STEPS = 1000
OURS, DCP = "ours", "dcp"


class Rank:
    """The only one of its job."""

    def __init__(self, nbytes: int, step_seconds: float) -> None:
        dist.init_process_group(NCCL)
        self.busy, self.step_seconds = Busy(), step_seconds
        replication = Replication(0, {"sync": 1, "shard": 1}, DEVICE)
        self.net = make_net(layers_for(nbytes), DEVICE)
        self.optimizer = make_optimizer(self.net)
        self.state = TrainingState({"model": self.net, "optimizer": self.optimizer}, replication, rank=0)

    @property
    def nbytes(self) -> int:
        return len(self.net) * LAYER_BYTES

    def store(self, runtime: str | None, volume: str | None) -> StateStore:
        place = None if runtime is None else RuntimeFolder(Path(runtime)).create()
        folder = CheckpointFolder(Path(volume), round_=1) if volume is not None else None
        if folder is not None:
            folder.claim()
        return StateStore(Environment(round=1, runtime=place), CpuGroup(Recorder(NoRing())), self.state, folder)

    def step(self, number: int, before: Callable[[], None] | None = None) -> float:
        """Seconds until the GPU has done it, with what is called before it."""
        wait_until_done()
        start = time.perf_counter()
        if before is not None:
            before()
        self.busy(self.step_seconds)
        train(self.net, self.optimizer, number)
        wait_until_done()
        return time.perf_counter() - start


def snapshots(nbytes: int, step_seconds: float, runtime: str, count: int) -> dict[str, Any]:
    """Seconds of steps that begin with a snapshot which is kept (`with`), the first MAKE_SLOTS of which have memory
    that none had before; of making each valid, beside the steps behind it (`settle`); of the longest of these
    (`longest`), and of plain steps (`plain`). `longest_making`: of steps while memory is taken. `interval`: steps that
    the job would have between two snapshots. `digest`: of the state that the last one holds."""
    rank = Rank(nbytes, step_seconds)
    store = rank.store(runtime, None)
    for number in range(WARM_UP_STEPS):
        rank.step(number)
    found: dict[str, list[float]] = {"with": [], "settle": [], "longest": [], "plain": []}
    longest_making, number, kept = 0.0, WARM_UP_STEPS, []
    while len(found["with"]) < MAKE_SLOTS + count and number < MOST_STEPS:
        number, state = number + 1, digest(rank.net, rank.optimizer)
        first = rank.step(number, partial(store.snapshot, number, number))
        settle, settled, steps = 0.0, -1, [0.0]
        for _ in range(SETTLE_STEPS):
            start = time.perf_counter()
            settled = store.settle()
            settle += time.perf_counter() - start
            if settled >= 0:
                break
            number += 1
            steps.append(rank.step(number))
        if settled < 0:  # there is no memory for it yet
            longest_making = max(longest_making, first, *steps)
            continue
        kept = state
        for name, seconds in (("with", first), ("settle", settle), ("longest", max(steps))):
            found[name].append(seconds)
        number += 1
        found["plain"].append(rank.step(number))
    interval = compute_snapshot_interval(store.snapshot_seconds, statistics.median(found["plain"]))
    return found | {"bytes": rank.nbytes, "longest_making": longest_making, "interval": interval, "digest": kept}


def checkpoints(nbytes: int, step_seconds: float, volume: str, count: int) -> dict[str, Any]:
    """Seconds of steps that begin with a checkpoint of ours, or DCP's asynchronous one, or the bare copy of the state
    to pinned memory, or nothing (`plain`); in turns, the first time for memory. Each is over before the next."""
    rank = Rank(nbytes, step_seconds)
    folder, group = Path(volume), new_cpu_group("bench")
    store = rank.store(None, str(folder / OURS))
    for number in range(WARM_UP_STEPS):
        rank.step(number)
    pinned = [torch.empty_like(its, device="cpu", pin_memory=ON_GPU) for its in tensors_of(rank.net, rank.optimizer)]

    def ours(number: int) -> float:
        seconds = rank.step(number, lambda: store.checkpoint(number, number, on_published=lambda _: None))
        if (outcome := store.wait_for_checkpoint()) is not WriteOutcome.PUBLISHED:
            raise RuntimeError(f"the checkpoint is {outcome.name}")
        return seconds

    def dcps(number: int) -> float:
        shutil.rmtree(folder / DCP, ignore_errors=True)
        under_way: list[Future[Any]] = []

        def save() -> None:
            found = async_save(dcp.portable(rank.net, rank.optimizer), checkpoint_id=folder / DCP, process_group=group)
            assert isinstance(found, Future), "its stager is no asynchronous one"
            under_way.append(found)

        seconds = rank.step(number, save)
        under_way[0].result()
        return seconds

    def bare(number: int) -> float:
        def copy() -> None:
            for into, its in zip(pinned, tensors_of(rank.net, rank.optimizer), strict=True):
                into.copy_(its, non_blocking=True)
            wait_until_done()

        return rank.step(number, copy)

    sides: dict[str, Callable[[int], float]] = {OURS: ours, DCP: dcps, "copy": bare, "plain": rank.step}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    kept: dict[str, list[int]] = {}
    number = WARM_UP_STEPS
    for turn in range(1 + count):
        order = [*sides][turn % len(sides) :] + [*sides][: turn % len(sides)]
        for side in order:
            number += 1
            kept[side] = digest(rank.net, rank.optimizer)
            seconds[side].append(sides[side](number))
    return {"bytes": rank.nbytes, "seconds": seconds, "digest": kept}


def restore(nbytes: int, runtime: str | None, volume: str | None) -> tuple[float, list[int]]:
    """Seconds until a new process has its state back on the GPU, and what it is like. From the snapshot in `runtime`,
    or from our checkpoint in `volume`."""
    rank = Rank(nbytes, 0.0)
    return _timed(rank, lambda: rank.store(runtime, None if volume is None else f"{volume}/{OURS}").restore())


def load_dcp(nbytes: int, volume: str) -> tuple[float, list[int]]:
    """As `restore`, by DCP, as its documentation has it."""
    rank = Rank(nbytes, 0.0)

    def load() -> bool:
        dcp.bring_back(rank.net, rank.optimizer, Path(volume) / DCP)
        return True

    return _timed(rank, load)


def _timed(rank: Rank, bring_back: Callable[[], object]) -> tuple[float, list[int]]:
    wait_until_done()
    start = time.perf_counter()
    found = bring_back()
    wait_until_done()
    seconds = time.perf_counter() - start
    if not found:
        raise RuntimeError("nothing was brought back")
    return seconds, digest(rank.net, rank.optimizer)


def folder_in_memory() -> str | None:
    """For snapshots: what a pod's runtime folder lies on."""
    shared = Path("/dev/shm")
    return str(shared) if os.access(shared, os.W_OK) else None
