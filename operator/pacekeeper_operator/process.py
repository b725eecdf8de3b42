"""One operator process, put together: leadership first, then everything that acts, until it ends.

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
from .runtime import Runtime
from .services import leadership
from .services.operator import Operator
from .services.sidecars import Sidecars
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

    def connect(self) -> AbstractAsyncContextManager[Cluster]:
        """The API server."""

    def certificates(self, api: Cluster, settings: Settings, runtime: Runtime) -> Certificates: ...

    def prometheus(self, settings: Settings) -> Prometheus: ...

    def listen(
        self, sidecars: Sidecars, runtime: Runtime, settings: Settings, context: ssl.SSLContext
    ) -> AbstractAsyncContextManager[object]:
        """Serves sidecars, and the operator's own metrics, until left."""

    async def handle(self, operator: Operator, stopped: asyncio.Event) -> None:
        """Runs the handlers (kopf) until a signal ends them, or `stopped`."""


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
    async with AsyncExitStack() as stack:
        api = await stack.enter_async_context(edges.connect())
        lease = await stack.enter_async_context(leadership.hold(api, settings, runtime))
        api.before_write = lease.require
        shown = edges.certificates(api, settings, runtime)
        await shown.begin()
        operator = Operator(
            settings=settings,
            cluster=api,
            memory=Memory(runtime.now()),
            installation=Installation(
                operator_url=settings.endpoint,
                authority=shown.trusted,
                sidecar_image=settings.sidecar_image,
                sidecar_pull_policy=settings.sidecar_pull_policy,
            ),
            prometheus=edges.prometheus(settings),
            runtime=runtime,
            leads=lease.holds,
        )
        shown.told = partial(_tell, operator)
        sidecars = Sidecars(api, operator.memory, runtime, operator.stays)
        await stack.enter_async_context(edges.listen(sidecars, runtime, settings, shown.context))
        logging.info("serving sidecars at %s, Lease held by %s", settings.endpoint, settings.identity)
        operator.memory.started_at = runtime.now()
        beside = (
            runtime.start(operator.watch_over(), "watch over"),
            runtime.start(operator.resync(), "resync"),
            runtime.start(shown.keep(), "the certificates' keeper"),
        )
        stack.push_async_callback(_end, beside)
        await edges.handle(operator, runtime.failed)


def _tell(operator: Operator, trusted: str) -> None:
    """Workers that are made from now on trust these authorities."""
    operator.installation = replace(operator.installation, authority=trusted)


async def _end(tasks: Iterable[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
