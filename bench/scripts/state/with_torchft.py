"""torchft's checkpoint transfer, in its own environment: rank 1 has crashed and gets the state of rank 0, which lives.

What torchft brings back is a replica's: each rank is one, of as many bytes as a shard of ours. `transfer_by_http` has
the transport that its Manager takes by itself. `transfer_by_pg` has the other one at its best: received in place, into
an optimizer that has its moments already and over a group that is there, both of which are not in the time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torchft import ProcessGroupGloo  # type: ignore[import-not-found, unused-ignore]
from torchft.checkpointing.http_transport import (  # type: ignore[import-not-found, unused-ignore]
    HTTPTransport,
)
from torchft.checkpointing.pg_transport import PGTransport  # type: ignore[import-not-found, unused-ignore]

from .workload import RANKS, compute_digest, make_net, make_optimizer, train_step

TIMEOUT = timedelta(seconds=120)
LIVE_RANK, CRASHED_RANK = range(RANKS)
STEP = 1


def transfer_by_http(rank: int, layers: int) -> tuple[float, bool]:
    return _transfer_state(rank, layers, lambda _: HTTPTransport(timeout=TIMEOUT, num_chunks=0), in_place=False)


def transfer_by_pg(rank: int, layers: int) -> tuple[float, bool]:
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False) if rank == LIVE_RANK else None

    def create_transport(state: Callable[[], dict[str, Any]]) -> PGTransport[Any]:
        group = ProcessGroupGloo(timeout=TIMEOUT)
        address = f"localhost:{_gather_values(store.port if store else 0)[LIVE_RANK]}/torchft"
        group.configure(store_addr=address, replica_id=str(rank), rank=rank, world_size=RANKS)
        return PGTransport(pg=group, timeout=TIMEOUT, device=torch.device("cpu"), state_dict=state)

    return _transfer_state(rank, layers, create_transport, in_place=True)


def _transfer_state(rank: int, layers: int, transport_for: Any, in_place: bool) -> tuple[float, bool]:
    """Seconds, and whether the state is that of the rank that lives."""
    net = make_net(layers)
    optimizer = make_optimizer(net)
    if rank == LIVE_RANK or in_place:
        train_step(net, optimizer, seed=rank)

    def state() -> dict[str, Any]:
        return {"model": net.state_dict(), "optimizer": optimizer.state_dict()}

    transport = transport_for(state)
    metadata = _gather_values(transport.metadata())[LIVE_RANK]
    dist.barrier()
    start = time.perf_counter()
    if rank == LIVE_RANK:
        transport.send_checkpoint([CRASHED_RANK], STEP, state(), TIMEOUT)
    else:
        received = transport.recv_checkpoint(LIVE_RANK, metadata, STEP, TIMEOUT)
        net.load_state_dict(received["model"])
        optimizer.load_state_dict(received["optimizer"])
    seconds = time.perf_counter() - start
    dist.barrier()  # the other one is served until then
    digests = _gather_values(compute_digest(net, optimizer))
    return seconds, digests[CRASHED_RANK] == digests[LIVE_RANK]


def _gather_values(value: Any) -> list[Any]:
    """Of all ranks, in order."""
    values: list[Any] = [None] * RANKS
    dist.all_gather_object(values, value)
    return values
