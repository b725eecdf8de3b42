"""Brings replicas back to one state: makes their individual optimizer states and buffers the same."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pacekeeper.object_collectives import all_gather_objects
from pacekeeper.safe_serialization import allow_classes

from .outer_optimizer import choose_exchange_type, get_local_tensor

_ALL_REDUCE_CHUNK_BYTES = 64 << 20
"""Bytes of one all-reduce."""
_STEP_COUNT_KEY = "step"
"""Name of the step count in torch's optimizers, a floating-point tensor."""


def equalize_replicas(
    optimizer: torch.optim.Optimizer, models: Iterable[nn.Module], sync_group: dist.ProcessGroup
) -> None:
    """Make inner optimizer states and buffers the same on all replicas. Collective over the sync group.

    Floating-point moments and buffers become the mean over the replicas where they are finite, step counts the maximum,
    other tensors those of the group's first rank. If only some replicas have a state for a parameter (the others have
    had no gradient for it), all get theirs.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    borrowed_keys = _borrow_layout(optimizer, parameters, sync_group)
    buffers = [buffer for model in models for buffer in model.buffers()]
    moments = [
        (index, key, value)
        for index, parameter in enumerate(parameters)
        for key, value in sorted(optimizer.state.get(parameter, {}).items())
    ]
    averaged = [
        _StateEntry(get_local_tensor(value), (index, key) not in borrowed_keys)
        for index, key, value in moments
        if isinstance(value, torch.Tensor) and value.is_floating_point() and key != _STEP_COUNT_KEY
    ]
    averaged += [_StateEntry(get_local_tensor(buffer), True) for buffer in buffers if buffer.is_floating_point()]
    device = get_local_tensor(parameters[0]).device
    with torch.no_grad():
        _average_entries(averaged, device, sync_group)
        _take_largest(optimizer, parameters, moments, device, sync_group)
        values = [value for _, key, value in moments if isinstance(value, torch.Tensor) and key != _STEP_COUNT_KEY]
        for tensor in values + buffers:
            if not tensor.is_floating_point():
                _take_first(get_local_tensor(tensor), device, sync_group)


def reset_moments(optimizer: torch.optim.Optimizer) -> None:
    """Set this rank's moments and step counts to zero: they contain what made its parameters invalid."""
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                get_local_tensor(value).zero_()
            elif _is_number(value):
                state[key] = type(value)(0)


@dataclass(frozen=True)
class _StateEntryLayout:
    """Layout of one entry of an optimizer's state."""

    shape: torch.Size | None  # None: a plain number
    dtype: torch.dtype | None
    on_cpu: bool


allow_classes(_StateEntryLayout)


@dataclass(frozen=True)
class _StateEntry:
    tensor: torch.Tensor
    is_counted: bool


def _borrow_layout(
    optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup
) -> set[tuple[int, str]]:
    """Add entries that only another replica has, as zeros, and return their (parameter, key)."""
    own_layouts = {
        (index, key): _describe_layout(value)
        for index, parameter in enumerate(parameters)
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, torch.Tensor) or _is_number(value)
    }
    all_layouts: dict[tuple[int, str], _StateEntryLayout] = {}
    for layouts in all_gather_objects(own_layouts, group, get_local_tensor(parameters[0]).device):
        all_layouts = layouts | all_layouts
    missing = all_layouts.keys() - own_layouts.keys()
    for index, key in sorted(missing):
        parameter = parameters[index]
        optimizer.state[parameter][key] = _create_zeros(all_layouts[index, key], parameter)
    return set(missing)


def _describe_layout(value: Any) -> _StateEntryLayout:
    if isinstance(value, torch.Tensor):
        part = get_local_tensor(value)
        return _StateEntryLayout(part.shape, part.dtype, part.is_cpu)
    return _StateEntryLayout(None, None, on_cpu=True)


def _create_zeros(layout: _StateEntryLayout, parameter: nn.Parameter) -> Any:
    if layout.shape is None:
        return 0
    if layout.shape == get_local_tensor(parameter).shape:  # sharded like the parameter
        zeros = torch.zeros_like(parameter, dtype=layout.dtype, requires_grad=False)
    else:
        zeros = torch.zeros(layout.shape, dtype=layout.dtype, device=get_local_tensor(parameter).device)
    return zeros.cpu() if layout.on_cpu else zeros


def _average_entries(entries: Sequence[_StateEntry], device: torch.device, group: dist.ProcessGroup) -> None:
    """Set each tensor to the mean of the replicas' tensors that count and are finite; zero if there are none."""
    if not entries:
        return
    used = [entry.is_counted and bool(entry.tensor.isfinite().all()) for entry in entries]
    counts = torch.tensor(used, dtype=torch.float64, device=device)
    dist.all_reduce(counts, group=group)
    shares = (1 / counts.clamp(min=1)).tolist()
    for chunk in _split_into_chunks(entries):
        tensors = [entries[index].tensor for index in chunk]
        flat = torch.cat(
            [
                (tensor if used[index] else torch.zeros_like(tensor)).flatten().to(device, choose_exchange_type(tensor))
                for index, tensor in zip(chunk, tensors, strict=True)
            ]
        )
        dist.all_reduce(flat, group=group)
        pieces = flat.split([tensor.numel() for tensor in tensors])
        for index, tensor, piece in zip(chunk, tensors, pieces, strict=True):
            tensor.copy_(piece.mul_(shares[index]).view(tensor.shape))


def _split_into_chunks(entries: Sequence[_StateEntry]) -> Iterator[list[int]]:
    """Yield indices of entries for one all-reduce: of one type, with a limited number of bytes."""
    types = [choose_exchange_type(entry.tensor) for entry in entries]
    for dtype in dict.fromkeys(types):
        chunk: list[int] = []
        nbytes = 0
        for index, entry in enumerate(entries):
            if types[index] != dtype:
                continue
            chunk.append(index)
            nbytes += entry.tensor.numel() * dtype.itemsize
            if nbytes >= _ALL_REDUCE_CHUNK_BYTES:
                yield chunk
                chunk, nbytes = [], 0
        if chunk:
            yield chunk


def _take_largest(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[nn.Parameter],
    moments: Sequence[tuple[int, str, Any]],
    device: torch.device,
    group: dist.ProcessGroup,
) -> None:
    """Set step counts and other plain numbers to the largest of the replicas'."""
    counts = [(index, key, value) for index, key, value in moments if key == _STEP_COUNT_KEY or _is_number(value)]
    if not counts:
        return
    largest = torch.tensor([float(value) for _, _, value in counts], dtype=torch.float64, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    for (index, key, value), number in zip(counts, largest.tolist(), strict=True):
        if isinstance(value, torch.Tensor):
            get_local_tensor(value).fill_(number)
        else:
            optimizer.state[parameters[index]][key] = type(value)(number)


def _take_first(tensor: torch.Tensor, device: torch.device, group: dist.ProcessGroup) -> None:
    """Set the tensor to that of the group's first rank."""
    first = tensor.to(device).contiguous()
    dist.broadcast(first, group=group, group_src=0)
    tensor.copy_(first)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
