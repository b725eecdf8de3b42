"""The launchers' meeting without its wire (`pacekeeper.launcher.wire`): the same halls, silences and back-offs.

Messages of one connection keep their order. That both sides repeat themselves each second is not acted out: a pulse
looks whether they have heard each other, and makes up for what was lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import TYPE_CHECKING

from pacekeeper.launcher.meeting import Rendezvous, RendezvousStage, ParticipantReport, RendezvousView, advance_rendezvous
from pacekeeper.launcher.wire import RENDEZVOUS_REPORT_INTERVAL_SECONDS, RENDEZVOUS_AUTHENTICATION_SECONDS, RENDEZVOUS_SILENCE_SECONDS

if TYPE_CHECKING:
    from ..loop import Process
    from ..world import World

RENDEZVOUS_CONNECT_SECONDS = 2.0
FIRST_RECONNECT_SECONDS, MAX_RECONNECT_SECONDS = 0.05, 1.0
"""Seconds, as of the real one."""
_AUTHENTICATION_ROUND_TRIPS = 3
"""Until two have proved themselves to each other."""


class AdmissionResult(Enum):
    """What a host makes of a guest."""

    ADMITTED = auto()
    PENDING = auto()  # the host does not know the membership yet
    REJECTED = auto()


@dataclass
class _SimulatedSession:
    """One membership's meeting and who is in it, by worker."""

    rendezvous: Rendezvous
    reports: dict[str, ParticipantReport] = field(default_factory=dict)
    connections: dict[str, RendezvousConnection] = field(default_factory=dict)


class SimulatedRendezvousServer:
    """Serves the meetings of one place. `open_store` opens the store of a new round and answers its port."""

    def __init__(self, world: World, process: Process, node: str, place: str, open_store: Callable[[], int]) -> None:
        """`place`: address:port."""
        self.process = process
        self.node = node
        self.place = place
        self._world = world
        self._open_store = open_store
        self._sessions: dict[int, _SimulatedSession] = {}
        self._secrets: dict[int, str] = {}  # by membership
        self._pending: list[RendezvousConnection] = []
        self._connections: list[RendezvousConnection] = []
        self._reported_at: dict[str, float] = {}
        world.trainings.rendezvous_servers[place] = self
        process.add_death_callback(self.close)

    def admit(self, membership: int, secret: str) -> None:
        """From now on whoever has `secret` takes part in this membership."""
        if self._secrets.get(membership) == secret:
            return
        self._secrets[membership] = secret
        waiting, self._pending = self._pending, []
        for line in waiting:
            self.authenticate(line)

    def authenticate(self, line: RendezvousConnection) -> AdmissionResult:
        secret = self._secrets.get(line.membership)
        if secret is None:
            self._pending.append(line)
            return AdmissionResult.PENDING
        if secret != line.secret:
            return AdmissionResult.REJECTED
        self._connections.append(line)
        line.open()
        return AdmissionResult.ADMITTED

    def record_contact(self, line: RendezvousConnection) -> None:
        self._reported_at[line.client.worker] = self._world.now()

    def accept_report(self, line: RendezvousConnection, report: ParticipantReport) -> None:
        hall = self._sessions.setdefault(report.membership, _SimulatedSession(Rendezvous(report.membership)))
        hall.reports[report.worker] = report
        hall.connections[report.worker] = line
        if not self._advance(hall):
            line.send_view(hall.rendezvous.build_view(report.worker, report.incarnation))

    def remove_participant(self, line: RendezvousConnection) -> None:
        """Takes back what came over this line, unless the launcher is here again over another one."""
        if line not in self._connections:
            return
        self._connections.remove(line)
        hall = self._sessions.get(line.membership)
        if hall is not None and hall.connections.get(line.client.worker) is line:
            del hall.connections[line.client.worker], hall.reports[line.client.worker]
            self._advance(hall)

    def get_last_peer_report_time(self, worker: str) -> float:
        """When somebody other than `worker` was last heard (virtual seconds); −inf: never."""
        return max((at for name, at in self._reported_at.items() if name != worker), default=-math.inf)

    def has_peers(self, worker: str) -> bool:
        """Others than `worker`."""
        return any(line.client.worker != worker for line in self._connections)

    def close(self) -> None:
        if self._world.trainings.rendezvous_servers.get(self.place) is self:
            del self._world.trainings.rendezvous_servers[self.place]
        for line in list(self._connections):
            line.disconnect(self.process)

    def _advance(self, session: _SimulatedSession) -> bool:
        """Advances the meeting; True when it has changed and everybody has been told."""
        if self.process.dead:
            return False
        meeting = advance_rendezvous(session.rendezvous, session.reports)
        if meeting.stage is RendezvousStage.RUNNING and meeting.port == 0:
            meeting = replace(meeting, port=self._open_store())
        changed = meeting != session.rendezvous
        session.rendezvous = meeting
        if changed:
            for worker, line in session.connections.items():
                line.send_view(meeting.build_view(worker, session.reports[worker].incarnation))
        return changed


