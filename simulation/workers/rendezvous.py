"""The launchers' rendezvous without sockets.

Sessions, timeouts, and back-offs are those of `pacekeeper.launcher.rendezvous.transport`.

Messages of one connection keep their order. The repeated messages of each second are not simulated: a periodic check
determines whether both sides have received each other, and repeats what was lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from pacekeeper.launcher.rendezvous.rendezvous import (
    ParticipantReport,
    Rendezvous,
    RendezvousStage,
    RendezvousView,
    advance_rendezvous,
)
from pacekeeper.launcher.rendezvous.transport import (
    RENDEZVOUS_AUTHENTICATION_SECONDS,
    RENDEZVOUS_REPORT_INTERVAL_SECONDS,
    RENDEZVOUS_SILENCE_SECONDS,
)

from ..loop import Process
from ..ports import SharedWorld

RENDEZVOUS_CONNECT_SECONDS = 2.0
FIRST_RECONNECT_SECONDS, MAX_RECONNECT_SECONDS = 0.05, 1.0
"""Seconds, as in the real client."""
_AUTHENTICATION_ROUND_TRIPS = 3
"""Round trips until both sides are authenticated."""


class AdmissionResult(Enum):
    """A server's decision about a client."""

    ADMITTED = auto()
    PENDING = auto()  # the server does not know the membership yet
    REJECTED = auto()


@dataclass
class _SimulatedSession:
    """The rendezvous of one membership and its participants, by worker."""

    rendezvous: Rendezvous
    reports: dict[str, ParticipantReport] = field(default_factory=dict)
    connections: dict[str, RendezvousConnection] = field(default_factory=dict)


class SimulatedRendezvousServer:
    """Serves the rendezvous of one address. `open_store` opens the store of a new round and returns its port."""

    def __init__(
        self,
        world: SharedWorld,
        servers: dict[str, SimulatedRendezvousServer],
        process: Process,
        node: str,
        place: str,
        open_store: Callable[[], int],
    ) -> None:
        """`servers`: all, by address:port. `place`: its own."""
        self.process = process
        self.node = node
        self.place = place
        self._world = world
        self._servers = servers
        self._open_store = open_store
        self._sessions: dict[int, _SimulatedSession] = {}
        self._secrets: dict[int, str] = {}  # by membership
        self._pending: list[RendezvousConnection] = []
        self._connections: list[RendezvousConnection] = []
        self._reported_at: dict[str, float] = {}
        servers[place] = self
        process.add_death_callback(self.close)

    def admit(self, membership: int, secret: str) -> None:
        """Admit the clients that have this membership's `secret`."""
        if self._secrets.get(membership) == secret:
            return
        self._secrets[membership] = secret
        pending, self._pending = self._pending, []
        for connection in pending:
            self.authenticate(connection)

    def authenticate(self, connection: RendezvousConnection) -> AdmissionResult:
        secret = self._secrets.get(connection.membership)
        if secret is None:
            self._pending.append(connection)
            return AdmissionResult.PENDING
        if secret != connection.secret:
            return AdmissionResult.REJECTED
        self._connections.append(connection)
        connection.open()
        return AdmissionResult.ADMITTED

    def record_contact(self, connection: RendezvousConnection) -> None:
        self._reported_at[connection.client.worker] = self._world.now()

    def accept_report(self, connection: RendezvousConnection, report: ParticipantReport) -> None:
        session = self._sessions.setdefault(report.membership, _SimulatedSession(Rendezvous(report.membership)))
        session.reports[report.worker] = report
        session.connections[report.worker] = connection
        if not self._advance(session):
            connection.send_view(session.rendezvous.build_view(report.worker, report.incarnation))

    def remove_participant(self, connection: RendezvousConnection) -> None:
        """Remove the participant of this connection, unless the launcher has reconnected over another one."""
        if connection not in self._connections:
            return
        self._connections.remove(connection)
        session = self._sessions.get(connection.membership)
        if session is not None and session.connections.get(connection.client.worker) is connection:
            del session.connections[connection.client.worker], session.reports[connection.client.worker]
            self._advance(session)

    def get_last_peer_report_time(self, worker: str) -> float:
        """Return when a worker other than `worker` last reported (virtual seconds); −inf: never."""
        return max((at for name, at in self._reported_at.items() if name != worker), default=-math.inf)

    def has_peers(self, worker: str) -> bool:
        """Return whether workers other than `worker` are connected."""
        return any(connection.client.worker != worker for connection in self._connections)

    def close(self) -> None:
        if self._servers.get(self.place) is self:
            del self._servers[self.place]
        for connection in list(self._connections):
            connection.disconnect(self.process)

    def _advance(self, session: _SimulatedSession) -> bool:
        """Advance the rendezvous. Return whether it has changed; if so, every participant gets its view."""
        if self.process.dead:
            return False
        rendezvous = advance_rendezvous(session.rendezvous, session.reports)
        if rendezvous.stage is RendezvousStage.RUNNING and rendezvous.port is None:
            rendezvous = replace(rendezvous, port=self._open_store())
        changed = rendezvous != session.rendezvous
        session.rendezvous = rendezvous
        if changed:
            for worker, connection in session.connections.items():
                connection.send_view(rendezvous.build_view(worker, session.reports[worker].incarnation))
        return changed


