"""One operator process, put together: it stands by, leads once the Lease is its own, and leaves in order.

What lies beyond the process (the API server, Prometheus, the sockets, kopf's own machinery) comes in as `Edges`, so
that the whole of it runs in a simulation as it does in a pod.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Iterable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import Protocol

from . import certificates
from .cluster import Cluster
from .manifests import Installation
from .observe.memory import Memory
from .observe.prometheus import Prometheus
from .runtime import Overtaken, Runtime
from .services import leadership, probe_check
from .services.leadership import Lease
from .services.operator import Operator
from .services.sidecars import Sidecars
from .services.webhook import Webhook
from .settings import Settings

LEAVING_SECONDS = 8.0
"""So long the operator may take to leave in order once one of its tasks has died."""


class Certificates(Protocol):
    """What the endpoint shows, see `certificates.Certificates`."""

    told: certificates.Told
    context: ssl.SSLContext

    @property
    def trusted(self) -> str: ...

    async def begin(self) -> None: ...

    async def keep(self) -> None: ...


class Edges(Protocol):
    """Where the process ends."""

    told_to_end: asyncio.Event
    """Set by a signal."""

    def connect(self) -> AbstractAsyncContextManager[Cluster]:
        """The API server."""

    def certificates(self, api: Cluster, settings: Settings, runtime: Runtime) -> Certificates: ...

    def prometheus(self, settings: Settings) -> Prometheus: ...

    def webhook(self, settings: Settings, runtime: Runtime) -> Webhook | None:
        """Where incidents are told of; None: nowhere."""

    def answer_probes(self, operator: Operator, lease: Lease) -> AbstractAsyncContextManager[object]:
        """Says whether the operator lives, until left."""

    def listen(
        self, sidecars: Sidecars, runtime: Runtime, settings: Settings, context: ssl.SSLContext, lease: Lease
    ) -> AbstractAsyncContextManager[object]:
        """Serves sidecars, or sends them to whoever leads, and the operator's own metrics, until left."""

    async def handle(self, operator: Operator, stopped: asyncio.Event) -> None:
        """Runs the handlers (kopf) until `stopped`."""


async def run(settings: Settings, runtime: Runtime, edges: Edges) -> bool:
    """Until a signal ends it, or one of its tasks dies: of a lost Lease, say. True: it has ended in order; else
    `runtime.failure` says of what it died."""
    serving = runtime.start(_serve(settings, runtime, edges), "the operator")
    await runtime.either(asyncio.wait([serving]), runtime.failed.wait())
    if not serving.done():
        await asyncio.wait([serving], timeout=LEAVING_SECONDS)
        serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    return not runtime.failed.is_set()


async def _serve(settings: Settings, runtime: Runtime, edges: Edges) -> None:
    try:
        async with AsyncExitStack() as stack:
            await _stand_by_and_lead(settings, runtime, edges, stack)
    except Overtaken:
        logging.info("%s has never led, and ends", settings.identity)


async def _stand_by_and_lead(settings: Settings, runtime: Runtime, edges: Edges, stack: AsyncExitStack) -> None:
    """Raises Overtaken where it is to end before it leads."""
    # Calls of a thousand jobs wait for each other: the Lease, sidecars' tokens and nodes may not have to wait for them.
    for_lease, for_tokens, for_nodes, api = [await stack.enter_async_context(edges.connect()) for _ in range(4)]
    lease = await stack.enter_async_context(leadership.contend(for_lease, settings, runtime))
    api.before_write = for_nodes.before_write = lease.require
    shown = edges.certificates(api, settings, runtime)
    operator = Operator(
        settings=settings,
        cluster=api,
        for_nodes=for_nodes,
        memory=Memory(runtime.now()),
        installation=Installation(
            operator_url=settings.endpoint,
            authority=shown.trusted,
            sidecar_image=settings.sidecar_image,
            sidecar_pull_policy=settings.sidecar_pull_policy,
            sidecar_resources=settings.sidecar_resources,
        ),
        prometheus=edges.prometheus(settings),
        runtime=runtime,
        leads=lease.holds,
        webhook=edges.webhook(settings, runtime),
    )
    shown.told = partial(_tell, operator)
    await stack.enter_async_context(edges.answer_probes(operator, lease))
    await runtime.unless(_over(runtime, edges), shown.begin())
    sidecars = Sidecars(for_tokens, operator.memory, runtime, operator.stays)
    lease.turned = partial(_turn, operator, sidecars)
    endpoint = await stack.enter_async_context(AsyncExitStack())
    await endpoint.enter_async_context(edges.listen(sidecars, runtime, settings, shown.context, lease))
    logging.info("%s stands by at %s", settings.identity, settings.endpoint)
    keeping = runtime.start(shown.keep(), "the certificates' keeper")
    watching = runtime.start(operator.follow(), "watches")
    following = runtime.start(operator.resync(), "resync of a standby")
    stack.push_async_callback(_end, (keeping, watching, following))
    await runtime.unless(_over(runtime, edges), lease.begun.wait())
    await _end((following,))
    operator.begin()
    logging.info("%s leads", settings.identity)
    tasks = {"watch over": operator.watch_over(), "GPUs": operator.watch_gpus(), "resync": operator.resync()}
    tasks["probe check"] = probe_check.watch_over(operator)
    if operator.webhook is not None:
        tasks["webhook"] = operator.webhook.deliver()
    stack.push_async_callback(_end, [runtime.start(task, name) for name, task in tasks.items()])
    stopped = asyncio.Event()
    handling = runtime.start(edges.handle(operator, stopped), "the handlers")
    await runtime.either(asyncio.wait([handling]), _over(runtime, edges))
    await lease.give_back()  # first of all: what is left to be done here, nobody needs to wait for
    await endpoint.aclose()
    stopped.set()
    await handling


async def _over(runtime: Runtime, edges: Edges) -> None:
    """Returns when the process is to end: a signal has said so, or one of its tasks has died."""
    await runtime.either(edges.told_to_end.wait(), runtime.failed.wait())


def _turn(operator: Operator, sidecars: Sidecars, serves: bool) -> None:
    operator.turn(serves)
    if not serves:  # they go to whoever leads
        sidecars.let_go()


def _tell(operator: Operator, trusted: str) -> None:
    """Workers that are made from now on trust these authorities."""
    operator.installation = replace(operator.installation, authority=trusted)


async def _end(tasks: Iterable[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
