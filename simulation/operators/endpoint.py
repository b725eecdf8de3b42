"""The Service in front of the operator's endpoint: sidecars' requests to the real server's application, in memory.

TLS and socket reads are left out. Separate tests cover them with real sockets.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, cast
from urllib.parse import urlencode

from aiohttp import StreamReader, web, web_app
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http import HttpVersion11, RawRequestMessage
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from ..loop import Process
from ..ports import SharedWorld

EndpointReply = tuple[int, Any]
"""Status, and the parsed body; None: there is none."""


def clear_application_cache() -> None:
    """Clear aiohttp's cache: it keeps a thousand applications, and with each its world."""
    web_app._cached_build_middleware.cache_clear()


@dataclass
class EndpointListener:
    """A pod that serves the endpoint."""

    place: str
    process: Process
    application: web.Application
    address: str  # address:port


class OperatorService:
    """The Service of all operator pods."""

    def __init__(self, world: SharedWorld) -> None:
        self._world = world
        self._random = world.create_random("service")
        self._listeners: dict[str, EndpointListener] = {}  # by pod

    def open(self, listener: EndpointListener) -> None:
        self._listeners[listener.process.name] = listener
        listener.process.add_death_callback(lambda: self.close(listener))

    def close(self, listener: EndpointListener) -> None:
        if self._listeners.get(listener.process.name) is listener:
            del self._listeners[listener.process.name]

    def remove_pod(self, pod: str) -> None:
        """Remove a pod from the Service's endpoints."""
        self._listeners.pop(pod, None)

    def open_client(self, place: str, source: str) -> EndpointClient:
        """Create a client with a persistent connection, at a place and from an address there."""
        return EndpointClient(self._world, self, place, source)

    def choose_listener(self) -> EndpointListener | None:
        """Return one of the Service's endpoints; None: there is none."""
        listeners = list(self._listeners.values())
        return self._random.choice(listeners) if listeners else None

    def find_listener(self, address: str) -> EndpointListener | None:
        """Return the listener at an address, which must be one of the Service's endpoints; None: there is none."""
        return next((listener for listener in self._listeners.values() if listener.address == address), None)

    def routes_to(self, listener: EndpointListener) -> bool:
        return self._listeners.get(listener.process.name) is listener


@dataclass
class EndpointClient:
    """The calls of one client. It stays with a pod until a call fails, or a pod without the lead answers."""

    world: SharedWorld
    endpoint: OperatorService
    place: str
    source: str
    _listener: EndpointListener | None = field(default=None, init=False)

    async def call(
        self, method: str, path: str, query: Mapping[str, str], body: Any, token: str, leader: str = ""
    ) -> EndpointReply:
        """Call an operator. `leader`: address:port to call; "": the Service.

        Raises ConnectionError, or never returns: the caller has its own timeout.
        """
        if leader:
            return await self._call(
                self.endpoint.find_listener(leader), _build_request(method, path, query, body, token, self.source)
            )
        if self._listener is None or not self.endpoint.routes_to(self._listener):
            self._listener = self.endpoint.choose_listener()
        try:
            reply = await self._call(self._listener, _build_request(method, path, query, body, token, self.source))
        except BaseException:
            self._listener = None
            raise
        if reply[0] == HTTPStatus.SERVICE_UNAVAILABLE and "leader" in (reply[1] or ()):
            self._listener = None  # that pod has closed the connection
        return reply

    async def _call(self, listener: EndpointListener | None, request: web.Request) -> EndpointReply:
        if listener is None:
            raise ConnectionRefusedError("no operator serves")
        await self._cross_network(listener)
        reply = await self._handle_request(listener, request)
        await self._cross_network(listener)
        return reply

    async def _cross_network(self, listener: EndpointListener) -> None:
        await asyncio.sleep(self.world.network.draw_delay(self.place, listener.place))
        if not self.world.network.can_reach(self.place, listener.place):
            await asyncio.get_running_loop().create_future()  # silence

    async def _handle_request(self, listener: EndpointListener, request: web.Request) -> EndpointReply:
        """Handle the request in the operator's process. It ends with the call."""
        reply: asyncio.Future[EndpointReply] = asyncio.get_running_loop().create_future()

        async def serve() -> None:
            response = cast(web.Response, await listener.application._handle(request))
            if not reply.done():
                body = response.body
                reply.set_result((response.status, json.loads(body) if isinstance(body, bytes) and body else None))

        def broken() -> None:
            if not reply.done():
                reply.set_exception(ConnectionResetError("the operator was killed"))

        task = listener.process.spawn(serve(), name=f"request of {self.source}")
        listener.process.add_death_callback(broken)
        try:
            return await reply
        finally:
            task.cancel()
            listener.process.remove_death_callback(broken)


class _AddressTransport(asyncio.Transport):
    def __init__(self, source: str) -> None:
        super().__init__({"peername": (source, 0)})


class _RequestProtocol(BaseProtocol):
    """What a request needs of its connection."""

    def __init__(self, source: str) -> None:
        super().__init__(asyncio.get_running_loop())
        self.transport = _AddressTransport(source)
        self.ssl_context = None
        self.peername = (source, 0)
        self.sockname = ("operator", 0)


def _build_request(method: str, path: str, query: Mapping[str, str], body: Any, token: str, source: str) -> web.Request:
    data = json.dumps(body).encode()
    headers = CIMultiDict({"Host": "operator", "Content-Length": str(len(data)), "Authorization": f"Bearer {token}"})
    url = URL(f"{path}?{urlencode(query)}" if query else path, encoded=True)
    message = RawRequestMessage(
        method, str(url), HttpVersion11, CIMultiDictProxy(headers), (), False, None, False, False, url
    )
    loop, protocol = asyncio.get_running_loop(), _RequestProtocol(source)
    payload = StreamReader(protocol, 2**16, loop=loop)
    payload.feed_data(data)
    payload.feed_eof()
    writer, task = cast(Any, None), cast(Any, None)
    return web.Request(message, payload, cast(Any, protocol), writer, task, loop)
