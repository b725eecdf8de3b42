"""Calls to the API server of a measurement, many at once, and a watch that records when events came."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

MAX_CONCURRENT_WRITES = 32
"""Calls in progress."""
MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_MERGE_PATCH = "application/strategic-merge-patch+json"
TIMEOUT_SECONDS = 60.0


class Api:
    """Use `connect_api()`."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url
        self._slots = asyncio.Semaphore(MAX_CONCURRENT_WRITES)

    async def call(self, method: str, path: str, body: Any = None, content_type: str = "application/json") -> Any:
        """Raises RuntimeError with the server's message, or aiohttp's errors. Rejected requests (429) are repeated."""
        data = None if body is None else json.dumps(body).encode()
        async with self._slots:
            while True:
                async with self._session.request(
                    method, self._url + path, data=data, headers={"Content-Type": content_type}
                ) as response:
                    text = await response.text()
                if response.status == 429:
                    await asyncio.sleep(float(response.headers.get("Retry-After", 1)))
                elif response.status >= 300:
                    raise RuntimeError(f"{method} {path}: {response.status}: {text[:500]}")
                else:
                    return json.loads(text)

    async def text(self, path: str) -> str:
        """What is not JSON."""
        async with self._session.get(self._url + path) as response:
            response.raise_for_status()
            return await response.text()

    async def all(self, calls: Iterable[Awaitable[Any]]) -> list[Any]:
        return await asyncio.gather(*calls)

    async def watch(self, path: str, on_event: Callable[[str, Any], None], labels: str = "") -> None:
        """Everything there is, then every change, as (type, object): until cancelled."""
        selector = f"&labelSelector={labels}" if labels else ""
        while True:
            listed = await self.call("GET", f"{path}?{selector.lstrip('&')}")
            for body in listed["items"]:
                on_event("ADDED", body)
            version = listed["metadata"]["resourceVersion"]
            query = f"{path}?watch=1&resourceVersion={version}&timeoutSeconds=3600{selector}"
            async with self._session.get(self._url + query, timeout=aiohttp.ClientTimeout(total=None)) as response:
                async for line in _iterate_lines(response):
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        break
                    on_event(event["type"], event["object"])


async def _iterate_lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """However long they are."""
    remainder = b""
    async for chunk in response.content.iter_any():
        *lines, remainder = (remainder + chunk).split(b"\n")
        for line in lines:
            yield line


@asynccontextmanager
async def connect_api(url: str, token: str, context: ssl.SSLContext) -> AsyncIterator[Api]:
    connector = aiohttp.TCPConnector(ssl=context, limit=0)
    headers = {"Authorization": f"Bearer {token}"}
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
    async with aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout) as session:
        yield Api(session, url)
