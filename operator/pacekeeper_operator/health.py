"""Whether this operator lives: the kubelet asks, from the process's start, whether or not it leads."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiohttp import web

from .services.leadership import LeaderElector
from .services.operator import Operator

LIVENESS_TIMEOUT_SECONDS = 60.0
"""An operator that has not looked around for so long is stuck."""


def find_liveness_failure(operator: Operator, lease: LeaderElector) -> str:
    """Why this operator should be started anew; "": it lives."""
    now = operator.runtime.monotonic()
    if now - lease.last_attempt_at > LIVENESS_TIMEOUT_SECONDS:
        return f"the operator has not looked at its Lease for {now - lease.last_attempt_at:.0f} s"
    if not lease.elected.is_set():
        return ""
    if operator.last_tick_at and now - operator.last_tick_at > LIVENESS_TIMEOUT_SECONDS:
        return f"the operator has not looked around for {now - operator.last_tick_at:.0f} s"
    return operator.find_watch_failure(operator.runtime.now())


@asynccontextmanager
async def serve_liveness(check: Callable[[], str], port: int) -> AsyncIterator[None]:
    """Answers until left. `look`: what is wrong, in words; "": nothing."""

    async def answer(_request: web.Request) -> web.Response:
        trouble = check()
        return web.Response(text=trouble or "ok", status=500 if trouble else 200)

    app = web.Application()
    app.add_routes([web.get("/healthz", answer)])
    runner = web.AppRunner(app, handle_signals=False, shutdown_timeout=0.1, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, None, port).start()
        yield
    finally:
        await runner.cleanup()
