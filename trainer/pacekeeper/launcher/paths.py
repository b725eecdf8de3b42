"""The ports that lead by the planned paths: found out before each round, and written down for the shim.

Switches choose among equal paths by a hash of addresses and ports. The plan names the spine that each pair of ranks is
to use; which ports lead there nobody knows, so the launcher of the sending rank tries some (`hops.trace`): the ones
that its connection could have, in the direction in which it is going to send. gloo connects from the side with the
higher address. Where that is the receiver, the sender's launcher knocks at the ports that fit: its peer listens there
from before it is ready until the round has begun, and has its rank connect from where it was knocked at.

A knock also clears the way. Nodes that follow connections (conntrack) take a packet that was tried for the beginning of
one, and drop what then comes from the other side as part of none; one that was made and ended well is forgotten.

Ports of a job's range: the lower half to listen at, by rank; of the upper half the first part to connect from without
more ado, the second after a knock. A rank's first listener gets the known port: that of its first gloo group, the one
that all ranks share. Other groups are as they are without. What was found holds for a round: switches forget what they
chose when they restart. Where the plan names no spine, since nobody knows the fabric, ports are drawn by the plan's
number, and whoever planned it measures what they bring. docs/decisions/0020-paths.md says why it is as it is.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from ipaddress import ip_address

from pacekeeper.runtime import Runtime, write_text
from pacekeeper_analysis.plan import WorkerPath, WorkerPaths, WorkerPlan
from pacekeeper_analysis.reports import PathFault, PathReport

from .hops import Probe, Trace, trace
from .knocks import Doors, knock
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
KNOCK_SECONDS = 0.2
"""That a round's begin waits for answers of those who listen for a knock."""
LISTEN_SECONDS = 1.0
"""After a round's begin, for knocks; ranks that connect meanwhile do so without."""
ALL_KNOCKS_SECONDS = 0.02
"""After the first for a path, until the others are there, too."""
MOST_KNOCKS = 16
"""For one path."""
MOST_PORTS = 8
"""That the shim tries."""
NARROW_SECONDS = 0.5
CONFIRM_SECONDS = 10.0
"""After the first connection that is not as it was meant: by then the ranks have made all."""
ROCE_PORT = 4791
ROCE_FIRST_SOURCE_PORT = 0xC000
"""Of a queue pair with flow label 0 + what its packets' UDP source port is higher (rdma-core)."""

log = logging.getLogger(__name__)

Tracer = Callable[[Sequence[Probe]], Trace]
Ends = tuple[int, int]
"""Ranks: a path's source and destination."""


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


def source_ports(path: WorkerPath, paths: WorkerPaths, salt: str, *, knocked: bool) -> list[int]:
    """Ports of the side that connects, which may be tried. Both ends draw the same. `salt`: others for each; where the
    fabric is unknown, the plan's number is in its place, so that a good draw can be kept."""
    half, quarter = _half(paths), _half(paths) // 2
    first = paths.first_port + half + (quarter if knocked else 0)
    count = PROBES_PER_SPINE * paths.spines
    if _goes_both_ways(path, paths):
        count = max(count, min(count * paths.spines, PROBES_BOTH_WAYS))
    drawn_by = f"{salt if path.spine else path.draw} {sorted(_ends(path))}"
    return random.Random(drawn_by).sample(range(first, first + quarter), min(count, quarter))


def probes_of(path: WorkerPath, paths: WorkerPaths, own: str, salt: str) -> list[Probe]:
    """What to try, as seen from the sender."""
    if initiates(own, path.address):
        there = listen_port(paths, path.destination)
        return [Probe(port, path.address, there) for port in source_ports(path, paths, salt, knocked=False)]
    here = listen_port(paths, path.source)
    return [Probe(here, path.address, port) for port in source_ports(path, paths, salt, knocked=True)]


def _goes_both_ways(path: WorkerPath, paths: WorkerPaths) -> bool:
    return any(_ends(other) == (path.destination, path.source) for other in paths.wanted)


