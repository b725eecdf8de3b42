"""One pod of the operator, and the Deployment that keeps as many as there shall be."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import TYPE_CHECKING

from requests.exceptions import ConnectionError as NobodyThere
from requests.exceptions import ConnectTimeout

from pacekeeper_operator import process, server
from pacekeeper_operator.certificates import Told
from pacekeeper_operator.cluster import Cluster
from pacekeeper_operator.observe.prometheus import Prometheus
from pacekeeper_operator.observe.prometheus_access import Rows, Slow
from pacekeeper_operator.runtime import Runtime
from pacekeeper_operator.services.leadership import Lease
from pacekeeper_operator.services.operator import Operator
from pacekeeper_operator.services.sidecars import Sidecars
from pacekeeper_operator.settings import Settings

from ..kubernetes.watch import Watch
from ..loop import Process
from ..network import PROMETHEUS
from .endpoint import Listener
from .kopf_contract import Kopf
from .runtime import SimulatedRuntime

if TYPE_CHECKING:
    from ..world import World

START_SECONDS = 0.8
"""From the container's start to the operator's first call."""
RESTART_SECONDS = 1.0
"""Between a container's end and its next start: doubles up to the longest while it ends again and again."""
LONGEST_RESTART_SECONDS = 20.0
GRACE_SECONDS = 30.0
"""Between SIGTERM and SIGKILL."""
LOST_SECONDS = 60.0
"""Until the kubelet of a pod that was deleted by force hears of it."""
STEADY_SECONDS = 60.0
"""A container that has run for so long begins anew with short pauses."""


class OperatorPod:
    """A pod, whose container runs the operator's process again and again."""

    def __init__(self, world: World, name: str, address: str) -> None:
        self.name = name
        self.address = address
        self.operator: Operator | None = None
        """Of the process that runs now, once it leads."""
        self.runtime: Runtime | None = None
        self.process = Process(world.loop, name)
        self.gone = False
        self._world = world
        self._starts = 0
        self._pause = RESTART_SECONDS
        self._told_to_end: asyncio.Event | None = None

    def start(self) -> None:
        """The container."""
        if self.gone:
            return
        self._starts += 1
        self.process, self.operator, self._told_to_end = Process(self._world.loop, self.name), None, None
        self.process.spawn(self._run(self.process), name=self.name)

    def kill(self) -> None:
        """SIGKILL to the container's process: the kubelet starts it again."""
        self._world.story.tell(self.name, "is killed")
        self._ended(self.process)

    def remove(self) -> None:
        """The pod is deleted by force; the Deployment makes another."""
        self._world.story.tell(self.name, "is removed")
        self.gone = True
        self._ended(self.process)

    def lose(self) -> None:
        """The pod is deleted by force while nobody reaches its kubelet: its process runs on for a while."""
        self._world.story.tell(self.name, "is removed, and runs on")
        self.gone = True
        self._world.endpoint.forget(self.name)
        self._world.after(LOST_SECONDS, self._ended, self.process)

    def end(self) -> None:
        """SIGTERM: it leaves in order, and the Deployment makes another."""
        self._world.story.tell(self.name, "is asked to leave")
        self.gone = True
        if self._told_to_end is None:  # nothing listens to the signal yet
            self._ended(self.process)
        else:
            self.process.spawn(self._leave(self._told_to_end), name="SIGTERM")
            self._world.after(GRACE_SECONDS, self._ended, self.process)

    async def _leave(self, told_to_end: asyncio.Event) -> None:
        told_to_end.set()

    def pause(self) -> None:
        self._world.story.tell(self.name, "is frozen")
        self.process.pause()

    def resume(self) -> None:
        self._world.story.tell(self.name, "runs on")
        self.process.resume()

    async def _run(self, own: Process) -> None:
        world, name = self._world, f"{self.name}/{self._starts}"
        began = world.now()
        await asyncio.sleep(START_SECONDS)
        runtime = self.runtime = SimulatedRuntime(world, self.name, name)
        told_to_end = self._told_to_end = asyncio.Event()
        settings = Settings(
            identity=self.name, pod_ip=self.address, prometheus_url="http://prometheus", **world.settings.operator
        )
        in_order = await process.run(settings, runtime, _Edges(world, self, own, told_to_end))
        world.story.tell(self.name, "has left in order" if in_order else f"has ended: {runtime.failure!r}")
        if world.now() - began > STEADY_SECONDS:
            self._pause = RESTART_SECONDS
        self._ended(own)

    def _ended(self, ended: Process) -> None:
        if ended.dead:
            return
        ended.kill()
        self.operator = None
        if not self.gone:
            self._world.after(self._pause, self.start)
            self._pause = min(LONGEST_RESTART_SECONDS, 2 * self._pause)


