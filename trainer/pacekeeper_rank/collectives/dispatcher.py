"""Hooks of process groups in torch's dispatcher, for a torch whose process groups have none.

Every collective of any caller (the script, FSDP2, DDP's C++ reducer, compiled code) passes c10d's operator on its way
to the backend. An additional kernel before the operator's own one reports the call and forwards it. Results, errors,
time-outs and works are therefore the backend's, and the process groups are torch's.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from .. import torch_internals
from ..hook_guard import HookGuard
from ..torch_internals import ProcessGroup, Work
from ..tracebacks import hide_frame


@dataclass
class CollectiveCall:
    """One collective of one rank, with the names that torch's own hooks use."""

    name: str
    """Name of torch's HookOpName."""
    op_id: int
    async_op: bool
    input_tensors: list[torch.Tensor]
    output_tensors: list[torch.Tensor]
    root: int
    """Of a send or receive: the peer's rank in the group; -1: any."""
    work: Work | None = None
    """Set once the call is issued; None also if the backend returns none."""


def hook_group(
    group: ProcessGroup, enter: Callable[[CollectiveCall], None], issued: Callable[[CollectiveCall], None]
) -> None:
    """Report each collective of `group` from now on, in the calling thread."""
    _intercept_operators()
    _hooked[group] = enter, issued


def report_failures_to(guard: HookGuard) -> None:
    """Give errors of this module to `guard`; without it, they are raised in the script."""
    global _guard
    _guard = guard


def unhook_group(group: ProcessGroup) -> None:
    """Stop the reports; no effect without a hook."""
    _hooked.pop(group, None)


_hooked: WeakKeyDictionary[ProcessGroup, tuple[Callable[[CollectiveCall], None], Callable[[CollectiveCall], None]]] = (
    WeakKeyDictionary()
)
_call_numbers = itertools.count(1)
_guard: HookGuard | None = None

_OPERATOR_NAMES = {
    "send": "SEND",
    "recv_": "RECV",
    "recv_any_source_": "RECV",
    "broadcast_": "BROADCAST",
    "allreduce_": "ALLREDUCE",
    "allreduce_coalesced_": "ALLREDUCE_COALESCED",
    "reduce_": "REDUCE",
    "allgather_": "ALLGATHER",
    "_allgather_base_": "ALLGATHER_BASE",
    "allgather_coalesced_": "ALLGATHER_COALESCED",
    "allgather_into_tensor_coalesced_": "ALLGATHER_INTO_TENSOR_COALESCED",
    "reduce_scatter_": "REDUCE_SCATTER",
    "_reduce_scatter_base_": "REDUCE_SCATTER_BASE",
    "reduce_scatter_tensor_coalesced_": "REDUCE_SCATTER_TENSOR_COALESCED",
    "alltoall_": "ALLTOALL",
    "alltoall_base_": "ALLTOALL_BASE",
    "barrier": "BARRIER",
    "scatter_": "SCATTER",
    "gather_": "GATHER",
}


@functools.cache
def _intercept_operators() -> None:
    for operator, name in _OPERATOR_NAMES.items():
        torch_internals.intercept_operator(operator, functools.partial(_report_call, name))


def _report_call(name: str, arguments: Mapping[str, Any], proceed: Callable[[], Any]) -> Any:
    entered = None
    if _guard is None or _guard.active:
        try:
            entered = _enter_call(name, arguments)
        except Exception as error:
            _handle_failure(error)
    try:
        result = proceed()
    except BaseException as error:
        hide_frame(error)
        raise
    if entered is not None:
        try:
            call, issued = entered
            call.work = Work.unbox(result[-1] if isinstance(result, tuple) else result)
            issued(call)
        except Exception as error:
            _handle_failure(error)
    return result


def _enter_call(
    name: str, arguments: Mapping[str, Any]
) -> tuple[CollectiveCall, Callable[[CollectiveCall], None]] | None:
    """Report that a call begins, and return it with what reports that it is issued; None: its group has no hook."""
    hooks = _hooked.get(ProcessGroup.unbox(arguments["process_group"]))
    if hooks is None:
        return None
    enter, issued = hooks
    call = CollectiveCall(
        name,
        next(_call_numbers),
        arguments.get("async_op", True),
        *_collect_tensors(name, arguments),
        _read_peer(name, arguments),
    )
    enter(call)
    return call, issued


def _handle_failure(error: Exception) -> None:
    if _guard is None:
        raise error
    _guard.disable("a collective", error)


def _read_peer(name: str, arguments: Mapping[str, Any]) -> int:
    peer: int = arguments.get({"SEND": "dst", "RECV": "src"}.get(name, ""), -1)
    return peer


def _collect_tensors(name: str, arguments: Mapping[str, Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the input tensors, and the output tensors if they differ."""
    by_kind: dict[str, list[torch.Tensor]] = {"input": [], "output": [], "tensors": []}
    for argument, value in arguments.items():
        for kind, tensors in by_kind.items():
            if argument.startswith(kind):
                tensors += _flatten_tensors(value)
    in_place = by_kind["tensors"]
    return (by_kind["input"], in_place) if name == "RECV" else (by_kind["input"] + in_place, by_kind["output"])


def _flatten_tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a tensor, a list of them, or a list of lists."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for part in value for tensor in _flatten_tensors(part)] if isinstance(value, (list, tuple)) else []
