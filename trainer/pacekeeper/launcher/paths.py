"""The ports that lead by the planned paths: found out before each round, and written down for the shim.

Switches choose among equal paths by a hash of addresses and ports. The plan names the spine that each pair of ranks is
to use; which ports lead there nobody knows, so the launcher of the sending rank tries some (`hops.trace`): the
ones that its connection could have in the direction in which it is going to send. gloo connects from the side with the
higher address. Where that is the receiver, the sender's launcher tells it by the meeting which ports to come from.

Ports of a job's range: the lower half to listen at, by rank; the upper half to connect from. A rank's first listener
gets the known port: that of its first gloo group, the one that all ranks share. Other groups are as they are without.
What was found holds for a round: switches forget what they chose when they restart. Where the plan names no spine,
since nobody knows the fabric, ports are drawn by the plan's number, and whoever planned it measures what they bring.

docs/decisions/0020-paths.md says why it is as it is.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from ipaddress import ip_address
from itertools import islice

from pacekeeper.runtime import Runtime, write_text
from pacekeeper_analysis.plan import WorkerPath, WorkerPaths, WorkerPlan
from pacekeeper_analysis.reports import PathFault, PathReport

from .hops import Probe, Trace, trace
from .meeting import MOST_NOTED, MOST_NOTES, PortNote
from .sockets import Connection, connections

HOPS = (2, 3)
"""How far a spine is: behind the leaf, or behind the node and the leaf where pods have a network of their own."""
BATCH = 8
"""Probes at once: switches answer some a second only."""
PROBES_PER_SPINE = 4
"""Of a path: the chance that none of so many ports leads by the wanted one of S spines is (1 − 1/S)^4S, 2 % at most."""
PROBES_BOTH_WAYS = 64
"""At most, of a path whose way back is planned, too: a port fits both with a chance of 1/S² only."""
PORTS = 2
"""So many are looked for: the second is for a first that has been taken meanwhile."""
ANSWER_SECONDS = 0.2
SEARCH_SECONDS = 2.0
"""That all paths of a worker may take together: the round waits for them."""
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds between two looks at the ranks' connections, for which a script may take its time."""
CONFIRM_SECONDS = 10.0
"""After the first connection that is not as it was meant: by then the ranks have made all."""
ROCE_PORT = 4791
ROCE_FIRST_SOURCE_PORT = 0xC000
"""Of a queue pair with flow label 0 + what its packets' UDP source port is higher (rdma-core)."""

log = logging.getLogger(__name__)

Tracer = Callable[[Sequence[Probe]], Trace]


@dataclass(frozen=True)
class Found:
    """What a sender's launcher has found out about a path."""

    path: WorkerPath
    ports: tuple[int, ...] = ()  # from which the side that connects has to come
    label: int = 0  # flow label for RoCE; 0: none
    fault: PathFault = PathFault.NONE


def find(probes: Sequence[Probe], wanted: Collection[str], tracer: Tracer, enough: int) -> list[Probe] | PathFault:
    """Those that go by a switch with one of the `wanted` addresses, `enough` of them, or why there are none."""
    distances: tuple[int, ...] = HOPS
    fitting, passing = list[Probe](), list[Probe]()
    heard = usable = False
    for start in range(0, len(probes), BATCH):
        batch = probes[start : start + BATCH]
        for hops in distances:
            seen = tracer([probe._replace(hops=hops) for probe in batch])
            heard, usable = heard or bool(seen.ends), usable or len(seen.taken) < len(batch)
            there = [probe for probe, address in seen.ends.items() if address in wanted]
            if there:
                distances = (hops,)
                fitting += there
                passing += [probe for probe in seen.ends if probe not in there]
                break
        if not heard or len(fitting) >= enough:
            break
    if not usable:
        return PathFault.PORTS_TAKEN
    if not heard:
        return PathFault.FILTERED
    if not fitting:
        return PathFault.NOT_FOUND
    return fitting[:enough] if _go_on(fitting, passing, tracer) else PathFault.BLACK_HOLE


def _go_on(fitting: Sequence[Probe], passing: Sequence[Probe], tracer: Tracer) -> bool:
    """Whether packets come beyond the spine. Where those that pass other spines are not answered from there either,
    nobody knows, and it is taken for granted."""
    ask = [probe._replace(hops=probe.hops + 1) for probe in (*fitting[:PORTS], *passing[:PORTS])]
    answered = tracer(ask).ends
    return not answered or any(probe in answered for probe in ask[: len(fitting[:PORTS])])


def initiates(own: str, peer: str) -> bool:
    """Whether gloo connects from `own` to `peer` rather than the other way."""
    return ip_address(own).packed > ip_address(peer).packed


def listen_port(paths: WorkerPaths, rank: int) -> int:
    return paths.first_port + rank % _half(paths)


