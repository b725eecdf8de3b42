"""What workers have said since this operator began to serve: soft state, told anew within seconds to the next operator.

Nothing here is ever needed for correctness. A fault stays unacknowledged, and so is sent again, until what was decided
about it is written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

from pacekeeper_analysis.plan import Plan
from pacekeeper_analysis.reports import Evidence, Heartbeat

from ..api import Job, JobPhase
from ..cluster import Listing, Object
from ..gangs import Gang
from ..observation import Localised, Metrics, NodeCheck, Ruling, Surroundings, TemplateVerdict
from ..queues import Turn
from ..state import Case, Draft
from .faults import OpenFaults
from .figures import NOTHING, Rows
from .lasting import Paces
from .neighbourhood import Neighbourhood, Shown
from .readers import Readers
from .store import Key, key_of

SHOWN = frozenset({"job", "draft", "phase"})
"""What of a job others look at."""


@dataclass
class Contact:
    """One worker's voice."""

    heartbeat: Heartbeat  # its times are of the operator's clock
    at: float  # of its last sign, seconds since the epoch by the operator's clock
    polling: int = 0  # polls that are being held
    cut: bool = False  # its connection has ended in the middle of the last one
    state_since: float = 0.0  # when it was first heard to be in the state that it is in
    stepped_at: float = 0.0  # when it was first heard to have completed its last step; 0: not known
    said: Heartbeat = field(default_factory=Heartbeat)  # in the worker's own words: its times are of the worker's clock
    figures: Rows = field(default_factory=lambda: NOTHING)  # of its ranks; the heartbeats are kept without
    phase: float = 0.0  # which part of the time between two polls is its own, from 0 to below 1

    def heard(self, now: float, seconds: float) -> bool:
        """Whether it is there now, or was within so many seconds. While a poll is held, its machine is: or the kernel
        would end the connection (`connections.UNHEARD_SECONDS`)."""
        return self.polling > 0 or now - self.at <= seconds


@dataclass
class JobMemory:
    """One job as this operator knows it. `draft` is what is written in the API server, and `resource_version` of it."""

    job: Job | None = None
    draft: Draft | None = None
    unknown: Mapping[str, Any] = field(default_factory=dict)  # what is written there beside the draft
    resource_version: str = ""
    doubted: bool = False  # a list has shown that something else is written by now, or nothing
    phase: JobPhase | None = None
    heard: int = 0  # members that the last pass has heard of
    contacts: dict[str, Contact] = field(default_factory=dict)
    faults: OpenFaults = field(default_factory=OpenFaults)
    evidence: dict[str, Evidence] = field(default_factory=dict)  # by worker, of the request that is out
    probes: dict[str, Evidence] = field(default_factory=dict)  # by worker, of the probe of links that is out
    template: TemplateVerdict | None = None  # the API server's last word
    turn: Turn | None = None  # what its queue has said last
    gathered: tuple[Gang, str] | None = None  # the last gang that was placed together, and the PodGroup of its pods
    gathering: asyncio.Lock = field(default_factory=asyncio.Lock)  # once for all pods of a gang
    metrics: Metrics = field(default_factory=Metrics)  # as the last pass has found them
    paces: Paces = field(default_factory=Paces)  # of its ranks, in the last windows
    rulings: dict[Case, Ruling] = field(default_factory=dict)  # what has become of the nodes that incidents blame
    checks: dict[str, NodeCheck] = field(default_factory=dict)  # by UID of a node that the job has asked about
    patterns: dict[int, bytes] = field(default_factory=dict)  # by rank, of the behaviour window that is out
    pattern_bytes: int = 0  # of them all
    patterns_at: float = 0.0  # when the newest of them came
    localised: Localised | None = None  # what the last window has come to
    kept: asyncio.Lock = field(default_factory=asyncio.Lock)  # held by whoever keeps the job, or takes it down
    wake: asyncio.Event = field(default_factory=asyncio.Event)  # there is something new for the reconcile loop
    polls: Readers = field(default_factory=Readers)  # who waits until the next version of the plan is written
    senders: Readers = field(default_factory=Readers)  # of faults, who wait until the next draft is written
    shows: Callable[[JobMemory], None] | None = field(default=None, repr=False, compare=False)
    """Called when something has changed that others look at."""

    def __setattr__(self, name: str, value: object) -> None:
        """Whoever changes it: so that nobody forgets to say so."""
        super().__setattr__(name, value)
        if name in SHOWN and self.shows is not None:
            self.shows(self)

    @property
    def read(self) -> bool:
        """Whether what is written of it is known, and nobody has shown that it is something else by now."""
        return self.draft is not None and bool(self.resource_version) and not self.doubted

    @property
    def plan(self) -> Plan | None:
        return None if self.draft is None else self.draft.plan

    def publish(self, draft: Draft, resource_version: str) -> None:
        """What is written now: held polls and faults are answered by it. Whoever joins or leaves is told first."""
        known = {worker.name for worker in draft.state.placement.workers}
        wanted = {quarantine.case for quarantine in draft.state.incidents.quarantines}
        before, plan = self.plan, draft.plan
        if before is None or before.profile != plan.profile:
            self.patterns, self.pattern_bytes = {}, 0
        self.draft, self.resource_version = draft, resource_version
        if self.faults:
            settled = draft.state.incidents.names_settled
            self.faults.keep(lambda fault: fault.name not in settled and fault.worker in known)
        self.contacts = {name: contact for name, contact in self.contacts.items() if name in known}
        self.evidence = {n: e for n, e in self.evidence.items() if e.request == plan.evidence_request}
        probe = "" if plan.probe is None else plan.probe.name
        self.probes = {n: e for n, e in self.probes.items() if e.request == probe}
        self.rulings = {case: ruling for case, ruling in self.rulings.items() if case in wanted}
        self.senders.tell()
        if before is None or before.version != plan.version:
            self.polls.tell(first=_members(before) ^ _members(plan))


