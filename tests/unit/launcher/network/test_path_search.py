"""Which ports are found for planned paths, what the shim and the peers receive of them, and why some are not found."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from pacekeeper.launcher.network import hop_trace, path_finder, path_search
from pacekeeper.launcher.network.hop_trace import HopProbe, HopTrace
from pacekeeper.launcher.network.interfaces import bind_socket
from pacekeeper.launcher.network.path_finder import PathFinder
from pacekeeper.launcher.network.path_search import (
    PathSearchResult,
    build_probes,
    build_shim_lines,
    check_path_connection,
    compute_listen_port,
    draw_source_ports,
    find_fitting_probes,
    is_initiator,
)
from pacekeeper.launcher.network.port_knocking import KnockListeners, knock_ports
from pacekeeper.launcher.network.sockets import TcpConnection, list_connections
from pacekeeper.runtime_folder import RuntimeFolder
from pacekeeper_analysis.protocol.plan import (
    Hop,
    Member,
    Paths,
    Plan,
    PlannedPath,
    WorkerPath,
    WorkerPaths,
    WorkerPlan,
)
from pacekeeper_analysis.protocol.reports import PathFault

LOW, HIGH = "10.0.0.9", "10.0.0.10"
"""Two workers' addresses: the higher one connects, and 10 is higher than 9 although it is not in letters."""
SPINES = 4
S1 = "10.98.0.1"
"""The spine that is wanted."""


@dataclass
class FakeSwitches:
    """A network whose spines are `distance` hops off: spine number port % spines, with address 10.98.0.<number>."""

    distance: int = 2
    silent: bool = False
    taken: Collection[int] = ()  # ports
    dead: Collection[str] = ()  # spines that pass nothing on
    quiet_beyond: bool = False  # the leaves behind them do not answer
    most_answers: int = 1000
    at_once: int = 1000  # answers to each batch
    loses: int = 0  # the number of answers that are lost at first
    spines: int = SPINES
    sent: list[HopProbe] = field(default_factory=list)

    def __call__(self, probes: Sequence[HopProbe]) -> HopTrace:
        self.sent += probes
        found = HopTrace(unavailable={probe for probe in probes if {probe.source_port, probe.port} & set(self.taken)})
        for probe in probes:
            answers = probe not in found.unavailable and not self.silent and self.most_answers > 0
            answers = answers and len(found.end_addresses) < self.at_once
            if answers and (end := self.find_end(probe)):
                if self.loses > 0:
                    self.loses -= 1
                    continue
                found.end_addresses[probe] = end
                self.most_answers -= 1
        return found

    def find_end(self, probe: HopProbe) -> str:
        chooses = probe.source_port if probe.source_port >= 20500 else probe.port  # the other one is the listener's
        spine = f"10.98.0.{chooses % self.spines}"
        if probe.hops < self.distance:
            return "leaf"
        if probe.hops == self.distance:
            return spine
        return "" if spine in self.dead or self.quiet_beyond else "far"


def build_hop_probes(count: int = 4 * SPINES) -> list[HopProbe]:
    return [HopProbe(25000 + number, HIGH, 20001) for number in range(count)]


def list_ports(found: list[HopProbe] | PathFault) -> list[int]:
    assert isinstance(found, list), found
    return [probe.source_port for probe in found]