def probes_of(path: WorkerPath, paths: WorkerPaths, own: str, salt: str) -> list[Probe]:
    """What to try, as seen from the sender. `salt`: other ports for each; both directions of a pair try the same."""
    ports = range(paths.first_port + _half(paths), paths.last_port + 1)
    pair = sorted((path.source, path.destination))
    count = PROBES_PER_SPINE * paths.spines
    if _goes_both_ways(path, paths):
        count = max(count, min(count * paths.spines, PROBES_BOTH_WAYS))
    drawn = random.Random(f"{salt} {pair}").sample(ports, min(count, len(ports)))
    if initiates(own, path.address):
        there = listen_port(paths, path.destination)
        return [Probe(port, path.address, there) for port in drawn]
    here = listen_port(paths, path.source)
    return [Probe(here, path.address, port) for port in drawn]


def _goes_both_ways(path: WorkerPath, paths: WorkerPaths) -> bool:
    return any((other.destination, other.source) == (path.source, path.destination) for other in paths.wanted)


def _half(paths: WorkerPaths) -> int:
    return (paths.last_port + 1 - paths.first_port) // 2


def search(plan: WorkerPaths, ranks: Collection[int], own: str, salt: str, labels: bool) -> tuple[Found, ...]:
    """Of the paths on which `ranks` send. `own`: this worker's address; `labels`: look for RoCE's, too."""
    deadline = time.monotonic() + SEARCH_SECONDS
    return tuple(_search(path, plan, own, salt, deadline, labels) for path in plan.wanted if path.source in ranks)


def _search(path: WorkerPath, plan: WorkerPaths, own: str, salt: str, deadline: float, labels: bool) -> Found:
    def tracer(kind: int, probes: Sequence[Probe]) -> Trace:
        return trace(own, probes, min(ANSWER_SECONDS, deadline - time.monotonic()), kind)

    connects = initiates(own, path.address)
    if not path.spine:
        drawn = probes_of(path, plan, own, f"draw {path.draw}")[:PORTS]
        return Found(path, tuple(probe.source_port if connects else probe.port for probe in drawn))
    probes = probes_of(path, plan, own, salt)
    # Of those that fit one way, few fit the way back on the same connection.
    enough = len(probes) if _goes_both_ways(path, plan) else PORTS
    fitting = find(probes, path.hops, partial(tracer, socket.SOCK_STREAM), enough)
    if isinstance(fitting, PathFault):
        return Found(path, fault=fitting)
    found = Found(path, tuple(probe.source_port if connects else probe.port for probe in fitting))
    if labels:
        draws = random.Random(salt).sample(range(1, 0x4000), len(probes))
        tries = [Probe(ROCE_FIRST_SOURCE_PORT + label, path.address, ROCE_PORT) for label in draws]
        labelled = find(tries, path.hops, partial(tracer, socket.SOCK_DGRAM), 1)
        if not isinstance(labelled, PathFault):
            found = replace(found, label=labelled[0].source_port - ROCE_FIRST_SOURCE_PORT)
    return found


def notes_of(found: Sequence[Found], own: str) -> tuple[PortNote, ...]:
    """For those who are to connect here."""
    notes = (
        PortNote(each.path.peer, each.path.source, each.path.destination, each.ports[:MOST_NOTED])
        for each in found
        if each.ports and not initiates(own, each.path.address)
    )
    return tuple(islice(notes, MOST_NOTES))


def entries(rank: int, plan: WorkerPaths, own: str, found: Sequence[Found], notes: Sequence[PortNote]) -> list[str]:
    """The lines of a rank's file for the shim (native/paths.c)."""
    pairs = {_other(path, rank): path for path in plan.wanted if rank in (path.source, path.destination)}
    lines = [f"listen {own} 0 {listen_port(plan, rank)}"] if pairs else []
    for other, path in pairs.items():
        going = next((each for each in found if (each.path.source, each.path.destination) == (rank, other)), None)
        coming = next((note.ports for note in notes if (note.source, note.destination) == (other, rank)), ())
        ports = _for_both(going.ports if going else (), coming)
        if ports and initiates(own, path.address):
            lines.append(f"connect {path.address} {listen_port(plan, other)} {' '.join(map(str, ports[:PORTS]))}")
        if going and going.label:
            lines.append(f"label {path.address} {going.label}")
    return lines


def _for_both(going: Sequence[int], coming: Sequence[int]) -> Sequence[int]:
    """For one's own direction where no port fits both."""
    return [port for port in going if port in coming] or going or coming


def _other(path: WorkerPath, rank: int) -> int:
    return path.destination if path.source == rank else path.source


def confirmed(each: Found, plan: WorkerPaths, own: str, seen: Collection[Connection]) -> PathFault | None:
    """Whether the path's connection came about as it was meant to: NONE; None: it is not there (yet)."""
    path = each.path
    if initiates(own, path.address):
        there = listen_port(plan, path.destination)
        sources = [its.port for its in seen if (its.remote, its.remote_port) == (path.address, there)]
        away = False
    else:
        here = listen_port(plan, path.source)
        arrived = [its for its in seen if its.port == here]
        sources = [its.remote_port for its in arrived if its.remote == path.address]
        away = bool(arrived)
    if not sources:
        return PathFault.TRANSLATED if away else None
    return PathFault.NONE if set(sources) & set(each.ports) else PathFault.NOT_TAKEN


