"""Paths on a real fabric: three leaves and three spines of the kernel's own routing, and sockets of processes without
privileges. What proves a path is the bytes on the spines' links."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from pacekeeper.runtime_folder import RuntimeFolder, write_json
from pacekeeper_analysis.protocol.plan import Hop, Member, Paths, Plan, PlannedPath
from pacekeeper_analysis.protocol.reports import Heartbeat, LauncherState, PathFault
from testing.network import paths
from testing.network.fabric import FabricHost, HostedLeafSpine, create_leaf_spine
from testing.network.paths import PathShim, build_python_command
from testing.training.launchers import wait_until_true

UNPRIVILEGED_ID = 65534
BULK = 1_000_000
RANK = Path(paths.__file__).parents[1] / "scripts" / "fabric_rank.py"

TRACE = """
import json, socket, sys
from pacekeeper.launcher.network.hop_trace import HopProbe, trace_hops
own, peer, port, hops, kind, *sources = sys.argv[1:]
kind = socket.SOCK_DGRAM if kind == "udp" else socket.SOCK_STREAM
found = trace_hops(own, [HopProbe(int(source), peer, int(port), int(hops)) for source in sources], 0.3, kind)
ends = {probe.source_port: end for probe, end in found.end_addresses.items()}
print(json.dumps([ends, [probe.source_port for probe in found.unavailable]]))
"""
SERVE = """
import os, socket, sys
listener = socket.socket()
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
listener.bind((sys.argv[1], 0))
listener.listen(64)
print(listener.getsockname()[1], flush=True)
while True:
    peer, (address, port) = listener.accept()
    header = peer.recv(16, socket.MSG_WAITALL)
    count, answer = int.from_bytes(header[:8], "big"), int.from_bytes(header[8:], "big")
    received = 0
    while received < count:
        received += len(peer.recv(1 << 16))
    peer.sendall(bytes(answer + 1))
    print(address, port, received, flush=True)
    kept = peer
"""
"""Takes what a client sends, then sends one byte more back than it requested first; keeps the connection open."""
SEND = """
import socket, sys
address, port, count, answer = sys.argv[1], *map(int, sys.argv[2:5])
client = socket.socket()
if len(sys.argv) > 5:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    client.bind(("", int(sys.argv[5])))
client.connect((address, port))
client.sendall(count.to_bytes(8, "big") + answer.to_bytes(8, "big") + bytes(count))
received = 0
while received < answer + 1:
    received += len(client.recv(1 << 16))
