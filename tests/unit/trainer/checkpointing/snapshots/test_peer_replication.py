"""A copy on another node is whole, or it is none; whatever happens to it, the training goes on."""

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
CIRCLE = MembershipSecret(membership=5, secret="ab" * 32)
NUMBERS = 3 << 20
"""Of a shard: 12 MiB, three messages."""


def shard(folder: Path, left: Callable[[], float] = lambda: math.inf) -> Snapshots:
    folder.mkdir(exist_ok=True)
    return Snapshots(folder, "shard-3-of-4", round_=1, world_size=4, fingerprint=7, memory=SlotMemory(left))


class Pair:
    """A rank with its snapshots at home, and the neighbour's shelf."""

    def __init__(self, folder: Path, left: Callable[[], float] = lambda: math.inf) -> None:
        self.home, self.abroad = folder / "home", folder / "abroad"
        self.writer = shard(self.home)
        self.kept = shard(self.abroad)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()
        ReplicaReceiver({KEY: shard(self.abroad, left)}, CIRCLE).serve(self.listener)
        self.courier = self.another_courier()

    def another_courier(self, circle: MembershipSecret = CIRCLE, key: str = KEY, budget: float = 1e12) -> ReplicaSender:
        return courier_to(self.listener, shard(self.home), circle, key, budget)

    def write(self, step: int) -> StateVersion:
        self.writer.write(step, {"model": {"weight": torch.full((NUMBERS,), float(step))}}, fingerprint=7)
        self.writer.publish(torch.full((4 * RANK_STATE_BYTES,), step, dtype=torch.uint8))
        return StateVersion(step, 1)

    def deliver(self, step: int) -> StateVersion:
        version = self.write(step)
        self.courier.send(version)
        assert self.courier.wait(30)
        return version

    def versions(self) -> set[StateVersion]:
        return {version for version, _ in self.kept.list_versions()} - {NO_STATE_VERSION}

    def link(self) -> tuple[socket.socket, PeerLink]:
        """As a courier has it."""
        connection = socket.create_connection(self.address, timeout=120)
        return connection, PeerLink.authenticate_to_server(connection, CIRCLE.membership, CIRCLE.secret)

    def content(self, version: StateVersion) -> memoryview:
        slot = shard(self.home).read(version)
        assert slot is not None
        return memoryview(slot.numpy().data)


def courier_to(
    listener: socket.socket, home: Snapshots, circle: MembershipSecret = CIRCLE, key: str = KEY, budget: float = 1e12
) -> ReplicaSender:
    return ReplicaSender(key, home, ReplicaTarget(1, *listener.getsockname()), circle, budget)


def offer(content: memoryview) -> dict[str, Any]:
    return {"key": KEY, "bytes": len(content), "part": peer_link.MAX_PEER_MESSAGE_BYTES}


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    one = Pair(tmp_path)
    yield one
    close_connection(one.listener)


def said(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.getMessage() for record in caplog.records)


def test_the_neighbour_has_the_two_newest_bit_for_bit(pair: Pair) -> None:
    for step in (1, 2, 3):
        version = pair.deliver(step)
        assert pair.courier.delivered == version
        copy = pair.kept.read(version)
        assert copy is not None
        assert bytes(copy.numpy()) == bytes(pair.content(version))
    assert pair.versions() == {StateVersion(2, 1), StateVersion(3, 1)}


def test_what_a_copy_takes_is_counted_at_both_ends(tmp_path: Path) -> None:
    counted: list[str] = []

    def counting(end: str) -> Callable[[], AbstractContextManager[None]]:
        @contextmanager
        def inside() -> Iterator[None]:
            yield
            counted.append(end)

        return inside

    home, abroad = shard(tmp_path / "home"), shard(tmp_path / "abroad")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ReplicaReceiver({KEY: abroad}, CIRCLE, count_work=counting("taken")).serve(listener)
        keeper = ReplicaTarget(1, *listener.getsockname())
        courier = ReplicaSender(KEY, shard(tmp_path / "home"), keeper, CIRCLE, 1e12, counting("sent"))
        home.write(1, {"weight": torch.zeros(4)}, fingerprint=7)
        home.publish(torch.zeros(4 * RANK_STATE_BYTES, dtype=torch.uint8))
        courier.send(StateVersion(1, 1))
        wait_until_true(lambda: sorted(counted) == ["sent", "taken"], "both ends")
        close_connection(listener)


