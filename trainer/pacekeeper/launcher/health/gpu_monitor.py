"""GPU events from NVML: XIDs, double-bit ECC errors, and GPUs that have fallen off the bus; also the GPUs' health.

A separate thread calls NVML: a faulty driver answers late, with errors, or never, and the launcher must go on. Without
GPUs or NVML, there is nothing to monitor.
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

from pacekeeper_analysis.failures.gpu_health import (
    GPU_RATE_WINDOW_SECONDS,
    ROW_REMAP_FAILED_XID,
    GpuSample,
    examine_gpu,
)
from pacekeeper_analysis.protocol.reports import MAX_WORKER_GPUS, GpuHealth

from .gpu_sample import read_sample

DOUBLE_BIT_ECC_XID = 48
"""The XID of a double-bit ECC error, for events without a number."""
FALLEN_OFF_BUS_XID = 79
"""The XID of a GPU that has fallen off the bus. NVML may report it as an error of any call instead."""
MAX_UNKNOWN_GPU_ERRORS = 3
"""A GPU counts as lost after this many consecutive calls that fail with "unknown error"."""
MAX_NVML_THREADS = 4
"""A thread that never returns from NVML cannot be stopped. After this many such threads, GPUs are not monitored."""
NVML_RETRY_MESSAGE = "retrying with backoff"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GpuEvent:
    """One critical event of one GPU."""

    gpu: str  # UUID; "number 3" if it was lost before its UUID was known
    xid: int
    text: str


class GpuMonitor(Protocol):
    """The events and the health of this worker's GPUs."""

    def poll(self, now: float) -> Sequence[GpuEvent]:
        """Return the events since the last call, without waiting. `now`: seconds, monotonic."""

    @property
    def health(self) -> tuple[GpuHealth, ...]:
        """The health at the last check."""


class NoGpuMonitor:
    """A monitor without GPUs."""

    def poll(self, now: float) -> Sequence[GpuEvent]:  # noqa: ARG002  # there are no events at any time
        return ()

    @property
    def health(self) -> tuple[GpuHealth, ...]:
        return ()


def open_gpu_monitor() -> GpuMonitor:
    """Return an NVML monitor, or one without GPUs if pynvml is missing.

    It starts a thread: nothing may fork after it.
    """
    try:
        import pynvml  # type: ignore[import-untyped]  # it has no types
    except ImportError:
        log.info("pynvml is not installed: GPU errors are left to the cluster's own exporter")
        return NoGpuMonitor()
    return NvmlMonitor(pynvml)


@dataclass(frozen=True)
class NvmlTiming:
    """Intervals and timeouts of NVML calls, in seconds."""

    event_timeout: float = 1.0  # for the next event
    check_interval: float = 5.0  # between two checks of the health of all GPUs
    call_timeout: float = 30.0  # a call that takes longer counts as stuck
    reopen_pause: float = 5.0  # before NVML is opened again; doubles up to `longest_reopen_pause`
    longest_reopen_pause: float = 300.0


