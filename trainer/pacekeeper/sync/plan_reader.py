"""Rank 0's view of the plan: the newest plan that it can follow, and why it refuses a newer one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from pacekeeper.runtime_folder import RuntimeFolder, write_text
from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.protocol.decoding import abbreviate_value, parse_json
from pacekeeper_analysis.protocol.plan import SYNC_MODES, Stop, WorkerPlan

from .agreement import Directives
from .training_config import TrainingConfig

_log = logging.getLogger(__name__)

CheckTrainingConfig = Callable[[TrainingConfig], None]
"""Raises InputError if the script cannot train with this config."""


class PlanInterpreter:
    """Turns successive contents of plan.json into rank 0's directives. Pure."""

    def __init__(self, check: CheckTrainingConfig) -> None:
        self._check = check
        self._plan = WorkerPlan()
        self._membership: int | None = None
        """Membership of this round: that of the first plan."""
        self._parse_error = ""

    def accept_content(self, content: str) -> None:
        """Read the present content of plan.json."""
        try:
            self._plan = parse_plan(content)
        except InputError as error:
            self._parse_error = str(error)
            return
        self._parse_error = ""
        if self._membership is None:
            self._membership = self._plan.membership

    def build_directives(self, current: TrainingConfig, snapshot_every: int) -> tuple[Directives, str]:
        """Return rank 0's directives, and why the newest plan is refused; "": it is not refused.

        `current`: training config that stays in force if the plan has none that can be followed.
        """
        plan, config, refusal = self._plan, TrainingConfig.from_plan(self._plan), self._parse_error
        if (
            plan.version == 0 or plan.membership != self._membership
        ):  # a plan of the next round: this round continues to its end
            config = current
        else:  # after an unreadable plan, the last readable one applies, which may itself have been refused
            try:
                self._check(config)
            except InputError as error:
                config, refusal = current, refusal or f"plan {plan.version}: {error}"
        directives = Directives(
            config, plan.version, plan.checkpoint_request, plan.stop is Stop.SUSPEND, snapshot_every
        )
        return directives, refusal


class PlanReader:
    """Reads the runtime folder's plan.json, and writes into its file `refused` what is wrong with the plan."""

    def __init__(self, runtime: RuntimeFolder | None, check: CheckTrainingConfig) -> None:
        """Create the reader. `runtime` None: there is no plan."""
        self._runtime = runtime
        self._interpreter = PlanInterpreter(check)
        self._file_identity: tuple[int, int] | None = None
        self._reported_refusal: str | None = None

    def read_directives(self, current: TrainingConfig, snapshot_every: int) -> Directives:
        """Return the directives of the newest plan, as `PlanInterpreter.build_directives` does.

        It costs little more than a stat if the file was not replaced.
        """
        if self._runtime is not None and (content := self._read_if_replaced(self._runtime.plan)) is not None:
            self._interpreter.accept_content(content)
        directives, refusal = self._interpreter.build_directives(current, snapshot_every)
        if self._runtime is not None and refusal != self._reported_refusal:
            self._reported_refusal = refusal
            self._report_refusal(self._runtime.refusal, refusal)
        return directives

    def _read_if_replaced(self, path: Path) -> str | None:
        """Return the file's content; None: it is missing, or the same as at the last call."""
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

    def _report_refusal(self, path: Path, refusal: str) -> None:
        """Report a refusal to people: in the log, and in the runtime folder, from where the launcher forwards it."""
        try:
            write_text(path, refusal)
        except OSError as error:  # a full volume is no reason to end the training
            _log.warning("cannot report to the operator which plan is refused: %s", error)
        if refusal:
            _log.warning("plan refused, the last valid one stays in force: %s", refusal)


def parse_plan(content: str) -> WorkerPlan:
    """Parse plan.json. Raises InputError that names the field and the remedy."""
    try:
        fields = parse_json(content)
    except ValueError as error:
        raise InputError(f"plan.json: not JSON ({error}); its writer replaces it as a whole") from error
    mode = fields.get("sync_mode", SYNC_MODES[0]) if isinstance(fields, dict) else SYNC_MODES[0]
    if mode not in SYNC_MODES:
        raise InputError(f"sync_mode: {abbreviate_value(mode)} is unknown; take one of {', '.join(SYNC_MODES)}")
    return WorkerPlan.from_json(fields)
