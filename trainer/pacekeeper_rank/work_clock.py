"""The clock of a rank's work: the host's, or that of a device that does the work asynchronously.

On a GPU nearly every call returns before its work is done, so the time of a call does not show the time of the work.
Work is therefore timed by *marks*. On the host a mark is the present time. On a device it is an event on the current
stream, whose time is known once the device has reached it. A mark's time is read a step or two later, without waiting.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

MAX_ANCHOR_AGE_NS = 10_000_000
"""Largest age of the mark from which a device's times are counted: torch has them in milliseconds of 24 bits."""


class Mark(Protocol):
    """A point in this rank's work."""

    @property
    def reached(self) -> bool:
        """Whether the work before it is done. Does not wait."""

    @property
    def ns(self) -> int:
        """Time at which it was reached, in ns of CLOCK_MONOTONIC. Raises RuntimeError before that."""

    def wait(self) -> None:
        """Wait until it is reached."""


class PendingValue(Protocol):
    """A number on its way to the host."""

    @property
    def ready(self) -> bool:
        """Whether it has arrived. Does not wait."""

    def value(self) -> float:
        """Wait for the number, and return it."""


class Clock(Protocol):
    """Clock of one rank's work."""

    def mark(self) -> Mark:
        """Return a mark at the present point of the calling thread's current stream."""

    def fetch(self, value: torch.Tensor) -> PendingValue:
        """Send a tensor of one element to the host, without waiting for it."""

    @property
    def stream(self) -> object:
        """The current stream of the calling thread: equal to itself, and to no other."""

    @property
    def captures(self) -> bool:
        """Whether the calling thread's work is captured in a graph, to run later."""


class WorkSpans:
    """Spans of the rank's work, each from one mark to another, and their total duration."""

    # Class attributes until a span is added: most steps create two of these, and add nothing.
    _pending: deque[tuple[Mark, Mark]] | None = None
    _ns = 0

    def add(self, start: Mark, end: Mark) -> None:
        if self._pending is None:
            self._pending = deque()
        self._pending.append((start, end))

    @property
    def reached(self) -> bool:
        """Whether the work has reached the end of all spans."""
        pending = self._pending
        if pending is None:  # the usual case at the end of a step
            return True
        while pending and pending[0][0].reached and pending[0][1].reached:
            start, end = pending.popleft()
            self._ns += end.ns - start.ns
        return not pending

    @property
    def ns(self) -> int:
        """Total nanoseconds of the spans whose end is reached."""
        _ = self.reached
        return self._ns


class HostMark:
    """The present time, reached at once."""

    __slots__ = ("ns",)
    reached = True

    def __init__(self, ns: int) -> None:
        self.ns = ns

    def wait(self) -> None: ...


class HostValue(NamedTuple):
    """A number that is available at once."""

    number: float

    @property
    def ready(self) -> bool:
        return True

    def value(self) -> float:
        return self.number


class HostClock:
    """Clock for work that is done when its call returns."""

    stream: object = None
    captures = False

    def __init__(self, now: Callable[[], int] | None = None) -> None:
        """Create the clock. `now` returns nanoseconds; None: of CLOCK_MONOTONIC."""
        self.now = now or time.monotonic_ns

    def mark(self) -> Mark:
        return HostMark(self.now())

    def fetch(self, value: torch.Tensor) -> PendingValue:
        return HostValue(float(value.item()))


class DeviceEvent(Protocol):
    """Interface of torch.cuda.Event, with timing."""

    def record(self, stream: Any) -> None:
        """Record the event here, on a stream of its device."""

    def query(self) -> bool:
        """Return whether the device has reached it."""

    def synchronize(self) -> None:
        """Wait until the device has reached it."""

    def elapsed_time(self, end_event: Any) -> float:
        """Return the milliseconds from this event to another one; below 0 if the other one came first."""