print(client.getsockname()[1], flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def fabric() -> Iterator[HostedLeafSpine]:
    with create_leaf_spine() as made:
        yield made


@contextmanager
def open_folder() -> Iterator[Path]:
    """Accessible to all users: pytest closes its own folders for others with each session."""
    with TemporaryDirectory(prefix="pacekeeper-test-") as name:
        os.chmod(name, 0o777)
        yield Path(name)


@pytest.fixture
def folder() -> Iterator[Path]:
    with open_folder() as folder:
        yield folder


@pytest.fixture(scope="module")
def shim() -> Iterator[PathShim]:
    with open_folder() as folder:
        yield paths.build_shim(folder)


def trace_hops(
    host: FabricHost, peer: str, hops: int, sources: range, kind: str = "tcp"
) -> tuple[dict[int, str], list[int]]:
    output = host.run(
        *build_python_command(TRACE),
        host.address,
        peer,
        "20001",
        str(hops),
        kind,
        *map(str, sources),
        user=UNPRIVILEGED_ID,
    )
    ends, taken = json.loads(output)
    return {int(port): end for port, end in ends.items()}, taken


def count_retransmits(host: FabricHost) -> int:
    """How often processes on it had to repeat a connection request."""
    names, values = (line.split() for line in host.run("cat", "/proc/net/netstat").splitlines()[:2])
    return int(values[names.index("TCPSynRetrans")])


class TestTrace:
    """Without privileges."""

    def test_packets_end_at_the_leaf_a_spine_the_far_leaf_and_the_peer(self, fabric: HostedLeafSpine) -> None:
        near, far, _ = fabric.hosts
        sources = range(25000, 25024)
        ends = [set(trace_hops(near, far.address, hops, sources)[0].values()) for hops in (1, 2, 3, 4)]
        assert ends[0] == {"10.97.0.1"}
        assert ends[1] == {address for address in fabric.hops if address.startswith("10.98.0.")}
        assert ends[2] == {"10.98.1.0", "10.98.1.2", "10.98.1.4"}
        assert ends[3] == {far.address}

    def test_the_reported_path_is_the_one_of_the_connection(self, fabric: HostedLeafSpine) -> None:
        """All 24 of them: spine s carries what the ports that lead there have sent."""
        near, far, _ = fabric.hosts
        server = far.start(*build_python_command(SERVE.replace(", 0))", ", 20001))")), far.address)
        assert server.stdout is not None
        server.stdout.readline()
        ends, taken = trace_hops(near, far.address, 2, range(25000, 25024))
        assert (len(ends), taken) == (24, [])
        before = fabric.read_sent_bytes(0)
        expected = [0, 0, 0]
        for number, (port, end) in enumerate(ends.items()):
            expected[int(fabric.hops[end][1:])] += (number + 1) * 10_000
            done = near.start(
                *build_python_command(SEND), far.address, "20001", str((number + 1) * 10_000), "0", str(port)
            )
            done.communicate("\n", timeout=300)
            assert done.returncode == 0
        server.kill()
        server.communicate()
        moved = [after - was for after, was in zip(fabric.read_sent_bytes(0), before, strict=True)]
        assert moved == pytest.approx(expected, rel=0.1)

    def test_datagrams_are_traced_too(self, fabric: HostedLeafSpine) -> None:
        near, far, _ = fabric.hosts
        ends, _ = trace_hops(near, far.address, 2, range(49200, 49212), "udp")
        assert len(ends) == 12
        assert len(set(ends.values())) == 3

    def test_ports_with_a_listener_are_reported(self, fabric: HostedLeafSpine) -> None:
        near, far, _ = fabric.hosts
        server = near.start(*build_python_command(SERVE.replace(", 0))", ", 25001))")), near.address)
        assert server.stdout is not None
        server.stdout.readline()
        ends, taken = trace_hops(near, far.address, 2, range(25000, 25003))
        server.kill()
        server.communicate()
        assert (set(ends), taken) == ({25000, 25002}, [25001])

    def test_missing_answers_end_the_search(self, fabric: HostedLeafSpine) -> None:
        near, far, _ = fabric.hosts
        fabric.filter_icmp()
        assert trace_hops(near, far.address, 2, range(25000, 25012)) == ({}, [])


class Host:
    """A launcher's part on one of the fabric's hosts."""

    def __init__(self, at: FabricHost, folder: Path, plan: Plan, worker: str) -> None:
        folder.mkdir(parents=True)
        folder.chmod(0o777)
        self.at, self.folder, self.worker = at, folder, worker
        self._process = at.start(
            sys.executable, "-m", "testing.network.path_finder_host", at.address, str(folder), user=UNPRIVILEGED_ID
        )
        self._send(plan.build_worker_plan(worker).to_json())

    def wait_until_ready(self) -> None:
        assert self._receive() == "ready"

    def begin(self) -> None:
        self._send("begin")
        assert self._receive() == "begun"

    def read_shim_lines(self, now: float = 0.0) -> list[str]:
        """The lines that the shim of its rank reads."""
        self._send(now)
        return list(self._receive()["lines"][0])

    def found(self) -> list[list[int]]:
        """Ports for each of its paths."""
        self._send(0.0)
        return list(self._receive()["found"])

    def read_reports(self, now: float) -> list[tuple[bool, str]]:
        """Of its paths: whether each is in force, and why not."""
        self._send(now)
        return [(report["in_force"], report["fault"]) for report in self._receive()["reports"]]

    def end(self) -> None:
        self._process.communicate(timeout=300)

    def _send(self, content: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(content) + "\n")
        self._process.stdin.flush()

    def _receive(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, self._process.stderr.read() if self._process.stderr is not None else ""
        return json.loads(line)


def count_half_open(host: FabricHost) -> int:
    """Connections to it whose other side has not answered its answer."""
    return len(host.run("ss", "-Htn", "state", "syn-recv").splitlines())


def build_plan(fabric: HostedLeafSpine, *wanted: PlannedPath, ranks: int = 2, membership: int = 2) -> Plan:
    """Rank i is worker wi on host i. s9 is a spine that is not there. Of the ports that are tried one in three goes by
    each of the others; of those of the first membership none goes by s1 in one direction."""
    members = tuple(Member(f"w{rank}", host.address, (rank,)) for rank, host in enumerate(fabric.hosts[:ranks]))
    hops = {**fabric.hops, "10.98.77.1": "s9"}
    named = tuple(Hop(address, spine) for address, spine in hops.items())
    return Plan(membership=membership, members=members, paths=Paths(wanted, named, 20000, 20511))


class Team:
    """Workers whose ranks are to connect as gloo's do: the higher address to the lower one."""

    def __init__(
        self,
        fabric: HostedLeafSpine,
        shim: PathShim,
        folder: Path,
        *wanted: PlannedPath,
        ranks: int = 2,
        membership: int = 2,
    ) -> None:
        self.fabric, self.shim = fabric, shim
        folder.chmod(0o777)
        plan = build_plan(fabric, *wanted, ranks=ranks, membership=membership)
        self.hosts = [
            Host(host, folder / f"{membership}-w{rank}", plan, f"w{rank}")
            for rank, host in enumerate(fabric.hosts[:ranks])
        ]
        self._running: list[subprocess.Popen[str]] = []
        for host in self.hosts:
            host.wait_until_ready()
        for host in self.hosts:
            host.begin()

    def wait_for_ports(self, rank: int, count: int = 1) -> list[int]:
        """From which it is to connect to the other, this many at least."""

        def find_ports() -> list[int]:
            (line, *_) = (*(line for line in self.hosts[rank].read_shim_lines() if line.startswith("connect")), "")
            ports = [int(port) for port in line.split()[3:]]
            return ports if len(ports) >= count else []

        return wait_until_true(find_ports, f"ports of rank {rank}")

    def transfer(self, connecting: int, listening: int, there: int, back: int) -> dict[tuple[int, int], int]:
        """Ranks with the shim: one connects to the other, sends `there` bytes and gets `back` bytes. Answers bytes by
        leaf and spine: what each leaf has sent up to each spine, as far as it is more than small change."""
        before = [self.fabric.read_sent_bytes(leaf) for leaf in range(self.fabric.leaves)]
        server, port = self._start(listening, SERVE)
        client, _ = self._start(connecting, SEND, self.hosts[listening].at.address, port, str(there), str(back))
        self._running += [server, client]
        moved = {
            (leaf, spine): self.fabric.read_sent_bytes(leaf)[spine] - before[leaf][spine]
            for leaf in range(self.fabric.leaves)
            for spine in range(self.fabric.spines)
        }
        return {link: count for link, count in moved.items() if count > 100_000}

    def _start(self, rank: int, program: str, *arguments: str) -> tuple[subprocess.Popen[str], str]:
        """The process, and its first line."""
        host = self.hosts[rank]
        environment = self.shim.build_environment(RuntimeFolder(host.folder).paths_file(0))
        process = host.at.start(
            *build_python_command(program),
            *(arguments or (host.at.address,)),
            user=UNPRIVILEGED_ID,
            environment=environment,
        )
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        return process, line.strip()

    def end(self) -> None:
        for process in self._running:
            process.kill()
            process.communicate()
        for host in self.hosts:
            host.end()


class TestPlannedPaths:
    @pytest.mark.parametrize("spine", [0, 1, 2])
    def test_the_side_that_connects_sends_by_the_planned_spine(
        self, fabric: HostedLeafSpine, shim: PathShim, folder: Path, spine: int
    ) -> None:
        team = Team(fabric, shim, folder, PlannedPath(1, 0, f"s{spine}"))
        team.wait_for_ports(1)
        moved = team.transfer(1, 0, there=BULK, back=0)
        assert list(moved) == [(1, spine)]
        assert team.hosts[1].read_reports(100.0) == [(True, "")]
        team.end()

    @pytest.mark.parametrize("spine", [0, 1, 2])
    def test_the_side_that_is_connected_to_sends_by_it(
        self, fabric: HostedLeafSpine, shim: PathShim, folder: Path, spine: int
    ) -> None:
        team = Team(fabric, shim, folder, PlannedPath(0, 1, f"s{spine}"))
        team.wait_for_ports(1)
        moved = team.transfer(1, 0, there=0, back=BULK)
        assert list(moved) == [(0, spine)]
        assert team.hosts[0].read_reports(100.0) == [(True, "")]
        team.end()

    def test_both_directions_of_one_connection_take_their_spines(
        self, fabric: HostedLeafSpine, shim: PathShim, folder: Path
    ) -> None:
        team = Team(fabric, shim, folder, PlannedPath(0, 1, "s2"), PlannedPath(1, 0, "s1"))
        assert all(team.hosts[1].found())
        assert sorted(team.transfer(1, 0, there=BULK, back=BULK)) == [(0, 2), (1, 1)]
        assert [host.read_reports(100.0) for host in team.hosts] == [[(True, "")], [(True, "")]]
        team.end()

    def test_pods_are_one_hop_further_and_their_nodes_admit_probed_connections(
        self, shim: PathShim, folder: Path
    ) -> None:
        """Nodes follow connections and drop what belongs to none, as kube-proxy has it: a probe in the
        other direction must not have spoiled the ports for it."""
        with create_leaf_spine(pods=True) as fabric:
            team = Team(fabric, shim, folder, PlannedPath(0, 1, "s2"), PlannedPath(1, 0, "s1"))
            assert all(team.hosts[1].found())
            before = count_retransmits(fabric.hosts[1])
            assert sorted(team.transfer(1, 0, there=BULK, back=BULK)) == [(0, 2), (1, 1)]
            assert count_retransmits(fabric.hosts[1]) == before
            assert [host.read_reports(100.0) for host in team.hosts] == [[(True, "")], [(True, "")]]
            team.end()

    def test_successive_rounds_probe_ports_that_nodes_do_not_track_yet(self, shim: PathShim, folder: Path) -> None:
        """A port that was tried towards a knock is shut for two minutes: what would come back from there is dropped."""
        with create_leaf_spine(pods=True) as fabric:
            for membership in (1, 2):
                planned = PlannedPath(0, 1, "s2"), PlannedPath(1, 0, "s2")
                team = Team(fabric, shim, folder, *planned, membership=membership)
                assert all(team.hosts[1].found())
                assert count_half_open(fabric.hosts[1]) == 0
                team.end()

    def test_the_next_port_is_used_if_the_planned_one_is_taken(
        self, fabric: HostedLeafSpine, shim: PathShim, folder: Path
    ) -> None:
        team = Team(fabric, shim, folder, PlannedPath(1, 0, "s2"))
        first, _ = team.wait_for_ports(1, count=2)
        thief = fabric.hosts[1].start(*build_python_command(SERVE.replace(", 0))", f", {first}))")), "0.0.0.0")
        assert thief.stdout is not None
        thief.stdout.readline()
        assert list(team.transfer(1, 0, there=BULK, back=0)) == [(1, 2)]
        thief.kill()
        thief.communicate()
        team.end()

    def test_switches_that_answer_six_at_once_are_enough(
        self, fabric: HostedLeafSpine, shim: PathShim, folder: Path
    ) -> None:
        """Linux's default: as real switches do, it answers few."""
        fabric.set_on_switches("net.ipv4.icmp_ratelimit", 1000)
        team = Team(fabric, shim, folder, PlannedPath(1, 0, "s0"))
        assert list(team.transfer(1, 0, there=BULK, back=0)) == [(1, 0)]
        team.end()

    def test_labels_for_roce_are_found_by_datagrams(
        self, fabric: HostedLeafSpine, shim: PathShim, folder: Path
    ) -> None:
        """Unproven beyond this: no network card was used."""
        team = Team(fabric, shim, folder, PlannedPath(0, 1, "s1"))
        (line,) = (line for line in team.hosts[0].read_shim_lines() if line.startswith("label"))
        _, address, label = line.split()
        near, far, _ = fabric.hosts
        assert address == far.address
        output = near.run(
            *build_python_command(TRACE),
            near.address,
            far.address,
            "4791",
            "2",
            "udp",
            str(0xC000 + int(label)),
            user=UNPRIVILEGED_ID,
        )
        assert list(json.loads(output)[0].values()) == ["10.98.0.3"]
        team.end()


class TestFallback:
    """A connection is established despite any fault of its path; and the launcher reports the fault."""

    def test_where_icmp_is_filtered(self, fabric: HostedLeafSpine, shim: PathShim, folder: Path) -> None:
        fabric.filter_icmp()
        team = Team(fabric, shim, folder, PlannedPath(1, 0, "s0"))
        assert sum(team.transfer(1, 0, there=BULK, back=0).values()) >= BULK
        assert team.hosts[1].read_reports(100.0) == [(False, PathFault.FILTERED)]
        team.end()

    def test_where_a_spine_drops_all_packets(self, fabric: HostedLeafSpine, shim: PathShim, folder: Path) -> None:
        fabric.cut_link(0, 2, propagate=False)
        team = Team(fabric, shim, folder, PlannedPath(1, 0, "s2"))
        assert team.hosts[1].read_reports(100.0) == [(False, PathFault.BLACK_HOLE)]
        assert [line.split()[0] for line in team.hosts[1].read_shim_lines()] == ["listen"]
        team.end()

    def test_where_the_spine_is_not_there(self, fabric: HostedLeafSpine, shim: PathShim, folder: Path) -> None:
        """As when a Fabric names another network's switches."""
        team = Team(fabric, shim, folder, PlannedPath(1, 0, "s9"))
        assert sum(team.transfer(1, 0, there=BULK, back=0).values()) >= BULK
        assert team.hosts[1].read_reports(100.0) == [(False, PathFault.NOT_FOUND)]
        team.end()

    def test_where_a_label_puts_a_peer_below_another_leaf(self, shim: PathShim, folder: Path) -> None:
        """What is planned between the two passes no spine at all."""
        with create_leaf_spine(hosts=2) as fabric:
            team = Team(fabric, shim, folder, PlannedPath(1, 0, "s1"))
            assert team.transfer(1, 0, there=BULK, back=0) == {}, "they are below one leaf"
            assert team.hosts[1].read_reports(100.0) == [(False, PathFault.NOT_FOUND)]
            team.end()

    def test_where_addresses_are_rewritten_on_the_way(
        self, fabric: HostedLeafSpine, shim: PathShim, folder: Path
    ) -> None:
        fabric.translate_addresses(1)
        team = Team(fabric, shim, folder, PlannedPath(0, 1, "s1"))
        team.transfer(1, 0, there=0, back=BULK)
        assert team.hosts[0].read_reports(100.0) == [(False, "")]
        assert team.hosts[0].read_reports(110.0) == [(False, PathFault.TRANSLATED)]
        team.end()

    def test_where_all_ports_are_taken(self, fabric: HostedLeafSpine, shim: PathShim, folder: Path) -> None:
        """The listener's: its owner was there first."""
        thief = fabric.hosts[0].start(
            *build_python_command(SERVE.replace(", 0))", ", 20000))")), fabric.hosts[0].address
        )
        assert thief.stdout is not None
        thief.stdout.readline()
        team = Team(fabric, shim, folder, PlannedPath(0, 1, "s1"))
        assert team.hosts[0].read_reports(100.0) == [(False, PathFault.PORTS_TAKEN)]
        assert sum(team.transfer(1, 0, there=0, back=BULK).values()) >= BULK
        thief.kill()
        thief.communicate()
        team.end()


@contextmanager
def drop_privileges() -> Iterator[None]:
    os.seteuid(UNPRIVILEGED_ID)
    try:
        yield
    finally:
        os.seteuid(0)


class Job:
    """Two workers with real launchers, one below each of the first two leaves, whose ranks all-reduce over gloo."""

    SECONDS = 4.0

    def __init__(self, fabric: HostedLeafSpine, folder: Path, number: int, first_port: int) -> None:
        self.fabric, self.folder, self.first_port = fabric, folder / f"job{number}", first_port
        self.folder.mkdir()
        self.hosts = [fabric.hosts[number], fabric.hosts[2 + number]]
        self.runtimes = [RuntimeFolder(self.folder / f"w{worker}").create() for worker in (0, 1)]
        for path in (self.folder, *self.folder.rglob("*")):
            path.chmod(0o777)
        self.logs = [self.folder / f"log{worker}" for worker in (0, 1)]
        self._membership = 0

    @property
    def launchers(self) -> list[dict[str, Any]]:
        """As `namespaced_launchers` starts them."""
        return [
            {
                "namespace": host.namespace,
                "log": str(log),
                "environment": {
                    "PACEKEEPER_WORKER": f"w{worker}",
                    "PACEKEEPER_POD_IP": host.address,
                    "PACEKEEPER_RUNTIME": str(self.runtimes[worker].root),
                    "FOLDER": str(self.folder),
                    "SECONDS": str(self.SECONDS),
                    "HOME": str(self.folder),
                },
            }
            for worker, (host, log) in enumerate(zip(self.hosts, self.logs, strict=True))
        ]

    def read_heartbeat(self, worker: int) -> Heartbeat:
        return Heartbeat.from_json(json.loads(self.runtimes[worker].heartbeat.read_text()))

    def begin(self, spine: str) -> None:
        """The next membership, whose traffic goes by this spine in both directions."""
        self._wait(lambda: all(runtime.liveness.exists() for runtime in self.runtimes), "launchers")
        self._wait(
            lambda: self.read_heartbeat(0).rendezvous_port, "the rendezvous port"
        )  # not yet in the first heartbeat
        self._membership += 1
        (self.folder / "go").unlink(missing_ok=True)
        members = tuple(Member(f"w{rank}", host.address, (rank,)) for rank, host in enumerate(self.hosts))
        hops = tuple(Hop(address, name) for address, name in self.fabric.hops.items())
        wanted = (PlannedPath(0, 1, spine), PlannedPath(1, 0, spine))
        plan = Plan(
            version=self._membership,
            membership=self._membership,
            round=self._membership,
            members=members,
            store_port=self.read_heartbeat(0).rendezvous_port or Plan.store_port,
            paths=Paths(wanted, hops, self.first_port, self.first_port + 999),
        ).with_membership_secret(Plan(), "5ec2e7" * 8)
        for worker, runtime in enumerate(self.runtimes):
            with drop_privileges():  # a plan may be read by its own user only, from its first moment
                write_json(runtime.plan, plan.build_worker_plan(f"w{worker}").to_json())
            runtime.operator_contact.touch()

    def wait_until_ready(self) -> None:
        ready = [self.folder / f"ready-{self._membership}-{rank}" for rank in (0, 1)]
        self._wait(lambda: all(file.exists() for file in ready), "ranks")

    def wait_until_in_force(self) -> None:
        """The launchers have seen their ranks' connections on the paths."""

        def in_force() -> bool:
            heartbeats = [self.read_heartbeat(worker) for worker in (0, 1)]
            running = all(heartbeat.state is LauncherState.RUNNING and heartbeat.paths for heartbeat in heartbeats)
            return running and all(path.in_force for heartbeat in heartbeats for path in heartbeat.paths)

        self._wait(in_force, "paths in force")

    def go(self) -> None:
        (self.folder / "go").touch()

    def rate(self) -> float:
        """Mbit/s that each rank has sent."""
        file = self.folder / f"rate-{self._membership}"
        self._wait(lambda: file.exists() and file.read_text(), "a rate")
        return float(file.read_text())

    def _wait(self, condition: Any, what: str) -> None:
        try:
            wait_until_true(condition, what, seconds=300.0)
        except AssertionError as error:
            raise AssertionError(f"{error}\n" + "\n".join(log.read_text() for log in self.logs)) from None


def test_two_jobs_that_collide_are_faster_on_separate_paths(shim: PathShim, folder: Path) -> None:
    """gloo's all-reduces in pods, by ranks of real launchers without privileges. The next round takes the new paths."""
    with create_leaf_spine(hosts=2, pods=True) as fabric:
        fabric.set_all_rates("50mbit")
        jobs = [Job(fabric, folder, number, 20000 + 1000 * number) for number in (0, 1)]
        launchers = [launcher for job in jobs for launcher in job.launchers]
        running = subprocess.Popen(
            [sys.executable, "-m", "testing.network.namespaced_launchers", RANK, json.dumps(launchers)],
            env={**os.environ, **shim.build_environment(None), "PACEKEEPER_PREVIOUS_PRELOAD": ""},
        )
        try:
            rates = {}
            for spines in (("s0", "s0"), ("s1", "s2")):
                for job, spine in zip(jobs, spines, strict=True):
                    job.begin(spine)
                for job in jobs:
                    job.wait_until_ready()
                before = [fabric.read_sent_bytes(leaf) for leaf in (0, 1)]
                for job in jobs:
                    job.go()
                rates[spines] = [job.rate() for job in jobs]
                reported = [job.read_heartbeat(worker).paths for job in jobs for worker in (0, 1)]
                for leaf in (0, 1):
                    moved = [after - was for after, was in zip(fabric.read_sent_bytes(leaf), before[leaf], strict=True)]
                    used = {int(spine[1:]) for spine in spines}
                    assert all((count > BULK) == (spine in used) for spine, count in enumerate(moved)), (
                        moved,
                        reported,
                    )
                for job in jobs:
                    job.wait_until_in_force()
            print(f"Mbit/s: {rates}")
            together, apart = rates["s0", "s0"], rates["s1", "s2"]
            assert sum(apart) > 1.5 * sum(together)
        finally:
            running.kill()
            running.wait()
