"""Ours, and torch's own asynchronous checkpoints (DCP) of the same model in the same ranks.

Each rank is a worker of its own, each worker on a node of its own, so that each keeps the other one's copies. The time
of a call is what the training is held up by it: on a CPU nothing of it overlaps with the training.
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

from pacekeeper.checkpointing.rank_state import compute_fingerprint
from pacekeeper.checkpointing.snapshots.shard_names import format_shard_name
from pacekeeper.checkpointing.snapshots.snapshot_slots import Snapshots
from pacekeeper.checkpointing.state_store import StateStore
from pacekeeper.checkpointing.storage.checkpoint_folder import CheckpointFolder
from pacekeeper.checkpointing.storage.checkpoint_writer import WriteOutcome
from pacekeeper.checkpointing.training_state import TrainingState
from pacekeeper.checkpointing.versions import StateVersion
from pacekeeper.environment import Environment
from pacekeeper.observe.collectives.cpu_group import CpuGroup, new_cpu_group
from pacekeeper.replication.replication import Replication
from pacekeeper.runtime_folder import RuntimeFolder, write_json
from pacekeeper.sync.state_saver import compute_snapshot_interval
from pacekeeper_analysis.protocol.plan import WorkerPlan, WorkerRole
from pacekeeper_rank.recorder import NoRing, Recorder

from . import dcp
from .workload import RANKS, compute_digest, list_tensors, make_net, make_optimizer, train_step

T = TypeVar("T")
Restored = tuple[float, list[int]]
"""Seconds, and what the state is like (`workload.compute_digest`)."""
DCP = "dcp"
SECRET = "ab" * 32
COPY_TIMEOUT_SECONDS = 60.0
POLL_INTERVAL_SECONDS = 0.05
MAX_STEPS = 200
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

    def open_store(self, runtime: str | None, workers: str, volume: str | None) -> StateStore:
        """runtime: in it each worker has a folder. workers: one letter each, in rank order."""
        worker = workers[self.rank]
        runtime_folder = None if runtime is None else _create_runtime(Path(runtime), worker)
        environment = Environment(
            self.rank,
            RANKS,
            round=1,
            runtime=runtime_folder,
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
        train_step(self.net, self.optimizer, step)
        return time.perf_counter() - start

    def digest(self) -> list[int]:
        return compute_digest(self.net, self.optimizer)


def _create_runtime(folder: Path, worker: str) -> RuntimeFolder:
    runtime = RuntimeFolder(folder / worker).create()
    write_json(runtime.plan, WorkerPlan(membership=1, role=WorkerRole.MEMBER, secret=SECRET).to_json())
    return runtime


def _time_call(call: Callable[[], T]) -> tuple[float, T]:
    """Seconds, from a moment at which all ranks are there, and what came of it."""
    dist.barrier()
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


# What keeping the state costs


def measure_snapshots(rank: int, layers: int, runtime: str, count: int) -> dict[str, Any]:
    """Each taken as soon as the one before is replicated; the last one is, too, when this returns.

    `held`: seconds of each snapshot, of which the first MAKE_SLOTS take memory. `plain`: of steps when nothing is sent;
    `copying`: of all from the first copy's beginning to the end of the last, of `count` copies. `interval`: steps that
    the job would have between two snapshots.
    """
    own_rank = Rank(rank, layers)
    store = own_rank.open_store(runtime, "ab", None)
    plain_seconds = [own_rank.train(step) for step in range(1, WARM_UP_STEPS + count + 1)][WARM_UP_STEPS:]
    held_seconds: list[float] = []
    copying_seconds: list[float] = []
    step, begun_seconds = WARM_UP_STEPS + count, 0.0
    while len(held_seconds) < MAKE_SLOTS + count and step < MAX_STEPS:
        step += 1
        seconds = own_rank.train(step)
        if len(held_seconds) >= MAKE_SLOTS:
            copying_seconds.append(seconds)
        settle_seconds, settled_step = _time_call(store.settle)
        if settled_step is not None:
            held_seconds.append(begun_seconds + settle_seconds)
        begun_seconds, _ = _time_call(partial(store.snapshot, step, step))
    while store.settle() != step:  # what was begun last may have been left out
        time.sleep(POLL_INTERVAL_SECONDS)
        store.snapshot(step, step)
    _wait_for_copy(own_rank, Path(runtime, "ba"[rank]), StateVersion(step, 1))
    dist.barrier()  # or this rank would be gone before it has taken the other one's
    interval = compute_snapshot_interval(store.snapshot_seconds, statistics.median(plain_seconds))
    return {
        "held": held_seconds,
        "plain": plain_seconds,
        "copying": copying_seconds,
        "interval": interval,
        "digest": own_rank.digest(),
    }


def _wait_for_copy(own_rank: Rank, peer_folder: Path, version: StateVersion) -> None:
    name, fingerprint = format_shard_name(own_rank.rank, RANKS), compute_fingerprint(own_rank.state.model_description)
    copies = Snapshots(RuntimeFolder(peer_folder).snapshots, name, round_=1, world_size=RANKS, fingerprint=fingerprint)
    deadline = time.monotonic() + COPY_TIMEOUT_SECONDS
    while version not in dict(copies.list_versions()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{version} is not replicated within {COPY_TIMEOUT_SECONDS:.0f} s")
        time.sleep(POLL_INTERVAL_SECONDS)


def measure_checkpoints(rank: int, layers: int, volume: str, count: int) -> dict[str, Any]:
    """Seconds for which each side holds a step up, `count` times behind a first time, which takes memory: ours, DCP's
    asynchronous save, and the bare copy. Each is over before the next begins.

    A side that fails on a rank is skipped from then on; `failures` has the reason.
    """
    own_rank = Rank(rank, layers)
    store, folder = own_rank.open_store(None, "ab", f"{volume}/ours"), Path(volume)
    group = new_cpu_group("bench")
    own_rank.train(step=1)
    copies = [torch.empty_like(tensor) for tensor in list_tensors(own_rank.net, own_rank.optimizer)]

    def save_ours(step: int) -> float:
        seconds, _ = _time_call(lambda: store.checkpoint(step, step, on_published=lambda _: None))
        if (outcome := store.wait_for_checkpoint()) is not WriteOutcome.PUBLISHED:
            raise RuntimeError(f"the checkpoint is {outcome.name}")
        return seconds

    def save_with_dcp() -> float:
        if rank == 0:
            shutil.rmtree(folder / DCP, ignore_errors=True)
        seconds, future = _time_call(
            lambda: async_save(
                dcp.build_state_dict(own_rank.net, own_rank.optimizer), checkpoint_id=folder / DCP, process_group=group
            )
        )
        assert isinstance(future, Future), "its stager is no asynchronous one"
        future.result()
        return seconds

    def copy_bare() -> float:
        state = list_tensors(own_rank.net, own_rank.optimizer)
        seconds, _ = _time_call(lambda: [target.copy_(tensor) for target, tensor in zip(copies, state, strict=True)])
        return seconds

    sides: dict[str, Callable[[int], float]] = {
        "ours": save_ours,
        "dcp": lambda _: save_with_dcp(),
        "copy": lambda _: copy_bare(),
    }
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    failures: dict[str, str] = {}
    for step in range(2, count + 3):
        own_rank.train(step)
        turn = step % len(sides)
        for side in [*sides][turn:] + [*sides][:turn]:
            if side in failures:
                continue
            elapsed, reason = 0.0, ""
            try:
                elapsed = sides[side](step)
            except Exception as error:
                reason = f"rank {rank}: {error!r}"
            reasons: list[str] = [""] * RANKS
            dist.all_gather_object(reasons, reason)
            if any(reasons):
                failures[side] = "; ".join(filter(None, reasons))
            else:
                seconds[side].append(elapsed)
    return {"seconds": seconds, "failures": failures, "digest": own_rank.digest()}


# Coming back


def restore_state(rank: int, layers: int, runtime: str | None, workers: str, volume: str | None) -> Restored:
    """By new processes; `workers`: as for `Rank.open_store`."""
    own_rank = Rank(rank, layers)
    seconds, restored = _time_call(lambda: own_rank.open_store(runtime, workers, volume).restore())
    if restored is None:
        raise RuntimeError("nothing was brought back")
    return seconds, own_rank.digest()


def load_dcp(rank: int, layers: int, volume: str) -> Restored:
    """As `restore_state`, by DCP, as its documentation has it."""
    own_rank = Rank(rank, layers)

    seconds, _ = _time_call(lambda: dcp.load_state(own_rank.net, own_rank.optimizer, Path(volume) / DCP))
    return seconds, own_rank.digest()
