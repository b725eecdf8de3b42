"""One pod of the operator, and the Deployment that keeps the number of replicas."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any

from requests.exceptions import ConnectionError as NobodyThere
from requests.exceptions import ConnectTimeout

from pacekeeper_operator.async_runtime import OperatorRuntime
from pacekeeper_operator.endpoint import server
from pacekeeper_operator.endpoint.certificates import TrustCallback
from pacekeeper_operator.endpoint.sidecars import SidecarService
from pacekeeper_operator.kube.client import Cluster
from pacekeeper_operator.kube.leader_election import LeaderElector
from pacekeeper_operator.observe.prometheus import PrometheusClient
from pacekeeper_operator.observe.prometheus_access import QueryRows, QueryTimedOut
from pacekeeper_operator.runtime import process
from pacekeeper_operator.services.operator import Operator
from pacekeeper_operator.settings import Settings

from ..kubernetes.api.connection import SimulatedApiConnection
from ..kubernetes.api.objects import KINDS
from ..kubernetes.api.watch import WatchOptions, WatchStream
from ..loop import Process
from ..network import PROMETHEUS_PLACE
from .endpoint import EndpointListener
from .kopf_contract import Kopf
from .operator_world import OperatorWorld
from .runtime import SimulatedRuntime

OPERATOR_START_SECONDS = 0.8
"""From the container's start to the operator's first call."""
OPERATOR_RESTART_SECONDS = 1.0
"""Delay between a container's exit and its next start. It doubles up to the maximum while the container keeps
exiting."""
MAX_OPERATOR_RESTART_SECONDS = 20.0
OPERATOR_GRACE_SECONDS = 30.0
"""Between SIGTERM and SIGKILL."""
LOST_POD_RUNTIME_SECONDS = 60.0
"""Until the kubelet of a force-deleted pod learns of it."""
OPERATOR_STEADY_SECONDS = 60.0
"""A container that has run for this duration restarts with short delays again."""


class OperatorPod:
    """A pod whose container restarts the operator's process. `settings`: fields of `Settings`."""

    def __init__(self, world: OperatorWorld, name: str, address: str, settings: Mapping[str, Any]) -> None:
        self.name = name
        self.address = address
        self.operator: Operator | None = None
        """The operator in the present process, once it leads."""
        self.runtime: OperatorRuntime | None = None
        self.process = Process(world.loop, name)
        self.is_removed = False
        self._world = world
        self._settings = settings
        self._starts = 0
        self._pause = OPERATOR_RESTART_SECONDS
        self._stop_requested: asyncio.Event | None = None

    def start(self) -> None:
        """Start the container."""
        if self.is_removed:
            return
        self._starts += 1
        self.process, self.operator, self._stop_requested = Process(self._world.loop, self.name), None, None
        self.process.spawn(self._run_container(self.process), name=self.name)

    def kill(self) -> None:
        """Send SIGKILL to the container's process. The kubelet restarts it."""
        self._world.log.record(self.name, "is killed")
        self._on_container_end(self.process)

    def remove(self) -> None:
        """Force-delete the pod. The Deployment creates another one."""
        self._world.log.record(self.name, "is removed")
        self.is_removed = True
        self._on_container_end(self.process)

    def remove_unnoticed(self) -> None:
        """Force-delete the pod while its kubelet is unreachable: the process keeps running for a while."""
        self._world.log.record(self.name, "is removed, and runs on")
        self.is_removed = True
        self._world.endpoint.remove_pod(self.name)
        self._world.call_after(LOST_POD_RUNTIME_SECONDS, self._on_container_end, self.process)

    def end(self) -> None:
        """Send SIGTERM: the operator leaves in order, and the Deployment creates another pod."""
        self._world.log.record(self.name, "is asked to leave")
        self.is_removed = True
        if self._stop_requested is None:  # no handler is installed yet
            self._on_container_end(self.process)
        else:
            self.process.spawn(self._request_stop(self._stop_requested), name="SIGTERM")
            self._world.call_after(OPERATOR_GRACE_SECONDS, self._on_container_end, self.process)

    async def _request_stop(self, stop_requested: asyncio.Event) -> None:
        stop_requested.set()

    def pause(self) -> None:
        self._world.log.record(self.name, "is frozen")
        self.process.pause()

    def resume(self) -> None:
        self._world.log.record(self.name, "runs on")
        self.process.resume()

    async def _run_container(self, own_process: Process) -> None:
        world, name = self._world, f"{self.name}/{self._starts}"
        started_at = world.now()
        await asyncio.sleep(OPERATOR_START_SECONDS)
        runtime = self.runtime = SimulatedRuntime(world, self.name, name)
        stop_requested = self._stop_requested = asyncio.Event()
        settings = Settings(
            identity=self.name, pod_ip=self.address, prometheus_url="http://prometheus", **self._settings
        )
        in_order = await process.run_operator(
            settings, runtime, _SimulatedEnvironment(world, self, own_process, stop_requested)
        )
        world.log.record(self.name, "has left in order" if in_order else f"has ended: {runtime.failure!r}")
        if world.now() - started_at > OPERATOR_STEADY_SECONDS:
            self._pause = OPERATOR_RESTART_SECONDS
        self._on_container_end(own_process)

    def _on_container_end(self, ended: Process) -> None:
        if ended.dead:
            return
        ended.kill()
        self.operator = None
        if not self.is_removed:
            self._world.call_after(self._pause, self.start)
            self._pause = min(MAX_OPERATOR_RESTART_SECONDS, 2 * self._pause)


