"""What an operator that does not lead answers to sidecars: the address of the leader.

An operator that waits for the Lease, or could not renew it in time, has no current state. It must not look like a
living operator to sidecars. It therefore reads nothing of a call, not even the token, and closes the connection, so
that the next call goes through the Service again. Without a leader it holds the call for a while and keeps the
connection. It may lead next, and thousands of reconnections would delay that.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Protocol

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from .. import metrics
from ..async_runtime import OperatorRuntime

RETRY_AFTER_SECONDS = 1
STANDBY_HOLD_SECONDS = 2.5
"""Seconds that a call waits for a leader.

A sidecar waits 5 s for an answer, and a new leader first has to load the job (`sidecars.JOB_KNOWN_TIMEOUT_SECONDS`).
"""


class Leadership(Protocol):
    """See `kube.leader_election.LeaderElector`."""

    def can_serve(self) -> bool: ...

    @property
    def leader_address(self) -> str: ...

    @property
    def is_candidate(self) -> bool:
        """Whether this operator may lead next."""
        ...

    async def wait_for_change(self) -> None:
        """Return when one of these may have changed."""


def redirect_to_leader(leadership: Leadership, runtime: OperatorRuntime) -> Middleware:
    """Respond with 503 while this operator does not lead, with the leader's address if it is known."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        with suppress(TimeoutError):
            await runtime.run_with_timeout(STANDBY_HOLD_SECONDS, _wait_until_decided(leadership))
        if leadership.can_serve():
            return await handler(request)
        metrics.REFUSED_CALLS.labels("503").inc()
        headers = {"Retry-After": str(RETRY_AFTER_SECONDS)}
        if not leadership.is_candidate:
            headers["Connection"] = "close"
        body = {"error": "this operator does not lead", "leader": leadership.leader_address}
        return web.json_response(body, status=503, headers=headers)

    return middleware


async def _wait_until_decided(leadership: Leadership) -> None:
    """Return when this operator leads, or cannot lead next."""
    while leadership.is_candidate and not leadership.can_serve():
        await leadership.wait_for_change()