class PathFinder:
    """A launcher's hand on its ranks' paths."""

    def __init__(self, runtime: Runtime, own: str, no_shim: str, labels: bool, on_found: Callable[[], None]) -> None:
        """`no_shim`: why the ranks have none, "" where they do; `labels`: they may speak RoCE; `on_found`: called when
        a search has ended."""
        self._runtime, self._own, self._no_shim, self._labels = runtime, own, no_shim, labels
        self._on_found = on_found
        self._sought: tuple[WorkerPaths | None, int, int] | None = None  # for which plan, membership and round
        self._search: asyncio.Task[tuple[Found, ...]] | None = None
        self._found: tuple[Found, ...] = ()
        self._faults: dict[tuple[int, int], PathFault | None] = {}  # of the round in force, by ranks
        self._in_force: WorkerPaths | None = None
        self._look_at, self._pause = float("-inf"), FIRST_PAUSE  # seconds, monotonic
        self._doubted: dict[tuple[int, int], float] = {}  # since when a connection is there that is not as it was meant

    def find(self, plan: WorkerPlan, seen: int) -> bool:
        """Whether all is found out for the round that follows round `seen`; begins with it where that is to be done."""
        wanted = (plan.paths, plan.membership, seen)
        if wanted != self._sought:
            self.close()
            self._sought, self._found = wanted, ()
            if plan.paths is not None and plan.paths.wanted:
                self._begin(plan.paths, plan, f"{plan.membership} {seen}")
        return self._search is None

    def _begin(self, paths: WorkerPaths, plan: WorkerPlan, salt: str) -> None:
        if self._no_shim:
            log.warning("planned paths are not taken; the network chooses: %s", self._no_shim)
            sent = (path for path in paths.wanted if path.source in plan.ranks)
            self._found = tuple(Found(path, fault=PathFault.NO_SHIM) for path in sent)
            return
        looking = asyncio.to_thread(search, paths, plan.ranks, self._own, salt, self._labels)
        self._search = asyncio.create_task(looking)
        self._search.add_done_callback(self._take)

    def _take(self, search: asyncio.Task[tuple[Found, ...]]) -> None:
        if search is not self._search:
            return  # what it has found nobody wants any more
        self._search = None
        self._found = search.result()
        for each in self._found:
            way = each.path.spine or f"draw {each.path.draw}"
            where = f"rank {each.path.source} to rank {each.path.destination} by {way}"
            if each.fault is PathFault.NONE:
                log.info("path of %s: ports %s", where, list(each.ports[:PORTS]))
            else:
                log.warning("path of %s: %s; the network chooses", where, each.fault)
        self._on_found()

    @property
    def notes(self) -> tuple[PortNote, ...]:
        return notes_of(self._found, self._own)

    def put_in_force(self, plan: WorkerPlan, notes: Sequence[PortNote]) -> None:
        """For the round that begins. `notes`: of the other launchers."""
        for local, rank in enumerate(plan.ranks):
            file = self._runtime.paths_of(local)
            if plan.paths is None or self._no_shim:
                file.unlink(missing_ok=True)
            else:
                lines = entries(rank, plan.paths, self._own, self._found, notes)
                write_text(file, "".join(f"{line}\n" for line in lines))
        self._faults = {(each.path.source, each.path.destination): each.fault or None for each in self._found}
        self._in_force, self._doubted = plan.paths, {}
        self._look_at, self._pause = float("-inf"), FIRST_PAUSE

    def look(self, now: float) -> None:
        """At the ranks' connections, until each is known to be on its path or not. `now`: seconds, monotonic."""
        waiting = [each for each in self._found if self._faults.get(_ranks(each)) is None]
        if self._in_force is None or not waiting or now < self._look_at:
            return
        self._look_at, self._pause = now + self._pause, min(2 * self._pause, LONGEST_PAUSE)
        seen = connections()
        for each in waiting:
            fault = confirmed(each, self._in_force, self._own, seen)
            if fault is None:
                continue
            doubted = now - self._doubted.setdefault(_ranks(each), now)
            if fault is PathFault.NONE or doubted >= CONFIRM_SECONDS:
                self._faults[_ranks(each)] = fault

    def reports(self) -> tuple[PathReport, ...]:
        """Of the paths on which ranks here send."""
        return tuple(
            PathReport(*ranks, in_force=fault is PathFault.NONE, fault=fault or PathFault.NONE)
            for ranks, fault in self._faults.items()
        )

    def close(self) -> None:
        if self._search is not None:
            self._search.cancel()
            self._search = None


def _ranks(found: Found) -> tuple[int, int]:
    return found.path.source, found.path.destination
