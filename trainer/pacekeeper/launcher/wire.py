"""The launchers' meeting over TCP: the host's server, and the client that every launcher has (the host too).

Each message is a `Report` one way or a `View` the other, on a connection that proves itself (`seal`). Whoever is silent
for `SILENCE` seconds is taken for gone, so that a lost node holds up nobody; whoever does not prove within `PROOF`
seconds that it belongs to the membership is shown the door, and counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from pacekeeper.runtime import elapsed
from pacekeeper.seal import LONGEST_LINE, Channel, Forged, greet_guest, greet_host

from .meeting import Meeting, MeetingStage, Report, View, advance

PERIOD = 1.0
"""Seconds between two reports that say the same."""
SILENCE = 4.0
PROOF = 2.0
"""Seconds within which a guest must have proved that it belongs here."""
AT_THE_DOOR = 512
"""So many connections may be unproved at a time; the oldest makes room for the next. A launcher needs milliseconds."""
_CONNECT_TIMEOUT = 2.0
_CLOSE_TIMEOUT = 1.0
_FIRST_BACKOFF, _LONGEST_BACKOFF = 0.05, 1.0
_BROKEN = (TimeoutError, ConnectionError, ValueError, KeyError, TypeError)
"""What ends a conversation: silence, a lost connection, or a message that is none."""

log = logging.getLogger(__name__)


@dataclass
class _Hall:
    """One membership's meeting and who is in it."""

    meeting: Meeting
    reports: dict[str, Report] = field(default_factory=dict)  # by worker
    channels: dict[str, Channel] = field(default_factory=dict)  # by worker


class MeetingHost:
    """The server. `open_store` opens the store of a new round and answers its port."""

    def __init__(self, open_store: Callable[[], int]) -> None:
        self.strangers = 0
        """Connections that have not proved themselves."""
        self._open_store = open_store
        self._halls: dict[int, _Hall] = {}
        self._server: asyncio.Server | None = None
        self._guests: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._door: dict[asyncio.Task[None], asyncio.StreamWriter] = {}  # those of them that are unproved, oldest first
        self._secrets: dict[int, str] = {}  # by membership
        self._learned = asyncio.Event()  # a membership's secret, since somebody began to wait for it
        self._left = asyncio.Event()  # somebody has
        self._heard: dict[str, float] = {}  # `elapsed` at each worker's last report

    async def serve(self, listener: socket.socket) -> None:
        """`listener`: bound to the meeting's address."""
        self._server = await asyncio.start_server(self._attend, sock=listener, limit=LONGEST_LINE)

    def admit(self, membership: int, secret: str) -> None:
        """From now on whoever proves to have `secret` (hex) takes part in this membership."""
        if self._secrets.get(membership) != secret:
            self._secrets[membership] = secret
            self._learned.set()
            if not secret:
                log.warning("membership %d has no secret (an older operator's plan): anybody can join it", membership)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
            for writer in self._guests.values():
                writer.close()
            if self._guests:
                await asyncio.wait(self._guests, timeout=_CLOSE_TIMEOUT)

    def heard_others_at(self, worker: str) -> float:
        """When somebody other than `worker` was last heard; −inf: never."""
        return max((at for name, at in self._heard.items() if name != worker), default=float("-inf"))

    async def wait_until_alone(self, worker: str, patience: float) -> None:
        """Returns when no launcher but `worker` is connected any more, or after `patience` seconds."""
        deadline = time.monotonic() + patience
        while self._has_guests(worker) and time.monotonic() < deadline:
            self._left.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(deadline - time.monotonic()):
                    await self._left.wait()

    def _has_guests(self, worker: str) -> bool:
        return any(name != worker for hall in self._halls.values() for name in hall.channels)

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._guests[task] = self._door[task] = writer
        if len(self._door) > AT_THE_DOOR:
            next(iter(self._door.values())).transport.abort()
        try:
            async with asyncio.timeout(PROOF):
                channel = await greet_guest(reader, writer, self._secret_of)
                first = await channel.read()
            del self._door[task]
            await self._converse(channel, first)
        except _BROKEN as error:
            if task in self._door:
                self._turn_away(writer, error)
            else:
                log.debug("a launcher's connection ended: %r", error)
        finally:
            self._door.pop(task, None)
            del self._guests[task]
            writer.close()

    async def _secret_of(self, membership: int) -> str:
        """Waits where the guest has had its plan earlier than this launcher."""
        while membership not in self._secrets:
            self._learned.clear()
            await self._learned.wait()
        return self._secrets[membership]

    def _turn_away(self, writer: asyncio.StreamWriter, why: BaseException) -> None:
        """Said in the log for the 1st, 10th, 100th … time: a stranger who knocks all day must not fill it."""
        self.strangers += 1
        if str(self.strangers).strip("0") == "1":
            source = (writer.get_extra_info("peername") or ("an unknown address",))[0]
            log.warning(
                "%d connections to the meeting were turned away, the last from %s: %s", self.strangers, source,
                str(why) or f"no proof of the membership's secret within {PROOF:g} s",
            )  # fmt: skip

    async def _converse(self, channel: Channel, message: dict[str, Any] | None) -> None:
        """From the guest's first message until its connection ends. Raises what _BROKEN lists."""
        worker = ""
        try:
            while message is not None:
                report = Report.from_json(message)
                if report.membership != channel.membership or worker not in {"", report.worker}:
                    raise Forged("a report in another launcher's name")
                worker = report.worker
                self._take(report, channel)
                message = await _within_silence(channel)
        finally:
            self._leave(worker, channel)

    def _take(self, report: Report, channel: Channel) -> None:
        hall = self._halls.setdefault(report.membership, _Hall(Meeting(report.membership)))
        hall.reports[report.worker] = report
        hall.channels[report.worker] = channel
        self._heard[report.worker] = elapsed()
        if not self._proceed(hall):
            channel.write(hall.meeting.view(report.worker, report.incarnation).to_json())

    def _leave(self, worker: str, channel: Channel) -> None:
        """Takes back what came over `channel`, unless the launcher is here again over another connection."""
        hall = self._halls.get(channel.membership)
        if hall is not None and hall.channels.get(worker) is channel:
            del hall.channels[worker], hall.reports[worker]
            self._left.set()
            self._proceed(hall)

    def _proceed(self, hall: _Hall) -> bool:
        """Advances the meeting; True when it has changed and everybody has been told."""
        meeting = advance(hall.meeting, hall.reports)
        if meeting.phase is MeetingStage.RUNNING and meeting.port == 0:
            meeting = replace(meeting, port=self._open_store())
        changed = meeting != hall.meeting
        hall.meeting = meeting
        if changed:
            for worker, channel in hall.channels.items():
                channel.write(meeting.view(worker, hall.reports[worker].incarnation).to_json())
        return changed


