"""What the sidecar knows of the launcher beside it: its newest heartbeat, and how long it has given no sign of life.

A launcher that is stopped, or stuck in the kernel, cannot say so itself.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

from pacekeeper.runtime import RuntimeFolder
from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.reading import parse_json
from pacekeeper_analysis.reports import Heartbeat

MAX_COUNTED_SILENCE_GAP_SECONDS = 1.0
"""Seconds between two looks that count as silence. If more have passed, the sidecar was not there to listen: the whole
worker, or its machine, stood still."""
MIN_SILENCE_SECONDS = 1.0
"""Seconds; less is the pause between two signs of life."""

log = logging.getLogger(__name__)


class LauncherMonitor:
    """Looks at the launcher's files. A heartbeat that cannot be read leaves the one before in force."""

    def __init__(self, runtime: RuntimeFolder, worker: str) -> None:
        self._runtime = runtime
        self._heartbeat = Heartbeat(worker=worker)
        self._identity: tuple[int, int] | None = None
        self._silence = LauncherSilence()

    def check(self, now: float) -> None:
        """Call it often. `now`: seconds, monotonic."""
        self._silence.update(_read_modification_time(self._runtime.liveness), now)
        identity = _read_file_identity(self._runtime.heartbeat)
        if identity not in (None, self._identity):
            self._identity = identity
            self._read()

    @property
    def heartbeat(self) -> Heartbeat:
        """As it is to be sent now."""
        seconds = self._silence.seconds
        return replace(self._heartbeat, launcher_silent_seconds=round(seconds, 1) if seconds >= MIN_SILENCE_SECONDS else 0.0)

    def _read(self) -> None:
        try:
            self._heartbeat = Heartbeat.from_json(parse_json(self._runtime.heartbeat.read_bytes()))
        except (InputError, ValueError) as error:
            log.error("%s: %s", self._runtime.heartbeat, error)


@dataclass
class LauncherSilence:
    """For how long a launcher that runs has given no sign of life, by this process's own clock."""

    seconds: float = 0.0
    _sign: int | None = None
    _checked_at: float = 0.0

    def update(self, sign: int | None, now: float) -> None:
        """`sign`: anything that is another one with each sign of life; None: no launcher runs, or not yet."""
        if sign is None or sign != self._sign:
            self.seconds = 0.0
        else:
            self.seconds += min(now - self._checked_at, MAX_COUNTED_SILENCE_GAP_SECONDS)
        self._sign, self._checked_at = sign, now


def _read_modification_time(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return None


def _read_file_identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns
