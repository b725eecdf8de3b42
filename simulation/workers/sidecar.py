"""A sidecar's edge, simulated: the loops of `pacekeeper.sidecar.sidecar` between the runtime folder and the operator.

They are woken by what has changed; the real ones look every 0.05 s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from http import HTTPStatus
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from pacekeeper.sidecar.client import ANSWER_SECONDS, Rejected, Unavailable
from pacekeeper.sidecar.figures import FiguresTold, RankNow, seen
from pacekeeper.sidecar.launcher import SILENT_FROM, Silence
from pacekeeper.sidecar.leader import Leader, named_leader
from pacekeeper.sidecar.settings import SidecarSettings
from pacekeeper.sidecar.sidecar import PARTING_SECONDS, QUIET_FIELDS, RANKS_LOOK_SECONDS, _silence_to_tell
from pacekeeper_analysis.plan import Role, WorkerPlan
from pacekeeper_analysis.reports import Evidence, Fault, Heartbeat, LauncherState, RankFigures

from ..loop import Process
from ..operators.endpoint import Reply

if TYPE_CHECKING:
    from ..world import World
    from .rank import Rank
    from .worker import Worker

_STARTS = (0.3, 0.8)
"""Seconds from the container's start to the first call."""
_LOOKS = (0.02, 0.1)
"""Seconds until it sees what has changed."""
_LISTENS = 0.5
"""Seconds between two looks at a launcher that is silent."""
_FIRST_BACKOFF, _LONGEST_BACKOFF = 0.2, 5.0
_TOKEN_SECONDS = 2_880.0
"""Age at which the kubelet renews the token."""
_loud_fields = attrgetter(*(name for name in Heartbeat.__dataclass_fields__ if name not in QUIET_FIELDS))
_FINAL = (HTTPStatus.BAD_REQUEST, HTTPStatus.NOT_FOUND, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)


