"""Find ports that lead over the planned paths, and write what a rank's shim needs.

Switches choose among equal paths by a hash of addresses and ports. The plan names the spine for each pair of ranks. The
ports that lead there are unknown, so the launcher of the sending rank probes some (`hop_trace.trace_hops`). It probes
the ports that its connection could use, in the direction in which it sends. gloo connects from the side with the higher
address. If that is the receiver, the sender's launcher knocks at the ports that fit: its peer listens there.

A knock also clears connection tracking. Nodes that track connections (conntrack) take a probe for the start of a
connection, and drop packets from the other side that do not belong to it. A connection that was completed and closed is
forgotten.

The lower half of a job's port range is for listening, by rank. Of the upper half, the first part is for connecting
without a knock, the second after one. A rank's first listener gets the known port: it belongs to its first gloo group,
which all ranks share. Other groups are not changed. Results hold for a round: switches forget their choice when they
restart. If the fabric is unknown, the plan names no spine. Then ports are drawn by the plan's number, and the operator
measures the result.

docs/decisions/0020-steer-traffic-by-ports.md has the reasons.
"""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from ipaddress import ip_address

from pacekeeper_analysis.protocol.plan import WorkerPath, WorkerPaths
from pacekeeper_analysis.protocol.reports import PathFault

from .hop_trace import HopProbe, HopTrace, trace_hops
from .sockets import TcpConnection

SPINE_HOPS = (2, 3)
"""Hops to a spine: after the leaf, or after node and leaf if pods have their own network."""
PROBE_BATCH_SIZE = 8
"""Probes at a time. Switches answer only a limited number per second."""
PROBES_PER_SPINE = 4
"""Probes of a path per spine: no port leads over the wanted one of S spines with probability (1 − 1/S)^4S, 2 % at
most."""
MAX_BIDIRECTIONAL_PROBES = 64
"""Maximum for a path whose reverse path is planned, too: a port fits both only with probability 1/S²."""
PORTS_PER_PATH = 2
"""Ports to find per path. The second is for the case that the first has been taken in the meantime."""
HOP_ANSWER_SECONDS = 0.2
PATH_SEARCH_SECONDS = 2.0
"""Maximum time for all paths of a worker: the round waits for them."""
MAX_KNOCKS_PER_PATH = 16
"""Maximum for one path."""
MAX_SHIM_PORTS = 8
"""Maximum number of ports that the shim tries."""
NARROW_SECONDS, NARROW_PAUSE = 1.0, 0.02
ROCE_PORT = 4791
ROCE_FIRST_SOURCE_PORT = 0xC000
"""UDP source port of a queue pair with flow label 0. The flow label is added to it (rdma-core)."""

Tracer = Callable[[Sequence[HopProbe]], HopTrace]
PathEnds = tuple[int, int]
"""Source and destination rank of a path."""


@dataclass(frozen=True)
class PathSearchResult:
    """What the sender's launcher has found about a path."""

    path: WorkerPath
    ports: tuple[int, ...] = ()  # from which the connecting side must connect
    label: int | None = None  # flow label for RoCE; None: none
    fault: PathFault = PathFault.NONE


def find_fitting_probes(
    probes: Sequence[HopProbe], switch_addresses: Collection[str], tracer: Tracer, count: int
) -> list[HopProbe] | PathFault:
    """Return `count` probes that pass a switch with one of the `switch_addresses`, or the reason if there are none."""
    distances: tuple[int, ...] = SPINE_HOPS
    fitting, passing, unanswered = list[HopProbe](), list[HopProbe](), list[HopProbe]()
    has_answer = has_free_port = False
    for batch in _split_into_batches(probes, unanswered):
        unanswered_in_batch = set[HopProbe]()
        for hops in distances:
            trace = tracer([probe._replace(hops=hops) for probe in batch])
            has_answer, has_free_port = (
                has_answer or bool(trace.end_addresses),
                has_free_port or len(trace.unavailable) < len(batch),
            )
            unanswered_at_hop = set(batch) - {
                probe._replace(hops=0) for probe in (*trace.end_addresses, *trace.unavailable)
            }
            unanswered_in_batch |= unanswered_at_hop
            matches = [probe for probe, address in trace.end_addresses.items() if address in switch_addresses]
            if matches:
                distances = (hops,)
                fitting += matches
                passing += [probe for probe in trace.end_addresses if probe not in matches]
                unanswered_in_batch = unanswered_at_hop
                break
        unanswered += [probe for probe in batch if probe in unanswered_in_batch]
        if not has_answer or len(fitting) >= count:
            break
    if not has_free_port:
        return PathFault.PORTS_TAKEN
    if not has_answer:
        return PathFault.FILTERED
    if not fitting:
        return PathFault.NOT_FOUND
    return fitting[:count] if _can_pass_spine(fitting, passing, tracer) else PathFault.BLACK_HOLE