class Deployment:
    """Keeps so many pods."""

    def __init__(self, world: World, replicas: int) -> None:
        self.pods: list[OperatorPod] = []
        self._world = world
        self._replicas = replicas
        self._made = 0
        self._grow()

    @property
    def leader(self) -> OperatorPod | None:
        """Whose process serves, if any does; of a frozen one and its successor, the successor."""
        leading = [pod for pod in self.pods if pod.operator is not None and not pod.process.dead]
        return max(
            leading,
            key=lambda pod: (not pod.process.paused, pod.operator is not None and pod.operator.leads()),
            default=None,
        )

    def replace(self, pod: OperatorPod, how: Callable[[OperatorPod], None]) -> None:
        """By another; `how` it goes: OperatorPod.end, .remove or .lose."""
        how(pod)
        if pod in self.pods:
            self.pods.remove(pod)
        self._world.after(RESTART_SECONDS, self._grow)

    def scale(self, replicas: int) -> None:
        """The pods that are too many end in order."""
        self._replicas = replicas
        while len(self.pods) > replicas:
            self.pods.pop().end()
        self._grow()

    def _grow(self) -> None:
        while len(self.pods) < self._replicas:
            pod = OperatorPod(self._world, f"operator-{self._made}", f"192.0.2.{self._made % 256}")
            self._made += 1
            self.pods.append(pod)
            pod.start()


class _Edges:
    """Of a simulated process."""

    def __init__(self, world: World, pod: OperatorPod, own: Process, told_to_end: asyncio.Event) -> None:
        self._world = world
        self._pod = pod
        self._process = own
        self.told_to_end = told_to_end
        self._connection = world.api.connection(pod.name, own)

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Cluster]:
        yield Cluster(self._connection)

    def certificates(self, _api: Cluster, _settings: Settings, _runtime: Runtime) -> process.Certificates:
        return _Trusted()

    def prometheus(self, settings: Settings) -> Prometheus:
        dcgm = settings.dcgm_namespace, settings.dcgm_node_label
        return Prometheus(settings.prometheus_url, *dcgm, self._ask, settings.prometheus_matchers)

    async def _ask(self, query: str, seconds: float) -> Rows:
        world, place = self._world, self._pod.name
        try:
            async with asyncio.timeout(seconds):
                for _ in range(2):
                    await asyncio.sleep(world.network.delay(place, PROMETHEUS))
                    if not world.network.reaches(place, PROMETHEUS):
                        await asyncio.get_running_loop().create_future()
                rows: Rows = world.prometheus.rows(query)
                return rows
        except TimeoutError as error:
            away = not world.network.reaches(place, PROMETHEUS)
            raise ConnectTimeout("no answer") if away else Slow("no answer") from error
        except ConnectionRefusedError as error:
            raise NobodyThere("refused") from error

    def webhook(self, _settings: Settings, _runtime: Runtime) -> None:
        return None

    def answer_probes(self, _operator: Operator, _lease: Lease) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    @asynccontextmanager
    async def listen(
        self, sidecars: Sidecars, runtime: Runtime, settings: Settings, _context: ssl.SSLContext, lease: Lease
    ) -> AsyncIterator[None]:
        application = server.application(sidecars, runtime, leadership=lease)
        application.freeze()
        listener = Listener(self._pod.name, self._process, application, settings.pod_endpoint)
        self._world.endpoint.open(listener)
        try:
            yield
        finally:
            self._world.endpoint.close(listener)

    async def handle(self, operator: Operator, stopped: asyncio.Event) -> None:
        self._pod.operator = operator
        self._world.story.tell(self._pod.name, "leads")
        await Kopf(operator, self._connection, self._watch).run(stopped)

    def _watch(self, plural: str, version: str, labels: str) -> Watch:
        return self._world.api.watch(self._pod.name, self._process, plural, version, labels=labels)


class _Trusted:
    """Instead of certificates, which OpenSSL would judge by this machine's clock."""

    trusted = "an authority"

    def __init__(self) -> None:
        self.told: Told = lambda _: None
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)

    async def begin(self) -> None:
        return None

    async def keep(self) -> None:
        await asyncio.get_running_loop().create_future()
