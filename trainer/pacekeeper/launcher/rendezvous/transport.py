"""The launchers' rendezvous over TCP: the server, and the client that every launcher has, the server's included.

Each message is a `ParticipantReport` in one direction or a `RendezvousView` in the other, on an authenticated
connection (`message_authentication`). A side that is silent for `RENDEZVOUS_SILENCE_SECONDS` counts as lost, so that a
lost node blocks no other. A client that does not authenticate within `RENDEZVOUS_AUTHENTICATION_SECONDS` is
disconnected and counted.
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

from pacekeeper.message_authentication import (
    MAX_AUTHENTICATED_LINE_BYTES,
    AuthenticatedChannel,
    AuthenticationError,
    authenticate_client,
    authenticate_to_server,
)
from pacekeeper.runtime_folder import read_boot_clock

from .rendezvous import ParticipantReport, Rendezvous, RendezvousStage, RendezvousView, advance_rendezvous

RENDEZVOUS_REPORT_INTERVAL_SECONDS = 1.0
"""Seconds between two reports without a change."""
RENDEZVOUS_SILENCE_SECONDS = 4.0
RENDEZVOUS_AUTHENTICATION_SECONDS = 2.0
"""Seconds within which a client must authenticate."""
MAX_UNAUTHENTICATED_PARTICIPANTS = 512
"""Maximum number of unauthenticated connections. The oldest is closed for the next. A launcher needs milliseconds."""
_RENDEZVOUS_CONNECT_TIMEOUT_SECONDS = 2.0
_RENDEZVOUS_CLOSE_TIMEOUT_SECONDS = 1.0
_FIRST_RECONNECT_SECONDS, _MAX_RECONNECT_SECONDS = 0.05, 1.0
_RENDEZVOUS_CONNECTION_ERRORS = (TimeoutError, ConnectionError, ValueError, KeyError, TypeError)
"""What ends a connection: silence, a lost connection, or a malformed message."""

log = logging.getLogger(__name__)


@dataclass
class _RendezvousSession:
    """The rendezvous of one membership and its participants."""

    rendezvous: Rendezvous
    reports: dict[str, ParticipantReport] = field(default_factory=dict)  # by worker
    channels: dict[str, AuthenticatedChannel] = field(default_factory=dict)  # by worker


class RendezvousServer:
    """The rendezvous server. `open_store` opens the store of a new round and returns its port."""

    def __init__(self, open_store: Callable[[], int]) -> None:
        self.rejected_connections = 0
        """Number of connections that did not authenticate."""
        self._open_store = open_store
        self._sessions: dict[int, _RendezvousSession] = {}
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._unauthenticated: dict[
            asyncio.Task[None], asyncio.StreamWriter
        ] = {}  # the unauthenticated ones, oldest first
        self._secrets: dict[int, str] = {}  # by membership
        self._secret_added = asyncio.Event()  # set when a secret is added; waiters clear it
        self._participant_left = asyncio.Event()  # set when a participant leaves; waiters clear it
        self._reported_at: dict[str, float] = {}  # `read_boot_clock` at each worker's last report

    async def serve(self, listener: socket.socket) -> None:
        """Serve on `listener`, which is bound to the rendezvous's address."""
        self._server = await asyncio.start_server(
            self._handle_connection, sock=listener, limit=MAX_AUTHENTICATED_LINE_BYTES
        )

    def admit(self, membership: int, secret: str) -> None:
        """Admit to this membership the clients that prove to have `secret` (hex)."""
        if self._secrets.get(membership) != secret:
            self._secrets[membership] = secret
            self._secret_added.set()
            if not secret:
                log.warning(
                    "membership %d has no secret (plan of an older operator): any client can join it", membership
                )

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
            for writer in self._connections.values():
                writer.close()
            if self._connections:
                await asyncio.wait(self._connections, timeout=_RENDEZVOUS_CLOSE_TIMEOUT_SECONDS)

    def get_last_peer_report_time(self, worker: str) -> float | None:
        """Return when a worker other than `worker` last reported (`read_boot_clock`); None: never."""
        return max((reported_at for name, reported_at in self._reported_at.items() if name != worker), default=None)

    async def wait_until_peers_leave(self, worker: str, patience: float) -> None:
        """Wait until no launcher other than `worker` is connected, or for `patience` seconds."""
        deadline = time.monotonic() + patience
        while self._has_peers(worker) and time.monotonic() < deadline:
            self._participant_left.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(deadline - time.monotonic()):
                    await self._participant_left.wait()

    def _has_peers(self, worker: str) -> bool:
        return any(name != worker for session in self._sessions.values() for name in session.channels)

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
        """Return the secret. Wait if the client has received its plan before this launcher."""
        while membership not in self._secrets:
            self._secret_added.clear()
            await self._secret_added.wait()
        return self._secrets[membership]

    def _reject_connection(self, writer: asyncio.StreamWriter, error: BaseException) -> None:
        """Count the connection, and log it for the 1st, 10th, 100th … time: repeated attempts must not fill the log."""
        self.rejected_connections += 1
        if str(self.rejected_connections).strip("0") == "1":
            source = (writer.get_extra_info("peername") or ("an unknown address",))[0]
            log.warning(
                "%d connections to the rendezvous were rejected, the last from %s: %s",
                self.rejected_connections,
                source,
                str(error) or f"no proof of the membership's secret within {RENDEZVOUS_AUTHENTICATION_SECONDS:g} s",
            )

    async def _receive_reports(self, channel: AuthenticatedChannel, message: dict[str, Any] | None) -> None:
        """Process reports until the connection ends. Raises what _RENDEZVOUS_CONNECTION_ERRORS lists."""
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
        session = self._sessions.setdefault(report.membership, _RendezvousSession(Rendezvous(report.membership)))
        session.reports[report.worker] = report
        session.channels[report.worker] = channel
        self._reported_at[report.worker] = read_boot_clock()
        if not self._advance(session):
            channel.write(session.rendezvous.build_view(report.worker, report.incarnation).to_json())

    def _remove_participant(self, worker: str, channel: AuthenticatedChannel) -> None:
        """Remove the participant of `channel`, unless the launcher has reconnected over another one."""
        session = self._sessions.get(channel.membership)
        if session is not None and session.channels.get(worker) is channel:
            del session.channels[worker], session.reports[worker]
            self._participant_left.set()
            self._advance(session)

    def _advance(self, session: _RendezvousSession) -> bool:
        """Advance the rendezvous. Return whether it has changed; if so, every participant gets its view."""
        rendezvous = advance_rendezvous(session.rendezvous, session.reports)
        if rendezvous.stage is RendezvousStage.RUNNING and rendezvous.port is None:
            rendezvous = replace(rendezvous, port=self._open_store())
        changed = rendezvous != session.rendezvous
        session.rendezvous = rendezvous
        if changed:
            for worker, channel in session.channels.items():
                channel.write(rendezvous.build_view(worker, session.reports[worker].incarnation).to_json())
        return changed


