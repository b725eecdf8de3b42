"""The HTTPS endpoint that sidecars call (docs/architecture/wire.md): parse, call `endpoint.sidecars`, respond.

Any client that can reach it may send anything, as slowly and as often as it likes. The server reads a body only from an
authenticated caller, one body per caller at a time, within the route's size limits and a timeout. Errors describe only
what is wrong with the call.
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

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.profiling.pattern import MAX_PROFILE_ANSWER_BYTES
from pacekeeper_analysis.protocol.communicators import MAX_RANK_DIGITS
from pacekeeper_analysis.protocol.decoding import parse_json
from pacekeeper_analysis.protocol.reports import Evidence, FaultReport, Heartbeat

from .. import metrics
from ..async_runtime import OperatorRuntime
from ..limits import BudgetExhausted, ByteBudget, KeyedLocks, RateLimiter
from .connections import EndpointConnection, EndpointConnections, is_closed_by_peer, open_listener, shrink_tls_buffers
from .sidecars import Caller, RetryLater, SidecarService
from .standby import Leadership, redirect_to_leader
from .token_review import Forbidden, TooManyRequests, Unauthenticated

MAX_HEARTBEAT_BYTES = 64 * 2**10
"""For a worker with 100 ranks or fewer; for more, see `_compute_heartbeat_limits`."""
MAX_FAULT_BYTES = 2**20
"""The report of a stall contains one stack per rank."""
MAX_EVIDENCE_BYTES = 4 * 2**20
"""Evidence contains one window per rank."""
MAX_HEARTBEAT_TOKENS = 4_096
MAX_FAULT_TOKENS = 27_000
MAX_EVIDENCE_TOKENS = 200_000
"""Limits on opening brackets and commas, outside of strings and in strings that are lists themselves (`entered`).

Memory and parsing time of JSON depend on them: 1 MiB of `{}` blocks the event loop for 0.1 s. The largest heartbeat has
93, plus 12 per rank and 38 per GPU. The largest fault of 1,024 ranks has 24,800; of 128 ranks in 64 groups each,
12,500.
"""
MAX_BODY_LEVELS = 32
_NON_BRACKET_BYTES = bytes(byte for byte in range(256) if byte not in b"{[]}")
HEARTBEAT_BYTES_PER_RANK, HEARTBEAT_TOKENS_PER_RANK = 292, 12
"""One rank's part of a heartbeat: its metrics, and its number if it cannot be killed."""
MAX_BODIES_BYTES = 32 * 2**20
"""Total size of all bodies that are being read."""
BODY_TIMEOUT_SECONDS = 10.0
"""Maximum seconds until a body has arrived, including the wait for the caller's other bodies."""
READ_AHEAD_BYTES = 16 * 2**10
"""Buffer for a body that is not read yet. Twice this, plus what arrives at once, may be buffered."""
KEEPALIVE_TIMEOUT_SECONDS = 75.0
"""Maximum seconds of a connection without a complete request. Sidecars close theirs after 60 s."""
HANDSHAKE_TIMEOUT_SECONDS = 10.0
ACCEPT_RETRY_SECONDS = 1.0
ERROR_LOG_INTERVAL_SECONDS = 60.0
"""Minimum seconds between two log entries of the same kind of error."""
SIDECARS_KEY = web.AppKey("sidecars", SidecarService)
RUNTIME_KEY = web.AppKey("runtime", OperatorRuntime)
ERROR_LOG_RATE_KEY = web.AppKey("complaints", RateLimiter[tuple[str, str]])
CONNECTIONS_KEY = web.AppKey("connections", EndpointConnections)
CALLER_LOCKS_KEY = web.AppKey("turns", KeyedLocks[Caller])
BODY_BUDGET_KEY = web.AppKey("bodies", ByteBudget)
Parsed = TypeVar("Parsed")

log = logging.getLogger(__name__)
_malformed = logging.getLogger(f"{__name__}.malformed")
_malformed.setLevel(logging.CRITICAL)  # aiohttp would log a trace for each request that is not HTTP


class _TooLarge(Exception):
    """The body exceeds its route's limit."""


