"""The caches of pods, nodes, Fabrics, and NodeQuarantines, kept current by watches and by periodic lists."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import kopf

from ...api.fabric import Fabric
from ...api.names import LABEL_JOB
from ...async_runtime import OperatorRuntime, Superseded
from ...decide.network.fabric_status import select_active_fabric
from ...endpoint.token_review import PodIdentity
from ...kube.client import (
    FABRICS,
    NODE_OBJECTS,
    PODS,
    TRAINING_JOB_STATES,
    WATCH_IDLE_TIMEOUT_SECONDS,
    Cluster,
    NotFound,
    Object,
    ResourceKind,
)
from ...kube.reflector import Reflector
from ...kube.store import Key, ResourceStore
from ...observe.job_cache import JobRegistry
from ...observe.peer_jobs import NodeSnapshot
from ...observe.views import view_node, view_pod
from ...settings import Settings
from ...state.cluster_view import NodeView, PodView
from ...state.network import JobName
from ..node_registry import NodeRegistry
from .passes import PassScheduler

STORE_RESYNC_SECONDS = 60.0
STORE_RESYNC_RETRY_SECONDS = 2.0
FIRST_WATCH_EVENT_SECONDS = 2 * WATCH_IDLE_TIMEOUT_SECONDS
"""Within this time each watch receives at least a bookmark."""
MAX_MISSED_POD_CHANGES = 3
"""If this many consecutive lists show changes of pods that the watch did not report, the watch is dead."""
log = logging.getLogger(__name__)


@dataclass
class WatchedStores:
    """The stores of what is watched, except TrainingJobs, which kopf watches, and the jobs' states, which are listed.

    Changes wake the jobs that they concern.
    """

    settings: Settings
    cluster: Cluster
    runtime: OperatorRuntime
    jobs: JobRegistry
    node_registry: NodeRegistry
    passes: PassScheduler
    is_leader: Callable[[], bool]
    listed_states: dict[JobName, Object] = field(default_factory=dict)
    """Listed states of jobs that are not loaded yet: a new leader does not read a thousand of them one by one."""
    fabrics_changed: asyncio.Event = field(default_factory=asyncio.Event)
    pods: ResourceStore[PodView] = field(init=False)
    nodes: ResourceStore[NodeView] = field(init=False)
    fabrics: ResourceStore[Fabric] = field(init=False)
    _node_snapshot: NodeSnapshot = field(init=False, default_factory=NodeSnapshot)
    _reflectors: dict[ResourceKind, Reflector] = field(init=False)

    def __post_init__(self) -> None:
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
        self.fabrics = ResourceStore(FABRICS, Fabric.parse, on_change=lambda _key, _fabric: self.fabrics_changed.set())
        store_groups: tuple[tuple[ResourceStore[Any], ...], ...] = (
            (self.fabrics,),
            (self.nodes, self.node_registry.nodes),
            (self.pods,),
            (self.node_registry.quarantines,),
        )
        namespaces = self.settings.watch_namespaces
        self._reflectors = {
            stores[0].kind: Reflector(self.cluster, self.runtime, stores, namespaces) for stores in store_groups
        }

    @property
    def fabric(self) -> Fabric | None:
        """Return the active Fabric, or None."""
        return select_active_fabric(list(self.fabrics))

    @property
    def levels(self) -> tuple[str, ...]:
        """Return the node labels of the Fabric's levels, from the leaf outward."""
        return tuple(level.node_label for level in self.fabric.spec.levels) if self.fabric else ()

    def refresh_node_snapshot(self, now: float) -> NodeSnapshot:
        """Return the snapshot of all nodes that all passes share, current at `now`."""
        self._node_snapshot = self._node_snapshot.refresh(self.nodes, now)
        return self._node_snapshot

    def invalidate(self) -> None:
        """Require that lists confirm what the watches reported while this operator stood by."""
        self.pods.invalidate()
        self.nodes.invalidate()
        self.node_registry.invalidate()
        for reflector in self._reflectors.values():
            reflector.has_seen_restore = False

    async def wait_until_listed(self) -> None:
        """Return when pods and nodes are listed since this operator leads; earlier, the state of jobs is unknown."""
        await self.pods.listed.wait()
        await self.nodes.listed.wait()

    def is_pod_alive(self, holder: PodIdentity) -> bool:
        """Return whether that very pod is known to exist and not to terminate."""
        pod = self.pods.get((holder.namespace, holder.pod))
        return pod is not None and pod.uid == holder.uid and not pod.deleting and not pod.ended

    def find_watch_failure(self, now: float) -> str:
        """Return why the watches cannot be trusted. Empty: they work.

        Lists continue either way, but only at their slow interval.
        """
        if (
            not (self.nodes.has_watch_events or self.pods.has_watch_events)
            and now - self.jobs.started_at > FIRST_WATCH_EVENT_SECONDS
        ):
            return (
                f"no watch has reported anything for {FIRST_WATCH_EVENT_SECONDS:.0f} s: the API server is not reached"
            )
        if self.pods.missed_changes >= MAX_MISSED_POD_CHANGES:
            return f"the watch of pods is dead: {self.pods.missed_changes} changes were seen by lists only"
        return ""

    async def run_reflectors(self) -> None:
        """Run the watches until cancelled, whether or not this operator leads."""
        await self.wait_until_listed()  # watches begin where these lists end
        await asyncio.gather(*(reflector.run() for reflector in self._reflectors.values()))

    async def resync(self) -> None:
        """List what is watched, at once and then every minute, until cancelled.

        Raises Superseded if the API server was restored from a backup while this operator leads.
        """
        while True:
            pause = STORE_RESYNC_SECONDS
            await self._read_fabrics()  # first: they determine which node labels are cached
            try:
                await self._read_states()  # before pods, whose list starts the passes
                await self._reflectors[NODE_OBJECTS].refresh()
                await self._reflectors[PODS].refresh()
            except (kopf.TemporaryError, kopf.PermanentError) as error:
                log.warning("pods and nodes could not be listed; retrying: %s", error)
                pause = STORE_RESYNC_RETRY_SECONDS
            self._raise_if_restored()
            await self.runtime.sleep(pause)

    def _raise_if_restored(self) -> None:
        """Raise Superseded after a restore of the API server.

        kopf would continue its watch of jobs at a resourceVersion of the future and receive nothing. The caches hold
        objects that no longer exist. The next operator reads everything again.
        """
        if self.is_leader() and any(reflector.has_seen_restore for reflector in self._reflectors.values()):
            raise Superseded("the API server was restored from a backup")

    async def _read_states(self) -> None:
        """List the jobs' states, and mark cached ones for a reload if another writer changed or deleted them.

        A job that has nothing to write would never notice that, and the next operator would find no state. States that
        cannot be listed are read one by one, at the first pass of each job.
        """
        self.listed_states, states = {}, dict[JobName, Object]()
        if not self.is_leader():
            return
        for namespace in TRAINING_JOB_STATES.list_scopes(self.settings.watch_namespaces):
            try:
                states |= self.jobs.verify_states(
                    await self.cluster.list_with_version(TRAINING_JOB_STATES, namespace), namespace
                )
            except (kopf.TemporaryError, kopf.PermanentError) as error:
                log.warning("TrainingJobStates could not be listed; retrying: %s", error)
        self.listed_states = states if self.is_leader() else {}

    async def _read_fabrics(self) -> None:
        """List Fabrics.

        Jobs train without them, too, for example if the installed definitions are older than this operator.
        """
        try:
            await self._reflectors[FABRICS].refresh()
        except NotFound:
            return
        except (kopf.TemporaryError, kopf.PermanentError) as error:
            log.warning("Fabrics could not be listed; retrying: %s", error)

    def _on_pod_changed(self, key: Key, pod: PodView) -> None:
        """Wake the pod's job, and mark it if it lost a worker that was not leaving."""
        cache = self.jobs.wake(key[0], pod.job)
        if cache is None or cache.desired is None:
            return
        worker = cache.desired.state.placement.find_worker(pod.name)
        exists = key in self.pods and not (pod.deleting or pod.ended)
        if worker is not None and worker.uid == pod.uid and not worker.leaving and not exists:
            self.passes.jobs_with_lost_worker.add((key[0], pod.job))
