"""One operator process: it stands by, leads once it holds the Lease, and shuts down in order.

What lies outside of the process (the API server, Prometheus, the sockets, kopf) is passed in as a `ProcessEnvironment`.
The whole process therefore runs in a simulation as it does in a pod.
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

from ..async_runtime import Interrupted, OperatorRuntime
from ..endpoint import certificates
from ..endpoint.sidecars import SidecarService
from ..kube import leader_election
from ..kube.client import Cluster
from ..kube.leader_election import LeaderElector
from ..observe.job_cache import JobRegistry
from ..observe.prometheus import PrometheusClient
from ..pods.manifests import Installation
from ..services import probe_check
from ..services.operator import Operator
from ..services.periodic_tasks import run_periodic_tasks
from ..services.watch_injection import WatchInjection
from ..services.webhook import Webhook
from ..settings import Settings, WatchMode

OPERATOR_SHUTDOWN_SECONDS = 8.0
"""Maximum duration of an orderly shutdown once a background task has failed."""


class CertificateProvider(Protocol):
    """What the endpoint presents; see `certificates.CertificateManager`."""

    on_trust_changed: certificates.TrustCallback
    context: ssl.SSLContext

    @property
    def trusted(self) -> str: ...

    async def start(self) -> None: ...

    async def renew_periodically(self) -> None: ...


class ProcessEnvironment(Protocol):
    """The boundary of the process."""

    stop_requested: asyncio.Event
    """Set by a signal."""

    def connect(self) -> AbstractAsyncContextManager[Cluster]:
        """Connect to the API server."""

    def create_certificates(
        self, api: Cluster, settings: Settings, runtime: OperatorRuntime
    ) -> CertificateProvider: ...

    def create_prometheus(self, settings: Settings) -> PrometheusClient: ...

    def create_webhook(self, settings: Settings, runtime: OperatorRuntime) -> Webhook | None:
        """Return the webhook that incidents are posted to; None: there is none."""

    def serve_liveness(self, operator: Operator, lease: LeaderElector) -> AbstractAsyncContextManager[object]:
        """Serve the liveness probe within the context."""

    def serve_sidecars(
        self,
        sidecars: SidecarService,
        runtime: OperatorRuntime,
        settings: Settings,
        context: ssl.SSLContext,
        lease: LeaderElector,
    ) -> AbstractAsyncContextManager[object]:
        """Serve the operator's metrics, and serve sidecars or redirect them to the leader, within the context."""

    def serve_injection(
        self, injection: WatchInjection, settings: Settings, runtime: OperatorRuntime, context: ssl.SSLContext
    ) -> AbstractAsyncContextManager[object]:
        """Serve the webhook that injects the watch within the context."""

    async def run_handlers(self, operator: Operator, stopped: asyncio.Event) -> None:
        """Run the handlers (kopf) until `stopped`."""


async def run_operator(settings: Settings, runtime: OperatorRuntime, environment: ProcessEnvironment) -> bool:
    """Run until a signal arrives or a background task fails, for example because of a lost Lease.

    Returns whether it ended in order; if not, `runtime.failure` holds the error.
    """
    task = runtime.start_task(_serve_until_ended(settings, runtime, environment), "the operator")
    await runtime.wait_for_any(asyncio.wait([task]), runtime.failed.wait())
    if not task.done():
        await asyncio.wait([task], timeout=OPERATOR_SHUTDOWN_SECONDS)
        task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return not runtime.failed.is_set()


async def _serve_until_ended(settings: Settings, runtime: OperatorRuntime, environment: ProcessEnvironment) -> None:
    try:
        async with AsyncExitStack() as stack:
            await _stand_by_and_lead(settings, runtime, environment, stack)
    except Interrupted:
        logging.info("%s exits without having led", settings.identity)