def _split_into_batches(probes: Sequence[HopProbe], unanswered: list[HopProbe]) -> Iterator[Sequence[HopProbe]]:
    """Yield all probes, then those in `unanswered` again, to which the caller adds each probe without an answer.

    Answers get lost, or come late if switches and launchers have little processor time. Unanswered probes are repeated
    until a repetition brings no answer.
    """
    yield from _split_probes(probes)
    repeated = 0
    while unanswered and len(unanswered) != repeated:
        pending, repeated = tuple(unanswered), len(unanswered)
        unanswered.clear()
        yield from _split_probes(pending)


def _split_probes(probes: Sequence[HopProbe]) -> Iterator[Sequence[HopProbe]]:
    return (probes[start : start + PROBE_BATCH_SIZE] for start in range(0, len(probes), PROBE_BATCH_SIZE))


def _can_pass_spine(fitting: Sequence[HopProbe], passing: Sequence[HopProbe], tracer: Tracer) -> bool:
    """Return whether packets get past the spine.

    If packets over other spines are not answered from there either, that is unknown, and the result is True.
    """
    probes = [probe._replace(hops=probe.hops + 1) for probe in (*fitting[:PORTS_PER_PATH], *passing[:PORTS_PER_PATH])]
    end_addresses = tracer(probes).end_addresses
    return not end_addresses or any(probe in end_addresses for probe in probes[: len(fitting[:PORTS_PER_PATH])])


def is_initiator(own_address: str, peer: str) -> bool:
    """Return whether gloo connects from `own_address` to `peer`, not the other way round."""
    return ip_address(own_address).packed > ip_address(peer).packed


def compute_listen_port(paths: WorkerPaths, rank: int) -> int:
    return paths.first_port + rank % _compute_half_range(paths)


def draw_source_ports(path: WorkerPath, paths: WorkerPaths, turn: int, *, knocked: bool) -> list[int]:
    """Draw the ports that the connecting side may try. Both ends draw the same.

    `turn`: of the round. If the fabric is unknown, the plan's number replaces it, so that a good draw can be kept. The
    next turn draws ports that this one has not drawn, until all have been drawn. The reason: nodes that track
    connections remember the other side's probes for two minutes (`narrow_ports`), and admit no knock at those ports.
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


def build_probes(path: WorkerPath, paths: WorkerPaths, own_address: str, turn: int) -> list[HopProbe]:
    """Build the probes of a path, from the sender's point of view."""
    if is_initiator(own_address, path.address):
        peer_port = compute_listen_port(paths, path.destination)
        return [HopProbe(port, path.address, peer_port) for port in draw_source_ports(path, paths, turn, knocked=False)]
    own_port = compute_listen_port(paths, path.source)
    return [HopProbe(own_port, path.address, port) for port in draw_source_ports(path, paths, turn, knocked=True)]


def _is_bidirectional(path: WorkerPath, paths: WorkerPaths) -> bool:
    return any(get_path_ends(other_path) == (path.destination, path.source) for other_path in paths.wanted)


def _compute_half_range(paths: WorkerPaths) -> int:
    return (paths.last_port + 1 - paths.first_port) // 2


def get_path_ends(path: WorkerPath) -> PathEnds:
    return path.source, path.destination


def search_paths(
    plan: WorkerPaths, ranks: Collection[int], own_address: str, turn: int, labels: bool
) -> tuple[PathSearchResult, ...]:
    """Search the paths on which `ranks` send. `own_address`: this worker's; `labels`: search RoCE flow labels, too.

    A path whose reverse path is planned, too, has no ports at first if this side connects: it waits for a knock.
    """
    deadline = time.monotonic() + PATH_SEARCH_SECONDS
    return tuple(
        _search_path(path, plan, own_address, turn, deadline, labels) for path in plan.wanted if path.source in ranks
    )


