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

from .hops import HopProbe, HopTrace, trace_hops
from .sockets import TcpConnection

SPINE_HOPS = (2, 3)
"""How far a spine is: behind the leaf, or behind the node and the leaf where pods have a network of their own."""
PROBE_BATCH_SIZE = 8
"""Probes at once: switches answer some a second only."""
PROBES_PER_SPINE = 4
"""Of a path: the chance that none of so many ports leads by the wanted one of S spines is (1 − 1/S)^4S, 2 % at most."""
MAX_BIDIRECTIONAL_PROBES = 64
"""At most, of a path whose way back is planned, too: a port fits both with a chance of 1/S² only."""
PORTS_PER_PATH = 2
"""So many are looked for: the second is for a first that has been taken meanwhile."""
HOP_ANSWER_SECONDS = 0.2
PATH_SEARCH_SECONDS = 2.0
"""That all paths of a worker may take together: the round waits for them."""
MAX_KNOCKS_PER_PATH = 16
"""For one path."""
MAX_SHIM_PORTS = 8
"""That the shim tries."""
NARROW_SECONDS, NARROW_PAUSE = 1.0, 0.02
ROCE_PORT = 4791
ROCE_FIRST_SOURCE_PORT = 0xC000
"""Of a queue pair with flow label 0 + what its packets' UDP source port is higher (rdma-core)."""

Tracer = Callable[[Sequence[HopProbe]], HopTrace]
PathEnds = tuple[int, int]
"""Ranks: a path's source and destination."""


@dataclass(frozen=True)
class PathSearchResult:
    """What a sender's launcher has found out about a path."""

    path: WorkerPath
    ports: tuple[int, ...] = ()  # from which the side that connects has to come
    label: int = 0  # flow label for RoCE; 0: none
    fault: PathFault = PathFault.NONE


def find_fitting_probes(
    probes: Sequence[HopProbe], wanted: Collection[str], tracer: Tracer, enough: int
) -> list[HopProbe] | PathFault:
    """Those that go by a switch with one of the `wanted` addresses, `enough` of them, or why there are none."""
    distances: tuple[int, ...] = SPINE_HOPS
    fitting, passing, silent = list[HopProbe](), list[HopProbe](), list[HopProbe]()
    heard = usable = False
    for batch in _split_into_batches(probes, silent):
        unheard = set[HopProbe]()
        for hops in distances:
            seen = tracer([probe._replace(hops=hops) for probe in batch])
            heard, usable = heard or bool(seen.end_addresses), usable or len(seen.unavailable) < len(batch)
            quiet = set(batch) - {probe._replace(hops=0) for probe in (*seen.end_addresses, *seen.unavailable)}
            unheard |= quiet
            there = [probe for probe, address in seen.end_addresses.items() if address in wanted]
            if there:
                distances = (hops,)
                fitting += there
                passing += [probe for probe in seen.end_addresses if probe not in there]
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
    return fitting[:enough] if _can_pass_spine(fitting, passing, tracer) else PathFault.BLACK_HOLE


def _split_into_batches(probes: Sequence[HopProbe], silent: Sequence[HopProbe]) -> Iterator[Sequence[HopProbe]]:
    """All, and then once more those of whom nothing was heard by then: answers are lost, and come late."""
    yield from (probes[start : start + PROBE_BATCH_SIZE] for start in range(0, len(probes), PROBE_BATCH_SIZE))
    again = tuple(silent)
    yield from (again[start : start + PROBE_BATCH_SIZE] for start in range(0, len(again), PROBE_BATCH_SIZE))


def _can_pass_spine(fitting: Sequence[HopProbe], passing: Sequence[HopProbe], tracer: Tracer) -> bool:
    """Whether packets come beyond the spine. Where those that pass other spines are not answered from there either,
    nobody knows, and it is taken for granted."""
    ask = [probe._replace(hops=probe.hops + 1) for probe in (*fitting[:PORTS_PER_PATH], *passing[:PORTS_PER_PATH])]
    answered = tracer(ask).end_addresses
    return not answered or any(probe in answered for probe in ask[: len(fitting[:PORTS_PER_PATH])])


