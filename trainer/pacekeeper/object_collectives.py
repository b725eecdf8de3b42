"""Collectives of plain values, encoded by `safe_serialization`. All functions are collective.

They replace torch's collectives of objects, whose receivers unpickle what arrives and so run code from a peer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from .safe_serialization import pack_value, unpack_value

_CPU_DEVICE = torch.device("cpu")


def all_gather_objects(value: Any, group: dist.ProcessGroup, device: torch.device = _CPU_DEVICE) -> list[Any]:
    """Return the values of all ranks in rank order. `device`: a device whose tensors the group's backend accepts."""
    content = _encode_object(value, device)
    sizes = _gather_sizes(content, group)
    gathered = torch.empty(len(sizes) * max(sizes), dtype=torch.uint8, device=device)
    dist.all_gather_into_tensor(gathered, _pad_content(content, max(sizes)), group=group)
    return [_decode_object(row, size) for row, size in zip(gathered.cpu().view(len(sizes), -1), sizes, strict=True)]


def gather_objects(value: Any, group: dist.ProcessGroup) -> list[Any] | None:
    """Return the values of all ranks on the group's first rank; None on the others."""
    content = _encode_object(value, _CPU_DEVICE)
    sizes = _gather_sizes(content, group)
    rows = [torch.empty(max(sizes), dtype=torch.uint8) for _ in sizes] if group.rank() == 0 else None
    dist.gather(_pad_content(content, max(sizes)), rows, group=group, group_dst=0)
    return None if rows is None else [_decode_object(row, size) for row, size in zip(rows, sizes, strict=True)]


def scatter_objects(values: Sequence[Any] | None, group: dist.ProcessGroup) -> Any:
    """Return this rank's item of `values`, which the group's first rank passes; it is None on the others."""
    contents = None if values is None else [_encode_object(value, _CPU_DEVICE) for value in values]
    sizes = torch.tensor([0] * group.size() if contents is None else [len(content) for content in contents])
    dist.broadcast(sizes, group=group, group_src=0)
    longest = int(sizes.max())
    own_row = torch.empty(longest, dtype=torch.uint8)
    rows = None if contents is None else [_pad_content(content, longest) for content in contents]
    dist.scatter(own_row, rows, group=group, group_src=0)
    return _decode_object(own_row, int(sizes[group.rank()]))


def broadcast_object(value: Any, group: dist.ProcessGroup) -> Any:
    """Return the `value` of the group's first rank; the other ranks' argument is ignored."""
    content = _encode_object(value, _CPU_DEVICE) if group.rank() == 0 else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor([len(content)])
    dist.broadcast(size, group=group, group_src=0)
    content = content if group.rank() == 0 else torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(content, group=group, group_src=0)
    return _decode_object(content, int(size))


def _encode_object(value: Any, device: torch.device) -> torch.Tensor:
    return torch.frombuffer(bytearray(pack_value(value)), dtype=torch.uint8).to(device)


def _decode_object(content: torch.Tensor, size: int) -> Any:
    return unpack_value(content[:size].numpy().data)


def _gather_sizes(content: torch.Tensor, group: dist.ProcessGroup) -> list[int]:
    """Return the size of each rank's content."""
    sizes = torch.empty(group.size(), dtype=torch.int64, device=content.device)
    dist.all_gather_into_tensor(sizes, torch.tensor([len(content)], device=content.device), group=group)
    return [int(size) for size in sizes.tolist()]


def _pad_content(content: torch.Tensor, size: int) -> torch.Tensor:
    return torch.nn.functional.pad(content, (0, size - len(content)))
