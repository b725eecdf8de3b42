"""Ring, recorder and watcher with what is repeated in each step done in C (native/recording.c).

Each is the Python class with one of C before it: attributes and methods that both have are those in C, which calls the
Python ones for whatever is seldom. The same is recorded, at half the cost (docs/benchmarks.md, overhead).

Importing this raises ImportError where it was not built, or does not fit.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import BuiltinFunctionType

import numpy as np
import torch.distributed as dist

from pacekeeper import torch_internals
from pacekeeper.native import recording
from pacekeeper.torch_internals import engine
from pacekeeper_analysis.records import RING_HEADER_BYTES, NOTICED_LATE, RING_RECORD, RING_STATE, RecordKind, Phase

from .clock import Clock, HostClock, HostMark, Mark
from .collectives import POINT_TO_POINT, END_NOTICE_RESOLUTION_NS, SYMMETRIC_COLLECTIVE_NUMBERS, GroupLane, CollectiveMonitor, register_group
from .communicators import Communicators
from .hooks import COLLECTIVES_BY_CALL_NAME, hook_group
from .recorder import Recorder, _ignore_wait, build_open_step
from .ring import RingWriter

_SHARED_NUMBERS = {
    "STEP": RecordKind.STEP,
    "COMPUTE": RecordKind.COMPUTE,
    "COLLECTIVE": RecordKind.COLLECTIVE,
    "DATA": RecordKind.DATA,
    "START": Phase.START,
    "PREPARE": Phase.DATA,
    "LOAD": Phase.LOAD,
    "NOTICED_LATE": NOTICED_LATE,
    "POINT_TO_POINT": POINT_TO_POINT,
    "SYMMETRIC": sum(1 << collective for collective in SYMMETRIC_COLLECTIVE_NUMBERS),
    "END_NOTICE_RESOLUTION_NS": END_NOTICE_RESOLUTION_NS,
}


def _check_layouts() -> None:
    """Raises ImportError where C and Python do not mean the same."""
    record = {name: (offset, RING_RECORD[name].itemsize) for name, offset in _read_offsets(RING_RECORD).items()}
    state = {name: RING_STATE[name].itemsize for name in recording.STATE}
    for of_c, of_python in (
        (recording.NUMBERS, _SHARED_NUMBERS),
        (recording.RECORD, record),
        (recording.STATE, state),
    ):
        if of_c != of_python:
            raise ImportError(f"{recording.__name__} is of another version: install the package anew")


def _read_offsets(structure: np.dtype[np.void]) -> dict[str, int]:
    """Where each field of it lies (bytes)."""
    assert structure.fields is not None
    return {name: field[1] for name, field in structure.fields.items()}


_check_layouts()


class NativeRing(recording.Ring, RingWriter):
    """As RingWriter."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        offsets = _read_offsets(RING_STATE)
        places = tuple(offsets[name] for name in recording.STATE)
        self.connect(self._map, RING_HEADER_BYTES, self._capacity, self._written, places)


class NativeRecorder(recording.Recorder, Recorder):
    """As Recorder, on a ring. By a device's clock all but the collectives' hooks is Python's."""

    def __init__(self, ring: NativeRing, clock: Clock | None = None, communicators: Communicators | None = None) -> None:
        self.connect(
            ring,
            Recorder,
            HostMark,
            build_open_step,
            _ignore_wait,
            torch_internals.graph_task,
            Phase.LOAD,
            _select_python_clock(time.monotonic_ns),
        )
        super().__init__(ring, clock, communicators)

    @property
    def last_end(self) -> Mark:
        return HostMark(self.start_ns) if self.on_host else super().last_end

    def _begin(self, mark: Mark | None = None) -> None:
        super()._begin(mark)
        self.on_host = False
        if isinstance(self.clock, HostClock):
            self.go_on(self._step.start.ns, _select_python_clock(self.clock.now))


class NativeCollectiveMonitor(recording.Watcher, CollectiveMonitor):
    """As Watcher, of a NativeRecorder."""

    def __init__(self, recorder: NativeRecorder) -> None:
        super().__init__(recorder)
        self.connect(recorder, self._timed, engine.queue_callback, COLLECTIVES_BY_CALL_NAME)

    def monitor_group(self, group: dist.ProcessGroup) -> None:
        itself = weakref.ref(group)  # the group keeps its hooks, which must not keep the group
        place: GroupLane | None = None
        channels: dict[tuple[int, int], GroupLane] = {}

        def introduced() -> GroupLane:
            nonlocal place
            place = register_group(itself(), self.recorder)
            return place

        def channel(collective: int, root: int) -> GroupLane:
            assert place is not None, "the group is introduced first"
            return self._find_channel_lane(itself(), place, channels, collective, root)

        hooks = recording.Hooks()
        hooks.connect(self, introduced, channel)
        hook_group(group, hooks.enter, hooks.issued)
        self._groups.add(group)


def _select_python_clock(clock: Callable[[], int]) -> Callable[[], int] | None:
    """None where it is time.monotonic_ns itself, which C reads by itself: tests have clocks of their own."""
    return None if isinstance(clock, BuiltinFunctionType) else clock
