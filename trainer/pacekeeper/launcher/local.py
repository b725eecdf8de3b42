"""`pacekeeper run --local N`: operator and sidecar in one small controller beside the launcher, for one machine.

It uses the runtime folder as they do, and the same functions of `pacekeeper_analysis` decide: crashed ranks start again
in place (the launcher does that by itself), a hang is judged and ended, and a steered script changes how it trains:
batch shares, planned garbage collection, Local-SGD and back.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pacekeeper.runtime import RuntimeFolder, read_json, write_plan
from pacekeeper.sidecar.ranks import RankRings as RankWindows
from pacekeeper_analysis import adapt
from pacekeeper_analysis.adapt import Hysteresis, Bottleneck, Strategy
from pacekeeper_analysis.diagnose import hang
from pacekeeper_analysis.diagnose.repetition import RepeatedFailure
from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.plan import SECRET_BYTES, Member, Plan, SyncMode
from pacekeeper_analysis.reports import FaultReport, FaultKind, Heartbeat, LauncherState, RankWindow

from .settings import LauncherSettings
from .words import describe_fault

LOCAL_WORKER = "local"
LOCAL_ADDRESS = "127.0.0.1"
LOCAL_POLL_INTERVAL_SECONDS = 0.05
"""Seconds between two looks at the runtime folder."""
LOCAL_WINDOW_STEPS = 32
ADAPTATION_INTERVAL_SECONDS = 5.0
"""Seconds between two judgements of the ranks' paces."""
LOCAL_SLOWDOWN_THRESHOLD = 1.1
MODE_CHANGE_VOTES = 3
"""Judgements in a row that must ask for another mode: what passes by itself is no reason to leave, or to return."""
MODE_COOL_DOWN_SECONDS = 60.0
"""A mode is kept so long at least, and longer each time that it is left again soon."""
_SHARED_MEMORY = Path("/dev/shm")
_RUN_FOLDER_PREFIX = "pacekeeper-run-"
_MIN_SHARED_MEMORY_BYTES = 1 << 30

log = logging.getLogger(__name__)


_NO_REPETITION = RepeatedFailure()


@dataclass(frozen=True)
class AdaptationState:
    """What the controller keeps in mind of how the job trains."""

    bottleneck: Bottleneck = Bottleneck.NONE  # that led to the Local-SGD mode in force
    change_votes: int = 0  # judgements in a row that asked for another mode
    hysteresis: Hysteresis = field(default_factory=Hysteresis)
    is_mode_fixed: bool = False  # the mode is the user's choice
    refusal: str = ""  # why the ranks did not follow a change: nothing is tried any more


@dataclass(frozen=True)
class LocalDecision:
    """What the controller has decided: the plan from now on, what it says about that, and whether it gives up."""

    plan: Plan
    messages: tuple[str, ...] = ()
    give_up_reason: str = ""
    adaptation: AdaptationState = field(default_factory=AdaptationState)
    repetition: RepeatedFailure = _NO_REPETITION


def evaluate_faults(
    plan: Plan,
    faults: Sequence[FaultReport],
    new: Sequence[FaultReport],
    heartbeat: Heartbeat,
    repetition: RepeatedFailure = _NO_REPETITION,
    without_progress: int = 0,
) -> LocalDecision:
    """`faults`: all so far, `new` of them since the last call. A hang costs one of the plan's restarts.

    repetition: before `new`. without_progress: so many rounds may end at the same step; 0: without limit.
    """
    if heartbeat.state is LauncherState.FAILED:
        return LocalDecision(plan, give_up_reason=_describe_last_failure(faults))
    for fault in new:
        repetition = repetition.with_failure(fault) if fault.kind is FaultKind.RANK_FAILED else repetition
    if repetition.reaches_limit(without_progress):
        return LocalDecision(plan, give_up_reason=f"{repetition}: {_describe_last_failure(faults)}", repetition=repetition)
    stalls = [fault for fault in new if fault.kind is FaultKind.STALLED and fault.round == heartbeat.round]
    found = hang.diagnose_hang(stalls, plan.world_size) if stalls else None
    after = None if found is None else repetition.with_hang(found, stalls)
    if found is None or after is None:
        return LocalDecision(plan, repetition=repetition)
    words = f"hang ({found.kind}): {'; '.join(found.evidence)}"
    if after.reaches_limit(without_progress):
        return LocalDecision(plan, give_up_reason=f"{after}: {words}", repetition=after)
    left = plan.restarts - heartbeat.restarts - 1
    if left < 0:
        return LocalDecision(plan, (words,), give_up_reason=f"round {heartbeat.round} hangs, and no restart is left")
    restarted = replace(
        plan, version=plan.version + 1, membership=plan.membership + 1, round=heartbeat.round + 1, restarts=left
    )
    told = (words, f"ends round {heartbeat.round} and starts round {restarted.round}")
    return LocalDecision(restarted, told, repetition=after)