class TestFind:
    @pytest.mark.parametrize("distance", [2, 3])
    def test_the_ports_whose_packets_end_at_the_spine_are_found(self, distance: int) -> None:
        found = find_fitting_probes(build_hop_probes(), {S1, "10.98.1.1"}, FakeSwitches(distance), count=2)
        assert list_ports(found) == [25001, 25005]

    def test_it_stops_when_it_has_enough_and_probes_at_one_distance_once_that_is_known(self) -> None:
        network = FakeSwitches(3)
        find_fitting_probes(build_hop_probes(), {S1}, network, count=3)
        assert [probe.hops for probe in network.sent[:24]] == [2] * 8 + [3] * 16
        assert all(probe.hops == 4 for probe in network.sent[24:])
        assert len(network.sent) <= 24 + 4

    def test_all_that_fit_are_found_where_all_are_wanted(self) -> None:
        assert len(list_ports(find_fitting_probes(build_hop_probes(), {S1}, FakeSwitches(), count=16))) == 4

    def test_a_switch_that_answers_seldom_is_enough(self) -> None:
        """Linux's default: six at once, and one a second later on."""
        assert list_ports(find_fitting_probes(build_hop_probes(), {S1}, FakeSwitches(most_answers=6), count=2)) == [
            25001,
            25005,
        ]

    def test_an_unanswered_probe_is_sent_once_more(self) -> None:
        """The answers to the first packets are lost."""
        network = FakeSwitches(loses=8)
        assert list_ports(find_fitting_probes(build_hop_probes(8), {S1}, network, count=2)) == [25001, 25005]
        assert [probe.hops for probe in network.sent] == [2] * 8 + [3] * 8 + [2] * 8 + [3] * 4

    def test_silent_probes_are_repeated_while_that_brings_answers(self) -> None:
        """A switch under load answers one of eight probes, and the ports that fit are the third and the seventh."""
        network = FakeSwitches(at_once=1)
        assert list_ports(find_fitting_probes(build_hop_probes(8), {"10.98.0.2"}, network, count=1)) == [25002]

    def test_few_probes_are_sent_where_no_switch_answers(self) -> None:
        network = FakeSwitches(silent=True)
        assert find_fitting_probes(build_hop_probes(64), {S1}, network, count=2) is PathFault.FILTERED
        assert len(network.sent) == 2 * path_search.PROBE_BATCH_SIZE

    def test_a_fault_names_that_all_ports_are_taken(self) -> None:
        assert (
            find_fitting_probes(build_hop_probes(), {S1}, FakeSwitches(taken=[20001]), count=2) is PathFault.PORTS_TAKEN
        )

    def test_a_taken_port_is_skipped(self) -> None:
        assert list_ports(find_fitting_probes(build_hop_probes(), {S1}, FakeSwitches(taken=[25001]), count=1)) == [
            25005
        ]

    def test_a_spine_without_traffic_is_not_found_even_if_all_probes_are_answered(self) -> None:
        network = FakeSwitches()
        assert find_fitting_probes(build_hop_probes(), {"10.98.0.99"}, network, count=2) is PathFault.NOT_FOUND
        assert len(network.sent) == 2 * len(build_hop_probes()), "at each of two distances"

    def test_a_spine_that_forwards_nothing_is_a_black_hole(self) -> None:
        assert find_fitting_probes(build_hop_probes(), {S1}, FakeSwitches(dead={S1}), count=2) is PathFault.BLACK_HOLE

    def test_leaves_that_never_answer_prove_no_black_hole(self) -> None:
        assert list_ports(find_fitting_probes(build_hop_probes(), {S1}, FakeSwitches(quiet_beyond=True), count=1)) == [
            25001
        ]


def build_task(*wanted: WorkerPath, spines: int = SPINES) -> WorkerPaths:
    return WorkerPaths(wanted, spines, 20000, 20999)


def build_path(source: int, destination: int, address: str = HIGH) -> WorkerPath:
    return WorkerPath(source, destination, "s1", (S1,), "peer", address)


