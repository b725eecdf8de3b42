"""Which ports lead by the planned paths, and what a rank's shim is told of them.

Switches choose among equal paths by a hash of addresses and ports. The plan names the spine that each pair of ranks is
to use; which ports lead there nobody knows, so the launcher of the sending rank tries some (`hops.trace`): the ones
that its connection could have, in the direction in which it is going to send. gloo connects from the side with the
higher address. Where that is the receiver, the sender's launcher knocks at the ports that fit: its peer listens there
from before it is ready until the round begins, and has its rank connect from where it was knocked at.

A knock also clears the way. Nodes that follow connections (conntrack) take a packet that was tried for the beginning of
one, and drop what then comes from the other side as part of none; one that was made and ended well is forgotten.

Ports of a job's range: the lower half to listen at, by rank; of the upper half the first part to connect from without
more ado, the second after a knock. A rank's first listener gets the known port: that of its first gloo group, the one
that all ranks share. Other groups are as they are without. What was found holds for a round: switches forget what they
chose when they restart. Where the plan names no spine, since nobody knows the fabric, ports are drawn by the plan's
number, and whoever planned it measures what they bring.
docs/decisions/0020-steer-traffic-by-ports.md says why it is as it is.
"""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from ipaddress import ip_address

from pacekeeper_analysis.plan import WorkerPath, WorkerPaths
from pacekeeper_analysis.reports import PathFault

from .hops import HopProbe, Trace, trace
from .sockets import Connection

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
MOST_KNOCKS = 16
"""For one path."""
MOST_PORTS = 8
"""That the shim tries."""
NARROW_SECONDS, NARROW_PAUSE = 1.0, 0.02
ROCE_PORT = 4791
ROCE_FIRST_SOURCE_PORT = 0xC000
"""Of a queue pair with flow label 0 + what its packets' UDP source port is higher (rdma-core)."""

Tracer = Callable[[Sequence[HopProbe]], Trace]
Ends = tuple[int, int]
"""Ranks: a path's source and destination."""


@dataclass(frozen=True)
class Found:
    """What a sender's launcher has found out about a path."""

    path: WorkerPath
    ports: tuple[int, ...] = ()  # from which the side that connects has to come
    label: int = 0  # flow label for RoCE; 0: none
    fault: PathFault = PathFault.NONE


def find(
    probes: Sequence[HopProbe], wanted: Collection[str], tracer: Tracer, enough: int
) -> list[HopProbe] | PathFault:
    """Those that go by a switch with one of the `wanted` addresses, `enough` of them, or why there are none."""
    distances: tuple[int, ...] = HOPS
    fitting, passing, silent = list[HopProbe](), list[HopProbe](), list[HopProbe]()
    heard = usable = False
    for batch in _batches(probes, silent):
        unheard = set[HopProbe]()
        for hops in distances:
            seen = tracer([probe._replace(hops=hops) for probe in batch])
            heard, usable = heard or bool(seen.ends), usable or len(seen.taken) < len(batch)
            quiet = set(batch) - {probe._replace(hops=0) for probe in (*seen.ends, *seen.taken)}
            unheard |= quiet
            there = [probe for probe, address in seen.ends.items() if address in wanted]
            if there:
                distances = (hops,)
                fitting += there
                passing += [probe for probe in seen.ends if probe not in there]
                unheard = quiet
                break
        silent += [probe for probe in batch if probe in unheard]
        if not heard or len(fitting) >= enough:
            break
    if not usable:
        return PathFault.PORTS_TAKEN
    if not heard:
        return PathFault.FILTERED
    if not fitting:
        return PathFault.NOT_FOUND
    return fitting[:enough] if _go_on(fitting, passing, tracer) else PathFault.BLACK_HOLE


def _batches(probes: Sequence[HopProbe], silent: Sequence[HopProbe]) -> Iterator[Sequence[HopProbe]]:
    """All, and then once more those of whom nothing was heard by then: answers are lost, and come late."""
    yield from (probes[start : start + BATCH] for start in range(0, len(probes), BATCH))
    again = tuple(silent)
    yield from (again[start : start + BATCH] for start in range(0, len(again), BATCH))


def _go_on(fitting: Sequence[HopProbe], passing: Sequence[HopProbe], tracer: Tracer) -> bool:
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


def source_ports(path: WorkerPath, paths: WorkerPaths, turn: int, *, knocked: bool) -> list[int]:
    """Ports of the side that connects, which may be tried. Both ends draw the same. `turn`: of the round. Where the
    fabric is unknown, the plan's number is in its place, so that a good draw can be kept.

    The next turn draws those that this one has left, until all have been drawn: nodes that follow connections remember
    for two minutes what the other side has tried (`narrow`), and let no knock in at it.
    """
    half, quarter = _half(paths), _half(paths) // 2
    first = paths.first_port + half + (quarter if knocked else 0)
    count = min(_tries(path, paths), quarter)
    ports = random.Random(f"{sorted(ends_of(path))}").sample(range(first, first + quarter), quarter)
    start = (turn if path.spine else path.draw) * count % quarter
    return (ports * 2)[start : start + count]