class Sidecar(Process):
    """One run of a worker's sidecar container."""

    def __init__(self, world: World, worker: Worker, number: int) -> None:
        super().__init__(world.loop, f"{worker.name}/sidecar")
        self._world = world
        self._worker = worker
        self._folder = worker.folder
        self._random = world.random(f"sidecar {worker.name} {number}")
        self._lines = {
            purpose: world.endpoint.line(worker.node, worker.address)
            for purpose in ("poll", "tell", "faults", "evidence")
        }
        self._leader = Leader()
        self.serves = False
        """Whether its ports are open."""
        self._loops: list[asyncio.Task[None]] = []
        self._figures = FiguresTold()
        self._told: tuple[Any, ...] | None = None
        self._changed = asyncio.Event()
        self._asked = asyncio.Event()
        self._delivering: dict[str, None] = {}
        self._silence = Silence()
        self._listening = False
        self._token, self._token_until = "", -1.0

    def start(self) -> None:
        self.after(self._random.uniform(*_STARTS), self._begin)

    def _begin(self) -> None:
        self.serves = True
        work = {"poll": self._follow_plan(), "tell": self._tell_changes(), "evidence": self._answer_requests()}
        self._loops = [self.spawn(loop, name=f"{self._worker.name}/{name}") for name, loop in work.items()]
        self._look_at_ranks()
        self.look_at_heartbeat()
        self.look_at_faults()
        self._see_request()
        self.listen()

    def end(self) -> None:
        """SIGTERM: it says what it has not said yet, and ends."""
        self.after(0.0, self._end)

    def _end(self) -> None:
        for loop in self._loops:
            loop.cancel()
        self.spawn(self._part(), name=f"{self._worker.name}/part")

    # What it sees.

    def look_at_heartbeat(self) -> None:
        """It may have changed."""
        if self.serves and not self._changed.is_set() and self._loud() != self._told:
            self._changed.set()

    def _look_at_ranks(self) -> None:
        plan = self._folder.plan
        band = WorkerPlan.figures_band if plan is None else plan.figures_band
        self._figures.look([_seen(rank) for rank in self._ranks()], band, self._world.now())
        self.look_at_heartbeat()
        self.after(RANKS_LOOK_SECONDS, self._look_at_ranks)

    def _ranks(self) -> list[Rank]:
        return [rank for rank in self._worker.launcher.ranks if rank.run is not None]

    def look_at_faults(self) -> None:
        """There may be new ones."""
        if not self.serves:
            return
        for name in self._folder.faults:
            if name not in self._delivering:
                self._delivering[name] = None
                self.after(self._random.uniform(*_LOOKS), self._begin_delivery, name)

    def listen(self) -> None:
        """The launcher may have fallen silent."""
        if self.serves and not self._listening:
            self._listening = True
            self._listen()

    def _listen(self) -> None:
        launcher, now = self._worker.launcher, self._world.now()
        sign = launcher.sign()
        self._silence.listen(None if sign is None else int(1e9 * sign), now)
        self.look_at_heartbeat()
        self._listening = sign is not None and (launcher.paused or launcher.dead)
        if self._listening:
            self.after(_LISTENS, self._listen)

    def _heartbeat(self) -> dict[str, Any]:
        """As it is to be sent now."""
        self._worker.launcher.refresh()
        seconds = self._silence.seconds
        return {
            **vars(self._folder.heartbeat),
            "gpus": [vars(health) for health in self._folder.heartbeat.gpus],
            "start": [vars(stage) for stage in self._folder.heartbeat.start],
            "figures": [asdict(each) for each in self._as_told(self._figures.tell())],
            "launcher_silent_seconds": round(seconds, 1) if seconds >= SILENT_FROM else 0.0,
            "sent_at": self._world.wall(self._worker.node),
        }

    def _as_told(self, figures: tuple[RankFigures, ...]) -> tuple[RankFigures, ...]:
        match self._worker.figures_lie:
            case "huge":
                return tuple(replace(each, compute_seconds=1e9, compute_seconds_per_sample=1e8) for each in figures)
            case "foreign":
                return tuple(replace(each, rank=rank) for each in figures for rank in range(each.rank + 8))
        return figures

    def _loud(self) -> tuple[Any, ...]:
        """The heartbeat without what can wait."""
        beat, silence = self._folder.heartbeat, _silence_to_tell(self._silence.seconds)
        return _loud_fields(beat), beat.gpu_signs, silence, self._figures.news

    # Its loops.

    async def _follow_plan(self) -> None:
        backoff = self._backoff()
        while True:
            try:
                await self._poll("poll", SidecarSettings.poll_seconds)
                backoff.reset()
            except (Unavailable, Rejected):
                await backoff.sleep()

    async def _tell_changes(self) -> None:
        backoff = self._backoff()
        while True:
            await self._changed.wait()
            await asyncio.sleep(self._random.uniform(*_LOOKS))
            self._changed.clear()
            while (now := self._loud()) != self._told:
                try:
                    await self._poll("tell", 0.0)
                    self._told = now
                    backoff.reset()
                except (Unavailable, Rejected):
                    await backoff.sleep()

    def _begin_delivery(self, name: str) -> None:
        self.spawn(self._deliver(name), name=f"{self._worker.name}/{name}")

    async def _deliver(self, name: str) -> None:
        backoff = self._backoff()
        fault = self._folder.faults.get(name)
        while fault is not None:
            try:
                await self._send_fault(fault)
                break
            except Unavailable:
                await backoff.sleep()
            except Rejected as error:
                self._world.story.tell(self._worker.name, f"fault {name} is dropped: {error}")
                break
        self._folder.faults.pop(name, None)
        self._delivering.pop(name, None)

    async def _send_fault(self, fault: Fault) -> None:
        said = replace(fault, sent_at=self._world.wall(self._worker.node))
        await self._post("faults", "/v1/faults", said.to_json(), {}, ANSWER_SECONDS)
        self._in_contact()

    async def _answer_requests(self) -> None:
        answered = ""
        backoff = self._backoff()
        while True:
            await self._asked.wait()
            self._asked.clear()
            while (request := self._request()) not in ("", answered):
                await asyncio.sleep(self._random.uniform(*_LOOKS))
                evidence = self._evidence(request)
                try:
                    await self._post("evidence", f"/v1/evidence/{request}", evidence.to_json(), {}, ANSWER_SECONDS)
                    answered = request
                    backoff.reset()
                except Rejected:
                    answered = request
                except Unavailable:
                    await backoff.sleep()

    def _request(self) -> str:
        plan = self._folder.plan
        return plan.evidence_request if plan is not None and plan.role is Role.MEMBER else ""

    def _see_request(self) -> None:
        if self._request():
            self._asked.set()

    def _evidence(self, request: str) -> Evidence:
        windows = tuple(rank.window() for rank in self._ranks())
        return Evidence(request, self._worker.name, self._folder.heartbeat.round, windows)

    async def _part(self) -> None:
        """The launcher ends before its sidecar is told to: its last words are there."""
        backoff = self._backoff()
        try:
            async with asyncio.timeout(PARTING_SECONDS):
                while (now := self._loud()) != self._told:
                    try:
                        await self._poll("tell", 0.0)
                        self._told = now
                    except (Unavailable, Rejected):
                        await backoff.sleep()
                await asyncio.gather(*(self._deliver(name) for name in list(self._folder.faults)))
        except TimeoutError:
            pass
        self.kill()

    # Calls.

    async def _poll(self, line: str, wait: float) -> None:
        folder = self._folder
        after = -1 if folder.plan is None else folder.plan.version
        query = {"after": str(after), "wait": f"{wait:g}"}
        answer = await self._post(line, "/v1/plan", self._heartbeat(), query, wait + ANSWER_SECONDS)
        self._in_contact()
        if answer is None:
            return
        plan = WorkerPlan.from_json(answer)
        if folder.plan is None or plan.version > folder.plan.version:
            folder.plan = plan
            self._worker.launcher.read_plan()
            self._see_request()

    def _in_contact(self) -> None:
        self._folder.contact = self._world.now()
        if self._folder.heartbeat.state is LauncherState.LOST:
            self._worker.launcher.wake()

    async def _post(self, line: str, path: str, body: dict[str, Any], query: Mapping[str, str], seconds: float) -> Any:
        """The parsed answer; None where there is none. Raises Unavailable or Rejected."""
        called = self._leader.address
        status, answer = await self._call(line, called, path, body, query, seconds)
        named = named_leader(answer) if status == HTTPStatus.SERVICE_UNAVAILABLE else None
        if named is not None:
            self._leader.hear(named, self._world.now())
            if self._leader.address not in ("", called):
                status, answer = await self._call(line, self._leader.address, path, body, query, seconds)
        if status == HTTPStatus.OK:
            return answer
        if status < HTTPStatus.MULTIPLE_CHOICES:
            return None
        if status in _FINAL:
            raise Rejected(f"{path}: status {status}: {answer}")
        raise Unavailable(f"{path}: status {status}: {answer}")

    async def _call(
        self, line: str, leader: str, path: str, body: dict[str, Any], query: Mapping[str, str], seconds: float
    ) -> Reply:
        """Raises Unavailable."""
        try:
            async with asyncio.timeout(seconds):
                return await self._lines[line].call("POST", path, query, body, self._proof(), leader)
        except (TimeoutError, OSError) as error:
            if leader:
                self._leader.gives_no_answer(leader, self._world.now())
            raise Unavailable(f"{path}: {error!r}") from error

    def _proof(self) -> str:
        if self._world.now() >= self._token_until:
            self._token = self._world.api.mint_token(self._worker.pod)
            self._token_until = self._world.now() + _TOKEN_SECONDS
        return self._token

    def _backoff(self) -> _Backoff:
        return _Backoff(self._random.uniform)


def _seen(rank: Rank) -> RankNow:
    return seen(rank.number, rank.history, 0 if rank.leg is None else rank.leg.share)


class _Backoff:
    """As the real one's."""

    def __init__(self, uniform: Callable[[float, float], float]) -> None:
        self._uniform = uniform
        self._next = _FIRST_BACKOFF

    def reset(self) -> None:
        self._next = _FIRST_BACKOFF

    async def sleep(self) -> None:
        await asyncio.sleep(self._next * self._uniform(0.5, 1.0))
        self._next = min(2 * self._next, _LONGEST_BACKOFF)
