"""A disaster is played, in whichever world: strike, wait until the operator has noticed and all is calm again, look."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from pacekeeper_operator.api import Condition, JobPhase
from pacekeeper_operator.state import Draft

from ..faults.fault import Fault, Heal, Missed
from .disaster import Dies, Disaster, Episode, Sign

Object = Mapping[str, Any]
LOOK_SECONDS = 0.5
AT_ONCE_SECONDS = 0.1
"""Between two looks for the moment at which the operator dies."""
CALM_SECONDS = 8.0
"""So long all is well before the next fault comes: spares are warm by then, and rounds have trained."""
PATIENCE_SECONDS = 240.0
"""Until a fault is noticed, and until all is calm again."""
DOUBT_SECONDS = 5.0
"""What is not expected to be noticed has so long a time to show."""


class Stage(Protocol):
    """A world with one job in it."""

    def make_job(self) -> None: ...

    def strike(self, fault: Fault) -> Heal | None:
        """Raises Missed where there is nobody to strike."""

    def kill_operator(self) -> None:
        """It starts again by itself, now or with `revive_operator`."""

    def revive_operator(self) -> None: ...

    def job(self) -> Object:
        """As stored."""

    def draft(self) -> Draft | None:
        """Plan and bookkeeping as the operator has written them; None: not yet."""

    def incidents(self) -> list[Object]:
        """Of the job, as stored."""

    def pods(self) -> frozenset[str]:
        """Names of the job's."""


@dataclass(frozen=True)
class Healed:
    """How an incident is told. Left out are times, messages, and which pod and node it was: which of equal ones, is the
    scheduler's choice."""

    cause: str
    class_: str
    rank: int | None  # of the first after a fault only: whom its consequences strike first is chance
    remedy: str
    outcome: str

    def __str__(self) -> str:
        who = "" if self.rank is None else f" of rank {self.rank}"
        return f"{self.cause}{who} ({self.class_}): {self.remedy or 'no remedy'}, {self.outcome or 'open'}"


@dataclass(frozen=True)
class Look:
    """At the job, when all is calm."""

    phase: str
    membership: int
    round: int
    restarts: int
    workers: str
    made: int  # pods, ever

    def __str__(self) -> str:
        return (
            f"{self.phase}, membership {self.membership}, round {self.round}, restarts {self.restarts}, "
            f"workers {self.workers}, {self.made} made"
        )


Entry = str
"""One line of a sequence."""


async def perform(stage: Stage, disaster: Disaster, told: Callable[[str], None] = lambda _: None) -> tuple[Entry, ...]:
    """What happened, in an order that both worlds share. Where the job does not become calm it ends early, and says
    so."""
    performance = _Performance(stage, told)
    try:
        await performance.play(disaster)
    except _Never as error:
        performance.say(f"NOT WITHIN {PATIENCE_SECONDS:.0f} s: {error}")
    return tuple(performance.entries)


class _Never(Exception):
    """What was waited for has not come."""


