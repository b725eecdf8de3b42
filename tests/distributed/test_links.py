"""Links between real hosts (namespaces with cables between them), slowed by the kernel: what connections show of them,
and what a probe between launchers measures."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest

from pacekeeper_analysis.network import delay_matrix, link_probe
from pacekeeper_analysis.network.delay_matrix import LinkDiagnosis, SpotKind
from pacekeeper_analysis.network.link_probe import LinkProbeVerdict, ProbeParty
from pacekeeper_analysis.protocol.reports import BlockedConnection, Evidence, LinkProbe
from testing.network.namespaces import NamespaceNetwork, create_network

ATTEMPTS = 10
SLOW = "80mbit"
USUAL = "400mbit"
"""Far less than a busy machine's processors carry."""


@pytest.fixture
def four() -> Iterator[NamespaceNetwork]:
    with create_network(4) as made:
        yield made


class TestConnections:
    """The diagnosis of the sidecars' samples of the ranks' connections. Rank i is worker wi."""

    @contextmanager
    def hosts(
        self, made: NamespaceNetwork, folder: Path, shape: str, kind: str = "launched"
    ) -> Iterator[list[subprocess.Popen[str]]]:
        folder.chmod(0o777)
        addresses = [host.address for host in made.hosts]
        places = [folder / str(rank) for rank in range(len(addresses))]
        for place in places:
            place.mkdir()
            place.chmod(0o777)
        ranks = [
            host.python("testing.network.link_sender", str(place), str(rank), shape, kind, *addresses)
            for rank, (host, place) in enumerate(zip(made.hosts, places, strict=True))
        ]
        try:
            yield ranks
        finally:
            for rank in ranks:
                rank.communicate("\n", timeout=300)

    def shown(
        self, made: NamespaceNetwork, folder: Path, shape: str, kind: str = "launched"
    ) -> tuple[LinkDiagnosis, list[Evidence]]:
        with self.hosts(made, folder, shape, kind) as ranks:
            evidence = [Evidence.from_json(json.loads(_read_line(rank))) for rank in ranks]
        return delay_matrix.diagnose_links(*delay_matrix.join_link_ends(evidence)), evidence

    def test_a_slow_link_among_all_pairs_is_found_by_its_two_ends(self, four: NamespaceNetwork, tmp_path: Path) -> None:
        """The ranks are watched; in the other tests they have launchers."""
        four.slow_pair(four.hosts[1], four.hosts[2], SLOW, quick_acknowledgements=True)
        shown, _ = self.shown(four, tmp_path, "all", "watched")
        (hot,) = shown.hot_spots
        assert (hot.kind, hot.source, hot.destination) == (SpotKind.LINK, 1, 2)
        assert hot.bytes_per_second == pytest.approx(10e6, rel=0.3), "the shaper's 80 Mbit/s"
        assert (shown.cells, shown.unknown_ends) == (12, 0)

    def test_where_acknowledgements_wait_in_the_slow_queue_the_direction_is_right(
        self, four: NamespaceNetwork, tmp_path: Path
    ) -> None:
        """The return time depends on which connection has filled the queue: the finding is a pair or a link."""
        four.slow_pair(four.hosts[1], four.hosts[2], SLOW)
        (hot,) = self.shown(four, tmp_path, "all")[0].hot_spots
        assert hot.kind in (SpotKind.LINK, SpotKind.PAIR)
        assert (hot.source, hot.destination) == (1, 2)

    def test_packets_lost_on_a_route_block_only_the_ends_of_that_route(
        self, four: NamespaceNetwork, tmp_path: Path
    ) -> None:
        """A slow peer, and one that does not read, move, or have memory: those are no lost packets."""
        four.slow_pair(four.hosts[2], four.hosts[3], "8mbit")
        with self.hosts(four, tmp_path, "all") as ranks:
            for rank in ranks:
                _read_line(rank)
            four.drop_packets(four.hosts[0], four.hosts[1])
            for _ in range(ATTEMPTS):  # until both ends have waited for long enough
                for rank in ranks:
                    _send_request(rank, "blocked")
                blocked = [[BlockedConnection(**end) for end in json.loads(_read_line(rank))] for rank in ranks]
                if blocked[0] and blocked[1]:
                    break
        assert [[end.remote.rpartition(":")[0] for end in of] for of in blocked[2:]] == [[], []]
        (there,) = blocked[0]
        assert (there.rank, there.remote) == (0, f"{four.hosts[1].address}:5000")
        assert there.seconds >= 1.5
        assert {end.remote.rpartition(":")[0] for end in blocked[1]} == {four.hosts[0].address}, "no bytes received"

    @pytest.mark.parametrize("direction", ["egress", "ingress"])
    def test_a_slow_side_is_a_row_or_column(self, four: NamespaceNetwork, tmp_path: Path, direction: str) -> None:
        """A probe distinguishes the two: the acknowledgements of one side wait in the queue of the other."""
        slow = four.slow_egress if direction == "egress" else four.slow_ingress
        slow(four.hosts[1], "160mbit")
        for attempt in range(ATTEMPTS):  # one connection may fill the queue: then its side has too few cells to judge
            folder = tmp_path / str(attempt)
            folder.mkdir()
            hot_spots = self.shown(four, folder, "all")[0].hot_spots
            if SpotKind.PAIR not in {hot.kind for hot in hot_spots}:
                break
        (hot,) = hot_spots
        assert hot.kind in (SpotKind.SENDER, SpotKind.RECEIVER)
        assert {hot.source, hot.destination} == {1, None}

    def test_in_a_ring_only_the_pair_can_be_named(self, four: NamespaceNetwork, tmp_path: Path) -> None:
        four.slow_egress(four.hosts[1], SLOW)
        shown, evidence = self.shown(four, tmp_path, "next")
        (hot,) = shown.hot_spots
        assert (hot.kind, hot.pairs) == (SpotKind.PAIR, ((1, 2),))
        renamed = [_translate_address(answer, "10.217.0.2", "192.0.2.9") for answer in evidence]
        through_nat = delay_matrix.diagnose_links(*delay_matrix.join_link_ends([renamed[0], evidence[1], *renamed[2:]]))
        assert through_nat.unknown_ends == 4, "both ends of both of its connections"
        assert all(1 not in pair for spot in through_nat.hot_spots for pair in spot.pairs), "unknown, and not wrong"


