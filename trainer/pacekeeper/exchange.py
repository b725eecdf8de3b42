"""What ranks tell each other besides tensors: plain values, written and read by `plain`. All of it is collective.

Not torch's own collectives of objects: their receivers unpickle what comes, and so would run whatever a peer sends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from .plain import pack_value, unpack_value

_CPU_DEVICE = torch.device("cpu")


def all_gather_objects(mine: Any, group: dist.ProcessGroup, device: torch.device = _CPU_DEVICE) -> list[Any]:
    """What every rank of the group has given, in rank order. `device`: whose tensors the group's backend takes."""
    content = _encode_object(mine, device)
    sizes = _gather_sizes(content, group)
    everybody = torch.empty(len(sizes) * max(sizes), dtype=torch.uint8, device=device)
    dist.all_gather_into_tensor(everybody, _pad_content(content, max(sizes)), group=group)
    return [_decode_object(row, size) for row, size in zip(everybody.cpu().view(len(sizes), -1), sizes, strict=True)]


def gather_objects(mine: Any, group: dist.ProcessGroup) -> list[Any] | None:
    """The same for the group's first rank alone; None on the others."""
    content = _encode_object(mine, _CPU_DEVICE)
    sizes = _gather_sizes(content, group)
    rows = [torch.empty(max(sizes), dtype=torch.uint8) for _ in sizes] if group.rank() == 0 else None
    dist.gather(_pad_content(content, max(sizes)), rows, group=group, group_dst=0)
    return None if rows is None else [_decode_object(row, size) for row, size in zip(rows, sizes, strict=True)]


def scatter_objects(each: Sequence[Any] | None, group: dist.ProcessGroup) -> Any:
    """This rank's item of what the group's first rank gives. `each`: None on the others."""
    contents = None if each is None else [_encode_object(value, _CPU_DEVICE) for value in each]
    sizes = torch.tensor([0] * group.size() if contents is None else [len(content) for content in contents])
    dist.broadcast(sizes, group=group, group_src=0)
    longest = int(sizes.max())
    mine = torch.empty(longest, dtype=torch.uint8)
    rows = None if contents is None else [_pad_content(content, longest) for content in contents]
    dist.scatter(mine, rows, group=group, group_src=0)
    return _decode_object(mine, int(sizes[group.rank()]))


def broadcast_object(value: Any, group: dist.ProcessGroup) -> Any:
    """What the group's first rank says; `said` counts there only."""
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
    """Of all ranks' contents."""
    sizes = torch.empty(group.size(), dtype=torch.int64, device=content.device)
    dist.all_gather_into_tensor(sizes, torch.tensor([len(content)], device=content.device), group=group)
    return [int(size) for size in sizes.tolist()]


def _pad_content(content: torch.Tensor, size: int) -> torch.Tensor:
    return torch.nn.functional.pad(content, (0, size - len(content)))
