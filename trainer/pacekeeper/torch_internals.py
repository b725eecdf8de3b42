"""Every name of torch that is not public, in one place: each has a test in tests/distributed/test_torch_internals.py.

pyproject.toml bounds torch from above: a newer one is allowed when these tests have passed with it.
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
"""What keeps kernels of ours registered."""


def intercept_operator(operator: str, kernel: Callable[[Mapping[str, Any], Callable[[], Any]], Any]) -> None:
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
    _registered_kernels.append(library)


graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""The backward pass that the calling thread is in; -1: none."""


def get_default_store() -> Store:
    """That the default process group was made with."""
    return distributed_c10d._get_default_store()


def list_process_groups() -> list[Any]:
    """All that exist in this process."""
    return list(distributed_c10d._world.pg_map)


def list_backends() -> list[str]:
    """Of all process groups, by device: `cpu:gloo,cuda:nccl`."""
    return list(distributed_c10d._world.pg_backend_config.values())


def on_new_process_group(made: Callable[[Any], None]) -> None:
    """Calls `made` with each process group of this rank that is made or split off from now on, before its first use.

    Which ranks it has is not known yet: ask `get_group_ranks` later.
    """
    module: Any = distributed_c10d
    register = module._register_process_group

    def register_and_tell(name: Any, group: Any) -> None:
        register(name, group)
        made(group)

    module._register_process_group = register_and_tell


def get_group_ranks(group: Any) -> tuple[int, ...]:
    """Global ranks of a process group, in its order; () where torch does not know them."""
    return tuple(distributed_c10d._world.pg_group_ranks.get(group, ()))


def dump_flight_record() -> bytes | None:
    """What NCCL's flight recorder knows of the collectives that are not complete, as JSON; None in a build without it.

    It asks CUDA whether they have begun, without waiting.
    """
    dump = getattr(_distributed_c10d, "_dump_nccl_trace_json", None)
    return None if dump is None else dump(includeCollectives=True, onlyActive=True)


def list_used_gpus() -> list[int]:
    """The numbers of those on which this process has a context. It makes none."""
    return [gpu for gpu in range(torch.cuda.device_count()) if torch._C._cuda_hasPrimaryContext(gpu)]


def on_compilation(started: Callable[[Any], None], ended: Callable[[Any], None]) -> None:
    """Calls both around each compilation of torch.compile. It imports the compiler, which takes seconds."""
    from torch._dynamo.callback import callback_handler

    if started not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(started)
        callback_handler.register_end_callback(ended)


def time_loader(timed: Callable[[Callable[[Any], Any], Any], Any]) -> None:
    """Has `timed` fetch each batch of every DataLoader: it is given what fetches one, and that one's argument."""
    following = dataloader._BaseDataLoaderIter.__next__

    def timed_next(iterator: Any) -> Any:
        return timed(following, iterator)

    dataloader._BaseDataLoaderIter.__next__ = timed_next  # type: ignore[method-assign,assignment]


def leave_uncompiled(function: Any, recursive: bool = False) -> None:
    """torch.compile runs calls of `function` as they are where they stand between pieces of compiled code.

    Within what it compiles it still looks into them, unlike with torch.compiler.disable, which would break the graph.
    recursive: what the function calls is left uncompiled, too.
    """
    skip, default = dynamo._FrameAction.SKIP, dynamo._FrameAction.DEFAULT
    dynamo.set_code_exec_strategy(function.__code__, dynamo._FrameExecStrategy(skip, skip if recursive else default))


def broadcast_buffers(model: DistributedDataParallel, bucket_bytes: int) -> None:
    """Gives all ranks rank 0's buffers, as DDP does before a forward pass. Collective."""
    buffers = [buffer.detach() for buffer in model.buffers()]
    if buffers:
        _distributed._broadcast_coalesced(model.process_group, buffers, bucket_bytes, 0)


def rebuild_buckets(replicated: DistributedDataParallel) -> None:
    """Has DDP's reducer settle its buckets by the backward pass that it has just seen."""
    replicated.reducer._rebuild_buckets()


def list_all_reduce_hooks(module: FSDPModule) -> Iterable[Any]:
    """What was given to the module's `set_all_reduce_hook`."""
    return [group._all_reduce_hook for group in _list_parameter_groups(module)]


