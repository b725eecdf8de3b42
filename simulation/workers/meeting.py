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

from pacekeeper.launcher.meeting import Meeting, MeetingStage, Report, View, advance
from pacekeeper.launcher.wire import PERIOD, PROOF, SILENCE

if TYPE_CHECKING:
    from ..loop import Process
    from ..world import World

CONNECT_TIMEOUT = 2.0
FIRST_BACKOFF, LONGEST_BACKOFF = 0.05, 1.0
"""Seconds, as of the real one."""
_ROUND_TRIPS = 3
"""Until two have proved themselves to each other."""


class Greeting(Enum):
    """What a host makes of a guest."""

    WELCOME = auto()
    WAITS = auto()  # the host does not know the membership yet
    STRANGER = auto()


@dataclass
class _Hall:
    """One membership's meeting and who is in it, by worker."""

    meeting: Meeting
    reports: dict[str, Report] = field(default_factory=dict)
    lines: dict[str, Line] = field(default_factory=dict)


class Host:
    """Serves the meetings of one place. `open_store` opens the store of a new round and answers its port."""

    def __init__(self, world: World, process: Process, node: str, place: str, open_store: Callable[[], int]) -> None:
        """`place`: address:port."""
        self.process = process
        self.node = node
        self.place = place
        self._world = world
        self._open_store = open_store
        self._halls: dict[int, _Hall] = {}
        self._secrets: dict[int, str] = {}  # by membership
        self._waiting: list[Line] = []
        self._lines: list[Line] = []
        self._heard: dict[str, float] = {}
        world.trainings.hosts[place] = self
        process.on_death(self.close)

    def admit(self, membership: int, secret: str) -> None:
        """From now on whoever has `secret` takes part in this membership."""
        if self._secrets.get(membership) == secret:
            return
        self._secrets[membership] = secret
        waiting, self._waiting = self._waiting, []
        for line in waiting:
            self.greet(line)

    def greet(self, line: Line) -> Greeting:
        secret = self._secrets.get(line.membership)
        if secret is None:
            self._waiting.append(line)
            return Greeting.WAITS
        if secret != line.secret:
            return Greeting.STRANGER
        self._lines.append(line)
        line.open()
        return Greeting.WELCOME

    def hear(self, line: Line) -> None:
        self._heard[line.guest.worker] = self._world.now()

    def take(self, line: Line, report: Report) -> None:
        hall = self._halls.setdefault(report.membership, _Hall(Meeting(report.membership)))
        hall.reports[report.worker] = report
        hall.lines[report.worker] = line
        if not self._proceed(hall):
            line.show(hall.meeting.view(report.worker, report.incarnation))

    def leave(self, line: Line) -> None:
        """Takes back what came over this line, unless the launcher is here again over another one."""
        if line not in self._lines:
            return
        self._lines.remove(line)
        hall = self._halls.get(line.membership)
        if hall is not None and hall.lines.get(line.guest.worker) is line:
            del hall.lines[line.guest.worker], hall.reports[line.guest.worker]
            self._proceed(hall)

    def heard_others_at(self, worker: str) -> float:
        """When somebody other than `worker` was last heard (virtual seconds); −inf: never."""
        return max((at for name, at in self._heard.items() if name != worker), default=-math.inf)

    def has_guests(self, worker: str) -> bool:
        """Others than `worker`."""
        return any(line.guest.worker != worker for line in self._lines)

    def close(self) -> None:
        if self._world.trainings.hosts.get(self.place) is self:
            del self._world.trainings.hosts[self.place]
        for line in list(self._lines):
            line.hang_up(self.process)

    def _proceed(self, hall: _Hall) -> bool:
        """Advances the meeting; True when it has changed and everybody has been told."""
        if self.process.dead:
            return False
        meeting = advance(hall.meeting, hall.reports)
        if meeting.phase is MeetingStage.RUNNING and meeting.port == 0:
            meeting = replace(meeting, port=self._open_store())
        changed = meeting != hall.meeting
        hall.meeting = meeting
        if changed:
            for worker, line in hall.lines.items():
                line.show(meeting.view(worker, hall.reports[worker].incarnation))
        return changed


