"""GPUs by NVML: XIDs, double-bit ECC errors, GPUs that have fallen off the bus, and the health of those that have not.

NVML is asked in a thread of its own: a driver in trouble answers late, with errors, or never, and the launcher has to
go on. Where there is no GPU or no NVML, there is nothing to see.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pacekeeper_analysis.diagnose.gpu_health import ROW_REMAP_FAILED_XID, GPU_RATE_WINDOW_SECONDS, GpuSample, examine_gpu
from pacekeeper_analysis.reports import MAX_WORKER_GPUS, GpuHealth

from .gpu_sample import read_sample

DOUBLE_BIT_ECC_XID = 48
"""The XID that goes with a double-bit ECC error, for events that come without a number."""
FALLEN_OFF_BUS_XID = 79
"""The XID of a GPU that has fallen off the bus, which NVML may say as an error of any call instead."""
MAX_UNKNOWN_GPU_ERRORS = 3
"""A GPU whose calls end with "unknown error" so many times in a row is lost, too."""
MAX_NVML_THREADS = 4
"""One that never comes back from NVML cannot be ended: so many are given up, then GPUs are watched no more."""
NVML_RETRY_MESSAGE = "it is asked again, ever more seldom"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GpuEvent:
    """One critical event of one GPU."""

    gpu: str  # UUID; "number 3" where it was lost before its UUID was known
    xid: int
    text: str


class GpuMonitor(Protocol):
    """What is known of this worker's GPUs."""

    def poll(self, now: float) -> Sequence[GpuEvent]:
        """Events since the last call; never waits. `now`: seconds, monotonic."""

    @property
    def health(self) -> tuple[GpuHealth, ...]:
        """As it was seen last."""


class NoGpuMonitor:
    """Sees nothing."""

    def poll(self, now: float) -> Sequence[GpuEvent]:  # noqa: ARG002  # it sees nothing at any time
        return ()

    @property
    def health(self) -> tuple[GpuHealth, ...]:
        return ()


def open_gpu_monitor() -> GpuMonitor:
    """NVML where it is there; else a stand-in that sees nothing. Starts a thread: nothing is forked after that."""
    try:
        import pynvml  # type: ignore[import-untyped]  # it has no types
    except ImportError:
        log.info("pynvml is not installed: GPU errors are left to the cluster's own exporter")
        return NoGpuMonitor()
    return NvmlMonitor(pynvml)


@dataclass(frozen=True)
class NvmlTiming:
    """How often NVML is asked, and how long it is waited for (seconds)."""

    event_timeout: float = 1.0  # for the next event
    check_interval: float = 5.0  # between two looks at the health of all GPUs
    call_timeout: float = 30.0  # a call that takes longer does not come back
    reopen_pause: float = 5.0  # before NVML is opened again; doubles up to `longest_pause`
    longest_reopen_pause: float = 300.0


