"""Reports each collective of a process group when a rank enters it, and when its work is issued.

Both are detected in torch's dispatcher, below all callers, and therefore also for DDP's C++ reducer. The process
group's own hooks are used (pytorch #186300) or, if torch does not have them, `dispatcher`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..records import Collective
from ..torch_internals import HookOpName, ProcessGroup
from . import dispatcher

_HOOK_KEY = 0x504B
"""Key of Pacekeeper's hooks on a process group."""

_COLLECTIVES_BY_FORM = {
    "SEND": Collective.SEND,
    "RECV": Collective.RECV,
    "BROADCAST": Collective.BROADCAST,
    "ALLREDUCE": Collective.ALL_REDUCE,
    "ALLREDUCE_COALESCED": Collective.ALL_REDUCE,
    "REDUCE": Collective.REDUCE,
    "ALLGATHER": Collective.ALL_GATHER,
    "ALLGATHER_BASE": Collective.ALL_GATHER,
    "ALLGATHER_COALESCED": Collective.ALL_GATHER,
    "ALLGATHER_INTO_TENSOR_COALESCED": Collective.ALL_GATHER,
    "REDUCE_SCATTER": Collective.REDUCE_SCATTER,
    "REDUCE_SCATTER_BASE": Collective.REDUCE_SCATTER,
    "REDUCE_SCATTER_TENSOR_COALESCED": Collective.REDUCE_SCATTER,
    "ALLTOALL": Collective.ALL_TO_ALL,
    "ALLTOALL_BASE": Collective.ALL_TO_ALL,
    "BARRIER": Collective.BARRIER,
    "SCATTER": Collective.SCATTER,
    "GATHER": Collective.GATHER,
}

COLLECTIVES_BY_CALL_NAME: dict[str | int, int] = {
    name: int(collective) for name, collective in _COLLECTIVES_BY_FORM.items()
}
if HookOpName is not None:  # by numbers: members of an enumeration are slow to look up
    COLLECTIVES_BY_CALL_NAME |= {
        int(HookOpName.__members__[name]): int(its)  # type: ignore[call-overload]  # it is one
        for name, its in _COLLECTIVES_BY_FORM.items()
        if name in HookOpName.__members__
    }

EnterCallback = Callable[[Any], None]
"""Takes a call that begins: `name`, `async_op`, `input_tensors`, `output_tensors`, and `root`.

For a send or receive, `root` is the peer's rank in the group (-1: received from any). The `IssuedCallback` of the same
call follows before the `EnterCallback` of another one in this group, unless the call fails.
"""
IssuedCallback = Callable[[Any], None]
"""Takes a call whose work is issued: `work` (None if the current stream waits for it at once)."""


def hook_group(group: ProcessGroup, enter: EnterCallback, issued: IssuedCallback) -> None:
    """Report each collective of `group` from now on, in the calling thread."""
    if HookOpName is None:
        dispatcher.hook_group(group, enter, issued)
    else:
        group.register_pre_hook(_HOOK_KEY, enter)
        group.register_post_hook(_HOOK_KEY, issued)


def identify_collective(call: Any) -> int | None:
    """Return which `Collective` a call is a form of, by the name that torch or the dispatcher gives it."""
    name = call.name
    return COLLECTIVES_BY_CALL_NAME.get(name if name.__class__ is str else int(name))


def unhook_group(group: ProcessGroup) -> None:
    """Stop the reports; no effect without a hook."""
    if HookOpName is None:
        dispatcher.unhook_group(group)
    else:
        group.unregister_pre_hook(_HOOK_KEY)
        group.unregister_post_hook(_HOOK_KEY)
