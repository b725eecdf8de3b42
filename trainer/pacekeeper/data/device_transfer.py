"""Moves batches from the host to the job's device while the device continues its work.

The copies run on a separate stream, which waits for nothing. Since the host runs ahead of the device, a copy is
complete long before the device needs the batch. The script's stream waits for the copy; the host does not. The script
may use the batch freely: its memory is reused only when the script's stream has passed its last use.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any, Protocol

import torch

MoveBatch = Callable[[Any], Any]


def create_batch_mover(device: torch.device | None) -> MoveBatch:
    """Return a function that moves a batch to `device`; for None and the CPU it changes nothing."""
    if device is None or device.type == "cpu":
        return lambda batch: batch
    copies: BatchCopies = CudaBatchCopies(device) if device.type == "cuda" else OrderedBatchCopies(device)
    return lambda batch: move_to_device(batch, device, copies)


class BatchCopies(Protocol):
    """Copies to a device, which begin when they are requested."""

    def begin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Begin to copy `tensor` from the host, and return the tensor on the device."""

    def join(self) -> None:
        """Make work that the calling thread launches from now on wait for all copies that have begun."""


class CudaBatchCopies:
    """Copies on a separate stream. They overlap with the device's work if the tensors are in pinned memory."""

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
    """Copies in the order of the calling thread's other work on the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def begin(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._device, non_blocking=True)

    def join(self) -> None:
        pass


def move_to_device(batch: Any, device: torch.device, copies: BatchCopies) -> Any:
    """Return the batch with its tensors on the device, in nested mappings, lists, tuples and dataclasses.

    Objects with a `to` method are moved by `to(device, non_blocking=True)`. Everything else stays unchanged.
    """

    def walk(part: Any) -> Any:
        if isinstance(part, torch.Tensor) and part.device.type == "cpu":
            return copies.begin(part)
        if hasattr(part, "to"):
            return part.to(device, non_blocking=True)
        if isinstance(part, MutableMapping):
            mapping = copy(part)  # keeps its type and its other attributes
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
