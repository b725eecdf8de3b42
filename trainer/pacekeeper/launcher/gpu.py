"""NVML's critical events (XID, double-bit ECC) as faults. Where there is no GPU or no NVML, there is nothing to see."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

log = logging.getLogger(__name__)

DOUBLE_BIT_ECC_XID = 48
"""The XID that goes with a double-bit ECC error, for events that come without a number."""


@dataclass(frozen=True)
class GpuEvent:
    """One critical event of one GPU."""

    gpu: str  # UUID
    xid: int
    text: str


class GpuEvents(Protocol):
    """Where GPU events come from."""

    def poll(self) -> Sequence[GpuEvent]:
        """Events since the last call; never waits."""


class NoGpus:
    """Sees nothing."""

    def poll(self) -> Sequence[GpuEvent]:
        return ()


class Nvml:
    """Events of all GPUs that this container was given. `nvml`: the module pynvml, already initialised."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._events = nvml.nvmlEventSetCreate()
        wanted = nvml.nvmlEventTypeXidCriticalError | nvml.nvmlEventTypeDoubleBitEccError
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            offered = nvml.nvmlDeviceGetSupportedEventTypes(handle)
            nvml.nvmlDeviceRegisterEvents(handle, wanted & offered, self._events)

    def poll(self) -> Sequence[GpuEvent]:
        found: list[GpuEvent] = []
        while True:
            try:
                event = self._nvml.nvmlEventSetWait_v2(self._events, 0)
            except self._nvml.NVMLError as error:
                if error.value != self._nvml.NVML_ERROR_TIMEOUT:
                    log.warning("NVML: %s", error)
                return found
            found.append(self._read(event))

    def _read(self, event: Any) -> GpuEvent:
        ecc = event.eventType == self._nvml.nvmlEventTypeDoubleBitEccError
        xid = DOUBLE_BIT_ECC_XID if ecc else int(event.eventData)
        gpu = self._nvml.nvmlDeviceGetUUID(event.device)
        return GpuEvent(gpu, xid, f"double-bit ECC error on {gpu}" if ecc else f"XID {xid} on {gpu}")


def open_gpus() -> GpuEvents:
    """NVML where it is there; else a stand-in that sees nothing."""
    try:
        import pynvml  # type: ignore[import-untyped]  # it has no types

        pynvml.nvmlInit()
    except ImportError:
        log.info("pynvml is not installed: GPU errors are left to the cluster's own exporter")
        return NoGpus()
    except pynvml.NVMLError as error:
        log.info("no GPUs are watched: %s", error)
        return NoGpus()
    try:
        return Nvml(pynvml)
    except pynvml.NVMLError as error:
        log.warning("NVML gives no events (%s): GPU errors are left to the cluster's own exporter", error)
        return NoGpus()
