"""How much the workers tell: of a behaviour window, and of a connection."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .faults import catalogue
from .record import Recording, path_of

WINDOW_SECONDS = 5.0
"""One of a connection's windows; three of them are told in an answer that is asked for once."""


@dataclass(frozen=True)
class Sizes:
    pattern_bytes: float  # the largest window of a rank
    connection_bytes: float  # a second of one end, in the mean


def sizes(places: int) -> Sizes:
    patterns, links, seconds = 0, 0, 0.0
    for recording in _recordings(places):
        patterns = max(
            patterns, *(len(json.loads(data)["pattern"] and data) for data in recording.patterns.values()), 0
        )
        told = [link for words in recording.told for link in words.get("evidence", {}).get("links", ())]
        links += sum(map(_size, told))
        seconds += sum(link["seconds"] for link in told)
    return Sizes(patterns, links / max(seconds, 1.0))


def _size(value: Any) -> int:
    return len(json.dumps(value, separators=(",", ":")))


def _recordings(places: int) -> Iterator[Recording]:
    for fault in catalogue():
        if not fault.hangs:
            yield from (Recording.load_from(path_of(fault.name, place)) for place in range(places))
