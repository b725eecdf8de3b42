"""What the sidecar does all the time: loops between the runtime folder and the operator.

None of them ever gives up: the operator may be away for hours, and the training goes on meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from dataclasses import replace
from pathlib import Path

from pacekeeper.runtime import Touched, elapsed, read_json, write_plan
from pacekeeper_analysis.behaviour.pattern import MOST_ANSWER_BYTES
from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.plan import EvidencePart, Role, WorkerPlan
from pacekeeper_analysis.reading import parse_json
from pacekeeper_analysis.reports import Evidence, Fault

from . import connections
from .client import OperatorClient, Rejected, Unavailable
from .connections import Connections
from .figures import FiguresTold
from .launcher import LauncherSeen
from .ranks import RankRings
from .settings import SidecarSettings

LOOK_SECONDS = 0.05
"""How often files are looked at. A look is a few system calls."""
QUIET_FIELDS = (
    *("step", "steps_in_round", "snapshot_step", "checkpoint_step"),
    *("checkpoint_age_seconds", "launcher_silent_seconds", "gpus", "figures"),
)
"""Fields of the heartbeat whose change can wait for the next poll, or has its own rule; of the GPUs' health, that of
their signs cannot wait."""
RANKS_LOOK_SECONDS = 1.0
"""How often the ranks' rings are looked at: the least time between two heartbeats that only tell of figures."""
SILENCE_TOLD_FROM, SILENCE_TOLD_TO = 5, 15
"""Seconds of the launcher's silence between which each second is told at once: the operator decides by them."""
ALONE_SECONDS = 3.0
"""A launcher that is alone says so more often than that."""
CONTACT_SECONDS = 2.0
"""The operator's last answer is to be no older for such a launcher."""
PARTING_SECONDS = 3.0
"""How long the operator may take to hear of the end."""

log = logging.getLogger(__name__)


