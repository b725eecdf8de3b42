"""What happened in a run, as a person would tell it; and its digest, by which two runs are compared."""

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
    """`now`: virtual seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.lines: list[LogLine] = []
        self._now = now
        self._digest = hashlib.sha256()

    def record(self, source: str, *words: object) -> None:
        """For people."""
        line = LogLine(round(self._now(), 6), source, " ".join(map(str, words)))
        self.lines.append(line)
        self.record_for_digest(line.source, line.message)

    def record_for_digest(self, *facts: object) -> None:
        """Only for the digest: what is too small to be told, and has to be the same in each run of a seed."""
        self._digest.update(f"{self._now():.6f} {facts!r}\n".encode())

    def digest(self) -> str:
        """16 hexadecimal digits of all that was told and noted so far."""
        return self._digest.copy().hexdigest()[:16]
