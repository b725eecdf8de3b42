"""A stand-in for Prometheus: its query API, for the operator's own queries, and the XIDs that it is set to return.

It is no Prometheus: nothing is scraped, and no PromQL is read. A query for GPU errors is answered with
the number of series that the cluster has, and those of XIDs; all else with nothing.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

XID_METRIC = "DCGM_FI_DEV_XID_ERRORS"
DCGM_NAMESPACE = "gpu-monitoring"


@dataclass
class StandIn:
    gpus: int
    xids: dict[str, int] = field(default_factory=dict)
    """By node: the last one of its first GPU."""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        query = (await request.post() if request.method == "POST" else request.query).get("query", "")
        rows = self._rows(time.time()) if isinstance(query, str) and '"gpu"' in query else []
        return web.json_response({"status": "success", "data": {"resultType": "vector", "result": rows}})

    def _rows(self, now: float) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = [
            {"metric": {"pacekeeper_query": "node_from_target"}, "value": [now, str(self.gpus)]}
        ]
        for node, xid in self.xids.items():
            series = {
                "pacekeeper_query": "gpu",
                "__name__": XID_METRIC,
                "node": node,
                "gpu": "0",
                "UUID": f"GPU-{node}",
            }
            rows.append({"metric": series, "value": [now, str(xid)]})
            rows.append({"metric": {**series, "pacekeeper_query": "gpu_baseline"}, "value": [now, "0"]})
        return rows


@asynccontextmanager
async def serve_stand_in(stand_in: StandIn, port: int) -> AsyncIterator[str]:
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