async def _stand_by_and_lead(
    settings: Settings, runtime: OperatorRuntime, environment: ProcessEnvironment, stack: AsyncExitStack
) -> None:
    """Stand by, then lead. Raises Interrupted if the process has to end before it leads."""
    # Calls of a thousand jobs queue up. The Lease, token reviews, and nodes have their own connections.
    lease_cluster, token_cluster, node_cluster, cluster = [
        await stack.enter_async_context(environment.connect()) for _ in range(4)
    ]
    lease = await stack.enter_async_context(leader_election.run_leader_election(lease_cluster, settings, runtime))
    cluster.before_write = node_cluster.before_write = lease.require_leadership
    certificate_provider = environment.create_certificates(cluster, settings, runtime)
    operator = Operator(
        settings=settings,
        cluster=cluster,
        node_cluster=node_cluster,
        jobs=JobRegistry(runtime.now()),
        installation=Installation(
            operator_url=settings.endpoint,
            authority=certificate_provider.trusted,
            sidecar_image=settings.sidecar_image,
            sidecar_pull_policy=settings.sidecar_pull_policy,
            sidecar_resources=settings.sidecar_resources,
        ),
        prometheus_client=environment.create_prometheus(settings),
        runtime=runtime,
        is_leader=lease.is_leader,
        webhook=environment.create_webhook(settings, runtime),
    )
    certificate_provider.on_trust_changed = partial(_update_trusted_authority, operator)
    await stack.enter_async_context(environment.serve_liveness(operator, lease))
    await runtime.run_unless(_wait_for_end(runtime, environment), certificate_provider.start())
    watched = operator.watched if settings.watch_enabled else None
    sidecars = SidecarService(token_cluster, operator.jobs, runtime, operator.is_pod_alive, watched)
    lease.on_serving_changed = partial(_apply_leadership, operator, sidecars)
    endpoint = await stack.enter_async_context(AsyncExitStack())
    await endpoint.enter_async_context(
        environment.serve_sidecars(sidecars, runtime, settings, certificate_provider.context, lease)
    )
    logging.info("%s stands by at %s", settings.identity, settings.endpoint)
    injection = WatchInjection(cluster, settings, runtime, lambda: operator.installation.authority, operator.watched)
    if settings.watch_mode is WatchMode.WEBHOOK:
        context = certificate_provider.context
        await stack.enter_async_context(environment.serve_injection(injection, settings, runtime, context))
        follow_task = runtime.start_task(injection.follow(), "state of the injection")
        stack.push_async_callback(_cancel_tasks, (follow_task,))
    renewal_task = runtime.start_task(certificate_provider.renew_periodically(), "certificate renewal")
    watch_task = runtime.start_task(operator.stores.run_reflectors(), "watches")
    resync_task = runtime.start_task(operator.stores.resync(), "resync of a standby")
    stack.push_async_callback(_cancel_tasks, (renewal_task, watch_task, resync_task))
    await runtime.run_unless(_wait_for_end(runtime, environment), lease.elected.wait())
    await _cancel_tasks((resync_task,))
    operator.start_leading()
    logging.info("%s leads", settings.identity)
    tasks = {
        "periodic tasks": run_periodic_tasks(operator),
        "GPUs": operator.prometheus.poll_gpu_errors(),
        "resync": operator.stores.resync(),
    }
    tasks["probe check"] = probe_check.watch_over(operator)
    if settings.watch_mode is not WatchMode.OFF:
        tasks["injection of the watch"] = injection.supervise()
    if operator.webhook is not None:
        tasks["webhook"] = operator.webhook.deliver()
    stack.push_async_callback(_cancel_tasks, [runtime.start_task(task, name) for name, task in tasks.items()])
    stopped = asyncio.Event()
    handler_task = runtime.start_task(environment.run_handlers(operator, stopped), "the handlers")
    await runtime.wait_for_any(asyncio.wait([handler_task]), _wait_for_end(runtime, environment))
    await lease.release()  # first: the next operator need not wait for the rest
    await endpoint.aclose()
    stopped.set()
    await handler_task


async def _wait_for_end(runtime: OperatorRuntime, environment: ProcessEnvironment) -> None:
    """Return when the process has to end: on a signal, or because a background task failed."""
    await runtime.wait_for_any(environment.stop_requested.wait(), runtime.failed.wait())


def _apply_leadership(operator: Operator, sidecars: SidecarService, serves: bool) -> None:
    operator.on_serving_changed(serves)
    if not serves:  # they reconnect to the leader
        sidecars.end_polls()


def _update_trusted_authority(operator: Operator, trusted: str) -> None:
    """Use these authorities for workers that are created from now on."""
    operator.installation = replace(operator.installation, authority=trusted)


async def _cancel_tasks(tasks: Iterable[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
