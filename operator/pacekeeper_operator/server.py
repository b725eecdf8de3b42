"""The HTTPS endpoint that sidecars call (docs/architecture.md): parse, ask `services.sidecars`, answer.

Whoever can reach it may send anything, as slowly and as often as they like. A body is read only from a caller who has
proved who it is, up to the bound of its route and within a time; no error says more than what is wrong with the call.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, NoReturn

import kopf
from aiohttp import web

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.reports import Evidence, Fault, Heartbeat

from . import metrics
from .connections import Connections
from .limits import Rate
from .runtime import Runtime
from .services.sidecars import Caller, NotYet, Sidecars
from .services.tokens import Forbidden, TooMany, Unauthenticated

MAX_HEARTBEAT_BYTES = 64 * 2**10
MAX_FAULT_BYTES = 2**20
"""A stall's report holds a stack a rank."""
MAX_EVIDENCE_BYTES = 4 * 2**20
"""Evidence holds a window a rank."""
BODY_SECONDS = 10.0
"""So long a caller may take to send its body."""
IDLE_SECONDS = 75.0
"""So long a connection may be without a whole request; sidecars give theirs up after 60 s."""
HANDSHAKE_SECONDS = 10.0
COMPLAINT_SECONDS = 60.0
"""An error of one kind is logged once in so long."""
SIDECARS = web.AppKey("sidecars", Sidecars)
RUNTIME = web.AppKey("runtime", Runtime)
COMPLAINTS = web.AppKey("complaints", Rate[tuple[str, str]])

log = logging.getLogger(__name__)
_malformed = logging.getLogger(f"{__name__}.malformed")
_malformed.setLevel(logging.CRITICAL)  # the HTTP library would log a trace for each request that is not HTTP


class _TooLarge(Exception):
    """The body is larger than its route takes."""


class _TooSlow(Exception):
    """The body did not come in time."""


@asynccontextmanager
async def serve(
    sidecars: Sidecars,
    runtime: Runtime,
    port: int,
    context: ssl.SSLContext | None,
    *,
    address: str = "",
    connections: Connections | None = None,
) -> AsyncIterator[int]:
    """Serves until left, and tells its port (`port` 0: any free one). `context` None: without TLS, for tests.

    `address` "": on all addresses.
    """
    runner = web.AppRunner(
        application(sidecars, runtime),
        handle_signals=False,
        handler_cancellation=True,  # a poll ends with its connection
        shutdown_timeout=1.0,
        access_log=None,
        keepalive_timeout=IDLE_SECONDS,
        lingering_time=1.0,
        auto_decompress=False,
        logger=_malformed,
    )
    await runner.setup()
    assert runner.server is not None
    server = await asyncio.get_running_loop().create_server(
        runner.server,
        sock=(connections or Connections()).listen(address, port),
        ssl=context,
        ssl_handshake_timeout=None if context is None else HANDSHAKE_SECONDS,
        backlog=1024,
    )
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await runner.cleanup()


def application(sidecars: Sidecars, runtime: Runtime) -> web.Application:
    app = web.Application(middlewares=[_errors])
    app[SIDECARS] = sidecars
    app[RUNTIME] = runtime
    app[COMPLAINTS] = Rate(1 / COMPLAINT_SECONDS, 1)
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
    after, wait = _version(request), _wait(request)
    heartbeat = Heartbeat.from_json(await _body(request, MAX_HEARTBEAT_BYTES))
    plan = await request.app[SIDECARS].poll(caller, heartbeat, after, wait)
    return web.Response(status=204) if plan is None else web.json_response(plan.to_json())


async def _fault(request: web.Request) -> web.StreamResponse:
    caller = await _caller(request)
    await request.app[SIDECARS].take_fault(caller, Fault.from_json(await _body(request, MAX_FAULT_BYTES)))
    return web.Response(status=202)