class NvmlMonitor:
    """The launcher's side of the thread that calls NVML. `nvml`: the module pynvml."""

    def __init__(self, nvml: Any, timing: NvmlTiming = NvmlTiming()) -> None:
        self._nvml, self._timing = nvml, timing
        self._events: queue.SimpleQueue[GpuEvent] = queue.SimpleQueue()
        self._inventory = GpuInventory()
        self._threads = 0
        self._warned: set[str] = set()
        self._start_thread()

    def poll(self, now: float) -> Sequence[GpuEvent]:
        entered_at = self._call_timer.entered_at
        if entered_at is not None and now - entered_at > self._timing.call_timeout * 2 ** (self._threads - 1):
            if self._threads < MAX_NVML_THREADS:
                self._warn_once(f"NVML has not answered for {self._timing.call_timeout:g} s: {NVML_RETRY_MESSAGE}")
                self._start_thread()
            else:
                self._warn_once("NVML does not answer: from now on GPU errors are left to the cluster's own exporter")
        events: list[GpuEvent] = []
        with contextlib.suppress(queue.Empty):
            while True:
                events.append(self._events.get_nowait())
        return events

    @property
    def health(self) -> tuple[GpuHealth, ...]:
        return self._inventory.health

    def _start_thread(self) -> None:
        self._threads += 1
        self._call_timer = _NvmlCallTimer()
        threading.Thread(target=self._run_thread, args=(self._call_timer,), name="nvml", daemon=True).start()

    def _run_thread(self, call_timer: _NvmlCallTimer) -> None:
        """Open NVML and poll it, repeatedly, until another thread replaces this one."""
        pause, opened = self._timing.reopen_pause, False
        while self._call_timer is call_timer:
            opened_at = time.monotonic()
            try:
                with call_timer:
                    self._nvml.nvmlInit()
                    session = NvmlSession(self._nvml, self._inventory)
                if not session.count and not opened:
                    log.info("there are no GPUs to monitor")
                    return
                opened = True
                self._poll_until_replaced(call_timer, session)
            except self._nvml.NVMLError as error:
                absent = (self._nvml.NVML_ERROR_LIBRARY_NOT_FOUND, self._nvml.NVML_ERROR_DRIVER_NOT_LOADED)
                if not opened and error.value in absent:
                    log.info("GPUs are not monitored: %s", error)
                    return
                self._warn_once(f"NVML: {error}: {NVML_RETRY_MESSAGE}")
            except Exception as error:  # no error of the monitor may stop the launcher
                self._warn_once(f"NVML: {error!r}: {NVML_RETRY_MESSAGE}")
            if self._call_timer is call_timer:
                with call_timer, contextlib.suppress(self._nvml.NVMLError):
                    self._nvml.nvmlShutdown()
                if time.monotonic() - opened_at > self._timing.longest_reopen_pause:
                    pause = self._timing.reopen_pause  # it worked for a long time
                time.sleep(pause)
                pause = min(2 * pause, self._timing.longest_reopen_pause)

    def _poll_until_replaced(self, call_timer: _NvmlCallTimer, session: NvmlSession) -> None:
        """Queue the events that are found. Raises NVMLError if waiting for events fails."""
        check_at = 0.0
        self._queue_events(call_timer, session.initial_losses)
        while self._call_timer is call_timer:
            if time.monotonic() >= check_at:
                check_at = time.monotonic() + self._timing.check_interval
                for gpu in session.handles:  # each is timed separately: a faulty driver is slow with each call
                    self._queue_events(call_timer, session.check_gpu(gpu))
            self._queue_events(call_timer, session.wait_for_event(self._timing.event_timeout))

    def _queue_events(self, call_timer: _NvmlCallTimer, events: Iterable[GpuEvent]) -> None:
        with call_timer:
            for event in events:  # one at a time: events from before an error count
                self._events.put(event)

    def _warn_once(self, message: str) -> None:
        """Log a message once: a faulty driver is polled repeatedly."""
        if message not in self._warned:
            self._warned.add(message)
            log.warning("%s", message)


class _NvmlCallTimer:
    """The time at which a thread entered an NVML call (seconds, monotonic); None: it is in none."""

    entered_at: float | None = None

    def __enter__(self) -> None:
        self.entered_at = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self.entered_at = None


class GpuInventory:
    """The known GPUs, and which of them are lost. Each loss is reported once, in whichever call it appears."""

    def __init__(self) -> None:
        self.uuids_by_index: dict[int, str] = {}
        """UUIDs by index."""
        self.uuids_by_handle: dict[int | None, str] = {}
        """UUIDs by NVML's handle: a lost GPU does not report its own UUID."""
        self._health: dict[str, GpuHealth] = {}
        """Health of the GPUs that answer. It is replaced as a whole, because another thread reads it."""
        self._histories: dict[str, GpuHistory] = {}
        self._unknown_errors: Counter[str] = Counter()
        self._lost: set[str] = set()

    def record_sample(self, gpu: str, sample: GpuSample) -> Iterator[GpuEvent]:
        """Update the health from a sample, and yield an event if row remapping has failed since the last one."""
        self._unknown_errors.pop(gpu, None)
        history = self._histories.setdefault(gpu, GpuHistory(gpu))
        if history.last is not None and sample.rows_failed and history.last.rows_failed is False:
            xid = ROW_REMAP_FAILED_XID
            yield from self.report_once(GpuEvent(gpu, xid, f"memory rows of {gpu} could not be remapped (XID {xid})"))
        history.add(sample)
        self._health = {**self._health, gpu: history.assess_health()}

    @property
    def health(self) -> tuple[GpuHealth, ...]:
        return tuple(self._health.values())[:MAX_WORKER_GPUS]

    def record_failure(self, gpu: str, *, lost: bool) -> Iterator[GpuEvent]:
        """Record a failed call. `lost`: NVML reports that the GPU is lost; otherwise the error is unknown."""
        self._unknown_errors[gpu] += 1
        if lost or self._unknown_errors[gpu] >= MAX_UNKNOWN_GPU_ERRORS:
            yield from self.report_once(
                GpuEvent(gpu, FALLEN_OFF_BUS_XID, f"GPU {gpu} has fallen off the bus: it does not answer")
            )

    def report_once(self, event: GpuEvent) -> Iterator[GpuEvent]:
        """Yield the event, unless it is a loss that has been reported."""
        if event.xid == FALLEN_OFF_BUS_XID:
            if event.gpu in self._lost:
                return
            self._lost.add(event.gpu)
            self._health = {gpu: health for gpu, health in self._health.items() if gpu != event.gpu}
        yield event


