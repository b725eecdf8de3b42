"""A launcher's work for its ranks' paths, from one round to the next; what is decided is decided in `paths`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from pacekeeper.runtime import RuntimeFolder, write_text
from pacekeeper_analysis.plan import WorkerPaths, WorkerPlan
from pacekeeper_analysis.reports import PathFault, PathReport

from .knocks import KnockListeners, knock_ports
from .paths import (
    PathEnds,
    PathSearchResult,
    check_path_connection,
    get_path_ends,
    build_shim_lines,
    is_initiator,
    compute_listen_port,
    narrow_ports,
    search_paths,
    draw_source_ports,
)
from .sockets import list_connections

FIRST_PATH_CHECK_SECONDS, MAX_PATH_CHECK_SECONDS = 1.0, 10.0
"""Seconds between two looks at the ranks' connections, for which a script may take its time."""
KNOCK_TIMEOUT_SECONDS = 0.2
"""That a round's begin waits for answers of those who listen for a knock."""
KNOCK_WAIT_SECONDS = 3.0
"""That it waits for knocks of those who have not been told yet that it begins, or get no processor at once."""
PATH_CONFIRM_SECONDS = 10.0
"""After the first connection that is not as it was meant: by then the ranks have made all."""

log = logging.getLogger(__name__)


