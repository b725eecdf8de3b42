"""What all services of one running operator share."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import kopf

from .. import metrics
from ..api import LABEL_JOB, PAUSE_CONFIG_MAP, Fabric, TrainingJob, JobPhase, RemediationMode, NodeHistory
from ..cluster import (
    CONFIG_MAPS,
    FABRICS,
    NODE_HISTORIES,
    NODE_OBJECTS,
    PODS,
    WATCH_IDLE_TIMEOUT_SECONDS,
    TRAINING_JOB_STATES,
    Cluster,
    ResourceKind,
    NotFound,
    Object,
)
from ..decide.fabric_status import select_active_fabric
from ..manifests import Installation
from ..network import JobName, NetworkState
from ..observation import PROMETHEUS_NOT_QUERIED, GpuValue, JobMetrics, NodeView, PodView
from ..observe import traffic
from ..observe.memory import JobRegistry
from ..observe.neighbourhood import NodeSnapshot
from ..observe.prometheus import PrometheusClient, PrometheusSample
from ..observe.source import Reflector
from ..observe.store import Key, ResourceStore
from ..observe.views import view_node, view_pod
from ..runtime import OperatorRuntime, Superseded
from ..server_clock import ServerClock
from ..settings import Settings
from . import incidents, node_history
from .fleet import NodeRegistry
from .probe_claims import ProbeClaims
from .tokens import PodIdentity
from .webhook import Webhook

STORE_RESYNC_SECONDS = 60.0
STORE_RESYNC_RETRY_SECONDS = 2.0
LONG_PASS_SECONDS, LONG_PASS_REST_FACTOR = 0.05, 4.0
"""After such a pass, of a job of thousands, the next one waits for so many times its time, as each does while hundreds
of nodes are to be held: what all its workers have to say at once, after a restart, is to be heard meanwhile."""
MAX_PASS_REST_SECONDS = 1.0
GPU_ERROR_POLL_SECONDS = 0.5
"""Between two looks at the errors of GPUs."""
LEADERSHIP_POLL_SECONDS = 0.25
"""Between two looks whether the Lease is held again."""
FIRST_WATCH_EVENT_SECONDS = 2 * WATCH_IDLE_TIMEOUT_SECONDS
"""Within this time every watch has something to say, and be it that there is nothing."""
MAX_MISSED_POD_CHANGES = 3
"""So many times in a row lists have shown changes of pods that no watch told: the watch is dead."""
RETENTION_INTERVAL_SECONDS = 600.0
FIRST_RETENTION_DELAY_SECONDS = 60.0
"""Between an operator's first two looks after incidents: what ended while none ran has gone by then."""
MAX_CONCURRENT_POD_CREATIONS = 16
"""Pods of all jobs that are being made: a webhook that takes its time leaves half of the calls to everything else."""
MONITORED_PHASES = frozenset({JobPhase.PENDING, JobPhase.STARTING, JobPhase.RUNNING, JobPhase.RECOVERING})
MAX_SAMPLE_AGE_SECONDS = 30.0
"""Older words of Prometheus are no news; they are as old as that only where no job was active in between."""
PAUSE_UNKNOWN = "it is not known yet whether remedies are paused"
JobValue = TypeVar("JobValue")
log = logging.getLogger(__name__)


