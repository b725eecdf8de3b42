"""The launcher as the sidecar sees it: its newest heartbeat, and for how long it has been silent.

A launcher that is stopped, or stuck in the kernel, cannot report that itself.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

from pacekeeper.runtime_folder import RuntimeFolder
from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.protocol.decoding import parse_json
from pacekeeper_analysis.protocol.reports import Heartbeat

MAX_COUNTED_SILENCE_GAP_SECONDS = 1.0
"""Maximum of the time between two checks that counts as silence. If more has passed, the sidecar itself did not run:
the whole worker, or its machine, was stopped."""
MIN_SILENCE_SECONDS = 1.0
"""Minimum silence that is reported, in seconds. Less is the interval between two updates of the liveness file."""

log = logging.getLogger(__name__)


class LauncherMonitor:
    """Reads the launcher's files. A malformed heartbeat is logged, and the previous one stays."""

    def __init__(self, runtime: RuntimeFolder, worker: str) -> None:
        self._runtime = runtime
        self._heartbeat = Heartbeat(worker=worker)
        self._identity: tuple[int, int] | None = None
        self._silence = LauncherSilence()

    def check(self, now: float) -> None:
        """Check the files. Call it often. `now`: seconds, monotonic."""
        self._silence.update(_read_modification_time(self._runtime.liveness), now)
        identity = _read_file_identity(self._runtime.heartbeat)
        if identity not in (None, self._identity):
            self._identity = identity
            self._read()

    @property
    def heartbeat(self) -> Heartbeat:
        """The heartbeat to send now."""
        seconds = self._silence.seconds
        return replace(
            self._heartbeat, launcher_silent_seconds=round(seconds, 1) if seconds >= MIN_SILENCE_SECONDS else 0.0
        )

    def _read(self) -> None:
        try:
            self._heartbeat = Heartbeat.from_json(parse_json(self._runtime.heartbeat.read_bytes()))
        except (InputError, ValueError) as error:
            log.error("%s: %s", self._runtime.heartbeat, error)


@dataclass
class LauncherSilence:
    """For how long a running launcher has not updated its liveness file, on this process's clock."""

    seconds: float = 0.0
    _sign: int | None = None
    _checked_at: float = 0.0

    def update(self, modification_time: int | None, now: float) -> None:
        """Update the silence. `modification_time`: changes with each update of the file; None: no launcher runs."""
        if modification_time is None or modification_time != self._sign:
            self.seconds = 0.0
        else:
            self.seconds += min(now - self._checked_at, MAX_COUNTED_SILENCE_GAP_SECONDS)
        self._sign, self._checked_at = modification_time, now


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
