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
from .observe.memory import JobRegistry
from .observe.prometheus import PrometheusClient
from .runtime import Interrupted, OperatorRuntime
from .services import leadership, probe_check
from .services.leadership import LeaderElector
from .services.operator import Operator
from .services.sidecars import SidecarService
from .services.webhook import Webhook
from .settings import Settings

OPERATOR_SHUTDOWN_SECONDS = 8.0
"""So long the operator may take to leave in order once one of its tasks has died."""


class CertificateProvider(Protocol):
    """What the endpoint shows, see `certificates.Certificates`."""

    on_trust_changed: certificates.TrustCallback
    context: ssl.SSLContext

    @property
    def trusted(self) -> str: ...

    async def start(self) -> None: ...

    async def renew_periodically(self) -> None: ...


class ProcessEnvironment(Protocol):
    """Where the process ends."""

    stop_requested: asyncio.Event
    """Set by a signal."""

    def connect(self) -> AbstractAsyncContextManager[Cluster]:
        """The API server."""

    def create_certificates(self, api: Cluster, settings: Settings, runtime: OperatorRuntime) -> CertificateProvider: ...

    def create_prometheus(self, settings: Settings) -> PrometheusClient: ...

    def create_webhook(self, settings: Settings, runtime: OperatorRuntime) -> Webhook | None:
        """Where incidents are told of; None: nowhere."""

    def serve_liveness(self, operator: Operator, lease: LeaderElector) -> AbstractAsyncContextManager[object]:
        """Says whether the operator lives, until left."""

    def serve_sidecars(
        self, sidecars: SidecarService, runtime: OperatorRuntime, settings: Settings, context: ssl.SSLContext, lease: LeaderElector
    ) -> AbstractAsyncContextManager[object]:
        """Serves sidecars, or sends them to whoever leads, and the operator's own metrics, until left."""

    async def run_handlers(self, operator: Operator, stopped: asyncio.Event) -> None:
        """Runs the handlers (kopf) until `stopped`."""


async def run_operator(settings: Settings, runtime: OperatorRuntime, environment: ProcessEnvironment) -> bool:
    """Until a signal ends it, or one of its tasks dies: of a lost Lease, say. True: it has ended in order; else
    `runtime.failure` says of what it died."""
    serving = runtime.start_task(_serve_until_ended(settings, runtime, environment), "the operator")
    await runtime.wait_for_any(asyncio.wait([serving]), runtime.failed.wait())
    if not serving.done():
        await asyncio.wait([serving], timeout=OPERATOR_SHUTDOWN_SECONDS)
        serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    return not runtime.failed.is_set()


async def _serve_until_ended(settings: Settings, runtime: OperatorRuntime, environment: ProcessEnvironment) -> None:
    try:
        async with AsyncExitStack() as stack:
            await _stand_by_and_lead(settings, runtime, environment, stack)
    except Interrupted:
        logging.info("%s has never led, and ends", settings.identity)


async def _stand_by_and_lead(settings: Settings, runtime: OperatorRuntime, environment: ProcessEnvironment, stack: AsyncExitStack) -> None:
    """Raises Overtaken where it is to end before it leads."""
    # Calls of a thousand jobs wait for each other: the Lease, sidecars' tokens and nodes may not have to wait for them.
    for_lease, for_tokens, for_nodes, api = [await stack.enter_async_context(environment.connect()) for _ in range(4)]
    lease = await stack.enter_async_context(leadership.run_leader_election(for_lease, settings, runtime))
    api.before_write = for_nodes.before_write = lease.require_leadership
    shown = environment.create_certificates(api, settings, runtime)
    operator = Operator(
        settings=settings,
        cluster=api,
        node_cluster=for_nodes,
        jobs=JobRegistry(runtime.now()),
        installation=Installation(
            operator_url=settings.endpoint,
            authority=shown.trusted,
            sidecar_image=settings.sidecar_image,
            sidecar_pull_policy=settings.sidecar_pull_policy,
            sidecar_resources=settings.sidecar_resources,
        ),
        prometheus=environment.create_prometheus(settings),
        runtime=runtime,
        is_leader=lease.is_leader,
        webhook=environment.create_webhook(settings, runtime),
    )
    shown.on_trust_changed = partial(_update_trusted_authority, operator)
    await stack.enter_async_context(environment.serve_liveness(operator, lease))
    await runtime.run_unless(_wait_for_end(runtime, environment), shown.start())
    sidecars = SidecarService(for_tokens, operator.jobs, runtime, operator.is_pod_alive)
    lease.on_serving_changed = partial(_apply_leadership, operator, sidecars)
    endpoint = await stack.enter_async_context(AsyncExitStack())
    await endpoint.enter_async_context(environment.serve_sidecars(sidecars, runtime, settings, shown.context, lease))
    logging.info("%s stands by at %s", settings.identity, settings.endpoint)
    keeping = runtime.start_task(shown.renew_periodically(), "the certificates' keeper")
    watching = runtime.start_task(operator.run_reflectors(), "watches")
    following = runtime.start_task(operator.resync(), "resync of a standby")
    stack.push_async_callback(_cancel_tasks, (keeping, watching, following))
    await runtime.run_unless(_wait_for_end(runtime, environment), lease.elected.wait())
    await _cancel_tasks((following,))
    operator.start_leading()
    logging.info("%s leads", settings.identity)
    tasks = {"watch over": operator.run_periodic_tasks(), "GPUs": operator.poll_gpu_errors(), "resync": operator.resync()}
    tasks["probe check"] = probe_check.watch_over(operator)
    if operator.webhook is not None:
        tasks["webhook"] = operator.webhook.deliver()
    stack.push_async_callback(_cancel_tasks, [runtime.start_task(task, name) for name, task in tasks.items()])
    stopped = asyncio.Event()
    handling = runtime.start_task(environment.run_handlers(operator, stopped), "the handlers")
    await runtime.wait_for_any(asyncio.wait([handling]), _wait_for_end(runtime, environment))
    await lease.release()  # first of all: what is left to be done here, nobody needs to wait for
    await endpoint.aclose()
    stopped.set()
    await handling


async def _wait_for_end(runtime: OperatorRuntime, environment: ProcessEnvironment) -> None:
    """Returns when the process is to end: a signal has said so, or one of its tasks has died."""
    await runtime.wait_for_any(environment.stop_requested.wait(), runtime.failed.wait())


def _apply_leadership(operator: Operator, sidecars: SidecarService, serves: bool) -> None:
    operator.on_serving_changed(serves)
    if not serves:  # they go to whoever leads
        sidecars.end_polls()


def _update_trusted_authority(operator: Operator, trusted: str) -> None:
    """Workers that are made from now on trust these authorities."""
    operator.installation = replace(operator.installation, authority=trusted)


async def _cancel_tasks(tasks: Iterable[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
