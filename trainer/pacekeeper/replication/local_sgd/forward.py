"""What stands before the forward passes of a model's units, in code that torch.compile has compiled too."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from pacekeeper import torch_internals
from pacekeeper_analysis.errors import InputError


class ForwardPass:
    """The forward pass of a model, whose units say when theirs begin.

    It is told to them when they are built, not when replicas begin to train by themselves: compiled code knows no hook
    that came later. And inside of compiled code the hooks do nothing, since whatever they did would break its graph:
    dynamo gives up a whole `for block in self.blocks` for good where one breaks in it. So `begun` has the units whose
    hooks did run; the others are to be complete before the forward pass begins.
    """

    def __init__(self, model: nn.Module, units: Iterable[nn.Module]) -> None:
        """
        model: the script's own module, after sharding, without DistributedDataParallel around it.
        units: parts of it, in the order of the forward pass. Raises InputError for modules that are not the model's.
        """
        self.model = model
        self.units = tuple(units)
        self.pending = False
        """Whether a unit has to be completed before its forward pass. Compiled code is specialised on it."""
        self.complete: Callable[[nn.Module], None] = _do_nothing
        """Completes what the forward pass of a module needs; called while `pending`."""
        self.begun_modules: set[nn.Module] = set()
        """Modules whose forward pass, with gradients, has begun outside of compiled code."""
        parts = set(model.modules())
        for unit in self.units:
            if unit not in parts:
                raise InputError(f"units: {type(unit).__name__} is not a part of the model; give its own modules")
        for module in dict.fromkeys((model, *self.units)):
            module.register_forward_pre_hook(self._handle_forward_begin, prepend=True)  # before FSDP2 gathers its parameters

    def _handle_forward_begin(self, module: nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling():
            if self.pending:  # compiled anew between two synchronisations: right, but its graph breaks here
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