def _search_path(
    path: WorkerPath, plan: WorkerPaths, own_address: str, turn: int, deadline: float, labels: bool
) -> PathSearchResult:
    connects, is_bidirectional = is_initiator(own_address, path.address), _is_bidirectional(path, plan)
    probes = build_probes(path, plan, own_address, turn)
    result = PathSearchResult(path)
    if not path.spine:
        fitting: list[HopProbe] | PathFault = probes[:PORTS_PER_PATH]
    elif connects and is_bidirectional:
        fitting = []
    else:
        fitting = find_fitting_probes(
            probes,
            path.hops,
            _make_tracer(own_address, deadline),
            MAX_KNOCKS_PER_PATH if is_bidirectional else PORTS_PER_PATH,
        )
    if isinstance(fitting, PathFault):
        return replace(result, fault=fitting)
    result = replace(result, ports=tuple(probe.source_port if connects else probe.port for probe in fitting))
    if labels and path.spine:
        drawn_labels = random.Random(turn).sample(range(1, 0x4000), PROBES_PER_SPINE * plan.spines)
        label_probes = [HopProbe(ROCE_FIRST_SOURCE_PORT + label, path.address, ROCE_PORT) for label in drawn_labels]
        fitting_labels = find_fitting_probes(
            label_probes, path.hops, _make_tracer(own_address, deadline, socket.SOCK_DGRAM), 1
        )
        if not isinstance(fitting_labels, PathFault):
            result = replace(result, label=fitting_labels[0].source_port - ROCE_FIRST_SOURCE_PORT)
    return result


def _make_tracer(own_address: str, deadline: float, kind: int = socket.SOCK_STREAM) -> Tracer:
    return lambda probes: trace_hops(own_address, probes, min(HOP_ANSWER_SECONDS, deadline - time.monotonic()), kind)


def narrow_ports(
    result: PathSearchResult, plan: WorkerPaths, own_address: str, knocked_ports: Sequence[int]
) -> PathSearchResult:
    """Choose the ports that fit a path from here, from those that fit the reverse path and were knocked at.

    A port is free again when the close of its knock has been acknowledged, which may take a while in a busy network.
    """
    peer_port, deadline = compute_listen_port(plan, result.path.destination), time.monotonic() + NARROW_SECONDS
    probes = [HopProbe(port, result.path.address, peer_port) for port in knocked_ports]
    fitting = find_fitting_probes(probes, result.path.hops, _make_tracer(own_address, deadline), PORTS_PER_PATH)
    while fitting is PathFault.PORTS_TAKEN and time.monotonic() < deadline:
        time.sleep(NARROW_PAUSE)
        fitting = find_fitting_probes(probes, result.path.hops, _make_tracer(own_address, deadline), PORTS_PER_PATH)
    if isinstance(fitting, PathFault):
        return replace(result, fault=fitting)
    return replace(result, ports=tuple(probe.source_port for probe in fitting), fault=PathFault.NONE)


def build_shim_lines(
    rank: int,
    plan: WorkerPaths,
    own_address: str,
    results: Sequence[PathSearchResult],
    knocked_ports: Mapping[PathEnds, Sequence[int]],
) -> list[str]:
    """Return the lines of a rank's shim file (native/paths.c). `knocked_ports`: by the ranks of paths to here."""
    paths_by_peer = {_get_other_end(path, rank): path for path in plan.wanted if rank in get_path_ends(path)}
    lines = [f"listen {own_address} 0 {compute_listen_port(plan, rank)}"] if paths_by_peer else []
    for peer_rank, path in paths_by_peer.items():
        outgoing = next((result for result in results if get_path_ends(result.path) == (rank, peer_rank)), None)
        ports = list(dict.fromkeys([*(outgoing.ports if outgoing else ()), *knocked_ports.get((peer_rank, rank), ())]))
        if ports and is_initiator(own_address, path.address):
            lines.append(
                f"connect {path.address} {compute_listen_port(plan, peer_rank)} "
                f"{' '.join(map(str, ports[:MAX_SHIM_PORTS]))}"
            )
        if outgoing and outgoing.label is not None:
            lines.append(f"label {path.address} {outgoing.label}")
    return lines


def _get_other_end(path: WorkerPath, rank: int) -> int:
    return path.destination if path.source == rank else path.source


def check_path_connection(
    result: PathSearchResult, plan: WorkerPaths, own_address: str, connections: Collection[TcpConnection]
) -> PathFault | None:
    """Return NONE if the path's connection uses a planned port, the fault otherwise; None: it does not exist yet."""
    path = result.path
    if is_initiator(own_address, path.address):
        peer_port = compute_listen_port(plan, path.destination)
        sources = [
            connection.port
            for connection in connections
            if (connection.remote, connection.remote_port) == (path.address, peer_port)
        ]
        has_incoming = False
    else:
        own_port = compute_listen_port(plan, path.source)
        incoming = [connection for connection in connections if connection.port == own_port]
        sources = [connection.remote_port for connection in incoming if connection.remote == path.address]
        has_incoming = bool(incoming)
    if not sources:
        return PathFault.TRANSLATED if has_incoming else None
    return PathFault.NONE if set(sources) & set(result.ports) else PathFault.NOT_TAKEN