class Sidecar:
    """Its loops share the plan that was fetched last."""

    def __init__(
        self, settings: SidecarSettings, client: OperatorClient, ranks: RankRings, connections: Connections
    ) -> None:
        self._settings = settings
        self._runtime = settings.runtime
        self._client = client
        self._ranks = ranks
        self._connections = connections
        self._plan = _plan_on_disk(settings.runtime.plan)
        self._launcher = LauncherSeen(settings.runtime, settings.worker)
        self._alone, self._contact = Touched(self._runtime.alone), Touched(self._runtime.contact)
        self._figures = FiguresTold()
        self._told: dict[str, object] = {}

    async def run(self) -> None:
        """Until cancelled. What the operator has not heard of by then, such as that the ranks have finished, it hears
        before this returns, if it answers."""
        loops = (
            *(self._look, self._look_at_ranks, self._look_at_connections, self._follow_plan),
            *(self._tell_changes, self._deliver_faults, self._answer_requests, self._deliver_probes),
            self._deliver_patterns,
        )
        try:
            async with asyncio.TaskGroup() as tasks:
                for loop in loops:
                    tasks.create_task(loop())
        finally:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PARTING_SECONDS):
                    await self._part()

    async def _part(self) -> None:
        """The launcher ends before its sidecar is told to: its last words are there."""
        self._launcher.look(time.monotonic())
        backoff = Backoff()
        while (now := self._loud()) != self._told:
            try:
                await self._tell(now)
            except (Unavailable, Rejected, InputError, OSError) as error:
                await backoff.sleep("the last heartbeat is not sent", error)
        await asyncio.gather(*(self._deliver(path) for path in self._reported()))

    async def _look(self) -> None:
        while True:
            self._launcher.look(time.monotonic())
            await asyncio.sleep(LOOK_SECONDS)

    async def _look_at_ranks(self) -> None:
        while True:
            band = WorkerPlan.figures_band if self._plan is None else self._plan.figures_band
            self._figures.look(self._ranks.seen(), band, time.monotonic())
            await asyncio.sleep(RANKS_LOOK_SECONDS)

    async def _look_at_connections(self) -> None:
        while True:
            self._connections.look(time.monotonic())
            self._connections.answer(self._settings.worker, self._launcher.heartbeat.round)
            await asyncio.sleep(connections.LOOK_SECONDS)

    async def _follow_plan(self) -> None:
        """Poll the plan; each poll carries the heartbeat. It may be held for twice as long as the one before was, so
        that an operator that stands still is soon given up where it has few workers."""
        backoff, wait, held = Backoff(), self._settings.poll_seconds, 0.0
        while True:
            began = time.monotonic()
            try:
                news = await self._poll(wait, min(self._settings.hold_seconds, max(wait, 2 * held)))
                held = held if news else time.monotonic() - began
                backoff.reset()
            except (Unavailable, Rejected, InputError, OSError) as error:  # the volume is full
                await backoff.sleep("no plan", error)

    async def _tell_changes(self) -> None:
        """Send the heartbeat at once when more than the step has changed, or figures are news, beside the poll that is
        being held."""
        backoff = Backoff()
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            now = self._loud()
            asked = self._is_asked_for_contact()  # at each look, or it would not know since when
            if now == self._told and not asked:
                continue
            try:
                await self._tell(now)
                backoff.reset()
            except (Unavailable, Rejected, InputError, OSError) as error:  # the volume has no room for the answer
                await backoff.sleep("heartbeat not sent", error)

    def _is_asked_for_contact(self) -> bool:
        """A launcher without peers ends its ranks by the age of the operator's last answer."""
        now, wall = elapsed(), time.time()
        alone, contact = self._alone.age(now, wall), self._contact.age(now, wall)
        return alone < ALONE_SECONDS and contact > CONTACT_SECONDS

    async def _tell(self, loud: dict[str, object]) -> None:
        await self._poll(wait=0)
        self._told = loud

    async def _deliver_faults(self) -> None:
        """Send each fault until the operator has acknowledged it; several at once, so that none waits for another."""
        under_way: dict[Path, asyncio.Task[None]] = {}
        while True:
            under_way = {path: task for path, task in under_way.items() if not task.done()}
            for path in self._reported():
                if path not in under_way:
                    under_way[path] = asyncio.create_task(self._deliver(path))
            await asyncio.sleep(LOOK_SECONDS)

    async def _deliver(self, path: Path) -> None:
        backoff = Backoff()
        fault = _read_fault(path)
        if fault is not None:
            fault = self._connections.told_with(fault, time.monotonic())
        while fault is not None:
            try:
                await self._client.fault(fault)
                self._in_contact()
                break
            except Unavailable as error:
                await backoff.sleep(f"fault {path.stem} not taken", error)
            except Rejected as error:
                log.error("fault %s is dropped: %s", path.stem, error)
                break
        _forget(path)

    async def _answer_requests(self) -> None:
        """Answer the plan's request for evidence, once."""
        answered = ""
        backoff = Backoff()
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            plan = self._plan
            if plan is None or plan.role is not Role.MEMBER or plan.evidence_request in ("", answered):
                continue
            evidence = self._ranks.evidence(
                plan.evidence_request,
                self._settings.worker,
                self._launcher.heartbeat.round,
                plan.evidence_parts,
            )
            if EvidencePart.LINKS in plan.evidence_parts:
                evidence = replace(evidence, links=self._connections.windows())
            try:
                await self._client.evidence(evidence)
                answered = plan.evidence_request
                backoff.reset()
            except Rejected as error:
                log.error("evidence %s is dropped: %s", plan.evidence_request, error)
                answered = plan.evidence_request
            except Unavailable as error:
                await backoff.sleep("evidence not taken", error)

    async def _deliver_probes(self) -> None:
        """What the launcher has measured for the plan's probe, once."""
        delivered = ""
        backoff = Backoff()
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            probe = None if self._plan is None else self._plan.probe
            if probe is None or probe.name == delivered:
                continue
            found = _probed(self._runtime.probes, probe.name, self._settings.worker, self._launcher.heartbeat.round)
            if found is None:
                continue
            try:
                await self._client.evidence(found)
                delivered = probe.name
                backoff.reset()
            except Rejected as error:
                log.error("probe %s is dropped: %s", probe.name, error)
                delivered = probe.name
            except Unavailable as error:
                await backoff.sleep("probe not taken", error)

    async def _deliver_patterns(self) -> None:
        """What ranks have written of behaviour windows, each once."""
        backoff = Backoff()
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            for path in filter(Path.is_file, self._runtime.patterns.glob("[!.]*.json")):
                window, _, rank = path.stem.rpartition(".")
                try:
                    await self._client.pattern(window, int(rank), _pattern_in(path))
                    backoff.reset()
                except Unavailable as error:
                    await backoff.sleep(f"pattern {path.stem} not taken", error)
                    continue
                except (Rejected, ValueError, OSError) as error:
                    log.error("pattern %s is dropped: %s", path.stem, error)
                _forget(path)

    async def _poll(self, wait: float, hold: float = 0.0) -> bool:
        """Whether there was an answer before it was due."""
        after = -1 if self._plan is None else self._plan.version
        beat = replace(self._launcher.heartbeat, figures=self._figures.tell())
        plan = await self._client.plan(beat, after, wait, hold)
        self._in_contact()
        if plan is not None and (self._plan is None or plan.version > self._plan.version):
            write_plan(self._runtime.plan, plan)
            self._plan = plan
        return plan is not None

    def _reported(self) -> list[Path]:
        return sorted(self._runtime.faults.glob("*.json"))

    def _in_contact(self) -> None:
        self._runtime.contact.touch()

    def _loud(self) -> dict[str, object]:
        """The heartbeat without what can wait."""
        beat = self._launcher.heartbeat
        loud = {name: value for name, value in beat.to_json().items() if name not in QUIET_FIELDS}
        silence = _silence_to_tell(beat.launcher_silent_seconds)
        return {**loud, "silence": silence, "gpu_signs": beat.gpu_signs, "figures": self._figures.news}