def is_initiator(own: str, peer: str) -> bool:
    """Whether gloo connects from `own` to `peer` rather than the other way."""
    return ip_address(own).packed > ip_address(peer).packed


def compute_listen_port(paths: WorkerPaths, rank: int) -> int:
    return paths.first_port + rank % _compute_half_range(paths)


def draw_source_ports(path: WorkerPath, paths: WorkerPaths, turn: int, *, knocked: bool) -> list[int]:
    """Ports of the side that connects, which may be tried. Both ends draw the same. `turn`: of the round. Where the
    fabric is unknown, the plan's number is in its place, so that a good draw can be kept.

    The next turn draws those that this one has left, until all have been drawn: nodes that follow connections remember
    for two minutes what the other side has tried (`narrow`), and let no knock in at it.
    """
    half, quarter = _compute_half_range(paths), _compute_half_range(paths) // 2
    first = paths.first_port + half + (quarter if knocked else 0)
    count = min(_count_probes(path, paths), quarter)
    ports = random.Random(f"{sorted(get_path_ends(path))}").sample(range(first, first + quarter), quarter)
    start = (turn if path.spine else path.draw) * count % quarter
    return (ports * 2)[start : start + count]


def _count_probes(path: WorkerPath, paths: WorkerPaths) -> int:
    if not path.spine:
        return PORTS_PER_PATH
    count = PROBES_PER_SPINE * paths.spines
    return max(count, min(count * paths.spines, MAX_BIDIRECTIONAL_PROBES)) if _is_bidirectional(path, paths) else count


def build_probes(path: WorkerPath, paths: WorkerPaths, own: str, turn: int) -> list[HopProbe]:
    """What to try, as seen from the sender."""
    if is_initiator(own, path.address):
        there = compute_listen_port(paths, path.destination)
        return [HopProbe(port, path.address, there) for port in draw_source_ports(path, paths, turn, knocked=False)]
    here = compute_listen_port(paths, path.source)
    return [HopProbe(here, path.address, port) for port in draw_source_ports(path, paths, turn, knocked=True)]


def _is_bidirectional(path: WorkerPath, paths: WorkerPaths) -> bool:
    return any(get_path_ends(other) == (path.destination, path.source) for other in paths.wanted)


def _compute_half_range(paths: WorkerPaths) -> int:
    return (paths.last_port + 1 - paths.first_port) // 2


def get_path_ends(path: WorkerPath) -> PathEnds:
    return path.source, path.destination


def search_paths(plan: WorkerPaths, ranks: Collection[int], own: str, turn: int, labels: bool) -> tuple[PathSearchResult, ...]:
    """Of the paths on which `ranks` send. `own`: this worker's address; `labels`: look for RoCE's, too.

    A path whose way back is planned, too, begins without ports where this side connects: it waits for a knock.
    """
    deadline = time.monotonic() + PATH_SEARCH_SECONDS
    return tuple(_search_path(path, plan, own, turn, deadline, labels) for path in plan.wanted if path.source in ranks)


def _search_path(path: WorkerPath, plan: WorkerPaths, own: str, turn: int, deadline: float, labels: bool) -> PathSearchResult:
    connects, both_ways = is_initiator(own, path.address), _is_bidirectional(path, plan)
    probes = build_probes(path, plan, own, turn)
    found = PathSearchResult(path)
    if not path.spine:
        fitting: list[HopProbe] | PathFault = probes[:PORTS_PER_PATH]
    elif connects and both_ways:
        fitting = []
    else:
        fitting = find_fitting_probes(probes, path.hops, _make_tracer(own, deadline), MAX_KNOCKS_PER_PATH if both_ways else PORTS_PER_PATH)
    if isinstance(fitting, PathFault):
        return replace(found, fault=fitting)
    found = replace(found, ports=tuple(probe.source_port if connects else probe.port for probe in fitting))
    if labels and path.spine:
        draws = random.Random(turn).sample(range(1, 0x4000), PROBES_PER_SPINE * plan.spines)
        tries = [HopProbe(ROCE_FIRST_SOURCE_PORT + label, path.address, ROCE_PORT) for label in draws]
        labelled = find_fitting_probes(tries, path.hops, _make_tracer(own, deadline, socket.SOCK_DGRAM), 1)
        if not isinstance(labelled, PathFault):
            found = replace(found, label=labelled[0].source_port - ROCE_FIRST_SOURCE_PORT)
    return found


