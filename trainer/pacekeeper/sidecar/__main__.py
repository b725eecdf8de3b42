"""`python -m pacekeeper.sidecar`: runs until SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Coroutine
from functools import partial
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from pacekeeper.health.rank_rings import RankRings
from pacekeeper.watch.container import WatchedContainer
from pacekeeper_analysis.errors import InputError

from .connection_sampler import ConnectionSampler
from .container_monitor import ContainerMonitor
from .kubeflow_progress import ProgressServer
from .operator_client import connect_operator
from .prometheus_metrics import WorkerMetrics
from .settings import SidecarSettings
from .sidecar import Sidecar
from .worker_monitor import WorkerMonitor


async def run_watched_sidecar(settings: SidecarSettings) -> None:
    """Run in a watched container. There is at most one server, on the loopback: its ports are the container's."""
    container = WatchedContainer(settings.runtime.root, settings.worker, settings.window_steps)
    async with connect_operator(settings) as client:
        samples = settings.samples_connections
        connections = ConnectionSampler(settings.runtime, container.read_socket_ranks) if samples else None
        monitor = ContainerMonitor(container, settings.worker, connections)
        server = ProgressServer(partial(setattr, monitor, "reported_progress"))
        if settings.kubeflow_port:
            try:
                await server.start(settings.kubeflow_port)
            except OSError as error:  # a process of the pod has the port
                logging.warning("progress is not received at port %d: %s", settings.kubeflow_port, error)
        await _run_until_terminated(Sidecar(settings, client, monitor).run())
        server.close()


async def run_sidecar(settings: SidecarSettings) -> None:
    """Run next to a launcher."""
    settings.runtime.create(shared=True)
    ranks = RankRings(settings.runtime, settings.window_steps)
    connections = ConnectionSampler(settings.runtime)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(WorkerMetrics(settings, ranks, connections))
    runner = web.AppRunner(build_application(registry), access_log=None, handle_signals=False)
    await runner.setup()
    await web.TCPSite(runner, None, settings.metrics_port).start()
    async with connect_operator(settings) as client:
        monitor = WorkerMonitor(settings, ranks, connections)
        await _run_until_terminated(Sidecar(settings, client, monitor).run())
    await runner.cleanup()


async def _run_until_terminated(loops: Coroutine[Any, Any, None]) -> None:
    """Run the loops until SIGTERM. Raises what ends them otherwise."""
    task = asyncio.create_task(loops)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await asyncio.wait([task])
    if not task.cancelled():
        task.result()


def build_application(registry: CollectorRegistry) -> web.Application:
    """Build the server: /metrics for Prometheus; /healthz for the kubelet, and for peers that probe this node."""

    async def metrics(_request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def healthy(_request: web.Request) -> web.Response:
        return web.Response(text="ok")

    app = web.Application()
    app.add_routes([web.get("/metrics", metrics), web.get("/healthz", healthy)])
    return app


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        settings = SidecarSettings.from_environment()
        asyncio.run(run_watched_sidecar(settings) if settings.watched else run_sidecar(settings))
    except InputError as error:
        print(f"pacekeeper.sidecar: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