class _TooSlow(Exception):
    """The body did not arrive in time."""


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
    """Serve within the context, and yield the port (`port` 0: any free one).

    `context` None: without TLS, for tests. `address` empty: all addresses. `leadership` None: this operator leads.
    """
    connections = connections or EndpointConnections()
    app = create_application(sidecars, runtime, connections, leadership)
    async with serve_application(app, runtime, port, context, connections, address=address) as actual_port:
        yield actual_port


@asynccontextmanager
async def serve_application(
    app: web.Application,
    runtime: OperatorRuntime,
    port: int,
    context: ssl.SSLContext | None,
    connections: EndpointConnections,
    *,
    address: str = "",
) -> AsyncIterator[int]:
    """Serve `app` within the context, on connections within their limits, and yield the port."""
    shrink_tls_buffers()
    runner = web.AppRunner(
        app,
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
        accept_task = runtime.start_task(
            _accept_connections(listener, connections, runner.server, context, runtime), "accepting"
        )
        try:
            yield listener.getsockname()[1]
        finally:
            accept_task.cancel()
            await asyncio.gather(accept_task, return_exceptions=True)
            await runner.cleanup()


async def _accept_connections(
    listener: socket.socket,
    connections: EndpointConnections,
    protocol: Callable[[], asyncio.BaseProtocol],
    context: ssl.SSLContext | None,
    runtime: OperatorRuntime,
) -> None:
    """Accept connections until cancelled."""
    tasks = set[asyncio.Task[None]]()
    try:
        while True:
            try:
                connection = await connections.accept(listener)
            except OSError as error:  # for example no free file descriptor
                log.error("accepting connections failed; retrying: %s", error)
                await runtime.sleep(ACCEPT_RETRY_SECONDS)
                continue
            task = runtime.start_task(_start_connection(connection, protocol, context), "connection start")
            tasks.add(task)
            task.add_done_callback(tasks.discard)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _start_connection(
    connection: EndpointConnection, protocol: Callable[[], asyncio.BaseProtocol], context: ssl.SSLContext | None
) -> None:
    """Start TLS and HTTP on the connection. A failed handshake is the client's problem, and is not logged."""
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
    """Return whether the client sends anything; if not, close the connection.

    The kubelet's probe only connects, every two seconds. Each handshake without a peer would leave reference cycles
    that are freed late.
    """
    loop, readable, has_data = asyncio.get_running_loop(), asyncio.Event(), False
    descriptor = connection.fileno()
    loop.add_reader(descriptor, readable.set)
    try:
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_SECONDS):
            await readable.wait()
        has_data = not is_closed_by_peer(connection)
    except TimeoutError:
        pass
    finally:
        loop.remove_reader(descriptor)
        if not has_data:
            connection.close()
    return has_data


def create_application(
    sidecars: SidecarService,
    runtime: OperatorRuntime,
    connections: EndpointConnections | None = None,
    leadership: Leadership | None = None,
) -> web.Application:
    app = web.Application(
        middlewares=[_convert_errors]
        if leadership is None
        else [_convert_errors, redirect_to_leader(leadership, runtime)]
    )
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
    max_wait, connection = max(wait, _parse_seconds(request, "hold")), _find_connection(request)
    limits = _compute_heartbeat_limits(request.app[SIDECARS_KEY].count_ranks(caller))
    heartbeat = await _receive_body(request, caller, *limits, _parse_heartbeat)
    get_silent_seconds = None if connection is None else lambda: connection.silent_seconds
    received = request.query.get("requests")
    answer = await request.app[SIDECARS_KEY].poll(
        caller, heartbeat, after, wait, max_wait, get_silent_seconds, received
    )
    return web.Response(status=204) if answer is None else web.json_response(answer.to_json())


def _compute_heartbeat_limits(ranks: int) -> tuple[int, int]:
    """Return the maximum bytes and tokens of a heartbeat of a worker with this many ranks."""
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
    request_name = request.match_info["request"]
    if not request.app[SIDECARS_KEY].needs_evidence(caller, request_name):
        return web.Response(status=202)  # no longer needed, so the body is not read
    evidence = await _receive_body(request, caller, MAX_EVIDENCE_BYTES, MAX_EVIDENCE_TOKENS, _parse_evidence)
    if evidence.request != request_name:
        raise InputError(f"request: {evidence.request!r} is not the one of the path")
    request.app[SIDECARS_KEY].receive_evidence(caller, evidence)
    return web.Response(status=202)