class RendezvousClient:
    """A launcher's side: keeps a connection to the server, sends the newest report, and holds the newest view."""

    def __init__(self, on_view: Callable[[], None]) -> None:
        self.view: RendezvousView | None = None
        self.view_received_at: float | None = None  # `read_boot_clock` at the last view; None: there was none
        self._on_view = on_view
        self._report: ParticipantReport | None = None
        self._changed = asyncio.Event()
        self._target: _RendezvousTarget | None = None
        self._task: asyncio.Task[None] | None = None

    def join(self, server: str, port: int, membership: int, secret: str) -> None:
        """Take part in this membership's rendezvous from now on. `secret`: hex."""
        target = _RendezvousTarget(server, port, membership, secret)
        if self._target != target:
            self.leave()
            self._target = target
            self._task = asyncio.create_task(self._stay_connected(target))

    def leave(self) -> None:
        """Disconnect from the rendezvous."""
        if self._task is not None:
            self._task.cancel()
        self._task = self._target = self._report = self.view = None
        self.view_received_at = None

    def report(self, report: ParticipantReport) -> None:
        """Set the report that the server receives from now on."""
        if report != self._report:
            self._report = report
            self._changed.set()

    async def _stay_connected(self, target: _RendezvousTarget) -> None:
        backoff, logged_error = _FIRST_RECONNECT_SECONDS, ""
        while True:
            last_view_at = self.view_received_at
            try:
                await self._connect_once(target)
            except AuthenticationError as error:
                if str(error) != logged_error:  # log it once: each retry raises it again
                    logged_error = str(error)
                    log.warning(
                        "the rendezvous server at %s:%d does not authenticate: %s", target.host, target.port, error
                    )
            except (OSError, *_RENDEZVOUS_CONNECTION_ERRORS) as error:
                log.debug("the connection to the rendezvous at %s:%d ended: %r", target.host, target.port, error)
            backoff = (
                _FIRST_RECONNECT_SECONDS
                if self.view_received_at != last_view_at
                else min(2 * backoff, _MAX_RECONNECT_SECONDS)
            )
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))

    async def _connect_once(self, target: _RendezvousTarget) -> None:
        """Exchange messages until either side closes. Raises OSError and _RENDEZVOUS_CONNECTION_ERRORS."""
        async with asyncio.timeout(_RENDEZVOUS_CONNECT_TIMEOUT_SECONDS):
            reader, writer = await asyncio.open_connection(target.host, target.port, limit=MAX_AUTHENTICATED_LINE_BYTES)
        try:
            async with asyncio.timeout(RENDEZVOUS_AUTHENTICATION_SECONDS):
                channel = await authenticate_to_server(reader, writer, target.membership, target.secret)
            await self._receive_views(channel)
        finally:
            writer.close()

    async def _receive_views(self, channel: AuthenticatedChannel) -> None:
        sender = asyncio.create_task(self._send_reports(channel))
        try:
            while (message := await _read_with_timeout(channel)) is not None:
                view = RendezvousView.from_json(message)
                self.view_received_at = read_boot_clock()
                if view != self.view:
                    self.view = view
                    self._on_view()
        finally:
            sender.cancel()

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
    """Address, membership, and secret of a rendezvous."""

    host: str
    port: int
    membership: int
    secret: str = field(repr=False)


async def _read_with_timeout(channel: AuthenticatedChannel) -> dict[str, Any] | None:
    """Return the next message. Raises TimeoutError after RENDEZVOUS_SILENCE_SECONDS without one."""
    async with asyncio.timeout(RENDEZVOUS_SILENCE_SECONDS):
        return await channel.read()
