"""NodeHistory: the Incidents of a node."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from pacekeeper_analysis.errors import InputError

from .codec import Converters, from_json, to_patch
from .formats import format_time, parse_time

MAX_NODE_INCIDENTS = 64
"""Entries of a NodeHistory. The newest are kept."""


class NodeIncidentKind(StrEnum):
    """The kinds of Incidents that a NodeHistory counts."""

    LOST = "Lost"
    HUNG = "Hung"
    SLOW = "Slow"
    GPU_ERROR = "GpuError"


@dataclass(frozen=True)
class NodeIncident:
    """An Incident of some job that the history of its node keeps."""

    namespace: str
    name: str
    kind: NodeIncidentKind
    at: float  # when it was detected, seconds since the epoch
    resolved_by_move: bool | None = None  # None: its worker was not moved, or the result is not known


@dataclass(frozen=True)
class NodeIncidentCount:
    """The number of Incidents of one kind on a node. Times are seconds since the epoch."""

    kind: NodeIncidentKind
    count: int
    first_at: float
    last_at: float


@dataclass(frozen=True)
class NodeHistoryStatus:
    """The status of a NodeHistory. `incidents` has the newest first; `counts` has the same by kind, for people."""

    incidents: tuple[NodeIncident, ...] = ()
    counts: tuple[NodeIncidentCount, ...] = ()

    @classmethod
    def from_incidents(cls, incidents: tuple[NodeIncident, ...]) -> Self:
        """Build the status with the counts of `incidents`."""
        times = {kind: [incident.at for incident in incidents if incident.kind is kind] for kind in NodeIncidentKind}
        counts = (
            NodeIncidentCount(kind, len(kind_times), min(kind_times), max(kind_times))
            for kind, kind_times in times.items()
            if kind_times
        )
        return cls(incidents, tuple(counts))

    @classmethod
    def parse(cls, status: Mapping[str, Any]) -> Self:
        """Parse a NodeHistory's status.

        Raises InputError that names the field.
        """
        return from_json(cls, status, "status", _HISTORY_TIME_PARSERS)

    def to_patch(self) -> dict[str, Any]:
        return to_patch(self, _HISTORY_TIME_FORMATTERS)


@dataclass(frozen=True)
class NodeHistory:
    """The Incidents that the operator remembers of a node. It is named after its node, which owns it."""

    node: str
    node_uid: str
    incidents: tuple[NodeIncident, ...] = ()  # the newest first
    uid: str = ""

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Self:
        """Parse a whole NodeHistory object.

        This never raises: an entry that cannot be read (another version may have written it) is left out, and the
        others count.
        """
        metadata, spec, status = body["metadata"], body.get("spec") or {}, body.get("status") or {}
        stored = status.get("incidents")
        incidents = tuple(_parse_node_incidents(stored if isinstance(stored, list) else ()))
        return cls(metadata["name"], str(spec.get("nodeUID", "")), incidents, metadata.get("uid", ""))


def _parse_node_incidents(items: Iterable[Any]) -> Iterator[NodeIncident]:
    for item in items:
        with suppress(InputError):
            yield from_json(
                NodeIncident, item if isinstance(item, Mapping) else {}, "status.incidents", _HISTORY_TIME_PARSERS
            )


_HISTORY_TIME_PARSERS: Converters = dict.fromkeys(("at", "first_at", "last_at"), parse_time)
_HISTORY_TIME_FORMATTERS: Converters = dict.fromkeys(("at", "first_at", "last_at"), format_time)
