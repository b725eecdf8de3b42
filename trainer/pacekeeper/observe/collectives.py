"""Sees every collective of every process group: DDP's and FSDP2's as well as the script's own, on any backend.

A hook (hooks.py) tells of the entry. The end is noticed without a callback from the backend's threads, which
would cost tens of microseconds each in contention for Python's lock:

- exactly, when `Work.wait` returns (FSDP2 and the script's own collectives on CPU), or by a mark behind it,
- exactly, at the end of a backward pass, where DDP's reducer has waited for what was still under way,
- exactly, by marks around it, of one that a stream waits for as soon as it is launched (it has no `Work`),
- at a later collective, for those that ended in between: an upper bound, flagged NOTICED_LATE. Those under way are
  looked at in order, up to the first that is not complete.
"""

from __future__ import annotations

import atexit
import itertools
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from pacekeeper import torch_internals
from pacekeeper.torch_internals import ProcessGroup, Work, engine
from pacekeeper_analysis.records import NOTICED_LATE, SYMMETRIC, Kind, Phase

from .clock import HostMark, Mark
from .hooks import collective_of, hook, unhook
from .recorder import Recorder

_Entry = tuple[int, int, int, int, int, int, Phase, bool]
"""Collective, group, sequence, start (ns), bytes, step, phase, whether it is of tensors on the host."""

# Plain numbers: an enumeration's member takes a call in Python to be looked up.
_SYMMETRIC = frozenset(int(collective) for collective in SYMMETRIC)
_RECORD = int(Kind.COLLECTIVE)

_RESOLUTION_NS = 1_000_000
"""Ends that are noticed late are looked for no more often than this: buckets may follow each other in microseconds."""


def watch_collectives(recorder: Recorder) -> None:
    """From now on records the collectives of all process groups, those that exist and those to come."""
    watcher = Watcher(recorder)
    _watch_waits(watcher)
    torch_internals.bracket_coalesced_broadcasts(watcher.broadcasting)
    if torch.backends.cuda.is_built():
        torch_internals.bracket_fsdp_waits(recorder.waiting, torch.cuda)
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


def _watch_waits(watcher: Watcher) -> None:
    """Times the calls by which Python code waits for a collective."""
    wait = Work.wait

    def timed_wait(work: Work, *args: Any, **options: Any) -> Any:
        return watcher.time_wait(work, lambda: wait(work, *args, **options))

    Work.wait = timed_wait  # type: ignore[method-assign,assignment]


class Watcher:
    """The hooks' side of all groups. What is under way waits in `_pending` until its end is noticed."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._ring = recorder.ring
        self._pending: dict[Work, _Entry] = {}
        """In the order in which they were entered."""
        self._timed: deque[tuple[_Entry, Mark, Mark]] = deque()
        """Without a `Work`, or waited for by a stream: from one mark to the other."""
        self._noticed = 0
        """When we last looked for ends."""
        self._without_future: set[int] = set()
        self._backward = -1
        """The backward pass at whose end we are called back."""
        self._groups: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
        recorder.notice_ends = self.notice_ends

    def watch(self, group: dist.ProcessGroup) -> None:
        recorder, ring, pending, timed = self._recorder, self._ring, self._pending, self._timed
        identity, sequence = group_identity(group), itertools.count(1)
        now, graph_task = time.monotonic_ns, torch_internals.graph_task
        entry: _Entry | None = None
        begun: Mark | None = None
        """Of `entry`, where a stream may be going to wait for it at once."""

        def enter(call: Any) -> None:
            nonlocal entry, begun
            collective = collective_of(call)
            if collective is None or recorder.clock.captures:  # to ask how far works are would break the capture
                entry = None
                return
            number, start = next(sequence), now()
            if (pending or timed) and start - self._noticed > _RESOLUTION_NS:
                self._notice_ends(start, late=True)
            ring.enter_collective(collective, identity, number, start)
            tensors = call.input_tensors or call.output_tensors
            nbytes = tensors[0].nbytes if len(tensors) == 1 else sum([tensor.nbytes for tensor in tensors])
            on_host = not tensors or tensors[0].is_cpu
            entry = (collective, identity, number, start, nbytes, recorder.step, recorder.phase, on_host)
            begun = None
            if call.async_op:
                backward = graph_task()
                if backward not in (-1, self._backward):
                    self._backward = backward
                    engine.queue_callback(self.backward_computed)
                if collective in _SYMMETRIC:
                    recorder.entered(backward != -1)
            elif not on_host or not tensors:  # a barrier has none, wherever it is
                begun = recorder.clock.mark()

        def issued(call: Any) -> None:
            nonlocal entry
            if entry is None:
                return
            entered, entry = entry, None
            if (work := call.work) is not None:
                pending[work] = entered
            elif begun is not None:
                end = recorder.clock.mark()
                timed.append((entered, begun, end))
                if recorder.counts:
                    recorder.waited(begun, end)
            elif not pending and not timed:
                ring.leave_collective()

        hook(group, enter, issued)
        self._groups.add(group)

    def time_wait(self, work: Work, wait: Callable[[], Any]) -> Any:
        """What `wait` returns, which waits for `work`; or has the current stream wait for it."""
        start = self._recorder.begin_wait()
        try:
            return wait()
        finally:
            self._recorder.end_wait(start)
            entry = self._pending.pop(work, None)  # a device's work would keep its output's memory from being used
            if entry is not None and entry[-1]:
                self._end(entry, time.monotonic_ns())
            elif entry is not None:
                self._timed.append((entry, HostMark(entry[3]), self._recorder.clock.mark()))

    @contextmanager
    def broadcasting(self) -> Iterator[None]:
        """C++ broadcasts, and waits for it."""
        with self._recorder.waiting():
            yield
        self.notice_ends()

    def notice_ends(self) -> None:
        """Called where the training thread has just waited for what is under way, if it waits at all."""
        if self._pending or self._timed:
            self._notice_ends(time.monotonic_ns(), late=False)

    def backward_computed(self) -> None:
        """All gradients are there. DDP's own callback, which waits for their reduction, stands before the next one."""
        self._recorder.backward_computed()
        engine.queue_callback(self.backward_ended)

    def backward_ended(self) -> None:
        self._backward = -1
        self.notice_ends()
        self._recorder.reduced()

    def stop(self) -> None:
        """Python ends: hooks must not outlive it."""
        for group in self._groups:
            unwatch(group)

    def _notice_ends(self, now: int, late: bool) -> None:
        self._noticed = now
        pending, timed = self._pending, self._timed
        while pending:
            work, entry = next(iter(pending.items()))
            if not (work.is_completed() or (not late and self._is_nearly_done(work, entry))):
                break
            del pending[work]
            self._end(entry, now, NOTICED_LATE if late or not entry[-1] else 0)
        while timed and timed[0][1].reached and timed[0][2].reached:
            entry, begun, ended = timed.popleft()
            self._end((*entry[:3], begun.ns, *entry[4:]), ended.ns)

    def _is_nearly_done(self, work: Work, entry: _Entry) -> bool:
        """gloo completes a future, on which DDP waits, a moment before the work that it belongs to."""
        collective, on_host = entry[0], entry[-1]
        if not on_host or collective in self._without_future:
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
        if not self._pending and not self._timed:
            self._ring.leave_collective()