def _half(paths: WorkerPaths) -> int:
    return (paths.last_port + 1 - paths.first_port) // 2


def _ends(path: WorkerPath) -> Ends:
    return path.source, path.destination


def search(plan: WorkerPaths, ranks: Collection[int], own: str, salt: str, labels: bool) -> tuple[Found, ...]:
    """Of the paths on which `ranks` send. `own`: this worker's address; `labels`: look for RoCE's, too.

    A path whose way back is planned, too, begins without ports where this side connects: it waits for a knock.
    """
    deadline = time.monotonic() + SEARCH_SECONDS
    return tuple(_search(path, plan, own, salt, deadline, labels) for path in plan.wanted if path.source in ranks)


def _search(path: WorkerPath, plan: WorkerPaths, own: str, salt: str, deadline: float, labels: bool) -> Found:
    connects, both_ways = initiates(own, path.address), _goes_both_ways(path, plan)
    probes = probes_of(path, plan, own, salt)
    found = Found(path)
    if not path.spine:
        fitting: list[Probe] | PathFault = probes[:PORTS]
    elif connects and both_ways:
        fitting = []
    else:
        fitting = find(probes, path.hops, _tracer(own, deadline), MOST_KNOCKS if both_ways else PORTS)
    if isinstance(fitting, PathFault):
        return replace(found, fault=fitting)
    found = replace(found, ports=tuple(probe.source_port if connects else probe.port for probe in fitting))
    if labels and path.spine:
        draws = random.Random(salt).sample(range(1, 0x4000), PROBES_PER_SPINE * plan.spines)
        tries = [Probe(ROCE_FIRST_SOURCE_PORT + label, path.address, ROCE_PORT) for label in draws]
        labelled = find(tries, path.hops, _tracer(own, deadline, socket.SOCK_DGRAM), 1)
        if not isinstance(labelled, PathFault):
            found = replace(found, label=labelled[0].source_port - ROCE_FIRST_SOURCE_PORT)
    return found


def _tracer(own: str, deadline: float, kind: int = socket.SOCK_STREAM) -> Tracer:
    return lambda probes: trace(own, probes, min(ANSWER_SECONDS, deadline - time.monotonic()), kind)


def narrow(each: Found, plan: WorkerPaths, own: str, knocked: Sequence[int]) -> Found:
    """A path from here on a connection that waits for a knock: of the ports that fit the way back, those that fit."""
    there = listen_port(plan, each.path.destination)
    probes = [Probe(port, each.path.address, there) for port in knocked]
    fitting = find(probes, each.path.hops, _tracer(own, time.monotonic() + NARROW_SECONDS), PORTS)
    if isinstance(fitting, PathFault):
        return replace(each, fault=fitting)
    return replace(each, ports=tuple(probe.source_port for probe in fitting), fault=PathFault.NONE)


