"""The log of a run, and its digest, by which two runs are compared."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class LogLine:
    time: float  # virtual seconds
    source: str
    message: str

    def __str__(self) -> str:
        return f"{self.time:9.3f}  {self.source:<22} {self.message}"


class RunLog:
    """The log of a run. `now`: returns the virtual time in seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.lines: list[LogLine] = []
        self._now = now
        self._digest = hashlib.sha256()

    def record(self, source: str, *parts: object) -> None:
        """Add a line to the log, and to the digest."""
        line = LogLine(round(self._now(), 6), source, " ".join(map(str, parts)))
        self.lines.append(line)
        self.record_for_digest(line.source, line.message)

    def record_for_digest(self, *facts: object) -> None:
        """Add facts to the digest only: details that must be the same in each run of a seed."""
        self._digest.update(f"{self._now():.6f} {facts!r}\n".encode())

    def digest(self) -> str:
        """Return 16 hexadecimal digits that depend on all lines and facts so far."""
        return self._digest.copy().hexdigest()[:16]
