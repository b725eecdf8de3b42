"""What sidecars are told by an operator that does not lead: where the one is that does.

Whoever waits for the Lease, or could not renew it for so long that another may lead, knows nothing that is worth being
heard, and must not be taken for a sign of life of the operator. So nothing is read of a call, not even whose it is; the
connection is closed, so that the next one goes through the Service anew.
"""

from __future__ import annotations

from typing import Protocol

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from . import metrics

RETRY_AFTER_SECONDS = 1


class Leadership(Protocol):
    """See `services.leadership.Lease`."""

    def serves(self) -> bool: ...

    @property
    def leader(self) -> str: ...


def sends_on(leadership: Leadership) -> Middleware:
    """Answers 503 while this operator does not lead, with the address of the one that does, where it is known."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if leadership.serves():
            return await handler(request)
        metrics.REFUSALS.labels("503").inc()
        return web.json_response(
            {"error": "this operator does not lead", "leader": leadership.leader},
            status=503,
            headers={"Retry-After": str(RETRY_AFTER_SECONDS), "Connection": "close"},
        )

    return middleware
