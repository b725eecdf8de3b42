"""`python -m pacekeeper_operator` runs the operator; `… release-all` releases all quarantined nodes and ends."""

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

from . import cluster, files, health, metrics, process, server
from .certificates import Certificates
from .connections import Connections
from .handlers import fabrics, quarantines, startup, trainingjobs  # noqa: F401  # importing registers them with kopf
from .observe.prometheus import Prometheus
from .observe.prometheus_access import over_http
from .runtime import (
    Runtime,
    have_one_heap,
    look_at_all_now_and_then,
    read_what_is_nested_deeply,
    seldom_look_for_garbage,
)
from .services.leadership import Lease
from .services.operator import Operator
from .services.quarantine import release_all
from .services.sidecars import Sidecars
from .services.webhook import Webhook
from .services.webhook import over_http as over_webhook
from .settings import Settings

RELEASE_SECONDS = 120.0


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
    files.raise_limit()
    have_one_heap()
    seldom_look_for_garbage()
    read_what_is_nested_deeply()
    return asyncio.run(_run(settings) if arguments.command == "run" else _release_all(settings))


class _Edges:
    """Of a process in a pod, or beside a cluster."""

    def __init__(self) -> None:
        self.told_to_end = asyncio.Event()
        self._listen_to_signals()

    def _listen_to_signals(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self.told_to_end.set)

    def connect(self) -> AbstractAsyncContextManager[cluster.Cluster]:
        return cluster.connect()

    def certificates(self, api: cluster.Cluster, settings: Settings, runtime: Runtime) -> Certificates:
        return Certificates(api, settings, runtime)

    def prometheus(self, settings: Settings) -> Prometheus:
        url, folder = settings.prometheus_url, settings.prometheus_credentials
        ask = over_http(url, Path(folder) if folder else None, settings.prometheus_headers) if url else None
        matchers = settings.prometheus_matchers
        return Prometheus(url, settings.dcgm_namespace, settings.dcgm_node_label, ask, matchers)

    def webhook(self, settings: Settings, runtime: Runtime) -> Webhook | None:
        folder = settings.incident_webhook
        return Webhook(over_webhook(Path(folder)), runtime) if folder else None

    def answer_probes(self, operator: Operator, lease: Lease) -> AbstractAsyncContextManager[None]:
        return health.serve(partial(health.ill, operator, lease), operator.settings.liveness_port)

    @asynccontextmanager
    async def listen(
        self, sidecars: Sidecars, runtime: Runtime, settings: Settings, context: ssl.SSLContext, lease: Lease
    ) -> AsyncIterator[None]:
        connections = Connections()
        connections.say_room()
        loop = asyncio.get_running_loop()
        metrics.TASKS.set_function(lambda: len(asyncio.all_tasks(loop)))
        async with server.serve(sidecars, runtime, settings.port, context, connections=connections, leadership=lease):
            start_http_server(settings.metrics_port)
            yield

    async def handle(self, operator: Operator, stopped: asyncio.Event) -> None:
        settings, others = operator.settings, asyncio.all_tasks()
        tasks = await kopf.spawn_tasks(
            clusterwide=not settings.watch_namespaces,
            namespaces=settings.watch_namespaces,
            standalone=True,
            memo=kopf.Memo(operator=operator),
            stop_flag=stopped,
        )
        self._listen_to_signals()  # kopf has taken them: it would end while the Lease is still held
        await kopf.run_tasks(tasks, ignored=others)


async def _run(settings: Settings) -> int:
    """The process's exit status."""
    runtime = Runtime()
    runtime.start(look_at_all_now_and_then(runtime), "garbage")
    if await process.run(settings, runtime, _Edges()):
        return 0
    if isinstance(runtime.failure, InputError):
        print(f"error: {runtime.failure}", file=sys.stderr)
        return 2
    return 1


async def _release_all(settings: Settings) -> int:
    async with cluster.connect() as api:
        await release_all(api, Runtime(), RELEASE_SECONDS, settings)
    return 0


if __name__ == "__main__":
    sys.exit(main())
