"""What rank 0 tells its launcher of the checkpoints on the volume: the newest that is kept, and why a later one is not.

The job trains on when a checkpoint fails, so that somebody else has to hear of it: it is part of the heartbeat.
"""

from __future__ import annotations

import logging
import re
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Protocol

from pacekeeper.environment import Environment
from pacekeeper.runtime import write_json
from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.reading import Truncated, Within, parse_json, read_dataclass

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckpointStatus:
    """The state of the whole job's checkpoints."""

    step: Annotated[int, Within(-1)] = -1  # of the newest that is kept; -1: none
    published_ns: Annotated[int, Within(0, 2.0**63)] = 0  # of this host's CLOCK_MONOTONIC: when it was kept, or found
    failed_rank: Annotated[int, Within(-1)] = -1  # on which the newest attempt failed; -1: none did, or nobody knows
    error: Annotated[str, Truncated(500)] = ""  # path and reason; "": the newest attempt was kept

    def compute_age(self, now: float) -> float:
        """Seconds since the newest was kept; -1: there is none. `now`: seconds, monotonic, on the same host."""
        return -1.0 if self.step < 0 else round(max(0.0, now - self.published_ns * 1e-9), 1)


NO_CHECKPOINT_STATUS = CheckpointStatus()


def read_checkpoint_status(path: Path) -> CheckpointStatus:
    """Nothing new where nobody has written there, or nothing that makes sense."""
    try:
        return read_dataclass(CheckpointStatus, parse_json(path.read_bytes()))
    except (OSError, InputError, ValueError):
        return NO_CHECKPOINT_STATUS


def parse_failed_rank(reason: str) -> int:
    """The rank that the ranks' reasons name first; -1: none."""
    named = re.match(r"rank (\d+):", reason)
    return int(named[1]) if named else -1


class CheckpointReporter(Protocol):
    """Hears what comes of checkpoints."""

    def report_found(self, step: int) -> None:
        """A round begins, and this is the newest on the volume (-1: none)."""

    def report_published(self, step: int) -> None: ...

    def report_failure(self, error: str, rank: int = -1) -> None: ...


class NullCheckpointReporter:
    """Where there is no launcher, or another rank's word counts."""

    def report_found(self, step: int) -> None: ...

    def report_published(self, step: int) -> None: ...

    def report_failure(self, error: str, rank: int = -1) -> None: ...


class CheckpointStatusFile:
    """Rank 0's. It never raises: training goes on without it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._status = read_checkpoint_status(path)

    def report_found(self, step: int) -> None:
        """What an earlier round has told of the same checkpoint from here stays true: that it is old, say."""
        if step != self._status.step:
            self.report_published(step)

    def report_published(self, step: int) -> None:
        self._write(CheckpointStatus(step, time.monotonic_ns()))

    def report_failure(self, error: str, rank: int = -1) -> None:
        self._write(replace(self._status, failed_rank=rank, error=error[:500]))

    def _write(self, status: CheckpointStatus) -> None:
        self._status = status
        try:
            write_json(self._path, asdict(status))
        except OSError as error:
            _log.warning("the launcher does not hear of the checkpoints: %s", error)


def open_checkpoint_reporter(environment: Environment) -> CheckpointReporter:
    """Where this rank reports to."""
    if environment.rank != 0 or environment.runtime is None:
        return NullCheckpointReporter()
    return CheckpointStatusFile(environment.runtime.checkpoints)
