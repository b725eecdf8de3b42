"""The network of leaves and spines itself, by the kernel's routing: failures, their propagation, and recovery."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import testcluster.fabric
from testcluster.leaf_spine import BrokenLinks
from testcluster.shell import run_command
from testing.network.fabric import FabricHost, HostedLeafSpine, create_leaf_spine
from testing.network.paths import build_python_command

PORT = 20001
SOURCES = range(25000, 25024)
LISTEN = """
import socket, sys
listener = socket.create_server((sys.argv[1], int(sys.argv[2])), backlog=128)
print("listens", flush=True)
sys.stdin.readline()
"""
CONNECT = """
import errno, select, socket, struct, sys, time
address, port, *sources = sys.argv[1], *map(int, sys.argv[2:])
poll, waiting = select.poll(), {}
for source in sources:
    client = socket.socket()
    client.setblocking(False)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # nothing holds the port then
    client.bind(("", source))
    if client.connect_ex((address, port)) != errno.EINPROGRESS:
        continue
    waiting[client.fileno()] = client, source
    poll.register(client, select.POLLOUT)
made, deadline = [], time.monotonic() + 0.5  # less than a second, after which the kernel tries again
while waiting:
    left = deadline - time.monotonic()
    for descriptor, _ in poll.poll(max(0, 1000 * left)):  # once more after the deadline, for what is there
        client, source = waiting.pop(descriptor)
        poll.unregister(descriptor)
        if not client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            made.append(source)
    if left <= 0:
        break
