"""A launcher's work for its ranks' paths, from one round to the next; what is decided is decided in `paths`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from pacekeeper.runtime import Runtime, write_text
from pacekeeper_analysis.plan import WorkerPath, WorkerPaths, WorkerPlan
from pacekeeper_analysis.reports import PathFault, PathReport

from .knocks import Doors, knock
from .paths import (
    MOST_KNOCKS,
    Ends,
    Found,
    confirmed,
    ends_of,
    entries,
    initiates,
    listen_port,
    narrow,
    search,
    source_ports,
)
from .sockets import connections

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 10.0
"""Seconds between two looks at the ranks' connections, for which a script may take its time."""
KNOCK_SECONDS = 0.2
"""That a round's begin waits for answers of those who listen for a knock."""
LISTEN_SECONDS = 3.0
"""After a round's begin, for knocks; ranks that connect meanwhile do so without."""
CONFIRM_SECONDS = 10.0
"""After the first connection that is not as it was meant: by then the ranks have made all."""

log = logging.getLogger(__name__)


class PathFinder:
    """A launcher's hand on its ranks' paths."""

    def __init__(self, runtime: Runtime, own: str, no_shim: str, labels: bool, on_found: Callable[[], None]) -> None:
        """`no_shim`: why the ranks have none, "" where they do; `labels`: they may speak RoCE; `on_found`: called when
        a search has ended."""
        self._runtime, self._own, self._no_shim, self._labels = runtime, own, no_shim, labels
        self._on_found = on_found
        self._sought: tuple[WorkerPaths | None, int, int] | None = None  # for which plan, membership and round
        self._search: asyncio.Task[tuple[Found, ...]] | None = None
        self._found: dict[Ends, Found] = {}  # of the paths on which ranks here send
        self._doors = Doors(own, self._knocked)
        self._plan: WorkerPlan | None = None  # of the round in force
        self._settled: dict[Ends, PathFault] = {}  # what is known of its paths for good
        self._doubted: dict[Ends, float] = {}  # since when a connection is there that is not as it was meant
        self._look_at, self._pause = float("-inf"), FIRST_PAUSE  # seconds, monotonic
        self._listening: asyncio.TimerHandle | None = None  # when it ends
        self._narrowing: dict[Ends, asyncio.Task[None]] = {}

    def find(self, plan: WorkerPlan, seen: int) -> bool:
        """Whether all is found out for the round after `seen`; begins with it where that is to be done.

        `seen`: the meeting's last round, which all of its launchers are told alike.
        """
        wanted = (plan.paths, plan.membership, seen)
        if wanted != self._sought:
            self.close()
            self._sought = wanted
            if plan.paths is not None and plan.paths.wanted:
                self._begin(plan.paths, plan.ranks, f"{plan.membership} {seen}")
        return self._search is None

    def _begin(self, paths: WorkerPaths, ranks: Sequence[int], salt: str) -> None:
        if self._no_shim:
            log.warning("planned paths are not taken; the network chooses: %s", self._no_shim)
            sent = (path for path in paths.wanted if path.source in ranks)
            self._found = {ends_of(path): Found(path, fault=PathFault.NO_SHIM) for path in sent}
            return
        for path in paths.wanted:
            if path.destination in ranks and initiates(self._own, path.address):
                ports = source_ports(path, paths, salt, knocked=True)
                self._doors.open(path, listen_port(paths, path.source), ports)
        self._search = asyncio.create_task(asyncio.to_thread(search, paths, ranks, self._own, salt, self._labels))
        self._search.add_done_callback(self._take)

    def _take(self, search: asyncio.Task[tuple[Found, ...]]) -> None:
        if search is not self._search:
            return  # what it has found nobody wants any more
        self._search = None
        self._found = {ends_of(each.path): each for each in search.result()}
        for each in self._found.values():
            way = each.path.spine or f"draw {each.path.draw}"
            log.info(
                "path of rank %d to rank %d by %s: %s", *ends_of(each.path), way,
                f"{each.fault}; the network chooses" if each.fault else f"ports {list(each.ports)}",
            )  # fmt: skip
        self._on_found()

    def put_in_force(self, plan: WorkerPlan) -> None:
        """For the round that begins. Knocks where peers are to connect from."""
        self._plan = plan
        self._settled = {ends: each.fault for ends, each in self._found.items() if each.fault}
        self._write()
        if plan.paths is None or self._no_shim:
            return
        deadline = time.monotonic() + KNOCK_SECONDS
        for each in self._found.values():
            if each.ports and not initiates(self._own, each.path.address):
                here = listen_port(plan.paths, each.path.source)
                knock(self._own, here, each.path.address, each.ports, deadline - time.monotonic())
        self._listening = asyncio.get_running_loop().call_later(LISTEN_SECONDS, self._end_listening)
        for ends in self._doors.knocked:
            self._narrow(ends, plan.paths)

    def _knocked(self, path: WorkerPath) -> None:
        if self._plan is not None and self._plan.paths is not None:  # else the peer was faster
            self._write()
            self._narrow(ends_of(path), self._plan.paths)

    def _narrow(self, coming: Ends, paths: WorkerPaths, *, late: bool = False) -> None:
        """Of the ports that were knocked at, to those that fit the way back, where that is planned and all are known.

        `late`: no more will come.
        """
        ends, knocked = coming[::-1], self._doors.knocked[coming]
        waits = ends in self._found and not self._found[ends].ports and ends not in self._narrowing
        if waits and (late or len(knocked) >= self._doors.expected.get(coming, MOST_KNOCKS)):
            narrowing = self._narrowed(ends, self._found[ends], paths, tuple(knocked))
            self._narrowing[ends] = asyncio.create_task(narrowing)

    async def _narrowed(self, ends: Ends, each: Found, paths: WorkerPaths, knocked: Sequence[int]) -> None:
        self._found[ends] = each = await asyncio.to_thread(narrow, each, paths, self._own, knocked)
        if each.fault:
            self._settled[ends] = each.fault
        self._write()

    def _end_listening(self) -> None:
        assert self._plan is not None
        assert self._plan.paths is not None
        self._doors.close()
        for ends in self._doors.knocked:
            self._narrow(ends, self._plan.paths, late=True)
        for ends, each in self._found.items():
            if not each.ports and ends not in self._narrowing:  # nobody has knocked
                self._settled.setdefault(ends, PathFault.NOT_FOUND)

    def _write(self) -> None:
        """For the ranks' shims, as far as is known now."""
        assert self._plan is not None
        for local, rank in enumerate(self._plan.ranks):
            file = self._runtime.paths_of(local)
            if self._plan.paths is None or self._no_shim:
                file.unlink(missing_ok=True)
            else:
                found = tuple(self._found.values())
                lines = entries(rank, self._plan.paths, self._own, found, self._doors.knocked)
                write_text(file, "".join(f"{line}\n" for line in lines))

    def look(self, now: float) -> None:
        """At the ranks' connections, until each is known to be on its path or not. `now`: seconds, monotonic."""
        waiting = [each for ends, each in self._found.items() if each.ports and ends not in self._settled]
        if self._plan is None or self._plan.paths is None or not waiting or now < self._look_at:
            return
        self._look_at, self._pause = now + self._pause, min(2 * self._pause, LONGEST_PAUSE)
        seen = connections()
        for each in waiting:
            ends, fault = ends_of(each.path), confirmed(each, self._plan.paths, self._own, seen)
            if fault is None:
                continue
            doubted = now - self._doubted.setdefault(ends, now)
            if fault is PathFault.NONE or doubted >= CONFIRM_SECONDS:
                self._settled[ends] = fault

    def reports(self) -> tuple[PathReport, ...]:
        """Of the paths on which ranks here send."""
        faults = {ends: self._settled.get(ends) for ends in self._found}
        return tuple(
            PathReport(*ends, in_force=fault is PathFault.NONE, fault=fault or PathFault.NONE)
            for ends, fault in faults.items()
        )

    def close(self) -> None:
        """Forgets all of a round."""
        for running in (self._search, self._listening, *self._narrowing.values()):
            if running is not None:
                running.cancel()
        self._doors.forget()
        self._search, self._listening, self._plan = None, None, None
        self._found, self._settled, self._doubted, self._narrowing = {}, {}, {}, {}
        self._look_at, self._pause = float("-inf"), FIRST_PAUSE
