"""How much of the API server's answers this process holds at once. Tenants decide how large an object is, so bytes are
bounded, not objects.

A list comes in pages. A page that has too many bytes is dropped and asked for again with a smaller `limit`; the bytes
of each page size the next one. A line of a watch is one object, and is read by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import aiohttp

PAGE_BYTES = 4 * 2**20
"""Of a page with several objects: 500 ordinary pods have as many. What is read from it takes 25 times as much where a
tenant has filled its objects with tiny fields: 100 MiB of the chart's 512."""
OBJECT_BYTES = 16 * 2**20
"""Of one object. etcd takes 1.5 MiB, of which JSON may write each byte in six characters."""
MAX_CONCURRENT_PAGES = 2
"""That are being read by one session; others wait."""
_PAGE_SHRINK_FACTOR = 4
"""A page that was too large is asked for again with so many times fewer objects."""


class BoundedResponse(aiohttp.ClientResponse):
    """Of a session with the middleware `Pages`."""

    async def read_bounded(self, most: int) -> int | None:
        """Read the body, for whoever reads it from now on; its bytes. None: it has more than `most`, and is closed.
        Raises what aiohttp does."""
        data = bytearray()
        async for part in self.content.iter_any():
            data += part
            if len(data) > most:
                self.close()
                return None
        self._body = bytes(data)
        return len(data)


class PageLimiter:
    """Middleware of a session: each page of a list (a GET with `limit`) has so few objects that its bytes are bounded.
    The server names the rest by `continue`, as if the smaller limit had been asked for."""

    def __init__(self) -> None:
        self._limits: dict[str, int] = {}  # by path, of the next page
        self._slots = asyncio.Semaphore(MAX_CONCURRENT_PAGES)

    async def __call__(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        """Raises aiohttp.ClientPayloadError where a single object has more than OBJECT_BYTES."""
        if request.method != "GET" or "limit" not in request.url.query:
            return await handler(request)
        request.headers["Accept-Encoding"] = "identity"  # else a few bytes that arrive may become many at once
        most, path = int(request.url.query["limit"]), request.url.path
        async with self._slots:
            while True:
                limit = min(most, self._limits.get(path, most))
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
    """Objects of the page after one of `size` bytes (None: too many) that was asked for with this limit: half of what
    would fit, since the next ones may be larger."""
    if size is None:
        return max(1, limit // _PAGE_SHRINK_FACTOR)
    return max(1, limit * PAGE_BYTES // (2 * max(1, size)))


async def read_lines(content: aiohttp.StreamReader) -> AsyncGenerator[bytes]:
    """Of a watch. Raises aiohttp.ClientPayloadError where one has more than OBJECT_BYTES."""
    rest = b""
    async for data in content.iter_any():
        *whole, rest = (rest + data).split(b"\n")
        for line in whole:
            yield line
        if len(rest) > OBJECT_BYTES:
            raise aiohttp.ClientPayloadError(f"a watch tells of an object with more than {OBJECT_BYTES:,} bytes")


def build_session_options() -> dict[str, Any]:
    """Of an aiohttp.ClientSession."""
    return {"middlewares": (PageLimiter(),), "response_class": BoundedResponse}