print(*made)
"""


@pytest.fixture(scope="module")
def shared() -> Iterator[HostedLeafSpine]:
    with create_leaf_spine() as made:
        yield made


@pytest.fixture
def fabric(shared: HostedLeafSpine) -> HostedLeafSpine:
    shared.ensure()
    return shared


@contextmanager
def start_listener(host: FabricHost) -> Iterator[None]:
    server = host.start(*build_python_command(LISTEN), host.address, str(PORT))
    assert server.stdout is not None
    assert server.stdout.readline(), server.communicate()[1]
    yield
    server.communicate("\n", timeout=300)


def count_connections(host: FabricHost, peer: FabricHost) -> int:
    """How many of the connections to it are made that take other routes, as hashing has it."""
    with start_listener(peer):
        return len(host.run(*build_python_command(CONNECT), peer.address, str(PORT), *map(str, SOURCES)).split())


def list_used_spines(fabric: HostedLeafSpine, host: FabricHost, peer: FabricHost) -> set[int]:
    """The spines by which a host's connections to another one go, twice the same; all are made.

    A neighbor that is resolved adds some bytes to any spine, but not to the same one each time.
    """
    first, second = (_list_spines_once(fabric, host, peer) for _ in range(2))
    return first & second


def _list_spines_once(fabric: HostedLeafSpine, host: FabricHost, peer: FabricHost) -> set[int]:
    before = fabric.read_sent_bytes(host.leaf)
    assert count_connections(host, peer) == len(SOURCES)
    after = fabric.read_sent_bytes(host.leaf)
    return {spine for spine, (now, was) in enumerate(zip(after, before, strict=True)) if now > was + 200}


def test_a_cut_that_all_switches_know_loses_nothing_and_heals(fabric: HostedLeafSpine) -> None:
    near, far, _ = fabric.hosts
    assert list_used_spines(fabric, near, far) == {0, 1, 2}
    for _ in range(2):  # the second time changes nothing
        fabric.cut_link(0, 1)
        assert fabric.find_broken() == BrokenLinks(frozenset({(0, 1)}), frozenset({(0, 1)}))
        assert list_used_spines(fabric, near, far) == {0, 2}
        assert list_used_spines(fabric, far, near) == {0, 2}
    fabric.heal_link(0, 1)
    assert list_used_spines(fabric, near, far) == list_used_spines(fabric, far, near) == {0, 1, 2}


def test_packets_are_lost_on_a_link_whose_cut_is_not_announced(fabric: HostedLeafSpine) -> None:
    near, far, _ = fabric.hosts
    fabric.cut_link(0, 1, propagate=False)
    assert fabric.find_broken() == BrokenLinks(frozenset({(0, 1)}), frozenset())
    assert 0 < count_connections(far, near) < len(SOURCES)
    fabric.cut_link(0, 1)
    assert list_used_spines(fabric, far, near) == {0, 2}, "now the cut is announced"


def test_another_hash_seed_sends_the_same_connections_over_other_links(fabric: HostedLeafSpine) -> None:
    near, far, _ = fabric.hosts

    def carried() -> list[int]:
        """Bytes by each spine, as the leaf at the other end has got them: the least of several times.

        A neighbor that is resolved and a packet that is sent again add some to one of them.
        """
        times = []
        for _ in range(3):
            before = fabric.read_received_bytes(far.leaf)
            assert count_connections(near, far) == len(SOURCES)
            times.append([now - was for now, was in zip(fabric.read_received_bytes(far.leaf), before, strict=True)])
        return [min(by_spine) for by_spine in zip(*times, strict=True)]

    first = carried()
    assert carried() == pytest.approx(first, abs=200)
    fabric.reseed_hashes(1)
    assert carried() != pytest.approx(first, abs=200)


def test_without_any_spine_all_switches_report_no_route(fabric: HostedLeafSpine) -> None:
    near, far, other = fabric.hosts
    for spine in range(3):
        fabric.cut_link(0, spine)
    assert count_connections(near, far) == count_connections(far, near) == 0
    assert list_used_spines(fabric, far, other) == {0, 1, 2}
    for spine in range(3):
        fabric.heal_link(0, spine)
    assert list_used_spines(fabric, near, far) == {0, 1, 2}


def test_a_slowed_link_is_as_fast_as_the_others_after_its_repair(fabric: HostedLeafSpine) -> None:
    fabric.set_all_rates("50mbit")
    fabric.slow_link(2, 0, "10mbit")
    assert fabric.list_rates() == {link: 10e6 if link == (2, 0) else 50e6 for link in fabric.links}
    fabric.heal_link(2, 0, "50mbit")
    assert set(fabric.list_rates().values()) == {50e6}
    fabric.set_all_rates("")
    assert fabric.list_rates() == {}


def test_the_printed_fabric_shows_the_known_links(
    fabric: HostedLeafSpine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = tmp_path / "fabric.json"
    record.write_text('{"nodes": 3, "ports": 1, "rate": "50mbit"}')
    monkeypatch.setattr(testcluster.fabric, "_LAYOUT_FILE", record)
    monkeypatch.setattr(testcluster.fabric, "get_network", lambda: fabric)
    fabric.set_all_rates("50mbit")
    assert testcluster.fabric.build_manifest()["spec"]["exceptions"] == []
    fabric.cut_link(0, 1)
    fabric.cut_link(1, 2, propagate=False)
    fabric.slow_link(2, 0, "10mbit")
    spec = testcluster.fabric.build_manifest()["spec"]
    assert spec["uplink"] == {"capacity": "50M"}
    assert spec["exceptions"] == [
        {"leaf": "l1", "spine": "s2", "state": "Down"},
        {"leaf": "l3", "spine": "s1", "state": "Slow", "capacity": "10M"},
    ]


def test_a_half_removed_fabric_is_created_again(fabric: HostedLeafSpine) -> None:
    near, far, _ = fabric.hosts
    fabric.cut_link(0, 1)
    fabric.slow_link(1, 1, "1mbit")
    run_command("ip", "-n", fabric.get_leaf_namespace(0), "link", "delete", "up2")
    run_command("ip", "netns", "delete", fabric.get_spine_namespace(0))
    Path("/run/netns", fabric.get_spine_namespace(0)).touch()  # as an `ip netns add` leaves it that is killed half-way
    fabric.ensure()
    assert (fabric.find_broken(), fabric.list_rates()) == (BrokenLinks(), {})
    assert list_used_spines(fabric, near, far) == list_used_spines(fabric, far, near) == {0, 1, 2}


def test_pods_of_a_node_with_two_ports_outlive_one_of_them() -> None:
    with create_leaf_spine(leaves=2, spines=2, pods=True, planes=2) as fabric:
        near, far = fabric.hosts
        assert list_used_spines(fabric, near, far) == {0, 1, 2, 3}
        first, second = fabric.list_cables(fabric.machines[0])
        first.far.set_plugged(False)
        fabric.update_routes()
        assert list_used_spines(fabric, near, far) == {2, 3}
        assert list_used_spines(fabric, far, near) == {2, 3}
        second.far.set_plugged(False)
        fabric.update_routes()
        assert count_connections(far, near) == 0
        first.far.set_plugged(True)
        fabric.update_routes()
        assert list_used_spines(fabric, near, far) == {0, 1}
