"""`pacekeeper run --local N`: a small controller next to the launcher replaces operator and sidecar on one machine.

It uses the runtime folder as they do, and the same functions of `pacekeeper_analysis` decide. The launcher itself
restarts crashed ranks in place. The controller diagnoses and ends a hang. It changes how a managed script trains: batch
shares, planned garbage collection, Local-SGD and back.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pacekeeper.health.fault_formatting import describe_fault
from pacekeeper.health.rank_rings import RankRings as RankWindows
from pacekeeper.local_folder import open_local_folder
from pacekeeper.runtime_folder import RuntimeFolder, read_json, write_json
from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.failures import hang
from pacekeeper_analysis.failures.repetition import RepeatedFailure
from pacekeeper_analysis.protocol.plan import SECRET_BYTES, Member, Plan, SyncMode
from pacekeeper_analysis.protocol.reports import FaultKind, FaultReport, Heartbeat, LauncherState, RankWindow
from pacekeeper_analysis.stragglers import strategies
from pacekeeper_analysis.stragglers.defaults import DEFAULT_STRAGGLER_SLOWDOWN, DEFAULT_WINDOW_STEPS
from pacekeeper_analysis.stragglers.mode_changes import (
    SYNC_MODE_COOL_DOWN_SECONDS,
    is_mode_change_confirmed,
    propose_lasting_revert,
)
from pacekeeper_analysis.stragglers.strategies import Bottleneck, Hysteresis, Strategy

from .settings import LauncherSettings

LOCAL_WORKER = "local"
LOCAL_ADDRESS = "127.0.0.1"
LOCAL_POLL_INTERVAL_SECONDS = 0.05
"""Seconds between two polls of the runtime folder."""
ADAPTATION_INTERVAL_SECONDS = 5.0
"""Seconds between two evaluations of the ranks' step times."""
_RUN_FOLDER_PREFIX = "pacekeeper-run-"

log = logging.getLogger(__name__)


_NO_REPETITION = RepeatedFailure()


@dataclass(frozen=True)
class AdaptationState:
    """The controller's state of how the job trains."""

    bottleneck: Bottleneck = Bottleneck.NONE  # that led to the present Local-SGD mode
    change_votes: int = 0  # consecutive evaluations that proposed another mode
    first_vote_step: int = 0  # the step at the first of them
    hysteresis: Hysteresis = field(default_factory=Hysteresis)
    is_mode_fixed: bool = False  # the mode is the user's choice
    refusal: str = ""  # why the ranks refused a change: the controller tries no further change


@dataclass(frozen=True)
class LocalDecision:
    """A decision of the controller: the plan from now on, log messages, and why the run is given up ("": it is not)."""

    plan: Plan
    messages: tuple[str, ...] = ()
    give_up_reason: str = ""
    adaptation: AdaptationState = field(default_factory=AdaptationState)
    repetition: RepeatedFailure = _NO_REPETITION


def evaluate_faults(
    plan: Plan,
    faults: Sequence[FaultReport],
    new_faults: Sequence[FaultReport],
    heartbeat: Heartbeat,
    repetition: RepeatedFailure = _NO_REPETITION,
    no_progress_limit: int = 0,
) -> LocalDecision:
    """Decide about the launcher's faults. A hang costs one of the plan's restarts.

    `faults`: all so far, including `new_faults`, those since the last call. `repetition`: the state before
    `new_faults`. `no_progress_limit`: the number of rounds that may end at the same step; 0: no limit.
    """
    if heartbeat.state is LauncherState.FAILED:
        return LocalDecision(plan, give_up_reason=_describe_last_failure(faults))
    for fault in new_faults:
        repetition = repetition.with_failure(fault) if fault.kind is FaultKind.RANK_FAILED else repetition
    if repetition.reaches_limit(no_progress_limit):
        return LocalDecision(
            plan, give_up_reason=f"{repetition}: {_describe_last_failure(faults)}", repetition=repetition
        )
    stalls = [fault for fault in new_faults if fault.kind is FaultKind.STALLED and fault.round == heartbeat.round]
    diagnosis = hang.diagnose_hang(stalls, plan.world_size) if stalls else None
    next_repetition = None if diagnosis is None else repetition.with_hang(diagnosis, stalls)
    if diagnosis is None or next_repetition is None:
        return LocalDecision(plan, repetition=repetition)
    message = f"hang ({diagnosis.kind}): {'; '.join(diagnosis.evidence)}"
    if next_repetition.reaches_limit(no_progress_limit):
        return LocalDecision(plan, give_up_reason=f"{next_repetition}: {message}", repetition=next_repetition)
    remaining_restarts = plan.restarts - heartbeat.restarts - 1
    if remaining_restarts < 0:
        return LocalDecision(plan, (message,), give_up_reason=f"round {heartbeat.round} hangs, and no restart is left")
    restarted = replace(
        plan,
        version=plan.version + 1,
        membership=plan.membership + 1,
        round=heartbeat.round + 1,
        restarts=remaining_restarts,
    )
    messages = (message, f"ends round {heartbeat.round} and starts round {restarted.round}")
    return LocalDecision(restarted, messages, repetition=next_repetition)


