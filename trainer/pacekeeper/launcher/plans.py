"""The plan file as the launcher follows it."""

from __future__ import annotations

import logging
from pathlib import Path

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.plan import WorkerPlan
from pacekeeper_analysis.reading import parse_json

log = logging.getLogger(__name__)


class PlanFile:
    """Reads the plan anew when its file has been replaced."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._identity: tuple[int, int] | None = None
        self._plan: WorkerPlan | None = None

    def read(self) -> WorkerPlan | None:
        """The newest plan; None before there is one. A file that is no plan leaves the one before in force."""
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
