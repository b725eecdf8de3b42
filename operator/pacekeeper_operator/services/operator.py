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
from ..api import LABEL_JOB, PAUSE, Fabric, Job, JobPhase, Mode, NodeHistory
from ..cluster import (
    CONFIG_MAPS,
    FABRICS,
    NODE_HISTORIES,
    NODES,
    PODS,
    SILENT_SECONDS,
    STATES,
    Cluster,
    Kind,
    NotFound,
    Object,
)
from ..decide.fabric_status import in_force
from ..manifests import Installation
from ..network import JobName, Network
from ..observation import NOT_ASKED, GpuValue, Metrics, NodeView, PodView
from ..observe import traffic
from ..observe.memory import Memory
from ..observe.neighbourhood import KnownNodes
from ..observe.prometheus import Prometheus, Sample
from ..observe.source import Source
from ..observe.store import Key, Shelf
from ..observe.views import view_node, view_pod
from ..runtime import Runtime, Superseded
from ..server_clock import ServerClock
from ..settings import Settings
from . import incidents, node_history
from .fleet import Fleet
from .probe_claims import ProbeClaims
from .tokens import Holder
from .webhook import Webhook

RESYNC_SECONDS = 60.0
RETRY_SECONDS = 2.0
LONG_PASS_SECONDS, LONG_REST = 0.05, 4.0
"""After such a pass, of a job of thousands, the next one waits for so many times its time, as each does while hundreds
of nodes are to be held: what all its workers have to say at once, after a restart, is to be heard meanwhile."""
LONGEST_REST_SECONDS = 1.0
GPU_SECONDS = 0.5
"""Between two looks at the errors of GPUs."""
LEADS_SECONDS = 0.25
"""Between two looks whether the Lease is held again."""
FIRST_WORD_SECONDS = 2 * SILENT_SECONDS
"""Within this time every watch has something to say, and be it that there is nothing."""
MISSED_EVENTS = 3
"""So many times in a row lists have shown changes of pods that no watch told: the watch is dead."""
RETENTION_SECONDS = 600.0
FIRST_RETENTION_SECONDS = 60.0
"""Between an operator's first two looks after incidents: what ended while none ran has gone by then."""
CREATIONS_AT_ONCE = 16
"""Pods of all jobs that are being made: a webhook that takes its time leaves half of the calls to everything else."""
ACTIVE = frozenset({JobPhase.PENDING, JobPhase.STARTING, JobPhase.RUNNING, JobPhase.RECOVERING})
STALE_SECONDS = 30.0
"""Older words of Prometheus are no news; they are as old as that only where no job was active in between."""
PAUSE_UNKNOWN = "it is not known yet whether remedies are paused"
Of = TypeVar("Of")
log = logging.getLogger(__name__)