def evaluate_step_times(
    plan: Plan, windows: Sequence[RankWindow], adaptation: AdaptationState, now: float
) -> LocalDecision:
    """Choose how to train. Shares change at once; the mode changes once that is confirmed (`mode_changes`)."""
    active_modes = {window.sync_mode or SyncMode.SYNC for window in windows}
    if adaptation.refusal or active_modes != {plan.sync_mode}:
        return LocalDecision(plan, adaptation=adaptation)  # the ranks do not follow the plan, or not yet
    if plan.sync_mode is SyncMode.SYNC:
        bottleneck, strategy, reasons = _choose_strategy(plan, windows, adaptation.is_mode_fixed)
    elif adaptation.is_mode_fixed:
        return LocalDecision(plan, adaptation=adaptation)
    else:
        bottleneck, strategy, reasons = (
            Bottleneck.NONE,
            propose_lasting_revert(windows, threshold=DEFAULT_STRAGGLER_SLOWDOWN, bottleneck=adaptation.bottleneck),
            (),
        )
    if strategy is None:
        return LocalDecision(plan, adaptation=replace(adaptation, change_votes=0))
    messages = (*reasons, f"{strategy.remedy}: {strategy.reason}")
    if strategy.mode is plan.sync_mode:
        return LocalDecision(strategy.apply_to(plan), messages, adaptation=replace(adaptation, change_votes=0))
    step = max(window.steps[-1] for window in windows)
    first_step = adaptation.first_vote_step if adaptation.change_votes else step
    votes = adaptation.change_votes + 1
    cause = bottleneck if plan.sync_mode is SyncMode.SYNC else adaptation.bottleneck
    if not is_mode_change_confirmed(cause, votes, first_step, step) or not adaptation.hysteresis.allows(now):
        return LocalDecision(plan, adaptation=replace(adaptation, change_votes=votes, first_vote_step=first_step))
    return LocalDecision(
        strategy.apply_to(plan),
        messages,
        adaptation=AdaptationState(bottleneck, hysteresis=adaptation.hysteresis.with_change(now)),
    )


def _choose_strategy(
    plan: Plan, windows: Sequence[RankWindow], is_mode_fixed: bool
) -> tuple[Bottleneck, Strategy | None, tuple[str, ...]]:
    """Return the bottleneck of a synchronous job, the strategy against it (None: none), and the reason."""
    diagnosis = strategies.diagnose_bottleneck(windows, DEFAULT_STRAGGLER_SLOWDOWN)
    if diagnosis is None:
        return Bottleneck.NONE, None, ()
    proposals = strategies.propose_strategies(
        diagnosis, threshold=DEFAULT_STRAGGLER_SLOWDOWN, sequence_cost=plan.sequence_cost
    )
    proposals = tuple(strategy for strategy in proposals if not strategy.refused)
    if is_mode_fixed or strategies.explain_exact_preference(diagnosis, proposals):
        proposals = tuple(strategy for strategy in proposals if strategy.mode is SyncMode.SYNC)
    strategy = next(iter(proposals), None)
    return diagnosis.bottleneck, strategy, (f"slowdown {diagnosis.slowdown:.2f}: {diagnosis.evidence[0]}",)


def evaluate_refusal(plan: Plan, previous: Plan, heartbeat: Heartbeat, adaptation: AdaptationState) -> LocalDecision:
    """Return to the plan `previous` if the ranks refuse the present one, and stop adapting."""
    if not heartbeat.training.refused or heartbeat.plan_version < plan.version or adaptation.refusal:
        return LocalDecision(plan, adaptation=adaptation)
    restored = replace(
        previous, version=plan.version + 1, membership=plan.membership, round=plan.round, restarts=plan.restarts
    )
    message = f"the ranks refuse the change and train on as before: {heartbeat.training.refused}"
    return LocalDecision(restored, (message,), adaptation=replace(adaptation, refusal=heartbeat.training.refused))


