"""The double of NVML, for machines without a GPU: pynvml loads it in NVML's place, and a test scripts its faults."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "nvml_double.c"
GPUS, EVENTS = 8, 64

ECC, XID = 2, 8
"""Types of events: nvmlEventTypeDoubleBitEccError and nvmlEventTypeXidCriticalError."""
NOT_SUPPORTED, LIBRARY_RM_MISMATCH, DRIVER_NOT_LOADED, FUNCTION_NOT_FOUND, GPU_IS_LOST, UNKNOWN = 3, 18, 9, 13, 15, 999
"""NVML's errors."""


class Gpu(ctypes.Structure):
    """struct gpu of nvml_double.c."""

    _fields_ = [
        ("uuid", ctypes.c_char * 96),
        ("event_types", ctypes.c_uint64),
        ("registered", ctypes.c_uint64),
        ("error", ctypes.c_uint32),
        ("health_error", ctypes.c_uint32),
        *((name, ctypes.c_uint64) for name in ("uncorrected_errors", "lifetime_errors", "slowdown")),
        *((name, ctypes.c_uint64) for name in ("nvlink_replays", "nvlink_recoveries")),
        *((name, ctypes.c_uint32) for name in ("remapped_rows", "rows_pending", "rows_failed")),
        *((name, ctypes.c_uint32) for name in ("clock", "clock_maximum", "temperature", "memory_temperature")),
        *((name, ctypes.c_uint32) for name in ("power", "state", "pcie_replays")),
        *((name, ctypes.c_uint32) for name in ("pcie_width", "pcie_width_maximum")),
        *((name, ctypes.c_uint32) for name in ("pcie_generation", "pcie_generation_maximum")),
        *((name, ctypes.c_uint32) for name in ("nvlinks", "nvlinks_active")),
    ]


class Event(ctypes.Structure):
    """struct event of nvml_double.c."""

    _fields_ = [
        ("gpu", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("type", ctypes.c_uint64),
        ("data", ctypes.c_uint64),
    ]


class State(ctypes.Structure):
    """struct state of nvml_double.c."""

    _fields_ = [
        ("count", ctypes.c_uint32),
        ("init_error", ctypes.c_uint32),
        ("wait_error", ctypes.c_uint32),
        ("blocked", ctypes.c_uint32),
        ("calls", ctypes.c_uint32),
        ("openings", ctypes.c_uint32),
        ("written", ctypes.c_uint32),
        ("read", ctypes.c_uint32),
        ("events", Event * EVENTS),
        ("gpus", Gpu * GPUS),
    ]


class NvmlDouble:
    """One double with GPUs `GPU-0`, `GPU-1`, …; `state` may be changed while it is in use."""

    def __init__(self, folder: Path, gpus: int) -> None:
        self._folder = folder
        path = folder / "nvml-state"
        path.write_bytes(bytes(ctypes.sizeof(State)))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self.state = State.from_buffer(self._map)
        self.state.count = gpus
        for index in range(GPUS):
            gpu = self.state.gpus[index]
            gpu.uuid, gpu.event_types = f"GPU-{index}".encode(), ECC | XID
            gpu.temperature, gpu.memory_temperature, gpu.power = 40, 50, 300_000
            gpu.clock, gpu.clock_maximum = 1800, 2000
            gpu.pcie_width = gpu.pcie_width_maximum = 16
            gpu.pcie_generation = gpu.pcie_generation_maximum = 5
            gpu.nvlinks = gpu.nvlinks_active = 18

    @property
    def environment(self) -> dict[str, str]:
        """For a process that shall load the double."""
        return {**os.environ, "LD_LIBRARY_PATH": str(self._folder), "NVML_DOUBLE": str(self._folder / "nvml-state")}

    def send_event(self, gpu: int, kind: int, data: int) -> None:
        """An event comes."""
        event = self.state.events[self.state.written % EVENTS]
        event.gpu, event.type, event.data = gpu, kind, data
        self.state.written += 1


def build_nvml_double(folder: Path) -> Path:
    """Compiles the double as `folder`/libnvidia-ml.so.1."""
    library = folder / "libnvidia-ml.so.1"
    options = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", f"-Wl,-soname,{library.name}"]
    subprocess.run(["cc", *options, "-o", str(library), str(SOURCE)], check=True, timeout=60)
    return library
