"""What happened in a run, as a person would tell it; and its digest, by which two runs are compared."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    at: float  # virtual seconds
    who: str
    words: str

    def __str__(self) -> str:
        return f"{self.at:9.3f}  {self.who:<22} {self.words}"


class Story:
    """`now`: virtual seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.lines: list[Line] = []
        self._now = now
        self._digest = hashlib.sha256()

    def tell(self, who: str, *words: object) -> None:
        """For people."""
        line = Line(round(self._now(), 6), who, " ".join(map(str, words)))
        self.lines.append(line)
        self.note(line.who, line.words)

    def note(self, *facts: object) -> None:
        """Only for the digest: what is too small to be told, and has to be the same in each run of a seed."""
        self._digest.update(f"{self._now():.6f} {facts!r}\n".encode())

    def digest(self) -> str:
        """16 hexadecimal digits of all that was told and noted so far."""
        return self._digest.copy().hexdigest()[:16]