class Deployment:
    """Keeps the number of pods. `settings`: fields of `Settings`."""

    def __init__(self, world: OperatorWorld, replicas: int, settings: Mapping[str, Any]) -> None:
        self.pods: list[OperatorPod] = []
        self._world = world
        self._replicas = replicas
        self._settings = settings
        self._created = 0
        self._add_missing_pods()

    @property
    def leader(self) -> OperatorPod | None:
        """The pod whose process leads, if any. A paused one and its successor may both: then the successor."""
        leading = [pod for pod in self.pods if pod.operator is not None and not pod.process.dead]
        return max(
            leading,
            key=lambda pod: (not pod.process.paused, pod.operator is not None and pod.operator.is_leader()),
            default=None,
        )

    def replace(self, pod: OperatorPod, how: Callable[[OperatorPod], None]) -> None:
        """Replace a pod. `how`: OperatorPod.end, .remove, or .remove_unnoticed."""
        how(pod)
        if pod in self.pods:
            self.pods.remove(pod)
        self._world.call_after(OPERATOR_RESTART_SECONDS, self._add_missing_pods)

    def scale(self, replicas: int) -> None:
        """Set the number of replicas. Surplus pods end in order."""
        self._replicas = replicas
        while len(self.pods) > replicas:
            self.pods.pop().end()
        self._add_missing_pods()

    def _add_missing_pods(self) -> None:
        while len(self.pods) < self._replicas:
            name, address = f"operator-{self._created}", f"192.0.2.{self._created % 256}"
            pod = OperatorPod(self._world, name, address, self._settings)
            self._created += 1
            self.pods.append(pod)
            pod.start()


class _SimulatedEnvironment:
    """The environment of a simulated operator process."""

    def __init__(
        self, world: OperatorWorld, pod: OperatorPod, own_process: Process, stop_requested: asyncio.Event
    ) -> None:
        self._world = world
        self._pod = pod
        self._process = own_process
        self.stop_requested = stop_requested
        self._connection = SimulatedApiConnection(world.api, pod.name, own_process)

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Cluster]:
        yield Cluster(self._connection)

    def create_certificates(
        self, _api: Cluster, _settings: Settings, _runtime: OperatorRuntime
    ) -> process.CertificateProvider:
        return _StaticCertificates()

    def create_prometheus(self, settings: Settings) -> PrometheusClient:
        dcgm = settings.dcgm_namespace, settings.dcgm_node_label
        return PrometheusClient(settings.prometheus_url, *dcgm, self._query_prometheus, settings.prometheus_matchers)

    async def _query_prometheus(self, query: str, seconds: float) -> QueryRows:
        world, place = self._world, self._pod.name
        try:
            async with asyncio.timeout(seconds):
                for _ in range(2):
                    await asyncio.sleep(world.network.draw_delay(place, PROMETHEUS_PLACE))
                    if not world.network.can_reach(place, PROMETHEUS_PLACE):
                        await asyncio.get_running_loop().create_future()
                rows: QueryRows = world.prometheus.run_query(query)
                return rows
        except TimeoutError as error:
            unreachable = not world.network.can_reach(place, PROMETHEUS_PLACE)
            raise ConnectTimeout("no answer") if unreachable else QueryTimedOut("no answer") from error
        except ConnectionRefusedError as error:
            raise NobodyThere("refused") from error

    def create_webhook(self, _settings: Settings, _runtime: OperatorRuntime) -> None:
        return None

    def serve_liveness(self, _operator: Operator, _lease: LeaderElector) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    @asynccontextmanager
    async def serve_sidecars(
        self,
        sidecars: SidecarService,
        runtime: OperatorRuntime,
        settings: Settings,
        _context: ssl.SSLContext,
        lease: LeaderElector,
    ) -> AsyncIterator[None]:
        application = server.create_application(sidecars, runtime, leadership=lease)
        application.freeze()
        listener = EndpointListener(self._pod.name, self._process, application, settings.pod_endpoint)
        self._world.endpoint.open(listener)
        try:
            yield
        finally:
            self._world.endpoint.close(listener)

    def serve_injection(self, *_: object) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    async def run_handlers(self, operator: Operator, stopped: asyncio.Event) -> None:
        self._pod.operator = operator
        self._world.log.record(self._pod.name, "leads")
        await Kopf(operator, self._connection, self._open_watch).run(stopped)

    def _open_watch(self, plural: str, version: str, labels: str) -> WatchStream:
        options = WatchOptions(version, labels)
        return WatchStream(self._world.api, self._pod.name, self._process, KINDS[plural], options)


class _StaticCertificates:
    """Replaces certificates, whose validity OpenSSL would check with the real clock."""

    trusted = "an authority"

    def __init__(self) -> None:
        self.on_trust_changed: TrustCallback = lambda _: None
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)

    async def start(self) -> None:
        return None

    async def renew_periodically(self) -> None:
        await asyncio.get_running_loop().create_future()
