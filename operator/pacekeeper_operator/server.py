"""The HTTPS endpoint that sidecars call (docs/architecture/wire.md): parse, ask `services.sidecars`, answer.

Whoever can reach it may send anything, as slowly and as often as they like. A body is read only from a caller who has
proved who it is, one at a time, up to the bounds of its route and within a time; no error says more than what is wrong
with the call.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import kopf
from aiohttp import web

from pacekeeper_analysis.behaviour.pattern import MAX_PROFILE_ANSWER_BYTES
from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.reading import parse_json
from pacekeeper_analysis.reports import Evidence, FaultReport, Heartbeat

from . import metrics
from .connections import EndpointConnection, EndpointConnections, is_closed_by_peer, open_listener, shrink_tls_buffers
from .limits import ByteBudget, RateLimiter, BudgetExhausted, KeyedLocks
from .runtime import OperatorRuntime
from .services.sidecars import Caller, RetryLater, SidecarService
from .services.tokens import Forbidden, TooManyRequests, Unauthenticated
from .standby import Leadership, redirect_to_leader

MAX_HEARTBEAT_BYTES = 64 * 2**10
"""Of a worker with 100 ranks or less; of more, see `_compute_heartbeat_limits`."""
MAX_FAULT_BYTES = 2**20
"""A stall's report holds a stack a rank."""
MAX_EVIDENCE_BYTES = 4 * 2**20
"""Evidence holds a window a rank."""
MAX_HEARTBEAT_TOKENS = 4_096
MAX_FAULT_TOKENS = 27_000
MAX_EVIDENCE_TOKENS = 200_000
"""Brackets that open and commas, outside of strings and in those that are lists themselves (a rank's `entered`). What
JSON becomes in memory, and how long that takes, goes by them: a MiB of `{}` holds up the event loop for 0.1 s. The
fullest heartbeat has 93, 11 a rank and 38 a GPU, the fullest fault of 1,024 ranks 24,800, of 128 ranks in 64 groups
each 12,500.
"""
MAX_BODY_LEVELS = 32
_NON_BRACKET_BYTES = bytes(byte for byte in range(256) if byte not in b"{[]}")
HEARTBEAT_BYTES_PER_RANK, HEARTBEAT_TOKENS_PER_RANK = 264, 11
"""A rank's part of a heartbeat: its figures, and its number should it be unkillable."""
MAX_BODIES_BYTES = 32 * 2**20
"""Of all bodies that are being read."""
BODY_TIMEOUT_SECONDS = 10.0
"""So long a caller may take to send its body, the wait for the end of its others included."""
READ_AHEAD_BYTES = 16 * 2**10
"""Of a body that nobody reads yet; twice as much, and what arrives at once, may lie there."""
KEEPALIVE_TIMEOUT_SECONDS = 75.0
"""So long a connection may be without a whole request; sidecars give theirs up after 60 s."""
HANDSHAKE_TIMEOUT_SECONDS = 10.0
ACCEPT_RETRY_SECONDS = 1.0
ERROR_LOG_INTERVAL_SECONDS = 60.0
"""An error of one kind is logged once in so long."""
SIDECARS_KEY = web.AppKey("sidecars", SidecarService)
RUNTIME_KEY = web.AppKey("runtime", OperatorRuntime)
ERROR_LOG_RATE_KEY = web.AppKey("complaints", RateLimiter[tuple[str, str]])
CONNECTIONS_KEY = web.AppKey("connections", EndpointConnections)
CALLER_LOCKS_KEY = web.AppKey("turns", KeyedLocks[Caller])
BODY_BUDGET_KEY = web.AppKey("bodies", ByteBudget)
Parsed = TypeVar("Parsed")

log = logging.getLogger(__name__)
_malformed = logging.getLogger(f"{__name__}.malformed")
_malformed.setLevel(logging.CRITICAL)  # the HTTP library would log a trace for each request that is not HTTP


