"""The client of the operator's endpoint. Every call has a timeout, and reads the token again."""

from __future__ import annotations

import json
import socket
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from pacekeeper_analysis.protocol.decoding import parse_json
from pacekeeper_analysis.protocol.poll import PollAnswer
from pacekeeper_analysis.protocol.reports import Evidence, FaultReport, Heartbeat

from .leader_address import LeaderAddress, parse_named_leader
from .settings import SidecarSettings

OPERATOR_ANSWER_SECONDS = 5.0
"""How long an answer may take, in addition to the time for which the operator may hold the call."""
OPERATOR_CONNECT_SECONDS, LEADER_CONNECT_SECONDS = 10.0, 2.0
"""Timeouts of connecting, including the TLS handshake: to the Service, and to a named leader. The first is long: if all
sidecars reconnect at once, a shorter one would make the operator restart handshakes repeatedly. The second is short:
the named leader may have been lost with its machine."""
OPERATOR_KEEPALIVE_SECONDS, OPERATOR_KEEPALIVE_TRIES = 3, 3
"""TCP keep-alive: idle seconds before the first probe, and number of probes, one per second, without an answer until
the connection counts as lost. A poll may be held for much longer."""


class OperatorUnavailable(Exception):
    """The operator does not answer, or requests a retry: retry later."""


class RequestRejected(Exception):
    """The operator rejects this request permanently: do not retry."""


class OperatorClient:
    """The operator's endpoint. Create it with `connect_operator`."""

    def __init__(self, session: aiohttp.ClientSession, settings: SidecarSettings) -> None:
        self._session = session
        self._settings = settings
        self._leader = LeaderAddress()
        self._name = urlsplit(settings.operator).hostname

    async def poll(
        self, heartbeat: Heartbeat, after: int | None, received: str, wait: float, hold: float = 0.0
    ) -> PollAnswer | None:
        """Return this worker's part of the first plan with a version above `after`, or of new requests.

        `after` None: with any version. `received`: identity of the requests that were received last. The result is None
        if nothing came within `wait` seconds, or within up to `hold` seconds if the operator has very many workers.
        Raises OperatorUnavailable or RequestRejected.
        """
        query = {"wait": f"{wait:g}", "hold": f"{hold:g}", "requests": received}
        if after is not None:
            query["after"] = str(after)
        stamped = replace(heartbeat, sent_at=time.time())
        answer = await self._post("/v1/plan", stamped.to_json(), query, max(wait, hold) + OPERATOR_ANSWER_SECONDS)
        return None if answer is None else PollAnswer.from_json(answer)

    async def send_fault(self, fault: FaultReport) -> None:
        await self._post("/v1/faults", replace(fault, sent_at=time.time()).to_json(), {}, OPERATOR_ANSWER_SECONDS)

    async def send_evidence(self, evidence: Evidence) -> None:
        await self._post(f"/v1/evidence/{evidence.request}", evidence.to_json(), {}, OPERATOR_ANSWER_SECONDS)

    async def send_pattern(self, window: str, rank: int, answer: bytes) -> None:
        """Send what a rank has written for a profile."""
        await self._post(f"/v1/patterns/{window}/{rank}", answer, {}, OPERATOR_ANSWER_SECONDS)

    async def _post(self, path: str, body: dict[str, Any] | bytes, query: dict[str, str], seconds: float) -> Any:
        """Return the parsed answer; None: it has no content. Raises OperatorUnavailable or RequestRejected."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        address = self._leader.address
        status, content = await self._call(address, path, data, query, seconds)
        leader = parse_named_leader(content) if status == HTTPStatus.SERVICE_UNAVAILABLE else None
        if leader is not None:
            self._leader.update(leader, time.monotonic())
            if self._leader.address not in ("", address):
                status, content = await self._call(self._leader.address, path, data, query, seconds)
        if status == HTTPStatus.OK and isinstance(content, dict):
            return content
        if HTTPStatus.OK < status < HTTPStatus.MULTIPLE_CHOICES:
            return None
        message = f"{path}: status {status}: {str(content)[:500]}"
        if status in (HTTPStatus.BAD_REQUEST, HTTPStatus.NOT_FOUND, HTTPStatus.REQUEST_ENTITY_TOO_LARGE):
            raise RequestRejected(message)
        raise OperatorUnavailable(message)

    async def _call(
        self, leader: str, path: str, data: bytes, query: dict[str, str], seconds: float
    ) -> tuple[int, Any]:
        """Return status and content of the answer of the operator at `leader` ("": at the Service).

        The server proves with its certificate that it is an operator before anything is sent. Raises
        OperatorUnavailable.
        """
        connect_timeout = LEADER_CONNECT_SECONDS if leader else OPERATOR_CONNECT_SECONDS
        try:
            async with self._session.post(
                f"https://{leader}{path}" if leader else f"{self._settings.operator}{path}",
                data=data,
                params=query,
                headers={
                    "Authorization": f"Bearer {self._settings.token_file.read_text().strip()}",
                    "Content-Type": "application/json",
                },
                timeout=aiohttp.ClientTimeout(total=seconds, sock_connect=connect_timeout),
                server_hostname=self._name if leader else None,
                allow_redirects=False,
            ) as answer:
                return answer.status, _parse_answer(await answer.text())
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if leader:
                self._leader.mark_unreachable(leader, time.monotonic())
            raise OperatorUnavailable(f"{path}: {error!r}") from error


def _parse_answer(text: str) -> Any:
    """Parse the answer as JSON; return it unchanged if it is not JSON."""
    try:
        return parse_json(text, finite=True)
    except ValueError:
        return text


@asynccontextmanager
async def connect_operator(settings: SidecarSettings) -> AsyncIterator[OperatorClient]:
    context = ssl.create_default_context(cadata=settings.authority or None)
    connector = aiohttp.TCPConnector(ssl=context, keepalive_timeout=60, socket_factory=_create_socket)
    async with aiohttp.ClientSession(connector=connector) as session:
        yield OperatorClient(session, settings)


def _create_socket(address: tuple[Any, ...]) -> socket.socket:
    family, kind, protocol, *_ = address
    created = socket.socket(family, kind, protocol)
    created.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, OPERATOR_KEEPALIVE_SECONDS),
        (socket.TCP_KEEPINTVL, 1),
        (socket.TCP_KEEPCNT, OPERATOR_KEEPALIVE_TRIES),
        (socket.TCP_SYNCNT, 1),  # a lost machine is detected after three seconds; a handshake may wait longer
        (
            socket.TCP_USER_TIMEOUT,
            1000 * (OPERATOR_KEEPALIVE_SECONDS + OPERATOR_KEEPALIVE_TRIES),
        ),  # for unacknowledged data
    ):
        created.setsockopt(socket.IPPROTO_TCP, option, value)
    return created
