"""The launchers' meeting over TCP: the host's server, and the client that every launcher has (the host too).

Each message is a `Report` one way or a `View` the other, on a connection that proves itself (`seal`). Whoever is silent
for `RENDEZVOUS_SILENCE_SECONDS` seconds is taken for gone, so that a lost node holds up nobody; whoever does not prove within `PROOF`
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

from pacekeeper.runtime import read_boot_clock
from pacekeeper.seal import MAX_AUTHENTICATED_LINE_BYTES, AuthenticatedChannel, AuthenticationError, authenticate_client, authenticate_to_server

from .meeting import Rendezvous, RendezvousStage, ParticipantReport, RendezvousView, advance_rendezvous

RENDEZVOUS_REPORT_INTERVAL_SECONDS = 1.0
"""Seconds between two reports that say the same."""
RENDEZVOUS_SILENCE_SECONDS = 4.0
RENDEZVOUS_AUTHENTICATION_SECONDS = 2.0
"""Seconds within which a guest must have proved that it belongs here."""
MAX_UNAUTHENTICATED_PARTICIPANTS = 512
"""So many connections may be unproved at a time; the oldest makes room for the next. A launcher needs milliseconds."""
_RENDEZVOUS_CONNECT_TIMEOUT_SECONDS = 2.0
_RENDEZVOUS_CLOSE_TIMEOUT_SECONDS = 1.0
_FIRST_RECONNECT_SECONDS, _MAX_RECONNECT_SECONDS = 0.05, 1.0
_RENDEZVOUS_CONNECTION_ERRORS = (TimeoutError, ConnectionError, ValueError, KeyError, TypeError)
"""What ends a conversation: silence, a lost connection, or a message that is none."""

log = logging.getLogger(__name__)


@dataclass
class _RendezvousSession:
    """One membership's meeting and who is in it."""

    rendezvous: Rendezvous
    reports: dict[str, ParticipantReport] = field(default_factory=dict)  # by worker
    channels: dict[str, AuthenticatedChannel] = field(default_factory=dict)  # by worker