class _Performance:
    def __init__(self, stage: Stage, told: Callable[[str], None]) -> None:
        self.entries: list[Entry] = []
        self._stage = stage
        self._told = told
        self._known: dict[str, None] = {}  # names of incidents that stand in the sequence

    def say(self, entry: Entry) -> None:
        self.entries.append(entry)
        self._told(entry)

    async def play(self, disaster: Disaster) -> None:
        self._stage.make_job()
        await self._calm()
        self._look()
        for episode in disaster.episodes:
            self.say(f"→ {episode}")
            await self._play(episode)

    async def _play(self, episode: Episode) -> None:
        stage, noticed = self._stage, self._notices(episode.sign)
        membership = self._membership()
        undo = None if episode.prelude is None else stage.strike(episode.prelude)
        if episode.operator is Dies.WITH_THE_FAULT:
            stage.kill_operator()
        try:
            heal = stage.strike(episode.what)
        except Missed as error:
            self.say(f"misses: {error}")
            heal = None
            noticed = lambda: True  # noqa: E731
        finally:
            if episode.operator is Dies.WITH_THE_FAULT:
                stage.revive_operator()
        if episode.operator is Dies.AT_THE_INCIDENT:
            await self._until(lambda: len(stage.incidents()) > len(self._known), "an incident", AT_ONCE_SECONDS)
            self._operator_dies()
        elif episode.operator is Dies.AT_THE_ROUND:
            await self._until(lambda: self._membership() > membership or noticed(), "a new plan", AT_ONCE_SECONDS)
            self._operator_dies()
        await self._until(noticed, f"{episode.sign} that tells of it")
        if episode.sign is Sign.NONE:
            await asyncio.sleep(DOUBT_SECONDS)
        await self._calm()
        self._look()
        if heal is not None:
            heal()
            if undo is not None:
                undo()
            self.say("is healed")
            await asyncio.sleep(DOUBT_SECONDS)
            await self._calm()
            self._look()

    def _operator_dies(self) -> None:
        self._stage.kill_operator()
        self._stage.revive_operator()

    def _notices(self, sign: Sign) -> Callable[[], bool]:
        """Asked from the time before the fault on."""
        stage, pods = self._stage, self._stage.pods()
        match sign:
            case Sign.INCIDENT:
                return lambda: len(stage.incidents()) > len(self._known)
            case Sign.SPEC:
                return lambda: _is_seen(stage.job())
            case Sign.PODS:
                return lambda: bool(stage.pods() - pods)
            case Sign.END:
                return lambda: _phase(stage.job()) in (JobPhase.COMPLETE, JobPhase.FAILED)
        return lambda: True

    async def _calm(self) -> None:
        quiet = 0.0
        waited = 0.0
        while quiet < CALM_SECONDS:
            if waited > PATIENCE_SECONDS:
                self._look()
                raise _Never("calm")
            await asyncio.sleep(LOOK_SECONDS)
            waited += LOOK_SECONDS
            quiet = quiet + LOOK_SECONDS if is_calm(self._stage.job(), self._stage.incidents()) else 0.0

    async def _until(self, condition: Callable[[], bool], what: str, pause: float = LOOK_SECONDS) -> None:
        waited = 0.0
        while not condition():
            if waited > PATIENCE_SECONDS:
                raise _Never(what)
            await asyncio.sleep(pause)
            waited += pause

    def _look(self) -> None:
        incidents = self._stage.incidents()
        new = [body for body in incidents if _name(body) not in self._known]
        for place, body in enumerate(sorted(new, key=_detected)):
            self._known[_name(body)] = None
            self.say(str(_healed(body, consequence=place > 0)))
            self._told(f"    {_name(body)}: {body['spec'].get('message', '')}")
        job, draft = self._stage.job(), self._stage.draft()
        if draft is not None:
            self.say(str(_looked_at(job, draft)))

    def _membership(self) -> int:
        draft = self._stage.draft()
        return 0 if draft is None else draft.plan.membership


def is_calm(job: Object, incidents: list[Object]) -> bool:
    """It is as its spec wants it, as far as its status knows, and no incident is open."""
    if not _is_seen(job) or not all(body.get("status", {}).get("outcome") for body in incidents):
        return False
    spec, status = job["spec"], job["status"]
    phase = _phase(job)
    if phase in (JobPhase.COMPLETE, JobPhase.FAILED):
        return True
    if spec.get("suspend"):
        holds = {found["type"]: found["status"] for found in status.get("conditions", ())}
        return phase == JobPhase.SUSPENDED and holds.get(Condition.SUSPENDED) == "True"
    workers = status.get("workers", {})
    full = workers.get("ready", 0) == spec["replicas"] and workers.get("spare", 0) == spec.get("spares", 0)
    return phase == JobPhase.RUNNING and full


def _is_seen(job: Object) -> bool:
    return bool(job.get("status", {}).get("observedGeneration") == job["metadata"]["generation"])


def _phase(job: Object) -> str:
    return str(job.get("status", {}).get("phase", ""))


def _name(body: Object) -> str:
    return str(body["metadata"]["name"])


def _detected(incident: Object) -> tuple[str, str]:
    return str(incident.get("status", {}).get("detected", "~")), _name(incident)


def _healed(incident: Object, *, consequence: bool) -> Healed:
    spec, status = incident["spec"], incident.get("status", {})
    return Healed(
        cause=spec["cause"],
        class_=spec["class"],
        rank=None if consequence else spec.get("rank"),
        remedy=status.get("remedy") or "",
        outcome=status.get("outcome") or "",
    )


def _looked_at(job: Object, draft: Draft) -> Look:
    return Look(
        phase=_phase(job),
        membership=draft.plan.membership,
        round=draft.state.placement.round_seen,
        restarts=draft.state.budget.total,
        workers=str(job.get("status", {}).get("workers", {}).get("summary", "")),
        made=sum(highest + 1 for highest in draft.state.placement.incarnations.values()),
    )
