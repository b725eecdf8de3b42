"""The launchers' meeting over TCP: the host's server, and the client that every launcher has (the host too).

One JSON object a line, a `Report` one way and a `View` the other. Whoever is silent for `SILENCE` seconds is taken for
gone, so that a lost node holds up nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from .meeting import Meeting, Phase, Report, View, advance

PERIOD = 1.0
"""Seconds between two reports that say the same."""
SILENCE = 4.0
_CONNECT_TIMEOUT = 2.0
_CLOSE_TIMEOUT = 1.0
_FIRST_BACKOFF, _LONGEST_BACKOFF = 0.05, 1.0
_LONGEST_LINE = 1 << 16

log = logging.getLogger(__name__)


@dataclass
class _Hall:
    """One membership's meeting and who is in it."""

    meeting: Meeting
    reports: dict[str, Report] = field(default_factory=dict)  # by worker
    writers: dict[str, asyncio.StreamWriter] = field(default_factory=dict)  # by worker


class MeetingHost:
    """The server. `open_store` opens the store of a new round and answers its port."""

    def __init__(self, open_store: Callable[[], int]) -> None:
        self._open_store = open_store
        self._halls: dict[int, _Hall] = {}
        self._server: asyncio.Server | None = None
        self._guests: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._left = asyncio.Event()  # somebody has
        self._heard: dict[str, float] = {}  # monotonic time of each worker's last report

    async def serve(self, address: str, port: int) -> None:
        """Raises OSError where the port is taken."""
        self._server = await asyncio.start_server(self._attend, address, port, limit=_LONGEST_LINE)

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
        return any(name != worker for hall in self._halls.values() for name in hall.writers)

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seat: tuple[int, str] | None = None
        task = asyncio.current_task()
        assert task is not None
        self._guests[task] = writer
        try:
            while line := await _line(reader):
                report = Report.from_json(json.loads(line))
                if seat not in {None, (report.membership, report.worker)}:
                    self._leave(seat, writer)
                seat = (report.membership, report.worker)
                self._take(report, writer)
        except (TimeoutError, ConnectionError, ValueError, KeyError, TypeError) as error:
            log.debug("a launcher's connection ended: %r", error)
        finally:
            del self._guests[task]
            self._leave(seat, writer)
            writer.close()

    def _take(self, report: Report, writer: asyncio.StreamWriter) -> None:
        hall = self._halls.setdefault(report.membership, _Hall(Meeting(report.membership)))
        hall.reports[report.worker] = report
        hall.writers[report.worker] = writer
        self._heard[report.worker] = time.monotonic()
        if not self._proceed(hall):
            _send(writer, hall.meeting.view(report.worker, report.incarnation))

    def _leave(self, seat: tuple[int, str] | None, writer: asyncio.StreamWriter) -> None:
        """Takes back what came over `writer`, unless the launcher is here again over another connection."""
        if seat is None:
            return
        membership, worker = seat
        hall = self._halls[membership]
        if hall.writers.get(worker) is writer:
            del hall.writers[worker], hall.reports[worker]
            self._left.set()
            self._proceed(hall)

    def _proceed(self, hall: _Hall) -> bool:
        """Advances the meeting; True when it has changed and everybody has been told."""
        meeting = advance(hall.meeting, hall.reports)
        if meeting.phase is Phase.RUNNING and meeting.port == 0:
            meeting = replace(meeting, port=self._open_store())
        changed = meeting != hall.meeting
        hall.meeting = meeting
        if changed:
            for worker, writer in hall.writers.items():
                _send(writer, meeting.view(worker, hall.reports[worker].incarnation))
        return changed


class MeetingClient:
    """A launcher's side: keeps a connection to the host, sends the newest report, holds the newest view."""

    def __init__(self, on_view: Callable[[], None]) -> None:
        self.view: View | None = None
        self.heard_at = float("-inf")  # monotonic time of the last view
        self._on_view = on_view
        self._report: Report | None = None
        self._changed = asyncio.Event()
        self._target: tuple[str, int] | None = None
        self._task: asyncio.Task[None] | None = None

    def attend(self, host: str, port: int) -> None:
        """Meet at this host from now on."""
        if self._target != (host, port):
            self.leave()
            self._target = (host, port)
            self._task = asyncio.create_task(self._stay(host, port))

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

    async def _stay(self, host: str, port: int) -> None:
        backoff = _FIRST_BACKOFF
        while True:
            try:
                async with asyncio.timeout(_CONNECT_TIMEOUT):
                    reader, writer = await asyncio.open_connection(host, port, limit=_LONGEST_LINE)
            except (OSError, TimeoutError) as error:
                log.debug("no connection to the meeting at %s:%d: %r", host, port, error)
            else:
                backoff = _FIRST_BACKOFF
                await self._converse(reader, writer)
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
            backoff = min(2 * backoff, _LONGEST_BACKOFF)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until the connection ends in either direction."""
        speaking = asyncio.create_task(self._speak(writer))
        try:
            while line := await _line(reader):
                self.heard_at = time.monotonic()
                view = View.from_json(json.loads(line))
                if view != self.view:
                    self.view = view
                    self._on_view()
        except (TimeoutError, ConnectionError, ValueError, KeyError, TypeError) as error:
            log.debug("the meeting's connection ended: %r", error)
        finally:
            speaking.cancel()
            writer.close()

    async def _speak(self, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while True:
                self._changed.clear()
                if self._report is not None:
                    _send(writer, self._report)
                    await writer.drain()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(PERIOD):
                        await self._changed.wait()


async def _line(reader: asyncio.StreamReader) -> bytes:
    """The next line; empty at the end. Raises TimeoutError when the other side is silent for too long."""
    async with asyncio.timeout(SILENCE):
        return await reader.readline()


def _send(writer: asyncio.StreamWriter, message: Report | View) -> None:
    if not writer.is_closing():
        writer.write(json.dumps(message.to_json()).encode() + b"\n")
