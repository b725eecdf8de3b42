"""A copy on another node is whole, or it does not exist. A failure of the copy does not stop the training."""

from __future__ import annotations

import errno
import logging
import math
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pacekeeper.checkpointing.rank_state import RANK_STATE_BYTES
from pacekeeper.checkpointing.snapshots import peer_link, peer_replication
from pacekeeper.checkpointing.snapshots.peer_link import PeerLink, close_connection
from pacekeeper.checkpointing.snapshots.peer_replication import (
    MembershipSecret,
    ReplicaReceiver,
    ReplicaSender,
    ReplicaTarget,
)
from pacekeeper.checkpointing.snapshots.snapshot_slots import SLOT_HEADER_BYTES, PeerSlot, SlotMemory, Snapshots
from pacekeeper.checkpointing.versions import NO_STATE_VERSION, StateVersion
from pacekeeper.message_authentication import AuthenticationError
from testing.training.launchers import wait_until_true

KEY = "3"
SECRET = MembershipSecret(membership=5, secret="ab" * 32)
NUMBERS = 3 << 20
"""Of a shard: 12 MiB, three messages."""


def build_snapshots(folder: Path, left: Callable[[], float] = lambda: math.inf) -> Snapshots:
    folder.mkdir(exist_ok=True)
    return Snapshots(folder, "shard-3-of-4", round_=1, world_size=4, fingerprint=7, memory=SlotMemory(left))


class Pair:
    """A rank with its own snapshots, and the replica receiver of its peer."""

    def __init__(self, folder: Path, left: Callable[[], float] = lambda: math.inf) -> None:
        self.home, self.abroad = folder / "home", folder / "abroad"
        self.writer = build_snapshots(self.home)
        self.received_snapshots = build_snapshots(self.abroad)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()
        ReplicaReceiver({KEY: build_snapshots(self.abroad, left)}, SECRET).serve(self.listener)
        self.sender = self.build_sender()

    def build_sender(self, secret: MembershipSecret = SECRET, key: str = KEY, budget: float = 1e12) -> ReplicaSender:
        return build_replica_sender(self.listener, build_snapshots(self.home), secret, key, budget)

    def write(self, step: int) -> StateVersion:
        self.writer.write(step, {"model": {"weight": torch.full((NUMBERS,), float(step))}}, fingerprint=7)
        self.writer.publish(torch.full((4 * RANK_STATE_BYTES,), step, dtype=torch.uint8))
        return StateVersion(step, 1)

    def write_and_send(self, step: int) -> StateVersion:
        version = self.write(step)
        self.sender.send(version)
        assert self.sender.wait(120)
        return version

    def list_versions(self) -> set[StateVersion]:
        return {version for version, _ in self.received_snapshots.list_versions()} - {NO_STATE_VERSION}

    def connect(self) -> tuple[socket.socket, PeerLink]:
        """Connect as a replica sender does."""
        connection = socket.create_connection(self.address, timeout=120)
        return connection, PeerLink.authenticate_to_server(connection, SECRET.membership, SECRET.secret)

    def read_content(self, version: StateVersion) -> memoryview:
        slot = build_snapshots(self.home).read(version)
        assert slot is not None
        return memoryview(slot.numpy().data)


def build_replica_sender(
    listener: socket.socket, home: Snapshots, secret: MembershipSecret = SECRET, key: str = KEY, budget: float = 1e12
) -> ReplicaSender:
    return ReplicaSender(key, home, ReplicaTarget(1, *listener.getsockname()), secret, budget)


