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
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from pacekeeper import torch_internals
from pacekeeper.torch_internals import ProcessGroup, Work, engine
from pacekeeper_analysis import records
from pacekeeper_analysis.records import NOTICED_LATE, Collective, RecordKind, Phase

from .clock import HostMark, Mark
from .communicators import compute_channel_identity, compute_group_identity, extract_group_name
from .hooks import identify_collective, hook_group, unhook_group
from .recorder import Recorder
from .ring import NO_PLACE

_Entry = tuple[int, int, int, int, int, int, Phase, int, bool]
"""Collective, group, sequence, start (ns), bytes, step, phase, peer, whether it is of tensors on the host."""

# Plain numbers: an enumeration's member takes a call in Python to be looked up.
SYMMETRIC_COLLECTIVE_NUMBERS = frozenset(int(collective) for collective in records.SYMMETRIC_COLLECTIVES)
_COLLECTIVE_KIND = int(RecordKind.COLLECTIVE)
_SEND, _RECEIVE = int(Collective.SEND), int(Collective.RECV)
POINT_TO_POINT = min(_SEND, _RECEIVE)
"""From this number on it is one."""

END_NOTICE_RESOLUTION_NS = 1_000_000
"""Ends that are noticed late are looked for no more often than this: buckets may follow each other in microseconds."""


def start_collective_monitor(watcher: CollectiveMonitor) -> None:
    """From now on records the collectives of all process groups, those that exist and those to come."""
    recorder = watcher.recorder
    _time_waits(watcher)
    torch_internals.bracket_coalesced_broadcasts(watcher.time_broadcast)
    if torch.backends.cuda.is_built():
        torch_internals.bracket_fsdp_waits(recorder.time_peer_wait, torch.cuda)
    atexit.register(watcher.stop)

    def watch(group: dist.ProcessGroup) -> None:
        if isinstance(group, ProcessGroup) and not watcher.stopped:
            watcher.monitor_group(group)

    torch_internals.on_new_process_group(watch)
    for group in torch_internals.list_process_groups():
        watch(group)


def exclude_group(group: dist.ProcessGroup) -> None:
    """Leaves this group out: for those that the library itself talks over in the background."""
    unhook_group(group)


def register_group(group: dist.ProcessGroup | None, recorder: Recorder) -> GroupLane:
    """Where the rank's collectives of this group are counted. Launcher and sidecar know its ranks from now on."""
    assert group is not None, "its hooks are called while it is there"
    ranks = torch_internals.get_group_ranks(group)
    identity = compute_group_identity(group.group_name, group.group_desc, ranks or range(group.size()))
    recorder.communicators.add(identity, ranks, extract_group_name(group.group_desc))
    return _create_lane(group, identity, recorder)


class GroupLane(NamedTuple):
    """Of a group, or of one of its channels."""

    identity: int
    entered_place: int
    """The ring's, for what it says of how far the rank has come there."""
    sequence: Iterator[int]
    peer: int = -1
    """Global rank at the channel's other end."""


def _create_lane(group: dist.ProcessGroup, identity: int, recorder: Recorder, peer: int = -1) -> GroupLane:
    entered = recorder.ring.take_place(identity)
    weakref.finalize(group, _release_lane, recorder, identity, entered).atexit = False
    return GroupLane(identity, entered, itertools.count(1), peer)


def _release_lane(recorder: Recorder, identity: int, entered: int) -> None:
    recorder.ring.release_place(entered)
    recorder.communicators.mark_destroyed(identity)


def _time_waits(watcher: CollectiveMonitor) -> None:
    """Times the calls by which Python code waits for a collective."""
    wait = Work.wait

    def timed_wait(work: Work, *args: Any, **options: Any) -> Any:
        return watcher.time_wait(work, lambda: wait(work, *args, **options))

    Work.wait = timed_wait  # type: ignore[method-assign,assignment]