class TestPorts:
    def test_the_higher_address_connects(self) -> None:
        assert is_initiator(HIGH, LOW)
        assert not is_initiator(LOW, HIGH)
        assert is_initiator("fd00::a", "fd00::9")

    def test_the_connecting_side_tries_its_own_ports_toward_the_listener(self) -> None:
        tried = build_probes(build_path(3, 5, LOW), build_task(), HIGH, 7)
        assert len(tried) == 4 * SPINES == len({probe.source_port for probe in tried})
        assert {(probe.address, probe.port) for probe in tried} == {(LOW, 20005)}
        assert all(20500 <= probe.source_port <= 20749 for probe in tried)

    def test_the_listening_side_tries_the_peers_ports_from_its_listener(self) -> None:
        tried = build_probes(build_path(3, 5, HIGH), build_task(), LOW, 7)
        assert {(probe.source_port, probe.address) for probe in tried} == {(20003, HIGH)}
        assert all(20750 <= probe.port <= 20999 for probe in tried)

    def test_ports_tried_by_one_side_are_used_by_the_other_only_after_a_knock(self) -> None:
        """Nodes that track connections remember what was tried for two minutes, and would drop what comes back."""
        without, after = (
            set(draw_source_ports(build_path(3, 5), build_task(), 7, knocked=knocked)) for knocked in (False, True)
        )
        assert without.isdisjoint(after)

    def test_both_sides_draw_the_same(self) -> None:
        there = [probe.port for probe in build_probes(build_path(3, 5, HIGH), build_task(), LOW, 1)]
        assert there == draw_source_ports(build_path(3, 5, LOW), build_task(), 1, knocked=True)

    def test_no_port_is_drawn_again_until_all_others_have_been(self) -> None:
        both = build_task(build_path(3, 5), build_path(5, 3))
        drawn = [draw_source_ports(build_path(3, 5), both, turn, knocked=True) for turn in range(20, 28)]
        assert {len(ports) for ports in drawn} == {path_search.MAX_BIDIRECTIONAL_PROBES}
        for begin in range(5):
            assert (
                len({port for ports in drawn[begin : begin + 3] for port in ports})
                == 3 * path_search.MAX_BIDIRECTIONAL_PROBES
            )
            assert len({port for ports in drawn[begin : begin + 4] for port in ports}) == 250

    def test_listeners_of_neighboring_ranks_differ_and_never_leave_their_half(self) -> None:
        listening = [compute_listen_port(build_task(), rank) for rank in range(5000)]
        assert len(set(listening[:500])) == 500
        assert (min(listening), max(listening)) == (20000, 20499)

    def test_more_spines_than_ports_try_them_all(self) -> None:
        assert len(build_probes(build_path(3, 5, LOW), build_task(spines=2000), HIGH, 7)) == 250


