"""The clock of a rank's work: the host's, or that of a device which does the work while the host has gone on.

On a GPU nearly every call returns before its work is done, so the time of a call says nothing of the work. What is
timed is therefore told by *marks* in the course of the work: on the host a mark is the present time, on a device an
event on the current stream, whose time is known once the device has come to it. A mark is asked for its time a step or
two later, without waiting for it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

MAX_ANCHOR_AGE_NS = 10_000_000
"""Times of a device are counted from a mark not longer ago than this: torch has them in milliseconds of 24 bits."""


class Mark(Protocol):
    """A point in the course of this rank's work."""

    @property
    def reached(self) -> bool:
        """Whether the work before it is done. Does not wait."""

    @property
    def ns(self) -> int:
        """When that was, in nanoseconds of CLOCK_MONOTONIC. Raises RuntimeError where it is not reached."""

    def wait(self) -> None:
        """Until it is reached."""


class PendingValue(Protocol):
    """A number on its way to the host."""

    @property
    def ready(self) -> bool:
        """Whether it is there. Does not wait."""

    def value(self) -> float:
        """Waits until it is there."""


class Clock(Protocol):
    """Of one rank."""

    def mark(self) -> Mark:
        """Here, in the course of the current stream of the calling thread."""

    def fetch(self, value: torch.Tensor) -> PendingValue:
        """Sends a tensor of one element to the host, without waiting for it."""

    @property
    def stream(self) -> object:
        """The current stream of the calling thread: equal to itself, and to no other."""

    @property
    def captures(self) -> bool:
        """Whether what the calling thread launches goes into a graph, to run some other time."""


class WorkSpans:
    """Stretches of the rank's work, each from one mark to another, and how long they are altogether."""

    # Of the class until there is one: most steps make two of these, and add nothing.
    _pending: deque[tuple[Mark, Mark]] | None = None
    _ns = 0

    def add(self, start: Mark, end: Mark) -> None:
        if self._pending is None:
            self._pending = deque()
        self._pending.append((start, end))

    @property
    def reached(self) -> bool:
        """Whether the work has come to the end of all of them."""
        coming = self._pending
        if coming is None:  # the usual case, at the end of every step
            return True
        while coming and coming[0][0].reached and coming[0][1].reached:
            start, end = coming.popleft()
            self._ns += end.ns - start.ns
        return not coming

    @property
    def ns(self) -> int:
        """Nanoseconds of those that the work has come to the end of."""
        _ = self.reached
        return self._ns


class HostMark:
    """The present time: reached at once."""

    __slots__ = ("ns",)
    reached = True

    def __init__(self, ns: int) -> None:
        self.ns = ns

    def wait(self) -> None: ...


class HostValue(NamedTuple):
    """There at once."""

    number: float

    @property
    def ready(self) -> bool:
        return True

    def value(self) -> float:
        return self.number


class HostClock:
    """Where a call returns when its work is done."""

    stream: object = None
    captures = False

    def __init__(self, now: Callable[[], int] | None = None) -> None:
        """now: nanoseconds; None: of CLOCK_MONOTONIC."""
        self.now = now or time.monotonic_ns

    def mark(self) -> Mark:
        return HostMark(self.now())

    def fetch(self, value: torch.Tensor) -> PendingValue:
        return HostValue(float(value.item()))


class DeviceEvent(Protocol):
    """As torch.cuda.Event, with timing."""

    def record(self, stream: Any) -> None:
        """Here, on a stream of its device; from now on it is this point."""

    def query(self) -> bool:
        """Whether the device has come to it."""

    def synchronize(self) -> None:
        """Waits until it has."""

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from this event to another one of its kind; below 0 where the other one came first."""


class Accelerator(Protocol):
    """What a `DeviceClock` needs of a device."""

    def event(self) -> DeviceEvent: ...

    def stream(self) -> object:
        """The current one of the calling thread."""

    @property
    def captures(self) -> bool:
        """Whether what is launched goes into a graph, to run some other time."""

    def to_host(self, value: torch.Tensor) -> torch.Tensor:
        """A tensor on the host that has `value` once the current stream has come here."""


class CudaDevice:
    """The current one of the thread that makes this. Other threads may have another one, which is none of ours."""

    def __init__(self) -> None:
        self._index = torch.cuda.current_device()

    def event(self) -> DeviceEvent:
        return torch.cuda.Event(enable_timing=True, blocking=True)  # who waits for it leaves the core to others

    def stream(self) -> object:
        return torch.cuda.current_stream(self._index)

    @property
    def captures(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def to_host(self, value: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(value, device="cpu", pin_memory=True).copy_(value, non_blocking=True)


class DeviceClock:
    """Where a call returns when its work is launched.

    A device tells how much time has passed between two events, not when that was. So times are counted from an
    *anchor*, an event whose time on the host is known: one that is waited for when the clock is made, and later ones
    that the count has come to. An event comes after it was recorded and before it is seen to be complete; where the
    count says otherwise, since the two clocks drift apart, it goes on from what is possible.
    """

    def __init__(self, device: Accelerator, now: Callable[[], int] | None = None) -> None:
        """now: nanoseconds on the host; None: of CLOCK_MONOTONIC. Waits until the device has done what it is at."""
        self.now = now or time.monotonic_ns
        self._device = device
        self._unused: list[DeviceEvent] = []
        self._anchor = device.event()
        self._anchor.record(device.stream())
        self._anchor.synchronize()
        self._anchor_ns = self.now()

    def mark(self) -> Mark:
        if self.captures:  # an event would become part of the graph, and asking for it would fail
            return HostMark(self.now())
        try:
            event = self._unused.pop()
        except IndexError:
            event = self._device.event()
        recorded = self.now()
        event.record(self._device.stream())
        return _DeviceMark(self, event, recorded)

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

    def read(self, event: DeviceEvent, recorded: int) -> int:
        """The time of an event that the device has come to. It may be recorded anew from now on."""
        seen = self.now()
        counted = self._anchor_ns + round(self._anchor.elapsed_time(event) * 1e6)
        ns = min(max(counted, recorded), seen)
        if ns != counted or ns > self._anchor_ns + MAX_ANCHOR_AGE_NS:
            self._unused.append(self._anchor)
            self._anchor, self._anchor_ns = event, ns
        else:
            self._unused.append(event)
        return ns


class _DeviceMark:
    __slots__ = ("_clock", "_event", "_ns")

    def __init__(self, clock: DeviceClock, event: DeviceEvent, recorded: int) -> None:
        self._clock = clock
        self._event: DeviceEvent | None = event
        self._ns = recorded
        """When it was recorded; once it is reached, when that was."""

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
            raise RuntimeError("the device has not come to this mark yet; ask when it is `reached`, or wait() for it")
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
    """That of the GPU that this process works on, once it does; until then the host's. It starts no GPU itself."""
    global _device_clock
    if not torch.cuda.is_initialized():
        return HostClock()
    if _device_clock is None:
        _device_clock = DeviceClock(CudaDevice())
    return _device_clock