def _tries(path: WorkerPath, paths: WorkerPaths) -> int:
    if not path.spine:
        return PORTS
    count = PROBES_PER_SPINE * paths.spines
    return max(count, min(count * paths.spines, PROBES_BOTH_WAYS)) if _goes_both_ways(path, paths) else count


def probes_of(path: WorkerPath, paths: WorkerPaths, own: str, turn: int) -> list[HopProbe]:
    """What to try, as seen from the sender."""
    if initiates(own, path.address):
        there = listen_port(paths, path.destination)
        return [HopProbe(port, path.address, there) for port in source_ports(path, paths, turn, knocked=False)]
    here = listen_port(paths, path.source)
    return [HopProbe(here, path.address, port) for port in source_ports(path, paths, turn, knocked=True)]


def _goes_both_ways(path: WorkerPath, paths: WorkerPaths) -> bool:
    return any(ends_of(other) == (path.destination, path.source) for other in paths.wanted)


def _half(paths: WorkerPaths) -> int:
    return (paths.last_port + 1 - paths.first_port) // 2


def ends_of(path: WorkerPath) -> Ends:
    return path.source, path.destination


def search(plan: WorkerPaths, ranks: Collection[int], own: str, turn: int, labels: bool) -> tuple[Found, ...]:
    """Of the paths on which `ranks` send. `own`: this worker's address; `labels`: look for RoCE's, too.

    A path whose way back is planned, too, begins without ports where this side connects: it waits for a knock.
    """
    deadline = time.monotonic() + SEARCH_SECONDS
    return tuple(_search(path, plan, own, turn, deadline, labels) for path in plan.wanted if path.source in ranks)


def _search(path: WorkerPath, plan: WorkerPaths, own: str, turn: int, deadline: float, labels: bool) -> Found:
    connects, both_ways = initiates(own, path.address), _goes_both_ways(path, plan)
    probes = probes_of(path, plan, own, turn)
    found = Found(path)
    if not path.spine:
        fitting: list[HopProbe] | PathFault = probes[:PORTS]
    elif connects and both_ways:
        fitting = []
    else:
        fitting = find(probes, path.hops, _tracer(own, deadline), MOST_KNOCKS if both_ways else PORTS)
    if isinstance(fitting, PathFault):
        return replace(found, fault=fitting)
    found = replace(found, ports=tuple(probe.source_port if connects else probe.port for probe in fitting))
    if labels and path.spine:
        draws = random.Random(turn).sample(range(1, 0x4000), PROBES_PER_SPINE * plan.spines)
        tries = [HopProbe(ROCE_FIRST_SOURCE_PORT + label, path.address, ROCE_PORT) for label in draws]
        labelled = find(tries, path.hops, _tracer(own, deadline, socket.SOCK_DGRAM), 1)
        if not isinstance(labelled, PathFault):
            found = replace(found, label=labelled[0].source_port - ROCE_FIRST_SOURCE_PORT)
    return found


def _tracer(own: str, deadline: float, kind: int = socket.SOCK_STREAM) -> Tracer:
    return lambda probes: trace(own, probes, min(ANSWER_SECONDS, deadline - time.monotonic()), kind)


def narrow(each: Found, plan: WorkerPaths, own: str, knocked: Sequence[int]) -> Found:
    """A path from here on a connection that waits for a knock: of the ports that fit the way back, those that fit.

    A port is free again when the end of its knock has been answered, for which a full network takes its time.
    """
    there, deadline = listen_port(plan, each.path.destination), time.monotonic() + NARROW_SECONDS
    probes = [HopProbe(port, each.path.address, there) for port in knocked]
    fitting = find(probes, each.path.hops, _tracer(own, deadline), PORTS)
    while fitting is PathFault.PORTS_TAKEN and time.monotonic() < deadline:
        time.sleep(NARROW_PAUSE)
        fitting = find(probes, each.path.hops, _tracer(own, deadline), PORTS)
    if isinstance(fitting, PathFault):
        return replace(each, fault=fitting)
    return replace(each, ports=tuple(probe.source_port for probe in fitting), fault=PathFault.NONE)


def entries(
    rank: int, plan: WorkerPaths, own: str, found: Sequence[Found], knocked: Mapping[Ends, Sequence[int]]
) -> list[str]:
    """The lines of a rank's file for the shim (native/paths.c). `knocked`: ports, by the ranks of paths to here."""
    pairs = {_other(path, rank): path for path in plan.wanted if rank in ends_of(path)}
    lines = [f"listen {own} 0 {listen_port(plan, rank)}"] if pairs else []
    for other, path in pairs.items():
        going = next((each for each in found if ends_of(each.path) == (rank, other)), None)
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