class NvmlMonitor:
    """The launcher's side of the thread that asks NVML. `nvml`: the module pynvml."""

    def __init__(self, nvml: Any, timing: NvmlTiming = NvmlTiming()) -> None:
        self._nvml, self._timing = nvml, timing
        self._events: queue.SimpleQueue[GpuEvent] = queue.SimpleQueue()
        self._inventory = GpuInventory()
        self._threads = 0
        self._warned: set[str] = set()
        self._start_thread()

    def poll(self, now: float) -> Sequence[GpuEvent]:
        asked_at = self._call_timer.entered_at
        if asked_at is not None and now - asked_at > self._timing.call_timeout * 2 ** (self._threads - 1):
            if self._threads < MAX_NVML_THREADS:
                self._warn_once(f"NVML has not answered for {self._timing.call_timeout:g} s: {NVML_RETRY_MESSAGE}")
                self._start_thread()
            else:
                self._warn_once("NVML does not answer: GPU errors are left to the cluster's own exporter from now on")
        found: list[GpuEvent] = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._events.get_nowait())
        return found

    @property
    def health(self) -> tuple[GpuHealth, ...]:
        return self._inventory.health

    def _start_thread(self) -> None:
        self._threads += 1
        self._call_timer = _NvmlCallTimer()
        threading.Thread(target=self._run_thread, args=(self._call_timer,), name="nvml", daemon=True).start()

    def _run_thread(self, asking: _NvmlCallTimer) -> None:
        """The thread: opens NVML and looks, again and again, until another thread has taken its place."""
        pause, opened = self._timing.reopen_pause, False
        while self._call_timer is asking:
            opened_at = time.monotonic()
            try:
                with asking:
                    self._nvml.nvmlInit()
                    opening = NvmlSession(self._nvml, self._inventory)
                if not opening.count and not opened:
                    log.info("there are no GPUs to be watched")
                    return
                opened = True
                self._poll_until_replaced(asking, opening)
            except self._nvml.NVMLError as error:
                absent = (self._nvml.NVML_ERROR_LIBRARY_NOT_FOUND, self._nvml.NVML_ERROR_DRIVER_NOT_LOADED)
                if not opened and error.value in absent:
                    log.info("no GPUs are watched: %s", error)
                    return
                self._warn_once(f"NVML: {error}: {NVML_RETRY_MESSAGE}")
            except Exception as error:  # whatever it is, the launcher's work is another
                self._warn_once(f"NVML: {error!r}: {NVML_RETRY_MESSAGE}")
            if self._call_timer is asking:
                with asking, contextlib.suppress(self._nvml.NVMLError):
                    self._nvml.nvmlShutdown()
                if time.monotonic() - opened_at > self._timing.longest_reopen_pause:
                    pause = self._timing.reopen_pause  # it went well for long
                time.sleep(pause)
                pause = min(2 * pause, self._timing.longest_reopen_pause)

    def _poll_until_replaced(self, asking: _NvmlCallTimer, opening: NvmlSession) -> None:
        """Hands on what is seen; raises NVMLError where events cannot be waited for any more."""
        check_at = 0.0
        self._queue_events(asking, opening.initial_losses)
        while self._call_timer is asking:
            if time.monotonic() >= check_at:
                check_at = time.monotonic() + self._timing.check_interval
                for gpu in opening.handles:  # each has its own time: a driver in trouble is slow with each call
                    self._queue_events(asking, opening.check_gpu(gpu))
            self._queue_events(asking, opening.wait_for_event(self._timing.event_timeout))

    def _queue_events(self, asking: _NvmlCallTimer, events: Iterable[GpuEvent]) -> None:
        with asking:
            for event in events:  # one by one: what was seen before an error counts
                self._events.put(event)

    def _warn_once(self, what: str) -> None:
        """Once: a driver in trouble is asked again and again."""
        if what not in self._warned:
            self._warned.add(what)
            log.warning("%s", what)


class _NvmlCallTimer:
    """Since when a thread has been inside of NVML (seconds, monotonic); None: it is outside."""

    entered_at: float | None = None

    def __enter__(self) -> None:
        self.entered_at = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self.entered_at = None


class GpuInventory:
    """Which GPUs there were, and which are lost: each loss is told once, in whichever call it shows."""

    def __init__(self) -> None:
        self.uuids_by_index: dict[int, str] = {}
        """UUIDs by index."""
        self.uuids_by_handle: dict[int | None, str] = {}
        """UUIDs by NVML's handle, since a lost GPU does not tell its own any more."""
        self._health: dict[str, GpuHealth] = {}
        """Of those that answer; replaced as a whole, since another thread reads it."""
        self._histories: dict[str, GpuHistory] = {}
        self._unknown_errors: Counter[str] = Counter()
        self._lost: set[str] = set()

    def record_sample(self, gpu: str, sample: GpuSample) -> Iterator[GpuEvent]:
        """What it shows now, and the event where it has broken since."""
        self._unknown_errors.pop(gpu, None)
        journal = self._histories.setdefault(gpu, GpuHistory(gpu))
        if journal.last is not None and sample.rows_failed and journal.last.rows_failed is False:
            xid = ROW_REMAP_FAILED_XID
            yield from self.report_once(GpuEvent(gpu, xid, f"memory rows of {gpu} could not be remapped (XID {xid})"))
        journal.add(sample)
        self._health = {**self._health, gpu: journal.assess_health()}

    @property
    def health(self) -> tuple[GpuHealth, ...]:
        return tuple(self._health.values())[:MAX_WORKER_GPUS]

    def record_failure(self, gpu: str, *, lost: bool) -> Iterator[GpuEvent]:
        """A call about the GPU has failed: NVML says that it is lost, or does not know why."""
        self._unknown_errors[gpu] += 1
        if lost or self._unknown_errors[gpu] >= MAX_UNKNOWN_GPU_ERRORS:
            yield from self.report_once(
                GpuEvent(gpu, FALLEN_OFF_BUS_XID, f"GPU {gpu} has fallen off the bus: it does not answer")
            )

    def report_once(self, event: GpuEvent) -> Iterator[GpuEvent]:
        """The event, where it is news."""
        if event.xid == FALLEN_OFF_BUS_XID:
            if event.gpu in self._lost:
                return
            self._lost.add(event.gpu)
            self._health = {gpu: health for gpu, health in self._health.items() if gpu != event.gpu}
        yield event


