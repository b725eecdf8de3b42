"""`pacekeeper run --local N`: operator and sidecar in one small controller beside the launcher, for one machine.

It uses the runtime folder as they do, and the same functions of `pacekeeper_analysis` decide: crashed ranks start again
in place (the launcher does that by itself), a hang is judged and ended, a steered script's shares are rebalanced.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from pacekeeper.runtime import Runtime, read_json, write_json
from pacekeeper.sidecar.ranks import Ranks as RankWindows
from pacekeeper_analysis import shares
from pacekeeper_analysis.diagnose import hang, straggler
from pacekeeper_analysis.plan import Member, Plan
from pacekeeper_analysis.reports import Fault, FaultKind, Heartbeat, LauncherState, RankWindow

from .settings import Settings

WORKER = "local"
ADDRESS = "127.0.0.1"
LOOK = 0.05
"""Seconds between two looks at the runtime folder."""
WINDOW_STEPS = 32
BALANCE_EVERY = 5.0
"""Seconds between two judgements of the ranks' paces."""
SMALLEST_WIN = 0.02
"""A change of shares must make the step shorter by at least this part."""
SLOWDOWN = 1.1
_SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "pacekeeper-"
_ENOUGH_BYTES = 1 << 30

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """What the controller has decided: the plan from now on, what it says about that, and whether it gives up."""

    plan: Plan
    words: tuple[str, ...] = ()
    give_up: str = ""


def judge_faults(plan: Plan, faults: Sequence[Fault], new: Sequence[Fault], beat: Heartbeat) -> Outcome:
    """`faults`: all so far, `new` of them since the last call. A hang costs one of the plan's restarts."""
    if beat.state is LauncherState.FAILED:
        return Outcome(plan, give_up=_last_words(faults))
    stalls = [fault for fault in new if fault.kind is FaultKind.STALLED and fault.round == beat.round]
    found = hang.verdict(stalls, plan.world_size) if stalls else None
    if found is None:
        return Outcome(plan)
    words = f"hang ({found.kind}): {'; '.join(found.evidence)}"
    left = plan.restarts - beat.restarts - 1
    if left < 0:
        return Outcome(plan, (words,), give_up=f"round {beat.round} hangs, and no restart is left")
    restarted = replace(
        plan, version=plan.version + 1, membership=plan.membership + 1, round=beat.round + 1, restarts=left
    )
    return Outcome(restarted, (words, f"ends round {beat.round} and starts round {restarted.round}"))


def judge_paces(plan: Plan, windows: Sequence[RankWindow]) -> Outcome:
    """New batch shares where a rank persistently holds the others back and they win enough."""
    window = straggler.align(windows)
    if window is None or min(window.shares) < 1 or window.samples[0].tolist() != window.samples[-1].tolist():
        return Outcome(plan)  # too few steps, or the shares have changed within them
    found = straggler.find(window, SLOWDOWN)
    balanced = shares.balance(window.cost_per_sample, window.shares)
    if balanced.win < SMALLEST_WIN or (not found.culprits and plan.shares is None):
        return Outcome(plan)
    words = (
        f"ranks {list(found.culprits)} are slow (slowdown {found.slowdown:.2f}): shares {list(window.shares)} → "
        f"{list(balanced.shares)}, expected to shorten a step by {balanced.win:.0%}",
    )
    return Outcome(replace(plan, version=plan.version + 1, shares=balanced.shares), words)


class LocalController:
    """Plays operator and sidecar through the runtime folder."""

    def __init__(self, runtime: Runtime, ranks: int, restarts: int, give_up: Callable[[str], None]) -> None:
        self._runtime = runtime
        self._give_up = give_up
        self._windows = RankWindows(runtime, WINDOW_STEPS)
        self._faults: list[Fault] = []
        self._balance_at = 0.0
        member = Member(WORKER, ADDRESS, tuple(range(ranks)))
        self._publish(Plan(version=1, membership=1, members=(member,), store_port=_free_port(), restarts=restarts))

    async def run(self) -> None:
        """Until cancelled, or given up."""
        while True:
            await asyncio.sleep(LOOK)
            self._runtime.contact.touch()
            beat = Heartbeat.from_json(read_json(self._runtime.heartbeat) or {})
            outcome = judge_faults(self._plan, self._faults, self._take_faults(), beat)
            if outcome == Outcome(self._plan) and self._is_time_to_balance(beat):
                windows = self._windows.evidence("", WORKER, beat.round).windows
                outcome = judge_paces(self._plan, windows)
            for words in outcome.words:
                log.warning("%s", words)
            if outcome.plan is not self._plan:
                self._publish(outcome.plan)
            if outcome.give_up:
                self._give_up(outcome.give_up)
                return

    def _publish(self, plan: Plan) -> None:
        self._plan = plan
        write_json(self._runtime.plan, plan.part(WORKER).to_json())

    def _take_faults(self) -> list[Fault]:
        new = []
        for path in sorted(self._runtime.faults.glob("*.json")):
            new.append(Fault.from_json(read_json(path) or {}))
            path.unlink()
        self._faults += new
        return new

    def _is_time_to_balance(self, beat: Heartbeat) -> bool:
        now = time.monotonic()
        if not beat.steered or beat.steps_in_round < WINDOW_STEPS or now < self._balance_at:
            return False
        self._balance_at = now + BALANCE_EVERY
        return True


def local_settings(environment: dict[str, str]) -> Settings:
    return Settings.from_environment({**environment, "PACEKEEPER_WORKER": WORKER, "PACEKEEPER_POD_IP": ADDRESS})


@contextmanager
def local_runtime() -> Iterator[Runtime]:
    """A runtime folder for one run, in shared memory where that is large enough; gone afterwards."""
    shared = os.access(_SHARED_MEMORY, os.W_OK) and shutil.disk_usage(_SHARED_MEMORY).free >= _ENOUGH_BYTES
    parent = _SHARED_MEMORY if shared else Path(tempfile.gettempdir())
    _sweep(parent)
    # Not a TemporaryDirectory: its finalizer would also run in every rank that ends.
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=parent))
    try:
        yield Runtime(folder).make()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sweep(parent: Path) -> None:
    """Removes what killed runs of this user have left: the name tells whose process it was."""
    for folder in parent.glob(f"{_PREFIX}*-*"):
        process = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if process.isdecimal() and not Path(f"/proc/{process}").exists() and folder.stat().st_uid == os.getuid():
            shutil.rmtree(folder, ignore_errors=True)


def _last_words(faults: Sequence[Fault]) -> str:
    failures = [fault for fault in faults if fault.kind in {FaultKind.RANK_FAILED, FaultKind.ROUND_FAILED}]
    return failures[-1].error.strip() if failures else "the launcher has given up"


def _free_port() -> int:
    with socket.create_server((ADDRESS, 0)) as server:
        port: int = server.getsockname()[1]
        return port
