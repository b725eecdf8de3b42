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

import aiohttp

from pacekeeper_analysis.plan import WorkerPlan
from pacekeeper_analysis.reports import Evidence, Fault, Heartbeat

from .settings import SidecarSettings

ANSWER_SECONDS = 5.0
"""How long an answer may take beyond the time that the operator was allowed to hold the call."""


KEEPALIVE_SECONDS, KEEPALIVE_TRIES = 3, 3
"""The kernel asks so often whether the operator's machine is still there; without an answer to so many questions, a
second apart, the connection has ended: a poll may be held for much longer."""


class Unavailable(Exception):
    """The operator does not answer, or asks to be called again: worth another try."""


class Rejected(Exception):
    """The operator will never take this; another try is of no use."""


class OperatorClient:
    """Use `connect()`."""

    def __init__(self, session: aiohttp.ClientSession, settings: SidecarSettings) -> None:
        self._session = session
        self._settings = settings

    async def plan(self, heartbeat: Heartbeat, after: int, wait: float, hold: float = 0.0) -> WorkerPlan | None:
        """This worker's part of the first plan with a version above `after`; None: none came within `wait` seconds, or
        within up to `hold` where the operator has very many workers."""
        query = {"after": str(after), "wait": f"{wait:g}", "hold": f"{hold:g}"}
        beat = replace(heartbeat, sent_at=time.time())
        answer = await self._post("/v1/plan", beat.to_json(), query, max(wait, hold) + ANSWER_SECONDS)
        return None if answer is None else WorkerPlan.from_json(answer)

    async def fault(self, fault: Fault) -> None:
        await self._post("/v1/faults", replace(fault, sent_at=time.time()).to_json(), {}, ANSWER_SECONDS)

    async def evidence(self, evidence: Evidence) -> None:
        await self._post(f"/v1/evidence/{evidence.request}", evidence.to_json(), {}, ANSWER_SECONDS)

    async def pattern(self, window: str, rank: int, answer: bytes) -> None:
        """What a rank has written of a behaviour window."""
        await self._post(f"/v1/patterns/{window}/{rank}", answer, {}, ANSWER_SECONDS)

    async def _post(self, path: str, body: dict[str, Any] | bytes, query: dict[str, str], seconds: float) -> Any:
        """The parsed answer; None where there is none. Raises Unavailable or Rejected."""
        try:
            async with self._session.post(
                f"{self._settings.operator}{path}",
                data=body if isinstance(body, bytes) else json.dumps(body).encode(),
                params=query,
                headers={
                    "Authorization": f"Bearer {self._settings.token_file.read_text().strip()}",
                    "Content-Type": "application/json",
                },
                timeout=aiohttp.ClientTimeout(total=seconds, sock_connect=2.0),
            ) as answer:
                if answer.status == HTTPStatus.OK:
                    return await answer.json()
                if answer.status < HTTPStatus.MULTIPLE_CHOICES:
                    return None
                words = f"{path}: status {answer.status}: {(await answer.text())[:500]}"
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unavailable(f"{path}: {error!r}") from error
        if answer.status in (HTTPStatus.BAD_REQUEST, HTTPStatus.NOT_FOUND, HTTPStatus.REQUEST_ENTITY_TOO_LARGE):
            raise Rejected(words)
        raise Unavailable(words)


@asynccontextmanager
async def connect(settings: SidecarSettings) -> AsyncIterator[OperatorClient]:
    context = ssl.create_default_context(cadata=settings.authority or None)
    connector = aiohttp.TCPConnector(ssl=context, keepalive_timeout=60, socket_factory=_socket)
    async with aiohttp.ClientSession(connector=connector) as session:
        yield OperatorClient(session, settings)


def _socket(address: tuple[Any, ...]) -> socket.socket:
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, KEEPALIVE_SECONDS),
        (socket.TCP_KEEPINTVL, 1),
        (socket.TCP_KEEPCNT, KEEPALIVE_TRIES),
        (socket.TCP_USER_TIMEOUT, 1000 * (KEEPALIVE_SECONDS + KEEPALIVE_TRIES)),  # of what is on its way
    ):
        made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made
