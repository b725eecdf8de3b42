"""torchft's checkpoint transfer, in its own environment: rank 1 has crashed and gets the state of rank 0, which lives.

What torchft brings back is a replica's: each rank is one, of as many bytes as a shard of ours. `http` is the transport
that its Manager takes by itself. `pg` is the other one at its best: received in place, into an optimizer that has its
moments already and over a group that is there, both of which are not in the time.
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

from .workload import RANKS, digest, make_net, make_optimizer, train

TIMEOUT = timedelta(seconds=120)
LIVES, CRASHED = range(RANKS)
STEP = 1


def http(rank: int, layers: int) -> tuple[float, bool]:
    return _transfer(rank, layers, lambda _: HTTPTransport(timeout=TIMEOUT, num_chunks=0), in_place=False)


def pg(rank: int, layers: int) -> tuple[float, bool]:
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False) if rank == LIVES else None

    def transport(state: Callable[[], dict[str, Any]]) -> PGTransport[Any]:
        group = ProcessGroupGloo(timeout=TIMEOUT)
        address = f"localhost:{_exchanged(store.port if store else 0)[LIVES]}/torchft"
        group.configure(store_addr=address, replica_id=str(rank), rank=rank, world_size=RANKS)
        return PGTransport(pg=group, timeout=TIMEOUT, device=torch.device("cpu"), state_dict=state)

    return _transfer(rank, layers, transport, in_place=True)


def _transfer(rank: int, layers: int, transport_for: Any, in_place: bool) -> tuple[float, bool]:
    """Seconds, and whether the state is that of the rank that lives."""
    net = make_net(layers)
    optimizer = make_optimizer(net)
    if rank == LIVES or in_place:
        train(net, optimizer, seed=rank)

    def state() -> dict[str, Any]:
        return {"model": net.state_dict(), "optimizer": optimizer.state_dict()}

    transport = transport_for(state)
    metadata = _exchanged(transport.metadata())[LIVES]
    dist.barrier()
    start = time.perf_counter()
    if rank == LIVES:
        transport.send_checkpoint([CRASHED], STEP, state(), TIMEOUT)
    else:
        found = transport.recv_checkpoint(LIVES, metadata, STEP, TIMEOUT)
        net.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
    seconds = time.perf_counter() - start
    dist.barrier()  # the other one is served until then
    digests = _exchanged(digest(net, optimizer))
    return seconds, digests[CRASHED] == digests[LIVES]


def _exchanged(mine: Any) -> list[Any]:
    """Of all ranks, in order."""
    said: list[Any] = [None] * RANKS
    dist.all_gather_object(said, mine)
    return said
