"""Ring, recorder and monitor with the work of each step in C (native/recording.c).

Each is the Python class with a C class before it: attributes and methods that both have are those in C, which calls the
Python ones for rare cases. The same is recorded at half the cost (docs/benchmarks.md, overhead).

The import raises ImportError if the extension was not built, or does not match.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import BuiltinFunctionType

import torch.distributed as dist

from . import torch_internals
from .collectives.collective_hooks import COLLECTIVES_BY_CALL_NAME, hook_group
from .collectives.collective_monitor import (
    END_NOTICE_RESOLUTION_NS,
    POINT_TO_POINT,
    SYMMETRIC_COLLECTIVE_NUMBERS,
    CollectiveMonitor,
    GroupLane,
    register_group,
)
from .collectives.communicators import Communicators
from .native import recording
from .record_ring import RingWriter
from .recorder import Recorder, Recording, _ignore_wait, build_open_step
from .records import (
    NOTICED_LATE,
    RING_HEADER_BYTES,
    RING_RECORD_FIELDS,
    RING_STATE_FIELDS,
    Phase,
    RecordKind,
    compute_field_bytes,
    compute_offsets,
)
from .torch_internals import engine
from .work_clock import Clock, HostClock, HostMark, Mark

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
    """Raise ImportError if the layouts in C and Python differ."""
    offsets, formats = compute_offsets(RING_RECORD_FIELDS), dict(RING_STATE_FIELDS)
    record = {name: (offsets[name], compute_field_bytes(format_)) for name, format_ in RING_RECORD_FIELDS}
    state = {name: compute_field_bytes(formats[name]) for name in recording.STATE}
    for c_value, python_value in (
        (recording.NUMBERS, _SHARED_NUMBERS),
        (recording.RECORD, record),
        (recording.STATE, state),
    ):
        if c_value != python_value:
            raise ImportError(f"{recording.__name__} is of another version: reinstall the package")


_check_layouts()


class NativeRing(recording.Ring, RingWriter):
    """RingWriter with its writes in C."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        offsets = compute_offsets(RING_STATE_FIELDS)
        state_offsets = tuple(offsets[name] for name in recording.STATE)
        self.connect(self._map, RING_HEADER_BYTES, self._capacity, self._written, state_offsets)


class NativeRecorder(recording.Recorder, Recorder):
    """Recorder on a ring. With a device's clock, only the hooks of collectives are in C."""

    def __init__(
        self, ring: NativeRing, clock: Clock | None = None, communicators: Communicators | None = None
    ) -> None:
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
        self.recording = Recording.NATIVE

    def stop_measuring(self) -> None:
        super().stop_measuring()
        self.on_host = False  # Python goes on, from what C has measured of this step

    @property
    def last_end(self) -> Mark:
        return HostMark(self.start_ns) if self.on_host else super().last_end

    def _begin(self, mark: Mark | None = None) -> None:
        super()._begin(mark)
        self.on_host = False
        if isinstance(self.clock, HostClock) and self.recording is not Recording.STEPS_ONLY:
            self.go_on(self._step.start.ns, _select_python_clock(self.clock.now))


class NativeCollectiveMonitor(recording.Watcher, CollectiveMonitor):
    """CollectiveMonitor of a NativeRecorder."""

    def __init__(self, recorder: NativeRecorder) -> None:
        super().__init__(recorder)
        self.connect(recorder, self._timed, engine.queue_callback, COLLECTIVES_BY_CALL_NAME)
        self.report_failure = recorder.guard.disable

    def monitor_group(self, group: dist.ProcessGroup) -> None:
        group_reference = weakref.ref(group)  # the group refers to its hooks, which must not refer to the group
        lane: GroupLane | None = None
        channels: dict[tuple[int, int], GroupLane] = {}

        def introduced() -> GroupLane:
            nonlocal lane
            lane = register_group(group_reference(), self.recorder)
            return lane

        def channel(collective: int, root: int) -> GroupLane:
            assert lane is not None, "the group is introduced first"
            return self._find_channel_lane(group_reference(), lane, channels, collective, root)

        hooks = recording.Hooks()
        hooks.connect(self, introduced, channel)
        hook_group(group, hooks.enter, hooks.issued)
        self._groups.add(group)


def _select_python_clock(clock: Callable[[], int]) -> Callable[[], int] | None:
    """Return None for time.monotonic_ns itself, which C reads directly; tests use other clocks."""
    return None if isinstance(clock, BuiltinFunctionType) else clock
