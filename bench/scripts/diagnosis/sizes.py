"""How much the workers send: of a profile, and of a connection."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .faults import list_faults
from .record import Recording, get_recording_path

WINDOW_SECONDS = 5.0
"""One of a connection's windows; an answer has three of them."""


@dataclass(frozen=True)
class Sizes:
    pattern_bytes: float  # the largest window of a rank
    connection_bytes: float  # a second of one end, in the mean


def measure_sizes(places: int) -> Sizes:
    pattern_bytes, link_bytes, seconds = 0, 0, 0.0
    for recording in _iterate_recordings(places):
        pattern_bytes = max(
            pattern_bytes, *(len(json.loads(data)["pattern"] and data) for data in recording.patterns.values()), 0
        )
        link_windows = [link for report in recording.reports for link in report.get("evidence", {}).get("links", ())]
        link_bytes += sum(map(_count_bytes, link_windows))
        seconds += sum(link["seconds"] for link in link_windows)
    return Sizes(pattern_bytes, link_bytes / max(seconds, 1.0))


def _count_bytes(value: Any) -> int:
    return len(json.dumps(value, separators=(",", ":")))


def _iterate_recordings(places: int) -> Iterator[Recording]:
    for fault in list_faults():
        if not fault.hangs:
            yield from (Recording.load_from(get_recording_path(fault.name, place)) for place in range(places))
