"""Rank 0's view of the plan: the newest one that can be followed, and why a newer one is not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from pacekeeper.runtime import RuntimeFolder, write_text
from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.plan import SYNC_MODES, Stop, WorkerPlan
from pacekeeper_analysis.reading import abbreviate_value, parse_json

from .agreement import Directives
from .course import TrainingConfig

_log = logging.getLogger(__name__)

CheckTrainingConfig = Callable[[TrainingConfig], None]
"""Raises InputError where the script cannot train so."""


class PlanInterpreter:
    """Pure: from the contents of plan.json, one after the other, to what rank 0 orders."""

    def __init__(self, check: CheckTrainingConfig) -> None:
        self._check = check
        self._plan = WorkerPlan()
        self._membership: int | None = None
        """Of this round: the first plan's."""
        self._parse_error = ""

    def accept_content(self, content: str) -> None:
        """What lies in plan.json now."""
        try:
            self._plan = parse_plan(content)
        except InputError as error:
            self._parse_error = str(error)
            return
        self._parse_error = ""
        if self._membership is None:
            self._membership = self._plan.membership

    def build_directives(self, current: TrainingConfig, snapshot_every: int) -> tuple[Directives, str]:
        """What rank 0 orders, and why the newest plan is refused; "": it is not.

        in_force: goes on where the plan has no course that can be followed.
        """
        plan, course, refused = self._plan, TrainingConfig.from_plan(self._plan), self._parse_error
        if plan.version == 0 or plan.membership != self._membership:  # the next round's: this one goes on until its end
            course = current
        else:  # behind an unreadable plan lies the last readable one, which was perhaps refused itself
            try:
                self._check(course)
            except InputError as error:
                course, refused = current, refused or f"plan {plan.version}: {error}"
        orders = Directives(course, plan.version, plan.checkpoint_request, plan.stop is Stop.SUSPEND, snapshot_every)
        return orders, refused


class PlanReader:
    """Follows the runtime folder's plan.json, and writes into its `refused` what is wrong with the plan there."""

    def __init__(self, runtime: RuntimeFolder | None, check: CheckTrainingConfig) -> None:
        """`runtime`: None: there is no plan."""
        self._runtime = runtime
        self._interpreter = PlanInterpreter(check)
        self._file_identity: tuple[int, int] | None = None
        self._reported_refusal: str | None = None

    def read_directives(self, current: TrainingConfig, snapshot_every: int) -> Directives:
        """As the follower's. Costs little more than a stat where the file was not replaced."""
        if self._runtime is not None and (content := self._read_if_replaced(self._runtime.plan)) is not None:
            self._interpreter.accept_content(content)
        orders, refused = self._interpreter.build_directives(current, snapshot_every)
        if self._runtime is not None and refused != self._reported_refusal:
            self._reported_refusal = refused
            self._report_refusal(self._runtime.refusal, refused)
        return orders

    def _read_if_replaced(self, path: Path) -> str | None:
        """What lies there; None: what lay there when this was asked last, or nothing."""
        try:
            status = path.stat()
            signature = (status.st_ino, status.st_mtime_ns)
            if signature == self._file_identity:
                return None
            content = path.read_text(errors="replace")
        except FileNotFoundError:
            return None
        self._file_identity = signature
        return content

    def _report_refusal(self, place: Path, refusal: str) -> None:
        """For people: in the runtime folder, from where the launcher passes it on, and in the log."""
        try:
            write_text(place, refusal)
        except OSError as error:  # a full volume is no reason to end the training
            _log.warning("the operator does not hear which plan is refused: %s", error)
        if refusal:
            _log.warning("plan not taken, the last good one goes on: %s", refusal)


def parse_plan(content: str) -> WorkerPlan:
    """Raises InputError that names the field and the remedy."""
    try:
        fields = parse_json(content)
    except ValueError as error:
        raise InputError(f"plan.json: not JSON ({error}); its writer replaces it as a whole") from error
    mode = fields.get("sync_mode", SYNC_MODES[0]) if isinstance(fields, dict) else SYNC_MODES[0]
    if mode not in SYNC_MODES:
        raise InputError(f"sync_mode: {abbreviate_value(mode)} is unknown; take one of {', '.join(SYNC_MODES)}")
    return WorkerPlan.from_json(fields)
