"""What a GPU's errors, counters and clocks say: whose fault an XID is, and which signs come before a fault.

Two tables hold the policy: XIDS and SIGNS. NVIDIA's catalogue is "XID Errors" (docs.nvidia.com/deploy/xid-errors); its
limits of rates are those of DCGM's health watches. That rates are judged over ten minutes, and throttling by the
minutes that it touches, is gpud's published policy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

from ..reports import GpuHealth
from .finding import FaultClass

WINDOW_SECONDS = 600.0
"""Over which rates are judged."""
MINUTES = int(WINDOW_SECONDS / 60.0)
REPLAYS_A_MINUTE = 8.0
"""PCIe replays that a sound link stays below (DCGM's health watch)."""
NVLINK_ERRORS_A_MINUTE = 1.0
"""Replays and recoveries of NVLink that sound links stay below."""
THROTTLED_A_MINUTE = 0.6
"""Share of the minutes in which the hardware slowed its clocks down, from which on it is a defect (gpud)."""
SLOW_CLOCK = 0.8
"""Of the clock that busy GPUs of the same model have: one below is slow."""
MOST_COUNTED = 2**53
"""More is nothing that a counter has counted."""
BLANK = 2**30
"""From here on a figure of DCGM or NVML is none: "not available" is 4294967295, or DCGM's 0x7ffffff0 and more for whole
numbers and 2**47 for others. It is half the least of them, so that what a counter seems to have risen by to one is
none, either. No GPU counts a billion errors."""
STEADY_SECONDS = 60.0
"""For so long a PCIe link has to be below its maximum under load."""
HARDWARE_SLOWDOWN = 0x8 | 0x40 | 0x80
"""Of NVML's reasons for reduced clocks those that no software asked for: slowdown, heat, power brake. A power cap in
software is the usual state of a GPU that trains."""
BUSY_STATE = 0
"""The performance state of a GPU that computes. In others its PCIe link saves power, and says nothing."""


class Origin(StrEnum):
    """Whose fault an XID is."""

    HARDWARE = "hardware"
    CONTAINED = "contained"  # a fault of the hardware that cost one process only: it is to be started again
    LINK = "link"  # a fault of an NVLink, which has two ends: a witness against its node it is not
    APPLICATION = "application"  # may be: of one node it may be the hardware all the same
    UNKNOWN = "unknown"  # the catalogue does not say, or is older than the driver


@dataclass(frozen=True)
class Xid:
    """A number of NVIDIA's catalogue of XID errors."""

    words: str
    blame: Origin


XIDS: Mapping[int, Xid] = {
    11: Xid("invalid command stream", Origin.APPLICATION),
    13: Xid("graphics engine exception", Origin.APPLICATION),
    31: Xid("memory page fault", Origin.APPLICATION),
    32: Xid("invalid command stream", Origin.APPLICATION),
    43: Xid("the GPU stopped a process", Origin.APPLICATION),
    45: Xid("a process was ended early", Origin.APPLICATION),
    46: Xid("GPU stopped processing", Origin.HARDWARE),
    48: Xid("double-bit memory error", Origin.HARDWARE),
    62: Xid("internal micro-controller halt", Origin.HARDWARE),
    63: Xid("row remapping or page retirement", Origin.HARDWARE),
    64: Xid("row remapping or page retirement failed", Origin.HARDWARE),
    68: Xid("video processor exception", Origin.APPLICATION),
    69: Xid("graphics engine class error", Origin.APPLICATION),
    74: Xid("NVLink error", Origin.HARDWARE),
    79: Xid("GPU has fallen off the bus", Origin.HARDWARE),
    92: Xid("high rate of single-bit memory errors", Origin.HARDWARE),
    94: Xid("contained memory error", Origin.CONTAINED),
    95: Xid("uncontained memory error", Origin.HARDWARE),
    119: Xid("GSP firmware does not answer", Origin.HARDWARE),
    120: Xid("GSP firmware error", Origin.HARDWARE),
    136: Xid("link training failed", Origin.HARDWARE),
    137: Xid("illegal access to a peer's memory", Origin.APPLICATION),
    140: Xid("unrecovered memory error", Origin.HARDWARE),
    143: Xid("GPU initialisation failed", Origin.HARDWARE),
    144: Xid("NVLink error: SAW", Origin.LINK),
    145: Xid("NVLink error: RLW", Origin.LINK),
    146: Xid("NVLink error: TLW", Origin.LINK),
    147: Xid("NVLink error: TREX", Origin.LINK),
    148: Xid("NVLink error: NVLPW_CTRL", Origin.LINK),
    149: Xid("NVLink error: NETIR", Origin.LINK),
    150: Xid("NVLink error: MSE", Origin.LINK),
    154: Xid("GPU needs a recovery action", Origin.HARDWARE),
    # Links that are taken down on purpose tell it, too.
    155: Xid("NVLink event of the software", Origin.UNKNOWN),
    156: Xid("part of the GPU retired, which takes a reset", Origin.HARDWARE),
    157: Xid("part of the GPU could not be retired", Origin.UNKNOWN),
    158: Xid("fatal timeout of the GPU", Origin.HARDWARE),
}
ROW_REMAP_FAILED_XID = 64


def xid_blame(xid: int) -> Origin:
    """What the table does not hold is nobody's fault as far as is known: newer drivers have newer numbers."""
    return XIDS[xid].blame if xid in XIDS else Origin.UNKNOWN


def xid_words(xid: int) -> str:
    return f"XID {xid} ({XIDS[xid].words})" if xid in XIDS else f"XID {xid}"


class Sign(StrEnum):
    """Something about a GPU that has not stopped it so far. Reports hold these words."""

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
class Meaning:
    """What a sign means. `warns`: a fault is to be expected; otherwise it is a witness for slowness, and no more.
    `fault`: the kind of slowness that goes with it."""

    words: str
    warns: bool
    fault: FaultClass = FaultClass.HARDWARE


SIGNS: Mapping[Sign, Meaning] = {
    # NVIDIA's "GPU Memory Error Management": a row with an uncorrectable error is remapped by the next reset only.
    Sign.ROWS_PENDING: Meaning("memory rows wait for a reset of the GPU to be remapped", warns=True),
    # The same: no spare rows are left, the GPU is to be replaced.
    Sign.ROWS_FAILED: Meaning("memory rows cannot be remapped any more", warns=True),
    Sign.MEMORY_ERRORS: Meaning("uncorrectable memory errors are counted", warns=True),
    # DCGM's health watch "PCIe": 8 replays a minute.
    Sign.PCIE_REPLAYS: Meaning("its PCIe link repeats packets", warns=True),
    # DCGM's health watch "NVLink": replays and recoveries; CRC errors alone are usual at low rates.
    Sign.NVLINK_ERRORS: Meaning("its NVLinks repeat packets or recover", warns=True),
    Sign.NVLINK_DOWN: Meaning("fewer of its NVLinks are active than before", warns=True),
    Sign.THROTTLED: Meaning("the hardware slows its clocks down for heat or power", warns=False),
    Sign.SLOW_CLOCK: Meaning("its clock is below that of its peers under load", warns=False),
    Sign.PCIE_FELL: Meaning("its PCIe link has become narrower or slower", warns=False),
    Sign.PCIE_LOW: Meaning(
        "its PCIe link has been below its maximum from the start", warns=False, fault=FaultClass.CONFIGURATION
    ),
}


@dataclass(frozen=True)
class GpuSample:
    """What NVML said of a GPU at one moment; None: it does not offer that, or did not answer."""

    at: float  # seconds, monotonic
    uncorrected_errors: int | None = None  # since the driver was loaded
    lifetime_errors: int | None = None  # uncorrected ones, over the GPU's life
    remapped_rows: int | None = None  # for uncorrectable errors
    rows_pending: bool | None = None
    rows_failed: bool | None = None
    slowdown: int | None = None  # NVML's bits of reasons for reduced clocks
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
    def busy(self) -> bool:
        return self.state == BUSY_STATE

    @property
    def slowed_down(self) -> bool:
        return bool((self.slowdown or 0) & HARDWARE_SLOWDOWN)

    @property
    def pcie_is_low(self) -> bool:
        """Below what GPU and slot can do."""
        return _below(self.pcie_width, self.pcie_width_maximum) or _below(
            self.pcie_generation, self.pcie_generation_maximum
        )


def examine(gpu: str, samples: Sequence[GpuSample], busy_first: GpuSample | None) -> GpuHealth:
    """The report on a GPU.

    samples: of the last WINDOW_SECONDS, oldest first, at least one. busy_first: the first that was taken while it
    computed, however long ago; None: it has not computed so far.
    """
    last = samples[-1]
    replays = rise([sample.pcie_replays for sample in samples])
    links = rise([sample.nvlink_errors for sample in samples])
    errors = rise([sample.uncorrected_errors for sample in samples])
    throttled = len({min(int((last.at - each.at) // 60.0), MINUTES - 1) for each in samples if each.slowed_down})
    held = {
        Sign.ROWS_PENDING: bool(last.rows_pending),
        Sign.ROWS_FAILED: bool(last.rows_failed),
        Sign.MEMORY_ERRORS: errors > 0,
        Sign.PCIE_REPLAYS: replays >= REPLAYS_A_MINUTE * MINUTES,
        Sign.NVLINK_ERRORS: links >= NVLINK_ERRORS_A_MINUTE * MINUTES,
        Sign.NVLINK_DOWN: _has_lost_links(samples),
        Sign.THROTTLED: throttled >= THROTTLED_A_MINUTE * MINUTES,
        Sign.PCIE_FELL: _pcie_stays_low(samples) and not (busy_first is not None and busy_first.pcie_is_low),
        Sign.PCIE_LOW: _pcie_stays_low(samples) and busy_first is not None and busy_first.pcie_is_low,
    }
    return GpuHealth(
        gpu=gpu,
        signs=tuple(str(sign) for sign, is_so in held.items() if is_so),
        memory_errors=errors,
        lifetime_errors=min(last.lifetime_errors or 0, MOST_COUNTED),
        remapped_rows=last.remapped_rows or 0,
        pcie_replays=replays,
        pcie_width=last.pcie_width or 0,
        pcie_generation=last.pcie_generation or 0,
        nvlink_errors=links,
        throttled_minutes=throttled,
        clock_share=_clock_share(samples),
        temperature=max(last.temperature or 0, last.memory_temperature or 0, 0),
        power=max(last.power or 0.0, 0.0),
    )


def rise(values: Sequence[int | None]) -> int:
    """By how much a counter has risen beyond what it began with. A fall is a reset, or a slip of the driver's, so
    neither it nor the way back up says anything. Values that are missing, or mean that they are, are passed over."""
    known = [value for value in values if value is not None and value < BLANK]
    return min(max(known) - known[0], MOST_COUNTED) if known else 0


@dataclass(frozen=True)
class ShownSign:
    """A sign that one GPU shows, in words for people, too."""

    sign: Sign
    words: str

    @property
    def meaning(self) -> Meaning:
        return SIGNS[self.sign]


def shown(sign: Sign, gpu: str, figure: str = "") -> ShownSign:
    """`figure`: what was measured, in words; "": nothing to add."""
    return ShownSign(sign, f"{gpu}: {SIGNS[sign].words}" + (f" ({figure})" if figure else ""))


def signs_of(gpus: Collection[GpuHealth]) -> Iterator[ShownSign]:
    """What a worker's report says of its GPUs. Signs that a newer launcher knows, and this table does not, are
    passed over."""
    for health in gpus:
        for word in health.signs:
            if word in _KNOWN:
                sign = Sign(word)
                yield shown(sign, health.gpu, _FIGURES[sign](health) if sign in _FIGURES else "")


_KNOWN = frozenset(Sign)
_FIGURES: Mapping[Sign, Callable[[GpuHealth], str]] = {
    Sign.MEMORY_ERRORS: lambda gpu: f"{gpu.memory_errors} in ten minutes, {gpu.lifetime_errors} in its life",
    Sign.PCIE_REPLAYS: lambda gpu: f"{gpu.pcie_replays} in ten minutes",
    Sign.NVLINK_ERRORS: lambda gpu: f"{gpu.nvlink_errors} in ten minutes",
    Sign.THROTTLED: lambda gpu: (
        f"in {gpu.throttled_minutes} of the last {MINUTES} minutes, {gpu.clock_share:.0%} of its clock,"
        f" {gpu.temperature} °C, {gpu.power:.0f} W"
    ),
    Sign.PCIE_FELL: lambda gpu: f"{gpu.pcie_width} lanes of generation {gpu.pcie_generation}",
    Sign.PCIE_LOW: lambda gpu: f"{gpu.pcie_width} lanes of generation {gpu.pcie_generation}",
}


def _below(value: int | None, maximum: int | None) -> bool:
    return value is not None and maximum is not None and 0 < value < maximum


def _pcie_stays_low(samples: Sequence[GpuSample]) -> bool:
    """In all that was seen of it under load lately, which is long enough."""
    busy = [sample for sample in samples if sample.busy and samples[-1].at - sample.at <= STEADY_SECONDS]
    return bool(busy) and busy[-1].at - busy[0].at >= STEADY_SECONDS / 2 and all(each.pcie_is_low for each in busy)


def _has_lost_links(samples: Sequence[GpuSample]) -> bool:
    known = [sample.nvlinks for sample in samples if sample.nvlinks is not None]
    return bool(known) and known[-1] < max(known)


def _clock_share(samples: Sequence[GpuSample]) -> float:
    """Of its highest clock, under load in the last minute; 0: not known."""
    shares = [
        sample.clock / sample.clock_maximum
        for sample in samples
        if sample.busy and sample.clock and sample.clock_maximum and samples[-1].at - sample.at <= STEADY_SECONDS
    ]
    return min(median(shares), 1.0) if shares else 0.0
