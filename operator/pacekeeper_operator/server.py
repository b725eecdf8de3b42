"""The HTTPS endpoint that sidecars call (docs/architecture.md): parse, ask `services.sidecars`, answer."""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import kopf
from aiohttp import web

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.reports import Evidence, Fault, Heartbeat

from .services.sidecars import Caller, Forbidden, NotYet, Sidecars, Unauthenticated

MAX_BODY_BYTES = 4 * 2**20
"""A stall's report holds a stack a rank; evidence a window a rank."""
SIDECARS = web.AppKey("sidecars", Sidecars)


@asynccontextmanager
async def serve(sidecars: Sidecars, port: int, context: ssl.SSLContext | None) -> AsyncIterator[None]:
    """Serves on all addresses until left; `context` None: without TLS, for tests."""
    runner = web.AppRunner(application(sidecars), handle_signals=False, shutdown_timeout=1.0, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, None, port, ssl_context=context, backlog=1024, reuse_address=True).start()
    try:
        yield
    finally:
        await runner.cleanup()


def application(sidecars: Sidecars) -> web.Application:
    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_errors])
    app[SIDECARS] = sidecars
    app.add_routes(
        [
            web.post("/v1/plan", _plan),
            web.post("/v1/faults", _fault),
            web.post("/v1/evidence/{request}", _evidence),
            web.get("/healthz", _healthy),
        ]
    )
    return app


async def _plan(request: web.Request) -> web.StreamResponse:
    caller = await _caller(request)
    heartbeat = Heartbeat.from_json(await _body(request))
    after, wait = _number(request, "after", -1), _number(request, "wait", 0)
    plan = await request.app[SIDECARS].poll(caller, heartbeat, int(after), wait)
    return web.Response(status=204) if plan is None else web.json_response(plan.to_json())


async def _fault(request: web.Request) -> web.StreamResponse:
    caller = await _caller(request)
    await request.app[SIDECARS].take_fault(caller, Fault.from_json(await _body(request)))
    return web.Response(status=202)


async def _evidence(request: web.Request) -> web.StreamResponse:
    caller = await _caller(request)
    evidence = Evidence.from_json(await _body(request))
    if evidence.request != request.match_info["request"]:
        raise InputError(f"request: {evidence.request!r} is not the one of the path")
    request.app[SIDECARS].take_evidence(caller, evidence)
    return web.Response(status=202)


async def _healthy(_request: web.Request) -> web.StreamResponse:
    return web.Response(text="ok")


async def _caller(request: web.Request) -> Caller:
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    return await request.app[SIDECARS].authenticate(token if scheme.lower() == "bearer" else "")


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        body = await request.json()
    except json.JSONDecodeError as error:
        raise InputError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise InputError("the body must be a JSON object")
    return body


def _number(request: web.Request, name: str, default: float) -> float:
    try:
        return float(request.query.get(name, default))
    except ValueError as error:
        raise InputError(f"{name}: {request.query[name]!r} must be a number") from error


@web.middleware
async def _errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """The one place where errors become answers."""
    try:
        return await handler(request)
    except Unauthenticated as error:
        return _refuse(401, error)
    except Forbidden as error:
        return _refuse(403, error)
    except InputError as error:
        return _refuse(400, error)
    except (NotYet, kopf.TemporaryError) as error:
        return _refuse(503, error, {"Retry-After": "1"})


def _refuse(status: int, error: Exception, headers: dict[str, str] | None = None) -> web.Response:
    return web.json_response({"error": str(error)}, status=status, headers=headers)
