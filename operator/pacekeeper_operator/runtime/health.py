"""The liveness probe, which the kubelet calls from the start of the process, whether or not the operator leads."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiohttp import web

from ..kube.leader_election import LeaderElector
from ..services.operator import Operator

LIVENESS_TIMEOUT_SECONDS = 60.0
"""An operator whose Lease attempts or periodic tasks have not run for this time is stuck."""


def find_liveness_failure(operator: Operator, lease: LeaderElector) -> str:
    """Return why this operator should be restarted. Empty: it is alive."""
    now = operator.runtime.monotonic()
    if now - lease.last_attempt_at > LIVENESS_TIMEOUT_SECONDS:
        return f"the operator has not checked its Lease for {now - lease.last_attempt_at:.0f} s"
    if not lease.elected.is_set():
        return ""
    if operator.last_tick_at is not None and now - operator.last_tick_at > LIVENESS_TIMEOUT_SECONDS:
        return f"the operator's periodic tasks have not run for {now - operator.last_tick_at:.0f} s"
    return operator.stores.find_watch_failure(operator.runtime.now())


@asynccontextmanager
async def serve_liveness(check: Callable[[], str], port: int) -> AsyncIterator[None]:
    """Serve the liveness probe within the context. `check` returns what is wrong; empty: nothing."""

    async def answer(_request: web.Request) -> web.Response:
        failure = check()
        return web.Response(text=failure or "ok", status=500 if failure else 200)

    app = web.Application()
    app.add_routes([web.get("/healthz", answer)])
    runner = web.AppRunner(app, handle_signals=False, shutdown_timeout=0.1, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, None, port).start()
        yield
    finally:
        await runner.cleanup()