def evaluate_step_times(plan: Plan, windows: Sequence[RankWindow], adaptation: AdaptationState, now: float) -> LocalDecision:
    """Another way to train where one wins enough: other shares at once, another mode when several judgements ask."""
    in_force = {window.sync_mode or SyncMode.SYNC for window in windows}
    if adaptation.refusal or in_force != {plan.sync_mode}:
        return LocalDecision(plan, adaptation=adaptation)  # the ranks do not follow, or not yet
    if plan.sync_mode is SyncMode.SYNC:
        trouble, way, why = _choose_strategy(plan, windows, adaptation.is_mode_fixed)
    elif adaptation.is_mode_fixed:
        return LocalDecision(plan, adaptation=adaptation)
    else:
        trouble, way, why = Bottleneck.NONE, adapt.propose_revert_to_sync(windows, threshold=LOCAL_SLOWDOWN_THRESHOLD, bottleneck=adaptation.bottleneck), ()
    if way is None:
        return LocalDecision(plan, adaptation=replace(adaptation, wanted=0))
    words = (*why, f"{way.remedy}: {way.reason}")
    if way.mode is plan.sync_mode:
        return LocalDecision(way.apply_to(plan), words, adaptation=replace(adaptation, wanted=0))
    asked = replace(adaptation, wanted=adaptation.change_votes + 1)
    if asked.change_votes < MODE_CHANGE_VOTES or not adaptation.hysteresis.allows(now):
        return LocalDecision(plan, adaptation=asked)
    return LocalDecision(way.apply_to(plan), words, adaptation=AdaptationState(trouble, hysteresis=adaptation.hysteresis.with_change(now)))


def _choose_strategy(
    plan: Plan, windows: Sequence[RankWindow], fixed: bool
) -> tuple[Bottleneck, Strategy | None, tuple[str, ...]]:
    """The trouble of a synchronous job, what to do about it, and why."""
    found = adapt.diagnose_bottleneck(windows, LOCAL_SLOWDOWN_THRESHOLD)
    if found is None:
        return Bottleneck.NONE, None, ()
    ways = adapt.propose_strategies(found, threshold=LOCAL_SLOWDOWN_THRESHOLD, sequence_cost=plan.sequence_cost)
    ways = tuple(way for way in ways if not way.refused)
    if fixed or adapt.explain_exact_preference(found, ways):
        ways = tuple(way for way in ways if way.mode is SyncMode.SYNC)
    way = next(iter(ways), None)
    return found.trouble, way, (f"slowdown {found.slowdown:.2f}: {found.evidence[0]}",)


def evaluate_refusal(plan: Plan, before: Plan, heartbeat: Heartbeat, adaptation: AdaptationState) -> LocalDecision:
    """Trains on as `before` where the ranks refuse the plan, and tries nothing else."""
    if not heartbeat.refused or heartbeat.plan_version < plan.version or adaptation.refusal:
        return LocalDecision(plan, adaptation=adaptation)
    as_before = replace(
        before, version=plan.version + 1, membership=plan.membership, round=plan.round, restarts=plan.restarts
    )
    words = f"the ranks refuse the change, and train on as they did: {heartbeat.refused}"
    return LocalDecision(as_before, (words,), adaptation=replace(adaptation, refused=heartbeat.refused))