class SimulatedRendezvousClient:
    """A launcher's side: keeps a connection to the server, sends the newest report, and holds the newest view."""

    def __init__(
        self,
        world: SharedWorld,
        servers: Mapping[str, SimulatedRendezvousServer],
        process: Process,
        node: str,
        worker: str,
        on_view: Callable[[], None],
    ) -> None:
        self.process = process
        self.node = node
        self.worker = worker
        self.view: RendezvousView | None = None
        self.view_received_at = -math.inf
        """Virtual seconds of the last view."""
        self.report: ParticipantReport | None = None
        self._world = world
        self._servers = servers
        self._random = world.create_random(f"guest {worker}")
        self._on_view = on_view
        self._target: tuple[str, int, str] | None = None
        self._connection: RendezvousConnection | None = None
        self._backoff = FIRST_RECONNECT_SECONDS
        self._attempt = 0
        process.add_death_callback(self.leave)

    def join(self, place: str, membership: int, secret: str) -> None:
        """Take part in this membership's rendezvous from now on. `place`: address:port."""
        target = (place, membership, secret)
        if self._target != target:
            self.leave()
            self._target, self._backoff = target, FIRST_RECONNECT_SECONDS
            self._connect_once(self._attempt)

    def leave(self) -> None:
        """Disconnect from the rendezvous."""
        self._attempt += 1  # cancels what an earlier attempt has scheduled
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.disconnect(self.process)
        self._target = self.report = self.view = None
        self.view_received_at = -math.inf

    def send_report(self, report: ParticipantReport) -> None:
        """Set the report that the server receives from now on."""
        if report != self.report:
            self.report = report
            if self._connection is not None and self._connection.is_open:
                self._connection.send_report(report)

    def on_open(self) -> None:
        """Send the report over the new connection."""
        assert self._connection is not None
        if self.report is not None:
            self._connection.send_report(self.report)

    def on_view_received(self, view: RendezvousView) -> None:
        self.view_received_at = self._world.now()
        self._backoff = FIRST_RECONNECT_SECONDS
        if view != self.view:
            self.view = view
            self._on_view()

    def on_connection_lost(self, connection: RendezvousConnection) -> None:
        """Schedule a reconnect after the connection has ended."""
        if self._connection is connection:
            self._connection = None
            self._attempt += 1
            self._schedule_reconnect(self._attempt)

    def _connect_once(self, attempt: int) -> None:
        if attempt != self._attempt or self._target is None:
            return
        world, (place, membership, secret) = self._world, self._target
        server, node = (
            self._servers.get(place),
            world.network.addresses.get(place.rpartition(":")[0]),
        )
        if node is None or not world.network.can_reach(self.node, node):
            self.process.call_after(RENDEZVOUS_CONNECT_SECONDS, self._schedule_reconnect, attempt)
        elif server is None:  # refused
            self._schedule_reconnect(attempt)
        elif server.process.paused:  # its kernel accepts the connection, but the process does not answer
            self.process.call_after(RENDEZVOUS_AUTHENTICATION_SECONDS, self._schedule_reconnect, attempt)
        else:
            connection = RendezvousConnection(world, self, server, membership, secret)
            delay = sum(
                world.network.draw_delay(self.node, server.node) for _ in range(2 * _AUTHENTICATION_ROUND_TRIPS)
            )
            self.process.call_after(delay, self._finish_connect, attempt, connection)

    def _finish_connect(self, attempt: int, connection: RendezvousConnection) -> None:
        if attempt != self._attempt:
            return
        self._connection = connection
        if connection.server.process.dead:
            self._give_up(attempt, connection)
            return
        match connection.server.authenticate(connection):
            case AdmissionResult.PENDING:
                self.process.call_after(RENDEZVOUS_AUTHENTICATION_SECONDS, self._give_up, attempt, connection)
            case AdmissionResult.REJECTED:
                self._give_up(attempt, connection)

    def _give_up(self, attempt: int, connection: RendezvousConnection) -> None:
        if attempt == self._attempt and self._connection is connection and not connection.is_open:
            connection.disconnect(self.process)
            self._connection = None
            self._schedule_reconnect(attempt)

    def _schedule_reconnect(self, attempt: int) -> None:
        if attempt != self._attempt:
            return
        self.process.call_after(self._backoff * self._random.uniform(0.5, 1.0), self._connect_once, attempt)
        self._backoff = min(2 * self._backoff, MAX_RECONNECT_SECONDS)