@dataclass
class Operator:
    """The running operator."""

    settings: Settings
    cluster: Cluster
    memory: Memory
    installation: Installation
    prometheus: Prometheus
    runtime: Runtime = field(default_factory=Runtime)
    leads: Callable[[], bool] = lambda: True
    """Whether this operator holds the Lease, as far as it can know."""
    sample: Sample = field(default_factory=Sample)
    for_nodes: Cluster | None = None
    """A connection by which nodes are held before all else that jobs want done; None: by the same."""
    webhook: Webhook | None = None
    """Where incidents are told of, besides the cluster."""
    gpu: tuple[GpuValue, ...] = ()  # as Prometheus has said last
    paused: str = PAUSE_UNKNOWN
    next_pass: asyncio.Lock = field(default_factory=asyncio.Lock)
    unseen: set[JobName] = field(default_factory=set)
    """Jobs that have not looked yet at what the GPUs of their nodes show anew."""
    bereft: set[JobName] = field(default_factory=set)
    """Jobs that have not looked yet at a worker that they have just lost."""
    computed: float = 0.0  # seconds for which passes have held up everything else since the last one began
    creations: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(CREATIONS_AT_ONCE))
    looked_at: float = 0.0  # when `watch_over` last came round, by the monotonic clock
    active: int = 0  # jobs that are under way, as it counted them then
    network: Network | None = None  # as services.fabrics has looked at it last
    states: dict[JobName, Object] = field(default_factory=dict)
    """What is written of jobs of which nothing is known, as last listed: an operator that begins to lead does not ask
    for a thousand one by one."""
    histories: Shelf[NodeHistory] = field(default_factory=lambda: Shelf(NODE_HISTORIES, NodeHistory.parse))
    """Listed now and then, not followed: nobody else writes them, and whoever deletes one has time."""
    recording: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by whoever writes a NodeHistory."""
    unreliable_nodes: tuple[str, ...] = ()  # by their histories, the worst first
    _asking: asyncio.Task[None] | None = None
    _clock_agreed: bool = True  # when that was logged last
    fabrics_changed: asyncio.Event = field(default_factory=asyncio.Event)
    sources: dict[Kind, Source] = field(init=False)
    """Of all that watches tell of but TrainingJobs, which kopf follows."""
    pods: Shelf[PodView] = field(init=False)
    nodes: Shelf[NodeView] = field(init=False)
    known_nodes: KnownNodes = field(init=False, default_factory=KnownNodes)
    clock: ServerClock = field(init=False)
    fabrics: Shelf[Fabric] = field(init=False)
    fleet: Fleet = field(init=False)
    probe_claims: ProbeClaims = field(init=False)

    def __post_init__(self) -> None:
        self.clock = ServerClock(self.runtime)
        self.probe_claims = ProbeClaims(self.runtime)
        self.cluster.hear_date = self.clock.hear
        self.pods = Shelf(
            PODS,
            view_pod,
            LABEL_JOB,
            group=lambda key, pod: (key[0], pod.job),
            changed=self._hear_of_pod,
        )
        self.nodes = Shelf(
            NODES,
            lambda body: view_node(body, self.settings.node_health, self.levels),
            changed=lambda _key, _node: self.memory.wake_all(),
        )
        self.fleet = Fleet(self.for_nodes or self.cluster, self.runtime, self.settings)
        self.fabrics = Shelf(FABRICS, Fabric.parse, changed=lambda _key, _fabric: self.fabrics_changed.set())
        kept: tuple[tuple[Shelf[Any], ...], ...] = (
            (self.fabrics,),
            (self.nodes, self.fleet.nodes),
            (self.pods,),
            (self.fleet.quarantines,),
        )
        namespaces = self.settings.watch_namespaces
        self.sources = {shelves[0].kind: Source(self.cluster, self.runtime, shelves, namespaces) for shelves in kept}

    def pace(self, a_second: float, at_least: float) -> float:
        """Seconds between two turns of a job that is under way, so that all of them together have so many a second."""
        return max(at_least, self.active / a_second)

    async def begin_pass(self) -> None:
        """Returns when a pass may begin: one after the other, and all else has at least as much time as they, or four
        times that after a long one, unless a worker was lost, and where hundreds of nodes wait to be held, unless GPUs
        show what some job has not looked at yet. A thousand jobs that something wakes together would else hold up
        polls, and the Lease, for seconds. Without the Lease none begins, and none of them needs to find that out by
        itself."""
        async with self.next_pass:
            took, self.computed = self.computed, 0.0
            long = took > LONG_PASS_SECONDS and not self.bereft
            many = (long or self.fleet.first.many) and not self.unseen
            await self.runtime.sleep(min(LONGEST_REST_SECONDS, took * (LONG_REST if many else 1.0)))
            while not self.leads():
                await self.runtime.sleep(LEADS_SECONDS)

    def passes(self, job: JobName) -> None:
        """Its pass looks at whatever has become known by now."""
        self.unseen.discard(job)
        self.bereft.discard(job)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """A part of a pass that waits for nothing."""
        began = self.runtime.monotonic()
        try:
            yield
        finally:
            self.computed += self.runtime.monotonic() - began

    def must_lead(self) -> None:
        """Raises kopf.TemporaryError where another operator may be acting."""
        if not self.leads():
            raise kopf.TemporaryError("the Lease is not held: another operator may be acting", delay=1)

    @property
    def acts(self) -> bool:
        """Whether the platform lets any remedy be applied."""
        return self.settings.mode is Mode.ACT and not self.paused

    @property
    def fabric(self) -> Fabric | None:
        """The one in force."""
        return in_force(list(self.fabrics))

    @property
    def levels(self) -> tuple[str, ...]:
        """Labels of nodes by which the Fabric says where they are, from the leaf outward."""
        return tuple(level.node_label for level in self.fabric.spec.levels) if self.fabric else ()

    def hear_of_traffic(self, job: Job) -> None:
        """Its plan has been written: those of others that are planned next go around it at once."""
        name = job.namespace, job.name
        if self.network is None:
            return
        known = self.network.jobs.get(name)
        found = traffic.of_job(name, self.memory.of(job), self.runtime.now(), acts=self.acts)
        if found is not None:  # as far as it has been looked at
            found = replace(found, sent=known.sent, seen=known.seen) if known is not None else replace(found, seen=())
        if found == known:
            return
        jobs = _without(self.network.jobs, name)
        planned = self.network.traffic
        if planned is not None:  # for it, that was planned before
            ways, due = _without(planned.ways, name), _without(planned.due, name)
            recommended = _without(planned.recommended, name)
            planned = replace(planned, ways=ways, due=due, recommended=recommended)
        jobs |= {} if found is None else {name: found}
        self.network = replace(self.network, jobs=jobs, traffic=planned)

    def begin(self) -> None:
        """It leads from now on: what it has followed meanwhile is to be proved by lists."""
        self.memory.started_at = self.runtime.now()
        self.pods.prove()
        self.nodes.prove()
        self.fleet.prove()
        for source in self.sources.values():
            source.restored = False

    def turn(self, serves: bool) -> None:
        """It serves sidecars from now on, which need a while to come; or does not, and another may write."""
        if serves:
            self.memory.started_at = self.runtime.now()
        else:
            self.states = {}

    async def know(self) -> None:
        """Returns when pods and nodes have been listed since it leads: before, nothing is known of any job."""
        await self.pods.listed.wait()
        await self.nodes.listed.wait()

    def stays(self, holder: Holder) -> bool:
        """Whether that very pod is known to be there, and is not about to end."""
        pod = self.pods.get((holder.namespace, holder.pod))
        return pod is not None and pod.uid == holder.uid and not pod.deleting and not pod.ended

    def scraped(self, job: Job, now: float) -> Metrics:
        """What Prometheus has said of the job lately."""
        if now - self.sample.at > STALE_SECONDS:
            return Metrics(unavailable=NOT_ASKED)
        return self.sample.of(job.namespace, job.name)

    def blind(self, now: float) -> str:
        """Why no watch can be trusted; "": they live. Lists go on either way, but only at the slow tick."""
        if not (self.nodes.heard or self.pods.heard) and now - self.memory.started_at > FIRST_WORD_SECONDS:
            return f"no watch has told anything for {FIRST_WORD_SECONDS:.0f} s: the API server is not reached"
        if self.pods.unheard >= MISSED_EVENTS:
            return f"the watch of pods is dead: {self.pods.unheard} changes were seen by lists only"
        return ""

    async def follow(self) -> None:
        """Hear of what changes, whether it leads or not: until cancelled."""
        await self.know()  # watches begin where these lists end
        await asyncio.gather(*(source.follow() for source in self.sources.values()))

    async def resync(self) -> None:
        """List what watches tell of, at once and then every minute: until cancelled. Raises Superseded where the API
        server was restored from a backup while this operator leads."""
        while True:
            pause = RESYNC_SECONDS
            await self._read_fabrics()  # first: they say which labels of nodes matter
            try:
                await self._read_states()  # before pods: then jobs are looked at
                await self.sources[NODES].read()
                await self.sources[PODS].read()
            except (kopf.TemporaryError, kopf.PermanentError) as error:
                log.warning("pods and nodes could not be listed, which is tried again: %s", error)
                pause = RETRY_SECONDS
            self._begin_again_after_a_restore()
            await self.runtime.sleep(pause)

    def _begin_again_after_a_restore(self) -> None:
        """kopf watches jobs from where it was, and is told nothing until as much has happened again; and what is
        remembered of jobs was written by an API server that there is no more. The operator after this one reads all."""
        if self.leads() and any(source.restored for source in self.sources.values()):
            raise Superseded("the API server was restored from a backup")

    async def _read_states(self) -> None:
        """What is known of jobs that somebody else has written, or deleted, meanwhile is doubted: who has nothing to
        write would never notice, and the operator after this one would find nothing. What cannot be listed is asked for
        job by job when it is first looked at."""
        self.states, found = {}, dict[JobName, Object]()
        if not self.leads():
            return
        for place in STATES.places(self.settings.watch_namespaces):
            try:
                found |= self.memory.prove_by(await self.cluster.listing(STATES, place), place)
            except (kopf.TemporaryError, kopf.PermanentError) as error:
                log.warning("jobs' states could not be listed, which is tried again: %s", error)
        self.states = found if self.leads() else {}

    async def _read_fabrics(self) -> None:
        """Jobs train without them, too: on an installation, say, whose definitions are older than this operator."""
        try:
            await self.sources[FABRICS].read()
        except NotFound:
            return
        except (kopf.TemporaryError, kopf.PermanentError) as error:
            log.warning("Fabrics could not be listed, which is tried again: %s", error)

    async def watch_over(self) -> None:
        """Ask Prometheus while some job trains, look whether remedies are paused, look after incidents: until
        cancelled."""
        paused_at, incidents_at, pause = -RETENTION_SECONDS, -RETENTION_SECONDS, FIRST_RETENTION_SECONDS
        while True:
            now = self.runtime.monotonic()
            try:
                if self.paused == PAUSE_UNKNOWN or now - paused_at > 2 * self.settings.sample_seconds:
                    await self._look_whether_paused()
                    paused_at = now
                self._ask_prometheus()
                if now - incidents_at > pause:
                    agreed = self.runtime.now() if self.clock.agrees else None
                    await node_history.look_after(self)
                    await incidents.look_after(self.cluster, self.settings.watch_namespaces, agreed)
                    pause = FIRST_RETENTION_SECONDS if incidents_at < 0 else RETENTION_SECONDS
                    incidents_at = now
            except (kopf.TemporaryError, kopf.PermanentError) as error:
                log.warning("looking around failed, and is tried again: %s", error)
            self._count_jobs()
            self._check_clock()
            self.looked_at = now
            await self.runtime.sleep(self.settings.sample_seconds)

    async def _look_whether_paused(self) -> None:
        """As long as nobody has been able to look, remedies are paused."""
        found = await self.cluster.find(CONFIG_MAPS, PAUSE, self.settings.namespace)
        if self.settings.paused:
            paused = "remedies are paused by the operator's settings"
        elif found is not None:
            reason = (found.get("data") or {}).get("reason", "no reason given")
            paused = f"remedies are paused by ConfigMap {self.settings.namespace}/{PAUSE}: {reason}"
        else:
            paused = ""
        if paused != self.paused:
            self.paused = paused
            self.memory.wake_all()

    async def watch_gpus(self) -> None:
        """Ask for their errors more often than for all else, as long as Prometheus answers: until cancelled."""
        while True:
            await self.runtime.sleep(GPU_SECONDS)
            if not self.active or self.sample.unavailable:
                continue
            found = await self.prometheus.gpu_errors()
            if found is not None and not self.sample.unavailable:
                self._hear_of_gpus(found)
                self.sample = replace(self.sample, gpu=found)

    def _ask_prometheus(self) -> None:
        """Beside everything else: an answer may take its time, and counts from when it was asked for."""
        if self._asking is None or self._asking.done():
            active = tuple(name for name, job in self.memory if job.phase in ACTIVE)
            self._asking = self.runtime.start(self._sample(active), "question to Prometheus") if active else None

    async def _sample(self, jobs: Sequence[JobName]) -> None:
        now = self.runtime.now()
        found = await self.prometheus.sample(now, jobs)
        if found.slow and not self.sample.unavailable and now - self.sample.at <= STALE_SECONDS:
            return  # what was heard before is not stale yet
        if not found.unavailable:  # that nothing is heard is no word on a GPU
            self._hear_of_gpus(found.gpu)
        self.sample = found
        metrics.PROMETHEUS_UP.set(not found.unavailable)

    def _hear_of_gpus(self, found: tuple[GpuValue, ...]) -> None:
        """Jobs on nodes whose GPUs show something new look at it."""
        news = {value.node for value in {*found} ^ {*self.gpu}}
        self.gpu = found
        for (namespace, _), pod in self.pods.items() if news else ():
            if pod.node in news and self.memory.wake(namespace, pod.job) is not None:
                self.unseen.add((namespace, pod.job))

    def _hear_of_pod(self, key: Key, pod: PodView) -> None:
        """Its job looks at it; at once where it was a worker that was to stay."""
        memory = self.memory.wake(key[0], pod.job)
        if memory is None or memory.draft is None:
            return
        worker = memory.draft.state.placement.worker(pod.name)
        there = key in self.pods and not (pod.deleting or pod.ended)
        if worker is not None and worker.uid == pod.uid and not worker.leaving and not there:
            self.bereft.add((key[0], pod.job))

    def _check_clock(self) -> None:
        metrics.CLOCK_AHEAD_SECONDS.set(self.clock.ahead)
        if self.clock.agrees == self._clock_agreed:
            return
        self._clock_agreed = self.clock.agrees
        if self._clock_agreed:
            log.warning("this node's clock agrees with the API server's again")
            return
        log.warning(
            "this node's clock is %.0f s ahead of the API server's: until they agree, no job fails by its deadline, "
            "and nothing is deleted because its time is over; look at the time service of the operator's node",
            self.clock.ahead,
        )

    def _count_jobs(self) -> None:
        phases = [memory.phase for _, memory in self.memory]
        self.active = sum(phase in ACTIVE for phase in phases)
        for phase in JobPhase:
            metrics.JOBS.labels(phase).set(phases.count(phase))
        metrics.WORKERS_HEARD.set(sum(memory.heard for _, memory in self.memory))


def _without(jobs: Mapping[JobName, Of], name: JobName) -> dict[JobName, Of]:
    return {other: of for other, of in jobs.items() if other != name}
