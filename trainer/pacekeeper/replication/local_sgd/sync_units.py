"""Units: the parts of a model that are synchronized one at a time, in the order of the forward pass."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from .outer_optimizer import OuterOptimizer, choose_exchange_type, get_local_tensor

ROOT_UNIT_NAME = "(root)"
"""The unit of parameters that no other unit has, usually embeddings and head.

The whole forward pass may use it, so it comes first.
"""


def make_units(model: nn.Module, modules: Iterable[nn.Module], offload: bool) -> list[SyncUnit]:
    """Return the root unit and one for each of `modules`, with each trained parameter in exactly one of them."""
    names = {module: name for name, module in model.named_modules()}
    taken: set[nn.Parameter] = set()
    units = []
    for module in modules:
        units.append(SyncUnit(names[module], module, _take_parameters(module, taken), offload))
    units.insert(0, SyncUnit(ROOT_UNIT_NAME, model, _take_parameters(model, taken), offload))
    return [unit for unit in units if unit.parameters]


def _take_parameters(module: nn.Module, taken: set[nn.Parameter]) -> list[nn.Parameter]:
    parameters = [p for p in module.parameters() if p.requires_grad and p not in taken]
    taken.update(parameters)
    return parameters


class SyncUnit:
    """Some parameters of the model: this rank's part of them, and their values at the last synchronization."""

    def __init__(self, name: str, module: nn.Module, parameters: list[nn.Parameter], offload: bool) -> None:
        self.name = name
        self.module = module
        self.parameters = parameters
        self.numel = sum(get_local_tensor(parameter).numel() for parameter in parameters)
        """Number of elements of this rank's part."""
        self._common_parameters: list[torch.Tensor] = []
        self._offload = offload
        self._type = functools.reduce(torch.promote_types, map(choose_exchange_type, parameters), torch.float32)
        self._buffer: torch.Tensor | None = None
        self._work: dist.Work | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that this rank contributes to the all-reduce."""
        return self.numel * self._type.itemsize

    @property
    def device(self) -> torch.device:
        return get_local_tensor(self.parameters[0]).device

    def save_parameters(self) -> None:
        """Save the present parameters as the common ones."""
        self._common_parameters = [self._copy_to_storage(get_local_tensor(parameter)) for parameter in self.parameters]

    def free_parameters(self) -> None:
        self._common_parameters = []

    def compute_squared_norm(self) -> torch.Tensor:
        """Return ‖Δ‖² of this rank's part; float64, a scalar on its device."""
        norm: torch.Tensor = torch.linalg.vector_norm(self._compute_pseudo_gradient(), dtype=torch.float64)
        return norm.square()

    def launch(self, weight: float, group: dist.ProcessGroup) -> None:
        """Begin to sum the weighted pseudo-gradients. Collective over the replicas."""
        if weight == 0:  # not by multiplication, because 0 · NaN is NaN
            self._buffer = torch.zeros(self.numel, dtype=self._type, device=self.device)
        else:
            self._buffer = self._compute_pseudo_gradient().mul_(weight)
        if self.numel:
            self._work = dist.all_reduce(self._buffer, group=group, async_op=True)

    def wait(self) -> torch.Tensor:
        """Wait for the launched sum, and return it, flat."""
        assert self._buffer is not None
        if self._work is not None:
            self._work.wait()
        buffer, self._buffer, self._work = self._buffer, None, None
        return buffer

    def apply(self, summed: torch.Tensor, outer: OuterOptimizer) -> None:
        """Take the outer step with the mean pseudo-gradient."""
        pieces = summed.split([last.numel() for last in self._common_parameters])
        gradients = [
            piece.view(last.shape).to(last.device, choose_exchange_type(last))
            for piece, last in zip(pieces, self._common_parameters, strict=True)
        ]
        outer.apply(self.parameters, self._common_parameters, gradients)

    def roll_back(self) -> None:
        """Reset the parameters to the last common ones."""
        for parameter, last in zip(self.parameters, self._common_parameters, strict=True):
            get_local_tensor(parameter).copy_(last)

    def _compute_pseudo_gradient(self) -> torch.Tensor:
        """Return Δ = θ_last − θ of this rank's part, flat."""
        assert self._common_parameters, f"{self.name}: there are no common parameters; call start() first"
        flat = torch.cat(
            [
                last.to(get_local_tensor(p).device, self._type).flatten()
                for p, last in zip(self.parameters, self._common_parameters, strict=True)
            ]
        )
        for piece, parameter in zip(
            flat.split([last.numel() for last in self._common_parameters]), self.parameters, strict=True
        ):
            piece.sub_(get_local_tensor(parameter).flatten())
        return flat

    def _copy_to_storage(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to("cpu", copy=True) if self._offload else tensor.clone()
