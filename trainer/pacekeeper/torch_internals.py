"""Every name of torch that is not public, in one place: each has a test in tests/distributed/test_torch_internals.py.

pyproject.toml bounds torch from above: a newer one is allowed when these tests have passed with it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import (
    GradBucket,
    HashStore,
    HookOpName,
    ProcessGroup,
    Store,
    Work,
    _broadcast_coalesced,
)
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import dataloader

__all__ = ["GradBucket", "HashStore", "HookOpName", "ProcessGroup", "Store", "Work", "engine"]

engine = torch.autograd.Variable._execution_engine


def graph_task() -> int:
    """The backward pass that the calling thread is in; -1: none."""
    return torch._C._current_graph_task_id()


def default_store() -> Store:
    """That the default process group was made with."""
    return distributed_c10d._get_default_store()


def process_groups() -> list[Any]:
    """All that exist in this process."""
    return list(distributed_c10d._world.pg_map)


def backends() -> list[str]:
    """Of all process groups, by device: `cpu:gloo,cuda:nccl`."""
    return list(distributed_c10d._world.pg_backend_config.values())


def on_new_process_group(made: Callable[[Any], None]) -> None:
    """Calls `made` with each process group that is made from now on."""
    create = distributed_c10d._new_process_group_helper

    def create_and_tell(*args: Any, **options: Any) -> Any:
        group, store = create(*args, **options)
        made(group)
        return group, store

    distributed_c10d._new_process_group_helper = create_and_tell


def flight_record() -> bytes | None:
    """What NCCL's flight recorder knows of the collectives that are not complete, as JSON; None in a build without it.

    It asks CUDA whether they have begun, without waiting.
    """
    dump = getattr(_distributed_c10d, "_dump_nccl_trace_json", None)
    return None if dump is None else dump(includeCollectives=True, onlyActive=True)


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
    """FSDP2's streams, on which parameters are gathered, wait for `event`."""
    module._get_fsdp_state()._comm_ctx.wait_all_gather_streams_on_event(event)


def gathered_with(module: FSDPModule) -> set[nn.Module]:
    """Modules whose parameters are gathered in advance when `module` runs, by set_modules_to_forward_prefetch."""
    ahead = module._get_fsdp_state()._states_to_forward_prefetch
    return {gathered for state in ahead for gathered in state._modules}


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Each of `sources` into its target, in as few operations as the device allows."""
    torch._foreach_copy_(targets, sources)


def is_process_group(group: Any) -> bool:
    return isinstance(group, ProcessGroup)


def _parameter_groups(module: FSDPModule) -> list[Any]:
    groups: list[Any] = module._get_fsdp_state()._fsdp_param_groups
    return groups
