"""Ours, and torch's own asynchronous checkpoints (DCP) of the same model in the same ranks.

Each rank is a worker of its own, each worker on a node of its own, so that each keeps the other one's copies. The time
of a call is what the training is held up by it: on a CPU nothing of it goes on beside.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.fsdp import fully_shard

from pacekeeper.environment import Environment
from pacekeeper.keep.checkpoint_writer import WriteOutcome
from pacekeeper.keep.checkpoints import CheckpointFolder
from pacekeeper.keep.rank_state import compute_fingerprint
from pacekeeper.keep.shard_names import format_shard_name
from pacekeeper.keep.snapshots import Snapshots
from pacekeeper.keep.state import TrainingState
from pacekeeper.keep.store import StateStore
from pacekeeper.keep.versions import StateVersion
from pacekeeper.modes.retention import compute_snapshot_interval
from pacekeeper.observe.cpu_group import CpuGroup, new_cpu_group
from pacekeeper.observe.recorder import NoRing, Recorder
from pacekeeper.replication.replication import Replication
from pacekeeper.runtime import RuntimeFolder, write_plan
from pacekeeper_analysis.plan import WorkerRole, WorkerPlan

from . import dcp
from .workload import RANKS, digest, make_net, make_optimizer, tensors_of, train

T = TypeVar("T")
Restored = tuple[float, list[int]]
"""Seconds, and what the state is like (`workload.digest`)."""
DCP = "dcp"
SECRET = "ab" * 32
COPY_PATIENCE = 60.0
POLL_INTERVAL_SECONDS = 0.05
MOST_STEPS = 200
WARM_UP_STEPS = 2
MAKE_SLOTS = 2
"""Snapshots that take memory: one for each slot."""


class Rank:
    """Of a sharded job."""

    def __init__(self, rank: int, layers: int) -> None:
        self.rank = rank
        replication = Replication(rank, {"sync": 1, "shard": RANKS}, torch.device("cpu"))
        self.net = make_net(RANKS * layers)
        for layer in self.net:
            fully_shard(layer, mesh=replication.mesh["shard"])
        fully_shard(self.net, mesh=replication.mesh["shard"])
        self.optimizer = make_optimizer(self.net)
        self.state = TrainingState({"model": self.net, "optimizer": self.optimizer}, replication, rank)

    def store(self, runtime: str | None, workers: str, volume: str | None) -> StateStore:
        """runtime: in it each worker has a folder. workers: one letter each, in rank order."""
        worker = workers[self.rank]
        place = None if runtime is None else _runtime(Path(runtime), worker)
        environment = Environment(
            self.rank,
            RANKS,
            round=1,
            runtime=place,
            worker=worker,
            node=f"node of {worker}",
            address="127.0.0.1",
        )
        folder = CheckpointFolder(Path(volume), round_=1) if volume is not None else None
        if folder is not None and self.rank == 0:
            folder.claim()
        return StateStore(environment, CpuGroup(Recorder(NoRing())), self.state, folder)

    def train(self, step: int) -> float:
        """Seconds, from a moment at which all ranks are there."""
        dist.barrier()
        start = time.perf_counter()
        train(self.net, self.optimizer, step)
        return time.perf_counter() - start

    def digest(self) -> list[int]:
        return digest(self.net, self.optimizer)


def _runtime(folder: Path, worker: str) -> RuntimeFolder:
    runtime = RuntimeFolder(folder / worker).create()
    write_plan(runtime.plan, WorkerPlan(membership=1, role=WorkerRole.MEMBER, secret=SECRET))
    return runtime


def _timed(call: Callable[[], T]) -> tuple[float, T]:
    """Seconds, from a moment at which all ranks are there, and what came of it."""
    dist.barrier()
    start = time.perf_counter()
    found = call()
    return time.perf_counter() - start, found


# What keeping the state costs


def snapshots(rank: int, layers: int, runtime: str, count: int) -> dict[str, Any]:
    """Each taken as soon as the one before is with the neighbour; the last one is, too, when this returns.

    `held`: seconds of each snapshot, of which the first MAKE_SLOTS take memory. `plain`: of steps when nothing is sent;
    `beside`: of all from the first copy's beginning to the end of the last, of `count` copies. `interval`: steps that
    the job would have between two snapshots.
    """
    mine = Rank(rank, layers)
    store = mine.store(runtime, "ab", None)
    plain = [mine.train(step) for step in range(1, WARM_UP_STEPS + count + 1)][WARM_UP_STEPS:]
    held: list[float] = []
    beside: list[float] = []
    step, begun = WARM_UP_STEPS + count, 0.0
    while len(held) < MAKE_SLOTS + count and step < MOST_STEPS:
        step += 1
        seconds = mine.train(step)
        if len(held) >= MAKE_SLOTS:
            beside.append(seconds)
        settling, settled = _timed(store.settle)
        if settled >= 0:
            held.append(begun + settling)
        begun, _ = _timed(partial(store.snapshot, step, step))
    while store.settle() != step:  # what was begun last may have been left out
        time.sleep(POLL_INTERVAL_SECONDS)
        store.snapshot(step, step)
    _wait_for_copy(mine, Path(runtime, "ba"[rank]), StateVersion(step, 1))
    dist.barrier()  # or this rank would be gone before it has taken the other one's
    interval = compute_snapshot_interval(store.snapshot_seconds, statistics.median(plain))
    return {"held": held, "plain": plain, "beside": beside, "interval": interval, "digest": mine.digest()}


def _wait_for_copy(mine: Rank, neighbour: Path, version: StateVersion) -> None:
    name, model = format_shard_name(mine.rank, RANKS), compute_fingerprint(mine.state.model_description)
    copies = Snapshots(RuntimeFolder(neighbour).snapshots, name, round_=1, world_size=RANKS, fingerprint=model)
    deadline = time.monotonic() + COPY_PATIENCE
    while version not in dict(copies.list_versions()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{version} is not with the neighbour within {COPY_PATIENCE:.0f} s")
        time.sleep(POLL_INTERVAL_SECONDS)


def checkpoints(rank: int, layers: int, volume: str, count: int) -> dict[str, Any]:
    """Seconds for which each side holds a step up, `count` times behind a first time, which takes memory: ours, DCP's
    asynchronous save, and the bare copy. Each is over before the next begins.

    A side that fails on a rank is left alone from then on; `failures` has the reason.
    """
    mine = Rank(rank, layers)
    store, folder = mine.store(None, "ab", f"{volume}/ours"), Path(volume)
    group = new_cpu_group("bench")
    mine.train(step=1)
    copies = [torch.empty_like(its) for its in tensors_of(mine.net, mine.optimizer)]

    def ours(step: int) -> float:
        seconds, _ = _timed(lambda: store.checkpoint(step, step, on_published=lambda _: None))
        if (outcome := store.wait_for_checkpoint()) is not WriteOutcome.PUBLISHED:
            raise RuntimeError(f"the checkpoint is {outcome.name}")
        return seconds

    def dcps() -> float:
        if rank == 0:
            shutil.rmtree(folder / DCP, ignore_errors=True)
        seconds, future = _timed(
            lambda: async_save(dcp.portable(mine.net, mine.optimizer), checkpoint_id=folder / DCP, process_group=group)
        )
        assert isinstance(future, Future), "its stager is no asynchronous one"
        future.result()
        return seconds

    def bare() -> float:
        state = tensors_of(mine.net, mine.optimizer)
        seconds, _ = _timed(lambda: [into.copy_(its) for into, its in zip(copies, state, strict=True)])
        return seconds

    sides: dict[str, Callable[[int], float]] = {
        "ours": ours,
        "dcp": lambda _: dcps(),
        "copy": lambda _: bare(),
    }
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    failures: dict[str, str] = {}
    for step in range(2, count + 3):
        mine.train(step)
        turn = step % len(sides)
        for side in [*sides][turn:] + [*sides][:turn]:
            if side in failures:
                continue
            took, why = 0.0, ""
            try:
                took = sides[side](step)
            except Exception as error:
                why = f"rank {rank}: {error!r}"
            said: list[str] = [""] * RANKS
            dist.all_gather_object(said, why)
            if any(said):
                failures[side] = "; ".join(filter(None, said))
            else:
                seconds[side].append(took)
    return {"seconds": seconds, "failures": failures, "digest": mine.digest()}


# Coming back


def restore(rank: int, layers: int, runtime: str | None, workers: str, volume: str | None) -> Restored:
    """By new processes; `workers`: as for `Rank.store`."""
    mine = Rank(rank, layers)
    seconds, found = _timed(lambda: mine.store(runtime, workers, volume).restore())
    if found is None:
        raise RuntimeError("nothing was brought back")
    return seconds, mine.digest()


def load_dcp(rank: int, layers: int, volume: str) -> Restored:
    """As `restore`, by DCP, as its documentation has it."""
    mine = Rank(rank, layers)

    seconds, _ = _timed(lambda: dcp.bring_back(mine.net, mine.optimizer, Path(volume) / DCP))
    return seconds, mine.digest()