class SimulatedRendezvousClient:
    """A launcher's side: keeps a line to the host, says the newest report, holds the newest view."""

    def __init__(self, world: World, process: Process, node: str, worker: str, on_view: Callable[[], None]) -> None:
        self.process = process
        self.node = node
        self.worker = worker
        self.view: RendezvousView | None = None
        self.view_received_at = -math.inf
        """Virtual seconds of the last view."""
        self.report: ParticipantReport | None = None
        self._world = world
        self._random = world.create_random(f"guest {worker}")
        self._on_view = on_view
        self._target: tuple[str, int, str] | None = None
        self._connection: RendezvousConnection | None = None
        self._backoff = FIRST_RECONNECT_SECONDS
        self._attempt = 0
        process.add_death_callback(self.leave)

    def join(self, place: str, membership: int, secret: str) -> None:
        """Take part in this membership's meeting from now on. `place`: address:port."""
        target = (place, membership, secret)
        if self._target != target:
            self.leave()
            self._target, self._backoff = target, FIRST_RECONNECT_SECONDS
            self._connect_once(self._attempt)

    def leave(self) -> None:
        """Meet nowhere."""
        self._attempt += 1  # what an earlier visit has planned does not come about
        line, self._connection = self._connection, None
        if line is not None:
            line.disconnect(self.process)
        self._target = self.report = self.view = None
        self.view_received_at = -math.inf

    def send_report(self, report: ParticipantReport) -> None:
        """What the host is to know from now on."""
        if report != self.report:
            self.report = report
            if self._connection is not None and self._connection.is_open:
                self._connection.send_report(report)

    def on_open(self) -> None:
        """The line is open."""
        assert self._connection is not None
        if self.report is not None:
            self._connection.send_report(self.report)

    def on_view_received(self, view: RendezvousView) -> None:
        self.view_received_at = self._world.now()
        self._backoff = FIRST_RECONNECT_SECONDS
        if view != self.view:
            self.view = view
            self._on_view()

    def on_connection_lost(self, line: RendezvousConnection) -> None:
        """It has ended."""
        if self._connection is line:
            self._connection = None
            self._attempt += 1
            self._schedule_reconnect(self._attempt)

    def _connect_once(self, visit: int) -> None:
        if visit != self._attempt or self._target is None:
            return
        world, (place, membership, secret) = self._world, self._target
        host, there = world.trainings.rendezvous_servers.get(place), world.network.addresses.get(place.rpartition(":")[0])
        if there is None or not world.network.can_reach(self.node, there):
            self.process.call_after(RENDEZVOUS_CONNECT_SECONDS, self._schedule_reconnect, visit)
        elif host is None:  # refused
            self._schedule_reconnect(visit)
        elif host.process.paused:  # its kernel answers, and it does not
            self.process.call_after(RENDEZVOUS_AUTHENTICATION_SECONDS, self._schedule_reconnect, visit)
        else:
            line = RendezvousConnection(world, self, host, membership, secret)
            trips = sum(world.network.draw_delay(self.node, host.node) for _ in range(2 * _AUTHENTICATION_ROUND_TRIPS))
            self.process.call_after(trips, self._finish_connect, visit, line)

    def _finish_connect(self, visit: int, line: RendezvousConnection) -> None:
        if visit != self._attempt:
            return
        self._connection = line
        if line.server.process.dead:
            self._give_up(visit, line)
            return
        match line.server.authenticate(line):
            case AdmissionResult.PENDING:
                self.process.call_after(RENDEZVOUS_AUTHENTICATION_SECONDS, self._give_up, visit, line)
            case AdmissionResult.REJECTED:
                self._give_up(visit, line)

    def _give_up(self, visit: int, line: RendezvousConnection) -> None:
        if visit == self._attempt and self._connection is line and not line.is_open:
            line.disconnect(self.process)
            self._connection = None
            self._schedule_reconnect(visit)

    def _schedule_reconnect(self, visit: int) -> None:
        if visit != self._attempt:
            return
        self.process.call_after(self._backoff * self._random.uniform(0.5, 1.0), self._connect_once, visit)
        self._backoff = min(2 * self._backoff, MAX_RECONNECT_SECONDS)


