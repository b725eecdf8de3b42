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

from pacekeeper.runtime import Runtime, read_json, write_plan
from pacekeeper.sidecar.ranks import RankRings as RankWindows
from pacekeeper_analysis import adapt
from pacekeeper_analysis.adapt import Hysteresis, Trouble, Way
from pacekeeper_analysis.diagnose import hang
from pacekeeper_analysis.diagnose.repetition import Repetition
from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.plan import SECRET_BYTES, Member, Plan, SyncMode
from pacekeeper_analysis.reports import Fault, FaultKind, Heartbeat, LauncherState, RankWindow

from .settings import LauncherSettings
from .words import describe

WORKER = "local"
ADDRESS = "127.0.0.1"
LOOK = 0.05
"""Seconds between two looks at the runtime folder."""
WINDOW_STEPS = 32
JUDGE_EVERY = 5.0
"""Seconds between two judgements of the ranks' paces."""
SLOWDOWN = 1.1
ANSWERS = 3
"""Judgements in a row that must ask for another mode: what passes by itself is no reason to leave, or to return."""
HOLD_SECONDS = 60.0
"""A mode is kept so long at least, and longer each time that it is left again soon."""
_SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "pacekeeper-run-"
_ENOUGH_BYTES = 1 << 30

log = logging.getLogger(__name__)


_NOT_YET = Repetition()


@dataclass(frozen=True)
class Adapting:
    """What the controller keeps in mind of how the job trains."""

    trouble: Trouble = Trouble.NONE  # that led to the Local-SGD mode in force
    wanted: int = 0  # judgements in a row that asked for another mode
    changes: Hysteresis = field(default_factory=Hysteresis)
    fixed: bool = False  # the mode is the user's choice
    refused: str = ""  # why the ranks did not follow a change: nothing is tried any more


@dataclass(frozen=True)
class LocalResult:
    """What the controller has decided: the plan from now on, what it says about that, and whether it gives up."""

    plan: Plan
    words: tuple[str, ...] = ()
    give_up: str = ""
    adapting: Adapting = field(default_factory=Adapting)
    repetition: Repetition = _NOT_YET


def judge_faults(
    plan: Plan,
    faults: Sequence[Fault],
    new: Sequence[Fault],
    beat: Heartbeat,
    repetition: Repetition = _NOT_YET,
    without_progress: int = 0,
) -> LocalResult:
    """`faults`: all so far, `new` of them since the last call. A hang costs one of the plan's restarts.

    repetition: before `new`. without_progress: so many rounds may end at the same step; 0: without limit.
    """
    if beat.state is LauncherState.FAILED:
        return LocalResult(plan, give_up=_last_words(faults))
    for fault in new:
        repetition = repetition.after(fault) if fault.kind is FaultKind.RANK_FAILED else repetition
    if repetition.reaches(without_progress):
        return LocalResult(plan, give_up=f"{repetition}: {_last_words(faults)}", repetition=repetition)
    stalls = [fault for fault in new if fault.kind is FaultKind.STALLED and fault.round == beat.round]
    found = hang.verdict(stalls, plan.world_size) if stalls else None
    after = None if found is None else repetition.after_hang(found, stalls)
    if found is None or after is None:
        return LocalResult(plan, repetition=repetition)
    words = f"hang ({found.kind}): {'; '.join(found.evidence)}"
    if after.reaches(without_progress):
        return LocalResult(plan, give_up=f"{after}: {words}", repetition=after)
    left = plan.restarts - beat.restarts - 1
    if left < 0:
        return LocalResult(plan, (words,), give_up=f"round {beat.round} hangs, and no restart is left")
    restarted = replace(
        plan, version=plan.version + 1, membership=plan.membership + 1, round=beat.round + 1, restarts=left
    )
    told = (words, f"ends round {beat.round} and starts round {restarted.round}")
    return LocalResult(restarted, told, repetition=after)


