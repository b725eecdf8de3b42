"""Tells of each collective of a process group when a rank enters it, and when its work is issued.

PyTorch fires a process group's hooks in the dispatcher, below all of its callers (pytorch #186300), so DDP's C++
reducer is seen too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pacekeeper.torch_internals import HookOpName, ProcessGroup
from pacekeeper_analysis.records import Collective

_HOOK = 0x504B
"""Key of our hooks on a process group."""

# Plain numbers: an enumeration's member takes a call in Python to be looked up.
COLLECTIVES: dict[Any, int] = {
    HookOpName.SEND: int(Collective.SEND),
    HookOpName.RECV: int(Collective.RECV),
    HookOpName.BROADCAST: int(Collective.BROADCAST),
    HookOpName.ALLREDUCE: int(Collective.ALL_REDUCE),
    HookOpName.ALLREDUCE_COALESCED: int(Collective.ALL_REDUCE),
    HookOpName.REDUCE: int(Collective.REDUCE),
    HookOpName.ALLGATHER: int(Collective.ALL_GATHER),
    HookOpName.ALLGATHER_BASE: int(Collective.ALL_GATHER),
    HookOpName.ALLGATHER_COALESCED: int(Collective.ALL_GATHER),
    HookOpName.ALLGATHER_INTO_TENSOR_COALESCED: int(Collective.ALL_GATHER),
    HookOpName.REDUCE_SCATTER: int(Collective.REDUCE_SCATTER),
    HookOpName.REDUCE_SCATTER_BASE: int(Collective.REDUCE_SCATTER),
    HookOpName.REDUCE_SCATTER_TENSOR_COALESCED: int(Collective.REDUCE_SCATTER),
    HookOpName.ALLTOALL: int(Collective.ALL_TO_ALL),
    HookOpName.ALLTOALL_BASE: int(Collective.ALL_TO_ALL),
    HookOpName.BARRIER: int(Collective.BARRIER),
    HookOpName.SCATTER: int(Collective.SCATTER),
    HookOpName.GATHER: int(Collective.GATHER),
}
"""By `Call.name`: the collective that it is a form of."""

Enter = Callable[[Any], None]
"""Takes a call that begins: `name`, `async_op`, `input_tensors`, `output_tensors`. `Issued` of the same call follows
before `Enter` of another one in this group, unless the call fails."""
Issued = Callable[[Any], None]
"""Takes a call whose work is issued: `work` (None where the current stream waits for it at once)."""


def hook(group: ProcessGroup, enter: Enter, issued: Issued) -> None:
    """From now on tells of each collective of `group`, in the thread that calls it."""
    group.register_pre_hook(_HOOK, enter)
    group.register_post_hook(_HOOK, issued)


def unhook(group: ProcessGroup) -> None:
    """Ends that; nothing where there was no hook."""
    group.unregister_pre_hook(_HOOK)
    group.unregister_post_hook(_HOOK)