async def _evidence(request: web.Request) -> web.StreamResponse:
    caller = await _caller(request)
    asked = request.match_info["request"]
    if not request.app[SIDECARS].awaits_evidence(caller, asked):
        return web.Response(status=202)  # nobody needs it any more, so it is not even read
    evidence = Evidence.from_json(await _body(request, MAX_EVIDENCE_BYTES))
    if evidence.request != asked:
        raise InputError(f"request: {evidence.request!r} is not the one of the path")
    request.app[SIDECARS].take_evidence(caller, evidence)
    return web.Response(status=202)


async def _healthy(_request: web.Request) -> web.StreamResponse:
    return web.Response(text="ok")


async def _caller(request: web.Request) -> Caller:
    given = request.headers.getall("Authorization", [])
    if len(given) > 1:
        raise Unauthenticated("send one Authorization header")
    scheme, _, token = "".join(given).partition(" ")
    return await request.app[SIDECARS].authenticate(token if scheme.lower() == "bearer" else "", request.remote or "")


async def _body(request: web.Request, most: int) -> dict[str, Any]:
    """Raises InputError, _TooLarge before more than `most` bytes are read, _TooSlow."""
    if (request.content_length or 0) > most:
        raise _TooLarge(f"{request.path} takes {most} bytes at most")
    try:
        data = await request.app[RUNTIME].within(BODY_SECONDS, _read(request, most))
    except TimeoutError as error:
        raise _TooSlow(f"the body must come within {BODY_SECONDS:.0f} s") from error
    return _parse(data)


async def _read(request: web.Request, most: int) -> bytes:
    data = bytearray()
    async for chunk in request.content.iter_any():
        data += chunk
        if len(data) > most:
            raise _TooLarge(f"{request.path} takes {most} bytes at most")
    return bytes(data)


def _parse(data: bytes) -> dict[str, Any]:
    try:
        body = json.loads(data.decode(), parse_constant=_no_number)
    except RecursionError as error:
        raise InputError("the body is nested too deeply") from error
    except ValueError as error:  # not UTF-8, not JSON, or a number of thousands of digits
        raise InputError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise InputError("the body must be a JSON object")
    return body


def _no_number(name: str) -> NoReturn:
    raise InputError(f"{name} is not a number")


def _version(request: web.Request) -> int:
    text = request.query.get("after", "-1")
    try:
        return int(text)
    except ValueError as error:
        raise InputError(f"after: {text[:40]!r} must be a plan's version, a whole number") from error


def _wait(request: web.Request) -> float:
    text = request.query.get("wait", "0")
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise InputError(f"wait: {text[:40]!r} must be a number of seconds, 0 or more")
    return seconds


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
    except _TooSlow as error:
        return _refuse(408, error, {"Connection": "close"})
    except _TooLarge as error:
        return _refuse(413, error, {"Connection": "close"})
    except TooMany as error:
        return _refuse(429, error, {"Retry-After": "2"})
    except NotYet as error:
        return _refuse(503, error, {"Retry-After": "1"})
    except kopf.TemporaryError as error:
        _complain(request, error)
        return _refuse(503, "the API server does not answer the operator", {"Retry-After": "1"})
    except (web.HTTPException, ConnectionError):  # the library's own answers; nobody is left to be answered
        raise
    except Exception as error:
        _complain(request, error)
        return _refuse(500, "the operator cannot answer this; its log says why")


def _complain(request: web.Request, error: Exception) -> None:
    """In the log, once in a while: a caller that is refused comes again at once."""
    resource = request.match_info.route.resource
    kind = ("" if resource is None else resource.canonical, type(error).__name__)
    if request.app[COMPLAINTS].take(kind, request.app[RUNTIME].monotonic()):
        log.error("%s %s cannot be answered: %r", request.method, kind[0], error, exc_info=error)


def _refuse(status: int, error: Exception | str, headers: dict[str, str] | None = None) -> web.Response:
    metrics.REFUSALS.labels(str(status)).inc()
    return web.json_response({"error": str(error)}, status=status, headers=headers)
