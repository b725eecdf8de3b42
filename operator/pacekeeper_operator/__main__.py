"""`python -m pacekeeper_operator` runs the operator; `… release-all` releases all quarantined nodes and exits."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path

import kopf
from prometheus_client import start_http_server

from pacekeeper_analysis.errors import InputError

from . import file_limits, metrics
from .async_runtime import (
    OperatorRuntime,
    collect_garbage_periodically,
    limit_malloc_arenas,
    raise_recursion_limit,
    reduce_gc_frequency,
)
from .endpoint import server
from .endpoint.admission_webhook import serve_admission_webhook
from .endpoint.certificates import CertificateManager
from .endpoint.connections import EndpointConnections
from .endpoint.sidecars import SidecarService
from .handlers import fabrics, jobsets, quarantines, startup, trainingjobs, watchedjobs  # noqa: F401  # importing registers them with kopf
from .kube import client
from .kube.leader_election import LeaderElector
from .observe.prometheus import PrometheusClient
from .observe.prometheus_access import create_http_query
from .runtime import health, process
from .services.operator import Operator
from .services.quarantine import release_all
from .services.watch_injection import WatchInjection
from .services.webhook import Webhook
from .services.webhook import create_http_post as over_webhook
from .settings import Settings

RELEASE_ALL_TIMEOUT_SECONDS = 120.0
log = logging.getLogger("pacekeeper_operator")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m pacekeeper_operator", description=__doc__)
    parser.add_argument("command", nargs="?", choices=["run", "release-all"], default="run")
    arguments = parser.parse_args()
    try:
        settings = Settings.from_environment(os.environ)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    logging.basicConfig(level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for chatty in ("kopf", "aiohttp.access"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    file_limits.raise_file_limit()
    limit_malloc_arenas()
    reduce_gc_frequency()
    raise_recursion_limit()
    return asyncio.run(_run_process(settings) if arguments.command == "run" else _release_all_nodes(settings))


class _PodEnvironment:
    """The process environment in a pod, or outside of a cluster."""

    def __init__(self) -> None:
        self.stop_requested = asyncio.Event()
        self._install_signal_handlers()

    def _install_signal_handlers(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self.stop_requested.set)

    def connect(self) -> AbstractAsyncContextManager[client.Cluster]:
        return client.connect_to_cluster()

    def create_certificates(
        self, api: client.Cluster, settings: Settings, runtime: OperatorRuntime
    ) -> CertificateManager:
        return CertificateManager(api, settings, runtime)

    def create_prometheus(self, settings: Settings) -> PrometheusClient:
        url, folder = settings.prometheus_url, settings.prometheus_credentials
        run_query = (
            create_http_query(url, Path(folder) if folder else None, settings.prometheus_headers) if url else None
        )
        matchers = settings.prometheus_matchers
        return PrometheusClient(url, settings.dcgm_namespace, settings.dcgm_node_label, run_query, matchers)

    def create_webhook(self, settings: Settings, runtime: OperatorRuntime) -> Webhook | None:
        folder = settings.incident_webhook
        return Webhook(over_webhook(Path(folder)), runtime) if folder else None

    def serve_liveness(self, operator: Operator, lease: LeaderElector) -> AbstractAsyncContextManager[None]:
        return health.serve_liveness(
            partial(health.find_liveness_failure, operator, lease), operator.settings.liveness_port
        )

    @asynccontextmanager
    async def serve_sidecars(
        self,
        sidecars: SidecarService,
        runtime: OperatorRuntime,
        settings: Settings,
        context: ssl.SSLContext,
        lease: LeaderElector,
    ) -> AsyncIterator[None]:
        connections = EndpointConnections()
        connections.report_capacity()
        loop = asyncio.get_running_loop()
        metrics.TASKS.set_function(lambda: len(asyncio.all_tasks(loop)))
        async with server.serve_endpoint(
            sidecars, runtime, settings.port, context, connections=connections, leadership=lease
        ):
            start_http_server(settings.metrics_port)
            yield

    def serve_injection(
        self, injection: WatchInjection, settings: Settings, runtime: OperatorRuntime, context: ssl.SSLContext
    ) -> AbstractAsyncContextManager[object]:
        return serve_admission_webhook(injection.get_injection, runtime, settings.watch_port, context)

    async def run_handlers(self, operator: Operator, stopped: asyncio.Event) -> None:
        settings, others = operator.settings, asyncio.all_tasks()
        tasks = await kopf.spawn_tasks(
            clusterwide=not settings.watch_namespaces,
            namespaces=settings.watch_namespaces,
            standalone=True,
            memo=kopf.Memo(operator=operator),
            stop_flag=stopped,
        )
        self._install_signal_handlers()  # kopf replaced them: it would exit while the Lease is still held
        try:
            await kopf.run_tasks(tasks, ignored=others)
        except Exception as error:
            # At its end, kopf awaits each task that has begun since, even a watch of the operator that now fails.
            if not stopped.is_set():
                raise
            log.warning("a task has failed while the operator ended: %r", error)


async def _run_process(settings: Settings) -> int:
    """Run the operator and return the exit status of the process."""
    runtime = OperatorRuntime()
    runtime.start_task(collect_garbage_periodically(runtime), "garbage collection")
    if await process.run_operator(settings, runtime, _PodEnvironment()):
        return 0
    if isinstance(runtime.failure, InputError):
        print(f"error: {runtime.failure}", file=sys.stderr)
        return 2
    return 1


async def _release_all_nodes(settings: Settings) -> int:
    async with client.connect_to_cluster() as api:
        await release_all(api, OperatorRuntime(), RELEASE_ALL_TIMEOUT_SECONDS, settings)
    return 0


if __name__ == "__main__":
    sys.exit(main())