class RendezvousServer:
    """The server. `open_store` opens the store of a new round and answers its port."""

    def __init__(self, open_store: Callable[[], int]) -> None:
        self.rejected_connections = 0
        """Connections that have not proved themselves."""
        self._open_store = open_store
        self._sessions: dict[int, _RendezvousSession] = {}
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._unauthenticated: dict[asyncio.Task[None], asyncio.StreamWriter] = {}  # those of them that are unproved, oldest first
        self._secrets: dict[int, str] = {}  # by membership
        self._secret_added = asyncio.Event()  # a membership's secret, since somebody began to wait for it
        self._participant_left = asyncio.Event()  # somebody has
        self._reported_at: dict[str, float] = {}  # `elapsed` at each worker's last report

    async def serve(self, listener: socket.socket) -> None:
        """`listener`: bound to the meeting's address."""
        self._server = await asyncio.start_server(self._handle_connection, sock=listener, limit=MAX_AUTHENTICATED_LINE_BYTES)

    def admit(self, membership: int, secret: str) -> None:
        """From now on whoever proves to have `secret` (hex) takes part in this membership."""
        if self._secrets.get(membership) != secret:
            self._secrets[membership] = secret
            self._secret_added.set()
            if not secret:
                log.warning("membership %d has no secret (an older operator's plan): anybody can join it", membership)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
            for writer in self._connections.values():
                writer.close()
            if self._connections:
                await asyncio.wait(self._connections, timeout=_RENDEZVOUS_CLOSE_TIMEOUT_SECONDS)

    def get_last_peer_report_time(self, worker: str) -> float:
        """When somebody other than `worker` was last heard; −inf: never."""
        return max((at for name, at in self._reported_at.items() if name != worker), default=float("-inf"))

    async def wait_until_peers_leave(self, worker: str, patience: float) -> None:
        """Returns when no launcher but `worker` is connected any more, or after `patience` seconds."""
        deadline = time.monotonic() + patience
        while self._has_peers(worker) and time.monotonic() < deadline:
            self._participant_left.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(deadline - time.monotonic()):
                    await self._participant_left.wait()

    def _has_peers(self, worker: str) -> bool:
        return any(name != worker for hall in self._sessions.values() for name in hall.channels)

    async def _handle_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = self._unauthenticated[task] = writer
        if len(self._unauthenticated) > MAX_UNAUTHENTICATED_PARTICIPANTS:
            next(iter(self._unauthenticated.values())).transport.abort()
        try:
            async with asyncio.timeout(RENDEZVOUS_AUTHENTICATION_SECONDS):
                channel = await authenticate_client(reader, writer, self._wait_for_secret)
                first = await channel.read()
            del self._unauthenticated[task]
            await self._receive_reports(channel, first)
        except _RENDEZVOUS_CONNECTION_ERRORS as error:
            if task in self._unauthenticated:
                self._reject_connection(writer, error)
            else:
                log.debug("a launcher's connection ended: %r", error)
        finally:
            self._unauthenticated.pop(task, None)
            del self._connections[task]
            writer.close()

    async def _wait_for_secret(self, membership: int) -> str:
        """Waits where the guest has had its plan earlier than this launcher."""
        while membership not in self._secrets:
            self._secret_added.clear()
            await self._secret_added.wait()
        return self._secrets[membership]

    def _reject_connection(self, writer: asyncio.StreamWriter, why: BaseException) -> None:
        """Said in the log for the 1st, 10th, 100th … time: a stranger who knocks all day must not fill it."""
        self.rejected_connections += 1
        if str(self.rejected_connections).strip("0") == "1":
            source = (writer.get_extra_info("peername") or ("an unknown address",))[0]
            log.warning(
                "%d connections to the meeting were turned away, the last from %s: %s", self.rejected_connections, source,
                str(why) or f"no proof of the membership's secret within {RENDEZVOUS_AUTHENTICATION_SECONDS:g} s",
            )  # fmt: skip

    async def _receive_reports(self, channel: AuthenticatedChannel, message: dict[str, Any] | None) -> None:
        """From the guest's first message until its connection ends. Raises what _BROKEN lists."""
        worker = ""
        try:
            while message is not None:
                report = ParticipantReport.from_json(message)
                if report.membership != channel.membership or worker not in {"", report.worker}:
                    raise AuthenticationError("a report in another launcher's name")
                worker = report.worker
                self._accept_report(report, channel)
                message = await _read_with_timeout(channel)
        finally:
            self._remove_participant(worker, channel)

    def _accept_report(self, report: ParticipantReport, channel: AuthenticatedChannel) -> None:
        hall = self._sessions.setdefault(report.membership, _RendezvousSession(Rendezvous(report.membership)))
        hall.reports[report.worker] = report
        hall.channels[report.worker] = channel
        self._reported_at[report.worker] = read_boot_clock()
        if not self._advance(hall):
            channel.write(hall.rendezvous.build_view(report.worker, report.incarnation).to_json())

    def _remove_participant(self, worker: str, channel: AuthenticatedChannel) -> None:
        """Takes back what came over `channel`, unless the launcher is here again over another connection."""
        hall = self._sessions.get(channel.membership)
        if hall is not None and hall.channels.get(worker) is channel:
            del hall.channels[worker], hall.reports[worker]
            self._participant_left.set()
            self._advance(hall)

    def _advance(self, hall: _RendezvousSession) -> bool:
        """Advances the meeting; True when it has changed and everybody has been told."""
        meeting = advance_rendezvous(hall.rendezvous, hall.reports)
        if meeting.stage is RendezvousStage.RUNNING and meeting.port == 0:
            meeting = replace(meeting, port=self._open_store())
        changed = meeting != hall.rendezvous
        hall.rendezvous = meeting
        if changed:
            for worker, channel in hall.channels.items():
                channel.write(meeting.build_view(worker, hall.reports[worker].incarnation).to_json())
        return changed


