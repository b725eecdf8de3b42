"""`python -m pacekeeper.sidecar`: runs until SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from pacekeeper_analysis.errors import InputError

from .client import connect_operator
from .connections import ConnectionSampler
from .metrics import WorkerMetrics
from .ranks import RankRings
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
        running = asyncio.create_task(Sidecar(settings, client, ranks, connections).run())
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
        await asyncio.wait([running])
        if not running.cancelled():
            running.result()
    await runner.cleanup()


def build_application(registry: CollectorRegistry) -> web.Application:
    """/metrics for Prometheus; /healthz for the kubelet, and for peers that ask whether this node is reachable."""

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