class RendezvousConnection:
    """A connection of a client to a server."""

    def __init__(
        self,
        world: SharedWorld,
        client: SimulatedRendezvousClient,
        server: SimulatedRendezvousServer,
        membership: int,
        secret: str,
    ) -> None:
        self.client = client
        self.server = server
        self.membership = membership
        self.secret = secret
        self.is_open = False
        self._world = world
        self._closed = False
        self._server_received_at = world.now()
        self._next_delivery_at = {server.process: 0.0, client.process: 0.0}
        """When the newest message to each of them arrives."""
        self._lost = False
        """Whether a message was lost."""

    def open(self) -> None:
        """Open the connection: both sides are authenticated."""
        if not self._closed:
            self.is_open = True
            self._server_received_at = self.client.view_received_at = self._world.now()
            self.client.on_open()
            self._world.call_after(RENDEZVOUS_REPORT_INTERVAL_SECONDS, self._exchange_keepalive)

    def send_report(self, report: ParticipantReport) -> None:
        self._send(self.server.process, self._receive_report, report)

    def send_view(self, view: RendezvousView) -> None:
        self._send(self.client.process, self._receive_view, view)

    def _send(
        self, recipient: Process, on_arrival: Callable[..., None], message: ParticipantReport | RendezvousView
    ) -> None:
        now = self._world.now()
        at = max(
            self._next_delivery_at[recipient], now + self._world.network.draw_delay(self.client.node, self.server.node)
        )
        self._next_delivery_at[recipient] = at
        recipient.call_after(at - now, on_arrival, message)

    def _receive_report(self, report: ParticipantReport) -> None:
        if self._can_deliver():
            self._server_received_at = self._world.now()
            self.server.record_contact(self)
            self.server.accept_report(self, report)

    def _receive_view(self, view: RendezvousView) -> None:
        if self._can_deliver():
            self.client.on_view_received(view)

    def _can_deliver(self) -> bool:
        """Return whether a message that is due arrives."""
        if self._closed:
            return False
        is_reachable = self._world.network.can_reach(self.client.node, self.server.node)
        self._lost = self._lost or not is_reachable
        return is_reachable

    def _exchange_keepalive(self) -> None:
        """Simulate the messages that both sides send each second."""
        if self._closed:
            return
        now, client, server = self._world.now(), self.client, self.server
        client_up, server_up = not client.process.paused, not server.process.paused
        if client_up and server_up and self._world.network.can_reach(client.node, server.node):
            self._server_received_at = client.view_received_at = now
            server.record_contact(self)
            if self._lost and client.report is not None:
                self._lost = False
                self.send_report(client.report)
        elif client_up and now - client.view_received_at > RENDEZVOUS_SILENCE_SECONDS:
            self.disconnect(client.process)
        elif server_up and now - self._server_received_at > RENDEZVOUS_SILENCE_SECONDS:
            self.disconnect(server.process)
        self._world.call_after(RENDEZVOUS_REPORT_INTERVAL_SECONDS, self._exchange_keepalive)

    def disconnect(self, initiator: Process) -> None:
        """Let one side close. The other side notices it at once, or after a timeout if the network is cut."""
        if self._closed:
            return
        self._closed, was_open, self.is_open = True, self.is_open, False
        client, server, now = self.client, self.server, self._world.now()
        is_reachable = self._world.network.can_reach(client.node, server.node)
        delay = self._world.network.draw_delay(client.node, server.node)
        if initiator is client.process:
            client.on_connection_lost(self)
            if was_open:
                server.process.call_after(
                    delay if is_reachable else RENDEZVOUS_SILENCE_SECONDS - (now - self._server_received_at),
                    server.remove_participant,
                    self,
                )
        else:
            server.remove_participant(self)
            client.process.call_after(
                delay if is_reachable else RENDEZVOUS_SILENCE_SECONDS - (now - client.view_received_at),
                client.on_connection_lost,
                self,
            )
