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

from ..api import TrainingJob, JobPhase
from ..cluster import Listing, Object
from ..gangs import Gang
from ..observation import LocalizedProfile, JobMetrics, NodeCheck, QuarantineDecision, ClusterView, TemplateVerdict
from ..queues import QueueDecision
from ..state import NodeKey, DesiredState
from .faults import OpenFaults
from .figures import NO_RANK_ROWS, RankRows
from .lasting import RelativeTimeHistory
from .neighbourhood import PeerJobs, JobSummary
from .readers import Waiters
from .store import Key, get_object_key

SHARED_FIELDS = frozenset({"job", "draft", "phase"})
"""What of a job others look at."""


@dataclass
class WorkerContact:
    """One worker's voice."""

    heartbeat: Heartbeat  # its times are of the operator's clock
    last_seen_at: float  # of its last sign, seconds since the epoch by the operator's clock
    open_polls: int = 0  # polls that are being held
    is_cut_off: bool = False  # its connection has ended in the middle of the last one
    state_since: float = 0.0  # when it was first heard to be in the state that it is in
    stepped_at: float = 0.0  # when it was first heard to have completed its last step; 0: not known
    raw_heartbeat: Heartbeat = field(default_factory=Heartbeat)  # in the worker's own words: its times are of the worker's clock
    rank_rows: RankRows = field(default_factory=lambda: NO_RANK_ROWS)  # of its ranks; the heartbeats are kept without
    poll_phase: float = 0.0  # which part of the time between two polls is its own, from 0 to below 1

    def is_reporting(self, now: float, seconds: float) -> bool:
        """Whether it is there now, or was within so many seconds. While a poll is held, its machine is: or the kernel
        would end the connection (`connections.UNHEARD_SECONDS`)."""
        return self.open_polls > 0 or now - self.last_seen_at <= seconds


@dataclass
class JobCache:
    """One job as this operator knows it. `draft` is what is written in the API server, and `resource_version` of it."""

    job: TrainingJob | None = None
    desired: DesiredState | None = None
    unknown_fields: Mapping[str, Any] = field(default_factory=dict)  # what is written there beside the draft
    resource_version: str = ""
    needs_reload: bool = False  # a list has shown that something else is written by now, or nothing
    phase: JobPhase | None = None
    reporting_members: int = 0  # members that the last pass has heard of
    contacts: dict[str, WorkerContact] = field(default_factory=dict)
    faults: OpenFaults = field(default_factory=OpenFaults)
    evidence: dict[str, Evidence] = field(default_factory=dict)  # by worker, of the request that is out
    probes: dict[str, Evidence] = field(default_factory=dict)  # by worker, of the probe of links that is out
    template: TemplateVerdict | None = None  # the API server's last word
    queue_decision: QueueDecision | None = None  # what its queue has said last
    pod_group: tuple[Gang, str] | None = None  # the last gang that was placed together, and the PodGroup of its pods
    pod_group_lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # once for all pods of a gang
    metrics: JobMetrics = field(default_factory=JobMetrics)  # as the last pass has found them
    relative_times: RelativeTimeHistory = field(default_factory=RelativeTimeHistory)  # of its ranks, in the last windows
    quarantine_decisions: dict[NodeKey, QuarantineDecision] = field(default_factory=dict)  # what has become of the nodes that incidents blame
    node_checks: dict[str, NodeCheck] = field(default_factory=dict)  # by UID of a node that the job has asked about
    profile_answers: dict[int, bytes] = field(default_factory=dict)  # by rank, of the behaviour window that is out
    profile_answer_bytes: int = 0  # of them all
    last_profile_answer_at: float = 0.0  # when the newest of them came
    localized_profile: LocalizedProfile | None = None  # what the last window has come to
    reconcile_lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # held by whoever keeps the job, or takes it down
    wake: asyncio.Event = field(default_factory=asyncio.Event)  # there is something new for the reconcile loop
    plan_waiters: Waiters = field(default_factory=Waiters)  # who waits until the next version of the plan is written
    fault_waiters: Waiters = field(default_factory=Waiters)  # of faults, who wait until the next draft is written
    on_change: Callable[[JobCache], None] | None = field(default=None, repr=False, compare=False)
    """Called when something has changed that others look at."""

    def __setattr__(self, name: str, value: object) -> None:
        """Whoever changes it: so that nobody forgets to say so."""
        super().__setattr__(name, value)
        if name in SHARED_FIELDS and self.on_change is not None:
            self.on_change(self)

    @property
    def is_loaded(self) -> bool:
        """Whether what is written of it is known, and nobody has shown that it is something else by now."""
        return self.desired is not None and bool(self.resource_version) and not self.needs_reload

    @property
    def plan(self) -> Plan | None:
        return None if self.desired is None else self.desired.plan

    def publish(self, desired: DesiredState, resource_version: str) -> None:
        """What is written now: held polls and faults are answered by it. Whoever joins or leaves is told first."""
        known = {worker.name for worker in desired.state.placement.workers}
        wanted = {quarantine.node_key for quarantine in desired.state.incidents.quarantines}
        before, plan = self.plan, desired.plan
        if before is None or before.profile != plan.profile:
            self.profile_answers, self.profile_answer_bytes = {}, 0
        self.desired, self.resource_version = desired, resource_version
        if self.faults:
            settled = desired.state.incidents.settled_names
            self.faults.retain(lambda fault: fault.name not in settled and fault.worker in known)
        self.contacts = {name: contact for name, contact in self.contacts.items() if name in known}
        self.evidence = {n: e for n, e in self.evidence.items() if e.request == plan.evidence_request}
        probe = "" if plan.probe is None else plan.probe.name
        self.probes = {n: e for n, e in self.probes.items() if e.request == probe}
        self.quarantine_decisions = {case: ruling for case, ruling in self.quarantine_decisions.items() if case in wanted}
        self.fault_waiters.notify()
        if before is None or before.version != plan.version:
            self.plan_waiters.notify(first=_list_members(before) ^ _list_members(plan))


