"""Everything there is, put together: a cluster, its network, operators, jobs' workers; nothing happens by itself yet.

All of it shares one loop. What is left to chance comes from streams of its own for each purpose, so that one thing more
that happens does not change how all others fall out.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from .kubernetes.api_server import ApiServer
from .kubernetes.containers import ExitCallback
from .kubernetes.controllers import NamespaceCollector, NodeLifecycle, PodCollector, TaintEviction
from .kubernetes.nodes import NodePool
from .kubernetes.objects import Object
from .kubernetes.scheduler import Scheduler
from .loop import VirtualLoop, get_current_process, create_unowned_context
from .network import API_PLACE, SimulatedNetwork
from .operators.endpoint import OperatorService
from .operators.pod import Deployment
from .prometheus import MEMORY_METRIC, XID_METRIC, SimulatedPrometheus
from .story import RunLog
from .workers.training import TrainingRegistry
from .workers.worker import SimulatedWorker

EPOCH = 1_800_000_000.0
"""Seconds since the epoch at which all runs begin."""
NAMESPACE = "team"
"""Of all jobs."""
OPERATOR_NAMESPACE = "pacekeeper-system"
NODE_MEMORY = "64Gi"
"""Of each node."""
Result = TypeVar("Result")


@dataclass(frozen=True)
class WorldSettings:
    nodes: int = 6
    slots: int = 2
    """Workers that a node has room for."""
    operators: int = 1
    """Replicas."""
    old_errors: int = 0
    """Nodes whose GPUs have had errors long before the run."""
    operator: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `pacekeeper_operator.settings.Settings`."""


class World:
    """`run` lets time pass."""

    def __init__(self, seed: int, settings: WorldSettings = WorldSettings()) -> None:  # it is frozen
        self.seed = seed
        self.settings = settings
        self.loop = VirtualLoop()  # type: ignore[abstract]  # asyncio itself needs no more of a loop
        self.log = RunLog(self.loop.time)
        self.network = SimulatedNetwork(self.loop, self.create_random("network"))
        self.clocks: dict[str, float] = {}
        """Seconds by which a place's clock is off."""
        self.api = ApiServer(self)
        for namespace in (OPERATOR_NAMESPACE, NAMESPACE):
            self.api.create("namespaces", {"metadata": {"name": namespace}})
        self.node_pool = NodePool(self)
        self.nodes = self.node_pool.nodes
        self.workers: dict[str, SimulatedWorker] = {}
        """Those of which something runs, by their pods' uids."""
        self.trainings = TrainingRegistry(self)
        self.prometheus = SimulatedPrometheus(self)
        self.endpoint = OperatorService(self)
        self.network.is_listening = self.node_pool.is_listening
        self.network.is_stopped = self._is_sidecar_stopped
        self.network.get_caller = _get_caller_place
        for machine in (Scheduler, TaintEviction, PodCollector, NamespaceCollector):
            machine(self)
        NodeLifecycle(self, self.node_pool)
        for _ in range(settings.nodes):
            self.add_node()
        self.deployment = Deployment(self, settings.operators)

    def add_node(self) -> None:
        """Another machine."""
        number = len(self.nodes)
        old = (MEMORY_METRIC, XID_METRIC)[number % 2] if number < self.settings.old_errors else ""
        self.prometheus.add_exporter(f"node-{number}", old_error=old)
        self.node_pool.add_node(f"node-{number}", {"cpu": str(self.settings.slots), "memory": NODE_MEMORY})

    def create_worker(self, pod: Object, node: str, address: str, exited: ExitCallback) -> SimulatedWorker:
        """The processes of a job's worker, not yet started."""
        worker = self.workers[pod["metadata"]["uid"]] = SimulatedWorker(self, pod, node, address, exited)
        return worker

    def _is_sidecar_stopped(self, address: str) -> bool:
        """Scrapes and probes fill the queue of a stopped sidecar within seconds."""
        return any(worker.sidecar.paused for worker in self.workers.values() if worker.address == address)

    def now(self) -> float:
        """Virtual seconds."""
        return self.loop.time()

    def wall_time(self, place: str = "") -> float:
        """Seconds since the epoch, by the clock of that place."""
        return EPOCH + self.loop.time() + self.clocks.get(place, 0.0)

    def create_random(self, purpose: str) -> random.Random:
        """A stream of its own."""
        return random.Random(f"{self.seed}/{purpose}")

    def call_after(self, seconds: float, call: Callable[..., object], *arguments: Any) -> asyncio.TimerHandle:
        """Of no process."""
        return self.loop.call_later(seconds, call, *arguments, context=create_unowned_context())

    def spawn(self, work: Coroutine[Any, Any, Result], name: str) -> asyncio.Task[Result]:
        """Of no process."""
        return self.loop.create_task(work, name=name, context=create_unowned_context())

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """As long as `work` takes, in virtual time."""
        return self.loop.run(work)


def _get_caller_place() -> str:
    """The place whose process opens a connection."""
    process = get_current_process()
    return API_PLACE if process is None else process.name
