"""Sees every collective of every process group: DDP's and FSDP2's as well as the script's own, on any backend.

A hook (hooks.py) tells of the entry. The end is noticed without a callback from the backend's threads, which
would cost tens of microseconds each in contention for Python's lock:

- exactly, when `Work.wait` returns (FSDP2 and the script's own collectives on CPU),
- exactly, at the end of a backward pass, where DDP's reducer has waited for what was still under way,
- at a later collective, for those that ended in between: an upper bound, flagged NOTICED_LATE.
"""

from __future__ import annotations

import atexit
import itertools
import time
import weakref
import zlib
from typing import Any

import torch.distributed as dist

from pacekeeper import torch_internals
from pacekeeper.torch_internals import ProcessGroup, Work, engine
from pacekeeper_analysis.records import NOTICED_LATE, SYMMETRIC, Collective, Kind, Phase

from .hooks import COLLECTIVES, hook, unhook
from .recorder import Recorder

_Entry = tuple[int, int, int, int, int, int, Phase, bool]
"""Collective, group, sequence, start (ns), bytes, step, phase, whether it is of CPU tensors."""

# Plain numbers: an enumeration's member takes a call in Python to be looked up.
_SYMMETRIC = frozenset(int(collective) for collective in SYMMETRIC)
_BROADCAST = int(Collective.BROADCAST)
_RECORD = int(Kind.COLLECTIVE)

_RESOLUTION_NS = 1_000_000
"""Ends that are noticed late are looked for no more often than this: buckets may follow each other in microseconds."""


def watch_collectives(recorder: Recorder) -> None:
    """From now on records the collectives of all process groups, those that exist and those to come."""
    watcher = _Watcher(recorder)
    watcher.watch_waits()
    recorder.before_optimizer = watcher.notice_ends
    atexit.register(watcher.stop)

    def watch(group: dist.ProcessGroup) -> None:
        if isinstance(group, ProcessGroup):
            watcher.watch(group)

    torch_internals.on_new_process_group(watch)
    for group in torch_internals.process_groups():
        watch(group)


def unwatch(group: dist.ProcessGroup) -> None:
    """Leaves this group out: for those that the library itself talks over in the background."""
    unhook(group)


def group_identity(group: dist.ProcessGroup) -> int:
    """The same number on all ranks of the group, another one for other groups."""
    return zlib.crc32(f"{group.group_name}:{group.group_desc}:{group.size()}".encode())


class _Watcher:
    """The hooks' side of all groups. What is under way waits in `_pending` until its end is noticed."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._ring = recorder.ring
        self._pending: dict[Work, _Entry] = {}
        self._noticed = 0
        """When we last looked for ends."""
        self._without_future: set[int] = set()
        self._backward = -1
        """The backward pass at whose end we are called back."""
        self._groups: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()

    def watch(self, group: dist.ProcessGroup) -> None:
        recorder, ring, pending = self._recorder, self._ring, self._pending
        identity, sequence = group_identity(group), itertools.count(1)
        clock, graph_task = time.monotonic_ns, torch_internals.graph_task
        entering: dict[int, _Entry] = {}

        def enter(call: Any) -> None:
            collective = COLLECTIVES.get(call.name)
            if collective is None:
                return
            number, start = next(sequence), clock()
            if pending and start - self._noticed > _RESOLUTION_NS:
                self._notice_ends(start, late=True)
            ring.enter_collective(collective, identity, number, start)
            tensors = call.input_tensors or call.output_tensors
            nbytes = tensors[0].nbytes if len(tensors) == 1 else sum([tensor.nbytes for tensor in tensors])
            on_cpu = not tensors or tensors[0].is_cpu
            entering[call.op_id] = (collective, identity, number, start, nbytes, recorder.step, recorder.phase, on_cpu)
            if collective in _SYMMETRIC:
                recorder.last_entry = start
            backward = graph_task()
            if backward not in (-1, self._backward):
                self._backward = backward
                engine.queue_callback(self._backward_computed)

        def issued(call: Any) -> None:
            entry = entering.pop(call.op_id, None)
            if entry is None:
                return
            if entry[0] == _BROADCAST and call.async_op:
                call.work.get_future().add_done_callback(lambda _: self._broadcast_ended(entry))
            else:
                pending[call.work] = entry

        hook(group, enter, issued)
        self._groups.add(group)

    def watch_waits(self) -> None:
        """Times the calls by which Python code waits for a collective."""
        recorder, pending = self._recorder, self._pending
        clock, wait = time.monotonic_ns, Work.wait

        def timed_wait(work: Work, *args: Any, **options: Any) -> Any:
            start = clock()
            try:
                return wait(work, *args, **options)
            finally:
                end = clock()
                recorder.waited(start, end)
                # Of a GPU's collective, the wait only orders what comes behind it.
                if work in pending and (pending[work][-1] or work.is_completed()):
                    self._end(pending.pop(work), end)

        Work.wait = timed_wait  # type: ignore[method-assign,assignment]

    def notice_ends(self) -> None:
        """Called where the training thread has just waited for what is under way, if it waits at all."""
        if self._pending:
            self._notice_ends(time.monotonic_ns(), late=False)

    def stop(self) -> None:
        """Python ends: hooks must not outlive it."""
        for group in self._groups:
            unwatch(group)

    def _notice_ends(self, now: int, late: bool) -> None:
        self._noticed = now
        for work, entry in list(self._pending.items()):
            if work.is_completed() or (not late and self._is_nearly_done(work, entry)):
                del self._pending[work]
                self._end(entry, now, NOTICED_LATE if late else 0)

    def _is_nearly_done(self, work: Work, entry: _Entry) -> bool:
        """gloo completes a future, on which DDP waits, a moment before the work that it belongs to."""
        collective, on_cpu = entry[0], entry[-1]
        if not on_cpu or collective in self._without_future:
            return False
        try:
            return work.get_future().done()
        except RuntimeError:
            self._without_future.add(collective)  # asked once only, since C++ exceptions are slow
            return False

    def _end(self, entry: _Entry, end: int, flags: int = 0) -> None:
        collective, group, number, start, nbytes, step, phase, _ = entry
        self._ring.write(
            _RECORD, start, end, step, phase, 0.0, collective, group, number, nbytes, -1, flags
        )  # fmt: skip
        if not self._pending:
            self._ring.leave_collective()

    def _backward_computed(self) -> None:
        """All gradients are there. DDP's own callback, which waits for their reduction, stands before the next one."""
        engine.queue_callback(self._backward_ended)

    def _backward_ended(self) -> None:
        self._backward = -1
        self.notice_ends()
        self._recorder.reduced()

    def _broadcast_ended(self, entry: _Entry) -> None:
        end = time.monotonic_ns()
        self._recorder.waited_elsewhere(end - entry[3])
        self._end(entry, end)
