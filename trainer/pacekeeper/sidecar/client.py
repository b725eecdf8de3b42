"""The operator's endpoint as the sidecar calls it. Every call has a time-out; the token is read anew for each."""

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

from pacekeeper_analysis.plan import WorkerPlan
from pacekeeper_analysis.reading import parse_json
from pacekeeper_analysis.reports import Evidence, FaultReport, Heartbeat

from .leader import LeaderAddress, parse_named_leader
from .settings import SidecarSettings

OPERATOR_ANSWER_SECONDS = 5.0
"""How long an answer may take beyond the time that the operator was allowed to hold the call."""
OPERATOR_CONNECT_SECONDS, LEADER_CONNECT_SECONDS = 10.0, 2.0
"""With the TLS handshake. Where all sidecars come back at once, whoever gave up sooner would have the operator begin
anew, again and again; a leader that another operator has named may have gone with its machine."""
OPERATOR_KEEPALIVE_SECONDS, OPERATOR_KEEPALIVE_TRIES = 3, 3
"""The kernel asks so often whether the operator's machine is still there; without an answer to so many questions, a
second apart, the connection has ended: a poll may be held for much longer."""


class OperatorUnavailable(Exception):
    """The operator does not answer, or asks to be called again: worth another try."""


class RequestRejected(Exception):
    """The operator will never take this; another try is of no use."""


class OperatorClient:
    """Use `connect()`."""

    def __init__(self, session: aiohttp.ClientSession, settings: SidecarSettings) -> None:
        self._session = session
        self._settings = settings
        self._leader = LeaderAddress()
        self._name = urlsplit(settings.operator).hostname

    async def fetch_plan(self, heartbeat: Heartbeat, after: int, wait: float, hold: float = 0.0) -> WorkerPlan | None:
        """This worker's part of the first plan with a version above `after`; None: none came within `wait` seconds, or
        within up to `hold` where the operator has very many workers."""
        query = {"after": str(after), "wait": f"{wait:g}", "hold": f"{hold:g}"}
        beat = replace(heartbeat, sent_at=time.time())
        answer = await self._post("/v1/plan", beat.to_json(), query, max(wait, hold) + OPERATOR_ANSWER_SECONDS)
        return None if answer is None else WorkerPlan.from_json(answer)

    async def send_fault(self, fault: FaultReport) -> None:
        await self._post("/v1/faults", replace(fault, sent_at=time.time()).to_json(), {}, OPERATOR_ANSWER_SECONDS)

    async def send_evidence(self, evidence: Evidence) -> None:
        await self._post(f"/v1/evidence/{evidence.request}", evidence.to_json(), {}, OPERATOR_ANSWER_SECONDS)

    async def send_pattern(self, window: str, rank: int, answer: bytes) -> None:
        """What a rank has written of a behaviour window."""
        await self._post(f"/v1/patterns/{window}/{rank}", answer, {}, OPERATOR_ANSWER_SECONDS)

    async def _post(self, path: str, body: dict[str, Any] | bytes, query: dict[str, str], seconds: float) -> Any:
        """The parsed answer; None where there is none. Raises Unavailable or Rejected."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        called = self._leader.address
        status, words = await self._call(called, path, data, query, seconds)
        named = parse_named_leader(words) if status == HTTPStatus.SERVICE_UNAVAILABLE else None
        if named is not None:
            self._leader.update(named, time.monotonic())
            if self._leader.address not in ("", called):
                status, words = await self._call(self._leader.address, path, data, query, seconds)
        if status == HTTPStatus.OK and isinstance(words, dict):
            return words
        if HTTPStatus.OK < status < HTTPStatus.MULTIPLE_CHOICES:
            return None
        said = f"{path}: status {status}: {str(words)[:500]}"
        if status in (HTTPStatus.BAD_REQUEST, HTTPStatus.NOT_FOUND, HTTPStatus.REQUEST_ENTITY_TOO_LARGE):
            raise RequestRejected(said)
        raise OperatorUnavailable(said)

    async def _call(
        self, leader: str, path: str, data: bytes, query: dict[str, str], seconds: float
    ) -> tuple[int, Any]:
        """Status and words of the operator there ("": of whomever the Service leads to), which proves by its
        certificate that it is one before anything is sent. Raises Unavailable."""
        connect = LEADER_CONNECT_SECONDS if leader else OPERATOR_CONNECT_SECONDS
        try:
            async with self._session.post(
                f"https://{leader}{path}" if leader else f"{self._settings.operator}{path}",
                data=data,
                params=query,
                headers={
                    "Authorization": f"Bearer {self._settings.token_file.read_text().strip()}",
                    "Content-Type": "application/json",
                },
                timeout=aiohttp.ClientTimeout(total=seconds, sock_connect=connect),
                server_hostname=self._name if leader else None,
                allow_redirects=False,
            ) as answer:
                return answer.status, _parse_answer(await answer.text())
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if leader:
                self._leader.mark_unreachable(leader, time.monotonic())
            raise OperatorUnavailable(f"{path}: {error!r}") from error


def _parse_answer(words: str) -> Any:
    """As JSON, where it is."""
    try:
        return parse_json(words, finite=True)
    except ValueError:
        return words


@asynccontextmanager
async def connect_operator(settings: SidecarSettings) -> AsyncIterator[OperatorClient]:
    context = ssl.create_default_context(cadata=settings.authority or None)
    connector = aiohttp.TCPConnector(ssl=context, keepalive_timeout=60, socket_factory=_create_socket)
    async with aiohttp.ClientSession(connector=connector) as session:
        yield OperatorClient(session, settings)


def _create_socket(address: tuple[Any, ...]) -> socket.socket:
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, OPERATOR_KEEPALIVE_SECONDS),
        (socket.TCP_KEEPINTVL, 1),
        (socket.TCP_KEEPCNT, OPERATOR_KEEPALIVE_TRIES),
        (socket.TCP_SYNCNT, 1),  # a machine that has gone shows after three seconds; a handshake may wait longer
        (socket.TCP_USER_TIMEOUT, 1000 * (OPERATOR_KEEPALIVE_SECONDS + OPERATOR_KEEPALIVE_TRIES)),  # of what is on its way
    ):
        made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made
