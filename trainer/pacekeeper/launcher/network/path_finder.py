"""A launcher's state of its ranks' paths, from round to round. `path_search` makes the decisions."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from pacekeeper.runtime_folder import RuntimeFolder, write_text
from pacekeeper_analysis.protocol.plan import WorkerPaths, WorkerPlan
from pacekeeper_analysis.protocol.reports import PathFault, PathReport

from .path_search import (
    PathEnds,
    PathSearchResult,
    build_shim_lines,
    check_path_connection,
    compute_listen_port,
    draw_source_ports,
    get_path_ends,
    is_initiator,
    narrow_ports,
    search_paths,
)
from .port_knocking import KnockListeners, knock_ports
from .sockets import list_connections

FIRST_PATH_CHECK_SECONDS, MAX_PATH_CHECK_SECONDS = 1.0, 10.0
"""Seconds between two checks of the ranks' connections, first and maximum. A script may connect late."""
KNOCK_TIMEOUT_SECONDS = 0.2
"""Maximum time at a round's start to wait for peers that listen for knocks."""
KNOCK_WAIT_SECONDS = 3.0
"""Maximum time to wait for knocks of peers that have not received the start of the round, or get no processor time."""
PATH_CONFIRM_SECONDS = 10.0
"""Seconds after the first connection that is off its path until that counts: by then the ranks have connected."""

log = logging.getLogger(__name__)