class RendezvousConnection:
    """A connection of a guest to a host."""

    def __init__(self, world: World, guest: SimulatedRendezvousClient, host: SimulatedRendezvousServer, membership: int, secret: str) -> None:
        self.client = guest
        self.server = host
        self.membership = membership
        self.secret = secret
        self.is_open = False
        self._world = world
        self._closed = False
        self._server_received_at = world.now()
        self._next_delivery_at = {host.process: 0.0, guest.process: 0.0}
        """When the newest message to each of them arrives."""
        self._lost = False
        """Something that was said has not arrived."""

    def open(self) -> None:
        """Both have proved themselves."""
        if not self._closed:
            self.is_open = True
            self._server_received_at = self.client.view_received_at = self._world.now()
            self.client.on_open()
            self._world.call_after(RENDEZVOUS_REPORT_INTERVAL_SECONDS, self._exchange_keepalive)

    def send_report(self, report: ParticipantReport) -> None:
        self._send(self.server.process, self._receive_report, report)

    def send_view(self, view: RendezvousView) -> None:
        self._send(self.client.process, self._receive_view, view)

    def _send(self, to: Process, arrive: Callable[..., None], message: ParticipantReport | RendezvousView) -> None:
        now = self._world.now()
        at = max(self._next_delivery_at[to], now + self._world.network.draw_delay(self.client.node, self.server.node))
        self._next_delivery_at[to] = at
        to.call_after(at - now, arrive, message)

    def _receive_report(self, report: ParticipantReport) -> None:
        if self._can_deliver():
            self._server_received_at = self._world.now()
            self.server.record_contact(self)
            self.server.accept_report(self, report)

    def _receive_view(self, view: RendezvousView) -> None:
        if self._can_deliver():
            self.client.on_view_received(view)

    def _can_deliver(self) -> bool:
        """Whether a message that is due arrives."""
        if self._closed:
            return False
        reaches = self._world.network.can_reach(self.client.node, self.server.node)
        self._lost = self._lost or not reaches
        return reaches

    def _exchange_keepalive(self) -> None:
        """What both say each second."""
        if self._closed:
            return
        now, guest, host = self._world.now(), self.client, self.server
        guest_up, host_up = not guest.process.paused, not host.process.paused
        if guest_up and host_up and self._world.network.can_reach(guest.node, host.node):
            self._server_received_at = guest.view_received_at = now
            host.record_contact(self)
            if self._lost and guest.report is not None:
                self._lost = False
                self.send_report(guest.report)
        elif guest_up and now - guest.view_received_at > RENDEZVOUS_SILENCE_SECONDS:
            self.disconnect(guest.process)
        elif host_up and now - self._server_received_at > RENDEZVOUS_SILENCE_SECONDS:
            self.disconnect(host.process)
        self._world.call_after(RENDEZVOUS_REPORT_INTERVAL_SECONDS, self._exchange_keepalive)

    def disconnect(self, by: Process) -> None:
        """One side ends it; the other hears of that at once, or not before it is tired of the silence."""
        if self._closed:
            return
        self._closed, was_open, self.is_open = True, self.is_open, False
        guest, host, now = self.client, self.server, self._world.now()
        passes = self._world.network.can_reach(guest.node, host.node)
        delay = self._world.network.draw_delay(guest.node, host.node)
        if by is guest.process:
            guest.on_connection_lost(self)
            if was_open:
                host.process.call_after(delay if passes else RENDEZVOUS_SILENCE_SECONDS - (now - self._server_received_at), host.remove_participant, self)
        else:
            host.remove_participant(self)
            guest.process.call_after(delay if passes else RENDEZVOUS_SILENCE_SECONDS - (now - guest.view_received_at), guest.on_connection_lost, self)
