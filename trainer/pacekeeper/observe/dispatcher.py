"""The work of a process group's hooks, done in torch's dispatcher: for a torch whose process groups have none.

Every collective, whoever calls it (the script, FSDP2, DDP's C++ reducer, compiled code), comes to the operator of c10d
for it on its way to the backend. A kernel of ours stands in front of the operator's own: it tells of the call and hands
it on, so results, errors, time-outs and works are the backend's, and the process groups are the ones that torch made.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from pacekeeper import torch_internals
from pacekeeper.torch_internals import ProcessGroup, Work


@dataclass(slots=True)
class CollectiveCall:
    """One collective of one rank, with the names that torch's own hooks use."""

    name: str
    """Of torch's HookOpName."""
    op_id: int
    async_op: bool
    input_tensors: list[torch.Tensor]
    output_tensors: list[torch.Tensor]
    root: int
    """Of a send or receive: the peer's rank in the group; -1: whoever comes."""
    work: Work | None = None
    """Once it is issued; None, too, where the backend gives none."""


def hook_group(group: ProcessGroup, enter: Callable[[CollectiveCall], None], issued: Callable[[CollectiveCall], None]) -> None:
    """From now on tells of each collective of `group`, in the thread that calls it."""
    _intercept_operators()
    _hooked[group] = enter, issued


def unhook_group(group: ProcessGroup) -> None:
    """Ends that; nothing where there was no hook."""
    _hooked.pop(group, None)


_hooked: WeakKeyDictionary[ProcessGroup, tuple[Callable[[CollectiveCall], None], Callable[[CollectiveCall], None]]] = WeakKeyDictionary()
_call_numbers = itertools.count(1)

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
    found = _hooked.get(ProcessGroup.unbox(arguments["process_group"]))
    if found is None:
        return proceed()
    enter, issued = found
    call = CollectiveCall(
        name, next(_call_numbers), arguments.get("async_op", True), *_collect_tensors(name, arguments), _read_peer(name, arguments)
    )
    enter(call)
    result = proceed()
    call.work = Work.unbox(result[-1] if isinstance(result, tuple) else result)
    issued(call)
    return result


def _read_peer(name: str, arguments: Mapping[str, Any]) -> int:
    peer: int = arguments.get({"SEND": "dst", "RECV": "src"}.get(name, ""), -1)
    return peer


def _collect_tensors(name: str, arguments: Mapping[str, Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """That go in, and that come out where these are others."""
    given: dict[str, list[torch.Tensor]] = {"input": [], "output": [], "tensors": []}
    for argument, value in arguments.items():
        for kind, tensors in given.items():
            if argument.startswith(kind):
                tensors += _flatten_tensors(value)
    in_place = given["tensors"]
    return (given["input"], in_place) if name == "RECV" else (given["input"] + in_place, given["output"])


def _flatten_tensors(value: Any) -> list[torch.Tensor]:
    """A tensor, a list of them, or a list of lists."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for part in value for tensor in _flatten_tensors(part)] if isinstance(value, (list, tuple)) else []
