"""Waits until a process imports torch. It imports nothing else, because each Python process runs it.

A process becomes a rank when it creates its first process group or steps its first optimizer. Workers of data loaders
and agents do neither. Variables do not tell: `mp.spawn`, Ray, and MPI set `RANK` too late or never.
"""

from __future__ import annotations

import os  # loaded already
import sys

from .guard import guard
from .import_hook import ImportHook

_HOOKS = {
    "torch.distributed.distributed_c10d": "watch_process_groups",
    "torch.optim.optimizer": "watch_optimizers",
    "torch.distributed.elastic.multiprocessing.api": "watch_agent",
}
"""By module of torch: the function of `torch_hooks.py` that is called once the module has been imported."""


def prepare_process() -> None:
    """Register the import hook. In a worker's pod of an image without Pacekeeper, torchrun is replaced."""
    if "PACEKEEPER_PAYLOAD" in os.environ:
        from .takeover import prepare_takeover

        prepare_takeover()
    sys.meta_path.insert(0, ImportHook(dict.fromkeys(_HOOKS, _install_hooks)))  # type: ignore[arg-type]  # no base class


def _install_hooks(name: str, module: object) -> None:
    guard.run(f"hooks of {name}", _import_and_install, name, module)


def _import_and_install(name: str, module: object) -> None:
    from . import torch_hooks

    getattr(torch_hooks, _HOOKS[name])(module)