class _TooLarge(Exception):
    """The body is larger than its route takes."""


class _TooSlow(Exception):
    """The body did not come in time."""


@asynccontextmanager
async def serve_endpoint(
    sidecars: SidecarService,
    runtime: OperatorRuntime,
    port: int,
    context: ssl.SSLContext | None,
    *,
    address: str = "",
    connections: EndpointConnections | None = None,
    leadership: Leadership | None = None,
) -> AsyncIterator[int]:
    """Serves until left, and tells its port (`port` 0: any free one). `context` None: without TLS, for tests.

    `address` "": on all addresses. `leadership` None: it leads.
    """
    connections = connections or EndpointConnections()
    shrink_tls_buffers()
    runner = web.AppRunner(
        create_application(sidecars, runtime, connections, leadership),
        handle_signals=False,
        handler_cancellation=True,  # a poll ends with its connection
        shutdown_timeout=1.0,
        access_log=None,
        keepalive_timeout=KEEPALIVE_TIMEOUT_SECONDS,
        lingering_time=1.0,
        auto_decompress=False,
        read_bufsize=READ_AHEAD_BYTES,
        logger=_malformed,
    )
    await runner.setup()
    assert runner.server is not None
    with open_listener(address, port) as listener:
        accepting = runtime.start_task(_accept_connections(listener, connections, runner.server, context, runtime), "accepting")
        try:
            yield listener.getsockname()[1]
        finally:
            accepting.cancel()
            await asyncio.gather(accepting, return_exceptions=True)
            await runner.cleanup()


async def _accept_connections(
    listener: socket.socket,
    connections: EndpointConnections,
    protocol: Callable[[], asyncio.BaseProtocol],
    context: ssl.SSLContext | None,
    runtime: OperatorRuntime,
) -> None:
    """Until cancelled."""
    begun = set[asyncio.Task[None]]()
    try:
        while True:
            try:
                connection = await connections.accept(listener)
            except OSError as error:  # out of files, say
                log.error("no connection can be accepted for now: %s", error)
                await runtime.sleep(ACCEPT_RETRY_SECONDS)
                continue
            task = runtime.start_task(_start_connection(connection, protocol, context), "a connection's beginning")
            begun.add(task)
            task.add_done_callback(begun.discard)
    finally:
        for task in begun:
            task.cancel()
        await asyncio.gather(*begun, return_exceptions=True)


async def _start_connection(
    connection: EndpointConnection, protocol: Callable[[], asyncio.BaseProtocol], context: ssl.SSLContext | None
) -> None:
    """Whatever the other side makes of the handshake is its own affair."""
    if context is not None and not await _has_sent_data(connection):
        return
    try:
        await asyncio.get_running_loop().connect_accepted_socket(
            protocol,
            connection,
            ssl=context,
            ssl_handshake_timeout=None if context is None else HANDSHAKE_TIMEOUT_SECONDS,
        )
    except (OSError, TimeoutError):  # ssl.SSLError among them
        connection.close()


async def _has_sent_data(connection: EndpointConnection) -> bool:
    """Whether something comes; else it is closed. The kubelet's probe just connects, every two seconds, and what a
    handshake with nobody has begun is circles of objects, which stay for long."""
    loop, heard, speaks = asyncio.get_running_loop(), asyncio.Event(), False
    descriptor = connection.fileno()
    loop.add_reader(descriptor, heard.set)
    try:
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_SECONDS):
            await heard.wait()
        speaks = not is_closed_by_peer(connection)
    except TimeoutError:
        pass
    finally:
        loop.remove_reader(descriptor)
        if not speaks:
            connection.close()
    return speaks