def _make_tracer(own: str, deadline: float, kind: int = socket.SOCK_STREAM) -> Tracer:
    return lambda probes: trace_hops(own, probes, min(HOP_ANSWER_SECONDS, deadline - time.monotonic()), kind)


def narrow_ports(each: PathSearchResult, plan: WorkerPaths, own: str, knocked: Sequence[int]) -> PathSearchResult:
    """A path from here on a connection that waits for a knock: of the ports that fit the way back, those that fit.

    A port is free again when the end of its knock has been answered, for which a full network takes its time.
    """
    there, deadline = compute_listen_port(plan, each.path.destination), time.monotonic() + NARROW_SECONDS
    probes = [HopProbe(port, each.path.address, there) for port in knocked]
    fitting = find_fitting_probes(probes, each.path.hops, _make_tracer(own, deadline), PORTS_PER_PATH)
    while fitting is PathFault.PORTS_TAKEN and time.monotonic() < deadline:
        time.sleep(NARROW_PAUSE)
        fitting = find_fitting_probes(probes, each.path.hops, _make_tracer(own, deadline), PORTS_PER_PATH)
    if isinstance(fitting, PathFault):
        return replace(each, fault=fitting)
    return replace(each, ports=tuple(probe.source_port for probe in fitting), fault=PathFault.NONE)


def build_shim_lines(
    rank: int, plan: WorkerPaths, own: str, found: Sequence[PathSearchResult], knocked: Mapping[PathEnds, Sequence[int]]
) -> list[str]:
    """The lines of a rank's file for the shim (native/paths.c). `knocked`: ports, by the ranks of paths to here."""
    pairs = {_get_other_end(path, rank): path for path in plan.wanted if rank in get_path_ends(path)}
    lines = [f"listen {own} 0 {compute_listen_port(plan, rank)}"] if pairs else []
    for other, path in pairs.items():
        going = next((each for each in found if get_path_ends(each.path) == (rank, other)), None)
        ports = list(dict.fromkeys([*(going.ports if going else ()), *knocked.get((other, rank), ())]))
        if ports and is_initiator(own, path.address):
            lines.append(f"connect {path.address} {compute_listen_port(plan, other)} {' '.join(map(str, ports[:MAX_SHIM_PORTS]))}")
        if going and going.label:
            lines.append(f"label {path.address} {going.label}")
    return lines


def _get_other_end(path: WorkerPath, rank: int) -> int:
    return path.destination if path.source == rank else path.source


def check_path_connection(each: PathSearchResult, plan: WorkerPaths, own: str, seen: Collection[TcpConnection]) -> PathFault | None:
    """Whether the path's connection came about as it was meant to: NONE; None: it is not there (yet)."""
    path = each.path
    if is_initiator(own, path.address):
        there = compute_listen_port(plan, path.destination)
        sources = [its.port for its in seen if (its.remote, its.remote_port) == (path.address, there)]
        away = False
    else:
        here = compute_listen_port(plan, path.source)
        arrived = [its for its in seen if its.port == here]
        sources = [its.remote_port for its in arrived if its.remote == path.address]
        away = bool(arrived)
    if not sources:
        return PathFault.TRANSLATED if away else None
    return PathFault.NONE if set(sources) & set(each.ports) else PathFault.NOT_TAKEN