class GpuHistory:
    """The recent samples of one GPU."""

    def __init__(self, gpu: str) -> None:
        self.last: GpuSample | None = None
        self._gpu = gpu
        self._samples: deque[GpuSample] = deque()
        self._busy_first: GpuSample | None = None

    def add(self, sample: GpuSample) -> None:
        self.last = sample
        self._samples.append(sample)
        while sample.taken_at - self._samples[0].taken_at > GPU_RATE_WINDOW_SECONDS:
            self._samples.popleft()
        if self._busy_first is None and sample.is_busy:
            self._busy_first = sample

    def assess_health(self) -> GpuHealth:
        return examine_gpu(self._gpu, tuple(self._samples), self._busy_first)


class NvmlSession:
    """All GPUs of this container, as NVML listed them when it was opened. Any of its calls may never return."""

    def __init__(self, nvml: Any, inventory: GpuInventory) -> None:
        """Raises NVMLError if NVML does not support events, or does not report the number of GPUs."""
        self._nvml, self._inventory = nvml, inventory
        self._events = nvml.nvmlEventSetCreate()
        self._has_events = False
        self.handles: dict[str, Any] = {}
        """NVML handles by UUID."""
        self.initial_losses: list[GpuEvent] = []
        """Losses that were found while opening."""
        self.count: int = nvml.nvmlDeviceGetCount()
        known_uuids = set(inventory.uuids_by_index.values())  # if one is gone, those after it move up
        for index in range(self.count):
            self.initial_losses += self._register_gpu(index)
        if self.count < len(known_uuids):
            for gpu in known_uuids - self.handles.keys():
                self.initial_losses += inventory.record_failure(gpu, lost=True)

    def wait_for_event(self, seconds: float) -> Iterator[GpuEvent]:
        """Wait up to `seconds` for the next event and yield it. Raises NVMLError."""
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
        description = "double-bit ECC error" if ecc else f"XID {xid}"
        yield from self._inventory.report_once(GpuEvent(gpu, xid, f"{description} on {gpu}"))

    def check_gpu(self, gpu: str) -> Iterator[GpuEvent]:
        """Sample the GPU's health and check whether it answers: a loss need not arrive as an event."""
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
        event_types = nvml.nvmlEventTypeXidCriticalError | nvml.nvmlEventTypeDoubleBitEccError
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            gpu = self._inventory.uuids_by_index[index] = nvml.nvmlDeviceGetUUID(handle)
            self.handles[gpu] = handle
            self._inventory.uuids_by_handle[_read_handle_address(handle)] = gpu
            nvml.nvmlDeviceRegisterEvents(
                handle, event_types & nvml.nvmlDeviceGetSupportedEventTypes(handle), self._events
            )
            self._has_events = True
        except nvml.NVMLError as error:
            yield from self._record_failure(self._inventory.uuids_by_index.get(index, f"number {index}"), error)

    def _record_failure(self, gpu: str, error: Any) -> Iterator[GpuEvent]:
        """Record a failed call if it indicates a fault. An unsupported feature is no fault."""
        lost = error.value == self._nvml.NVML_ERROR_GPU_IS_LOST
        if lost or error.value == self._nvml.NVML_ERROR_UNKNOWN:
            yield from self._inventory.record_failure(gpu, lost=lost)


def _read_handle_address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value