class GpuHistory:
    """The samples of one GPU."""

    def __init__(self, gpu: str) -> None:
        self.last: GpuSample | None = None
        self._gpu = gpu
        self._samples: deque[GpuSample] = deque()
        self._busy_first: GpuSample | None = None

    def add(self, sample: GpuSample) -> None:
        self.last = sample
        self._samples.append(sample)
        while sample.at - self._samples[0].at > GPU_RATE_WINDOW_SECONDS:
            self._samples.popleft()
        if self._busy_first is None and sample.is_busy:
            self._busy_first = sample

    def assess_health(self) -> GpuHealth:
        return examine_gpu(self._gpu, tuple(self._samples), self._busy_first)


class NvmlSession:
    """All GPUs of this container, as NVML has found them when it was opened. Any of its calls may never return."""

    def __init__(self, nvml: Any, census: GpuInventory) -> None:
        """Raises NVMLError where NVML has no events, or does not say how many GPUs there are."""
        self._nvml, self._inventory = nvml, census
        self._events = nvml.nvmlEventSetCreate()
        self._has_events = False
        self.handles: dict[str, Any] = {}
        """By UUID."""
        self.initial_losses: list[GpuEvent] = []
        """Losses that showed on the way."""
        self.count: int = nvml.nvmlDeviceGetCount()
        before = set(census.uuids_by_index.values())  # where one is gone, those behind it move up
        for index in range(self.count):
            self.initial_losses += self._register_gpu(index)
        if self.count < len(before):
            for gpu in before - self.handles.keys():
                self.initial_losses += census.record_failure(gpu, lost=True)

    def wait_for_event(self, seconds: float) -> Iterator[GpuEvent]:
        """The next event, if one comes in this time."""
        if not self._has_events:
            time.sleep(seconds)
            return
        try:
            event = self._nvml.nvmlEventSetWait_v2(self._events, int(1000 * seconds))
        except self._nvml.NVMLError as error:
            if error.value == self._nvml.NVML_ERROR_TIMEOUT:
                return
            for gpu in self.handles:
                yield from self.check_gpu(gpu)
            raise
        ecc = event.eventType == self._nvml.nvmlEventTypeDoubleBitEccError
        xid = DOUBLE_BIT_ECC_XID if ecc else int(event.eventData)
        gpu = self._inventory.uuids_by_handle.get(_read_handle_address(event.device), "unknown")
        what = "double-bit ECC error" if ecc else f"XID {xid}"
        yield from self._inventory.report_once(GpuEvent(gpu, xid, f"{what} on {gpu}"))

    def check_gpu(self, gpu: str) -> Iterator[GpuEvent]:
        """How the GPU is, and whether it still answers: a loss need not come as an event."""
        handle = self.handles[gpu]
        try:
            self._nvml.nvmlDeviceGetTemperature(handle, self._nvml.NVML_TEMPERATURE_GPU)
            sample = read_sample(self._nvml, handle, time.monotonic())
        except self._nvml.NVMLError as error:
            yield from self._record_failure(gpu, error)
        else:
            yield from self._inventory.record_sample(gpu, sample)

    def _register_gpu(self, index: int) -> Iterator[GpuEvent]:
        nvml = self._nvml
        wanted = nvml.nvmlEventTypeXidCriticalError | nvml.nvmlEventTypeDoubleBitEccError
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            gpu = self._inventory.uuids_by_index[index] = nvml.nvmlDeviceGetUUID(handle)
            self.handles[gpu] = handle
            self._inventory.uuids_by_handle[_read_handle_address(handle)] = gpu
            nvml.nvmlDeviceRegisterEvents(handle, wanted & nvml.nvmlDeviceGetSupportedEventTypes(handle), self._events)
            self._has_events = True
        except nvml.NVMLError as error:
            yield from self._record_failure(self._inventory.uuids_by_index.get(index, f"number {index}"), error)

    def _record_failure(self, gpu: str, error: Any) -> Iterator[GpuEvent]:
        """What a GPU merely does not offer is no sign against it."""
        lost = error.value == self._nvml.NVML_ERROR_GPU_IS_LOST
        if lost or error.value == self._nvml.NVML_ERROR_UNKNOWN:
            yield from self._inventory.record_failure(gpu, lost=lost)


def _read_handle_address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value