class LocalController:
    """Plays operator and sidecar through the runtime folder."""

    def __init__(
        self,
        runtime: RuntimeFolder,
        ranks: int,
        restarts: int,
        give_up: Callable[[str], None],
        mode: SyncMode | None = None,
        without_progress: int = 0,
    ) -> None:
        """`mode`: to train in, whatever happens; None: Sync, until another one wins enough. `without_progress`: as in
        `evaluate_faults`."""
        self._runtime = runtime
        self._give_up = give_up
        self._without_progress = without_progress
        self._repetition = RepeatedFailure()
        self._windows = RankWindows(runtime, LOCAL_WINDOW_STEPS)
        self._faults: list[FaultReport] = []
        self._next_adaptation_at = 0.0
        self._adapt_from_step = 0  # step
        self._last_warning = ""
        self._adaptation = AdaptationState(hysteresis=Hysteresis(first=MODE_COOL_DOWN_SECONDS), is_mode_fixed=mode is not None)
        member = Member(LOCAL_WORKER, LOCAL_ADDRESS, tuple(range(ranks)))
        self._plan = self._previous_plan = Plan()
        first = Plan(version=1, membership=1, members=(member,), store_port=_find_free_port(), restarts=restarts)
        self._publish(replace(first, sync_mode=mode or SyncMode.SYNC))
        self._previous_plan = self._plan

    async def run(self) -> None:
        """Until cancelled, or given up."""
        while True:
            await asyncio.sleep(LOCAL_POLL_INTERVAL_SECONDS)
            self._runtime.operator_contact.touch()
            try:
                outcome = self._evaluate()
            except Exception as error:  # without this task, a run whose launcher has failed would not end
                self._warn_once(error)
                continue
            for words in outcome.messages:
                log.warning("%s", words)
            self._adaptation = outcome.adaptation
            if outcome.plan is not self._plan:
                self._publish(outcome.plan)
            if outcome.give_up_reason:
                self._give_up(outcome.give_up_reason)
                return

    def _evaluate(self) -> LocalDecision:
        """Raises ValueError where what the ranks or the launcher have written makes no sense."""
        beat = Heartbeat.from_json(_read_json_object(self._runtime.heartbeat))
        new = self._take_faults()
        found = evaluate_faults(self._plan, self._faults, new, beat, self._repetition, self._without_progress)
        self._repetition = found.repetition
        outcome = replace(found, adapting=self._adaptation)
        if outcome.plan is self._plan and not outcome.messages and not outcome.give_up_reason:
            outcome = evaluate_refusal(self._plan, self._previous_plan, beat, self._adaptation)
        if outcome.plan is self._plan and not outcome.give_up_reason and self._is_adaptation_due(beat):
            windows = self._windows.build_evidence("", LOCAL_WORKER, beat.round).windows
            outcome = evaluate_step_times(self._plan, windows, self._adaptation, time.monotonic())
            if outcome.plan is not self._plan:
                self._adapt_from_step = beat.step + LOCAL_WINDOW_STEPS  # windows hold steps from before the change until then
        return outcome

    def _warn_once(self, error: Exception) -> None:
        """Once of each: it comes again with every look."""
        if str(error) != self._last_warning:
            self._last_warning = str(error)
            log.warning("cannot be judged: %r", error, exc_info=not isinstance(error, ValueError))

    def _publish(self, plan: Plan) -> None:
        self._previous_plan, self._plan = self._plan, plan.with_membership_secret(self._plan, secrets.token_hex(SECRET_BYTES))
        write_plan(self._runtime.plan, self._plan.build_worker_plan(LOCAL_WORKER))

    def _take_faults(self) -> list[FaultReport]:
        new = []
        for path in sorted(self._runtime.faults.glob("*.json")):
            try:
                new.append(FaultReport.from_json(_read_json_object(path)))
            except ValueError as error:
                log.warning("%s: %s", path.name, error)
            path.unlink()
        self._faults += new
        return new

    def _is_adaptation_due(self, heartbeat: Heartbeat) -> bool:
        now = time.monotonic()
        steady = heartbeat.steps_in_round >= LOCAL_WINDOW_STEPS and heartbeat.step >= self._adapt_from_step
        if not heartbeat.steered or not steady or now < self._next_adaptation_at:
            return False
        self._next_adaptation_at = now + ADAPTATION_INTERVAL_SECONDS
        return True


def build_local_settings(environment: dict[str, str]) -> LauncherSettings:
    return LauncherSettings.from_environment({**environment, "PACEKEEPER_WORKER": LOCAL_WORKER, "PACEKEEPER_POD_IP": LOCAL_ADDRESS})


@contextmanager
def open_local_runtime() -> Iterator[RuntimeFolder]:
    """A runtime folder for one run, in shared memory where that is large enough; gone afterwards."""
    shared = os.access(_SHARED_MEMORY, os.W_OK) and shutil.disk_usage(_SHARED_MEMORY).free >= _MIN_SHARED_MEMORY_BYTES
    parent = _SHARED_MEMORY if shared else Path(tempfile.gettempdir())
    _sweep_stale_folders(parent)
    folder, held = _make_locked_folder(parent)
    try:
        yield RuntimeFolder(folder).create()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)


def _make_locked_folder(parent: Path) -> tuple[Path, int]:
    """A folder of this run's own, and the open file whose lock holds it for as long as a process of the run is left."""
    while True:
        # Not a TemporaryDirectory: its finalizer would also run in every rank that ends.
        folder = Path(tempfile.mkdtemp(prefix=f"{_RUN_FOLDER_PREFIX}{os.getpid()}-", dir=parent))
        with suppress(FileNotFoundError):  # a run that sweeps was faster than the lock
            file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_there = folder.exists()
            except BlockingIOError:
                is_there = False  # it is being swept
            except OSError:
                is_there = True  # a file system without locks: no other run can take this one and remove the folder
            if is_there:
                return folder, file
            os.close(file)


def _sweep_stale_folders(parent: Path) -> None:
    """Removes what killed runs of this user have left.

    A lock says which runs are over, to every process that sees the folder. A process id would not: in a container that
    shares `/dev/shm` alone, it is another process's, or no process's.
    """
    for folder in parent.glob(f"{_RUN_FOLDER_PREFIX}*"):
        with suppress(OSError):  # it is held, or another user's, or another run sweeps it
            if folder.stat().st_uid != os.getuid():
                continue
            file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(file)


def _read_json_object(path: Path) -> dict[str, Any]:
    """Raises ValueError where the file holds something else than an object."""
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