def test_what_is_torn_on_its_way_is_none_and_the_one_before_stays(pair: Pair) -> None:
    before = pair.deliver(1)
    content = pair.content(pair.write(2))
    connection, link = pair.link()
    link.send_json(offer(content))
    assert link.receive_json() == {"refused": ""}
    link.send(content[SLOT_HEADER_BYTES : SLOT_HEADER_BYTES + peer_link.MAX_PEER_MESSAGE_BYTES])
    close_connection(connection)
    assert pair.versions() == {before}
    assert pair.deliver(3) == StateVersion(3, 1), "the next comes into the torn one's place"
    assert pair.versions() == {before, StateVersion(3, 1)}


def test_what_does_not_fit_its_checksum_is_refused_before_it_counts(pair: Pair) -> None:
    before = pair.deliver(1)
    content = bytearray(pair.content(pair.write(2)))
    content[-1] ^= 1
    refused = hand_over(pair, content)
    assert "checksum" in refused
    assert pair.versions() == {before}


def hand_over(pair: Pair, content: bytearray) -> str:
    view = memoryview(content)
    connection, link = pair.link()
    link.send_json(offer(view))
    assert link.receive_json() == {"refused": ""}
    for start in range(SLOT_HEADER_BYTES, len(content), peer_link.MAX_PEER_MESSAGE_BYTES):
        link.send(view[start : start + peer_link.MAX_PEER_MESSAGE_BYTES])
    link.send(view[:SLOT_HEADER_BYTES])
    refused: str = link.receive_json()["refused"]
    close_connection(connection)
    return refused


