"""The plan file, as the launcher reads it."""

from __future__ import annotations

import logging
from pathlib import Path

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.protocol.decoding import parse_json
from pacekeeper_analysis.protocol.plan import WorkerPlan

log = logging.getLogger(__name__)


class PlanFile:
    """Reads the plan again when its file has been replaced."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._identity: tuple[int, int] | None = None
        self._plan: WorkerPlan | None = None

    def read(self) -> WorkerPlan | None:
        """Return the newest plan; None before the first. A malformed file is logged, and the previous plan stays."""
        try:
            status = self._path.stat()
        except FileNotFoundError:
            return self._plan
        identity = (status.st_ino, status.st_mtime_ns)
        if identity != self._identity:
            self._identity = identity
            try:
                self._plan = WorkerPlan.from_json(parse_json(self._path.read_bytes()))
            except InputError as error:
                log.error("%s: %s", self._path, error)
        return self._plan
