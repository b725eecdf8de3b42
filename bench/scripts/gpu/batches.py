"""Batches in transfer to a GPU that computes. Each function fails by an AssertionError."""

from __future__ import annotations

import time
from typing import Any

import torch

from pacekeeper.data.device_transfer import CudaBatchCopies, create_batch_mover
from pacekeeper.data.loader import BatchSizes, Loader, RankTopology, SampleOrder

SAMPLES: Any = torch.arange(64.0)


def check_copies_during_work() -> None:
    """A copy waits for nothing, and what uses it waits for the copy."""
    device = get_current_device()
    host_tensor = torch.arange(float(1 << 20)).pin_memory()
    copies = CudaBatchCopies(device)
    copies.begin(host_tensor)
    copies.join()
    torch.cuda.synchronize()
    computed = launch_work(device, 0.5)
    tensor = copies.begin(host_tensor)
    copied = torch.cuda.Event()
    copied.record(copies._stream)
    deadline = time.monotonic() + 10
    while not copied.query():
        assert time.monotonic() < deadline
    assert not computed.query(), "the copy was over when the computation was, and not before"
    copies.join()
    assert torch.equal(tensor.cpu(), host_tensor)


def check_memory_is_kept() -> None:
    """The script drops each batch before the device has come to it, and requests the next one of the same size."""
    device = get_current_device()
    move, sums = create_batch_mover(device), []
    host_tensors = [torch.full((1 << 18,), float(number)).pin_memory() for number in range(50)]  # pinning may wait
    move(host_tensors[0]).sum()  # the first one loads its kernel, which may wait for what the device is at
    computed = launch_work(device, 0.5)
    for tensor in host_tensors:
        batch = move({"x": tensor})
        sums.append(batch["x"].sum())
        del batch
    assert not computed.query(), "the device has caught up: this shows nothing"
    assert [float(total) for total in sums] == [float(number) * (1 << 18) for number in range(50)]


def check_loader_batches(workers: int) -> None:
    """Batches on the device, from pinned memory, with `workers` workers of torch's DataLoader."""
    device = get_current_device()
    pinned = []

    def weight(batch: torch.Tensor) -> float:
        pinned.append(batch.is_pinned())
        return float(batch.sum())

    loader = Loader(
        SAMPLES,
        BatchSizes(8, 4),
        RankTopology(),
        SampleOrder(shuffle=False),
        weight=weight,
        device=device,
        num_workers=workers,
    )
    step = loader.next_step()
    assert step is not None
    assert step[0].weight == sum(range(8))
    batches = list(step[1])
    assert [batch.device for batch in batches] == [device] * 2
    assert torch.cat(batches).tolist() == list(range(8))
    assert pinned == [True, True]


def get_current_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def launch_work(device: torch.device, seconds: float) -> torch.cuda.Event:
    """Launches work that takes at least about `seconds`, and returns before it is done. Its end is the event."""
    matrix = torch.zeros(4096, 4096, device=device)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    matrix @ matrix  # the first one loads libraries
    start.record()
    matrix @ matrix
    end.record()
    end.synchronize()
    for _ in range(int(1e3 * seconds / start.elapsed_time(end)) + 1):
        matrix @ matrix
    end_event = torch.cuda.Event()
    end_event.record()
    return end_event
