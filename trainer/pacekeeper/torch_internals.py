"""Names of torch that are not public. Each has a test in tests/distributed/test_torch_internals.py.

Those that recording needs are in `pacekeeper_rank.torch_internals`.

pyproject.toml bounds torch from above: a newer version is allowed when these tests pass with it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._C._distributed_c10d import (
    GradBucket,
    HashStore,
    ProcessGroupGloo,
    Store,
)
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint._storage_utils import _storage_setup
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data._utils import worker

__all__ = [
    "GradBucket",
    "HashStore",
    "StorageInfo",
    "Store",
    "set_element",
]

dynamo = torch._C._dynamo.eval_frame
_distributed: Any = torch.distributed
_autograd: Any = torch.autograd
_autograd_profile: Any = torch.autograd.profiler.profile


def get_default_store() -> Store:
    """Return the store that the default process group was created with."""
    return distributed_c10d._get_default_store()


def create_gloo_backend(store: Store, rank: int, size: int) -> Any:
    """Return gloo's connections of some ranks, which belong to no process group. Collective.

    Their collectives are not recorded, and go on after `destroy_process_group`. `store`: for these ranks alone.
    """
    return ProcessGroupGloo(store, rank, size, distributed_c10d.default_pg_timeout)


def open_checkpoint_storage(path: str | os.PathLike[str], is_reader: bool) -> Any:
    """Return the storage reader, or writer, that torch.distributed.checkpoint chooses for a path or URL."""
    return _storage_setup(None, path, reader=is_reader)


def leave_uncompiled(function: Any, recursive: bool = False) -> None:
    """Run calls of `function` uncompiled if they stand between regions of compiled code.

    Inside a region, torch.compile still traces into it. torch.compiler.disable would break the graph there.
    `recursive`: functions that `function` calls are not compiled either.
    """
    skip, default = dynamo._FrameAction.SKIP, dynamo._FrameAction.DEFAULT
    dynamo.set_code_exec_strategy(function.__code__, dynamo._FrameExecStrategy(skip, skip if recursive else default))


def broadcast_buffers(model: DistributedDataParallel, bucket_bytes: int) -> None:
    """Copy rank 0's buffers to all ranks, as DDP does before a forward pass. Collective."""
    buffers = [buffer.detach() for buffer in model.buffers()]
    if buffers:
        _distributed._broadcast_coalesced(model.process_group, buffers, bucket_bytes, 0)


def rebuild_buckets(replicated: DistributedDataParallel) -> None:
    """Make DDP's reducer rebuild its buckets from the backward pass that has just run."""
    replicated.reducer._rebuild_buckets()


def list_all_reduce_hooks(module: FSDPModule) -> Iterable[Any]:
    """Return the hooks that the module's `set_all_reduce_hook` was given."""
    return [group._all_reduce_hook for group in _list_parameter_groups(module)]


def delay_gather(module: FSDPModule, event: Any) -> None:
    """Make the streams on which FSDP2 gathers parameters wait for `event`.

    Before the first forward pass there are none.
    """
    streams = vars(module._get_fsdp_state()._comm_ctx)
    for name in ("all_gather_copy_in_stream", "all_gather_stream"):
        if name in streams:
            streams[name].wait_event(event)


def list_prefetched_modules(module: FSDPModule) -> set[nn.Module]:
    """Return the modules whose parameters set_modules_to_forward_prefetch gathers in advance when `module` runs."""
    states = module._get_fsdp_state()._states_to_forward_prefetch
    return {prefetched for state in states for prefetched in state._modules}


def copy_tensors(targets: list[torch.Tensor], sources: list[torch.Tensor], non_blocking: bool = False) -> None:
    """Copy each of `sources` into its target, in as few operations as possible. `non_blocking`: as for `copy_`."""
    torch._foreach_copy_(targets, sources, non_blocking)


def read_tensor_version(tensor: torch.Tensor) -> int:
    """Return how often the tensor's memory was changed in place, through any tensor that shares it."""
    return tensor._version


@contextmanager
def hide_worker_info() -> Iterator[None]:
    """Make torch.utils.data.get_worker_info() return None inside the context, as outside of a DataLoader's workers."""
    info, worker._worker_info = worker._worker_info, None
    try:
        yield
    finally:
        worker._worker_info = info


def _list_parameter_groups(module: FSDPModule) -> list[Any]:
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]  # older torch has exactly one


def start_kernel_profile() -> Any:
    """Start a profile of this process's GPU activity, without the host, and return it.

    Raises RuntimeError if another profile runs, or if torch cannot profile.
    """
    if _autograd._profiler_enabled():  # a second profile would end the first, whose trace would be empty
        raise RuntimeError("a profiler runs already")
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    try:
        profile.start()
    except AssertionError as error:  # no such activity in this build
        raise RuntimeError(str(error)) from error
    return profile


def call_before_other_profile(profile: Any, call: Callable[[], None]) -> Callable[[], None]:
    """Call `call` once, before a profile other than `profile` begins, and return a function that cancels this.

    torch supports one profile at a time; two at once leave both empty.
    """
    prepare = _autograd_profile._prepare_trace
    is_waiting = True

    def forget() -> None:
        nonlocal is_waiting
        is_waiting = False
        if _autograd_profile._prepare_trace is prepare_after_call:
            _autograd_profile._prepare_trace = prepare

    def prepare_after_call(other_profile: Any) -> None:
        if is_waiting and other_profile is not profile.profiler:
            forget()
            call()
        prepare(other_profile)

    _autograd_profile._prepare_trace = prepare_after_call
    return forget


def list_device_activities(profile: Any) -> Iterator[tuple[str, int, int]]:
    """Yield name, start (ns since the epoch) and duration (ns) of each device activity of a stopped profile."""
    for event in profile.profiler.kineto_results.events():
        if event.device_type() != torch.profiler.DeviceType.CPU:
            yield event.name(), event.start_ns(), event.duration_ns()
