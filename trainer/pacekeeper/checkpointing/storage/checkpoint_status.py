"""Status of the checkpoints on the volume, which rank 0 writes for its launcher: the newest one, and later failures.

The job continues to train after a failed checkpoint. The status is therefore part of the heartbeat.
"""

from __future__ import annotations

import logging
import re
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Protocol

from pacekeeper.environment import Environment
from pacekeeper.runtime_folder import write_json
from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.protocol.decoding import Truncated, Within, parse_json, read_dataclass

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckpointStatus:
    """Status of the whole job's checkpoints."""

    step: Annotated[int, Within(-1)] = -1  # of the newest checkpoint; -1: none
    published_ns: Annotated[int, Within(0, 2.0**63)] = 0  # CLOCK_MONOTONIC of this host when it was published, or found
    failed_rank: Annotated[int, Within(0)] | None = (
        None  # rank on which the newest attempt failed; None: none, or unknown
    )
    error: Annotated[str, Truncated(500)] = ""  # path and reason; "": the newest attempt was published

    def compute_age(self, now: float) -> float | None:
        """Return the age of the newest checkpoint in seconds; None: none. `now`: monotonic seconds of the same host."""
        return None if self.step < 0 else round(max(0.0, now - self.published_ns * 1e-9), 1)


NO_CHECKPOINT_STATUS = CheckpointStatus()


def read_checkpoint_status(path: Path) -> CheckpointStatus:
    """Return the status in a file, or NO_CHECKPOINT_STATUS if it is missing or invalid."""
    try:
        return read_dataclass(CheckpointStatus, parse_json(path.read_bytes()))
    except (OSError, InputError, ValueError):
        return NO_CHECKPOINT_STATUS


def parse_failed_rank(reason: str) -> int | None:
    """Return the rank that is named first in the ranks' reasons; None: none."""
    match = re.match(r"rank (\d+):", reason)
    return int(match[1]) if match else None


class CheckpointReporter(Protocol):
    """Receives the outcomes of checkpoints."""

    def report_found(self, step: int) -> None:
        """Report at the start of a round the newest checkpoint on the volume (-1: none)."""

    def report_published(self, step: int) -> None: ...

    def report_failure(self, error: str, rank: int | None = None) -> None: ...


class NullCheckpointReporter:
    """Reporter for a rank without a launcher, or other than rank 0."""

    def report_found(self, step: int) -> None: ...

    def report_published(self, step: int) -> None: ...

    def report_failure(self, error: str, rank: int | None = None) -> None: ...


class CheckpointStatusFile:
    """Status file of rank 0. It never raises: training continues without it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._status = read_checkpoint_status(path)

    def report_found(self, step: int) -> None:
        """Report a found checkpoint. What an earlier round has reported of the same one, such as its age, stays."""
        if step != self._status.step:
            self.report_published(step)

    def report_published(self, step: int) -> None:
        self._write(CheckpointStatus(step, time.monotonic_ns()))

    def report_failure(self, error: str, rank: int | None = None) -> None:
        self._write(replace(self._status, failed_rank=rank, error=error[:500]))

    def _write(self, status: CheckpointStatus) -> None:
        self._status = status
        try:
            write_json(self._path, asdict(status))
        except OSError as error:
            _log.warning("cannot report the checkpoints' status to the launcher: %s", error)


def open_checkpoint_reporter(environment: Environment) -> CheckpointReporter:
    """Return this rank's reporter."""
    if environment.rank != 0 or environment.runtime is None:
        return NullCheckpointReporter()
    return CheckpointStatusFile(environment.runtime.checkpoints)
