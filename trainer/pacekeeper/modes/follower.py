"""Rank 0's view of the plan: the newest one that can be followed, and why a newer one is not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from pacekeeper.runtime import Runtime, write_text
from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.plan import MODES, Stop, WorkerPlan
from pacekeeper_analysis.reading import brief, parse_json

from .agreement import Orders
from .course import Course

_log = logging.getLogger(__name__)

Check = Callable[[Course], None]
"""Raises InputError where the script cannot train so."""


class PlanFollower:
    """Pure: from the contents of plan.json, one after the other, to what rank 0 orders."""

    def __init__(self, check: Check) -> None:
        self._check = check
        self._plan = WorkerPlan()
        self._membership: int | None = None
        """Of this round: the first plan's."""
        self._unreadable = ""

    def take(self, content: str) -> None:
        """What lies in plan.json now."""
        try:
            self._plan = parse_plan(content)
        except InputError as error:
            self._unreadable = str(error)
            return
        self._unreadable = ""
        if self._membership is None:
            self._membership = self._plan.membership

    def orders(self, in_force: Course, snapshot_every: int) -> tuple[Orders, str]:
        """What rank 0 orders, and why the newest plan is refused; "": it is not.

        in_force: goes on where the plan has no course that can be followed.
        """
        plan, course, refused = self._plan, Course.of(self._plan), self._unreadable
        if plan.version == 0 or plan.membership != self._membership:  # the next round's: this one goes on until its end
            course = in_force
        else:  # behind an unreadable plan lies the last readable one, which was perhaps refused itself
            try:
                self._check(course)
            except InputError as error:
                course, refused = in_force, refused or f"plan {plan.version}: {error}"
        orders = Orders(course, plan.version, plan.checkpoint_request, plan.stop is Stop.SUSPEND, snapshot_every)
        return orders, refused


class PlanReader:
    """Follows the runtime folder's plan.json, and writes into its `refused` what is wrong with the plan there."""

    def __init__(self, runtime: Runtime | None, check: Check) -> None:
        """`runtime`: None: there is no plan."""
        self._runtime = runtime
        self._follower = PlanFollower(check)
        self._seen: tuple[int, int] | None = None
        self._said: str | None = None

    def orders(self, in_force: Course, snapshot_every: int) -> Orders:
        """As the follower's. Costs little more than a stat where the file was not replaced."""
        if self._runtime is not None and (content := self._replaced(self._runtime.plan)) is not None:
            self._follower.take(content)
        orders, refused = self._follower.orders(in_force, snapshot_every)
        if self._runtime is not None and refused != self._said:
            self._said = refused
            self._say(self._runtime.refused, refused)
        return orders

    def _replaced(self, path: Path) -> str | None:
        """What lies there; None: what lay there when this was asked last, or nothing."""
        try:
            status = path.stat()
            signature = (status.st_ino, status.st_mtime_ns)
            if signature == self._seen:
                return None
            content = path.read_text(errors="replace")
        except FileNotFoundError:
            return None
        self._seen = signature
        return content

    def _say(self, place: Path, refused: str) -> None:
        """For people: in the runtime folder, from where the launcher passes it on, and in the log."""
        try:
            write_text(place, refused)
        except OSError as error:  # a full volume is no reason to end the training
            _log.warning("the operator does not hear which plan is refused: %s", error)
        if refused:
            _log.warning("plan not taken, the last good one goes on: %s", refused)


def parse_plan(content: str) -> WorkerPlan:
    """Raises InputError that names the field and the remedy."""
    try:
        fields = parse_json(content)
    except ValueError as error:
        raise InputError(f"plan.json: not JSON ({error}); its writer replaces it as a whole") from error
    mode = fields.get("sync_mode", MODES[0]) if isinstance(fields, dict) else MODES[0]
    if mode not in MODES:
        raise InputError(f"sync_mode: {brief(mode)} is unknown; take one of {', '.join(MODES)}")
    return WorkerPlan.from_json(fields)