class Accelerator(Protocol):
    """Functions of a device that a `DeviceClock` needs."""

    def event(self) -> DeviceEvent: ...

    def stream(self) -> object:
        """Return the calling thread's current stream."""

    @property
    def captures(self) -> bool:
        """Whether launched work is captured in a graph, to run later."""

    def to_host(self, value: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the host that has `value` once the current stream has reached this point."""


class CudaDevice:
    """The current GPU of the thread that creates this. Other threads may use another one, which is ignored."""

    def __init__(self) -> None:
        self._index = torch.cuda.current_device()

    def event(self) -> DeviceEvent:
        return torch.cuda.Event(enable_timing=True, blocking=True)  # a waiting thread leaves the core to others

    def stream(self) -> object:
        return torch.cuda.current_stream(self._index)

    @property
    def captures(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def to_host(self, value: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(value, device="cpu", pin_memory=True).copy_(value, non_blocking=True)


class DeviceClock:
    """Clock for work that is launched when its call returns.

    A device reports the time between two events, not when they happened. Times are therefore counted from an *anchor*,
    an event whose time on the host is known: one that is waited for when the clock is created, and later ones that the
    count has reached. An event happens after it was recorded and before it is seen to be complete. If the count
    contradicts this, since the two clocks drift, it continues from the nearest possible time.
    """

    def __init__(self, device: Accelerator, now: Callable[[], int] | None = None) -> None:
        """Create the clock.

        `now` returns nanoseconds on the host; None: of CLOCK_MONOTONIC. Waits for the device's work.
        """
        self.now = now or time.monotonic_ns
        self._device = device
        self._unused: list[DeviceEvent] = []
        self._anchor = device.event()
        self._anchor.record(device.stream())
        self._anchor.synchronize()
        self._anchor_ns = self.now()

    def mark(self) -> Mark:
        if self.captures:  # an event would become part of the graph, and a query of it would fail
            return HostMark(self.now())
        try:
            event = self._unused.pop()
        except IndexError:
            event = self._device.event()
        recorded_ns = self.now()
        event.record(self._device.stream())
        return _DeviceMark(self, event, recorded_ns)

    def fetch(self, value: torch.Tensor) -> PendingValue:
        if value.is_cpu:
            return HostValue(float(value.item()))
        copy = self._device.to_host(value)
        return _DeviceValue(copy, self.mark())

    @property
    def stream(self) -> object:
        return self._device.stream()

    @property
    def captures(self) -> bool:
        return self._device.captures

    def read(self, event: DeviceEvent, recorded_ns: int) -> int:
        """Return the time of an event that the device has reached. The event may be reused from now on."""
        seen_ns = self.now()
        counted_ns = self._anchor_ns + round(self._anchor.elapsed_time(event) * 1e6)
        ns = min(max(counted_ns, recorded_ns), seen_ns)
        if ns != counted_ns or ns > self._anchor_ns + MAX_ANCHOR_AGE_NS:
            self._unused.append(self._anchor)
            self._anchor, self._anchor_ns = event, ns
        else:
            self._unused.append(event)
        return ns


class _DeviceMark:
    __slots__ = ("_clock", "_event", "_ns")

    def __init__(self, clock: DeviceClock, event: DeviceEvent, recorded_ns: int) -> None:
        self._clock = clock
        self._event: DeviceEvent | None = event
        self._ns = recorded_ns
        """When it was recorded; once it is reached, when that happened."""

    @property
    def reached(self) -> bool:
        event = self._event
        if event is not None:
            if not event.query():
                return False
            self._event, self._ns = None, self._clock.read(event, self._ns)
        return True

    @property
    def ns(self) -> int:
        if not self.reached:
            raise RuntimeError("the device has not reached this mark; check `reached`, or call wait()")
        return self._ns

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()


class _DeviceValue(NamedTuple):
    copy: torch.Tensor
    mark: Mark

    @property
    def ready(self) -> bool:
        return self.mark.reached

    def value(self) -> float:
        self.mark.wait()
        return float(self.copy.item())


_device_clock: DeviceClock | None = None


def get_work_clock() -> Clock:
    """Return the clock of the GPU that this process works on, or the host's until then. It initializes no GPU."""
    global _device_clock
    if not torch.cuda.is_initialized():
        return HostClock()
    if _device_clock is None:
        _device_clock = DeviceClock(CudaDevice())
    return _device_clock