def delay_gather(module: FSDPModule, event: Any) -> None:
    """FSDP2's streams, on which parameters are gathered, wait for `event`; before a first forward pass it has none."""
    streams = vars(module._get_fsdp_state()._comm_ctx)
    for name in ("all_gather_copy_in_stream", "all_gather_stream"):
        if name in streams:
            streams[name].wait_event(event)


def list_prefetched_modules(module: FSDPModule) -> set[nn.Module]:
    """Modules whose parameters are gathered in advance when `module` runs, by set_modules_to_forward_prefetch."""
    ahead = module._get_fsdp_state()._states_to_forward_prefetch
    return {gathered for state in ahead for gathered in state._modules}


def copy_tensors(targets: list[torch.Tensor], sources: list[torch.Tensor], non_blocking: bool = False) -> None:
    """Each of `sources` into its target, in as few operations as the device allows. non_blocking: as of `copy_`."""
    torch._foreach_copy_(targets, sources, non_blocking)


def read_tensor_version(tensor: torch.Tensor) -> int:
    """How often what lies in the tensor's memory was changed in place, through whichever tensor that lies there."""
    return tensor._version


@contextmanager
def hide_worker_info() -> Iterator[None]:
    """Inside it, torch.utils.data.get_worker_info() says None, as outside of a DataLoader's workers."""
    info, worker._worker_info = worker._worker_info, None
    try:
        yield
    finally:
        worker._worker_info = info


def bracket_coalesced_broadcasts(bracket: Callable[[], AbstractContextManager[None]]) -> None:
    """`bracket` stands around each broadcast of many tensors, which DDP begins and waits for in C++."""
    broadcast = _distributed._broadcast_coalesced

    def bracketed(*args: Any, **options: Any) -> Any:
        with bracket():
            return broadcast(*args, **options)

    _distributed._broadcast_coalesced = bracketed


def bracket_fsdp_waits(bracket: Callable[[], AbstractContextManager[None]], streams: Any) -> None:
    """`bracket` stands around each wait of the current stream for one on which FSDP2 communicates.

    streams: torch.cuda, or another module with its `Stream` and `current_stream`.
    """
    within = False
    wait_event = streams.Stream.wait_event

    def bracketed(stream: Any, event: Any) -> Any:
        if within and stream == streams.current_stream():
            with bracket():
                return wait_event(stream, event)
        return wait_event(stream, event)

    def marked(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal within
            before, within = within, True
            try:
                return method(*args, **options)
            finally:
                within = before

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
"""In which the stream that computes waits for those that communicate."""


def _list_parameter_groups(module: FSDPModule) -> list[Any]:
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]  # the one that a torch before had


def start_kernel_profile() -> Any:
    """A profile of what this process's GPU does, and of nothing on the host. Raises RuntimeError where another runs, or
    torch cannot."""
    if _autograd._profiler_enabled():  # a second one would end it, and its trace would be empty
        raise RuntimeError("a profiler runs already")
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    try:
        profile.start()
    except AssertionError as error:  # no such activity in this build
        raise RuntimeError(str(error)) from error
    return profile


def call_before_other_profile(profile: Any, call: Callable[[], None]) -> Callable[[], None]:
    """`call` once, before a profile begins that is not `profile`: torch has one at a time, and two leave both empty.
    Returns what ends that."""
    prepare = _autograd_profile._prepare_trace
    waits = True

    def forget() -> None:
        nonlocal waits
        waits = False
        if _autograd_profile._prepare_trace is prepare_after_call:
            _autograd_profile._prepare_trace = prepare

    def prepare_after_call(another: Any) -> None:
        if waits and another is not profile.profiler:
            forget()
            call()
        prepare(another)

    _autograd_profile._prepare_trace = prepare_after_call
    return forget


def list_device_activities(profile: Any) -> Iterator[tuple[str, int, int]]:
    """Of a profile that was stopped: name, start (ns since the epoch) and duration (ns) of all that a device did."""
    for event in profile.profiler.kineto_results.events():
        if event.device_type() != torch.profiler.DeviceType.CPU:
            yield event.name(), event.start_ns(), event.duration_ns()
