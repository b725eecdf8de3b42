"""The job cache: what workers have reported since this operator started.

It is soft state. The next operator receives it again within seconds, so nothing here is needed for correctness. A fault
stays unacknowledged, and is sent again, until the decision about it is written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from pacekeeper_analysis.estimator.observations import MetricsWindow
from pacekeeper_analysis.protocol.plan import Plan
from pacekeeper_analysis.protocol.reports import Evidence, Heartbeat

from ..api.training_job import JobPhase, TrainingJob
from ..kube.client import Listing, Object
from ..kube.store import Key, get_object_key
from ..pods.gangs import Gang
from ..pods.queues import QueueDecision
from ..state.cluster_view import ClusterView
from ..state.desired_state import DesiredState, NodeKey
from ..state.effect_results import LocalizedProfile, NodeCheck, PodRestartRefusal, QuarantineDecision, TemplateVerdict
from ..state.job_metrics import JobMetrics
from ..state.job_requests import JobRequests
from ..state.straggler_estimate import EstimatorMemory
from .faults import OpenFaults
from .peer_jobs import JobSummary, PeerJobs
from .persistent_slowness import RelativeTimeHistory
from .rank_metrics import NO_RANK_ROWS, RankRows
from .waiters import Waiters

NO_REQUESTS = JobRequests()


@dataclass
class WorkerContact:
    """The latest reports of one worker."""

    heartbeat: Heartbeat  # with times of the operator's clock
    last_seen_at: float  # seconds since the epoch by the operator's clock
    open_polls: int = 0  # number of held polls
    is_cut_off: bool = False  # its connection ended during the last poll
    state_since: float = 0.0  # when it first reported its present state
    stepped_at: float | None = None  # when it first reported its last completed step; None: unknown
    raw_heartbeat: Heartbeat = field(default_factory=Heartbeat)  # as sent, with times of the worker's clock
    rank_rows: RankRows = field(default_factory=lambda: NO_RANK_ROWS)  # of its ranks; `heartbeat` does not hold them
    poll_phase: float = 0.0  # its part of the interval between two polls, from 0 to below 1

    def is_reporting(self, now: float, seconds: float) -> bool:
        """Return whether the worker is alive now, or was within `seconds`.

        A held poll shows that its machine is alive: otherwise the kernel would close the connection within
        `connections.PEER_SILENCE_TIMEOUT_SECONDS`.
        """
        return self.open_polls > 0 or now - self.last_seen_at <= seconds


@dataclass
class ProfileAnswers:
    """What ranks have answered in the open profile, and the result of the last one."""

    by_rank: dict[int, bytes] = field(default_factory=dict)
    total_bytes: int = 0
    newest_at: float | None = None  # time of the newest answer
    localized: LocalizedProfile | None = None  # result of the last profile

    def add(self, rank: int, data: bytes, now: float) -> None:
        """Record the answer of a rank, instead of an earlier one."""
        self.total_bytes += len(data) - len(self.by_rank.get(rank, b""))
        self.by_rank[rank] = data
        self.newest_at = now

    def clear(self) -> None:
        """Forget the answers, but not the last result."""
        self.by_rank, self.total_bytes = {}, 0


@dataclass
class EffectResults:
    """What effects have found out: the input of the next passes."""

    template: TemplateVerdict | None = None  # the API server's latest verdict
    queue_decision: QueueDecision | None = None  # the latest decision of its queue
    pod_group: tuple[Gang, str] | None = None  # the last gang that was placed together, and the PodGroup of its pods
    pod_group_lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # one PodGroup for all pods of a gang
    quarantine_decisions: dict[NodeKey, QuarantineDecision] = field(default_factory=dict)
    """Decisions about the nodes that Incidents blame."""
    pod_restart_refusal: PodRestartRefusal | None = None  # of a watched job
    node_checks: dict[str, NodeCheck] = field(default_factory=dict)  # by UID of a node that the job has asked to check


class JobCache:
    """A job as this operator knows it. `desired` is what is written in the API server, at `resource_version`.

    Other jobs see `job`, `desired` without its requests, and `phase`. Only `update` changes these, and it calls
    `on_change`.
    """

    def __init__(
        self, job: TrainingJob | None = None, desired: DesiredState | None = None, phase: JobPhase | None = None
    ) -> None:
        self._job, self._desired, self._phase = job, desired, phase
        self.on_change: Callable[[], None] | None = None
        self.unknown_fields: Mapping[str, Any] = {}  # fields in the API server in addition to `desired`
        self.resource_version = ""
        self.needs_reload = False  # a list has shown that the written state has changed or is gone
        self.reporting_members = 0  # members that reported, as of the last pass
        self.contacts: dict[str, WorkerContact] = {}
        self.faults = OpenFaults()
        self.evidence: dict[str, Evidence] = {}  # by worker, for the open request
        self.probes: dict[str, Evidence] = {}  # by worker, for the open link probe
        self.profile = ProfileAnswers()
        self.results = EffectResults()
        self.metrics = JobMetrics()  # as of the last pass
        self.relative_times = RelativeTimeHistory()  # of its ranks, in the last windows
        self.means: MetricsWindow | None = None  # of the plan's ranks, as of the last pass; None: some are missing
        self.estimator: EstimatorMemory | None = None  # of the estimator in shadow mode; None: nothing is known
        self.reconcile_lock = asyncio.Lock()  # held while the job is reconciled or deleted
        self.wake = asyncio.Event()  # set when there is news for the reconcile loop
        self.poll_waiters = Waiters()  # polls that wait for the next version of the plan, or for other requests
        self.fault_waiters = Waiters()  # faults that wait for the next desired state

    @property
    def job(self) -> TrainingJob | None:
        return self._job

    @property
    def desired(self) -> DesiredState | None:
        return self._desired

    @property
    def phase(self) -> JobPhase | None:
        return self._phase

    def update(
        self, job: TrainingJob | None = None, desired: DesiredState | None = None, phase: JobPhase | None = None
    ) -> None:
        """Set what other jobs depend on, and call `on_change`. None leaves a value as it is."""
        self._job = self._job if job is None else job
        self._desired = self._desired if desired is None else desired
        self._phase = self._phase if phase is None else phase
        if self.on_change is not None:
            self.on_change()

    @property
    def is_loaded(self) -> bool:
        """Whether the written state is known, and no list has shown that it has changed."""
        return self.desired is not None and bool(self.resource_version) and not self.needs_reload

    @property
    def plan(self) -> Plan | None:
        return None if self.desired is None else self.desired.plan

    @property
    def requests(self) -> JobRequests:
        return NO_REQUESTS if self.desired is None else self.desired.requests

    def publish(self, desired: DesiredState, resource_version: str) -> None:
        """Record the state that is written now, and answer the held polls and faults that wait for it.

        Workers that join or leave are answered first.
        """
        worker_names = {worker.name for worker in desired.state.placement.workers}
        node_keys = {quarantine.node_key for quarantine in desired.state.incidents.quarantine_requests}
        before, plan, requests_before = self.plan, desired.plan, self.requests
        self.update(desired=desired)
        self.resource_version = resource_version
        if self.faults:
            settled = desired.state.incidents.settled_names
            self.faults.retain(lambda fault: fault.name not in settled and fault.worker in worker_names)
        self.contacts = {name: contact for name, contact in self.contacts.items() if name in worker_names}
        self._drop_old_answers(requests_before)
        self.results.quarantine_decisions = {
            key: decision for key, decision in self.results.quarantine_decisions.items() if key in node_keys
        }
        self.fault_waiters.notify()
        if before is None or before.version != plan.version:
            self.poll_waiters.notify(first=_list_members(before) ^ _list_members(plan))
        else:
            self._notify_concerned(requests_before)

    def publish_requests(self, requests: JobRequests) -> None:
        """Record the open requests, which are not written, and answer the held polls of the workers concerned.

        Other jobs do not see requests, so that nothing of theirs depends on it.
        """
        assert self._desired is not None
        before, self._desired = self.requests, replace(self._desired, requests=requests)
        self._drop_old_answers(before)
        self._notify_concerned(before)

    def _drop_old_answers(self, before: JobRequests) -> None:
        """Drop answers to requests that are not open any more. `before`: the requests until now."""
        requests = self.requests
        if before.profile != requests.profile:
            self.profile.clear()
        self.evidence = {n: e for n, e in self.evidence.items() if e.request == requests.evidence_name}
        probe = "" if requests.probe is None else requests.probe.name
        self.probes = {n: e for n, e in self.probes.items() if e.request == probe}

    def _notify_concerned(self, before: JobRequests) -> None:
        plan = self.plan
        assert plan is not None
        self.poll_waiters.notify_workers(self.requests.list_concerned_workers(before, plan.members))


class JobRegistry:
    """The caches of all jobs of this operator."""

    def __init__(self, started_at: float) -> None:
        self.started_at = started_at  # seconds since the epoch
        self._jobs: dict[Key, JobCache] = {}
        self._peer_jobs = PeerJobs()
        self._changed: dict[Key, None] = {}  # jobs whose summary is outdated, in order
        self._change_events = WeakValueDictionary[Key, asyncio.Event]()  # the waiters keep these alive

    def get_or_create(self, job: TrainingJob) -> JobCache:
        """Return the cache of exactly this job. The cache of an earlier job of the same name is dropped.

        A later job's cache stays: an earlier job, whose loop is still ending, gets a cache that is not registered.
        """
        key = (job.namespace, job.name)
        existing = self._jobs.get(key)
        if existing is not None and existing.job is not None and existing.job.uid == job.uid:
            return existing
        cache = JobCache(job)
        if existing is None or existing.job is None or (existing.job.created_at or 0.0) <= (job.created_at or 0.0):
            if existing is not None:
                self._drop(key, existing)
            self._jobs[key] = cache
            cache.on_change = partial(self._mark_changed, key)
        return cache

    def find(self, namespace: str, name: str) -> JobCache | None:
        return self._jobs.get((namespace, name))

    def forget(self, job: TrainingJob) -> None:
        cache = self.find(job.namespace, job.name)
        if cache is not None and cache.job is not None and cache.job.uid == job.uid:
            del self._jobs[job.namespace, job.name]
            self._drop((job.namespace, job.name), cache)

    def mark_reporting(self, cache: JobCache, now: float) -> None:
        """Record that one of the job's workers has reported."""
        if cache.job is not None and self.find(cache.job.namespace, cache.job.name) is cache:
            self._peer_jobs.mark_reporting(cache.job.uid, now)

    def adjust_held_polls(self, cache: JobCache, polls: int) -> None:
        """Record a change of the number of held polls of the job's workers."""
        if cache.job is not None:
            self._peer_jobs.adjust_held_polls(cache.job.uid, polls)

    def build_cluster_view(self, job: TrainingJob, desired: DesiredState, now: float) -> ClusterView:
        """Return what other jobs show that concerns this one, with its desired state."""
        for key in self._changed:
            self._peer_jobs.put(key, _summarize_job(self._jobs.get(key)), now)
        self._changed.clear()
        return self._peer_jobs.build_cluster_view(job, desired, now)

    def verify_states(self, states: Listing, namespace: str) -> dict[Key, Object]:
        """Compare the caches with a complete list of the states of a namespace ("": of all).

        A cache that differs, and does not have a later write, needs to be reloaded. Returns the states of jobs of which
        nothing is known.
        """
        stored = {get_object_key(body): body for body in states.items}
        for key, cache in self:
            version = cache.resource_version
            if namespace not in ("", key[0]) or not version or int(version) > states.version:
                continue
            if key not in stored or stored[key]["metadata"]["resourceVersion"] != version:
                cache.needs_reload = True
                cache.wake.set()
        loaded = {key for key, cache in self if cache.desired is not None}
        return {key: body for key, body in stored.items() if key not in loaded}

    def _drop(self, key: Key, cache: JobCache) -> None:
        """Remove a job from the view of others."""
        cache.on_change = None
        self._changed[key] = None
        if cache.job is not None:
            self._peer_jobs.forget(cache.job.uid)

    def __iter__(self) -> Iterator[tuple[Key, JobCache]]:
        return iter(list(self._jobs.items()))

    async def wait_for_change(self, namespace: str, job: str) -> None:
        """Return when something of the job that other jobs see has changed."""
        await self._change_events.setdefault((namespace, job), asyncio.Event()).wait()

    def _mark_changed(self, key: Key) -> None:
        self._changed[key] = None
        event = self._change_events.pop(key, None)
        if event is not None:
            event.set()

    def wake_all(self) -> None:
        for _, cache in self:
            cache.wake.set()

    def wake(self, namespace: str, job: str) -> JobCache | None:
        """Wake the job's reconcile loop, and return its cache; None: it is not known."""
        cache = self.find(namespace, job)
        if cache is not None:
            cache.wake.set()
        return cache


def _list_members(plan: Plan | None) -> set[str]:
    return set() if plan is None else {member.worker for member in plan.members}


def _summarize_job(cache: JobCache | None) -> JobSummary | None:
    """Return the summary of a job; None: nothing is known of it (yet)."""
    if cache is None or cache.job is None or cache.desired is None:
        return None
    return JobSummary.from_job(cache.job, cache.desired, cache.phase)
