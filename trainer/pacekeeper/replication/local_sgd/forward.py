"""Hooks before the forward passes of a model's units, also in code that torch.compile has compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from pacekeeper import torch_internals
from pacekeeper_analysis.errors import InputError


class ForwardPass:
    """The forward pass of a model, whose units report when theirs begin.

    Hooks are registered when this is created, not when replicas start to train independently, because compiled code
    does not call later hooks. Inside of compiled code the hooks do nothing, because any action would break its graph:
    dynamo permanently gives up a whole `for block in self.blocks` if one block breaks it. `begun_modules` therefore has
    the units whose hooks did run; the others must be complete before the forward pass begins.
    """

    def __init__(self, model: nn.Module, units: Iterable[nn.Module]) -> None:
        """Register the hooks.

        `model`: the script's own module, after sharding, without DistributedDataParallel around it.
        `units`: parts of it, in the order of the forward pass. Raises InputError for modules of another model.
        """
        self.model = model
        self.units = tuple(units)
        self.pending = False
        """Whether a unit has to be completed before its forward pass. Compiled code is specialized on it."""
        self.complete: Callable[[nn.Module], None] = _do_nothing
        """Completes what the forward pass of a module needs; called while `pending`."""
        self.begun_modules: set[nn.Module] = set()
        """Modules whose forward pass, with gradients, has begun outside of compiled code."""
        modules = set(model.modules())
        for unit in self.units:
            if unit not in modules:
                raise InputError(f"units: {type(unit).__name__} is not a part of the model; pass its own modules")
        for module in dict.fromkeys((model, *self.units)):
            module.register_forward_pre_hook(
                self._handle_forward_begin, prepend=True
            )  # before FSDP2 gathers its parameters

    def _handle_forward_begin(self, module: nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling():
            if self.pending:  # recompiled during a synchronization: correct, but its graph breaks here
                torch.compiler.disable(self._complete_module)(module)
            return
        if torch.is_grad_enabled():
            self.begun_modules.add(module)
        if self.pending:
            self._complete_module(module)

    def _complete_module(self, module: nn.Module) -> None:
        self.complete(module)


def _do_nothing(_: nn.Module) -> None:
    pass


torch_internals.leave_uncompiled(ForwardPass._handle_forward_begin)
torch_internals.leave_uncompiled(ForwardPass._complete_module, recursive=True)