def _read_line(rank: subprocess.Popen[str]) -> str:
    assert rank.stdout is not None
    return rank.stdout.readline()


def _send_request(rank: subprocess.Popen[str], what: str) -> None:
    assert rank.stdin is not None
    rank.stdin.write(f"{what}\n")
    rank.stdin.flush()


def _translate_address(answer: Evidence, address: str, seen: str) -> Evidence:
    """As the peers of a host behind address translation see it."""
    return replace(answer, links=tuple(replace(end, remote=end.remote.replace(address, seen)) for end in answer.links))


@dataclass(frozen=True)
class Launchers:
    """Launchers' ends of a probe, one per host."""

    parties: Sequence[ProbeParty]
    _measure: Callable[[Sequence[ProbeParty], str], link_probe.LinkProbeResult]

    def probe(self, name: str, others: int = 2) -> link_probe.LinkProbeResult:
        return self._measure(self.parties[2 : 2 + others], name)


class TestProbe:
    """From rank 0's worker w0 to w1; w2 and w3 are the controls."""

    @contextmanager
    def launchers(self, made: NamespaceNetwork, folder: Path) -> Iterator[Launchers]:
        folder.chmod(0o777)
        running = [host.python("testing.network.link_prober_host", host.address, str(folder)) for host in made.hosts]
        try:
            ports = [int(one.stdout.readline()) for one in running if one.stdout is not None]
            parties = [
                ProbeParty(f"w{i}", f"{host.address}:{port}")
                for i, (host, port) in enumerate(zip(made.hosts, ports, strict=True))
            ]

            def measure(others: Sequence[ProbeParty], name: str) -> dict[str, list[LinkProbe]]:
                request = link_probe.plan_probe(name, parties[0], parties[1], others)
                for party, one in zip(parties, running, strict=True):
                    targets = dict(zip(request.sources, request.targets, strict=True)).get(party.worker, ())
                    task = {"name": name, "targets": [asdict(target) for target in targets]}
                    assert one.stdin is not None
                    one.stdin.write((json.dumps(task) if targets else "") + "\n")
                    one.stdin.flush()
                answers = {}
                for party, one in zip(parties, running, strict=True):
                    if party.worker in request.sources:
                        assert one.stdout is not None
                        found = json.loads(one.stdout.readline())["probes"]
                        answers[party.worker] = [LinkProbe(**probe) for probe in found]
                return answers

            def measure_completely(others: Sequence[ProbeParty], name: str) -> link_probe.LinkProbeResult:
                """Measure again where a host was too busy for a probe's time limit: no route here is cut."""
                for attempt in range(ATTEMPTS):
                    answers = measure(others, f"{name}-{attempt}")
                    if not any(probe.failed for probes in answers.values() for probe in probes):
                        break
                return link_probe.evaluate_probe(answers, "w0", "w1")

            yield Launchers(parties, measure_completely)
        finally:
            for one in running:
                one.communicate(timeout=300)

    def test_link_sender_receiver_and_no_fault_are_distinguished(self, four: NamespaceNetwork, tmp_path: Path) -> None:
        s, d, *_ = four.hosts
        for host in four.hosts:
            four.slow_ingress(host, USUAL)
        with self.launchers(four, tmp_path) as made:
            assert made.probe("well").verdict is LinkProbeVerdict.NOTHING
            four.slow_pair(s, d, SLOW)
            assert made.probe("pair").verdict is LinkProbeVerdict.LINK
            four.restore_speed(s)
            four.slow_pair(d, s, SLOW)
            assert made.probe("back").verdict is LinkProbeVerdict.REVERSED
            four.restore_speed(d)
            four.slow_egress(s, SLOW)
            result = made.probe("egress")
            assert result.verdict is LinkProbeVerdict.SENDER, result.message
            four.restore_speed(s)
            four.slow_ingress(d, SLOW)
            result = made.probe("ingress")
            assert result.verdict is LinkProbeVerdict.RECEIVER, result.message

    def test_three_launchers_are_enough(self, four: NamespaceNetwork, tmp_path: Path) -> None:
        for host in four.hosts:
            four.slow_ingress(host, USUAL)
        with self.launchers(four, tmp_path) as made:
            four.slow_egress(four.hosts[0], SLOW)
            assert made.probe("egress", others=1).verdict is LinkProbeVerdict.SENDER
            four.restore_speed(four.hosts[0])
            four.slow_ingress(four.hosts[1], SLOW)
            assert made.probe("ingress", others=1).verdict is LinkProbeVerdict.RECEIVER