class MeetingClient:
    """A launcher's side: keeps a connection to the host, sends the newest report, holds the newest view."""

    def __init__(self, on_view: Callable[[], None]) -> None:
        self.view: View | None = None
        self.heard_at = float("-inf")  # `elapsed` at the last view
        self._on_view = on_view
        self._report: Report | None = None
        self._changed = asyncio.Event()
        self._target: _Target | None = None
        self._task: asyncio.Task[None] | None = None

    def attend(self, host: str, port: int, membership: int, secret: str) -> None:
        """Take part in this membership's meeting from now on. `secret`: hex."""
        target = _Target(host, port, membership, secret)
        if self._target != target:
            self.leave()
            self._target = target
            self._task = asyncio.create_task(self._stay(target))

    def leave(self) -> None:
        """Meet nowhere."""
        if self._task is not None:
            self._task.cancel()
        self._task = self._target = self._report = self.view = None
        self.heard_at = float("-inf")

    def say(self, report: Report) -> None:
        """What the host is to know from now on."""
        if report != self._report:
            self._report = report
            self._changed.set()

    async def _stay(self, target: _Target) -> None:
        backoff, complaint = _FIRST_BACKOFF, ""
        while True:
            heard_at = self.heard_at
            try:
                await self._visit(target)
            except Forged as error:
                if str(error) != complaint:  # once: it comes again with every try
                    complaint = str(error)
                    log.warning(
                        "whoever answers at %s:%d is not the meeting's host: %s", target.host, target.port, error
                    )
            except (OSError, *_BROKEN) as error:
                log.debug("the meeting's connection to %s:%d ended: %r", target.host, target.port, error)
            backoff = _FIRST_BACKOFF if self.heard_at != heard_at else min(2 * backoff, _LONGEST_BACKOFF)
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))

    async def _visit(self, target: _Target) -> None:
        """Until the connection ends in either direction. Raises OSError, and what _BROKEN lists."""
        async with asyncio.timeout(_CONNECT_TIMEOUT):
            reader, writer = await asyncio.open_connection(target.host, target.port, limit=LONGEST_LINE)
        try:
            async with asyncio.timeout(PROOF):
                channel = await greet_host(reader, writer, target.membership, target.secret)
            await self._converse(channel)
        finally:
            writer.close()

    async def _converse(self, channel: Channel) -> None:
        speaking = asyncio.create_task(self._speak(channel))
        try:
            while (message := await _within_silence(channel)) is not None:
                view = View.from_json(message)
                self.heard_at = elapsed()
                if view != self.view:
                    self.view = view
                    self._on_view()
        finally:
            speaking.cancel()

    async def _speak(self, channel: Channel) -> None:
        with contextlib.suppress(ConnectionError):
            while True:
                self._changed.clear()
                if self._report is not None:
                    channel.write(self._report.to_json())
                    await channel.drain()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(PERIOD):
                        await self._changed.wait()


@dataclass(frozen=True)
class _Target:
    """Where a launcher takes part, in what, and by what right."""

    host: str
    port: int
    membership: int
    secret: str = field(repr=False)


async def _within_silence(channel: Channel) -> dict[str, Any] | None:
    """The next message. Raises TimeoutError when the other side is silent for too long."""
    async with asyncio.timeout(SILENCE):
        return await channel.read()