def build_offer(content: memoryview) -> dict[str, Any]:
    return {"key": KEY, "bytes": len(content), "part": peer_link.MAX_PEER_MESSAGE_BYTES}


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is no fault. A test of a limit sets its own."""
    monkeypatch.setattr(peer_link, "PEER_MESSAGE_TIMEOUT_SECONDS", 120.0)
    monkeypatch.setattr(peer_replication, "PEER_MESSAGE_TIMEOUT_SECONDS", 120.0)
    monkeypatch.setattr(peer_replication, "PEER_AUTHENTICATION_SECONDS", 120.0)


@pytest.fixture(autouse=True)
def _wait_until_receivers_end() -> Iterator[None]:
    """A receiver logs that its listener is closed: it must not do so in the next test."""
    others = list_receivers()
    yield
    wait_until_true(lambda: list_receivers() <= others, "the receivers end")


def list_receivers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "pacekeeper-replica-receiver"}


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    one = Pair(tmp_path)
    yield one
    close_connection(one.listener)


def read_log(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.getMessage() for record in caplog.records)


def test_the_peer_has_the_two_newest_bit_for_bit(pair: Pair) -> None:
    for step in (1, 2, 3):
        version = pair.write_and_send(step)
        assert pair.sender.delivered == version
        copy = pair.received_snapshots.read(version)
        assert copy is not None
        assert bytes(copy.numpy()) == bytes(pair.read_content(version))
    assert pair.list_versions() == {StateVersion(2, 1), StateVersion(3, 1)}


def test_the_cost_of_a_copy_is_counted_at_both_ends(tmp_path: Path) -> None:
    counted: list[str] = []

    def build_counter(end: str) -> Callable[[], AbstractContextManager[None]]:
        @contextmanager
        def count_block() -> Iterator[None]:
            yield
            counted.append(end)

        return count_block

    home, abroad = build_snapshots(tmp_path / "home"), build_snapshots(tmp_path / "abroad")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ReplicaReceiver({KEY: abroad}, SECRET, count_work=build_counter("taken")).serve(listener)
        target = ReplicaTarget(1, *listener.getsockname())
        sender = ReplicaSender(KEY, build_snapshots(tmp_path / "home"), target, SECRET, 1e12, build_counter("sent"))
        home.write(1, {"weight": torch.zeros(4)}, fingerprint=7)
        home.publish(torch.zeros(4 * RANK_STATE_BYTES, dtype=torch.uint8))
        sender.send(StateVersion(1, 1))
        wait_until_true(lambda: sorted(counted) == ["sent", "taken"], "both ends")
        close_connection(listener)


def test_a_connection_lost_during_a_copy_leaves_the_copy_before(pair: Pair) -> None:
    before = pair.write_and_send(1)
    content = pair.read_content(pair.write(2))
    connection, link = pair.connect()
    link.send_json(build_offer(content))
    assert link.receive_json() == {"refused": ""}
    link.send(content[SLOT_HEADER_BYTES : SLOT_HEADER_BYTES + peer_link.MAX_PEER_MESSAGE_BYTES])
    close_connection(connection)
    assert pair.list_versions() == {before}
    assert pair.write_and_send(3) == StateVersion(3, 1), "the next comes into the torn one's place"
    assert pair.list_versions() == {before, StateVersion(3, 1)}


def test_a_copy_with_a_wrong_checksum_is_rejected_before_it_counts(pair: Pair) -> None:
    before = pair.write_and_send(1)
    content = bytearray(pair.read_content(pair.write(2)))
    content[-1] ^= 1
    refused = send_content(pair, content)
    assert "checksum" in refused
    assert pair.list_versions() == {before}


def send_content(pair: Pair, content: bytearray) -> str:
    view = memoryview(content)
    connection, link = pair.connect()
    link.send_json(build_offer(view))
    assert link.receive_json() == {"refused": ""}
    for start in range(SLOT_HEADER_BYTES, len(content), peer_link.MAX_PEER_MESSAGE_BYTES):
        link.send(view[start : start + peer_link.MAX_PEER_MESSAGE_BYTES])
    link.send(view[:SLOT_HEADER_BYTES])
    refused: str = link.receive_json()["refused"]
    close_connection(connection)
    return refused


def test_a_peer_without_memory_refuses_and_is_tried_less_and_less_often(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pair = Pair(tmp_path, left=lambda: 1 << 20)
    tried = []
    for step in range(1, 8):
        caplog.clear()
        pair.write_and_send(step)
        if "the peer refuses it" in read_log(caplog):
            assert "give the containers and their runtime volumes more memory" in read_log(caplog)
            tried.append(step)
    assert tried == [1, 3, 6]
    assert pair.list_versions() == set()
    close_connection(pair.listener)


@pytest.mark.parametrize(
    ("secret", "key"),
    [(MembershipSecret(5, "cd" * 32), KEY), (MembershipSecret(6, "ab" * 32), KEY), (SECRET, "2"), (SECRET, "../../3")],
    ids=["another secret", "another membership", "a rank whose neighbor it is not", "a path"],
)
def test_an_unauthenticated_sender_leaves_nothing(secret: MembershipSecret, key: str, pair: Pair) -> None:
    sender = pair.build_sender(secret, key)
    sender.send(pair.write(1))
    assert sender.wait(120)
    assert sender.delivered == NO_STATE_VERSION
    assert list(pair.abroad.iterdir()) == []


@pytest.mark.parametrize("spoken", [b"", b"x" * 40, b"\xff" * 200], ids=["silent", "a greeting", "more"])
def test_an_unauthenticated_connection_is_closed_and_blocks_no_member(
    spoken: bytes, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_replication, "PEER_AUTHENTICATION_SECONDS", 0.2)
    with socket.create_connection(pair.address, timeout=300) as stranger:
        stranger.sendall(spoken)
        pair.write_and_send(1)
        try:
            while stranger.recv(4096):
                pass  # the receiver's nonce
        except ConnectionResetError:
            pass
    assert pair.list_versions() == {StateVersion(1, 1)}


def test_a_message_that_was_changed_on_the_network_proves_nothing() -> None:
    here, there = socket.socketpair()
    sender = PeerLink(there, (b"a" * 32, b"b" * 32))
    reader = PeerLink(here, (b"b" * 32, b"a" * 32))
    sender.send(memoryview(b"good"))
    assert reader.receive() == b"good"
    PeerLink(there, (b"a" * 32, b"b" * 32)).send(memoryview(b"good"))  # as number 0 again
    with pytest.raises(AuthenticationError, match="not authenticated"):
        reader.receive()
    here.close()
    there.close()


@pytest.mark.parametrize("answers", [0, 1], ids=["before the copy", "in mid-copy"])
def test_a_silent_peer_blocks_no_sender(
    answers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(peer_link, "PEER_MESSAGE_TIMEOUT_SECONDS", 1.0)
    pair = Pair(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(peer_replication, "MIN_PEER_BYTES_PER_SECOND", math.inf)
        sender = build_replica_sender(silent, build_snapshots(pair.home))
        sender.send(pair.write(1))
        connected, _ = silent.accept()
        link = PeerLink.authenticate_client(connected, SECRET.membership, SECRET.secret)
        for _ in range(answers):
            link.receive_json()
            link.send_json({"refused": ""})
        assert sender.wait(120)
    assert sender.delivered == NO_STATE_VERSION
    assert "has not completed a message within 1 s" in read_log(caplog)
    connected.close()
    close_connection(pair.listener)


def test_a_peer_that_is_lost_during_a_copy_costs_that_copy_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pair = Pair(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as lost:
        sender = build_replica_sender(lost, build_snapshots(pair.home))
        sender.send(pair.write(1))
        connected, _ = lost.accept()
        link = PeerLink.authenticate_client(connected, SECRET.membership, SECRET.secret)
        link.receive_json()
        link.send_json({"refused": ""})
        link.receive_into(memoryview(bytearray(peer_link.MAX_PEER_MESSAGE_BYTES)))
        close_connection(connected)
        assert sender.wait(120)
    assert sender.delivered == NO_STATE_VERSION
    assert "cannot send the snapshot of step 1 to its peer, rank 1 at 127.0.0.1: " in read_log(caplog)
    assert read_log(caplog).endswith("; the next attempt follows after 1 more")
    close_connection(pair.listener)


class VirtualClock:
    """Advances only when a thread sleeps, and with each reading where the network is slow."""

    def __init__(self, slowness: float = 0.0) -> None:
        self.now = 0.0
        self.slowness = slowness
        self.slept: list[float] = []

    def monotonic(self) -> float:
        self.now += self.slowness
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def build_sender_with_clock(
    pair: Pair, clock: VirtualClock, budget: float, monkeypatch: pytest.MonkeyPatch
) -> ReplicaSender:
    time: Any = SimpleNamespace(monotonic=clock.monotonic, sleep=clock.sleep)
    monkeypatch.setattr(peer_replication, "time", time)
    sender = pair.build_sender(budget=budget)
    sender.send(pair.write(1))
    assert sender.wait(120)
    return sender


def test_a_copy_takes_no_more_of_the_network_than_its_budget(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = VirtualClock()
    build_sender_with_clock(pair, clock, budget=peer_link.MAX_PEER_MESSAGE_BYTES / 2.0, monkeypatch=monkeypatch)
    *whole, rest = clock.slept
    assert whole == [1.0] * 6, "12 MiB"
    assert 0 < rest < 0.1, "and what describes them"
    assert pair.list_versions() == {StateVersion(1, 1)}


def test_a_network_far_below_the_budget_is_not_waited_for(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All snapshots of the job wait for this copy."""
    sender = build_sender_with_clock(
        pair, VirtualClock(slowness=20.0), budget=peer_link.MAX_PEER_MESSAGE_BYTES, monkeypatch=monkeypatch
    )
    assert sender.delivered == NO_STATE_VERSION
    assert "PACEKEEPER_PEER_REPLICA_MEGABYTES" in read_log(caplog)


