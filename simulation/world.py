"""All parts put together: a cluster, its network, operators, and jobs' workers. No fault happens yet.

All parts share one loop. Each purpose has its own random stream, so that an additional event does not change the
outcome of all others.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from .kubernetes.api.api_server import ApiServer
from .kubernetes.api.objects import Object
from .kubernetes.controllers import NamespaceCollector, NodeLifecycle, PodCollector, TaintEviction
from .kubernetes.nodes import NodePool
from .kubernetes.scheduler import Scheduler
from .loop import VirtualLoop, create_unowned_context, get_current_process
from .network import API_PLACE, SimulatedNetwork
from .operators.endpoint import OperatorService
from .operators.pod import Deployment
from .ports import ExitCallback
from .prometheus import MEMORY_METRIC, XID_METRIC, SimulatedPrometheus
from .run_log import RunLog
from .workers.training import TrainingRegistry
from .workers.worker import SimulatedWorker

EPOCH = 1_800_000_000.0
"""Start of all runs, in seconds since the epoch."""
NAMESPACE = "team"
"""Namespace of all jobs."""
OPERATOR_NAMESPACE = "pacekeeper-system"
NODE_MEMORY = "64Gi"
"""Memory of each node."""
Result = TypeVar("Result")


@dataclass(frozen=True)
class WorldSettings:
    nodes: int = 6
    slots: int = 2
    """Number of workers that fit on a node."""
    operators: int = 1
    """Number of the operator's replicas."""
    old_errors: int = 0
    """Number of nodes whose GPUs had errors long before the run."""
    operator: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `pacekeeper_operator.settings.Settings`."""


class World:
    """The simulated world. `run` lets time pass."""

    def __init__(self, seed: int, settings: WorldSettings = WorldSettings()) -> None:  # it is frozen
        self.seed = seed
        self.settings = settings
        self.loop = VirtualLoop()  # type: ignore[abstract]  # asyncio itself needs no more of a loop
        self.log = RunLog(self.loop.time)
        self.network = SimulatedNetwork(self.loop, self.create_random("network"))
        self.clocks: dict[str, float] = {}
        """Clock error of each place, in seconds."""
        self.api = ApiServer(self)
        for namespace in (OPERATOR_NAMESPACE, NAMESPACE):
            self.api.create("namespaces", {"metadata": {"name": namespace}})
        self.node_pool = NodePool(self)
        self.nodes = self.node_pool.nodes
        self.workers: dict[str, SimulatedWorker] = {}
        """Workers with a running process, by their pods' UIDs."""
        self.trainings = TrainingRegistry(self, self.nodes)
        self.prometheus = SimulatedPrometheus(self, self.nodes, self.workers)
        self.endpoint = OperatorService(self)
        self.network.is_listening = self.node_pool.is_listening
        self.network.is_stopped = self._is_sidecar_stopped
        self.network.get_caller = _get_caller_place
        for controller in (Scheduler, TaintEviction, PodCollector, NamespaceCollector):
            controller(self)
        NodeLifecycle(self, self.node_pool)
        for _ in range(settings.nodes):
            self.add_node()
        self.deployment = Deployment(self, settings.operators, settings.operator)

    def add_node(self) -> None:
        """Add a machine."""
        number = len(self.nodes)
        old_error = (MEMORY_METRIC, XID_METRIC)[number % 2] if number < self.settings.old_errors else ""
        self.prometheus.add_exporter(f"node-{number}", old_error=old_error)
        self.node_pool.add_node(f"node-{number}", {"cpu": str(self.settings.slots), "memory": NODE_MEMORY})

    def create_worker(self, pod: Object, node: str, address: str, exited: ExitCallback) -> SimulatedWorker:
        """Create the processes of a job's worker, without starting them."""
        worker = self.workers[pod["metadata"]["uid"]] = SimulatedWorker(self, pod, node, address, exited)
        return worker

    def forget_worker(self, uid: str) -> None:
        """Remove a worker from the running ones."""
        self.workers.pop(uid, None)

    def _is_sidecar_stopped(self, address: str) -> bool:
        """Return whether the sidecar is stopped: scrapes and probes fill its accept queue within seconds."""
        return any(worker.sidecar.paused for worker in self.workers.values() if worker.address == address)

    def now(self) -> float:
        """Return the virtual time in seconds."""
        return self.loop.time()

    def wall_time(self, place: str = "") -> float:
        """Return the seconds since the epoch on the clock of `place`."""
        return EPOCH + self.loop.time() + self.clocks.get(place, 0.0)

    def create_random(self, purpose: str) -> random.Random:
        """Create the random stream for a purpose."""
        return random.Random(f"{self.seed}/{purpose}")

    def call_after(self, seconds: float, call: Callable[..., object], *arguments: Any) -> asyncio.TimerHandle:
        """Schedule a call that belongs to no process."""
        return self.loop.call_later(seconds, call, *arguments, context=create_unowned_context())

    def spawn(self, work: Coroutine[Any, Any, Result], name: str) -> asyncio.Task[Result]:
        """Start a task that belongs to no process."""
        return self.loop.create_task(work, name=name, context=create_unowned_context())

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run `work` in virtual time, and return its result."""
        return self.loop.run(work)


def _get_caller_place() -> str:
    """Return the place whose process opens a connection."""
    process = get_current_process()
    return API_PLACE if process is None else process.name