def judge_paces(plan: Plan, windows: Sequence[RankWindow], adapting: Adapting, now: float) -> LocalResult:
    """Another way to train where one wins enough: other shares at once, another mode when several judgements ask."""
    in_force = {window.sync_mode or SyncMode.SYNC for window in windows}
    if adapting.refused or in_force != {plan.sync_mode}:
        return LocalResult(plan, adapting=adapting)  # the ranks do not follow, or not yet
    if plan.sync_mode is SyncMode.SYNC:
        trouble, way, why = _way_to_adapt(plan, windows, adapting.fixed)
    elif adapting.fixed:
        return LocalResult(plan, adapting=adapting)
    else:
        trouble, way, why = Trouble.NONE, adapt.way_back(windows, threshold=SLOWDOWN, trouble=adapting.trouble), ()
    if way is None:
        return LocalResult(plan, adapting=replace(adapting, wanted=0))
    words = (*why, f"{way.remedy}: {way.reason}")
    if way.mode is plan.sync_mode:
        return LocalResult(way.applied_to(plan), words, adapting=replace(adapting, wanted=0))
    asked = replace(adapting, wanted=adapting.wanted + 1)
    if asked.wanted < ANSWERS or not adapting.changes.allows(now):
        return LocalResult(plan, adapting=asked)
    return LocalResult(way.applied_to(plan), words, adapting=Adapting(trouble, changes=adapting.changes.changed(now)))


def _way_to_adapt(
    plan: Plan, windows: Sequence[RankWindow], fixed: bool
) -> tuple[Trouble, Way | None, tuple[str, ...]]:
    """The trouble of a synchronous job, what to do about it, and why."""
    found = adapt.diagnose(windows, SLOWDOWN)
    if found is None:
        return Trouble.NONE, None, ()
    ways = adapt.ways(found, threshold=SLOWDOWN, sequence_cost=plan.sequence_cost)
    ways = tuple(way for way in ways if not way.refused)
    if fixed or adapt.exact_helps(found, ways):
        ways = tuple(way for way in ways if way.mode is SyncMode.SYNC)
    way = next(iter(ways), None)
    return found.trouble, way, (f"slowdown {found.slowdown:.2f}: {found.evidence[0]}",)


def judge_refusal(plan: Plan, before: Plan, beat: Heartbeat, adapting: Adapting) -> LocalResult:
    """Trains on as `before` where the ranks refuse the plan, and tries nothing else."""
    if not beat.refused or beat.plan_version < plan.version or adapting.refused:
        return LocalResult(plan, adapting=adapting)
    as_before = replace(
        before, version=plan.version + 1, membership=plan.membership, round=plan.round, restarts=plan.restarts
    )
    words = f"the ranks refuse the change, and train on as they did: {beat.refused}"
    return LocalResult(as_before, (words,), adapting=replace(adapting, refused=beat.refused))