@dataclass
class Operator:
    """The running operator."""

    settings: Settings
    cluster: Cluster
    jobs: JobRegistry
    installation: Installation
    prometheus: PrometheusClient
    runtime: OperatorRuntime = field(default_factory=OperatorRuntime)
    is_leader: Callable[[], bool] = lambda: True
    """Whether this operator holds the Lease, as far as it can know."""
    sample: PrometheusSample = field(default_factory=PrometheusSample)
    node_cluster: Cluster | None = None
    """A connection by which nodes are held before all else that jobs want done; None: by the same."""
    webhook: Webhook | None = None
    """Where incidents are told of, besides the cluster."""
    gpu_values: tuple[GpuValue, ...] = ()  # as Prometheus has said last
    paused: str = PAUSE_UNKNOWN
    pass_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    jobs_with_new_gpu_errors: set[JobName] = field(default_factory=set)
    """Jobs that have not looked yet at what the GPUs of their nodes show anew."""
    jobs_with_lost_worker: set[JobName] = field(default_factory=set)
    """Jobs that have not looked yet at a worker that they have just lost."""
    compute_seconds: float = 0.0  # seconds for which passes have held up everything else since the last one began
    creation_slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_CONCURRENT_POD_CREATIONS))
    last_tick_at: float = 0.0  # when `watch_over` last came round, by the monotonic clock
    active_jobs: int = 0  # jobs that are under way, as it counted them then
    network: NetworkState | None = None  # as services.fabrics has looked at it last
    listed_states: dict[JobName, Object] = field(default_factory=dict)
    """What is written of jobs of which nothing is known, as last listed: an operator that begins to lead does not ask
    for a thousand one by one."""
    histories: ResourceStore[NodeHistory] = field(default_factory=lambda: ResourceStore(NODE_HISTORIES, NodeHistory.parse))
    """Listed now and then, not followed: nobody else writes them, and whoever deletes one has time."""
    history_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by whoever writes a NodeHistory."""
    unreliable_nodes: tuple[str, ...] = ()  # by their histories, the worst first
    _prometheus_task: asyncio.Task[None] | None = None
    _clock_agreed_before: bool = True  # when that was logged last
    fabrics_changed: asyncio.Event = field(default_factory=asyncio.Event)
    reflectors: dict[ResourceKind, Reflector] = field(init=False)
    """Of all that watches tell of but TrainingJobs, which kopf follows."""
    pods: ResourceStore[PodView] = field(init=False)
    nodes: ResourceStore[NodeView] = field(init=False)
    node_snapshot: NodeSnapshot = field(init=False, default_factory=NodeSnapshot)
    clock: ServerClock = field(init=False)
    fabrics: ResourceStore[Fabric] = field(init=False)
    node_registry: NodeRegistry = field(init=False)
    probe_claims: ProbeClaims = field(init=False)

    def __post_init__(self) -> None:
        self.clock = ServerClock(self.runtime)
        self.probe_claims = ProbeClaims(self.runtime)
        self.cluster.on_server_date = self.clock.record_date
        self.pods = ResourceStore(
            PODS,
            view_pod,
            LABEL_JOB,
            group=lambda key, pod: (key[0], pod.job),
            on_change=self._on_pod_changed,
        )
        self.nodes = ResourceStore(
            NODE_OBJECTS,
            lambda body: view_node(body, self.settings.node_health, self.levels),
            on_change=lambda _key, _node: self.jobs.wake_all(),
        )
        self.node_registry = NodeRegistry(self.node_cluster or self.cluster, self.runtime, self.settings)
        self.fabrics = ResourceStore(FABRICS, Fabric.parse, on_change=lambda _key, _fabric: self.fabrics_changed.set())
        kept: tuple[tuple[ResourceStore[Any], ...], ...] = (
            (self.fabrics,),
            (self.nodes, self.node_registry.nodes),
            (self.pods,),
            (self.node_registry.quarantines,),
        )
        namespaces = self.settings.watch_namespaces
        self.reflectors = {shelves[0].kind: Reflector(self.cluster, self.runtime, shelves, namespaces) for shelves in kept}

    def get_interval_seconds(self, per_second: float, min_seconds: float) -> float:
        """Seconds between two turns of a job that is under way, so that all of them together have so many a second."""
        return max(min_seconds, self.active_jobs / per_second)

    async def wait_for_pass(self) -> None:
        """Returns when a pass may begin: one after the other, and all else has at least as much time as they, or four
        times that after a long one, unless a worker was lost, and where hundreds of nodes wait to be held, unless GPUs
        show what some job has not looked at yet. A thousand jobs that something wakes together would else hold up
        polls, and the Lease, for seconds. Without the Lease none begins, and none of them needs to find that out by
        itself."""
        async with self.pass_lock:
            took, self.compute_seconds = self.compute_seconds, 0.0
            long = took > LONG_PASS_SECONDS and not self.jobs_with_lost_worker
            many = (long or self.node_registry.priority_gate.is_closed) and not self.jobs_with_new_gpu_errors
            await self.runtime.sleep(min(MAX_PASS_REST_SECONDS, took * (LONG_PASS_REST_FACTOR if many else 1.0)))
            while not self.is_leader():
                await self.runtime.sleep(LEADERSHIP_POLL_SECONDS)

    def mark_evaluated(self, job: JobName) -> None:
        """Its pass looks at whatever has become known by now."""
        self.jobs_with_new_gpu_errors.discard(job)
        self.jobs_with_lost_worker.discard(job)

    @contextmanager
    def measure_compute(self) -> Iterator[None]:
        """A part of a pass that waits for nothing."""
        began = self.runtime.monotonic()
        try:
            yield
        finally:
            self.compute_seconds += self.runtime.monotonic() - began

    def require_leadership(self) -> None:
        """Raises kopf.TemporaryError where another operator may be acting."""
        if not self.is_leader():
            raise kopf.TemporaryError("the Lease is not held: another operator may be acting", delay=1)

    @property
    def acts(self) -> bool:
        """Whether the platform lets any remedy be applied."""
        return self.settings.mode is RemediationMode.ACT and not self.paused

    @property
    def fabric(self) -> Fabric | None:
        """The one in force."""
        return select_active_fabric(list(self.fabrics))

    @property
    def levels(self) -> tuple[str, ...]:
        """Labels of nodes by which the Fabric says where they are, from the leaf outward."""
        return tuple(level.node_label for level in self.fabric.spec.levels) if self.fabric else ()

    def update_traffic(self, job: TrainingJob) -> None:
        """Its plan has been written: those of others that are planned next go around it at once."""
        name = job.namespace, job.name
        if self.network is None:
            return
        known = self.network.jobs.get(name)
        found = traffic.build_job_traffic(name, self.jobs.get_or_create(job), self.runtime.now(), acts=self.acts)
        if found is not None:  # as far as it has been looked at
            found = replace(found, sent=known.sent, seen=known.seen) if known is not None else replace(found, seen=())
        if found == known:
            return
        jobs = _exclude_job(self.network.jobs, name)
        planned = self.network.traffic
        if planned is not None:  # for it, that was planned before
            ways, due = _exclude_job(planned.ways, name), _exclude_job(planned.due, name)
            recommended = _exclude_job(planned.recommended, name)
            planned = replace(planned, ways=ways, due=due, recommended=recommended)
        jobs |= {} if found is None else {name: found}
        self.network = replace(self.network, jobs=jobs, traffic=planned)

    def start_leading(self) -> None:
        """It leads from now on: what it has followed meanwhile is to be proved by lists."""
        self.jobs.started_at = self.runtime.now()
        self.pods.invalidate()
        self.nodes.invalidate()
        self.node_registry.invalidate()
        for source in self.reflectors.values():
            source.has_seen_restore = False

    def on_serving_changed(self, serves: bool) -> None:
        """It serves sidecars from now on, which need a while to come; or does not, and another may write."""
        if serves:
            self.jobs.started_at = self.runtime.now()
        else:
            self.listed_states = {}

    async def wait_until_listed(self) -> None:
        """Returns when pods and nodes have been listed since it leads: before, nothing is known of any job."""
        await self.pods.listed.wait()
        await self.nodes.listed.wait()

    def is_pod_alive(self, holder: PodIdentity) -> bool:
        """Whether that very pod is known to be there, and is not about to end."""
        pod = self.pods.get((holder.namespace, holder.pod))
        return pod is not None and pod.uid == holder.uid and not pod.deleting and not pod.ended

    def get_prometheus_metrics(self, job: TrainingJob, now: float) -> JobMetrics:
        """What Prometheus has said of the job lately."""
        if now - self.sample.queried_at > MAX_SAMPLE_AGE_SECONDS:
            return JobMetrics(unavailable=PROMETHEUS_NOT_QUERIED)
        return self.sample.get_metrics(job.namespace, job.name)

    def find_watch_failure(self, now: float) -> str:
        """Why no watch can be trusted; "": they live. Lists go on either way, but only at the slow tick."""
        if not (self.nodes.has_watch_events or self.pods.has_watch_events) and now - self.jobs.started_at > FIRST_WATCH_EVENT_SECONDS:
            return f"no watch has told anything for {FIRST_WATCH_EVENT_SECONDS:.0f} s: the API server is not reached"
        if self.pods.missed_changes >= MAX_MISSED_POD_CHANGES:
            return f"the watch of pods is dead: {self.pods.missed_changes} changes were seen by lists only"
        return ""

    async def run_reflectors(self) -> None:
        """Hear of what changes, whether it leads or not: until cancelled."""
        await self.wait_until_listed()  # watches begin where these lists end
        await asyncio.gather(*(source.run() for source in self.reflectors.values()))

    async def resync(self) -> None:
        """List what watches tell of, at once and then every minute: until cancelled. Raises Superseded where the API
        server was restored from a backup while this operator leads."""
        while True:
            pause = STORE_RESYNC_SECONDS
            await self._read_fabrics()  # first: they say which labels of nodes matter
            try:
                await self._read_states()  # before pods: then jobs are looked at
                await self.reflectors[NODE_OBJECTS].refresh()
                await self.reflectors[PODS].refresh()
            except (kopf.TemporaryError, kopf.PermanentError) as error:
                log.warning("pods and nodes could not be listed, which is tried again: %s", error)
                pause = STORE_RESYNC_RETRY_SECONDS
            self._raise_if_restored()
            await self.runtime.sleep(pause)

    def _raise_if_restored(self) -> None:
        """kopf watches jobs from where it was, and is told nothing until as much has happened again; and what is
        remembered of jobs was written by an API server that there is no more. The operator after this one reads all."""
        if self.is_leader() and any(source.has_seen_restore for source in self.reflectors.values()):
            raise Superseded("the API server was restored from a backup")

    async def _read_states(self) -> None:
        """What is known of jobs that somebody else has written, or deleted, meanwhile is doubted: who has nothing to
        write would never notice, and the operator after this one would find nothing. What cannot be listed is asked for
        job by job when it is first looked at."""
        self.listed_states, found = {}, dict[JobName, Object]()
        if not self.is_leader():
            return
        for place in TRAINING_JOB_STATES.list_scopes(self.settings.watch_namespaces):
            try:
                found |= self.jobs.verify_states(await self.cluster.list_with_version(TRAINING_JOB_STATES, place), place)
            except (kopf.TemporaryError, kopf.PermanentError) as error:
                log.warning("jobs' states could not be listed, which is tried again: %s", error)
        self.listed_states = found if self.is_leader() else {}

    async def _read_fabrics(self) -> None:
        """Jobs train without them, too: on an installation, say, whose definitions are older than this operator."""
        try:
            await self.reflectors[FABRICS].refresh()
        except NotFound:
            return
        except (kopf.TemporaryError, kopf.PermanentError) as error:
            log.warning("Fabrics could not be listed, which is tried again: %s", error)

    async def run_periodic_tasks(self) -> None:
        """Ask Prometheus while some job trains, look whether remedies are paused, look after incidents: until
        cancelled."""
        paused_at, incidents_at, pause = -RETENTION_INTERVAL_SECONDS, -RETENTION_INTERVAL_SECONDS, FIRST_RETENTION_DELAY_SECONDS
        while True:
            now = self.runtime.monotonic()
            try:
                if self.paused == PAUSE_UNKNOWN or now - paused_at > 2 * self.settings.sample_seconds:
                    await self._check_pause()
                    paused_at = now
                self._start_prometheus_query()
                if now - incidents_at > pause:
                    agreed = self.runtime.now() if self.clock.agrees else None
                    await node_history.clean_up_histories(self)
                    await incidents.clean_up_incidents(self.cluster, self.settings.watch_namespaces, agreed)
                    pause = FIRST_RETENTION_DELAY_SECONDS if incidents_at < 0 else RETENTION_INTERVAL_SECONDS
                    incidents_at = now
            except (kopf.TemporaryError, kopf.PermanentError) as error:
                log.warning("looking around failed, and is tried again: %s", error)
            self._count_jobs()
            self._check_clock()
            self.last_tick_at = now
            await self.runtime.sleep(self.settings.sample_seconds)

    async def _check_pause(self) -> None:
        """As long as nobody has been able to look, remedies are paused."""
        found = await self.cluster.find(CONFIG_MAPS, PAUSE_CONFIG_MAP, self.settings.namespace)
        if self.settings.paused:
            paused = "remedies are paused by the operator's settings"
        elif found is not None:
            reason = (found.get("data") or {}).get("reason", "no reason given")
            paused = f"remedies are paused by ConfigMap {self.settings.namespace}/{PAUSE_CONFIG_MAP}: {reason}"
        else:
            paused = ""
        if paused != self.paused:
            self.paused = paused
            self.jobs.wake_all()

    async def poll_gpu_errors(self) -> None:
        """Ask for their errors more often than for all else, as long as Prometheus answers: until cancelled."""
        while True:
            await self.runtime.sleep(GPU_ERROR_POLL_SECONDS)
            if not self.active_jobs or self.sample.error:
                continue
            found = await self.prometheus.read_gpu_errors()
            if found is not None and not self.sample.error:
                self._on_gpu_errors(found)
                self.sample = replace(self.sample, gpu=found)

    def _start_prometheus_query(self) -> None:
        """Beside everything else: an answer may take its time, and counts from when it was asked for."""
        if self._prometheus_task is None or self._prometheus_task.done():
            active = tuple(name for name, job in self.jobs if job.phase in MONITORED_PHASES)
            self._prometheus_task = self.runtime.start_task(self._query_prometheus(active), "question to Prometheus") if active else None

    async def _query_prometheus(self, jobs: Sequence[JobName]) -> None:
        now = self.runtime.now()
        found = await self.prometheus.sample(now, jobs)
        if found.timed_out and not self.sample.error and now - self.sample.queried_at <= MAX_SAMPLE_AGE_SECONDS:
            return  # what was heard before is not stale yet
        if not found.error:  # that nothing is heard is no word on a GPU
            self._on_gpu_errors(found.gpu_values)
        self.sample = found
        metrics.PROMETHEUS_UP.set(not found.error)

    def _on_gpu_errors(self, found: tuple[GpuValue, ...]) -> None:
        """Jobs on nodes whose GPUs show something new look at it."""
        news = {value.node for value in {*found} ^ {*self.gpu_values}}
        self.gpu_values = found
        for (namespace, _), pod in self.pods.items() if news else ():
            if pod.node in news and self.jobs.wake(namespace, pod.job) is not None:
                self.jobs_with_new_gpu_errors.add((namespace, pod.job))

    def _on_pod_changed(self, key: Key, pod: PodView) -> None:
        """Its job looks at it; at once where it was a worker that was to stay."""
        memory = self.jobs.wake(key[0], pod.job)
        if memory is None or memory.desired is None:
            return
        worker = memory.desired.state.placement.find_worker(pod.name)
        there = key in self.pods and not (pod.deleting or pod.ended)
        if worker is not None and worker.uid == pod.uid and not worker.leaving and not there:
            self.jobs_with_lost_worker.add((key[0], pod.job))

    def _check_clock(self) -> None:
        metrics.CLOCK_AHEAD_SECONDS.set(self.clock.seconds_ahead)
        if self.clock.agrees == self._clock_agreed_before:
            return
        self._clock_agreed_before = self.clock.agrees
        if self._clock_agreed_before:
            log.warning("this node's clock agrees with the API server's again")
            return
        log.warning(
            "this node's clock is %.0f s ahead of the API server's: until they agree, no job fails by its deadline, "
            "and nothing is deleted because its time is over; look at the time service of the operator's node",
            self.clock.seconds_ahead,
        )

    def _count_jobs(self) -> None:
        phases = [memory.phase for _, memory in self.jobs]
        self.active_jobs = sum(phase in MONITORED_PHASES for phase in phases)
        for phase in JobPhase:
            metrics.JOBS_BY_PHASE.labels(phase).set(phases.count(phase))
        metrics.WORKERS_REPORTING.set(sum(memory.reporting_members for _, memory in self.jobs))


def _exclude_job(jobs: Mapping[JobName, JobValue], name: JobName) -> dict[JobName, JobValue]:
    return {other: of for other, of in jobs.items() if other != name}