class CollectiveMonitor:
    """The hooks' side of all groups. What is under way waits in `_pending` until its end is noticed."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._ring = recorder.ring
        self._pending: dict[Work, _Entry] = {}
        """In the order in which they were entered."""
        self._timed: deque[tuple[_Entry, Mark, Mark | None, Mark]] = deque()
        """Without a `Work`, or waited for by a stream: when it was entered, from when on the rank did nothing but wait
        for it (None: it did not), and when it ended."""
        self._noticed = 0
        """When we last looked for ends."""
        self._without_future: set[int] = set()
        self._backward = -1
        """The backward pass at whose end we are called back."""
        self._groups: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
        self.stopped = False
        recorder.notice_ends = self.notice_ends

    def monitor_group(self, group: dist.ProcessGroup) -> None:
        recorder, ring, pending = self.recorder, self._ring, self._pending
        itself = weakref.ref(group)  # the group keeps its hooks, which must not keep the group
        place: GroupLane | None = None
        channels: dict[tuple[int, int], GroupLane] = {}
        now, graph_task = time.monotonic_ns, torch_internals.graph_task
        entry: _Entry | None = None
        begun: Mark | None = None
        """Of `entry`, where a stream may be going to wait for it at once."""

        def enter(call: Any) -> None:
            nonlocal entry, begun, place
            collective = identify_collective(call)
            if collective is None or recorder.clock.captures:  # to ask how far works are would break the capture
                entry = None
                return
            if place is None:  # torch says later than when it tells of a group who is in it
                place = register_group(itself(), recorder)
            identity, entered, sequence, peer = place
            if collective >= POINT_TO_POINT:
                identity, entered, sequence, peer = self._find_channel_lane(itself(), place, channels, collective, call.root)
            number, start = next(sequence), now()
            if self._has_pending and start - self._noticed > END_NOTICE_RESOLUTION_NS:
                self._notice_ends(start, late=True)
            ring.enter_collective(collective, identity, number, start, entered)
            tensors = call.input_tensors or call.output_tensors
            nbytes = tensors[0].nbytes if len(tensors) == 1 else sum([tensor.nbytes for tensor in tensors])
            on_host = not tensors or tensors[0].is_cpu
            entry = (collective, identity, number, start, nbytes, recorder.step, recorder.phase, peer, on_host)
            begun = None
            if call.async_op:
                backward = graph_task()
                if backward not in (-1, self._backward):
                    self._backward = backward
                    engine.queue_callback(self.backward_computed)
                if collective in SYMMETRIC_COLLECTIVE_NUMBERS:
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
                self._issued_at_once(entered, begun)
            elif not self._has_pending:
                ring.leave_collective()

        hook_group(group, enter, issued)
        self._groups.add(group)

    def _issued_at_once(self, entry: _Entry, begun: Mark) -> None:
        """A stream waits for it from now on; `begun`: since when it may."""
        end = self.recorder.clock.mark()
        held = self.recorder.is_wait_counted
        self._timed.append((entry, begun, begun if held else None, end))
        if held:
            self.recorder.waited(begun, end)

    def _find_channel_lane(
        self,
        group: dist.ProcessGroup | None,
        place: GroupLane,
        channels: dict[tuple[int, int], GroupLane],
        collective: int,
        root: int,
    ) -> GroupLane:
        """Of a send or receive; `root`: the peer's rank in the group, -1 where it is received from whoever comes."""
        channel = channels.get((collective, root))
        if channel is None:
            assert group is not None, "its hooks are called while it is there"
            ranks = torch_internals.get_group_ranks(group)
            if 0 <= root < len(ranks):
                peer, own = ranks[root], ranks[group.rank()]
                ends = (own, peer) if collective == _SEND else (peer, own)
                identity = compute_channel_identity(place.identity, *ends)
                self.recorder.communicators.add(identity, ends, extract_group_name(group.group_desc))
                channel = _create_lane(group, identity, self.recorder, peer)
            else:
                channel = GroupLane(place.identity, NO_PLACE, itertools.count(1))
            channels[collective, root] = channel
        self._ring.state.peer = channel.peer
        return channel

    def time_wait(self, work: Work, wait: Callable[[], Any]) -> Any:
        """What `wait` returns, which waits for `work`; or has the current stream wait for it."""
        begun, start = time.monotonic_ns(), self.recorder.begin_wait()
        try:
            return wait()
        finally:
            self.recorder.end_wait(start)
            entry = self._take(work)  # a device's work would keep its output's memory from being used
            if entry is not None and entry[-1]:
                self._write_record(entry, time.monotonic_ns(), held_from=begun)
            elif entry is not None:
                self._timed.append((entry, HostMark(entry[3]), start, self.recorder.clock.mark()))

    @contextmanager
    def time_broadcast(self) -> Iterator[None]:
        """C++ broadcasts, and waits for it."""
        with self.recorder.time_peer_wait():
            yield
        self.notice_ends()

    def notice_ends(self) -> None:
        """Called where the training thread has just waited for what is under way, if it waits at all."""
        if self._has_pending:
            self._notice_ends(time.monotonic_ns(), late=False)

    def backward_computed(self) -> None:
        """All gradients are there. DDP's own callback, which waits for their reduction, stands before the next one."""
        self.recorder.backward_computed()
        engine.queue_callback(self.backward_ended)

    def backward_ended(self) -> None:
        self._backward = -1
        self.notice_ends()
        self.recorder.reduced()

    def stop(self) -> None:
        """Watches no group any more: Python ends, and hooks must not outlive it; or this is a fork of the rank."""
        self.stopped = True
        for group in self._groups:
            exclude_group(group)

    def _notice_ends(self, now: int, late: bool) -> None:
        self._noticed = now
        pending = self._pending
        while pending:
            work, entry = next(iter(pending.items()))
            if not (work.is_completed() or (not late and self._is_nearly_done(work, entry))):
                break
            del pending[work]
            exact = entry[-1] and not late
            # What the rank has waited for at last is the one that it entered last.
            tail = self.recorder.tail_ns if exact and not pending else None
            self._write_record(entry, now, 0 if exact else NOTICED_LATE, tail)
        self._notice_timed()

    def _notice_timed(self) -> None:
        """Of those that are told by marks."""
        timed = self._timed
        while timed and timed[0][1].reached and timed[0][3].reached:
            entry, begun, held, ended = timed.popleft()
            start, end = begun.ns, ended.ns
            self._write_record((*entry[:3], start, *entry[4:]), end, 0, None if held is None else held.ns)

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

    def _write_record(self, entry: _Entry, end: int, flags: int = 0, held_from: int | None = None) -> None:
        """`held_from`: since when the rank did nothing but wait for it (ns); None: it went on meanwhile."""
        collective, group, number, start, nbytes, step, phase, peer, _ = entry
        held = 0.0 if held_from is None else (end - max(held_from, start)) * 1e-9
        self._ring.write(
            _COLLECTIVE_KIND, start, end, step, phase, held, collective, group, number, nbytes, peer, flags
        )  # fmt: skip
        if not self._has_pending:
            self._ring.leave_collective()

    def _take(self, work: Work) -> _Entry | None:
        """What is pending with this work, and is so no longer."""
        return self._pending.pop(work, None)

    @property
    def _has_pending(self) -> bool:
        """Whether something is, as far as was noticed."""
        return bool(self._pending or self._timed)
