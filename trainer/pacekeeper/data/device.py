"""Takes batches from the host to the job's device, while the device goes on with its work.

The copies run on a stream of their own. It waits for nothing, so a copy is over long before the device comes to the
batch, as the host runs ahead of it; and the script's stream waits for the copy, not the host. What the script does with
the batch needs no care: the memory is used again only when the script's stream has passed its use.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any, Protocol

import torch

MoveBatch = Callable[[Any], Any]


def create_batch_mover(device: torch.device | None) -> MoveBatch:
    """What takes a batch to `device`; None, or the CPU: it stays where it is."""
    if device is None or device.type == "cpu":
        return lambda batch: batch
    copies: BatchCopies = CudaBatchCopies(device) if device.type == "cuda" else OrderedBatchCopies(device)
    return lambda batch: move_to_device(batch, device, copies)


class BatchCopies(Protocol):
    """Copies to a device, each of which it begins when it is asked to."""

    def begin(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor on the device. `tensor`: on the host."""

    def join(self) -> None:
        """What the calling thread launches on the device from now on comes after all copies that have begun."""


class CudaBatchCopies:
    """On a stream of their own. They overlap with the device's work where the tensors are in pinned memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def begin(self, tensor: torch.Tensor) -> torch.Tensor:
        with torch.cuda.stream(self._stream):
            moved = tensor.to(self._device, non_blocking=True)
        moved.record_stream(torch.cuda.current_stream(self._device))
        return moved

    def join(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


class OrderedBatchCopies:
    """In the order of the calling thread's other work on the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def begin(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._device, non_blocking=True)

    def join(self) -> None:
        pass


def move_to_device(batch: Any, device: torch.device, copies: BatchCopies) -> Any:
    """The batch with its tensors on the device: those in mappings, lists, tuples and dataclasses, however nested.

    What has a `to` of its own is moved by `to(device, non_blocking=True)`; anything else stays as it is.
    """

    def walk(part: Any) -> Any:
        if isinstance(part, torch.Tensor) and part.device.type == "cpu":
            return copies.begin(part)
        if hasattr(part, "to"):
            return part.to(device, non_blocking=True)
        if isinstance(part, MutableMapping):
            mapping = copy(part)  # keeps its type, and what else it carries
            mapping.update({key: walk(value) for key, value in part.items()})
            return mapping
        if isinstance(part, tuple) and hasattr(part, "_fields"):
            return type(part)(*map(walk, part))
        if isinstance(part, (list, tuple)):
            return type(part)(map(walk, part))
        if is_dataclass(part):
            record = copy(part)
            for field in fields(part):
                object.__setattr__(record, field.name, walk(getattr(part, field.name)))
            return record
        return part

    moved = walk(batch)
    copies.join()
    return moved
