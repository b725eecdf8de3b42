"""All-reduces of two ranks over NCCL's sockets, with our plugin in it. Each function here runs in the ranks of
`run_workers`."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pacekeeper.observe.collectives.nccl_transport import TransportReader
from pacekeeper_analysis.protocol.transport import OperationFlag, collect_flow_windows

from .machine import DEVICE, NCCL, wait_until_done

MEASURE_NS = 60 * 10**9
TIMEOUT_SECONDS = 10.0


def trace_all_reduces(nbytes: int, count: int) -> dict[str, Any]:
    """What the plugin has reported of `count` all-reduces of `nbytes` bytes, its steps measured.

    `communicators`: their ids, sizes, places. `collectives`: what was reported. `waits`: seconds of all sends by
    what they waited for; `seconds`: of all operations; `flows`: bytes sent by peer, as the sidecar adds them up.
    """
    dist.init_process_group(NCCL)
    tensor = torch.ones(nbytes // 4, device=DEVICE)
    dist.all_reduce(tensor)  # makes the communicator
    wait_until_done()
    reader = TransportReader(Path(os.environ["PACEKEEPER_TRANSPORT"]))
    before = len(reader.operations())
    reader.measure_steps(time.monotonic_ns() + MEASURE_NS)
    dist.barrier()
    for _ in range(count):
        dist.all_reduce(tensor)
    wait_until_done()
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while (
        not len(operations := reader.operations()[before:]) or not operations["end_ns"].all()
    ):  # proxy threads are behind the GPU
        if time.monotonic() > deadline:
            raise TimeoutError(f"transfers have not ended within {TIMEOUT_SECONDS:g} s")
        time.sleep(0.01)
    communicators = reader.communicators()
    sends = operations["flags"] & OperationFlag.SEND != 0
    sent_bytes: dict[int, int] = {}
    for flow in collect_flow_windows(operations, communicators, dist.get_rank(), time.monotonic_ns()):
        sent_bytes[flow.peer] = sent_bytes.get(flow.peer, 0) + flow.sent_bytes
    return {
        "communicators": [
            [int(communicator[name]) for name in ("id", "size", "rank")] for communicator in communicators
        ],
        "collectives": sorted({int(collective) for collective in operations["collective"]}),
        "waits": {name: float(operations[sends][f"{name}_us"].sum()) * 1e-6 for name in ("network", "gpu", "credit")},
        "seconds": float((operations["end_ns"] - operations["start_ns"]).sum()) * 1e-9,
        "flows": {str(peer): nbytes for peer, nbytes in sent_bytes.items()},
    }


def time_all_reduces(nbytes: int, count: int) -> float:
    """Seconds of one all-reduce: the mean of `count`, behind some that warm up."""
    dist.init_process_group(NCCL)
    tensor = torch.ones(nbytes // 4, device=DEVICE)
    for _ in range(20):
        dist.all_reduce(tensor)
    wait_until_done()
    start = time.perf_counter()
    for _ in range(count):
        dist.all_reduce(tensor)
    wait_until_done()
    return (time.perf_counter() - start) / count
