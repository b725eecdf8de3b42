"""The Service in front of the operator's endpoint: requests of sidecars, into the real server's application in memory.

Left out are TLS and the reading of sockets; their rules have tests of their own, with real ones.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlencode

from aiohttp import StreamReader, web, web_app
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http import HttpVersion11, RawRequestMessage
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from ..loop import Process

if TYPE_CHECKING:
    from ..world import World

Reply = tuple[int, Any]
"""Status, and the body, parsed; None: there is none."""


def forget_applications() -> None:
    """The server's library remembers a thousand of them, and with each all of its world."""
    web_app._cached_build_middleware.cache_clear()


@dataclass
class Listener:
    """A pod that serves."""

    place: str
    process: Process
    application: web.Application
    address: str  # address:port


class Endpoint:
    """Of all operator pods together."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._random = world.random("service")
        self._listeners: dict[str, Listener] = {}  # by pod

    def open(self, listener: Listener) -> None:
        self._listeners[listener.process.name] = listener
        listener.process.on_death(lambda: self.close(listener))

    def close(self, listener: Listener) -> None:
        if self._listeners.get(listener.process.name) is listener:
            del self._listeners[listener.process.name]

    def forget(self, pod: str) -> None:
        """The Service leads there no more."""
        self._listeners.pop(pod, None)

    def line(self, place: str, source: str) -> Line:
        """A client's kept connection, from a place, and from an address there."""
        return Line(self._world, self, place, source)

    def choose(self) -> Listener | None:
        """One of those that the Service leads to."""
        there = list(self._listeners.values())
        return self._random.choice(there) if there else None

    def at(self, address: str) -> Listener | None:
        """Whoever serves there, whether or not the Service leads there."""
        return next((one for one in self._listeners.values() if one.address == address), None)

    def leads_to(self, listener: Listener) -> bool:
        return self._listeners.get(listener.process.name) is listener


@dataclass
class Line:
    """Calls of one client. It stays with the pod that it has found until a call breaks, or is answered by one that does
    not lead."""

    world: World
    endpoint: Endpoint
    place: str
    source: str
    _found: Listener | None = field(default=None, init=False)

    async def call(
        self, method: str, path: str, query: Mapping[str, str], body: Any, token: str, leader: str = ""
    ) -> Reply:
        """`leader`: where to call, address:port; "": whoever the Service leads to. Raises ConnectionError, or never
        returns: the caller has a time-out of its own."""
        if leader:
            return await self._call(self.endpoint.at(leader), _request(method, path, query, body, token, self.source))
        if self._found is None or not self.endpoint.leads_to(self._found):
            self._found = self.endpoint.choose()
        try:
            reply = await self._call(self._found, _request(method, path, query, body, token, self.source))
        except BaseException:
            self._found = None
            raise
        if reply[0] == HTTPStatus.SERVICE_UNAVAILABLE and "leader" in (reply[1] or ()):
            self._found = None  # it has closed the connection
        return reply

    async def _call(self, listener: Listener | None, request: web.Request) -> Reply:
        if listener is None:
            raise ConnectionRefusedError("nobody serves")
        await self._travel(listener)
        reply = await self._answered(listener, request)
        await self._travel(listener)
        return reply

    async def _travel(self, listener: Listener) -> None:
        await asyncio.sleep(self.world.network.delay(self.place, listener.place))
        if not self.world.network.reaches(self.place, listener.place):
            await asyncio.get_running_loop().create_future()  # silence

    async def _answered(self, listener: Listener, request: web.Request) -> Reply:
        """The request runs in the operator's process, and ends with the call."""
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()

        async def serve() -> None:
            response = cast(web.Response, await listener.application._handle(request))
            if not reply.done():
                body = response.body
                reply.set_result((response.status, json.loads(body) if isinstance(body, bytes) and body else None))

        def broken() -> None:
            if not reply.done():
                reply.set_exception(ConnectionResetError("the operator has died"))

        task = listener.process.spawn(serve(), name=f"request of {self.source}")
        listener.process.on_death(broken)
        try:
            return await reply
        finally:
            task.cancel()
            listener.process.forget(broken)


class _Transport(asyncio.Transport):
    def __init__(self, source: str) -> None:
        super().__init__({"peername": (source, 0)})


class _Protocol(BaseProtocol):
    """What a request asks of its connection."""

    def __init__(self, source: str) -> None:
        super().__init__(asyncio.get_running_loop())
        self.transport = _Transport(source)
        self.ssl_context = None
        self.peername = (source, 0)
        self.sockname = ("operator", 0)


def _request(method: str, path: str, query: Mapping[str, str], body: Any, token: str, source: str) -> web.Request:
    data = json.dumps(body).encode()
    headers = CIMultiDict({"Host": "operator", "Content-Length": str(len(data)), "Authorization": f"Bearer {token}"})
    url = URL(f"{path}?{urlencode(query)}" if query else path, encoded=True)
    message = RawRequestMessage(
        method, str(url), HttpVersion11, CIMultiDictProxy(headers), (), False, None, False, False, url
    )
    loop, protocol = asyncio.get_running_loop(), _Protocol(source)
    payload = StreamReader(protocol, 2**16, loop=loop)
    payload.feed_data(data)
    payload.feed_eof()
    writer, task = cast(Any, None), cast(Any, None)
    return web.Request(message, payload, cast(Any, protocol), writer, task, loop)