class RendezvousClient:
    """A launcher's side: keeps a connection to the host, sends the newest report, holds the newest view."""

    def __init__(self, on_view: Callable[[], None]) -> None:
        self.view: RendezvousView | None = None
        self.view_received_at = float("-inf")  # `elapsed` at the last view
        self._on_view = on_view
        self._report: ParticipantReport | None = None
        self._changed = asyncio.Event()
        self._target: _RendezvousTarget | None = None
        self._task: asyncio.Task[None] | None = None

    def join(self, server: str, port: int, membership: int, secret: str) -> None:
        """Take part in this membership's meeting from now on. `secret`: hex."""
        target = _RendezvousTarget(server, port, membership, secret)
        if self._target != target:
            self.leave()
            self._target = target
            self._task = asyncio.create_task(self._stay_connected(target))

    def leave(self) -> None:
        """Meet nowhere."""
        if self._task is not None:
            self._task.cancel()
        self._task = self._target = self._report = self.view = None
        self.view_received_at = float("-inf")

    def report(self, report: ParticipantReport) -> None:
        """What the host is to know from now on."""
        if report != self._report:
            self._report = report
            self._changed.set()

    async def _stay_connected(self, target: _RendezvousTarget) -> None:
        backoff, complaint = _FIRST_RECONNECT_SECONDS, ""
        while True:
            heard_at = self.view_received_at
            try:
                await self._connect_once(target)
            except AuthenticationError as error:
                if str(error) != complaint:  # once: it comes again with every try
                    complaint = str(error)
                    log.warning(
                        "whoever answers at %s:%d is not the meeting's host: %s", target.host, target.port, error
                    )
            except (OSError, *_RENDEZVOUS_CONNECTION_ERRORS) as error:
                log.debug("the meeting's connection to %s:%d ended: %r", target.host, target.port, error)
            backoff = _FIRST_RECONNECT_SECONDS if self.view_received_at != heard_at else min(2 * backoff, _MAX_RECONNECT_SECONDS)
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))

    async def _connect_once(self, target: _RendezvousTarget) -> None:
        """Until the connection ends in either direction. Raises OSError, and what _BROKEN lists."""
        async with asyncio.timeout(_RENDEZVOUS_CONNECT_TIMEOUT_SECONDS):
            reader, writer = await asyncio.open_connection(target.host, target.port, limit=MAX_AUTHENTICATED_LINE_BYTES)
        try:
            async with asyncio.timeout(RENDEZVOUS_AUTHENTICATION_SECONDS):
                channel = await authenticate_to_server(reader, writer, target.membership, target.secret)
            await self._receive_views(channel)
        finally:
            writer.close()

    async def _receive_views(self, channel: AuthenticatedChannel) -> None:
        speaking = asyncio.create_task(self._send_reports(channel))
        try:
            while (message := await _read_with_timeout(channel)) is not None:
                view = RendezvousView.from_json(message)
                self.view_received_at = read_boot_clock()
                if view != self.view:
                    self.view = view
                    self._on_view()
        finally:
            speaking.cancel()

    async def _send_reports(self, channel: AuthenticatedChannel) -> None:
        with contextlib.suppress(ConnectionError):
            while True:
                self._changed.clear()
                if self._report is not None:
                    channel.write(self._report.to_json())
                    await channel.drain()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(RENDEZVOUS_REPORT_INTERVAL_SECONDS):
                        await self._changed.wait()


@dataclass(frozen=True)
class _RendezvousTarget:
    """Where a launcher takes part, in what, and by what right."""

    host: str
    port: int
    membership: int
    secret: str = field(repr=False)


async def _read_with_timeout(channel: AuthenticatedChannel) -> dict[str, Any] | None:
    """The next message. Raises TimeoutError when the other side is silent for too long."""
    async with asyncio.timeout(RENDEZVOUS_SILENCE_SECONDS):
        return await channel.read()
