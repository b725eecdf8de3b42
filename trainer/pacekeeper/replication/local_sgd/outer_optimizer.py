"""The outer optimizer: SGD with Nesterov momentum over pseudo-gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .settings import OuterSGD

_MOMENTUM_KEY = "momentum_buffer"


class OuterOptimizer(torch.optim.Optimizer):
    """Moves the last common parameters by the replicas' mean pseudo-gradient at each synchronization.

    It is an optimizer over the model's own parameters, so that checkpoints shard its state like them. Its momentum
    exists from the beginning. `Replicas` calls it: its own `step` raises.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], settings: OuterSGD) -> None:
        super().__init__(
            list(parameters), {"lr": settings.lr, "momentum": settings.momentum, "nesterov": settings.nesterov}
        )
        self._offload = settings.offload
        for parameter in self._list_parameters():
            zeros = torch.zeros_like(parameter, dtype=choose_exchange_type(parameter), requires_grad=False)
            self.state[parameter] = {_MOMENTUM_KEY: zeros.cpu() if self._offload else zeros}

    @torch.no_grad()
    def apply(
        self, parameters: Sequence[nn.Parameter], last: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
    ) -> None:
        """Take one outer step from `last`, in place, and copy the result to `parameters`.

        `last`, `gradients`: this rank's part of each of `parameters`, on the device of the momentum; gradients in the
        type of `choose_exchange_type`. The gradients are overwritten.
        """
        settings = self.param_groups[0]
        lr, momentum, nesterov = settings["lr"], settings["momentum"], settings["nesterov"]
        for parameter, anchor, gradient in zip(parameters, last, gradients, strict=True):
            velocity = get_local_tensor(self.state[parameter][_MOMENTUM_KEY])
            velocity.mul_(momentum).add_(gradient)
            step = gradient.add_(velocity, alpha=momentum) if nesterov else velocity
            anchor.copy_(torch.add(anchor, step, alpha=-lr))  # in the wider type, then rounded once
            get_local_tensor(parameter).copy_(anchor)

    def step(self, closure: Any = None) -> NoReturn:  # noqa: ARG002
        raise RuntimeError("the outer optimizer steps in synchronizations; do not call its step()")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state as any optimizer does, but keep the momentum's type and device."""
        super().load_state_dict(state_dict)
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        for key, parameter in zip(keys, self._list_parameters(), strict=True):
            loaded = state_dict["state"][key][_MOMENTUM_KEY].detach().to(choose_exchange_type(parameter), copy=True)
            device = torch.device("cpu") if self._offload else get_local_tensor(parameter).device
            self.state[parameter] = {_MOMENTUM_KEY: loaded.to(device)}

    def reset(self) -> None:
        """Reset the momentum to zero."""
        for parameter in self._list_parameters():
            self.state[parameter][_MOMENTUM_KEY].zero_()

    def _list_parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.param_groups for parameter in group["params"]]


def get_local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a sharded tensor, which shares its memory. An unsharded tensor is returned itself."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def choose_exchange_type(tensor: torch.Tensor) -> torch.dtype:
    """Return the type in which pseudo-gradients are computed, sent and summed: at least float32."""
    return torch.promote_types(tensor.dtype, torch.float32)
