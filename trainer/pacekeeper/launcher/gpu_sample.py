"""One look at a GPU's health through NVML. What a GPU, a driver or an older pynvml does not offer is no sign."""

from __future__ import annotations

from typing import Any

from pacekeeper_analysis.diagnose.gpu_health import GpuSample

MAX_NVLINKS = 18
"""The most that a GPU has (NVML_NVLINK_MAX_LINKS)."""


def read_sample(nvml: Any, handle: Any, now: float) -> GpuSample:
    """`nvml`: the module pynvml; `now`: seconds, monotonic. Raises NVMLError where the GPU is lost."""
    asked = _NvmlQuery(nvml, handle)
    _, remapped, pending, failed = asked.call("nvmlDeviceGetRemappedRows") or (None, None, None, None)
    power = asked.call("nvmlDeviceGetPowerUsage")
    memory_temperature, replays, recoveries = asked.read_field_values(
        "NVML_FI_DEV_MEMORY_TEMP",
        "NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL",
        "NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL",
    )
    return GpuSample(
        at=now,
        uncorrected_errors=asked.call("nvmlDeviceGetTotalEccErrors", UNCORRECTED, VOLATILE),
        lifetime_errors=asked.call("nvmlDeviceGetTotalEccErrors", UNCORRECTED, AGGREGATE),
        remapped_rows=remapped,
        rows_pending=None if pending is None else bool(pending),
        rows_failed=None if failed is None else bool(failed),
        slowdown=asked.call("nvmlDeviceGetCurrentClocksEventReasons"),
        clock=asked.call("nvmlDeviceGetClockInfo", SM_CLOCK),
        clock_maximum=asked.call("nvmlDeviceGetMaxClockInfo", SM_CLOCK),
        temperature=asked.call("nvmlDeviceGetTemperature", GPU_SENSOR),
        memory_temperature=memory_temperature,
        power=None if power is None else power / 1000.0,
        state=asked.call("nvmlDeviceGetPerformanceState"),
        pcie_replays=asked.call("nvmlDeviceGetPcieReplayCounter"),
        pcie_width=asked.call("nvmlDeviceGetCurrPcieLinkWidth"),
        pcie_width_maximum=asked.call("nvmlDeviceGetMaxPcieLinkWidth"),
        pcie_generation=asked.call("nvmlDeviceGetCurrPcieLinkGeneration"),
        pcie_generation_maximum=asked.call("nvmlDeviceGetMaxPcieLinkGeneration"),
        nvlink_errors=None if replays is None and recoveries is None else (replays or 0) + (recoveries or 0),
        nvlinks=asked.count_nvlinks(),
    )


UNCORRECTED, VOLATILE, AGGREGATE, SM_CLOCK, GPU_SENSOR = 1, 0, 1, 1, 0
"""NVML's numbers of kinds and counters of memory errors, of clocks and of sensors."""
_INTEGER_VALUE_FIELDS = {1: "uiVal", 2: "ulVal", 3: "ullVal"}
"""NVML's types of values that are counters, and where pynvml holds them."""


class _NvmlQuery:
    """NVML, asked about one GPU; None where it has no answer."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle

    def call(self, name: str, *arguments: int | list[int]) -> Any:
        """Raises NVMLError where the GPU is lost."""
        call = getattr(self._nvml, name, None)
        if call is None:
            return None
        try:
            return call(self._handle, *arguments)
        except self._nvml.NVMLError as error:
            if error.value == self._nvml.NVML_ERROR_GPU_IS_LOST:
                raise
            return None

    def read_field_values(self, *names: str) -> list[int | None]:
        """Of NVML's "field values", in one call."""
        known = [(name, number) for name in names if (number := getattr(self._nvml, name, None)) is not None]
        values = self.call("nvmlDeviceGetFieldValues", [number for _, number in known]) if known else None
        found = {
            name: getattr(value.value, _INTEGER_VALUE_FIELDS[value.valueType])
            for (name, _), value in zip(known, values or (), strict=False)
            if value.nvmlReturn == self._nvml.NVML_SUCCESS and value.valueType in _INTEGER_VALUE_FIELDS
        }
        return [found.get(name) for name in names]

    def count_nvlinks(self) -> int | None:
        """That are active; None: it has none, or does not say."""
        states = []
        for link in range(MAX_NVLINKS):
            state = self.call("nvmlDeviceGetNvLinkState", link)
            if state is None:  # it has no further links
                break
            states.append(state)
        return sum(states) if states else None
