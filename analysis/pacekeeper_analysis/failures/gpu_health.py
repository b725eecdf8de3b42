"""Interprets a GPU's errors, counters and clocks: the origin of an XID, and signs that precede a fault.

Two tables hold the policy: XIDS and GPU_SIGN_MEANINGS. NVIDIA's catalog is "XID Errors"
(docs.nvidia.com/deploy/xid-errors). The limits of rates are those of DCGM's health watches. The window of ten minutes
for rates, and the count of throttled minutes, follow gpud's published policy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

from ..protocol.reports import GpuHealth
from .finding import FaultClass

GPU_RATE_WINDOW_SECONDS = 600.0
"""Window over which rates are computed."""
GPU_RATE_WINDOW_MINUTES = int(GPU_RATE_WINDOW_SECONDS / 60.0)
MAX_PCIE_REPLAYS_PER_MINUTE = 8.0
"""PCIe replays below which a link is healthy (DCGM's health watch)."""
MAX_NVLINK_ERRORS_PER_MINUTE = 1.0
"""Replays and recoveries of NVLink below which links are healthy."""
MAX_THROTTLED_MINUTES_SHARE = 0.6
"""Share of the minutes with throttled clocks from which on it is a defect (gpud)."""
MIN_CLOCK_RATIO = 0.8
"""Share of the clock of busy GPUs of the same model. A GPU below it is slow."""
MAX_COUNTER_VALUE = 2**53
"""Upper limit of a counter. A larger value is not a count."""
MIN_BLANK_VALUE = 2**30
"""A value of DCGM or NVML from here on is not a measurement.

"Not available" is 4294967295. In DCGM it is 0x7ffffff0 and more for integers, and 2**47 for others. The limit is half
of the smallest of them, so a counter's apparent rise to such a value is also rejected. No GPU counts a billion errors.
"""
PCIE_BELOW_MAXIMUM_SECONDS = 60.0
"""Time for which a PCIe link must be below its maximum under load."""
HARDWARE_SLOWDOWN_BITS = 0x8 | 0x40 | 0x80
"""NVML's reasons for reduced clocks that software did not request: slowdown, heat, power brake.

A power cap in software is the usual state of a GPU that trains.
"""
BUSY_PERFORMANCE_STATE = 0
"""The performance state of a GPU that computes.

In other states its PCIe link saves power, so its speed proves nothing.
"""


class XidOrigin(StrEnum):
    """The origin of an XID."""

    HARDWARE = "hardware"
    CONTAINED = "contained"  # a hardware fault that affected only one process, which must be restarted
    LINK = "link"  # a fault of an NVLink, which has two ends, so it is no witness against its node
    APPLICATION = "application"  # possibly; on a single node it may still be the hardware
    UNKNOWN = "unknown"  # not in the catalog, or the catalog is older than the driver


@dataclass(frozen=True)
class Xid:
    """A number of NVIDIA's catalog of XID errors."""

    description: str
    origin: XidOrigin


XIDS: Mapping[int, Xid] = {
    11: Xid("invalid command stream", XidOrigin.APPLICATION),
    13: Xid("graphics engine exception", XidOrigin.APPLICATION),
    31: Xid("memory page fault", XidOrigin.APPLICATION),
    32: Xid("invalid command stream", XidOrigin.APPLICATION),
    43: Xid("the GPU stopped a process", XidOrigin.APPLICATION),
    45: Xid("a process was ended early", XidOrigin.APPLICATION),
    46: Xid("GPU stopped processing", XidOrigin.HARDWARE),
    48: Xid("double-bit memory error", XidOrigin.HARDWARE),
    62: Xid("internal micro-controller halt", XidOrigin.HARDWARE),
    63: Xid("row remapping or page retirement", XidOrigin.HARDWARE),
    64: Xid("row remapping or page retirement failed", XidOrigin.HARDWARE),
    68: Xid("video processor exception", XidOrigin.APPLICATION),
    69: Xid("graphics engine class error", XidOrigin.APPLICATION),
    74: Xid("NVLink error", XidOrigin.HARDWARE),
    79: Xid("GPU has fallen off the bus", XidOrigin.HARDWARE),
    92: Xid("high rate of single-bit memory errors", XidOrigin.HARDWARE),
    94: Xid("contained memory error", XidOrigin.CONTAINED),
    95: Xid("uncontained memory error", XidOrigin.HARDWARE),
    119: Xid("GSP firmware does not answer", XidOrigin.HARDWARE),
    120: Xid("GSP firmware error", XidOrigin.HARDWARE),
    136: Xid("link training failed", XidOrigin.HARDWARE),
    137: Xid("illegal access to a peer's memory", XidOrigin.APPLICATION),
    140: Xid("unrecovered memory error", XidOrigin.HARDWARE),
    143: Xid("GPU initialization failed", XidOrigin.HARDWARE),
    144: Xid("NVLink error: SAW", XidOrigin.LINK),
    145: Xid("NVLink error: RLW", XidOrigin.LINK),
    146: Xid("NVLink error: TLW", XidOrigin.LINK),
    147: Xid("NVLink error: TREX", XidOrigin.LINK),
    148: Xid("NVLink error: NVLPW_CTRL", XidOrigin.LINK),
    149: Xid("NVLink error: NETIR", XidOrigin.LINK),
    150: Xid("NVLink error: MSE", XidOrigin.LINK),
    154: Xid("GPU needs a recovery action", XidOrigin.HARDWARE),
    # Links that are taken down on purpose report it, too.
    155: Xid("NVLink software event", XidOrigin.UNKNOWN),
    156: Xid("part of the GPU retired, needs a reset", XidOrigin.HARDWARE),
    157: Xid("part of the GPU could not be retired", XidOrigin.UNKNOWN),
    158: Xid("fatal timeout of the GPU", XidOrigin.HARDWARE),
}
ROW_REMAP_FAILED_XID = 64


def classify_xid(xid: int) -> XidOrigin:
    """Return the origin of an XID. Unknown numbers are not blamed: newer drivers have newer numbers."""
    return XIDS[xid].origin if xid in XIDS else XidOrigin.UNKNOWN


def describe_xid(xid: int) -> str:
    return f"XID {xid} ({XIDS[xid].description})" if xid in XIDS else f"XID {xid}"


class GpuSign(StrEnum):
    """A sign of a problem that has not stopped the GPU so far. Reports contain these strings."""

    ROWS_PENDING = "RowsPending"
    ROWS_FAILED = "RowsFailed"
    MEMORY_ERRORS = "MemoryErrors"
    PCIE_REPLAYS = "PcieReplays"
    NVLINK_ERRORS = "NvlinkErrors"
    NVLINK_DOWN = "NvlinkDown"
    THROTTLED = "Throttled"
    SLOW_CLOCK = "SlowClock"
    PCIE_FELL = "PcieFell"
    PCIE_LOW = "PcieLow"


@dataclass(frozen=True)
class GpuSignMeaning:
    """The meaning of a sign.

    With `warns`, a fault is likely to follow. Otherwise the sign only supports a diagnosis of slowness. `fault` is the
    class of the slowness.
    """

    description: str
    is_warning: bool
    fault: FaultClass = FaultClass.HARDWARE


GPU_SIGN_MEANINGS: Mapping[GpuSign, GpuSignMeaning] = {
    # NVIDIA's "GPU Memory Error Management": a row with an uncorrectable error is remapped only at the next reset.
    GpuSign.ROWS_PENDING: GpuSignMeaning("memory rows wait for a reset of the GPU to be remapped", is_warning=True),
    # The same document: no spare rows are left, so the GPU must be replaced.
    GpuSign.ROWS_FAILED: GpuSignMeaning("memory rows cannot be remapped any more", is_warning=True),
    GpuSign.MEMORY_ERRORS: GpuSignMeaning("uncorrectable memory errors are counted", is_warning=True),
    # DCGM's health watch "PCIe": 8 replays a minute.
    GpuSign.PCIE_REPLAYS: GpuSignMeaning("its PCIe link repeats packets", is_warning=True),
    # DCGM's health watch "NVLink": replays and recoveries; CRC errors alone are usual at low rates.
    GpuSign.NVLINK_ERRORS: GpuSignMeaning("its NVLinks repeat packets or recover", is_warning=True),
    GpuSign.NVLINK_DOWN: GpuSignMeaning("fewer of its NVLinks are active than before", is_warning=True),
    GpuSign.THROTTLED: GpuSignMeaning("the hardware slows its clocks down for heat or power", is_warning=False),
    GpuSign.SLOW_CLOCK: GpuSignMeaning("its clock is below that of its peers under load", is_warning=False),
    GpuSign.PCIE_FELL: GpuSignMeaning("its PCIe link has become narrower or slower", is_warning=False),
    GpuSign.PCIE_LOW: GpuSignMeaning(
        "its PCIe link has been below its maximum from the start", is_warning=False, fault=FaultClass.CONFIGURATION
    ),
}


@dataclass(frozen=True)
class GpuSample:
    """The values of a GPU that NVML returned at one time. None means not supported, or no answer."""

    taken_at: float  # seconds, monotonic
    uncorrected_errors: int | None = None  # since the driver was loaded
    lifetime_errors: int | None = None  # uncorrected ones, over the GPU's life
    remapped_rows: int | None = None  # for uncorrectable errors
    rows_pending: bool | None = None
    rows_failed: bool | None = None
    slowdown: int | None = None  # NVML's bitmask of reasons for reduced clocks
    clock: int | None = None  # of the SMs, MHz
    clock_maximum: int | None = None
    temperature: int | None = None  # °C
    memory_temperature: int | None = None  # °C
    power: float | None = None  # W
    state: int | None = None  # performance state, 0 is the fastest
    pcie_replays: int | None = None
    pcie_width: int | None = None  # lanes
    pcie_width_maximum: int | None = None  # of GPU and slot together
    pcie_generation: int | None = None
    pcie_generation_maximum: int | None = None
    nvlink_errors: int | None = None  # replays and recoveries of all links
    nvlinks: int | None = None  # active ones

    @property
    def is_busy(self) -> bool:
        return self.state == BUSY_PERFORMANCE_STATE

    @property
    def is_slowed_down(self) -> bool:
        return bool((self.slowdown or 0) & HARDWARE_SLOWDOWN_BITS)

    @property
    def pcie_is_low(self) -> bool:
        """Whether the PCIe link is below the maximum of GPU and slot."""
        return _is_below(self.pcie_width, self.pcie_width_maximum) or _is_below(
            self.pcie_generation, self.pcie_generation_maximum
        )


def examine_gpu(gpu: str, samples: Sequence[GpuSample], busy_first: GpuSample | None) -> GpuHealth:
    """Return the health report of a GPU.

    `samples` are those of the last GPU_RATE_WINDOW_SECONDS, oldest first, at least one. `busy_first` is the first
    sample under load, however old. None if the GPU has not been under load so far.
    """
    last = samples[-1]
    replays = compute_counter_rise([sample.pcie_replays for sample in samples])
    link_errors = compute_counter_rise([sample.nvlink_errors for sample in samples])
    errors = compute_counter_rise([sample.uncorrected_errors for sample in samples])
    throttled = len(
        {
            min(int((last.taken_at - reading.taken_at) // 60.0), GPU_RATE_WINDOW_MINUTES - 1)
            for reading in samples
            if reading.is_slowed_down
        }
    )
    sign_states = {
        GpuSign.ROWS_PENDING: bool(last.rows_pending),
        GpuSign.ROWS_FAILED: bool(last.rows_failed),
        GpuSign.MEMORY_ERRORS: errors > 0,
        GpuSign.PCIE_REPLAYS: replays >= MAX_PCIE_REPLAYS_PER_MINUTE * GPU_RATE_WINDOW_MINUTES,
        GpuSign.NVLINK_ERRORS: link_errors >= MAX_NVLINK_ERRORS_PER_MINUTE * GPU_RATE_WINDOW_MINUTES,
        GpuSign.NVLINK_DOWN: _has_lost_links(samples),
        GpuSign.THROTTLED: throttled >= MAX_THROTTLED_MINUTES_SHARE * GPU_RATE_WINDOW_MINUTES,
        GpuSign.PCIE_FELL: _is_pcie_steadily_low(samples) and not (busy_first is not None and busy_first.pcie_is_low),
        GpuSign.PCIE_LOW: _is_pcie_steadily_low(samples) and busy_first is not None and busy_first.pcie_is_low,
    }
    return GpuHealth(
        gpu=gpu,
        signs=tuple(str(sign) for sign, is_shown in sign_states.items() if is_shown),
        memory_errors=errors,
        lifetime_errors=min(last.lifetime_errors or 0, MAX_COUNTER_VALUE),
        remapped_rows=last.remapped_rows or 0,
        pcie_replays=replays,
        pcie_width=last.pcie_width or None,
        pcie_generation=last.pcie_generation or None,
        nvlink_errors=link_errors,
        throttled_minutes=throttled,
        clock_share=_compute_clock_share(samples),
        temperature=max(last.temperature or 0, last.memory_temperature or 0, 0) or None,
        power=max(last.power or 0.0, 0.0) or None,
    )


def compute_counter_rise(values: Sequence[int | None]) -> int:
    """Return how far a counter has risen above its first value.

    A fall is a reset or a driver error, so neither the fall nor the return to the old value counts. Missing values, and
    values that mean "not available", are skipped.
    """
    valid = [value for value in values if value is not None and value < MIN_BLANK_VALUE]
    return min(max(valid) - valid[0], MAX_COUNTER_VALUE) if valid else 0


@dataclass(frozen=True)
class ObservedGpuSign:
    """A sign that one GPU shows, with a text for people."""

    sign: GpuSign
    message: str

    @property
    def meaning(self) -> GpuSignMeaning:
        return GPU_SIGN_MEANINGS[self.sign]


def describe_gpu_sign(sign: GpuSign, gpu: str, value: str = "") -> ObservedGpuSign:
    """Describe a sign. `value` is the measurement as text, or ""."""
    return ObservedGpuSign(sign, f"{gpu}: {GPU_SIGN_MEANINGS[sign].description}" + (f" ({value})" if value else ""))


def list_gpu_signs(gpus: Collection[GpuHealth]) -> Iterator[ObservedGpuSign]:
    """Yield the signs in a worker's report of its GPUs. Unknown signs of a newer launcher are skipped."""
    for health in gpus:
        for name in health.signs:
            if name in _KNOWN_GPU_SIGNS:
                sign = GpuSign(name)
                yield describe_gpu_sign(
                    sign, health.gpu, _SIGN_MEASUREMENTS[sign](health) if sign in _SIGN_MEASUREMENTS else ""
                )


def _describe_throttling(gpu: GpuHealth) -> str:
    parts = [f"in {gpu.throttled_minutes} of the last {GPU_RATE_WINDOW_MINUTES} minutes"]
    if gpu.clock_share is not None:
        parts.append(f"{gpu.clock_share:.0%} of its clock")
    if gpu.temperature is not None:
        parts.append(f"{gpu.temperature} °C")
    if gpu.power is not None:
        parts.append(f"{gpu.power:.0f} W")
    return ", ".join(parts)


def _describe_pcie(gpu: GpuHealth) -> str:
    lanes = None if gpu.pcie_width is None else f"{gpu.pcie_width} lanes"
    generation = None if gpu.pcie_generation is None else f"generation {gpu.pcie_generation}"
    return " of ".join(filter(None, (lanes, generation)))


_KNOWN_GPU_SIGNS = frozenset(GpuSign)
_SIGN_MEASUREMENTS: Mapping[GpuSign, Callable[[GpuHealth], str]] = {
    GpuSign.MEMORY_ERRORS: lambda gpu: f"{gpu.memory_errors} in ten minutes, {gpu.lifetime_errors} in its life",
    GpuSign.PCIE_REPLAYS: lambda gpu: f"{gpu.pcie_replays} in ten minutes",
    GpuSign.NVLINK_ERRORS: lambda gpu: f"{gpu.nvlink_errors} in ten minutes",
    GpuSign.THROTTLED: _describe_throttling,
    GpuSign.PCIE_FELL: _describe_pcie,
    GpuSign.PCIE_LOW: _describe_pcie,
}


def _is_below(value: int | None, maximum: int | None) -> bool:
    return value is not None and maximum is not None and 0 < value < maximum


def _is_pcie_steadily_low(samples: Sequence[GpuSample]) -> bool:
    """Return whether the PCIe link was low in all recent samples under load, and these cover enough time."""
    busy = [
        sample
        for sample in samples
        if sample.is_busy and samples[-1].taken_at - sample.taken_at <= PCIE_BELOW_MAXIMUM_SECONDS
    ]
    return (
        bool(busy)
        and busy[-1].taken_at - busy[0].taken_at >= PCIE_BELOW_MAXIMUM_SECONDS / 2
        and all(reading.pcie_is_low for reading in busy)
    )


def _has_lost_links(samples: Sequence[GpuSample]) -> bool:
    link_counts = [sample.nvlinks for sample in samples if sample.nvlinks is not None]
    return bool(link_counts) and link_counts[-1] < max(link_counts)


def _compute_clock_share(samples: Sequence[GpuSample]) -> float | None:
    """Return the share of the highest clock under load in the last minute. None if not known."""
    shares = [
        sample.clock / sample.clock_maximum
        for sample in samples
        if sample.is_busy
        and sample.clock
        and sample.clock_maximum
        and samples[-1].taken_at - sample.taken_at <= PCIE_BELOW_MAXIMUM_SECONDS
    ]
    return min(median(shares), 1.0) if shares else None
