"""A stand-in for Prometheus: its query API, for the operator's questions only, with DCGM's series as they are set here.

It is no Prometheus: nothing is scraped and no PromQL is read. What the operator asks for GPU errors is answered with the
XIDs of `xids`, by node; the signs of GPUs and the steps of ranks are answered with nothing.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

DCGM_NAMESPACE = "gpu-monitoring"


@dataclass
class StandIn:
    nodes: Sequence[str]
    xids: dict[str, int] = field(default_factory=dict)
    asked: int = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        query = (await request.post() if request.method == "POST" else request.query).get("query", "")
        self.asked += 1
        rows = self._errors() if isinstance(query, str) and '"named"' in query else []
        return web.json_response({"status": "success", "data": {"resultType": "vector", "result": rows}})

    def _errors(self) -> list[dict[str, Any]]:
        now = time.time()
        series = [
            ({"__name__": "DCGM_FI_DEV_XID_ERRORS", "node": node, "gpu": "0", "UUID": f"GPU-{node}", "figure": "gpu"}, xid)
            for node, xid in self.xids.items()
        ]
        series.append(({"figure": "named"}, len(self.nodes)))
        return [{"metric": labels, "value": [now, str(value)]} for labels, value in series]


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
