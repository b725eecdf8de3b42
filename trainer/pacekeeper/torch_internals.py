"""Every name of torch that is not public, in one place: each has a test in tests/distributed/test_torch_internals.py.

pyproject.toml bounds torch from above: a newer one is allowed when these tests have passed with it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._C._distributed_c10d import (
    GradBucket,
    HashStore,
    ProcessGroup,
    Store,
    Work,
    _broadcast_coalesced,
)
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.checkpoint.filesystem import _StoragePrefix as StoragePrefix
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only
from torch.utils.data import dataloader
from torch.utils.data._utils import worker

try:
    from torch._C._distributed_c10d import HookOpName
except ImportError:  # before 2.15, when process groups got hooks
    HookOpName = None  # type: ignore[assignment,misc]

__all__ = [
    "GradBucket",
    "HashStore",
    "HookOpName",
    "ProcessGroup",
    "StorageInfo",
    "StoragePrefix",
    "Store",
    "Work",
    "engine",
    "set_element",
    "tree_map_only",
]

engine = torch.autograd.Variable._execution_engine

_kernels: list[torch.library.Library] = []
"""What keeps kernels of ours registered."""


def stand_in_front(operator: str, kernel: Callable[[Mapping[str, Any], Callable[[], Any]], Any]) -> None:
    """Has every call of `torch.ops.c10d.<operator>` come to `kernel` first, and return what that returns.

    `kernel` is given the arguments by name (those left out are at their defaults) and what calls torch's own kernel.
    Calls with tensors without content, which only ask for shapes, go by.
    """
    overload = getattr(torch.ops.c10d, operator).default
    names = [argument.name for argument in overload._schema.arguments]
    # Calls of all devices pass this key, right before the one of their device, and nothing of c10d stands there.
    own = torch._C.DispatchKey.BackendSelect
    below = torch._C._dispatch_keyset_full_after(own)

    def dispatched(keys: Any, *values: Any, **options: Any) -> Any:
        def proceed() -> Any:
            return overload.redispatch(keys & below, *values, **options)

        if keys.has(torch._C.DispatchKey.Meta):
            return proceed()
        return kernel(dict(zip(names, values, strict=False)) | options, proceed)

    library = torch.library.Library("c10d", "IMPL", own.name)
    library.impl(operator, dispatched, with_keyset=True)
    _kernels.append(library)


def graph_task() -> int:
    """The backward pass that the calling thread is in; -1: none."""
    return torch._C._current_graph_task_id()


def default_store() -> Store:
    """That the default process group was made with."""
    return distributed_c10d._get_default_store()


def process_groups() -> list[Any]:
    """All that exist in this process."""
    return list(distributed_c10d._world.pg_map)


def on_new_process_group(made: Callable[[Any], None]) -> None:
    """Calls `made` with each process group that is made from now on."""
    create = distributed_c10d._new_process_group_helper

    def create_and_tell(*args: Any, **options: Any) -> Any:
        group, store = create(*args, **options)
        made(group)
        return group, store

    distributed_c10d._new_process_group_helper = create_and_tell


def on_compilation(started: Callable[[Any], None], ended: Callable[[Any], None]) -> None:
    """Calls both around each compilation of torch.compile. It imports the compiler, which takes seconds."""
    from torch._dynamo.callback import callback_handler

    if started not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(started)
        callback_handler.register_end_callback(ended)


def time_loader(timed: Callable[[Callable[[], Any]], Any]) -> None:
    """Has `timed` fetch each batch of every DataLoader: it is given what fetches one."""
    following = dataloader._BaseDataLoaderIter.__next__

    def timed_next(iterator: Any) -> Any:
        return timed(lambda: following(iterator))

    dataloader._BaseDataLoaderIter.__next__ = timed_next  # type: ignore[method-assign,assignment]


def forget_compiled_code() -> None:
    """Code that was compiled before a hook was registered never calls it."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which torch.compile runs as it is wherever it meets it."""
    disabled: Callable[..., Any] = torch._dynamo.disable(function)
    return disabled


def broadcast_buffers(model: DistributedDataParallel, bucket_bytes: int) -> None:
    """Gives all ranks rank 0's buffers, as DDP does before a forward pass. Collective."""
    buffers = [buffer.detach() for buffer in model.buffers()]
    if buffers:
        _broadcast_coalesced(model.process_group, buffers, bucket_bytes, 0)


def rebuild_buckets(replicated: DistributedDataParallel) -> None:
    """Has DDP's reducer settle its buckets by the backward pass that it has just seen."""
    replicated.reducer._rebuild_buckets()


def all_reduce_hooks(module: FSDPModule) -> Iterable[Any]:
    """What was given to the module's `set_all_reduce_hook`."""
    return [group._all_reduce_hook for group in _parameter_groups(module)]


def gather_after(module: FSDPModule, event: Any) -> None:
    """FSDP2's streams, on which parameters are gathered, wait for `event`; before a first forward pass it has none."""
    streams = vars(module._get_fsdp_state()._comm_ctx)
    for name in ("all_gather_copy_in_stream", "all_gather_stream"):
        if name in streams:
            streams[name].wait_event(event)


def gathered_with(module: FSDPModule) -> set[nn.Module]:
    """Modules whose parameters are gathered in advance when `module` runs, by set_modules_to_forward_prefetch."""
    ahead = module._get_fsdp_state()._states_to_forward_prefetch
    return {gathered for state in ahead for gathered in state._modules}


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Each of `sources` into its target, in as few operations as the device allows."""
    torch._foreach_copy_(targets, sources)


@contextmanager
def as_the_only_worker() -> Iterator[None]:
    """Inside it, torch.utils.data.get_worker_info() says None, as outside of a DataLoader's workers."""
    info, worker._worker_info = worker._worker_info, None
    try:
        yield
    finally:
        worker._worker_info = info


def _parameter_groups(module: FSDPModule) -> list[Any]:
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]  # the one that a torch before had
