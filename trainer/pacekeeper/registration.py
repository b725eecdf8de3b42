"""Checks that a script registers everything that the job trains with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from pacekeeper_analysis.errors import InputError

from .data.loader import Loader

_STATEFUL_TYPES = (nn.Module, torch.optim.Optimizer, LRScheduler, Loader, torch.amp.GradScaler)


def check_registered(
    objects: Mapping[str, Any], models: Iterable[nn.Module], optimizers: Sequence[torch.optim.Optimizer], loader: Loader
) -> None:
    """Raise InputError if the state of something would be lost at a restart while the job's steps continue.

    `objects`: the registered objects. An object of the script's own class may hold any of the others in its state, so
    its presence ends the check.
    """
    if not all(isinstance(item, _STATEFUL_TYPES) for item in objects.values()):
        return
    registered_ids = {id(item) for item in objects.values()}
    modules = [item for item in objects.values() if isinstance(item, nn.Module)]
    parameters = {id(parameter) for module in modules for parameter in module.parameters()}
    missing = {
        "model": any(id(parameter) not in parameters for model in models for parameter in model.parameters()),
        "optimizer": any(id(optimizer) not in registered_ids for optimizer in optimizers),
        "loader": id(loader) not in registered_ids,
    }
    arguments = ", ".join(f"{name}={name}" for name, is_missing in missing.items() if is_missing)
    if arguments:
        raise InputError(f"steps(): checkpoints lack what the job trains with; call job.restore({arguments})")
