"""Limits of the bytes of the API server's answers that this process holds at once.

Bytes are bounded, not objects, as tenants decide how large an object is. A list comes in pages. A page that has too
many bytes is dropped and requested again with a smaller `limit`. The bytes of each page determine the size of the next
one. Each line of a watch is one object, and is read by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import aiohttp

PAGE_BYTES = 4 * 2**20
"""Bytes of a page with several objects: 500 ordinary pods have about as many.

Parsed, it takes up to 25 times as much if a tenant fills objects with tiny fields: 100 MiB of the chart's limit of 512
MiB.
"""
OBJECT_BYTES = 16 * 2**20
"""Bytes of one object.

etcd accepts 1.5 MiB, of which JSON may write each byte in six characters.
"""
MAX_CONCURRENT_PAGES = 2
"""Pages that one session reads at the same time. Others wait."""
_PAGE_SHRINK_FACTOR = 4
"""A page that was too large is requested again with its limit divided by this factor."""


class BoundedResponse(aiohttp.ClientResponse):
    """A response of a session with the middleware `PageLimiter`."""

    async def read_bounded(self, max_bytes: int) -> int | None:
        """Read the body for later use, and return its size in bytes.

        It returns None, and closes the response, if the body has more than `max_bytes` bytes. Raises what aiohttp does.
        """
        data = bytearray()
        async for part in self.content.iter_any():
            data += part
            if len(data) > max_bytes:
                self.close()
                return None
        self._body = bytes(data)
        return len(data)


class PageLimiter:
    """Middleware of a session that bounds the bytes of each page of a list (a GET with `limit`).

    The server returns a `continue` token for the rest, as if the caller had asked for the smaller limit.
    """

    def __init__(self) -> None:
        self._limits: dict[str, int] = {}  # by path, of the next page
        self._slots = asyncio.Semaphore(MAX_CONCURRENT_PAGES)

    async def __call__(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        """Send a request.

        Raises aiohttp.ClientPayloadError if a single object has more than OBJECT_BYTES.
        """
        if request.method != "GET" or "limit" not in request.url.query:
            return await handler(request)
        request.headers["Accept-Encoding"] = "identity"  # a compressed answer could expand to many bytes at once
        requested_limit, path = int(request.url.query["limit"]), request.url.path
        async with self._slots:
            while True:
                limit = min(requested_limit, self._limits.get(path, requested_limit))
                request.url = request.url.update_query(limit=str(limit))
                response = await handler(request)
                assert isinstance(response, BoundedResponse)
                size = await response.read_bounded(PAGE_BYTES if limit > 1 else OBJECT_BYTES)
                self._limits[path] = compute_next_limit(limit, size)
                if size is not None:
                    return response
                if limit == 1:
                    raise aiohttp.ClientPayloadError(f"an object of {path} has more than {OBJECT_BYTES:,} bytes")


def compute_next_limit(limit: int, size: int | None) -> int:
    """Return the limit of the page after one of `size` bytes (None: too many) that was requested with `limit`.

    It is half of what would fit, since the next objects may be larger.
    """
    if size is None:
        return max(1, limit // _PAGE_SHRINK_FACTOR)
    return max(1, limit * PAGE_BYTES // (2 * max(1, size)))


async def read_lines(content: aiohttp.StreamReader) -> AsyncGenerator[bytes]:
    """Yield the lines of a watch.

    Raises aiohttp.ClientPayloadError if a line has more than OBJECT_BYTES.
    """
    rest = b""
    async for data in content.iter_any():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line
        if len(rest) > OBJECT_BYTES:
            raise aiohttp.ClientPayloadError(f"a watch has an object with more than {OBJECT_BYTES:,} bytes")


def build_session_options() -> dict[str, Any]:
    """Return the keyword arguments of an aiohttp.ClientSession with these limits."""
    return {"middlewares": (PageLimiter(),), "response_class": BoundedResponse}
