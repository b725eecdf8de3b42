"""All names of torch that are not public, in one place. Each has a test in tests/distributed/test_torch_internals.py.

pyproject.toml bounds torch from above: a newer version is allowed when these tests pass with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import (
    GradBucket,
    HashStore,
    ProcessGroup,
    Store,
    Work,
)
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.nn.parallel import DistributedDataParallel
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
    "Store",
    "Work",
    "engine",
    "set_element",
]

dynamo = torch._C._dynamo.eval_frame
engine = torch.autograd.Variable._execution_engine
_distributed: Any = torch.distributed
_autograd: Any = torch.autograd
_autograd_profile: Any = torch.autograd.profiler.profile

_registered_kernels: list[torch.library.Library] = []
"""References that keep the kernels of `intercept_operator` registered."""


def intercept_operator(operator: str, kernel: Callable[[Mapping[str, Any], Callable[[], Any]], Any]) -> None:
    """Route every call of `torch.ops.c10d.<operator>` through `kernel`, and return what it returns.

    `kernel` gets the arguments by name (omitted ones have their defaults) and a function that calls torch's own kernel.
    Calls with meta tensors, which only compute shapes, are not intercepted.
    """
    overload = getattr(torch.ops.c10d, operator).default
    names = [argument.name for argument in overload._schema.arguments]
    # Calls of all devices pass this key, right before the key of their device. c10d registers no kernel there.
    dispatch_key = torch._C.DispatchKey.BackendSelect
    lower_keys = torch._C._dispatch_keyset_full_after(dispatch_key)

    def dispatched(keys: Any, *values: Any, **options: Any) -> Any:
        def proceed() -> Any:
            return overload.redispatch(keys & lower_keys, *values, **options)

        if keys.has(torch._C.DispatchKey.Meta):
            return proceed()
        return kernel(dict(zip(names, values, strict=False)) | options, proceed)

    library = torch.library.Library("c10d", "IMPL", dispatch_key.name)
    library.impl(operator, dispatched, with_keyset=True)
    _registered_kernels.append(library)


graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""Returns the backward pass that the calling thread is in; -1: none."""


def get_default_store() -> Store:
    """Return the store that the default process group was created with."""
    return distributed_c10d._get_default_store()


def list_process_groups() -> list[Any]:
    """Return all process groups of this process."""
    return list(distributed_c10d._world.pg_map)


def list_backends() -> list[str]:
    """Return the backends of all process groups, by device: `cpu:gloo,cuda:nccl`."""
    return list(distributed_c10d._world.pg_backend_config.values())


def on_new_process_group(callback: Callable[[Any], None]) -> None:
    """Call `callback` with each process group of this rank that is created or split from now on, before its first use.

    The ranks of the group are not known at that moment: call `get_group_ranks` later.
    """
    module: Any = distributed_c10d
    register = module._register_process_group

    def register_and_tell(name: Any, group: Any) -> None:
        register(name, group)
        callback(group)

    module._register_process_group = register_and_tell


def get_group_ranks(group: Any) -> tuple[int, ...]:
    """Return the global ranks of a process group, in its order; () if torch does not list them."""
    return tuple(distributed_c10d._world.pg_group_ranks.get(group, ()))


def dump_flight_record() -> bytes | None:
    """Return the incomplete collectives of NCCL's flight recorder as JSON; None in a build without it.

    It queries CUDA whether they have begun, without waiting.
    """
    dump = getattr(_distributed_c10d, "_dump_nccl_trace_json", None)
    return None if dump is None else dump(includeCollectives=True, onlyActive=True)


def list_used_gpus() -> list[int]:
    """Return the numbers of the GPUs on which this process has a context. It creates none."""
    return [gpu for gpu in range(torch.cuda.device_count()) if torch._C._cuda_hasPrimaryContext(gpu)]


def on_compilation(started: Callable[[Any], None], ended: Callable[[Any], None]) -> None:
    """Call both functions around each compilation of torch.compile. It imports the compiler, which takes seconds."""
    from torch._dynamo.callback import callback_handler

    if started not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(started)
        callback_handler.register_end_callback(ended)


def time_loader(time_fetch: Callable[[Callable[[Any], Any], Any], Any]) -> None:
    """Fetch each batch of every DataLoader through `time_fetch`, which gets the fetching function and its argument."""
    fetch_next = dataloader._BaseDataLoaderIter.__next__

    def timed_next(iterator: Any) -> Any:
        return time_fetch(fetch_next, iterator)

    dataloader._BaseDataLoaderIter.__next__ = timed_next  # type: ignore[method-assign,assignment]


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


def bracket_coalesced_broadcasts(bracket: Callable[[], AbstractContextManager[None]]) -> None:
    """Run each coalesced broadcast inside `bracket`. DDP starts them and waits for them in C++."""
    broadcast = _distributed._broadcast_coalesced

    def bracketed(*args: Any, **options: Any) -> Any:
        with bracket():
            return broadcast(*args, **options)

    _distributed._broadcast_coalesced = bracketed


def bracket_fsdp_waits(bracket: Callable[[], AbstractContextManager[None]], streams: Any) -> None:
    """Run each wait of the current stream for a stream on which FSDP2 communicates inside `bracket`.

    `streams`: torch.cuda, or another module with `Stream` and `current_stream`.
    """
    is_inside = False
    wait_event = streams.Stream.wait_event

    def bracketed(stream: Any, event: Any) -> Any:
        if is_inside and stream == streams.current_stream():
            with bracket():
                return wait_event(stream, event)
        return wait_event(stream, event)

    def marked(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal is_inside
            was_inside, is_inside = is_inside, True
            try:
                return method(*args, **options)
            finally:
                is_inside = was_inside

        return call

    streams.Stream.wait_event = bracketed
    for owner, name in _FSDP_WAITS:
        setattr(owner, name, marked(getattr(owner, name)))


_FSDP_WAITS: tuple[tuple[type, str], ...] = (
    (FSDPParamGroup, "wait_for_unshard"),
    (FSDPParamGroup, "post_backward"),
    (FSDPParamGroup, "finalize_backward"),
    (FSDPState, "_root_post_backward_final_callback"),
)
"""Methods in which the computing stream waits for the communicating ones."""


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