class JobRegistry:
    """All jobs of this operator."""

    def __init__(self, started_at: float) -> None:
        self.started_at = started_at  # seconds since the epoch
        self._jobs: dict[Key, JobCache] = {}
        self._peer_jobs = PeerJobs()
        self._changed: dict[Key, None] = {}  # jobs of which it does not know how they are now, in order
        self._change_events = WeakValueDictionary[Key, asyncio.Event]()  # kept by those who wait

    def get_or_create(self, job: TrainingJob) -> JobCache:
        """Of this very job: an earlier one that had its name is forgotten. A later one stays: the earlier one, whose
        loop is still ending, gets a memory that nobody else sees."""
        key = (job.namespace, job.name)
        known = self._jobs.get(key)
        if known is not None and known.job is not None and known.job.uid == job.uid:
            return known
        fresh = JobCache(job)
        if known is None or known.job is None or known.job.created_at <= job.created_at:
            if known is not None:
                self._drop(key, known)
            self._jobs[key] = fresh
            fresh.on_change = lambda _: self._mark_changed(key)
        return fresh

    def find(self, namespace: str, name: str) -> JobCache | None:
        return self._jobs.get((namespace, name))

    def forget(self, job: TrainingJob) -> None:
        known = self.find(job.namespace, job.name)
        if known is not None and known.job is not None and known.job.uid == job.uid:
            del self._jobs[job.namespace, job.name]
            self._drop((job.namespace, job.name), known)

    def mark_reporting(self, job: JobCache, now: float) -> None:
        """One of its workers has spoken."""
        if job.job is not None and self.find(job.job.namespace, job.job.name) is job:
            self._peer_jobs.mark_reporting(job.job.uid, now)

    def adjust_held_polls(self, job: JobCache, polls: int) -> None:
        """So many more polls of its workers are held, or fewer."""
        if job.job is not None:
            self._peer_jobs.adjust_held_polls(job.job.uid, polls)

    def build_cluster_view(self, job: TrainingJob, desired: DesiredState, now: float) -> ClusterView:
        """What other jobs show that concerns this one, whose draft is looked at."""
        for key in self._changed:
            self._peer_jobs.put(key, _summarize_job(self._jobs.get(key)), now)
        self._changed.clear()
        return self._peer_jobs.build_cluster_view(job, desired, now)

    def verify_states(self, states: Listing, namespace: str) -> dict[Key, Object]:
        """These are all bookkeepings of a namespace ("": of all): what is known otherwise, and not by a later write, is
        doubted from now on. Returns those of jobs of which nothing is known."""
        written = {get_object_key(body): body for body in states.items}
        for key, job in self:
            version = job.resource_version
            if namespace not in ("", key[0]) or not version or int(version) > states.version:
                continue
            if key not in written or written[key]["metadata"]["resourceVersion"] != version:
                job.needs_reload = True
                job.wake.set()
        known = {key for key, job in self if job.desired is not None}
        return {key: body for key, body in written.items() if key not in known}

    def _drop(self, key: Key, job: JobCache) -> None:
        """Whatever becomes of it, others look at it no more."""
        job.on_change = None
        self._changed[key] = None
        if job.job is not None:
            self._peer_jobs.forget(job.job.uid)

    def __iter__(self) -> Iterator[tuple[Key, JobCache]]:
        return iter(list(self._jobs.items()))

    async def wait_for_change(self, namespace: str, job: str) -> None:
        """Returns when something of the job has become known, or has changed, that others look at."""
        await self._change_events.setdefault((namespace, job), asyncio.Event()).wait()

    def _mark_changed(self, key: Key) -> None:
        self._changed[key] = None
        awaited = self._change_events.pop(key, None)
        if awaited is not None:
            awaited.set()

    def wake_all(self) -> None:
        for _, job in self:
            job.wake.set()

    def wake(self, namespace: str, job: str) -> JobCache | None:
        """That of the job that looks around now; None: nothing is known of it."""
        memory = self.find(namespace, job)
        if memory is not None:
            memory.wake.set()
        return memory


def _list_members(plan: Plan | None) -> set[str]:
    return set() if plan is None else {member.worker for member in plan.members}


def _summarize_job(memory: JobCache | None) -> JobSummary | None:
    """None: nothing is known of it (yet)."""
    if memory is None or memory.job is None or memory.desired is None:
        return None
    return JobSummary.from_job(memory.job, memory.desired, memory.phase)
