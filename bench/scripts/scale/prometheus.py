"""A stand-in for Prometheus: its query API, for the operator's own questions, where GPUs show nothing.

It is no Prometheus: nothing is scraped, and no PromQL is read. What the operator asks for GPU errors is answered with
the number of series that a healthy cluster has; all else with nothing.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiohttp import web

DCGM_NAMESPACE = "gpu-monitoring"


@dataclass(frozen=True)
class StandIn:
    gpus: int

    async def answer(self, request: web.Request) -> web.StreamResponse:
        query = (await request.post() if request.method == "POST" else request.query).get("query", "")
        series = {"metric": {"figure": "named"}, "value": [time.time(), str(self.gpus)]}
        rows = [series] if isinstance(query, str) and '"named"' in query else []
        return web.json_response({"status": "success", "data": {"resultType": "vector", "result": rows}})


@asynccontextmanager
async def serve(stand_in: StandIn, port: int) -> AsyncIterator[str]:
    """Its URL."""
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", stand_in.answer)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        yield f"http://127.0.0.1:{port}"
    finally:
        await runner.cleanup()
