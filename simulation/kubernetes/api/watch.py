"""A watch of one kind, as a client of the HTTP API sees it.

Events arrive in order and late, and the stream ends now and then. While the network is cut, the stream is silent, not
closed: data is sent again with growing pauses until the server gives up. The client then receives nothing indefinitely.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Self

from ...loop import Process
from ...network import API_PLACE
from .api_server import ApiServer
from .changes import ObjectChange
from .errors import ApiError, WatchExpired
from .objects import Object, ServedKind, parse_label_selector

Event = tuple[str, Object]
"""ADDED, MODIFIED, DELETED, or BOOKMARK, and the object."""
BOOKMARK_SECONDS = 60.0
FIRST_RESEND_SECONDS = 0.2
MAX_RESEND_SECONDS = 60.0
"""After a pause of this length between two attempts to send, the server gives the client up."""


@dataclass(frozen=True)
class WatchOptions:
    """The options of a watch request. `version`: changes after it are sent; "": all objects first."""

    version: str
    labels: str = ""
    namespace: str = ""
    seconds: float = 300.0
    """The server ends the watch after this time."""


class WatchStream:
    """An iterator of events, until the server ends the stream.

    Raises WatchExpired if the client must list again, and OSError if the connection breaks.
    """

    def __init__(self, api: ApiServer, place: str, process: Process, kind: ServedKind, options: WatchOptions) -> None:
        """`place`: the client's."""
        self.place = place
        self.kind = kind
        self._api = api
        self._matches = parse_label_selector(options.labels) if options.labels else None
        self._namespace = options.namespace
        self._from = options.version
        self._seconds = options.seconds
        self._waiting: deque[tuple[float, Event | Exception | None]] = deque()  # (due time, event); None: the end
        self._arrived: deque[Event | Exception | None] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._scheduled = False
        self._open = False
        self._ended = False
        self._last_due = 0.0
        self._retry = FIRST_RESEND_SECONDS
        process.add_death_callback(self.close)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        if not self._open:
            await self.open()
        while not self._arrived:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        item = self._arrived.popleft()
        if isinstance(item, tuple):
            return item
        self.close()
        raise StopAsyncIteration if item is None else item

    def on_change(self, change: ObjectChange) -> None:
        """Send the event of a change, right after the change."""
        event = self._build_event(change)
        if event is not None:
            self._send(event, self._api.random.uniform(*self._api.faults.watch_lag))

    def end(self, *, history_lost: bool) -> None:
        """End the stream from the server's side."""
        self._send(WatchExpired(self._api.version) if history_lost else None)

    def break_off(self) -> None:
        """Break the stream: the server is down. The client notices as soon as the network lets it."""
        self._waiting.clear()
        self._send(ConnectionResetError("the API server is down"))

    def close(self) -> None:
        """Close the stream from the client's side."""
        self._ended = True
        if self in self._api.watches:
            self._api.watches.remove(self)

    async def open(self) -> None:
        """Wait for the API server's answer. Then changes since `version` are on their way."""
        self._open = True
        network, world = self._api.world.network, self._api.world
        if self._api.faults.down:
            await asyncio.sleep(network.draw_delay(self.place, API_PLACE))
            raise ConnectionRefusedError("the API server is down")
        if self._api.faults.silent or not network.can_reach(self.place, API_PLACE):
            await asyncio.get_running_loop().create_future()
        await asyncio.sleep(2 * network.draw_delay(self.place, API_PLACE))
        if self._api.faults.error_rate and self._api.random.random() < self._api.faults.error_rate:
            raise ApiError(503, "ServiceUnavailable", "the server is currently unable to handle the request")
        self._begin()
        self._api.watches.append(self)
        world.call_after(self._seconds, self._send, None)
        world.call_after(BOOKMARK_SECONDS, self._send_bookmark)

    def _begin(self) -> None:
        plural = self.kind.plural
        if not self._from:
            for body in self._api.list_all(plural, self._namespace):
                if self._matches is None or self._matches(body):
                    self._send(("ADDED", body))
            return
        version = int(self._from)
        if version < self._api.forgotten[plural]:
            self._send(WatchExpired(version))
            return
        for change in self._api.history[plural]:
            if change.version > version and (event := self._build_event(change)) is not None:
                self._send(event)

    def _build_event(self, change: ObjectChange) -> Event | None:
        """Return the event of a change for this stream. An object that no longer matches counts as deleted."""
        body, previous = change.object, change.previous
        if self._namespace and body["metadata"].get("namespace") != self._namespace:
            return None
        if self._matches is None:
            return change.type, body
        matches = self._matches(body) and change.type != "DELETED"
        matched = previous is not None and self._matches(previous)
        if matches:
            return ("MODIFIED" if matched else "ADDED"), body
        return ("DELETED", body) if matched else None

    def _send_bookmark(self) -> None:
        if not self._ended:
            metadata = {"resourceVersion": str(self._api.version)}
            self._send(
                ("BOOKMARK", {"apiVersion": self.kind.api_version, "kind": self.kind.name, "metadata": metadata})
            )
            self._api.world.call_after(BOOKMARK_SECONDS, self._send_bookmark)

    def _send(self, event: Event | Exception | None, lag: float = 0.0) -> None:
        """Send an event after all earlier ones."""
        if self._ended:
            return
        world = self._api.world
        due = world.loop.time() + world.network.draw_delay(API_PLACE, self.place) + lag
        self._last_due = due = max(due, self._last_due)
        self._waiting.append((due, event))
        self._schedule(due)

    def _schedule(self, due: float) -> None:
        if not self._scheduled:
            self._scheduled = True
            loop = self._api.world.loop
            self._api.world.call_after(max(0.0, due - loop.time()), self._deliver)

    def _deliver(self) -> None:
        """Deliver all due events. If the network is cut, retry later."""
        self._scheduled = False
        if self._ended or not self._waiting:
            return
        api = self._api
        now = api.world.loop.time()
        if api.faults.silent or not api.world.network.can_reach(API_PLACE, self.place):
            if self._retry > MAX_RESEND_SECONDS:
                self.close()  # its client is not informed
                return
            self._schedule(now + self._retry)
            self._retry *= 2
            return
        self._retry = FIRST_RESEND_SECONDS
        while self._waiting and self._waiting[0][0] <= now:
            self._arrived.append(self._waiting.popleft()[1])
        if self._waiting:
            self._schedule(self._waiting[0][0])
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
