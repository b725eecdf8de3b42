"""One sample of a GPU's health from NVML. What a GPU, a driver, or an older pynvml does not support is no fault."""

from __future__ import annotations

from typing import Any

from pacekeeper_analysis.failures.gpu_health import GpuSample

MAX_NVLINKS = 18
"""The maximum of any GPU (NVML_NVLINK_MAX_LINKS)."""


def read_sample(nvml: Any, handle: Any, now: float) -> GpuSample:
    """Read a sample. `nvml`: the module pynvml; `now`: seconds, monotonic. Raises NVMLError if the GPU is lost."""
    query = _NvmlQuery(nvml, handle)
    _, remapped, pending, failed = query.call("nvmlDeviceGetRemappedRows") or (None, None, None, None)
    power = query.call("nvmlDeviceGetPowerUsage")
    memory_temperature, replays, recoveries = query.read_field_values(
        "NVML_FI_DEV_MEMORY_TEMP",
        "NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL",
        "NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL",
    )
    return GpuSample(
        taken_at=now,
        uncorrected_errors=query.call("nvmlDeviceGetTotalEccErrors", UNCORRECTED, VOLATILE),
        lifetime_errors=query.call("nvmlDeviceGetTotalEccErrors", UNCORRECTED, AGGREGATE),
        remapped_rows=remapped,
        rows_pending=None if pending is None else bool(pending),
        rows_failed=None if failed is None else bool(failed),
        slowdown=query.call("nvmlDeviceGetCurrentClocksEventReasons"),
        clock=query.call("nvmlDeviceGetClockInfo", SM_CLOCK),
        clock_maximum=query.call("nvmlDeviceGetMaxClockInfo", SM_CLOCK),
        temperature=query.call("nvmlDeviceGetTemperature", GPU_SENSOR),
        memory_temperature=memory_temperature,
        power=None if power is None else power / 1000.0,
        state=query.call("nvmlDeviceGetPerformanceState"),
        pcie_replays=query.call("nvmlDeviceGetPcieReplayCounter"),
        pcie_width=query.call("nvmlDeviceGetCurrPcieLinkWidth"),
        pcie_width_maximum=query.call("nvmlDeviceGetMaxPcieLinkWidth"),
        pcie_generation=query.call("nvmlDeviceGetCurrPcieLinkGeneration"),
        pcie_generation_maximum=query.call("nvmlDeviceGetMaxPcieLinkGeneration"),
        nvlink_errors=None if replays is None and recoveries is None else (replays or 0) + (recoveries or 0),
        nvlinks=query.count_nvlinks(),
    )


UNCORRECTED, VOLATILE, AGGREGATE, SM_CLOCK, GPU_SENSOR = 1, 0, 1, 1, 0
"""NVML's enum values of memory error types and counters, of clocks, and of sensors."""
_INTEGER_VALUE_FIELDS = {1: "uiVal", 2: "ulVal", 3: "ullVal"}
"""NVML's value types that are counters, and the pynvml field that holds each."""


class _NvmlQuery:
    """NVML calls for one GPU. They return None if NVML has no answer."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle

    def call(self, name: str, *arguments: int | list[int]) -> Any:
        """Call the function `name` of NVML. Raises NVMLError if the GPU is lost."""
        function = getattr(self._nvml, name, None)
        if function is None:
            return None
        try:
            return function(self._handle, *arguments)
        except self._nvml.NVMLError as error:
            if error.value == self._nvml.NVML_ERROR_GPU_IS_LOST:
                raise
            return None

    def read_field_values(self, *names: str) -> list[int | None]:
        """Read several of NVML's "field values" in one call."""
        supported = [(name, number) for name in names if (number := getattr(self._nvml, name, None)) is not None]
        values = self.call("nvmlDeviceGetFieldValues", [number for _, number in supported]) if supported else None
        counters = {
            name: getattr(value.value, _INTEGER_VALUE_FIELDS[value.valueType])
            for (name, _), value in zip(supported, values or (), strict=False)
            if value.nvmlReturn == self._nvml.NVML_SUCCESS and value.valueType in _INTEGER_VALUE_FIELDS
        }
        return [counters.get(name) for name in names]

    def count_nvlinks(self) -> int | None:
        """Count the active NVLinks; None: the GPU has none, or does not report them."""
        states = []
        for link in range(MAX_NVLINKS):
            state = self.call("nvmlDeviceGetNvLinkState", link)
            if state is None:  # there are no further links
                break
            states.append(state)
        return sum(states) if states else None