def create_application(
    sidecars: SidecarService,
    runtime: OperatorRuntime,
    connections: EndpointConnections | None = None,
    leadership: Leadership | None = None,
) -> web.Application:
    app = web.Application(middlewares=[_convert_errors] if leadership is None else [_convert_errors, redirect_to_leader(leadership, runtime)])
    app[SIDECARS_KEY] = sidecars
    app[RUNTIME_KEY] = runtime
    app[ERROR_LOG_RATE_KEY] = RateLimiter(1 / ERROR_LOG_INTERVAL_SECONDS, 1)
    app[CONNECTIONS_KEY] = connections or EndpointConnections()
    app[CALLER_LOCKS_KEY] = KeyedLocks()
    app[BODY_BUDGET_KEY] = ByteBudget(MAX_BODIES_BYTES)
    app.add_routes(
        [
            web.post("/v1/plan", _handle_plan),
            web.post("/v1/faults", _handle_fault),
            web.post("/v1/evidence/{request}", _handle_evidence),
            web.post("/v1/patterns/{window}/{rank}", _handle_pattern),
            web.get("/healthz", _handle_healthz),
        ]
    )
    return app


async def _handle_plan(request: web.Request) -> web.StreamResponse:
    caller = await _authenticate_caller(request)
    after, wait = _parse_version(request), _parse_seconds(request, "wait")
    most, connection = max(wait, _parse_seconds(request, "hold")), _find_connection(request)
    room = _compute_heartbeat_limits(request.app[SIDECARS_KEY].count_ranks(caller))
    heartbeat = await _receive_body(request, caller, *room, _parse_heartbeat)
    unheard = None if connection is None else lambda: connection.silent_seconds
    plan = await request.app[SIDECARS_KEY].poll(caller, heartbeat, after, wait, most, unheard)
    return web.Response(status=204) if plan is None else web.json_response(plan.to_json())