class TestSearch:
    """A worker's whole search, in a simulated network."""

    @pytest.fixture(autouse=True)
    def network(self, monkeypatch: pytest.MonkeyPatch) -> FakeSwitches:
        network = FakeSwitches()
        monkeypatch.setattr(path_search, "trace_hops", lambda _own, probes, _seconds, _kind: network(probes))
        return network

    def test_only_the_sender_searches(self) -> None:
        both = build_task(build_path(0, 1, LOW), build_path(1, 0, LOW))
        assert [each.path.source for each in path_search.search_paths(both, (0,), HIGH, 7, labels=False)] == [0]

    def test_no_more_probes_are_sent_than_switches_answer(self, network: FakeSwitches) -> None:
        (found,) = path_search.search_paths(build_task(build_path(0, 1, LOW)), (0,), HIGH, 7, labels=False)
        assert len(found.ports) == path_search.PORTS_PER_PATH
        assert {port % SPINES for port in found.ports} == {1}
        assert len(network.sent) <= 4 * SPINES + path_search.PROBE_BATCH_SIZE + 2 * path_search.PORTS_PER_PATH

    def test_where_the_reverse_path_is_planned_the_listening_side_tries_more_ports(self, network: FakeSwitches) -> None:
        (found,) = path_search.search_paths(
            build_task(build_path(0, 1, HIGH), build_path(1, 0, HIGH)), (0,), LOW, 7, labels=False
        )
        assert path_search.PORTS_PER_PATH < len(found.ports) <= path_search.MAX_KNOCKS_PER_PATH
        assert (
            len(network.sent)
            <= path_search.MAX_BIDIRECTIONAL_PROBES + path_search.PROBE_BATCH_SIZE + 2 * path_search.PORTS_PER_PATH
        )

    def test_the_connecting_side_waits_for_its_knocks(self, network: FakeSwitches) -> None:
        both = build_task(build_path(0, 1, LOW), build_path(1, 0, LOW))
        (waiting,) = path_search.search_paths(both, (0,), HIGH, 7, labels=False)
        assert (waiting.ports, waiting.fault, network.sent) == ((), PathFault.NONE, [])
        knocked = (20759, 20761, 20763, 20765)
        assert path_search.narrow_ports(waiting, both, HIGH, knocked).ports == (20761, 20765)
        assert path_search.narrow_ports(waiting, both, HIGH, (20759, 20763)).fault is PathFault.NOT_FOUND

    def test_ports_whose_knocks_have_not_ended_yet_are_tried_again(
        self, network: FakeSwitches, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        both = build_task(build_path(0, 1, LOW), build_path(1, 0, LOW))
        (waiting,) = path_search.search_paths(both, (0,), HIGH, 7, labels=False)
        tries = 0

        def trace_later(_own: str, probes: Sequence[HopProbe], _seconds: float, _kind: int) -> HopTrace:
            nonlocal tries
            tries += 1
            return network(probes) if tries > 4 else HopTrace(unavailable=set(probes))

        monkeypatch.setattr(path_search, "trace_hops", trace_later)
        assert path_search.narrow_ports(waiting, both, HIGH, (20759, 20761, 20763, 20765)).ports == (20761, 20765)

    def test_labels_for_roce_are_requested_where_there_may_be_any(self) -> None:
        (without,) = path_search.search_paths(build_task(build_path(0, 1, LOW)), (0,), HIGH, 7, labels=False)
        (found,) = path_search.search_paths(build_task(build_path(0, 1, LOW)), (0,), HIGH, 7, labels=True)
        assert without.label is None
        assert found.label is not None
        assert (path_search.ROCE_FIRST_SOURCE_PORT + found.label) % SPINES == 1

    @pytest.mark.parametrize("spines", [1, 2, 64])
    def test_paths_are_found_over_few_and_over_many_spines(self, network: FakeSwitches, spines: int) -> None:
        network.spines = spines
        wanted = replace(build_path(0, 1, LOW), hops=(f"10.98.0.{spines - 1}",))
        (found,) = path_search.search_paths(build_task(wanted, spines=spines), (0,), HIGH, 7, labels=False)
        assert {port % spines for port in found.ports} == {spines - 1}

    def test_in_an_unknown_fabric_ports_are_drawn_without_a_packet(self, network: FakeSwitches) -> None:
        unknown = replace(build_path(0, 1, LOW), spine="", hops=(), draw=5)
        drawn = [
            path_search.search_paths(build_task(each), (0,), HIGH, turn, labels=True)[0].ports
            for each, turn in ((unknown, 7), (unknown, 8), (replace(unknown, draw=6), 8))
        ]
        assert drawn[0] == drawn[1], "the same in each round, so that a good one can be kept"
        assert drawn[0] != drawn[2]
        assert len(drawn[0]) == path_search.PORTS_PER_PATH
        assert not network.sent


class TestEntries:
    def test_the_connecting_side_writes_the_source_port(self) -> None:
        found = [PathSearchResult(build_path(0, 1, LOW), (20700, 20701))]
        assert build_shim_lines(0, build_task(build_path(0, 1, LOW)), HIGH, found, {}) == [
            f"listen {HIGH} 0 20000",
            f"connect {LOW} 20001 20700 20701",
        ]

    def test_the_listening_side_only_listens(self) -> None:
        found = [PathSearchResult(build_path(1, 0, HIGH), (20700, 20701))]
        assert build_shim_lines(1, build_task(build_path(1, 0, HIGH)), LOW, found, {}) == [f"listen {LOW} 0 20001"]

    def test_a_side_that_was_knocked_at_connects_from_that_port(self) -> None:
        lines = build_shim_lines(0, build_task(build_path(1, 0, LOW)), HIGH, (), {(1, 0): [20800, 20801]})
        assert lines == [f"listen {HIGH} 0 20000", f"connect {LOW} 20001 20800 20801"]

    def test_ports_that_fit_both_directions_come_first(self) -> None:
        both = build_task(build_path(0, 1, LOW), build_path(1, 0, LOW))
        found = [PathSearchResult(build_path(0, 1, LOW), (20802,))]
        lines = build_shim_lines(0, both, HIGH, found, {(1, 0): [20800, 20802]})
        assert lines[1] == f"connect {LOW} 20001 20802 20800"

    def test_no_more_ports_are_written_than_the_shim_tries(self) -> None:
        lines = build_shim_lines(0, build_task(build_path(1, 0, LOW)), HIGH, (), {(1, 0): list(range(20800, 20816))})
        assert len(lines[1].split()) == 3 + path_search.MAX_SHIM_PORTS

    def test_a_path_without_ports_leaves_the_connection_unchanged(self) -> None:
        found = [PathSearchResult(build_path(0, 1, LOW), fault=PathFault.FILTERED)]
        assert build_shim_lines(0, build_task(build_path(0, 1, LOW)), HIGH, found, {}) == [f"listen {HIGH} 0 20000"]

    def test_knocks_for_other_ranks_and_ranks_without_paths_change_nothing(self) -> None:
        assert build_shim_lines(0, build_task(build_path(1, 0, LOW)), HIGH, (), {(7, 8): [20800]}) == [
            f"listen {HIGH} 0 20000"
        ]
        assert build_shim_lines(4, build_task(build_path(1, 0, LOW)), HIGH, (), {(1, 0): [20800]}) == []

    def test_labels_are_for_the_sender(self) -> None:
        found = [PathSearchResult(build_path(0, 1, HIGH), (20700,), label=77)]
        assert build_shim_lines(0, build_task(build_path(0, 1, HIGH)), LOW, found, {})[-1] == f"label {HIGH} 77"


class TestConfirmed:
    """`own` is the sender's side."""

    CONNECTS = PathSearchResult(build_path(0, 1, LOW), (20700, 20701))
    LISTENS = PathSearchResult(build_path(1, 0, HIGH), (20700, 20701))

    def check(self, found: PathSearchResult, own: str, *seen: TcpConnection) -> PathFault | None:
        return check_path_connection(found, build_task(found.path), own, seen)

    def test_a_connection_from_a_found_port_is_in_force(self) -> None:
        assert self.check(self.CONNECTS, HIGH, TcpConnection(HIGH, 20701, LOW, 20001)) is PathFault.NONE
        assert self.check(self.LISTENS, LOW, TcpConnection(LOW, 20001, HIGH, 20700)) is PathFault.NONE

    def test_a_connection_from_another_port_is_not_in_force(self) -> None:
        assert self.check(self.CONNECTS, HIGH, TcpConnection(HIGH, 45001, LOW, 20001)) is PathFault.NOT_TAKEN
        assert self.check(self.LISTENS, LOW, TcpConnection(LOW, 20001, HIGH, 45001)) is PathFault.NOT_TAKEN

    def test_a_missing_connection_is_reported(self) -> None:
        assert self.check(self.CONNECTS, HIGH, TcpConnection(HIGH, 20701, LOW, 20002)) is None
        assert self.check(self.LISTENS, LOW, TcpConnection(LOW, 29400, HIGH, 20700)) is None

    def test_rewritten_addresses_are_reported_when_others_arrive_but_never_the_peer(self) -> None:
        assert self.check(self.LISTENS, LOW, TcpConnection(LOW, 20001, "192.0.2.1", 20700)) is PathFault.TRANSLATED


class TestKnocks:
    """On loopback addresses: 127.0.0.1 connects from port 20001 or another."""

    PATH = build_path(1, 0, "127.0.0.1")

    @pytest.fixture
    def doors(self) -> Iterator[KnockListeners]:
        made = KnockListeners("127.0.0.2")
        yield made
        made.close()

    def test_the_ports_that_were_knocked_at_are_known_and_all_are_free_again(self, doors: KnockListeners) -> None:
        first, second, third, source = find_free_ports(4)
        doors.open(self.PATH, source, [first, second, third])
        knock_ports("127.0.0.1", source, "127.0.0.2", [first, third], 30.0)
        began = time.monotonic()
        assert {ends: sorted(ports) for ends, ports in doors.wait_for_knocks(60.0).items()} == {
            (1, 0): sorted([first, third])
        }
        assert time.monotonic() - began < 30.0
        for port in (first, second):
            with socket.socket() as rank:  # as the shim binds it, and from there to the peer that has knocked
                rank.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                rank.bind(("", port))
                with socket.create_server(("127.0.0.1", source)):
                    rank.connect(("127.0.0.1", source))

    def test_it_waits_for_all_announced_knocks_and_no_longer_than_its_limit(self, doors: KnockListeners) -> None:
        first, second, source = find_free_ports(3)
        doors.open(self.PATH, source, [first, second])
        one, other = (self.connect_to_door(source, door) for door in (first, second))
        one.close()
        late = threading.Timer(0.1, other.close)
        late.start()
        assert doors.wait_for_knocks(60.0) == {(1, 0): [first, second]}
        late.join()
        doors.open(self.PATH, source, [first])
        self.connect_to_door(source, first).close()
        assert doors.wait_for_knocks(1.0) == {(1, 0): [first]}

    @staticmethod
    def connect_to_door(source: int, door: int) -> socket.socket:
        """Connect and announce two knocks, and stay connected."""
        inside = bind_socket("127.0.0.1", source)
        inside.connect(("127.0.0.2", door))
        inside.send(bytes((2,)))
        return inside

    def test_a_side_that_was_not_admitted_is_not_waited_for(self, doors: KnockListeners) -> None:
        """A node may have dropped what came back, since it has seen that port tried from the other side."""
        door, shut, source = find_free_ports(3)
        doors.open(self.PATH, source, [door])
        knock_ports("127.0.0.1", source, "127.0.0.2", [shut, door], 30.0)
        began = time.monotonic()
        assert doors.wait_for_knocks(60.0) == {(1, 0): [door]}
        assert time.monotonic() - began < 30.0

    def test_a_side_that_found_no_port_reports_it_and_is_not_waited_for(self, doors: KnockListeners) -> None:
        door, source = find_free_ports(2)
        doors.open(self.PATH, source, [door])
        knock_ports("127.0.0.1", source, "127.0.0.2", [door], 30.0, has_ports=False)
        began = time.monotonic()
        assert doors.wait_for_knocks(60.0) == {}
        assert time.monotonic() - began < 30.0

    def test_knocks_from_other_addresses_are_rejected(self, doors: KnockListeners) -> None:
        door, source, elsewhere = find_free_ports(3)
        doors.open(self.PATH, source, [door])
        knock_ports("127.0.0.1", elsewhere, "127.0.0.2", [door], 30.0)
        knock_ports("127.0.0.3", source, "127.0.0.2", [door], 30.0)
        assert doors.wait_for_knocks(1.0) == {}

    def test_doors_on_taken_ports_stay_closed(self, doors: KnockListeners) -> None:
        taken, free, source = find_free_ports(3)
        with socket.create_server(("127.0.0.2", taken)):
            doors.open(self.PATH, source, [taken, free])
            knock_ports("127.0.0.1", source, "127.0.0.2", [taken, free], 30.0)
            assert doors.wait_for_knocks(1.0) == {(1, 0): [free]}

    def test_a_knock_without_a_listener_ends_at_once(self) -> None:
        door, source = find_free_ports(2)
        began = time.monotonic()
        knock_ports("127.0.0.1", source, "127.0.0.2", [door], 60.0)
        assert time.monotonic() - began < 30.0


class TestFinder:
    PLAN = Plan(
        membership=3,
        members=(Member("w0", LOW, (0,)), Member("w1", HIGH, (1,))),
        paths=Paths((PlannedPath(1, 0, "s1"),), (Hop("10.98.0.1", "s1"), Hop("10.98.0.2", "s2")), 20000, 20999),
    )

    @pytest.fixture
    def runtime(self, tmp_path: Path) -> RuntimeFolder:
        return RuntimeFolder(tmp_path).create()

    @pytest.fixture
    def ended(self) -> asyncio.Event:
        """Set when a search has ended."""
        return asyncio.Event()

    @pytest.fixture
    def finder(self, runtime: RuntimeFolder, ended: asyncio.Event) -> PathFinder:
        return PathFinder(runtime, HIGH, no_shim="", labels=False, on_found=ended.set)

    async def search(self, finder: PathFinder, ended: asyncio.Event, plan: WorkerPlan, seen: int = 0) -> None:
        ended.clear()
        assert not finder.ensure_searched(plan, seen), "the round waits for it"
        await ended.wait()
        assert finder.ensure_searched(plan, seen)

    @pytest.fixture(autouse=True)
    def switches(self, monkeypatch: pytest.MonkeyPatch) -> FakeSwitches:
        network = FakeSwitches()
        monkeypatch.setattr(path_search, "trace_hops", lambda _own, probes, _seconds, _kind: network(probes))
        return network

    async def test_found_ports_are_written_for_the_rank(
        self, runtime: RuntimeFolder, finder: PathFinder, ended: asyncio.Event
    ) -> None:
        plan = self.PLAN.build_worker_plan("w1")
        await self.search(finder, ended, plan)
        finder.apply(plan)
        listen, connect = runtime.paths_file(0).read_text().splitlines()
        assert listen == f"listen {HIGH} 0 20001"
        assert connect.startswith(f"connect {LOW} 20000 ")
        assert {int(port) % SPINES for port in connect.split()[3:]} == {1}
        assert [(each.source, each.destination, each.in_force, each.fault) for each in finder.build_reports()] == [
            (1, 0, False, "")
        ]

    async def test_each_round_is_searched_once_and_from_the_start(
        self, finder: PathFinder, ended: asyncio.Event, switches: FakeSwitches
    ) -> None:
        plan = self.PLAN.build_worker_plan("w1")
        await self.search(finder, ended, plan)
        count = len(switches.sent)
        assert finder.ensure_searched(plan, 0)
        assert len(switches.sent) == count
        await self.search(finder, ended, plan, seen=1)
        assert len(switches.sent) > count

    async def test_a_canceled_search_changes_nothing(self, finder: PathFinder, ended: asyncio.Event) -> None:
        plan = self.PLAN.build_worker_plan("w1")
        assert not finder.ensure_searched(plan, 0)
        await self.search(finder, ended, plan, seen=1)
        finder.apply(plan)
        assert len(finder.build_reports()) == 1
        assert finder.ensure_searched(replace(plan, paths=None), 2)
        finder.apply(replace(plan, paths=None))
        assert finder.build_reports() == ()

    async def test_a_round_without_paths_removes_the_entries_of_the_round_before(
        self, runtime: RuntimeFolder, finder: PathFinder
    ) -> None:
        plan = replace(self.PLAN, paths=None).build_worker_plan("w1")
        runtime.paths_file(0).write_text("of a round before")
        assert finder.ensure_searched(plan, 0), "nothing to wait for"
        finder.apply(plan)
        assert not runtime.paths_file(0).exists()
        assert finder.build_reports() == ()

    async def test_without_the_shim_nothing_is_tried_and_the_reason_is_reported(
        self, runtime: RuntimeFolder, switches: FakeSwitches
    ) -> None:
        finder = PathFinder(runtime, HIGH, no_shim="musl", labels=False, on_found=lambda: None)
        plan = self.PLAN.build_worker_plan("w1")
        assert finder.ensure_searched(plan, 0)
        finder.apply(plan)
        assert not runtime.paths_file(0).exists()
        assert [each.fault for each in finder.build_reports()] == [PathFault.NO_SHIM]
        assert not switches.sent

    async def test_two_launchers_agree_by_knocks(self, tmp_path: Path) -> None:
        """On loopback addresses. Both directions of their ranks' one connection are planned."""
        members = (Member("w0", "127.0.0.1", (0,)), Member("w1", "127.0.0.2", (1,)))
        wanted = (PlannedPath(1, 0, "s1"), PlannedPath(0, 1, "s1"))
        plan = replace(self.PLAN, members=members, paths=Paths(wanted, (Hop(S1, "s1"),), 20000, 20999))
        finders, runtimes = [], [RuntimeFolder(tmp_path / worker).create() for worker in ("w0", "w1")]
        for member, runtime in zip(members, runtimes, strict=True):
            ended = asyncio.Event()
            finders.append(PathFinder(runtime, member.address, "", labels=False, on_found=ended.set))
            await self.search(finders[-1], ended, plan.build_worker_plan(member.worker))
        for finder, member in zip(finders, members, strict=True):
            finder.apply(plan.build_worker_plan(member.worker))

        line = runtimes[1].paths_file(0).read_text().splitlines()[-1]
        ports = [int(port) for port in line.split()[3:]]
        assert line.startswith("connect 127.0.0.1 20000 ")
        assert {port % SPINES for port in ports} == {1}
        assert runtimes[0].paths_file(0).read_text() == "listen 127.0.0.1 0 20000\n"
        assert list(finders[1]._found[1, 0].ports) == ports[: path_search.PORTS_PER_PATH], (
            "those that fit both ways come first"
        )

    async def test_a_launcher_reports_that_an_expected_knock_never_came(
        self, runtime: RuntimeFolder, ended: asyncio.Event, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(path_finder, "KNOCK_WAIT_SECONDS", 0.01)
        wanted = (PlannedPath(1, 0, "s1"), PlannedPath(0, 1, "s1"))
        members = (Member("w0", "127.0.0.1", (0,)), Member("w1", "127.0.0.2", (1,)))
        plan = replace(
            self.PLAN, members=members, paths=Paths(wanted, (Hop(S1, "s1"),), 25000, 25999)
        ).build_worker_plan("w1")
        finder = PathFinder(runtime, "127.0.0.2", "", labels=False, on_found=ended.set)
        await self.search(finder, ended, plan)
        finder.apply(plan)
        assert [each.fault for each in finder.build_reports()] == [PathFault.NOT_FOUND]
        assert runtime.paths_file(0).read_text() == "listen 127.0.0.2 0 25001\n"

    async def test_a_path_is_in_force_when_its_connection_is_seen(
        self, runtime: RuntimeFolder, finder: PathFinder, ended: asyncio.Event, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plan = self.PLAN.build_worker_plan("w1")
        await self.search(finder, ended, plan)
        finder.apply(plan)
        seen: list[TcpConnection] = []
        monkeypatch.setattr(path_finder, "list_connections", lambda: seen)
        finder.check_connections(100.0)
        assert not finder.build_reports()[0].in_force
        port = int(runtime.paths_file(0).read_text().split()[-1])
        seen.append(TcpConnection(HIGH, port, LOW, 20000))
        finder.check_connections(100.5)
        assert not finder.build_reports()[0].in_force, "not checked before a second is over"
        finder.check_connections(101.0)
        assert finder.build_reports()[0].in_force

    async def test_a_connection_from_another_port_is_reported_once_it_persists(
        self, finder: PathFinder, ended: asyncio.Event, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plan = self.PLAN.build_worker_plan("w1")
        await self.search(finder, ended, plan)
        finder.apply(plan)
        monkeypatch.setattr(path_finder, "list_connections", lambda: [TcpConnection(HIGH, 45000, LOW, 20000)])
        finder.check_connections(100.0)
        assert finder.build_reports()[0].fault is PathFault.NONE
        finder.check_connections(100.0 + path_finder.PATH_CONFIRM_SECONDS)
        assert finder.build_reports()[0].fault is PathFault.NOT_TAKEN


def find_free_ports(count: int) -> list[int]:
    """Return ports that are free on every loopback address, outside of the range from which the kernel takes them."""
    found = []
    for port in range(20013, 29999, 11):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        found.append(port)
    return found[:count]


class TestKernel:
    def test_the_table_of_connections_is_read(self, tmp_path: Path) -> None:
        table = tmp_path / "tcp"
        rows = (
            "  sl  local_address rem_address   st tx_queue rx_queue",
            "   0: 0A01630A:61A8 0B01630A:4E21 01 00000000:00000000",
            "   1: 00000000:1F90 00000000:0000 0A 00000000:00000000",
        )
        table.write_text("\n".join(rows))
        six = tmp_path / "tcp6"
        loopback = "00000000000000000000000001000000"
        six.write_text(f"header\n 0: {loopback}:0001 {loopback}:0002 01 x")
        assert list_connections((table, six, tmp_path / "missing")) == [
            TcpConnection("10.99.1.10", 25000, "10.99.1.11", 20001),
            TcpConnection("::1", 1, "::1", 2),
        ]

    @pytest.mark.parametrize(
        ("content", "address"),
        [
            (struct.pack("=IBBBBIIHH4s", 113, 2, 11, 0, 0, 0, 0, 2, 0, bytes((10, 98, 0, 3))), "10.98.0.3"),
            (struct.pack("=IBBBBIIHH4s", 113, 2, 3, 0, 0, 0, 0, 2, 0, bytes((10, 98, 0, 3))), ""),
            (struct.pack("=IBBBBIIHHI16s", 113, 3, 3, 0, 0, 0, 0, 10, 0, 0, bytes(15) + b"\1"), "::1"),
            (struct.pack("=IBBBBII", 113, 2, 11, 0, 0, 0, 0), ""),
            (struct.pack("=IBBBBIIHH", 113, 2, 11, 0, 0, 0, 0, 2, 0), ""),
            (b"", ""),
        ],
        ids=["exceeded", "unreachable", "v6", "no sender", "half a sender", "nothing"],
    )
    def test_an_error_names_the_switch_at_which_the_hops_were_used_up(self, content: bytes, address: str) -> None:
        assert hop_trace._parse_switch_address(content) == address