async def _handle_pattern(request: web.Request) -> web.StreamResponse:
    """Receive a rank's pattern as bytes. A separate thread decodes it when the profile window is localized."""
    caller = await _authenticate_caller(request)
    window, rank_text = request.match_info["window"], request.match_info["rank"]
    if not rank_text.isdecimal() or len(rank_text) > MAX_RANK_DIGITS:
        raise InputError(f"rank: {rank_text[:40]!r} must be a whole number")
    if request.app[SIDECARS_KEY].needs_profile_answer(caller, window, int(rank_text)):
        data = await _receive_body(request, caller, MAX_PROFILE_ANSWER_BYTES, MAX_HEARTBEAT_TOKENS, _check_pattern_body)
        request.app[SIDECARS_KEY].receive_profile_answer(caller, window, int(rank_text), data)
    return web.Response(status=202)


async def _handle_healthz(_request: web.Request) -> web.StreamResponse:
    return web.Response(text="ok")


async def _authenticate_caller(request: web.Request) -> Caller:
    headers = request.headers.getall("Authorization", [])
    if len(headers) > 1:
        raise Unauthenticated("send one Authorization header")
    scheme, _, token = "".join(headers).partition(" ")
    sidecars = request.app[SIDECARS_KEY]
    caller = await sidecars.authenticate(token if scheme.lower() == "bearer" else "", request.remote or "")
    connection = _find_connection(request)
    if connection is not None:
        request.app[CONNECTIONS_KEY].mark_authenticated(connection.fileno())
    return caller


def _find_connection(request: web.Request) -> EndpointConnection | None:
    """Return the request's connection; None: it has closed."""
    sock = None if request.transport is None else request.transport.get_extra_info("socket")
    return None if sock is None else request.app[CONNECTIONS_KEY].find(sock.fileno())


async def _receive_body(
    request: web.Request, caller: Caller, max_bytes: int, max_tokens: int, parse: Callable[[bytes, int], Parsed]
) -> Parsed:
    """Read the body and return `parse(data, max_tokens)`.

    Raises InputError, _TooLarge before more than `max_bytes` bytes are read, _TooSlow, TooManyRequests,
    BudgetExhausted.
    """
    if (request.content_length or 0) > max_bytes:
        raise _TooLarge(f"{request.path} takes {max_bytes} bytes at most")
    try:
        reading = _receive_body_serially(request, caller, max_bytes, max_tokens, parse)
        return await request.app[RUNTIME_KEY].run_with_timeout(BODY_TIMEOUT_SECONDS, reading)
    except TimeoutError as error:
        raise _TooSlow(f"the body must come within {BODY_TIMEOUT_SECONDS:.0f} s") from error


async def _receive_body_serially(
    request: web.Request, caller: Caller, max_bytes: int, max_tokens: int, parse: Callable[[bytes, int], Parsed]
) -> Parsed:
    """Read the body once the caller's other bodies are read, within the caller's rate and the shared budget."""
    length = max_bytes if request.content_length is None else request.content_length
    async with request.app[CALLER_LOCKS_KEY].hold(caller):
        request.app[SIDECARS_KEY].recheck_rate(caller)
        with request.app[BODY_BUDGET_KEY].reserve(length):
            data = await _read_body(request, max_bytes)
            with request.app[SIDECARS_KEY].charge_time(caller):
                return parse(data, max_tokens)


async def _read_body(request: web.Request, max_bytes: int) -> bytes:
    data = bytearray()
    async for chunk in request.content.iter_any():
        data += chunk
        if len(data) > max_bytes:
            raise _TooLarge(f"{request.path} takes {max_bytes} bytes at most")
    return bytes(data)


def _parse_heartbeat(data: bytes, max_tokens: int) -> Heartbeat:
    return Heartbeat.from_json(_parse_body(data, max_tokens)[0])


