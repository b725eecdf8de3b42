"""Rank 0's view of the plan: the newest one that can be followed, and why a newer one is not."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pacekeeper.runtime import Runtime, write_text
from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.plan import Stop, WorkerPlan

from .agreement import Orders
from .course import MODES, Course

_log = logging.getLogger(__name__)


@dataclass
class PlanFollower:
    """The runtime folder's plan.json; its `refused` says what is wrong with the plan that lies there."""

    runtime: Runtime | None
    """None: there is no plan."""
    check: Callable[[Course], None]
    """Raises InputError where the script cannot train so."""

    def __post_init__(self) -> None:
        self._seen: tuple[int, int] | None = None
        self._plan = WorkerPlan()
        self._membership: int | None = None
        self._unreadable = ""
        self._said: str | None = None

    def orders(self, in_force: Course, snapshot_every: int) -> Orders:
        """What rank 0 orders. Costs little more than a stat where the file was not replaced.

        in_force: goes on where the plan has no course that can be followed.
        """
        self._read()
        plan, course, refused = self._plan, Course.of(self._plan), self._unreadable
        if plan.version == 0 or plan.membership != self._membership:  # the next round's: this one goes on until its end
            course = in_force
        else:  # behind an unreadable plan lies the last readable one, which was perhaps refused itself
            try:
                self.check(course)
            except InputError as error:
                course, refused = in_force, refused or f"plan {plan.version}: {error}"
        self._say(refused)
        return Orders(course, plan.version, plan.checkpoint_request, plan.stop is Stop.SUSPEND, snapshot_every)

    def _read(self) -> None:
        if self.runtime is None:
            return
        path = self.runtime.plan
        try:
            status = path.stat()
        except FileNotFoundError:
            return
        signature = (status.st_ino, status.st_mtime_ns)
        if signature == self._seen:
            return
        self._seen = signature
        try:
            self._plan = read_plan(path)
            self._unreadable = ""
        except InputError as error:
            self._unreadable = str(error)
        if self._membership is None and not self._unreadable:
            self._membership = self._plan.membership

    def _say(self, refused: str) -> None:
        """For people: in the runtime folder, from where the launcher passes it on, and in the log."""
        if refused == self._said or self.runtime is None:
            return
        self._said = refused
        write_text(self.runtime.refused, refused)
        if refused:
            _log.warning("plan not taken, the last good one goes on: %s", refused)


def read_plan(path: Path) -> WorkerPlan:
    """Raises InputError that names the field and the remedy."""
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise InputError(f"{path.name}: not JSON ({error}); its writer replaces it as a whole") from error
    mode = content.get("sync_mode", MODES[0]) if isinstance(content, dict) else MODES[0]
    if mode not in MODES:
        raise InputError(f"sync_mode: {mode!r} is unknown; take one of {', '.join(MODES)}")
    return WorkerPlan.from_json(content)
