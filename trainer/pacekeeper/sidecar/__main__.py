"""`python -m pacekeeper.sidecar`: runs until SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from pacekeeper_analysis.errors import InputError

from .connection_sampler import ConnectionSampler
from .operator_client import connect_operator
from .prometheus_metrics import WorkerMetrics
from .rank_rings import RankRings
from .settings import SidecarSettings
from .sidecar import Sidecar


async def run_sidecar(settings: SidecarSettings) -> None:
    settings.runtime.create()
    ranks = RankRings(settings.runtime, settings.window_steps)
    connections = ConnectionSampler(settings.runtime)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(WorkerMetrics(settings, ranks, connections))
    runner = web.AppRunner(build_application(registry), access_log=None, handle_signals=False)
    await runner.setup()
    await web.TCPSite(runner, None, settings.metrics_port).start()
    async with connect_operator(settings) as client:
        sidecar_task = asyncio.create_task(Sidecar(settings, client, ranks, connections).run())
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, sidecar_task.cancel)
        await asyncio.wait([sidecar_task])
        if not sidecar_task.cancelled():
            sidecar_task.result()
    await runner.cleanup()


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
        asyncio.run(run_sidecar(SidecarSettings.from_environment()))
    except InputError as error:
        print(f"pacekeeper.sidecar: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