def _compute_heartbeat_limits(ranks: int) -> tuple[int, int]:
    """Bytes and marks of the heartbeat of a worker of so many ranks: as many as it can need, and nobody gets more."""
    return (
        max(MAX_HEARTBEAT_BYTES, MAX_HEARTBEAT_BYTES // 2 + HEARTBEAT_BYTES_PER_RANK * ranks),
        max(MAX_HEARTBEAT_TOKENS, MAX_HEARTBEAT_TOKENS // 2 + HEARTBEAT_TOKENS_PER_RANK * ranks),
    )


async def _handle_fault(request: web.Request) -> web.StreamResponse:
    caller = await _authenticate_caller(request)
    fault = await _receive_body(request, caller, MAX_FAULT_BYTES, MAX_FAULT_TOKENS, _parse_fault)
    await request.app[SIDECARS_KEY].receive_fault(caller, fault)
    return web.Response(status=202)


async def _handle_evidence(request: web.Request) -> web.StreamResponse:
    caller = await _authenticate_caller(request)
    asked = request.match_info["request"]
    if not request.app[SIDECARS_KEY].needs_evidence(caller, asked):
        return web.Response(status=202)  # nobody needs it any more, so it is not even read
    evidence = await _receive_body(request, caller, MAX_EVIDENCE_BYTES, MAX_EVIDENCE_TOKENS, _parse_evidence)
    if evidence.request != asked:
        raise InputError(f"request: {evidence.request!r} is not the one of the path")
    request.app[SIDECARS_KEY].receive_evidence(caller, evidence)
    return web.Response(status=202)


async def _handle_pattern(request: web.Request) -> web.StreamResponse:
    """Read only when the window is looked into, in a thread of its own."""
    caller = await _authenticate_caller(request)
    window, text = request.match_info["window"], request.match_info["rank"]
    if not text.isdecimal() or len(text) > 8:
        raise InputError(f"rank: {text[:40]!r} must be a whole number")
    if request.app[SIDECARS_KEY].needs_profile_answer(caller, window, int(text)):
        data = await _receive_body(request, caller, MAX_PROFILE_ANSWER_BYTES, MAX_HEARTBEAT_TOKENS, _check_pattern_body)
        request.app[SIDECARS_KEY].receive_profile_answer(caller, window, int(text), data)
    return web.Response(status=202)


async def _handle_healthz(_request: web.Request) -> web.StreamResponse:
    return web.Response(text="ok")


async def _authenticate_caller(request: web.Request) -> Caller:
    given = request.headers.getall("Authorization", [])
    if len(given) > 1:
        raise Unauthenticated("send one Authorization header")
    scheme, _, token = "".join(given).partition(" ")
    sidecars = request.app[SIDECARS_KEY]
    caller = await sidecars.authenticate(token if scheme.lower() == "bearer" else "", request.remote or "")
    connection = _find_connection(request)
    if connection is not None:
        request.app[CONNECTIONS_KEY].mark_authenticated(connection.fileno())
    return caller


def _find_connection(request: web.Request) -> EndpointConnection | None:
    """None: it has ended meanwhile."""
    held = None if request.transport is None else request.transport.get_extra_info("socket")
    return None if held is None else request.app[CONNECTIONS_KEY].find(held.fileno())


async def _receive_body(
    request: web.Request, caller: Caller, most: int, most_marks: int, parse: Callable[[bytes, int], Parsed]
) -> Parsed:
    """`parse`: of the bytes and `most_marks`.

    Raises InputError, _TooLarge before more than `most` bytes are read, _TooSlow, TooManyRequests, Spent."""
    if (request.content_length or 0) > most:
        raise _TooLarge(f"{request.path} takes {most} bytes at most")
    try:
        reading = _receive_body_serially(request, caller, most, most_marks, parse)
        return await request.app[RUNTIME_KEY].run_with_timeout(BODY_TIMEOUT_SECONDS, reading)
    except TimeoutError as error:
        raise _TooSlow(f"the body must come within {BODY_TIMEOUT_SECONDS:.0f} s") from error


async def _receive_body_serially(
    request: web.Request, caller: Caller, most: int, most_marks: int, parse: Callable[[bytes, int], Parsed]
) -> Parsed:
    """Once the caller's other bodies are read, unless they were too dear, and while there is room for this one."""
    length = most if request.content_length is None else request.content_length
    async with request.app[CALLER_LOCKS_KEY].hold(caller):
        request.app[SIDECARS_KEY].recheck_rate(caller)
        with request.app[BODY_BUDGET_KEY].reserve(length):
            data = await _read_body(request, most)
            with request.app[SIDECARS_KEY].charge_time(caller):
                return parse(data, most_marks)


async def _read_body(request: web.Request, most: int) -> bytes:
    data = bytearray()
    async for chunk in request.content.iter_any():
        data += chunk
        if len(data) > most:
            raise _TooLarge(f"{request.path} takes {most} bytes at most")
    return bytes(data)


def _parse_heartbeat(data: bytes, most_marks: int) -> Heartbeat:
    return Heartbeat.from_json(_parse_body(data, most_marks)[0])


def _parse_fault(data: bytes, most_marks: int) -> FaultReport:
    body, marks = _parse_body(data, most_marks)
    _check_token_count(marks + _count_entered_tokens(body), most_marks)
    return FaultReport.from_json(body)


def _parse_evidence(data: bytes, most_marks: int) -> Evidence:
    return Evidence.from_json(_parse_body(data, most_marks)[0])


def _check_pattern_body(data: bytes, most_marks: int) -> bytes:
    """As it stands. Raises InputError where it would become too much."""
    _check_token_count(_count_tokens(data, most_marks), most_marks)
    return data


def _parse_body(data: bytes, most_marks: int) -> tuple[dict[str, Any], int]:
    """The object, and its marks."""
    marks = _count_tokens(data, most_marks)
    _check_token_count(marks, most_marks)
    body = parse_json(data, "the body", finite=True)
    if not isinstance(body, dict):
        raise InputError("the body must be a JSON object")
    return body, marks


def _check_token_count(marks: int, most: int) -> None:
    if marks > most:
        raise InputError(f"the body holds more than {most} values")


def _count_tokens(data: bytes, most: int) -> int:
    """Brackets that open and commas outside of strings, or some number above `most`; looks at no value.

    Raises InputError where so few are nested too deeply."""
    bare = data.replace(rb"\\", b"").replace(rb"\"", b"")
    if bare.count(b'"') > 4 * (most + 1):  # so many marks part twice as many strings: a key and a value each
        return most + 1
    outside = b"".join(bare.split(b'"')[::2])
    marks = sum(outside.count(mark) for mark in (b"{", b"[", b","))
    if marks <= most:
        _check_levels(outside)
    return marks


def _check_levels(outside: bytes) -> None:
    """The parser goes as deep as a tenant's objects may be, and bodies need little of that."""
    if outside.count(b"{") + outside.count(b"[") <= MAX_BODY_LEVELS:
        return
    levels = 0
    for bracket in outside.translate(None, _NON_BRACKET_BYTES):
        levels += 1 if bracket in b"{[" else -1
        if levels > MAX_BODY_LEVELS:
            raise InputError(f"the body is nested in more than {MAX_BODY_LEVELS} levels")


def _count_entered_tokens(body: dict[str, Any]) -> int:
    """Of a fault whose values nobody has looked at: 500 groups fit into one string."""
    ranks = body.get("ranks")
    told = [rank.get("entered") for rank in ranks if isinstance(rank, dict)] if isinstance(ranks, list) else []
    return sum(text.count(",") for text in told if isinstance(text, str))


def _parse_version(request: web.Request) -> int:
    text = request.query.get("after", "-1")
    try:
        return int(text)
    except ValueError as error:
        raise InputError(f"after: {text[:40]!r} must be a plan's version, a whole number") from error


def _parse_seconds(request: web.Request, name: str) -> float:
    text = request.query.get(name, "0")
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise InputError(f"{name}: {text[:40]!r} must be a number of seconds, 0 or more")
    return seconds


@web.middleware
async def _convert_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """The one place where errors become answers."""
    try:
        return await handler(request)
    except Unauthenticated as error:
        return _build_refusal(401, error)
    except Forbidden as error:
        return _build_refusal(403, error)
    except InputError as error:
        return _build_refusal(400, error)
    except _TooSlow as error:
        return _build_refusal(408, error, {"Connection": "close"})
    except _TooLarge as error:
        return _build_refusal(413, error, {"Connection": "close"})
    except TooManyRequests as error:
        return _build_refusal(429, error, {"Retry-After": "2"})
    except RetryLater as error:
        return _build_refusal(503, error, {"Retry-After": "1"})
    except BudgetExhausted:
        return _build_refusal(503, "too many bodies are being read", {"Retry-After": "1", "Connection": "close"})
    except kopf.TemporaryError as error:
        _log_error(request, error)
        return _build_refusal(503, "the API server does not answer the operator", {"Retry-After": "1"})
    except (web.HTTPException, ConnectionError):  # the library's own answers; nobody is left to be answered
        raise
    except Exception as error:
        _log_error(request, error)
        return _build_refusal(500, "the operator cannot answer this; its log says why")


def _log_error(request: web.Request, error: Exception) -> None:
    """In the log, once in a while: a caller that is refused comes again at once."""
    resource = request.match_info.route.resource
    kind = ("" if resource is None else resource.canonical, type(error).__name__)
    if not request.app[ERROR_LOG_RATE_KEY].take(kind, request.app[RUNTIME_KEY].monotonic()):
        return
    if isinstance(error, kopf.TemporaryError):  # it says itself what is wrong, and where
        log.warning("%s %s cannot be answered now: %s", request.method, kind[0], error)
    else:
        log.error("%s %s cannot be answered: %r", request.method, kind[0], error, exc_info=error)


def _build_refusal(status: int, error: Exception | str, headers: dict[str, str] | None = None) -> web.Response:
    metrics.REFUSED_CALLS.labels(str(status)).inc()
    return web.json_response({"error": str(error)}, status=status, headers=headers)
