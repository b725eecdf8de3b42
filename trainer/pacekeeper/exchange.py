"""What ranks tell each other besides tensors: plain values, written and read by `plain`. All of it is collective.

Not torch's own collectives of objects: their receivers unpickle what comes, and so would run whatever a peer sends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from .plain import pack, unpack

_CPU = torch.device("cpu")


def gather(mine: Any, group: dist.ProcessGroup, device: torch.device = _CPU) -> list[Any]:
    """What every rank of the group has given, in rank order. `device`: whose tensors the group's backend takes."""
    content = _content(mine, device)
    sizes = _sizes(content, group)
    everybody = torch.empty(len(sizes) * max(sizes), dtype=torch.uint8, device=device)
    dist.all_gather_into_tensor(everybody, _padded(content, max(sizes)), group=group)
    return [_read(row, size) for row, size in zip(everybody.cpu().view(len(sizes), -1), sizes, strict=True)]


def collect(mine: Any, group: dist.ProcessGroup) -> list[Any] | None:
    """The same for the group's first rank alone; None on the others."""
    content = _content(mine, _CPU)
    sizes = _sizes(content, group)
    rows = [torch.empty(max(sizes), dtype=torch.uint8) for _ in sizes] if group.rank() == 0 else None
    dist.gather(_padded(content, max(sizes)), rows, group=group, group_dst=0)
    return None if rows is None else [_read(row, size) for row, size in zip(rows, sizes, strict=True)]


def scatter(each: Sequence[Any] | None, group: dist.ProcessGroup) -> Any:
    """This rank's item of what the group's first rank gives. `each`: None on the others."""
    contents = None if each is None else [_content(value, _CPU) for value in each]
    sizes = torch.tensor([0] * group.size() if contents is None else [len(content) for content in contents])
    dist.broadcast(sizes, group=group, group_src=0)
    longest = int(sizes.max())
    mine = torch.empty(longest, dtype=torch.uint8)
    rows = None if contents is None else [_padded(content, longest) for content in contents]
    dist.scatter(mine, rows, group=group, group_src=0)
    return _read(mine, int(sizes[group.rank()]))


def broadcast(said: Any, group: dist.ProcessGroup) -> Any:
    """What the group's first rank says; `said` counts there only."""
    content = _content(said, _CPU) if group.rank() == 0 else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor([len(content)])
    dist.broadcast(size, group=group, group_src=0)
    content = content if group.rank() == 0 else torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(content, group=group, group_src=0)
    return _read(content, int(size))


def _content(value: Any, device: torch.device) -> torch.Tensor:
    return torch.frombuffer(bytearray(pack(value)), dtype=torch.uint8).to(device)


def _read(content: torch.Tensor, size: int) -> Any:
    return unpack(content[:size].numpy().data)


def _sizes(content: torch.Tensor, group: dist.ProcessGroup) -> list[int]:
    """Of all ranks' contents."""
    sizes = torch.empty(group.size(), dtype=torch.int64, device=content.device)
    dist.all_gather_into_tensor(sizes, torch.tensor([len(content)], device=content.device), group=group)
    return [int(size) for size in sizes.tolist()]


def _padded(content: torch.Tensor, size: int) -> torch.Tensor:
    return torch.nn.functional.pad(content, (0, size - len(content)))
