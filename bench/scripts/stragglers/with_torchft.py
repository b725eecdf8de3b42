"""torchft's LocalSGD and DiLoCo, each rank a replica group of its own. Runs in torchft's virtual environment.

At its best: the lighthouse looks for a quorum every 10 ms instead of every 100, models begin alike and are not sent
around (init_sync=False), DiLoCo sends its pseudo-gradients in one bucket. All four replicas belong to each quorum, so
that no rank's work is thrown away.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore
from torchft import Manager, ProcessGroupGloo  # type: ignore[import-not-found, unused-ignore]
from torchft.coordination import LighthouseServer  # type: ignore[import-not-found, unused-ignore]
from torchft.local_sgd import DiLoCo, LocalSGD  # type: ignore[import-not-found, unused-ignore]

from .ddp import local_batch
from .run import LOCAL_BATCH, RANKS, Outcome, Place, Run
from .workload import GPT, Pace, Snapshots, SourceCode, loss_sum

TIMEOUT = timedelta(seconds=120)
QUORUM_TICK_MS = 10

Wrapper = Callable[[Manager, GPT, torch.optim.Optimizer], AbstractContextManager[Any]]


def local_sgd(run: Run, place: Place) -> Outcome:
    return train(run, place, lambda manager, model, inner: LocalSGD(manager, model, inner, run.sync_every))


def diloco(run: Run, place: Place) -> Outcome:
    """With the outer optimizer of its paper: Nesterov momentum 0.9, learning rate 0.7."""

    def wrap(manager: Manager, model: GPT, inner: torch.optim.Optimizer) -> AbstractContextManager[Any]:
        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        diloco: AbstractContextManager[Any] = DiLoCo(
            manager, [model], inner, outer, run.sync_every, use_bucketization=True
        )
        return diloco

    return train(run, place, wrap)


def train(run: Run, place: Place, wrap: Wrapper) -> Outcome:
    logging.getLogger("torchft").setLevel(logging.WARNING)
    pace, snapshots = Pace(run.costs(), place.rank, run.unit_seconds), Snapshots(run.snapshots)
    data = SourceCode(run.samples, run.seed)
    lighthouse = start_lighthouse(place) if place.rank == 0 else None
    model = GPT(pace)
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.learning_rate)
    manager, store = make_manager(run, place, model, optimizer)
    weights = []
    with wrap(manager, model, optimizer):
        for step in range(run.steps):
            positions = local_batch(step, place.rank)
            x, y = data.batch(positions)
            optimizer.zero_grad()
            pace.begin(positions)
            (loss_sum(model, x, y) / LOCAL_BATCH).backward()
            pace.end()
            before = manager.current_step()
            optimizer.step()
            if (step + 1) % run.sync_every == 0:
                committed = manager.current_step() > before
                weights.append([1 / RANKS if committed else 0.0] * RANKS)
                snapshots.keep(pace.period, model)
                pace.period += 1
    manager.shutdown(wait=False)
    if lighthouse is not None:
        lighthouse.shutdown()
    del store
    return Outcome(pace.diary, weights, snapshots.losses(data) if place.rank == 0 else [])


def start_lighthouse(place: Place) -> LighthouseServer:
    return LighthouseServer(
        bind=f"[::]:{place.ports[RANKS]}", min_replicas=RANKS, join_timeout_ms=60_000, quorum_tick_ms=QUORUM_TICK_MS
    )


def make_manager(run: Run, place: Place, model: GPT, optimizer: torch.optim.Optimizer) -> tuple[Manager, TCPStore]:
    """This rank's manager, and the store that its replica group (the rank alone) needs."""

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    address = run.addresses[place.rank]
    store = TCPStore(address, place.ports[place.rank], is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=RANKS,
        use_async_quorum=False,
        timeout=TIMEOUT,
        quorum_timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr=address,
        store_port=place.ports[place.rank],
        lighthouse_addr=f"http://{run.addresses[0]}:{place.ports[RANKS]}",
        replica_id=f"replica_{place.rank}",
        hostname=address,
        init_sync=False,
    )
    return manager, store
