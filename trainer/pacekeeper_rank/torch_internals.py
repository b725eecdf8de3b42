"""Names of torch that are not public and that recording needs. A torch may lack any of them.

What it lacks is not recorded. Each has a test in tests/distributed/test_torch_internals.py. Nothing is imported that
the script has not imported itself: modules that `import torch` does not load are looked up once they are there.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from .hook_guard import call_after
from .tracebacks import hide_frame

try:
    from torch._C._distributed_c10d import ProcessGroup, Work
except ImportError:  # a build without torch.distributed
    ProcessGroup = Work = None  # type: ignore[assignment,misc]
try:
    from torch._C._distributed_c10d import HookOpName
except ImportError:  # before 2.15, when process groups got hooks
    HookOpName = None  # type: ignore[assignment,misc]

__all__ = ["HookOpName", "ProcessGroup", "Work", "engine"]

FIRST_INTERCEPTED_VERSION = (2, 9)
"""The oldest torch before whose dispatcher kernels are put: with 2.4, processes hung at their end (decision 58)."""

engine: Any = getattr(torch.autograd.Variable, "_execution_engine", None)
_c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
_distributed: Any = torch.distributed
_registered_kernels: list[torch.library.Library] = []
"""References that keep the kernels of `intercept_operator` registered."""


def can_report_collectives() -> bool:
    """Return whether this torch has all that records of collectives need."""
    needed = (ProcessGroup, Work, getattr(engine, "queue_callback", None), getattr(torch._C, _GRAPH_TASK, None))
    if None in needed or not hasattr(_c10d, "_register_process_group") or not hasattr(_c10d, "_world"):
        return False
    return HookOpName is not None or read_version() >= FIRST_INTERCEPTED_VERSION


def read_version() -> tuple[int, int]:
    """Return torch's version without its patch level; (0, 0) if it is not a number."""
    major, _, rest = torch.__version__.partition(".")
    minor = rest.partition(".")[0]
    return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else (0, 0)


def intercept_operator(operator: str, kernel: Callable[[Mapping[str, Any], Callable[[], Any]], Any]) -> None:
    """Route every call of `torch.ops.c10d.<operator>` through `kernel`, and return what it returns.

    `kernel` gets the arguments by name (omitted ones have their defaults) and a function that calls torch's own kernel.
    Calls with meta tensors, which only compute shapes, are not intercepted. No effect if torch has no such operator.
    """
    overload = getattr(getattr(torch.ops.c10d, operator, None), "default", None)
    if overload is None:
        return
    names = [argument.name for argument in overload._schema.arguments]
    # Calls of all devices pass this key, right before the key of their device. c10d registers no kernel there.
    dispatch_key = torch._C.DispatchKey.BackendSelect
    lower_keys = torch._C._dispatch_keyset_full_after(dispatch_key)

    def dispatched(keys: Any, *values: Any, **options: Any) -> Any:
        def proceed() -> Any:
            try:
                return overload.redispatch(keys & lower_keys, *values, **options)
            except BaseException as error:
                hide_frame(error)
                raise

        try:
            if keys.has(torch._C.DispatchKey.Meta):
                return proceed()
            return kernel({**dict(zip(names, values)), **options}, proceed)
        except BaseException as error:
            hide_frame(error)
            raise

    library = torch.library.Library("c10d", "IMPL", dispatch_key.name)
    library.impl(operator, dispatched, with_keyset=True)
    _registered_kernels.append(library)


_GRAPH_TASK = "_current_graph_task_id"
graph_task: Callable[[], int] = getattr(torch._C, _GRAPH_TASK, lambda: -1)
"""Returns the backward pass that the calling thread is in; -1: none."""


def list_process_groups() -> list[Any]:
    """Return all process groups of this process."""
    return list(_c10d._world.pg_map)


def list_backends() -> list[str]:
    """Return the backends of all process groups, by device: `cpu:gloo,cuda:nccl`."""
    return list(_c10d._world.pg_backend_config.values())


def on_new_process_group(callback: Callable[[Any], None]) -> None:
    """Call `callback` with each process group of this rank that is created or split from now on, before its first use.

    The ranks of the group are not known at that moment: call `get_group_ranks` later.
    """
    if not hasattr(_c10d, "_register_process_group"):
        return
    register = _c10d._register_process_group
    _c10d._register_process_group = call_after(register, lambda *values: callback(values[-1]))


