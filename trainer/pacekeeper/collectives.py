"""Sees every collective of every process group: DDP's and FSDP2's as well as the script's own, on any backend.

PyTorch fires a process group's hooks in the dispatcher, below all of its callers (pytorch #186300), so DDP's C++ reducer is
seen too. A hook tells of the entry; the end is told by the work's future, which the backend completes when the data are
there. What has no future (gloo's reduce-scatter, send and receive) ends when its `Work.wait` returns.
"""

from __future__ import annotations

import itertools
import time
import zlib
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HookOpName, ProcessGroup, Work
from torch.distributed import distributed_c10d as c10d

from pacekeeper_analysis.records import Collective, Kind

from .recorder import Recorder

_HOOK = 0x504B
"""Key of our hooks on a process group."""

_COLLECTIVES = {
    HookOpName.SEND: Collective.SEND,
    HookOpName.RECV: Collective.RECV,
    HookOpName.BROADCAST: Collective.BROADCAST,
    HookOpName.ALLREDUCE: Collective.ALL_REDUCE,
    HookOpName.ALLREDUCE_COALESCED: Collective.ALL_REDUCE,
    HookOpName.REDUCE: Collective.REDUCE,
    HookOpName.ALLGATHER: Collective.ALL_GATHER,
    HookOpName.ALLGATHER_BASE: Collective.ALL_GATHER,
    HookOpName.ALLGATHER_COALESCED: Collective.ALL_GATHER,
    HookOpName.ALLGATHER_INTO_TENSOR_COALESCED: Collective.ALL_GATHER,
    HookOpName.REDUCE_SCATTER: Collective.REDUCE_SCATTER,
    HookOpName.REDUCE_SCATTER_BASE: Collective.REDUCE_SCATTER,
    HookOpName.REDUCE_SCATTER_TENSOR_COALESCED: Collective.REDUCE_SCATTER,
    HookOpName.ALLTOALL: Collective.ALL_TO_ALL,
    HookOpName.ALLTOALL_BASE: Collective.ALL_TO_ALL,
    HookOpName.BARRIER: Collective.BARRIER,
    HookOpName.SCATTER: Collective.SCATTER,
    HookOpName.GATHER: Collective.GATHER,
}


def watch_collectives(recorder: Recorder) -> None:
    """From now on records the collectives of all process groups, those that exist and those to come."""
    watcher = _Watcher(recorder)
    watcher.watch_waits()
    create = c10d._new_process_group_helper

    def create_and_watch(*args: Any, **options: Any) -> Any:
        group, store = create(*args, **options)
        if isinstance(group, ProcessGroup):
            watcher.watch(group)
        return group, store

    c10d._new_process_group_helper = create_and_watch
    for group in list(c10d._world.pg_map):
        watcher.watch(group)


def unwatch(group: dist.ProcessGroup) -> None:
    """Leaves this group out: for those that the library itself talks over in the background."""
    group.unregister_pre_hook(_HOOK)
    group.unregister_post_hook(_HOOK)


def group_identity(group: dist.ProcessGroup) -> int:
    """The same number on all ranks of the group, another one for other groups."""
    return zlib.crc32(f"{group.group_name}:{group.group_desc}:{group.size()}".encode())


class _Watcher:
    """The hooks' side. They run in the thread that issues a collective, the futures' callbacks in the backend's."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._awaited: dict[Work, Callable[[object], None]] = {}
        """What has no future, until somebody waits for it."""

    def watch(self, group: dist.ProcessGroup) -> None:
        recorder, ring = self._recorder, self._recorder.ring
        identity, sequence = group_identity(group), itertools.count(1)
        clock = time.monotonic_ns
        entering: dict[int, tuple[Collective, int, int, int]] = {}
        without_future: set[Collective] = set()

        def enter(call: Any) -> None:
            collective = _COLLECTIVES.get(call.name)
            if collective is None:
                return
            number, start = next(sequence), clock()
            ring.enter_collective(collective, identity, number, start)
            nbytes = sum(tensor.nbytes for tensor in call.input_tensors or call.output_tensors)
            entering[call.op_id] = (collective, number, start, nbytes)
            recorder.entered(collective, (identity, number), start)

        def issued(call: Any) -> None:
            entry = entering.pop(call.op_id, None)
            if entry is None:
                return
            collective, number, start, nbytes = entry
            step, phase, overlapped, work = recorder.step, recorder.phase, call.async_op, call.work

            def done(_: object) -> None:
                end = clock()
                ring.write(
                    Kind.COLLECTIVE, start, end, step, phase, 0.0, collective, identity, number, nbytes
                )  # fmt: skip
                recorder.done(collective, (identity, number), start, end, overlapped)

            if collective not in without_future:
                try:
                    work.get_future().add_done_callback(done)
                    return
                except RuntimeError:  # "not implemented": known from the second one on, since C++ exceptions are slow
                    without_future.add(collective)
            self._awaited[work] = done

        group.register_pre_hook(_HOOK, enter)
        group.register_post_hook(_HOOK, issued)

    def watch_waits(self) -> None:
        """Times the calls by which Python code waits for a collective."""
        recorder, awaited = self._recorder, self._awaited
        clock, wait = time.monotonic_ns, Work.wait

        def timed_wait(work: Work, *args: Any, **options: Any) -> Any:
            start = clock()
            try:
                return wait(work, *args, **options)
            finally:
                recorder.waited(start, clock())
                done = awaited.pop(work, None)
                if done is not None:
                    done(work)

        Work.wait = timed_wait  # type: ignore[method-assign,assignment]