class PathFinder:
    """A launcher's hand on its ranks' paths."""

    def __init__(self, runtime: RuntimeFolder, own: str, no_shim: str, labels: bool, on_found: Callable[[], None]) -> None:
        """`no_shim`: why the ranks have none, "" where they do; `labels`: they may speak RoCE; `on_found`: called when
        a search has ended."""
        self._runtime, self._own, self._no_shim, self._labels = runtime, own, no_shim, labels
        self._on_found = on_found
        self._search_key: tuple[WorkerPaths | None, int, int] | None = None  # for which plan, membership and round
        self._search: asyncio.Task[tuple[PathSearchResult, ...]] | None = None
        self._found: dict[PathEnds, PathSearchResult] = {}  # of the paths on which ranks here send
        self._knock_listeners = KnockListeners(own)
        self._turn = 0
        self._plan: WorkerPlan | None = None  # of the round in force
        self._settled: dict[PathEnds, PathFault] = {}  # what is known of its paths for good
        self._doubted_since: dict[PathEnds, float] = {}  # since when a connection is there that is not as it was meant
        self._next_check_at, self._pause = float("-inf"), FIRST_PATH_CHECK_SECONDS  # seconds, monotonic

    def ensure_searched(self, plan: WorkerPlan, seen: int) -> bool:
        """Whether all is found out for the round after `seen`; begins with it where that is to be done.

        `seen`: the meeting's last round, which all of its launchers are told alike.
        """
        wanted = (plan.paths, plan.membership, seen)
        if wanted != self._search_key:
            self.close()
            self._search_key = wanted
            if plan.paths is not None and plan.paths.wanted:
                self._turn = plan.membership + seen
                self._start_search(plan.paths, plan.ranks)
        return self._search is None

    def _start_search(self, paths: WorkerPaths, ranks: Sequence[int]) -> None:
        if self._no_shim:
            log.warning("planned paths are not taken; the network chooses: %s", self._no_shim)
            sent = (path for path in paths.wanted if path.source in ranks)
            self._found = {get_path_ends(path): PathSearchResult(path, fault=PathFault.NO_SHIM) for path in sent}
            return
        for path in paths.wanted:
            if path.destination in ranks and is_initiator(self._own, path.address):
                ports = draw_source_ports(path, paths, self._turn, knocked=True)
                self._knock_listeners.open(path, compute_listen_port(paths, path.source), ports)
        self._search = asyncio.create_task(asyncio.to_thread(search_paths, paths, ranks, self._own, self._turn, self._labels))
        self._search.add_done_callback(self._take_results)

    def _take_results(self, search: asyncio.Task[tuple[PathSearchResult, ...]]) -> None:
        if search is not self._search:
            return  # what it has found nobody wants any more
        self._search = None
        self._found = {get_path_ends(each.path): each for each in search.result()}
        for each in self._found.values():
            _log_path(each)
        self._on_found()

    def apply(self, plan: WorkerPlan) -> None:
        """For the round that begins: knocks where peers are to connect from, hears who knocks here, tells the ranks.

        Blocks for a few milliseconds; where peers or switches are silent, for up to the sum of the times above.
        """
        self._plan = plan
        knocked: dict[PathEnds, list[int]] = {}
        if plan.paths is not None and not self._no_shim:
            self._knock_peers(plan.paths)
            knocked = self._knock_listeners.wait_for_knocks(KNOCK_WAIT_SECONDS)
            for (source, destination), ports in knocked.items():
                back = self._found.get((destination, source))
                if back is not None and not back.ports:
                    self._found[destination, source] = narrow_ports(back, plan.paths, self._own, ports)
                    _log_path(self._found[destination, source])
        for ends, each in self._found.items():
            if each.fault or not each.ports:
                if not each.fault:
                    log.warning("path of rank %d to rank %d: nobody has knocked; the network chooses", *ends)
                self._settled[ends] = each.fault or PathFault.NOT_FOUND
        for local, rank in enumerate(plan.ranks):
            file = self._runtime.paths_file(local)
            if plan.paths is None or self._no_shim:
                file.unlink(missing_ok=True)
            else:
                lines = build_shim_lines(rank, plan.paths, self._own, tuple(self._found.values()), knocked)
                try:
                    write_text(file, "".join(f"{line}\n" for line in lines))
                except OSError as error:  # the volume is full; those of the round before lead elsewhere
                    file.unlink(missing_ok=True)
                    log.warning("the network chooses the paths of rank %d: %s", rank, error)

    def _knock_peers(self, paths: WorkerPaths) -> None:
        deadline = time.monotonic() + KNOCK_TIMEOUT_SECONDS
        for each in self._found.values():
            path = each.path
            if not is_initiator(self._own, path.address):
                doors = each.ports or draw_source_ports(path, paths, self._turn, knocked=True)[:1]
                here, left = compute_listen_port(paths, path.source), deadline - time.monotonic()
                knock_ports(self._own, here, path.address, doors, left, found=bool(each.ports))

    def check_connections(self, now: float) -> None:
        """At the ranks' connections, until each is known to be on its path or not. `now`: seconds, monotonic."""
        waiting = [each for ends, each in self._found.items() if each.ports and ends not in self._settled]
        if self._plan is None or self._plan.paths is None or not waiting or now < self._next_check_at:
            return
        self._next_check_at, self._pause = now + self._pause, min(2 * self._pause, MAX_PATH_CHECK_SECONDS)
        seen = list_connections()
        for each in waiting:
            ends, fault = get_path_ends(each.path), check_path_connection(each, self._plan.paths, self._own, seen)
            if fault is None:
                continue
            doubted = now - self._doubted_since.setdefault(ends, now)
            if fault is PathFault.NONE or doubted >= PATH_CONFIRM_SECONDS:
                self._settled[ends] = fault

    def build_reports(self) -> tuple[PathReport, ...]:
        """Of the paths on which ranks here send."""
        faults = {ends: self._settled.get(ends) for ends in self._found}
        return tuple(
            PathReport(*ends, in_force=fault is PathFault.NONE, fault=fault or PathFault.NONE)
            for ends, fault in faults.items()
        )

    def close(self) -> None:
        """Forgets all of a round."""
        if self._search is not None:
            self._search.cancel()
        self._knock_listeners.close()
        self._search, self._plan = None, None
        self._found, self._settled, self._doubted_since = {}, {}, {}
        self._next_check_at, self._pause = float("-inf"), FIRST_PATH_CHECK_SECONDS


def _log_path(each: PathSearchResult) -> None:
    way = each.path.spine or f"draw {each.path.draw}"
    ports = f"ports {list(each.ports)}" if each.ports else "a knock is waited for"
    log.info(
        "path of rank %d to rank %d by %s: %s", *get_path_ends(each.path), way,
        f"{each.fault}; the network chooses" if each.fault else ports,
    )  # fmt: skip