class Backoff:
    """Waits that double from 0.2 s to 5 s, with jitter, so that thousands of sidecars do not come back as one."""

    def __init__(self, first: float = 0.2, longest: float = 5.0) -> None:
        self._first, self._longest = first, longest
        self._next = first

    def reset(self) -> None:
        self._next = self._first

    async def sleep(self, what: str, why: Exception) -> None:
        if self._next == self._first:
            log.warning("%s: %s", what, why)
        await asyncio.sleep(self._next * random.uniform(0.5, 1.0))
        self._next = min(2 * self._next, self._longest)


def _silence_to_tell(seconds: float) -> int:
    """Another number whenever the operator is to hear of the launcher's silence, or of its end."""
    return min(int(seconds), SILENCE_TOLD_TO) if seconds >= SILENCE_TOLD_FROM else 0


def _read_fault(path: Path) -> Fault | None:
    try:
        return Fault.from_json(parse_json(path.read_bytes()))
    except (InputError, ValueError) as error:
        log.error("fault %s is dropped: %s", path.stem, error)
        return None


def _probed(path: Path, name: str, worker: str, round_: int) -> Evidence | None:
    """None: the launcher has not measured (all of) it yet."""
    try:
        written = read_json(path)
        if written is None or written.get("name") != name:
            return None
        return Evidence.from_json({"request": name, "worker": worker, "round": round_, "probes": written["probes"]})
    except (InputError, ValueError, KeyError, AttributeError):
        return None


def _pattern_in(path: Path) -> bytes:
    """What a rank has written. Raises OSError, and InputError where it is more than a rank sends."""
    if path.stat().st_size > MOST_ANSWER_BYTES:
        raise InputError(f"{path.name}: must be {MOST_ANSWER_BYTES} bytes at most")
    return path.read_bytes()


def _forget(path: Path) -> None:
    path.unlink(missing_ok=True)


def _plan_on_disk(path: Path) -> WorkerPlan | None:
    """The plan that an earlier run of this sidecar has fetched."""
    try:
        written = read_json(path)
        return None if written is None else WorkerPlan.from_json(written)
    except (InputError, ValueError):
        return None
