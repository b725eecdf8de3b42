"""What sidecars are told by an operator that does not lead: where the one is that does.

Whoever waits for the Lease, or could not renew it for so long that another may lead, knows nothing that is worth being
heard, and must not be taken for a sign of life of the operator. So nothing is read of a call, not even whose it is; the
connection is closed, so that the next one goes through the Service anew. Where nobody leads, it is held for a while,
and the connection stays: this operator may be the next, and thousands that come again and again would keep it from
becoming that.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Protocol

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from . import metrics
from .runtime import OperatorRuntime

RETRY_AFTER_SECONDS = 1
STANDBY_HOLD_SECONDS = 2.5
"""So long a call waits for an operator that leads: a sidecar waits five seconds for an answer, and once somebody leads
its job has to be known (`services.sidecars.KNOWN_SECONDS`)."""


class Leadership(Protocol):
    """See `services.leadership.Lease`."""

    def can_serve(self) -> bool: ...

    @property
    def leader_address(self) -> str: ...

    @property
    def is_candidate(self) -> bool:
        """Whether this operator may be the next."""
        ...

    async def wait_for_change(self) -> None:
        """Returns when either may have become another."""


def redirect_to_leader(leadership: Leadership, runtime: OperatorRuntime) -> Middleware:
    """Answers 503 while this operator does not lead, with the address of the one that does, where it is known."""

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
        words = {"error": "this operator does not lead", "leader": leadership.leader_address}
        return web.json_response(words, status=503, headers=headers)

    return middleware


async def _wait_until_decided(leadership: Leadership) -> None:
    """Returns when this operator leads, or may not be the next to lead."""
    while leadership.is_candidate and not leadership.can_serve():
        await leadership.wait_for_change()
