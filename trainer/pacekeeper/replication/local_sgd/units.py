"""Units: the parts of a model that are synchronised one at a time, in the order of the forward pass."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from .outer import OuterOptimizer, exchange_type, local

ROOT = "(root)"
"""The unit of what no other unit has: embeddings and head, usually. The whole forward pass may use it, so it comes
first."""


def make_units(model: nn.Module, modules: Iterable[nn.Module], offload: bool) -> list[Unit]:
    """The root unit and one for each of `modules`, with each trained parameter in exactly one of them."""
    names = {module: name for name, module in model.named_modules()}
    taken: set[nn.Parameter] = set()
    units = []
    for module in modules:
        units.append(Unit(names[module], module, _take(module, taken), offload))
    units.insert(0, Unit(ROOT, model, _take(model, taken), offload))
    return [unit for unit in units if unit.parameters]


def _take(module: nn.Module, taken: set[nn.Parameter]) -> list[nn.Parameter]:
    parameters = [p for p in module.parameters() if p.requires_grad and p not in taken]
    taken.update(parameters)
    return parameters


class Unit:
    """Some parameters of the model, this rank's part of them, and where they were at the last synchronisation."""

    def __init__(self, name: str, module: nn.Module, parameters: list[nn.Parameter], offload: bool) -> None:
        self.name = name
        self.module = module
        self.parameters = parameters
        self.numel = sum(local(parameter).numel() for parameter in parameters)
        """Of this rank's part."""
        self._last: list[torch.Tensor] = []
        self._offload = offload
        self._type = functools.reduce(torch.promote_types, map(exchange_type, parameters), torch.float32)
        self._buffer: torch.Tensor | None = None
        self._work: dist.Work | None = None

    @property
    def nbytes(self) -> int:
        """That this rank gives into the all-reduce."""
        return self.numel * self._type.itemsize

    @property
    def device(self) -> torch.device:
        return local(self.parameters[0]).device

    def remember(self) -> None:
        """The parameters are the common ones."""
        self._last = [self._placed(local(parameter)) for parameter in self.parameters]

    def forget(self) -> None:
        self._last = []

    def squared_norm(self) -> torch.Tensor:
        """‖Δ‖² of this rank's part; float64, a scalar on its device."""
        norm: torch.Tensor = torch.linalg.vector_norm(self._pseudo_gradient(), dtype=torch.float64)
        return norm.square()

    def launch(self, weight: float, group: dist.ProcessGroup) -> None:
        """Begins to sum up the weighted pseudo-gradients. Collective over the replicas."""
        if weight == 0:  # not by multiplication: 0 · NaN is NaN
            self._buffer = torch.zeros(self.numel, dtype=self._type, device=self.device)
        else:
            self._buffer = self._pseudo_gradient().mul_(weight)
        if self.numel:
            self._work = dist.all_reduce(self._buffer, group=group, async_op=True)

    def wait(self) -> torch.Tensor:
        """The sum that was launched, flat."""
        assert self._buffer is not None
        if self._work is not None:
            self._work.wait()
        buffer, self._buffer, self._work = self._buffer, None, None
        return buffer

    def apply(self, summed: torch.Tensor, outer: OuterOptimizer) -> None:
        """Takes the outer step with the mean pseudo-gradient."""
        pieces = summed.split([last.numel() for last in self._last])
        gradients = [
            piece.view(last.shape).to(last.device, exchange_type(last))
            for piece, last in zip(pieces, self._last, strict=True)
        ]
        outer.apply(self.parameters, self._last, gradients)

    def roll_back(self) -> None:
        """To the last common parameters."""
        for parameter, last in zip(self.parameters, self._last, strict=True):
            local(parameter).copy_(last)

    def _pseudo_gradient(self) -> torch.Tensor:
        """Δ = θ_last − θ, this rank's part, flat."""
        assert self._last, f"{self.name}: no common parameters are known; start() comes first"
        flat = torch.cat(
            [
                last.to(local(p).device, self._type).flatten()
                for p, last in zip(self.parameters, self._last, strict=True)
            ]
        )
        for piece, parameter in zip(flat.split([last.numel() for last in self._last]), self.parameters, strict=True):
            piece.sub_(local(parameter).flatten())
        return flat

    def _placed(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to("cpu", copy=True) if self._offload else tensor.clone()