class LocalController:
    """Plays operator and sidecar through the runtime folder."""

    def __init__(
        self,
        runtime: Runtime,
        ranks: int,
        restarts: int,
        give_up: Callable[[str], None],
        mode: SyncMode | None = None,
        without_progress: int = 0,
    ) -> None:
        """`mode`: to train in, whatever happens; None: Sync, until another one wins enough. `without_progress`: as in
        `judge_faults`."""
        self._runtime = runtime
        self._give_up = give_up
        self._without_progress = without_progress
        self._repetition = Repetition()
        self._windows = RankWindows(runtime, WINDOW_STEPS)
        self._faults: list[Fault] = []
        self._judge_at = 0.0
        self._judge_from = 0  # step
        self._complaint = ""
        self._adapting = Adapting(changes=Hysteresis(first=HOLD_SECONDS), fixed=mode is not None)
        member = Member(WORKER, ADDRESS, tuple(range(ranks)))
        self._plan = self._before = Plan()
        first = Plan(version=1, membership=1, members=(member,), store_port=_free_port(), restarts=restarts)
        self._publish(replace(first, sync_mode=mode or SyncMode.SYNC))
        self._before = self._plan

    async def run(self) -> None:
        """Until cancelled, or given up."""
        while True:
            await asyncio.sleep(LOOK)
            self._runtime.contact.touch()
            try:
                outcome = self._look()
            except Exception as error:  # without this task, a run whose launcher has failed would not end
                self._complain(error)
                continue
            for words in outcome.words:
                log.warning("%s", words)
            self._adapting = outcome.adapting
            if outcome.plan is not self._plan:
                self._publish(outcome.plan)
            if outcome.give_up:
                self._give_up(outcome.give_up)
                return

    def _look(self) -> LocalResult:
        """Raises ValueError where what the ranks or the launcher have written makes no sense."""
        beat = Heartbeat.from_json(_read(self._runtime.heartbeat))
        new = self._take_faults()
        found = judge_faults(self._plan, self._faults, new, beat, self._repetition, self._without_progress)
        self._repetition = found.repetition
        outcome = replace(found, adapting=self._adapting)
        if outcome.plan is self._plan and not outcome.words and not outcome.give_up:
            outcome = judge_refusal(self._plan, self._before, beat, self._adapting)
        if outcome.plan is self._plan and not outcome.give_up and self._is_time_to_judge(beat):
            windows = self._windows.evidence("", WORKER, beat.round).windows
            outcome = judge_paces(self._plan, windows, self._adapting, time.monotonic())
            if outcome.plan is not self._plan:
                self._judge_from = beat.step + WINDOW_STEPS  # windows hold steps from before the change until then
        return outcome

    def _complain(self, error: Exception) -> None:
        """Once of each: it comes again with every look."""
        if str(error) != self._complaint:
            self._complaint = str(error)
            log.warning("cannot be judged: %r", error, exc_info=not isinstance(error, ValueError))

    def _publish(self, plan: Plan) -> None:
        self._before, self._plan = self._plan, plan.sealed(self._plan, secrets.token_hex(SECRET_BYTES))
        write_plan(self._runtime.plan, self._plan.part(WORKER))

    def _take_faults(self) -> list[Fault]:
        new = []
        for path in sorted(self._runtime.faults.glob("*.json")):
            try:
                new.append(Fault.from_json(_read(path)))
            except ValueError as error:
                log.warning("%s: %s", path.name, error)
            path.unlink()
        self._faults += new
        return new

    def _is_time_to_judge(self, beat: Heartbeat) -> bool:
        now = time.monotonic()
        steady = beat.steps_in_round >= WINDOW_STEPS and beat.step >= self._judge_from
        if not beat.steered or not steady or now < self._judge_at:
            return False
        self._judge_at = now + JUDGE_EVERY
        return True


def local_settings(environment: dict[str, str]) -> LauncherSettings:
    return LauncherSettings.from_environment({**environment, "PACEKEEPER_WORKER": WORKER, "PACEKEEPER_POD_IP": ADDRESS})


@contextmanager
def local_runtime() -> Iterator[Runtime]:
    """A runtime folder for one run, in shared memory where that is large enough; gone afterwards."""
    shared = os.access(_SHARED_MEMORY, os.W_OK) and shutil.disk_usage(_SHARED_MEMORY).free >= _ENOUGH_BYTES
    parent = _SHARED_MEMORY if shared else Path(tempfile.gettempdir())
    _sweep(parent)
    folder, held = _make_held(parent)
    try:
        yield Runtime(folder).make()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)


def _make_held(parent: Path) -> tuple[Path, int]:
    """A folder of this run's own, and the open file whose lock holds it for as long as a process of the run is left."""
    while True:
        # Not a TemporaryDirectory: its finalizer would also run in every rank that ends.
        folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=parent))
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


def _sweep(parent: Path) -> None:
    """Removes what killed runs of this user have left.

    A lock says which runs are over, to every process that sees the folder. A process id would not: in a container that
    shares `/dev/shm` alone, it is another process's, or no process's.
    """
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # it is held, or another user's, or another run sweeps it
            if folder.stat().st_uid != os.getuid():
                continue
            file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(file)


def _read(path: Path) -> dict[str, Any]:
    """Raises ValueError where the file holds something else than an object."""
    content = read_json(path) or {}
    if not isinstance(content, dict):
        raise InputError(f"{path.name} holds a {type(content).__name__} instead of an object")
    return content


def _last_words(faults: Sequence[Fault]) -> str:
    failures = [fault for fault in faults if fault.kind in {FaultKind.RANK_FAILED, FaultKind.ROUND_FAILED}]
    return describe(failures[-1]) if failures else "the launcher has given up"


def _free_port() -> int:
    with socket.create_server((ADDRESS, 0)) as server:
        port: int = server.getsockname()[1]
        return port
