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
from .kubernetes.containers import Exited
from .kubernetes.controllers import NamespaceCollector, NodeLifecycle, PodCollector, TaintEviction
from .kubernetes.nodes import Fleet
from .kubernetes.objects import Object
from .kubernetes.scheduler import Scheduler
from .loop import VirtualLoop, current_process, nobodys
from .network import API, Network
from .operators.endpoint import Endpoint
from .operators.pod import Deployment
from .prometheus import MEMORY_METRIC, XID_METRIC, Prometheus
from .story import Story
from .workers.training import Trainings
from .workers.worker import Worker

EPOCH = 1_800_000_000.0
"""Seconds since the epoch at which all runs begin."""
NAMESPACE = "team"
"""Of all jobs."""
OPERATOR_NAMESPACE = "pacekeeper-system"
MEMORY = "64Gi"
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
        self.story = Story(self.loop.time)
        self.network = Network(self.loop, self.random("network"))
        self.clocks: dict[str, float] = {}
        """Seconds by which a place's clock is off."""
        self.api = ApiServer(self)
        for namespace in (OPERATOR_NAMESPACE, NAMESPACE):
            self.api.create("namespaces", {"metadata": {"name": namespace}})
        self.fleet = Fleet(self)
        self.nodes = self.fleet.nodes
        self.workers: dict[str, Worker] = {}
        """Those of which something runs, by their pods' uids."""
        self.trainings = Trainings(self)
        self.prometheus = Prometheus(self)
        self.endpoint = Endpoint(self)
        self.network.listens = self.fleet.listens
        self.network.stopped = self._is_stopped
        self.network.caller = _caller
        for machine in (Scheduler, TaintEviction, PodCollector, NamespaceCollector):
            machine(self)
        NodeLifecycle(self, self.fleet)
        for _ in range(settings.nodes):
            self.add_node()
        self.deployment = Deployment(self, settings.operators)

    def add_node(self) -> None:
        """Another machine."""
        number = len(self.nodes)
        old = (MEMORY_METRIC, XID_METRIC)[number % 2] if number < self.settings.old_errors else ""
        self.prometheus.add_exporter(f"node-{number}", old_error=old)
        self.fleet.add(f"node-{number}", {"cpu": str(self.settings.slots), "memory": MEMORY})

    def launch(self, pod: Object, node: str, address: str, exited: Exited) -> Worker:
        """The processes of a job's worker, not yet started."""
        worker = self.workers[pod["metadata"]["uid"]] = Worker(self, pod, node, address, exited)
        return worker

    def _is_stopped(self, address: str) -> bool:
        """Scrapes and probes fill the queue of a stopped sidecar within seconds."""
        return any(worker.sidecar.paused for worker in self.workers.values() if worker.address == address)

    def now(self) -> float:
        """Virtual seconds."""
        return self.loop.time()

    def wall(self, place: str = "") -> float:
        """Seconds since the epoch, by the clock of that place."""
        return EPOCH + self.loop.time() + self.clocks.get(place, 0.0)

    def random(self, purpose: str) -> random.Random:
        """A stream of its own."""
        return random.Random(f"{self.seed}/{purpose}")

    def after(self, seconds: float, call: Callable[..., object], *arguments: Any) -> asyncio.TimerHandle:
        """Of no process."""
        return self.loop.call_later(seconds, call, *arguments, context=nobodys())

    def spawn(self, work: Coroutine[Any, Any, Result], name: str) -> asyncio.Task[Result]:
        """Of no process."""
        return self.loop.create_task(work, name=name, context=nobodys())

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """As long as `work` takes, in virtual time."""
        return self.loop.run(work)


def _caller() -> str:
    """The place whose process opens a connection."""
    process = current_process()
    return API if process is None else process.name