class Guest:
    """A launcher's side: keeps a line to the host, says the newest report, holds the newest view."""

    def __init__(self, world: World, process: Process, node: str, worker: str, on_view: Callable[[], None]) -> None:
        self.process = process
        self.node = node
        self.worker = worker
        self.view: View | None = None
        self.heard_at = -math.inf
        """Virtual seconds of the last view."""
        self.report: Report | None = None
        self._world = world
        self._random = world.random(f"guest {worker}")
        self._on_view = on_view
        self._target: tuple[str, int, str] | None = None
        self._line: Line | None = None
        self._backoff = FIRST_BACKOFF
        self._visits = 0
        process.on_death(self.leave)

    def attend(self, place: str, membership: int, secret: str) -> None:
        """Take part in this membership's meeting from now on. `place`: address:port."""
        target = (place, membership, secret)
        if self._target != target:
            self.leave()
            self._target, self._backoff = target, FIRST_BACKOFF
            self._visit(self._visits)

    def leave(self) -> None:
        """Meet nowhere."""
        self._visits += 1  # what an earlier visit has planned does not come about
        line, self._line = self._line, None
        if line is not None:
            line.hang_up(self.process)
        self._target = self.report = self.view = None
        self.heard_at = -math.inf

    def say(self, report: Report) -> None:
        """What the host is to know from now on."""
        if report != self.report:
            self.report = report
            if self._line is not None and self._line.is_open:
                self._line.tell(report)

    def welcome(self) -> None:
        """The line is open."""
        assert self._line is not None
        if self.report is not None:
            self._line.tell(self.report)

    def look(self, view: View) -> None:
        self.heard_at = self._world.now()
        self._backoff = FIRST_BACKOFF
        if view != self.view:
            self.view = view
            self._on_view()

    def lose(self, line: Line) -> None:
        """It has ended."""
        if self._line is line:
            self._line = None
            self._visits += 1
            self._come_again(self._visits)

    def _visit(self, visit: int) -> None:
        if visit != self._visits or self._target is None:
            return
        world, (place, membership, secret) = self._world, self._target
        host, there = world.trainings.hosts.get(place), world.network.addresses.get(place.rpartition(":")[0])
        if there is None or not world.network.reaches(self.node, there):
            self.process.after(CONNECT_TIMEOUT, self._come_again, visit)
        elif host is None:  # refused
            self._come_again(visit)
        elif host.process.paused:  # its kernel answers, and it does not
            self.process.after(PROOF, self._come_again, visit)
        else:
            line = Line(world, self, host, membership, secret)
            trips = sum(world.network.delay(self.node, host.node) for _ in range(2 * _ROUND_TRIPS))
            self.process.after(trips, self._arrive, visit, line)

    def _arrive(self, visit: int, line: Line) -> None:
        if visit != self._visits:
            return
        self._line = line
        if line.host.process.dead:
            self._give_up(visit, line)
            return
        match line.host.greet(line):
            case Greeting.WAITS:
                self.process.after(PROOF, self._give_up, visit, line)
            case Greeting.STRANGER:
                self._give_up(visit, line)

    def _give_up(self, visit: int, line: Line) -> None:
        if visit == self._visits and self._line is line and not line.is_open:
            line.hang_up(self.process)
            self._line = None
            self._come_again(visit)

    def _come_again(self, visit: int) -> None:
        if visit != self._visits:
            return
        self.process.after(self._backoff * self._random.uniform(0.5, 1.0), self._visit, visit)
        self._backoff = min(2 * self._backoff, LONGEST_BACKOFF)


class Line:
    """A connection of a guest to a host."""

    def __init__(self, world: World, guest: Guest, host: Host, membership: int, secret: str) -> None:
        self.guest = guest
        self.host = host
        self.membership = membership
        self.secret = secret
        self.is_open = False
        self._world = world
        self._over = False
        self._host_heard_at = world.now()
        self._clear = {host.process: 0.0, guest.process: 0.0}
        """When the newest message to each of them arrives."""
        self._lost = False
        """Something that was said has not arrived."""

    def open(self) -> None:
        """Both have proved themselves."""
        if not self._over:
            self.is_open = True
            self._host_heard_at = self.guest.heard_at = self._world.now()
            self.guest.welcome()
            self._world.after(PERIOD, self._pulse)

    def tell(self, report: Report) -> None:
        self._send(self.host.process, self._told, report)

    def show(self, view: View) -> None:
        self._send(self.guest.process, self._shown, view)

    def _send(self, to: Process, arrive: Callable[..., None], message: Report | View) -> None:
        now = self._world.now()
        at = max(self._clear[to], now + self._world.network.delay(self.guest.node, self.host.node))
        self._clear[to] = at
        to.after(at - now, arrive, message)

    def _told(self, report: Report) -> None:
        if self._passes():
            self._host_heard_at = self._world.now()
            self.host.hear(self)
            self.host.take(self, report)

    def _shown(self, view: View) -> None:
        if self._passes():
            self.guest.look(view)

    def _passes(self) -> bool:
        """Whether a message that is due arrives."""
        if self._over:
            return False
        reaches = self._world.network.reaches(self.guest.node, self.host.node)
        self._lost = self._lost or not reaches
        return reaches

    def _pulse(self) -> None:
        """What both say each second."""
        if self._over:
            return
        now, guest, host = self._world.now(), self.guest, self.host
        guest_up, host_up = not guest.process.paused, not host.process.paused
        if guest_up and host_up and self._world.network.reaches(guest.node, host.node):
            self._host_heard_at = guest.heard_at = now
            host.hear(self)
            if self._lost and guest.report is not None:
                self._lost = False
                self.tell(guest.report)
        elif guest_up and now - guest.heard_at > SILENCE:
            self.hang_up(guest.process)
        elif host_up and now - self._host_heard_at > SILENCE:
            self.hang_up(host.process)
        self._world.after(PERIOD, self._pulse)

    def hang_up(self, by: Process) -> None:
        """One side ends it; the other hears of that at once, or not before it is tired of the silence."""
        if self._over:
            return
        self._over, was_open, self.is_open = True, self.is_open, False
        guest, host, now = self.guest, self.host, self._world.now()
        passes = self._world.network.reaches(guest.node, host.node)
        delay = self._world.network.delay(guest.node, host.node)
        if by is guest.process:
            guest.lose(self)
            if was_open:
                host.process.after(delay if passes else SILENCE - (now - self._host_heard_at), host.leave, self)
        else:
            host.leave(self)
            guest.process.after(delay if passes else SILENCE - (now - guest.heard_at), guest.lose, self)
