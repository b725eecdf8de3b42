"""Records every collective of every process group: of DDP, FSDP2 and the script, on any backend.

A hook (collective_hooks.py) reports the entry. The end is detected without a callback from the backend's threads, which
would cost tens of microseconds each in contention for the GIL:

- exactly, when `Work.wait` returns (FSDP2 and the script's own collectives on CPU), or by a mark after it,
- exactly, at the end of a backward pass, where DDP's reducer has waited for pending collectives,
- exactly, by marks around it, for a collective that a stream waits for as soon as it is launched (it has no `Work`),
- at a later collective, for those that ended in between: an upper bound, flagged NOTICED_LATE. Pending ones are checked
  in order, up to the first incomplete one.
"""

from __future__ import annotations

import atexit
import itertools
import time
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch.distributed as dist

from .. import torch_internals
from ..record_ring import NO_PLACE
from ..recorder import Recorder
from ..records import NOTICED_LATE, SYMMETRIC_COLLECTIVES, Collective, Phase, RecordKind
from ..torch_internals import ProcessGroup, Work, engine
from ..work_clock import HostMark, Mark
from . import dispatcher
from .collective_hooks import hook_group, identify_collective, unhook_group
from .communicators import compute_channel_identity, compute_group_identity, extract_group_name

_Entry = tuple[int, int, int, int, int, int, Phase, int, bool]
"""Collective, group, sequence, start (ns), bytes, step, phase, peer, whether its tensors are on the host."""

# Plain integers: looking up a member of an enumeration costs a Python call.
SYMMETRIC_COLLECTIVE_NUMBERS = frozenset(int(collective) for collective in SYMMETRIC_COLLECTIVES)
_COLLECTIVE_KIND = int(RecordKind.COLLECTIVE)
_SEND, _RECEIVE = int(Collective.SEND), int(Collective.RECV)
POINT_TO_POINT = min(_SEND, _RECEIVE)
"""Lowest number of a point-to-point operation."""

END_NOTICE_RESOLUTION_NS = 1_000_000
"""Shortest interval between two checks for late ends: buckets may follow each other in microseconds."""


def start_collective_monitor(monitor: CollectiveMonitor) -> None:
    """Record the collectives of all existing and future process groups from now on."""
    guard = monitor.recorder.guard
    guard.call_when_disabled(monitor.deactivate)
    dispatcher.report_failures_to(guard)
    waits: Any = guard.bracket("Work.wait", Work.wait, monitor.begin_wait, monitor.end_wait)
    Work.wait = waits  # type: ignore[method-assign]
    torch_internals.bracket_coalesced_broadcasts(guard.build_contexts("a broadcast", monitor.time_broadcast))
    atexit.register(guard.protect("the exit", monitor.stop, even_inactive=True))

    def watch(group: dist.ProcessGroup) -> None:
        if isinstance(group, ProcessGroup) and not monitor.stopped:
            monitor.monitor_group(group)

    watch = guard.protect("a new process group", watch)
    torch_internals.on_new_process_group(watch)
    for group in torch_internals.list_process_groups():
        watch(group)


def exclude_group(group: dist.ProcessGroup) -> None:
    """Exclude this group, which the library uses in the background."""
    unhook_group(group)


def register_group(group: dist.ProcessGroup | None, recorder: Recorder) -> GroupLane:
    """Return the lane that counts the rank's collectives of this group. Publishes its ranks to launcher and sidecar."""
    assert group is not None, "its hooks are called while it exists"
    ranks = torch_internals.get_group_ranks(group)
    identity = compute_group_identity(group.group_name, group.group_desc, ranks or range(group.size()))
    recorder.communicators.add(identity, ranks, extract_group_name(group.group_desc))
    return _create_lane(group, identity, recorder)


class GroupLane(NamedTuple):
    """Counter of a group's collectives, or of one of its channels'."""

    identity: int
    entered_place: int
    """Place in the ring that stores the rank's progress in this lane."""
    sequence: Iterator[int]
    peer: int = -1
    """Global rank at the other end of the channel."""


def _create_lane(group: dist.ProcessGroup, identity: int, recorder: Recorder, peer: int = -1) -> GroupLane:
    place = recorder.ring.take_place(identity)
    release = recorder.guard.protect("the end of a group", _release_lane, even_inactive=True)
    weakref.finalize(group, release, recorder, identity, place).atexit = False
    return GroupLane(identity, place, itertools.count(1), peer)


def _release_lane(recorder: Recorder, identity: int, place: int) -> None:
    recorder.ring.release_place(place)
    recorder.communicators.mark_destroyed(identity)


