"""NodeProbe: what the last probe of a node measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Self

from pacekeeper_analysis.protocol.decoding import MaxLength, Within

from .codec import Converters, from_json, to_json
from .formats import format_time, parse_time, round_for_json


class InconclusiveReason(StrEnum):
    """The reason why a probe gave no result about its node."""

    SLOW = "Slow"  # compared with other nodes; to be confirmed, as it may be due to short load of pods on the node
    IMAGE = "Image"  # it cannot be pulled, which may be due to the registry or the installation
    NOT_RUN = "NotRun"  # the pod could not be created, had no room on the node, or was deleted
    SUPERSEDED = "Superseded"  # another witness confirmed in the meantime
    SHARED_FAILURE = "SharedFailure"  # a probe pod on another node failed the same check: the installation is at fault
    NO_COMPARISON = "NoComparison"  # no probe pod on another node has passed the check that failed


_Seconds = Annotated[float, Within(0.0, 1e6)]
_Rate = Annotated[float, Within(0.0, 1e15)]
_Share = Annotated[float, Within(0.0, 1.0)]


@dataclass(frozen=True)
class ProbeLink:
    """The path from one probe pod to another, as the first one measured it."""

    peer: Annotated[str, MaxLength(253)]  # the name of its node
    up: _Rate  # bytes a second
    down: _Rate
    ping: _Seconds  # round trip, median


@dataclass(frozen=True)
class ProbeMetrics:
    """What a probe pod measured of its node. `decide.nodes.probe_measurements` decides whether that is slow."""

    core_seconds: _Seconds  # CPU time of a fixed piece of work, median over the cores
    slowest_core_seconds: _Seconds = 0.0
    cores: Annotated[int, Within(0, 4096)] = 0  # number of cores that were timed
    held_back: _Share = 0.0  # of the time that the work could not run, other work on the node excluded
    idle_cores: Annotated[float, Within(0.0, 1e5)] = 0.0  # during the measurement
    throttled: _Share = 0.0  # share of the time that a CPU quota throttled the pod
    pressure: _Share | None = None  # share of the last ten seconds that a task on the node waited for a core
    frequency: Annotated[float, Within(0.0, 10.0)] | None = None  # of the first core, relative to its highest
    memory_bytes_per_second: _Rate = 0.0
    links: Annotated[tuple[ProbeLink, ...], MaxLength(8)] = ()

    def to_json(self) -> dict[str, Any]:
        return to_json(self, PROBE_METRIC_FORMATTERS)


PROBE_TIMES = ("started", "finished")
"""Fields of a probe's result that are times."""


@dataclass(frozen=True)
class ProbeResult:
    """The result of one probe of a node by a pod that was pinned to it."""

    pod: str
    started: float
    finished: float | None = None
    passed: bool | None = None  # None: it still runs, or has given no result about the node
    message: str = ""
    inconclusive: InconclusiveReason | None = None
    metrics: ProbeMetrics | None = None


@dataclass(frozen=True)
class NodeProbe:
    """The result of the last preflight probe of a node. It is named after its node, which owns it."""

    node_uid: str
    at: float  # seconds since the epoch
    passed: bool | None = None  # None: inconclusive
    message: str = ""
    metrics: ProbeMetrics | None = None
    gpus_skipped: bool = False  # its free GPUs were not probed

    @classmethod
    def parse(cls, spec: Mapping[str, Any]) -> Self:
        """Raises InputError that names the field."""
        return from_json(cls, spec, "spec", {"at": parse_time})

    def to_json(self) -> dict[str, Any]:
        return to_json(self, {"at": format_time, **PROBE_METRIC_FORMATTERS})


PROBE_METRIC_FORMATTERS: Converters = {
    **dict.fromkeys(("core_seconds", "slowest_core_seconds", "ping"), lambda seconds: round(seconds, 7)),
    **dict.fromkeys(("held_back", "idle_cores", "throttled", "pressure", "frequency"), round_for_json),
    **dict.fromkeys(("memory_bytes_per_second", "up", "down"), round),
}
