"""A stream of changes of one kind, as a client of the HTTP watch sees it.

In order, late, and now and then ended. While the network is cut it is silent, not closed: what was sent is sent again
and again, less and less often, until one side gives up and the other one hears nothing for ever.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Self

from ..loop import Process
from ..network import API_PLACE
from .errors import ApiError, WatchExpired
from .objects import ServedKind, Object, parse_label_selector

if TYPE_CHECKING:
    from .api_server import ApiServer, ObjectChange

Event = tuple[str, Object]
"""ADDED, MODIFIED_MESSAGE, DELETED or BOOKMARK, and the object."""
BOOKMARK_SECONDS = 60.0
FIRST_RESEND_SECONDS = 0.2
MAX_RESEND_SECONDS = 60.0
"""Who cannot be told anything after so long a pause between two tries is given up."""


class WatchStream:
    """Iterate over it: events, until the server ends it. Raises Gone where its client has to list anew, OSError where
    the connection breaks."""

    def __init__(
        self,
        api: ApiServer,
        place: str,
        process: Process,
        kind: ServedKind,
        version: str,
        labels: str,
        namespace: str,
        seconds: float,
    ) -> None:
        self.place = place
        self.kind = kind
        self._api = api
        self._matches = parse_label_selector(labels) if labels else None
        self._namespace = namespace
        self._from = version
        self._seconds = seconds
        self._waiting: deque[tuple[float, Event | Exception | None]] = deque()  # with when each is due; None: the end
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
        arrived = self._arrived.popleft()
        if isinstance(arrived, tuple):
            return arrived
        self.close()
        raise StopAsyncIteration if arrived is None else arrived

    def on_change(self, change: ObjectChange) -> None:
        """Of a change, right after it."""
        event = self._build_event(change)
        if event is not None:
            self._send(event, self._api.random.uniform(*self._api.faults.watch_lag))

    def end(self, *, gone: bool) -> None:
        """From the server's side."""
        self._send(WatchExpired(self._api.version) if gone else None)

    def break_off(self) -> None:
        """The server's process is gone; its client is told as soon as the network lets it."""
        self._waiting.clear()
        self._send(ConnectionResetError("the API server is down"))

    def close(self) -> None:
        """Nothing comes any more."""
        self._ended = True
        if self in self._api.watches:
            self._api.watches.remove(self)

    async def open(self) -> None:
        """Returns when the API server has answered. What has changed since `version` is on its way then."""
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
        """What this stream tells of it: what stops to match has gone, as far as it is concerned."""
        body, before = change.object, change.previous
        if self._namespace and body["metadata"].get("namespace") != self._namespace:
            return None
        if self._matches is None:
            return change.type, body
        now = self._matches(body) and change.type != "DELETED"
        then = before is not None and self._matches(before)
        if now:
            return ("MODIFIED_MESSAGE" if then else "ADDED"), body
        return ("DELETED", body) if then else None

    def _send_bookmark(self) -> None:
        if not self._ended:
            metadata = {"resourceVersion": str(self._api.version)}
            self._send(
                ("BOOKMARK", {"apiVersion": self.kind.api_version, "kind": self.kind.name, "metadata": metadata})
            )
            self._api.world.call_after(BOOKMARK_SECONDS, self._send_bookmark)

    def _send(self, event: Event | Exception | None, lag: float = 0.0) -> None:
        """After all that was sent before."""
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
        """All that is due, if it gets through; otherwise it is tried again."""
        self._scheduled = False
        if self._ended or not self._waiting:
            return
        api = self._api
        now = api.world.loop.time()
        if api.faults.silent or not api.world.network.can_reach(API_PLACE, self.place):
            if self._retry > MAX_RESEND_SECONDS:
                self.close()  # its client is not told
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