class Memory:
    """All jobs of this operator."""

    def __init__(self, started_at: float) -> None:
        self.started_at = started_at  # seconds since the epoch
        self._jobs: dict[Key, JobMemory] = {}
        self._neighbourhood = Neighbourhood()
        self._changed: dict[Key, None] = {}  # jobs of which it does not know how they are now, in order
        self._awaited = WeakValueDictionary[Key, asyncio.Event]()  # kept by those who wait

    def of(self, job: Job) -> JobMemory:
        """Of this very job: an earlier one that had its name is forgotten. A later one stays: the earlier one, whose
        loop is still ending, gets a memory that nobody else sees."""
        key = (job.namespace, job.name)
        known = self._jobs.get(key)
        if known is not None and known.job is not None and known.job.uid == job.uid:
            return known
        fresh = JobMemory(job)
        if known is None or known.job is None or known.job.created_at <= job.created_at:
            if known is not None:
                self._drop(key, known)
            self._jobs[key] = fresh
            fresh.shows = lambda _: self._show(key)
        return fresh

    def find(self, namespace: str, name: str) -> JobMemory | None:
        return self._jobs.get((namespace, name))

    def forget(self, job: Job) -> None:
        known = self.find(job.namespace, job.name)
        if known is not None and known.job is not None and known.job.uid == job.uid:
            del self._jobs[job.namespace, job.name]
            self._drop((job.namespace, job.name), known)

    def hear(self, job: JobMemory, now: float) -> None:
        """One of its workers has spoken."""
        if job.job is not None and self.find(job.job.namespace, job.job.name) is job:
            self._neighbourhood.hear(job.job.uid, now)

    def hold(self, job: JobMemory, polls: int) -> None:
        """So many more polls of its workers are held, or fewer."""
        if job.job is not None:
            self._neighbourhood.hold(job.job.uid, polls)

    def around(self, job: Job, draft: Draft, now: float) -> Surroundings:
        """What other jobs show that concerns this one, whose draft is looked at."""
        for key in self._changed:
            self._neighbourhood.put(key, _shown(self._jobs.get(key)), now)
        self._changed.clear()
        return self._neighbourhood.around(job, draft, now)

    def prove_by(self, states: Listing, namespace: str) -> dict[Key, Object]:
        """These are all bookkeepings of a namespace ("": of all): what is known otherwise, and not by a later write, is
        doubted from now on. Returns those of jobs of which nothing is known."""
        written = {key_of(body): body for body in states.items}
        for key, job in self:
            version = job.resource_version
            if namespace not in ("", key[0]) or not version or int(version) > states.version:
                continue
            if key not in written or written[key]["metadata"]["resourceVersion"] != version:
                job.doubted = True
                job.wake.set()
        known = {key for key, job in self if job.draft is not None}
        return {key: body for key, body in written.items() if key not in known}

    def _drop(self, key: Key, job: JobMemory) -> None:
        """Whatever becomes of it, others look at it no more."""
        job.shows = None
        self._changed[key] = None
        if job.job is not None:
            self._neighbourhood.forget(job.job.uid)

    def __iter__(self) -> Iterator[tuple[Key, JobMemory]]:
        return iter(list(self._jobs.items()))

    async def news_of(self, namespace: str, job: str) -> None:
        """Returns when something of the job has become known, or has changed, that others look at."""
        await self._awaited.setdefault((namespace, job), asyncio.Event()).wait()

    def _show(self, key: Key) -> None:
        self._changed[key] = None
        awaited = self._awaited.pop(key, None)
        if awaited is not None:
            awaited.set()

    def wake_all(self) -> None:
        for _, job in self:
            job.wake.set()

    def wake(self, namespace: str, job: str) -> JobMemory | None:
        """That of the job that looks around now; None: nothing is known of it."""
        memory = self.find(namespace, job)
        if memory is not None:
            memory.wake.set()
        return memory


def _members(plan: Plan | None) -> set[str]:
    return set() if plan is None else {member.worker for member in plan.members}


def _shown(memory: JobMemory | None) -> Shown | None:
    """None: nothing is known of it (yet)."""
    if memory is None or memory.job is None or memory.draft is None:
        return None
    return Shown.of(memory.job, memory.draft, memory.phase)
