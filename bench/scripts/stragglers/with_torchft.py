"""torchft's LocalSGD and DiLoCo, each rank a replica group of its own. Runs in torchft's virtual environment.

At its best: the lighthouse checks for a quorum every 10 ms instead of every 100, models begin alike and are not sent
around (init_sync=False), DiLoCo sends its pseudo-gradients in one bucket.

Usually all four replicas belong to each quorum, and no rank's work is thrown away. `train_without_late` lets the quorum
go on without a rank that is later than JOIN_TIMEOUT_MS: no rank waits for it, and its work is lost when it comes, since
it is then given the state of the others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore
from torch.optim.lr_scheduler import LambdaLR
from torchft import Manager, ProcessGroupGloo  # type: ignore[import-not-found, unused-ignore]
from torchft.coordination import LighthouseServer  # type: ignore[import-not-found, unused-ignore]
from torchft.local_sgd import DiLoCo, LocalSGD  # type: ignore[import-not-found, unused-ignore]

from .ddp import get_local_batch
from .run import GLOBAL_BATCH, LOCAL_BATCH, RANKS, Outcome, Place, Run
from .workload import GPT, LossSnapshots, SourceCode, StepPacer, compute_loss_sum, make_optimizer

TIMEOUT = timedelta(seconds=120)
QUORUM_TICK_MS = 10
JOIN_TIMEOUT_MS = 200

Wrapper = Callable[[Manager, GPT, torch.optim.Optimizer], AbstractContextManager[Any]]


def train_local_sgd(run: Run, place: Place) -> Outcome:
    return train_wrapped(run, place, lambda manager, model, inner: LocalSGD(manager, model, inner, run.sync_every))


def train_without_late(run: Run, place: Place) -> Outcome:
    """LocalSGD whose quorum needs three of the four ranks."""
    return train_wrapped(
        run, place, lambda manager, model, inner: LocalSGD(manager, model, inner, run.sync_every), quorum=RANKS - 1
    )


def train_diloco(run: Run, place: Place) -> Outcome:
    """With the outer optimizer of its paper: Nesterov momentum 0.9, learning rate 0.7."""

    def wrap(manager: Manager, model: GPT, inner: torch.optim.Optimizer) -> AbstractContextManager[Any]:
        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        diloco: AbstractContextManager[Any] = DiLoCo(
            manager, [model], inner, outer, run.sync_every, use_bucketization=True
        )
        return diloco

    return train_wrapped(run, place, wrap)


def train_wrapped(run: Run, place: Place, wrap: Wrapper, quorum: int = RANKS) -> Outcome:
    """`quorum`: how many ranks a synchronization needs."""
    logging.getLogger("torchft").setLevel(logging.WARNING)
    pacer, snapshots = StepPacer(run.draw_costs(), place.rank, run.unit_seconds), LossSnapshots()
    data = SourceCode(run.samples, run.seed)
    lighthouse = start_lighthouse(place, quorum) if place.rank == 0 else None
    model = GPT(pacer)
    optimizer = make_optimizer(model, run.learning_rate)
    schedule = LambdaLR(optimizer, lambda step: run.compute_rate_factor(step * GLOBAL_BATCH))
    state = RejoinState(model, optimizer)
    manager, store = make_manager(run, place, state, quorum)
    weights: list[float] = []
    finished, last_step = place.folder / "finished", run.steps // run.sync_every
    with wrap(manager, model, optimizer):
        for step in range(run.steps):
            positions = get_local_batch(step, place.rank)
            x, y = data.batch(positions)
            optimizer.zero_grad()
            pacer.begin(positions)
            (compute_loss_sum(model, x, y) / LOCAL_BATCH).backward()
            pacer.end()
            synchronizes = (step + 1) % run.sync_every == 0
            if synchronizes and finished.exists():  # this rank was left behind
                break
            state.loaded = False
            step_before = manager.current_step()
            optimizer.step()
            schedule.step()
            if synchronizes:
                is_counted = manager.current_step() > step_before and not state.loaded
                weights += [0.0] * (manager.current_step() - len(weights))
                weights[-1:] = [1 / manager.num_participants() if is_counted else 0.0]
                if run.snapshot_every and (step + 1) % run.snapshot_every < run.sync_every:
                    snapshots.add_snapshot(pacer.period, model)
                pacer.period = manager.current_step() + 1
            elif manager.current_step() == last_step:  # one more step, behind the last synchronization
                break
    finished.touch()
    weights += [0.0] * (last_step - len(weights))
    manager.shutdown(wait=False)
    if lighthouse is not None:
        lighthouse.shutdown()
    del store
    return Outcome(pacer.diary, weights, snapshots.losses(data) if place.rank == 0 else [])


class RejoinState:
    """What a rank is given when it comes too late, and whether it was."""

    def __init__(self, model: GPT, optimizer: torch.optim.Optimizer) -> None:
        self.loaded = False
        self._model, self._optimizer = model, optimizer

    def get(self) -> dict[str, Any]:
        return {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.loaded = True


def start_lighthouse(place: Place, quorum: int) -> LighthouseServer:
    return LighthouseServer(
        bind=f"[::]:{place.ports[RANKS]}",
        min_replicas=quorum,
        join_timeout_ms=60_000 if quorum == RANKS else JOIN_TIMEOUT_MS,
        quorum_tick_ms=QUORUM_TICK_MS,
    )


def make_manager(run: Run, place: Place, state: RejoinState, quorum: int) -> tuple[Manager, TCPStore]:
    """This rank's manager, and the store that its replica group (only this rank) needs."""
    address = run.addresses[place.rank]
    store = TCPStore(address, place.ports[place.rank], is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=state.load,
        state_dict=state.get,
        min_replica_size=quorum,
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