def _parse_fault(data: bytes, max_tokens: int) -> FaultReport:
    body, token_count = _parse_body(data, max_tokens)
    _check_token_count(token_count + _count_entered_tokens(body), max_tokens)
    return FaultReport.from_json(body)


def _parse_evidence(data: bytes, max_tokens: int) -> Evidence:
    return Evidence.from_json(_parse_body(data, max_tokens)[0])


def _check_pattern_body(data: bytes, max_tokens: int) -> bytes:
    """Return `data` unchanged. Raises InputError if it has too many tokens."""
    _check_token_count(_count_tokens(data, max_tokens), max_tokens)
    return data


def _parse_body(data: bytes, max_tokens: int) -> tuple[dict[str, Any], int]:
    """Return the JSON object and its number of tokens."""
    token_count = _count_tokens(data, max_tokens)
    _check_token_count(token_count, max_tokens)
    body = parse_json(data, "the body", finite=True)
    if not isinstance(body, dict):
        raise InputError("the body must be a JSON object")
    return body, token_count


def _check_token_count(token_count: int, max_tokens: int) -> None:
    if token_count > max_tokens:
        raise InputError(f"the body holds more than {max_tokens} values")


def _count_tokens(data: bytes, max_tokens: int) -> int:
    """Count opening brackets and commas outside of strings, without parsing values.

    Above `max_tokens`, any such number is returned.

    Raises InputError if the body is nested too deeply.
    """
    unescaped = data.replace(rb"\\", b"").replace(rb"\"", b"")
    # `max_tokens` tokens separate at most twice as many strings: keys and values
    if unescaped.count(b'"') > 4 * (max_tokens + 1):
        return max_tokens + 1
    outside = b"".join(unescaped.split(b'"')[::2])
    token_count = sum(outside.count(token) for token in (b"{", b"[", b","))
    if token_count <= max_tokens:
        _check_levels(outside)
    return token_count


def _check_levels(outside: bytes) -> None:
    """Raise InputError for deep nesting. The parser accepts the depth of tenants' objects; bodies need far less."""
    if outside.count(b"{") + outside.count(b"[") <= MAX_BODY_LEVELS:
        return
    levels = 0
    for bracket in outside.translate(None, _NON_BRACKET_BYTES):
        levels += 1 if bracket in b"{[" else -1
        if levels > MAX_BODY_LEVELS:
            raise InputError(f"the body is nested in more than {MAX_BODY_LEVELS} levels")


def _count_entered_tokens(body: dict[str, Any]) -> int:
    """Count commas in the `entered` strings of a fault that is not validated yet: 500 groups fit into one string."""
    ranks = body.get("ranks")
    entered = [rank.get("entered") for rank in ranks if isinstance(rank, dict)] if isinstance(ranks, list) else []
    return sum(text.count(",") for text in entered if isinstance(text, str))


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
    """Convert errors to HTTP responses; no other code does."""
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
    except (web.HTTPException, ConnectionError):  # aiohttp's own responses; the client is gone
        raise
    except Exception as error:
        _log_error(request, error)
        return _build_refusal(500, "the operator cannot answer this; its log says why")


def _log_error(request: web.Request, error: Exception) -> None:
    """Log the error, with a rate limit: a caller that gets an error retries at once."""
    resource = request.match_info.route.resource
    kind = ("" if resource is None else resource.canonical, type(error).__name__)
    if not request.app[ERROR_LOG_RATE_KEY].take(kind, request.app[RUNTIME_KEY].monotonic()):
        return
    if isinstance(error, kopf.TemporaryError):  # its message is sufficient
        log.warning("%s %s cannot be answered; the sidecar will retry: %s", request.method, kind[0], error)
    else:
        log.error("%s %s cannot be answered: %r", request.method, kind[0], error, exc_info=error)


def _build_refusal(status: int, error: Exception | str, headers: dict[str, str] | None = None) -> web.Response:
    metrics.REFUSED_CALLS.labels(str(status)).inc()
    return web.json_response({"error": str(error)}, status=status, headers=headers)