class CollectiveMonitor:
    """Hooks of all groups. Pending collectives are in `_pending` until their end is detected."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._ring = recorder.ring
        self._pending: dict[Work, _Entry] = {}
        """Pending collectives in the order of entry."""
        self._timed: deque[tuple[_Entry, Mark, Mark | None, Mark]] = deque()
        """Collectives without a `Work`, or that a stream waits for.

        Each has its entry, the mark from which the rank only waited for it (None: it did not), and its end.
        """
        self._noticed = 0
        """Time of the last check for ends."""
        self._without_future: set[int] = set()
        self._backward = -1
        """The backward pass at whose end a callback is registered."""
        self._groups: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
        self.stopped = False
        self.inactive = False
        """Whether the hooks of collectives do nothing, because one of this rank's hooks has failed."""
        self._backward_computed = recorder.guard.protect("a backward pass", self.backward_computed)
        self._backward_ended = recorder.guard.protect("a backward pass", self.backward_ended)
        recorder.notice_ends = self.notice_ends

    def monitor_group(self, group: dist.ProcessGroup) -> None:
        recorder, ring, pending = self.recorder, self._ring, self._pending
        group_reference = weakref.ref(group)  # the group refers to its hooks, which must not refer to the group
        lane: GroupLane | None = None
        channels: dict[tuple[int, int], GroupLane] = {}
        now, graph_task = time.monotonic_ns, torch_internals.graph_task
        entry: _Entry | None = None
        begin_mark: Mark | None = None
        """Mark at `entry`, if a stream may be about to wait for it at once."""

        def enter(call: Any) -> None:
            nonlocal entry, begin_mark, lane
            collective = identify_collective(call)
            if collective is None or recorder.clock.captures:  # checking works would break the capture
                entry = None
                return
            if lane is None:  # torch registers the ranks of a group after reporting it
                lane = register_group(group_reference(), recorder)
            identity, entered_place, sequence, peer = lane
            if collective >= POINT_TO_POINT:
                identity, entered_place, sequence, peer = self._find_channel_lane(
                    group_reference(), lane, channels, collective, call.root
                )
            number, start = next(sequence), now()
            if self._has_pending and start - self._noticed > END_NOTICE_RESOLUTION_NS:
                self._notice_ends(start, late=True)
            ring.enter_collective(collective, identity, number, start, entered_place)
            tensors = call.input_tensors or call.output_tensors
            nbytes = tensors[0].nbytes if len(tensors) == 1 else sum([tensor.nbytes for tensor in tensors])
            on_host = not tensors or tensors[0].is_cpu
            entry = (collective, identity, number, start, nbytes, recorder.step, recorder.phase, peer, on_host)
            begin_mark = None
            if call.async_op:
                backward = graph_task()
                if backward not in (-1, self._backward):
                    self._backward = backward
                    engine.queue_callback(self._backward_computed)
                if collective in SYMMETRIC_COLLECTIVE_NUMBERS:
                    recorder.entered(backward != -1)
            elif not on_host or not tensors:  # a barrier has none, on any device
                begin_mark = recorder.clock.mark()

        def issued(call: Any) -> None:
            nonlocal entry
            if entry is None:
                return
            issued_entry, entry = entry, None
            if (work := call.work) is not None:
                pending[work] = issued_entry
            elif begin_mark is not None:
                self._issued_at_once(issued_entry, begin_mark)
            elif not self._has_pending:
                ring.leave_collective()

        guard = recorder.guard
        hook_group(group, guard.protect("a collective", enter), guard.protect("a collective", issued))
        self._groups.add(group)

    def _issued_at_once(self, entry: _Entry, begin_mark: Mark) -> None:
        """Record a collective that a stream waits for from now on; `begin_mark`: mark from which it may wait."""
        end = self.recorder.clock.mark()
        is_counted = self.recorder.is_wait_counted
        self._timed.append((entry, begin_mark, begin_mark if is_counted else None, end))
        if is_counted:
            self.recorder.waited(begin_mark, end)

    def _find_channel_lane(
        self,
        group: dist.ProcessGroup | None,
        lane: GroupLane,
        channels: dict[tuple[int, int], GroupLane],
        collective: int,
        root: int,
    ) -> GroupLane:
        """Return the lane of a send or receive; `root`: the peer's rank in the group, -1: received from any."""
        channel = channels.get((collective, root))
        if channel is None:
            assert group is not None, "its hooks are called while it exists"
            ranks = torch_internals.get_group_ranks(group)
            if 0 <= root < len(ranks):
                peer, own_rank = ranks[root], ranks[group.rank()]
                ends = (own_rank, peer) if collective == _SEND else (peer, own_rank)
                identity = compute_channel_identity(lane.identity, *ends)
                self.recorder.communicators.add(identity, ends, extract_group_name(group.group_desc))
                channel = _create_lane(group, identity, self.recorder, peer)
            else:
                channel = GroupLane(lane.identity, NO_PLACE, itertools.count(1))
            channels[collective, root] = channel
        self._ring.state.peer = channel.peer
        return channel

    def begin_wait(self) -> tuple[int, Mark | None]:
        """Begin a call of `Work.wait`, and return what `end_wait` needs."""
        return time.monotonic_ns(), self.recorder.begin_wait()

    def end_wait(self, begun: tuple[int, Mark | None], work: Work, *_: Any) -> None:
        """End a call that has waited for `work`, or has made the current stream wait for it."""
        begin_ns, start = begun
        self.recorder.end_wait(start)
        entry = self._take(work)  # a reference to a device's work would keep its output's memory from reuse
        if entry is not None and entry[-1]:
            self._write_record(entry, time.monotonic_ns(), wait_start_ns=begin_ns)
        elif entry is not None:
            self._timed.append((entry, HostMark(entry[3]), start, self.recorder.clock.mark()))

    @contextmanager
    def time_broadcast(self) -> Iterator[None]:
        """Time a broadcast that C++ starts and waits for."""
        with self.recorder.time_peer_wait():
            yield
        self.notice_ends()

    def notice_ends(self) -> None:
        """Record ends after the training thread has waited for pending collectives, if it waits at all."""
        if self._has_pending:
            self._notice_ends(time.monotonic_ns(), late=False)

    def backward_computed(self) -> None:
        """Handle the end of gradient computation.

        DDP's own callback, which waits for the reduction, precedes the next one.
        """
        self.recorder.backward_computed()
        engine.queue_callback(self._backward_ended)

    def backward_ended(self) -> None:
        self._backward = -1
        self.notice_ends()
        self.recorder.reduced()

    def stop(self) -> None:
        """Stop monitoring: Python exits, and hooks must not outlive it, or this is a fork of the rank."""
        self.stopped = True
        for group in self._groups:
            exclude_group(group)

    def deactivate(self) -> None:
        """End all records of collectives, and hold no work any longer."""
        self.inactive = True
        self._timed.clear()
        self._forget_pending()

    def _forget_pending(self) -> None:
        self._pending.clear()

    def _notice_ends(self, now: int, late: bool) -> None:
        self._noticed = now
        pending = self._pending
        while pending:
            work, entry = next(iter(pending.items()))
            if not (work.is_completed() or (not late and self._is_nearly_done(work, entry))):
                break
            del pending[work]
            exact = entry[-1] and not late
            # A final wait of the rank was for the collective that it entered last.
            tail = self.recorder.tail_ns if exact and not pending else None
            self._write_record(entry, now, 0 if exact else NOTICED_LATE, tail)
        self._notice_timed()

    def _notice_timed(self) -> None:
        """Record the ends that marks determine."""
        timed = self._timed
        while timed and timed[0][1].reached and timed[0][3].reached:
            entry, begin_mark, wait_mark, end_mark = timed.popleft()
            start, end = begin_mark.ns, end_mark.ns
            self._write_record((*entry[:3], start, *entry[4:]), end, 0, None if wait_mark is None else wait_mark.ns)

    def _is_nearly_done(self, work: Work, entry: _Entry) -> bool:
        """Return whether gloo has completed the future that DDP waits on, which precedes the completion of its work."""
        collective, on_host = entry[0], entry[-1]
        if not on_host or collective in self._without_future:
            return False
        try:
            return work.get_future().done()
        except RuntimeError:
            self._without_future.add(collective)  # checked only once, because C++ exceptions are slow
            return False

    def _write_record(self, entry: _Entry, end: int, flags: int = 0, wait_start_ns: int | None = None) -> None:
        """Write a record.

        `wait_start_ns`: time (ns) from which the rank only waited for it; None: it continued its work.
        """
        collective, group, number, start, nbytes, step, phase, peer, _ = entry
        wait_seconds = 0.0 if wait_start_ns is None else (end - max(wait_start_ns, start)) * 1e-9
        self._ring.write(
            _COLLECTIVE_KIND, start, end, step, phase, wait_seconds, collective, group, number, nbytes, peer, flags
        )  # fmt: skip
        if not self._has_pending:
            self._ring.leave_collective()

    def _take(self, work: Work) -> _Entry | None:
        """Remove and return the entry that is pending with this work."""
        return self._pending.pop(work, None)

    @property
    def _has_pending(self) -> bool:
        """Whether a collective is pending, as far as detected."""
        return bool(self._pending or self._timed)