def test_without_memory_the_neighbour_takes_none_and_is_asked_ever_more_seldom(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pair = Pair(tmp_path, left=lambda: 1 << 20)
    tried = []
    for step in range(1, 8):
        caplog.clear()
        pair.deliver(step)
        if "the peer refuses it" in said(caplog):
            assert "give the containers and their runtime volumes more memory" in said(caplog)
            tried.append(step)
    assert tried == [1, 3, 6]
    assert pair.versions() == set()
    close_connection(pair.listener)


@pytest.mark.parametrize(
    ("circle", "key"),
    [(MembershipSecret(5, "cd" * 32), KEY), (MembershipSecret(6, "ab" * 32), KEY), (CIRCLE, "2"), (CIRCLE, "../../3")],
    ids=["another secret", "another membership", "a rank whose neighbor it is not", "a path"],
)
def test_nobody_else_leaves_anything(circle: MembershipSecret, key: str, pair: Pair) -> None:
    courier = pair.another_courier(circle, key)
    courier.send(pair.write(1))
    assert courier.wait(30)
    assert courier.delivered == NO_STATE_VERSION
    assert list(pair.abroad.iterdir()) == []


@pytest.mark.parametrize("spoken", [b"", b"x" * 40, b"\xff" * 200], ids=["silent", "a greeting", "more"])
def test_a_stranger_is_hung_up_on_and_keeps_nobody_out(
    spoken: bytes, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_replication, "PEER_AUTHENTICATION_SECONDS", 0.2)
    with socket.create_connection(pair.address, timeout=300) as stranger:
        stranger.sendall(spoken)
        pair.deliver(1)
        try:
            while stranger.recv(4096):
                pass  # the host's nonce
        except ConnectionResetError:
            pass
    assert pair.versions() == {StateVersion(1, 1)}


def test_a_message_that_was_changed_on_its_way_proves_nothing() -> None:
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
def test_a_neighbour_that_falls_silent_holds_nobody_up(
    answers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(peer_link, "PEER_MESSAGE_TIMEOUT_SECONDS", 1.0)
    pair = Pair(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(peer_replication, "MIN_PEER_BYTES_PER_SECOND", math.inf)
        courier = courier_to(silent, shard(pair.home))
        courier.send(pair.write(1))
        guest, _ = silent.accept()
        link = PeerLink.authenticate_client(guest, CIRCLE.membership, CIRCLE.secret)
        for _ in range(answers):
            link.receive_json()
            link.send_json({"refused": ""})
        assert courier.wait(30)
    assert courier.delivered == NO_STATE_VERSION
    assert "has not completed a message within 1 s" in said(caplog)
    guest.close()
    close_connection(pair.listener)


def test_a_neighbour_that_is_lost_in_mid_copy_costs_that_copy_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pair = Pair(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as lost:
        courier = courier_to(lost, shard(pair.home))
        courier.send(pair.write(1))
        guest, _ = lost.accept()
        link = PeerLink.authenticate_client(guest, CIRCLE.membership, CIRCLE.secret)
        link.receive_json()
        link.send_json({"refused": ""})
        link.receive_into(memoryview(bytearray(peer_link.MAX_PEER_MESSAGE_BYTES)))
        close_connection(guest)
        assert courier.wait(30)
    assert courier.delivered == NO_STATE_VERSION
    assert "cannot send the snapshot of step 1 to its peer, rank 1 at 127.0.0.1: " in said(caplog)
    assert said(caplog).endswith("; the next attempt follows after 1 more")
    close_connection(pair.listener)


class Clock:
    """Passes only where somebody sleeps, and with each look where the network is slow."""

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


def with_clock(pair: Pair, clock: Clock, budget: float, monkeypatch: pytest.MonkeyPatch) -> ReplicaSender:
    time: Any = SimpleNamespace(monotonic=clock.monotonic, sleep=clock.sleep)
    monkeypatch.setattr(peer_replication, "time", time)
    courier = pair.another_courier(budget=budget)
    courier.send(pair.write(1))
    assert courier.wait(30)
    return courier


def test_a_copy_takes_no_more_of_the_network_than_its_budget(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    with_clock(pair, clock, budget=peer_link.MAX_PEER_MESSAGE_BYTES / 2.0, monkeypatch=monkeypatch)
    *whole, rest = clock.slept
    assert whole == [1.0] * 6, "12 MiB"
    assert 0 < rest < 0.1, "and what describes them"
    assert pair.versions() == {StateVersion(1, 1)}


def test_a_network_that_gives_much_less_is_not_waited_for(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All snapshots of the job wait for this copy."""
    courier = with_clock(pair, Clock(slowness=20.0), budget=peer_link.MAX_PEER_MESSAGE_BYTES, monkeypatch=monkeypatch)
    assert courier.delivered == NO_STATE_VERSION
    assert "PACEKEEPER_PEER_REPLICA_MEGABYTES" in said(caplog)


def test_a_snapshot_that_has_been_overwritten_meanwhile_is_not_sent(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    gone = pair.write(1)
    pair.write(2)
    pair.write(3)
    pair.courier.send(gone)
    assert pair.courier.wait(30)
    assert pair.versions() == set()
    assert "it is no longer there" in said(caplog)


def test_a_model_that_has_grown_is_said_to_be_why_its_snapshots_stay_at_home(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    pair.writer.write(1, {"model": {"weight": torch.zeros(NUMBERS)}}, fingerprint=8)
    pair.writer.publish(torch.zeros(4 * RANK_STATE_BYTES, dtype=torch.uint8))
    pair.courier.send(StateVersion(1, 1))
    assert pair.courier.wait(30)
    assert "register(): the model has grown since it was registered" in said(caplog)
    assert "register the model with all its final parameters" in said(caplog)


def test_the_shelf_stays_open_for_the_next(pair: Pair) -> None:
    connection, link = pair.link()
    link.send_json({"key": KEY, "bytes": -8, "part": peer_link.MAX_PEER_MESSAGE_BYTES})
    with pytest.raises(OSError, match=r"closed the connection|reset"):
        link.receive_json()
    close_connection(connection)
    wait_until_true(lambda: pair.deliver(1) == StateVersion(1, 1), "the next copy")
    assert pair.versions() == {StateVersion(1, 1)}


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
def test_a_snapshot_in_strange_parts_is_not_taken(part: object, pair: Pair) -> None:
    connection, link = pair.link()
    link.send_json({"key": KEY, "bytes": 12 << 20, "part": part})
    with pytest.raises(OSError, match=r"closed the connection|reset"):
        link.receive_json()
    close_connection(connection)
    assert list(pair.abroad.iterdir()) == []


@pytest.mark.parametrize(
    ("budget", "part"), [(1e12, 4 << 20), (1e6, 10**6), (62.5e3, 64 << 10)], ids=["much", "1 MB/s", "of 16 ranks"]
)
def test_a_part_takes_about_a_second_of_a_small_budget(budget: float, part: int, tmp_path: Path) -> None:
    """The neighbor waits for a part only so long."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pair = Pair(tmp_path)
        courier = courier_to(listener, shard(pair.home), budget=budget)
        courier.send(pair.write(1))
        guest, _ = listener.accept()
        link = PeerLink.authenticate_client(guest, CIRCLE.membership, CIRCLE.secret)
        assert link.receive_json()["part"] == part
        link.send_json({"refused": ""})
        link.receive_into(memoryview(bytearray(part)))
        close_connection(guest)
        assert courier.wait(30)
    close_connection(pair.listener)


def test_a_neighbour_has_as_long_to_take_memory_as_there_is_to_take(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A shard of 20 GB takes longer than any patience with a word."""
    monkeypatch.setattr(peer_link, "PEER_MESSAGE_TIMEOUT_SECONDS", 1.0)
    monkeypatch.setattr(peer_replication, "MIN_PEER_BYTES_PER_SECOND", 1e6)

    def take_slowly(*its: Any) -> PeerSlot:
        threading.Event().wait(2.5)
        return guest_room(*its)

    guest_room = Snapshots.allocate_peer_slot
    monkeypatch.setattr(Snapshots, "allocate_peer_slot", take_slowly)
    assert pair.deliver(1) == StateVersion(1, 1)
    assert said(caplog) == ""
    assert pair.courier.delivered == StateVersion(1, 1)


@pytest.mark.parametrize("reads", [True, False], ids=["reading", "writing"])
def test_a_trickle_is_no_message(reads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte that comes through would be waited for anew, and with it the job's snapshots."""
    monkeypatch.setattr(peer_link, "PEER_MESSAGE_TIMEOUT_SECONDS", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        there = socket.create_connection(listener.getsockname(), timeout=300)
        here, _ = listener.accept()
    link, over = PeerLink(here, (b"a" * 32, b"b" * 32)), threading.Event()
    peer_link._set_kernel_timeouts(here)

    def trickle() -> None:
        for _ in range(1000):
            if over.wait(0.02):
                return
            if reads:
                there.send(b"\0\0\0\1")
            else:
                there.recv(4096)
        close_connection(there)

    other = threading.Thread(target=trickle)
    other.start()
    monkeypatch.setattr(peer_link, "_PROOF_BYTES", 1 << 20)
    with pytest.raises(TimeoutError, match="has not completed a message within 1 s"):
        link.receive() if reads else link.send(memoryview(bytes(32 << 20)))
    over.set()
    other.join()
    here.close()
    there.close()


class Listener:
    """That fails in these ways before it lets the first in."""

    def __init__(self, real: socket.socket, errors: list[int]) -> None:
        self.real = real
        self.errors = errors

    def accept(self) -> Any:
        if self.errors:
            raise OSError(self.errors.pop(0), "it fails")
        return self.real.accept()


def test_a_passing_shortage_does_not_close_the_shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_replication, "PEER_ACCEPT_RETRY_SECONDS", 0.0)
    pair = Pair(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as real:
        listener: Any = Listener(real, [errno.EMFILE, errno.ENOBUFS, errno.ECONNABORTED])
        ReplicaReceiver({KEY: shard(pair.abroad)}, CIRCLE).serve(listener)
        courier = courier_to(real, shard(pair.home))
        courier.send(pair.write(1))
        assert courier.wait(30)
        assert courier.delivered == StateVersion(1, 1)
        close_connection(real)
    close_connection(pair.listener)


@pytest.mark.parametrize(
    "come_in",
    [ReplicaReceiver._start_handler, ReplicaReceiver._handle_connection],
    ids=["no thread", "no watch over it"],
)
def test_a_guest_for_whom_no_thread_starts_goes_and_leaves_its_place(
    monkeypatch: pytest.MonkeyPatch, come_in: Callable[[ReplicaReceiver, socket.socket], None]
) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    shelf = ReplicaReceiver({}, CIRCLE)
    monkeypatch.setattr(threading.Thread, "start", start)
    for _ in range(peer_replication.MAX_PEER_CONNECTIONS + 1):
        assert shelf._connection_slots.acquire(blocking=False)
        host, guest = socket.socketpair()
        come_in(shelf, host)
        assert guest.recv(1) == b""
        guest.close()


def test_what_fails_and_works_again_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, peer_replication.__name__)
    left = [math.inf, 0.0, math.inf, math.inf, math.inf]
    pair = Pair(tmp_path, left=lambda: left[0])
    told = []
    for step in range(1, 6):
        caplog.clear()
        pair.deliver(step)
        del left[:1]
        told.append(said(caplog))
    close_connection(pair.listener)
    assert told[0] == "snapshots are on a peer, rank 1 at 127.0.0.1, from step 1 on"
    assert told[1].startswith("cannot send the snapshot of step 2 to its peer, rank 1 at 127.0.0.1: ")
    assert told[2:] == ["", "snapshots are on a peer again, rank 1 at 127.0.0.1, from step 4 on", ""]