def on_destroyed_process_group(callback: Callable[..., None]) -> None:
    """Call `callback` after each torch.distributed.destroy_process_group. It takes any arguments."""
    if _c10d is not None:
        destroy = call_after(_c10d.destroy_process_group, callback)
        _distributed.destroy_process_group = _c10d.destroy_process_group = destroy


def get_group_ranks(group: Any) -> tuple[int, ...]:
    """Return the global ranks of a process group, in its order; () if torch does not list them."""
    return tuple(_c10d._world.pg_group_ranks.get(group, ()))


def dump_flight_record() -> bytes | None:
    """Return the incomplete collectives of NCCL's flight recorder as JSON; None in a build without it.

    It queries CUDA whether they have begun, without waiting.
    """
    dump = getattr(getattr(torch._C, "_distributed_c10d", None), "_dump_nccl_trace_json", None)
    return None if dump is None else dump(includeCollectives=True, onlyActive=True)


def list_used_gpus() -> list[int]:
    """Return the numbers of the GPUs on which this process has a context. It creates none."""
    return [gpu for gpu in range(torch.cuda.device_count()) if torch._C._cuda_hasPrimaryContext(gpu)]


def on_compilation(started: Callable[..., None], ended: Callable[..., None]) -> None:
    """Call both functions around each compilation of torch.compile, once the script has loaded the compiler."""
    handler = getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)
    if handler is not None and started not in handler.start_callbacks:
        handler.register_start_callback(started)
        handler.register_end_callback(ended)


def replace_fetch(build: Callable[[Callable[..., Any]], Callable[..., Any]]) -> bool:
    """Replace the function that fetches a batch, of every DataLoader, by what `build` makes of it.

    Return whether torch has loaded DataLoader.
    """
    iterator_class: Any = getattr(sys.modules.get("torch.utils.data.dataloader"), "_BaseDataLoaderIter", None)
    if iterator_class is None:
        return False
    iterator_class.__next__ = build(iterator_class.__next__)
    return True


def bracket_coalesced_broadcasts(bracket: Callable[[], AbstractContextManager[None]]) -> None:
    """Run each coalesced broadcast inside `bracket`. DDP starts them and waits for them in C++."""
    broadcast = getattr(_distributed, "_broadcast_coalesced", None)
    if broadcast is None:
        return

    def bracketed(*args: Any, **options: Any) -> Any:
        try:
            with bracket():
                return broadcast(*args, **options)
        except BaseException as error:
            hide_frame(error)
            raise

    _distributed._broadcast_coalesced = bracketed


def bracket_fsdp_waits(bracket: Callable[[Any], AbstractContextManager[None]], streams: Any) -> bool:
    """Run each wait for a stream on which FSDP2 communicates inside `bracket`, which gets the stream that waits.

    `streams`: torch.cuda, or another module with `Stream`. Return whether FSDP2 is loaded.
    """
    owners = [
        (getattr(sys.modules.get(f"torch.distributed.fsdp._fully_shard.{module}"), class_name, None), method)
        for module, class_name, method in _FSDP_WAITS
    ]
    if any(owner is None for owner, _ in owners):
        return False
    is_inside = False
    wait_event = streams.Stream.wait_event

    def bracketed(stream: Any, event: Any) -> Any:
        try:
            if is_inside:
                with bracket(stream):
                    return wait_event(stream, event)
            return wait_event(stream, event)
        except BaseException as error:
            hide_frame(error)
            raise

    def marked(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **options: Any) -> Any:
            nonlocal is_inside
            was_inside, is_inside = is_inside, True
            try:
                return method(*args, **options)
            except BaseException as error:
                hide_frame(error)
                raise
            finally:
                is_inside = was_inside

        return call

    streams.Stream.wait_event = bracketed
    for owner, name in owners:
        if hasattr(owner, name):
            setattr(owner, name, marked(getattr(owner, name)))
    return True


_FSDP_WAITS = (
    ("_fsdp_param_group", "FSDPParamGroup", "wait_for_unshard"),
    ("_fsdp_param_group", "FSDPParamGroup", "post_backward"),
    ("_fsdp_param_group", "FSDPParamGroup", "finalize_backward"),
    ("_fsdp_state", "FSDPState", "_root_post_backward_final_callback"),
)
"""Methods in which the computing stream waits for the communicating ones: module, class, and name."""