def entries(
    rank: int, plan: WorkerPaths, own: str, found: Sequence[Found], knocked: Mapping[Ends, Sequence[int]]
) -> list[str]:
    """The lines of a rank's file for the shim (native/paths.c). `knocked`: ports, by the ranks of paths to here."""
    pairs = {_other(path, rank): path for path in plan.wanted if rank in _ends(path)}
    lines = [f"listen {own} 0 {listen_port(plan, rank)}"] if pairs else []
    for other, path in pairs.items():
        going = next((each for each in found if _ends(each.path) == (rank, other)), None)
        ports = list(dict.fromkeys([*(going.ports if going else ()), *knocked.get((other, rank), ())]))
        if ports and initiates(own, path.address):
            lines.append(f"connect {path.address} {listen_port(plan, other)} {' '.join(map(str, ports[:MOST_PORTS]))}")
        if going and going.label:
            lines.append(f"label {path.address} {going.label}")
    return lines


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
        self._found: dict[Ends, Found] = {}  # of the paths on which ranks here send
        self._doors = Doors(own, self._knocked)
        self._plan: WorkerPlan | None = None  # of the round in force
        self._settled: dict[Ends, PathFault] = {}  # what is known of its paths for good
        self._doubted: dict[Ends, float] = {}  # since when a connection is there that is not as it was meant
        self._look_at, self._pause = float("-inf"), FIRST_PAUSE  # seconds, monotonic
        self._timers: list[asyncio.TimerHandle] = []
        self._narrowing: dict[Ends, asyncio.Task[None] | None] = {}  # None: as soon as all have knocked

    def find(self, plan: WorkerPlan, seen: int, restarts: int) -> bool:
        """Whether all is found out for the round that follows round `seen`; begins with it where that is to be done.

        `restarts`: of the membership, on which all of its launchers agree.
        """
        wanted = (plan.paths, plan.membership, seen)
        if wanted != self._sought:
            self.close()
            self._sought = wanted
            if plan.paths is not None and plan.paths.wanted:
                self._begin(plan.paths, plan.ranks, f"{plan.membership} {restarts}")
        return self._search is None

    def _begin(self, paths: WorkerPaths, ranks: Sequence[int], salt: str) -> None:
        if self._no_shim:
            log.warning("planned paths are not taken; the network chooses: %s", self._no_shim)
            sent = (path for path in paths.wanted if path.source in ranks)
            self._found = {_ends(path): Found(path, fault=PathFault.NO_SHIM) for path in sent}
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
        self._found = {_ends(each.path): each for each in search.result()}
        for each in self._found.values():
            way = each.path.spine or f"draw {each.path.draw}"
            log.info(
                "path of rank %d to rank %d by %s: %s", *_ends(each.path), way,
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
        for each in self._found.values():
            if each.ports and not initiates(self._own, each.path.address):
                here = listen_port(plan.paths, each.path.source)
                knock(self._own, here, each.path.address, each.ports, KNOCK_SECONDS)
        self._after(LISTEN_SECONDS, self._end_listening)
        for source, destination in self._doors.knocked:
            self._narrow_soon((destination, source))

    def _knocked(self, path: WorkerPath) -> None:
        if self._plan is not None:  # else the peer was faster
            self._write()
            self._narrow_soon((path.destination, path.source))

    def _narrow_soon(self, ends: Ends) -> None:
        """Of the ports that fit the way back, to those that fit, if that way is planned."""
        if ends in self._found and not self._found[ends].ports and ends not in self._narrowing:
            self._narrowing[ends] = None
            self._after(ALL_KNOCKS_SECONDS, self._narrow, ends)

    def _narrow(self, ends: Ends) -> None:
        assert self._plan is not None
        assert self._plan.paths is not None
        each, knocked = self._found[ends], tuple(self._doors.knocked[ends[::-1]])
        self._narrowing[ends] = asyncio.create_task(self._narrowed(ends, each, self._plan.paths, knocked))

    async def _narrowed(self, ends: Ends, each: Found, paths: WorkerPaths, knocked: Sequence[int]) -> None:
        self._found[ends] = each = await asyncio.to_thread(narrow, each, paths, self._own, knocked)
        if each.fault:
            self._settled[ends] = each.fault
        self._write()

    def _end_listening(self) -> None:
        self._doors.close()
        for ends, each in self._found.items():
            if not each.ports and not each.fault:  # nobody has knocked
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
            ends, fault = _ends(each.path), confirmed(each, self._plan.paths, self._own, seen)
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
        for running in (self._search, *self._narrowing.values(), *self._timers):
            if running is not None:
                running.cancel()
        self._doors.forget()
        self._search, self._plan = None, None
        self._found, self._settled, self._doubted, self._narrowing, self._timers = {}, {}, {}, {}, []
        self._look_at, self._pause = float("-inf"), FIRST_PAUSE

    def _after(self, seconds: float, call: Callable[..., None], *arguments: object) -> None:
        self._timers.append(asyncio.get_running_loop().call_later(seconds, call, *arguments))