def test_an_overwritten_snapshot_is_not_sent(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    gone = pair.write(1)
    pair.write(2)
    pair.write(3)
    pair.sender.send(gone)
    assert pair.sender.wait(120)
    assert pair.list_versions() == set()
    assert "it is no longer there" in read_log(caplog)


def test_a_grown_model_is_named_as_the_reason_for_missing_replicas(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    pair.writer.write(1, {"model": {"weight": torch.zeros(NUMBERS)}}, fingerprint=8)
    pair.writer.publish(torch.zeros(4 * RANK_STATE_BYTES, dtype=torch.uint8))
    pair.sender.send(StateVersion(1, 1))
    assert pair.sender.wait(120)
    assert "register(): the model has grown since it was registered" in read_log(caplog)
    assert "register the model with all its final parameters" in read_log(caplog)


def test_the_receiver_remains_open_for_the_next_sender(pair: Pair) -> None:
    connection, link = pair.connect()
    link.send_json({"key": KEY, "bytes": -8, "part": peer_link.MAX_PEER_MESSAGE_BYTES})
    with pytest.raises(OSError, match=r"closed the connection|reset"):
        link.receive_json()
    close_connection(connection)
    pair.write_and_send(1)
    assert pair.list_versions() == {StateVersion(1, 1)}


@pytest.mark.parametrize(
    "part",
    [
        0,
        peer_replication.MIN_SNAPSHOT_PART_BYTES - 8,
        peer_replication.MIN_SNAPSHOT_PART_BYTES + 1,
        peer_link.MAX_PEER_MESSAGE_BYTES + 8,
        "1",
    ],
)
def test_a_snapshot_in_invalid_parts_is_rejected(part: object, pair: Pair) -> None:
    connection, link = pair.connect()
    link.send_json({"key": KEY, "bytes": 12 << 20, "part": part})
    with pytest.raises(OSError, match=r"closed the connection|reset"):
        link.receive_json()
    close_connection(connection)
    assert list(pair.abroad.iterdir()) == []


@pytest.mark.parametrize(
    ("budget", "part"), [(1e12, 4 << 20), (1e6, 10**6), (62.5e3, 64 << 10)], ids=["much", "1 MB/s", "of 16 ranks"]
)
def test_a_part_takes_about_a_second_of_a_small_budget(budget: float, part: int, tmp_path: Path) -> None:
    """The peer waits for a part for a limited time only."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pair = Pair(tmp_path)
        sender = build_replica_sender(listener, build_snapshots(pair.home), budget=budget)
        sender.send(pair.write(1))
        connected, _ = listener.accept()
        link = PeerLink.authenticate_client(connected, SECRET.membership, SECRET.secret)
        assert link.receive_json()["part"] == part
        link.send_json({"refused": ""})
        link.receive_into(memoryview(bytearray(part)))
        close_connection(connected)
        assert sender.wait(120)
    close_connection(pair.listener)


def test_a_peer_has_time_to_allocate_memory_in_proportion_to_its_size(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """To allocate a shard of 20 GB takes longer than the time limit of a message."""
    monkeypatch.setattr(peer_link, "PEER_MESSAGE_TIMEOUT_SECONDS", 2.0)
    monkeypatch.setattr(peer_replication, "MIN_PEER_BYTES_PER_SECOND", 1e6)

    def allocate_slowly(*its: Any) -> PeerSlot:
        threading.Event().wait(3.0)
        return guest_room(*its)

    guest_room = Snapshots.allocate_peer_slot
    monkeypatch.setattr(Snapshots, "allocate_peer_slot", allocate_slowly)
    assert pair.write_and_send(1) == StateVersion(1, 1)
    assert read_log(caplog) == ""
    assert pair.sender.delivered == StateVersion(1, 1)


@pytest.mark.parametrize("reads", [True, False], ids=["reading", "writing"])
def test_a_message_that_trickles_in_is_cut_off(reads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise each byte that arrives would restart the wait, and the job's snapshots would wait with it."""
    monkeypatch.setattr(peer_link, "PEER_MESSAGE_TIMEOUT_SECONDS", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        there = socket.create_connection(listener.getsockname(), timeout=300)
        here, _ = listener.accept()
    link, over = PeerLink(here, (b"a" * 32, b"b" * 32)), threading.Event()
    peer_link._set_kernel_timeouts(here)

    def send_trickle() -> None:
        for _ in range(1000):
            if over.wait(0.02):
                return
            if reads:
                there.send(b"\0\0\0\1")
            else:
                there.recv(4096)
        close_connection(there)

    other = threading.Thread(target=send_trickle)
    other.start()
    monkeypatch.setattr(peer_link, "_PROOF_BYTES", 1 << 20)
    with pytest.raises(TimeoutError, match="has not completed a message within 1 s"):
        link.receive() if reads else link.send(memoryview(bytes(32 << 20)))
    over.set()
    other.join()
    here.close()
    there.close()


class FailingListener:
    """Fails in these ways before it accepts the first connection."""

    def __init__(self, real: socket.socket, errors: list[int]) -> None:
        self.real = real
        self.errors = errors

    def accept(self) -> Any:
        if self.errors:
            raise OSError(self.errors.pop(0), "it fails")
        return self.real.accept()


def test_a_temporary_shortage_does_not_close_the_receiver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_replication, "PEER_ACCEPT_RETRY_SECONDS", 0.0)
    pair = Pair(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as real:
        listener: Any = FailingListener(real, [errno.EMFILE, errno.ENOBUFS, errno.ECONNABORTED])
        ReplicaReceiver({KEY: build_snapshots(pair.abroad)}, SECRET).serve(listener)
        sender = build_replica_sender(real, build_snapshots(pair.home))
        sender.send(pair.write(1))
        assert sender.wait(120)
        assert sender.delivered == StateVersion(1, 1)
        close_connection(real)
    close_connection(pair.listener)


@pytest.mark.parametrize(
    "come_in",
    [ReplicaReceiver._start_handler, ReplicaReceiver._handle_connection],
    ids=["no thread", "no watch over it"],
)
def test_a_connection_without_a_thread_is_closed_and_frees_its_slot(
    monkeypatch: pytest.MonkeyPatch, come_in: Callable[[ReplicaReceiver, socket.socket], None]
) -> None:
    def fail_to_start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    receiver = ReplicaReceiver({}, SECRET)
    monkeypatch.setattr(threading.Thread, "start", fail_to_start)
    for _ in range(peer_replication.MAX_PEER_CONNECTIONS + 1):
        assert receiver._connection_slots.acquire(blocking=False)
        host, connected = socket.socketpair()
        come_in(receiver, host)
        assert connected.recv(1) == b""
        connected.close()


def test_a_failure_and_the_recovery_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, peer_replication.__name__)
    left = [math.inf, 0.0, math.inf, math.inf, math.inf]
    pair = Pair(tmp_path, left=lambda: left[0])
    logged = []
    for step in range(1, 6):
        caplog.clear()
        pair.write_and_send(step)
        del left[:1]
        logged.append(read_log(caplog))
    close_connection(pair.listener)
    assert logged[0] == "snapshots are on a peer, rank 1 at 127.0.0.1, from step 1 on"
    assert logged[1].startswith("cannot send the snapshot of step 2 to its peer, rank 1 at 127.0.0.1: ")
    assert logged[2:] == ["", "snapshots are on a peer again, rank 1 at 127.0.0.1, from step 4 on", ""]
