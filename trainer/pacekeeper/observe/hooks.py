"""Tells of each collective of a process group when a rank enters it, and when its work is issued.

Both are heard of in torch's dispatcher, below all callers, so DDP's C++ reducer is heard too: by the process group's
own hooks (pytorch #186300) or, where torch does not have them yet, by `dispatcher`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pacekeeper.torch_internals import HookOpName, ProcessGroup
from pacekeeper_analysis.records import Collective

from . import dispatcher

_HOOK_KEY = 0x504B
"""Key of our hooks on a process group."""

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

COLLECTIVES_BY_CALL_NAME: dict[str | int, int] = {name: int(collective) for name, collective in _COLLECTIVES_BY_FORM.items()}
if HookOpName is not None:  # by numbers: an enumeration's member is slow to look up
    COLLECTIVES_BY_CALL_NAME |= {int(HookOpName.__members__[name]): int(its) for name, its in _COLLECTIVES_BY_FORM.items()}  # type: ignore[call-overload]  # it is one

EnterCallback = Callable[[Any], None]
"""Takes a call that begins: `name`, `async_op`, `input_tensors`, `output_tensors`, and `root`, of a send or receive the
peer's rank in the group (-1: received from whoever comes). `Issued` of the same call follows before `Enter` of another
one in this group, unless the call fails."""
IssuedCallback = Callable[[Any], None]
"""Takes a call whose work is issued: `work` (None where the current stream waits for it at once)."""


def hook_group(group: ProcessGroup, enter: EnterCallback, issued: IssuedCallback) -> None:
    """From now on tells of each collective of `group`, in the thread that calls it."""
    if HookOpName is None:
        dispatcher.hook_group(group, enter, issued)
    else:
        group.register_pre_hook(_HOOK_KEY, enter)
        group.register_post_hook(_HOOK_KEY, issued)


def identify_collective(call: Any) -> int | None:
    """What `call` is a form of (a `Collective`), by the name that torch or the dispatcher gives it."""
    name = call.name
    return COLLECTIVES_BY_CALL_NAME.get(name if name.__class__ is str else int(name))


def unhook_group(group: ProcessGroup) -> None:
    """Ends that; nothing where there was no hook."""
    if HookOpName is None:
        dispatcher.unhook_group(group)
    else:
        group.unregister_pre_hook(_HOOK_KEY)
        group.unregister_post_hook(_HOOK_KEY)