class PathFinder:
    """Finds, applies, and checks the planned paths of this launcher's ranks."""

    def __init__(
        self, runtime: RuntimeFolder, own_address: str, no_shim: str, labels: bool, on_found: Callable[[], None]
    ) -> None:
        """Create a finder without paths.

        `no_shim`: why the ranks have no shim; "": they have one. `labels`: they may use RoCE. `on_found`: called when a
        search has ended.
        """
        self._runtime, self._own, self._no_shim, self._labels = runtime, own_address, no_shim, labels
        self._on_found = on_found
        self._search_key: tuple[WorkerPaths | None, int, int] | None = None  # plan, membership, and round of the search
        self._search: asyncio.Task[tuple[PathSearchResult, ...]] | None = None
        self._found: dict[PathEnds, PathSearchResult] = {}  # paths on which ranks here send
        self._knock_listeners = KnockListeners(own_address)
        self._turn = 0
        self._plan: WorkerPlan | None = None  # of the present round
        self._settled: dict[PathEnds, PathFault] = {}  # final results of its paths
        self._doubted_since: dict[PathEnds, float] = {}  # when the first connection off its path was seen
        self._next_check_at, self._pause = float("-inf"), FIRST_PATH_CHECK_SECONDS  # seconds, monotonic

    def ensure_searched(self, plan: WorkerPlan, last_round: int) -> bool:
        """Return whether the paths of the round after `last_round` have been searched. Start the search if necessary.

        `last_round`: the last round of the rendezvous, which is the same for all of its launchers.
        """
        key = (plan.paths, plan.membership, last_round)
        if key != self._search_key:
            self.close()
            self._search_key = key
            if plan.paths is not None and plan.paths.wanted:
                self._turn = plan.membership + last_round
                self._start_search(plan.paths, plan.ranks)
        return self._search is None

    def _start_search(self, paths: WorkerPaths, ranks: Sequence[int]) -> None:
        if self._no_shim:
            log.warning("planned paths are not used; the network chooses the routes: %s", self._no_shim)
            outgoing = (path for path in paths.wanted if path.source in ranks)
            self._found = {get_path_ends(path): PathSearchResult(path, fault=PathFault.NO_SHIM) for path in outgoing}
            return
        for path in paths.wanted:
            if path.destination in ranks and is_initiator(self._own, path.address):
                ports = draw_source_ports(path, paths, self._turn, knocked=True)
                self._knock_listeners.open(path, compute_listen_port(paths, path.source), ports)
        self._search = asyncio.create_task(
            asyncio.to_thread(search_paths, paths, ranks, self._own, self._turn, self._labels)
        )
        self._search.add_done_callback(self._take_results)

    def _take_results(self, search: asyncio.Task[tuple[PathSearchResult, ...]]) -> None:
        if search is not self._search:
            return  # a newer search has replaced it
        self._search = None
        self._found = {get_path_ends(result.path): result for result in search.result()}
        for result in self._found.values():
            _log_path(result)
        self._on_found()

    def apply(self, plan: WorkerPlan) -> None:
        """Apply the paths to the round that starts: knock at peers, receive knocks, and write the ranks' shim files.

        It blocks for a few milliseconds. If peers or switches do not answer, it blocks for up to the sum of
        KNOCK_TIMEOUT_SECONDS, KNOCK_WAIT_SECONDS, and `path_search.NARROW_SECONDS` for each path.
        """
        self._plan = plan
        knocked: dict[PathEnds, list[int]] = {}
        if plan.paths is not None and not self._no_shim:
            self._knock_peers(plan.paths)
            knocked = self._knock_listeners.wait_for_knocks(KNOCK_WAIT_SECONDS)
            for (source, destination), ports in knocked.items():
                reverse = self._found.get((destination, source))
                if reverse is not None and not reverse.ports:
                    self._found[destination, source] = narrow_ports(reverse, plan.paths, self._own, ports)
                    _log_path(self._found[destination, source])
        for ends, result in self._found.items():
            if result.fault or not result.ports:
                if not result.fault:
                    log.warning("path of rank %d to rank %d: no knock received; the network chooses the route", *ends)
                self._settled[ends] = result.fault or PathFault.NOT_FOUND
        for local, rank in enumerate(plan.ranks):
            file = self._runtime.paths_file(local)
            if plan.paths is None or self._no_shim:
                file.unlink(missing_ok=True)
            else:
                lines = build_shim_lines(rank, plan.paths, self._own, tuple(self._found.values()), knocked)
                try:
                    write_text(file, "".join(f"{line}\n" for line in lines))
                except OSError as error:  # the volume is full; the previous round's file would be wrong
                    file.unlink(missing_ok=True)
                    log.warning("the network chooses the routes of rank %d: %s", rank, error)

    def _knock_peers(self, paths: WorkerPaths) -> None:
        deadline = time.monotonic() + KNOCK_TIMEOUT_SECONDS
        for result in self._found.values():
            path = result.path
            if not is_initiator(self._own, path.address):
                ports = result.ports or draw_source_ports(path, paths, self._turn, knocked=True)[:1]
                own_port, remaining = compute_listen_port(paths, path.source), deadline - time.monotonic()
                knock_ports(self._own, own_port, path.address, ports, remaining, has_ports=bool(result.ports))

    def check_connections(self, now: float) -> None:
        """Check the ranks' connections until each path's result is final. `now`: seconds, monotonic."""
        unsettled = [result for ends, result in self._found.items() if result.ports and ends not in self._settled]
        if self._plan is None or self._plan.paths is None or not unsettled or now < self._next_check_at:
            return
        self._next_check_at, self._pause = now + self._pause, min(2 * self._pause, MAX_PATH_CHECK_SECONDS)
        connections = list_connections()
        for result in unsettled:
            ends, fault = (
                get_path_ends(result.path),
                check_path_connection(result, self._plan.paths, self._own, connections),
            )
            if fault is None:
                continue
            doubted_seconds = now - self._doubted_since.setdefault(ends, now)
            if fault is PathFault.NONE or doubted_seconds >= PATH_CONFIRM_SECONDS:
                self._settled[ends] = fault

    def build_reports(self) -> tuple[PathReport, ...]:
        """Return the reports on the paths on which ranks here send."""
        faults = {ends: self._settled.get(ends) for ends in self._found}
        return tuple(
            PathReport(*ends, in_force=fault is PathFault.NONE, fault=fault or PathFault.NONE)
            for ends, fault in faults.items()
        )

    def close(self) -> None:
        """Cancel the search, and drop all results."""
        if self._search is not None:
            self._search.cancel()
        self._knock_listeners.close()
        self._search, self._plan = None, None
        self._found, self._settled, self._doubted_since = {}, {}, {}
        self._next_check_at, self._pause = float("-inf"), FIRST_PATH_CHECK_SECONDS


def _log_path(result: PathSearchResult) -> None:
    route = result.path.spine or f"draw {result.path.draw}"
    ports = f"ports {list(result.ports)}" if result.ports else "waiting for a knock"
    log.info(
        "path of rank %d to rank %d by %s: %s", *get_path_ends(result.path), route,
        f"{result.fault}; the network chooses the route" if result.fault else ports,
    )  # fmt: skip