class LocalController:
    """Acts as operator and sidecar through the runtime folder."""

    def __init__(
        self,
        runtime: RuntimeFolder,
        ranks: int,
        restarts: int,
        give_up: Callable[[str], None],
        mode: SyncMode | None = None,
        no_progress_limit: int = 0,
    ) -> None:
        """Publish the first plan.

        `mode`: the fixed sync mode; None: start with Sync, and change to a mode that wins enough. `no_progress_limit`:
        as in `evaluate_faults`.
        """
        self._runtime = runtime
        self._give_up = give_up
        self._without_progress = no_progress_limit
        self._repetition = RepeatedFailure()
        self._windows = RankWindows(runtime, DEFAULT_WINDOW_STEPS)
        self._faults: list[FaultReport] = []
        self._next_adaptation_at = 0.0
        self._adapt_from_step = 0  # step
        self._last_warning = ""
        self._adaptation = AdaptationState(
            hysteresis=Hysteresis(first=SYNC_MODE_COOL_DOWN_SECONDS), is_mode_fixed=mode is not None
        )
        member = Member(LOCAL_WORKER, LOCAL_ADDRESS, tuple(range(ranks)))
        self._plan = self._previous_plan = Plan()
        first = Plan(version=1, membership=1, members=(member,), store_port=_find_free_port(), restarts=restarts)
        self._publish(replace(first, sync_mode=mode or SyncMode.SYNC))
        self._previous_plan = self._plan

    async def run(self) -> None:
        """Run until cancelled, or until the run is given up."""
        while True:
            await asyncio.sleep(LOCAL_POLL_INTERVAL_SECONDS)
            self._runtime.operator_contact.touch()
            try:
                decision = self._evaluate()
            except Exception as error:  # if this task ended, a run whose launcher has failed would not end
                self._warn_once(error)
                continue
            for message in decision.messages:
                log.warning("%s", message)
            self._adaptation = decision.adaptation
            if decision.plan is not self._plan:
                self._publish(decision.plan)
            if decision.give_up_reason:
                self._give_up(decision.give_up_reason)
                return

    def _evaluate(self) -> LocalDecision:
        """Decide once. Raises ValueError if a file of the ranks or of the launcher is malformed."""
        heartbeat = Heartbeat.from_json(_read_json_object(self._runtime.heartbeat))
        new_faults = self._take_faults()
        fault_decision = evaluate_faults(
            self._plan, self._faults, new_faults, heartbeat, self._repetition, self._without_progress
        )
        self._repetition = fault_decision.repetition
        decision = replace(fault_decision, adaptation=self._adaptation)
        if decision.plan is self._plan and not decision.messages and not decision.give_up_reason:
            decision = evaluate_refusal(self._plan, self._previous_plan, heartbeat, self._adaptation)
        if decision.plan is self._plan and not decision.give_up_reason and self._is_adaptation_due(heartbeat):
            windows = self._windows.build_evidence("", LOCAL_WORKER, heartbeat.round).windows
            decision = evaluate_step_times(self._plan, windows, self._adaptation, time.monotonic())
            if decision.plan is not self._plan:
                # Until then, windows contain steps from before the change.
                self._adapt_from_step = (heartbeat.progress.step or 0) + DEFAULT_WINDOW_STEPS
        return decision

    def _warn_once(self, error: Exception) -> None:
        """Log an error once: it recurs at each poll."""
        if str(error) != self._last_warning:
            self._last_warning = str(error)
            log.warning("evaluation failed: %r", error, exc_info=not isinstance(error, ValueError))

    def _publish(self, plan: Plan) -> None:
        self._previous_plan, self._plan = (
            self._plan,
            plan.with_membership_secret(self._plan, secrets.token_hex(SECRET_BYTES)),
        )
        write_json(self._runtime.plan, self._plan.build_worker_plan(LOCAL_WORKER).to_json())

    def _take_faults(self) -> list[FaultReport]:
        new_faults = []
        for path in sorted(self._runtime.faults.glob("*.json")):
            try:
                new_faults.append(FaultReport.from_json(_read_json_object(path)))
            except ValueError as error:
                log.warning("%s: %s", path.name, error)
            path.unlink()
        self._faults += new_faults
        return new_faults

    def _is_adaptation_due(self, heartbeat: Heartbeat) -> bool:
        now = time.monotonic()
        progress = heartbeat.progress
        steady = progress.steps_in_round >= DEFAULT_WINDOW_STEPS and (progress.step or 0) >= self._adapt_from_step
        if not heartbeat.training.managed or not steady or now < self._next_adaptation_at:
            return False
        self._next_adaptation_at = now + ADAPTATION_INTERVAL_SECONDS
        return True


def build_local_settings(environment: dict[str, str]) -> LauncherSettings:
    return LauncherSettings.from_environment(
        {**environment, "PACEKEEPER_WORKER": LOCAL_WORKER, "PACEKEEPER_POD_IP": LOCAL_ADDRESS}
    )


@contextmanager
def open_local_runtime() -> Iterator[RuntimeFolder]:
    """Open a runtime folder for one run and remove it afterwards."""
    with open_local_folder(_RUN_FOLDER_PREFIX) as folder:
        yield RuntimeFolder(folder).create()


def _read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON object; an absent file is an empty one. Raises ValueError if the file holds anything else."""
    content = read_json(path) or {}
    if not isinstance(content, dict):
        raise InputError(f"{path.name} holds a {type(content).__name__} instead of an object")
    return content


def _describe_last_failure(faults: Sequence[FaultReport]) -> str:
    failures = [fault for fault in faults if fault.kind in {FaultKind.RANK_FAILED, FaultKind.ROUND_FAILED}]
    return describe_fault(failures[-1]) if failures else "the launcher has given up"


def _find_free_port() -> int:
    with socket.create_server((LOCAL_ADDRESS, 0)) as server:
        port: int = server.getsockname()[1]
        return port
