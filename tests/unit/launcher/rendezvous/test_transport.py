"""The launchers' meeting over real connections: members come together, and no stranger is believed or in the way."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from pacekeeper.launcher.network.interfaces import bind_socket
from pacekeeper.launcher.rendezvous import transport
from pacekeeper.launcher.rendezvous.rendezvous import ParticipantReport, ParticipantStatus, RendezvousStage
from pacekeeper.launcher.rendezvous.transport import RendezvousClient, RendezvousServer
from pacekeeper.message_authentication import (
    MAX_AUTHENTICATED_LINE_BYTES,
    AuthenticatedChannel,
    AuthenticationError,
    authenticate_client,
    authenticate_to_server,
)

SECRET, OTHER = "5ec2e7" * 8, "0a" * 24
PATIENCE = 20.0
STORE_PORT = 777


def report(worker: str, membership: int = 1) -> ParticipantReport:
    return ParticipantReport(worker, "first", membership, ParticipantStatus.READY, round=0, workers=2)


class Guest:
    """A launcher's client that says that it is ready."""

    def __init__(self, worker: str, port: int, secret: str = SECRET, membership: int = 1) -> None:
        self._seen = asyncio.Event()
        self.client = RendezvousClient(on_view=self._seen.set)
        self.client.join("127.0.0.1", port, membership, secret)
        self.client.report(report(worker, membership))

    async def wait_until_included(self) -> None:
        async with asyncio.timeout(PATIENCE):
            while not ((view := self.client.view) and view.stage is RendezvousStage.RUNNING and view.included):
                self._seen.clear()
                await self._seen.wait()


@asynccontextmanager
async def meeting(secret: str | None = SECRET) -> AsyncIterator[tuple[RendezvousServer, int]]:
    """A host and its port. `secret`: of membership 1; None: the host has not heard of it yet."""
    host = RendezvousServer(lambda: STORE_PORT)
    listener = bind_socket("127.0.0.1")
    port: int = listener.getsockname()[1]
    await host.serve(listener)
    if secret is not None:
        host.admit(1, secret)
    try:
        yield host, port
    finally:
        await host.close()


@asynccontextmanager
async def guests(port: int, *workers: str) -> AsyncIterator[list[Guest]]:
    everybody = [Guest(worker, port) for worker in workers]
    try:
        yield everybody
    finally:
        for guest in everybody:
            guest.client.leave()


async def all_come_together(port: int) -> None:
    async with guests(port, "a", "b") as both:
        for guest in both:
            await guest.wait_until_included()
            assert guest.client.view is not None
            assert guest.client.view.port == STORE_PORT


async def until(look: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not look():  # noqa: ASYNC110  # what is looked at has no event
            await asyncio.sleep(0.002)


async def knock(port: int, content: bytes) -> bytes:
    """Sends `content` and nothing else; all that the host says until it hangs up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    said = bytearray()
    try:
        writer.write(content)
        async with asyncio.timeout(PATIENCE):
            while part := await reader.read(1 << 16):
                said += part
    except ConnectionError:
        pass
    finally:
        writer.close()
    return bytes(said)


async def test_members_come_together() -> None:
    async with meeting() as (host, port):
        await all_come_together(port)
        assert host.rejected_connections == 0


async def test_whoever_has_another_secret_is_turned_away_and_the_members_are_not_held_up() -> None:
    async with meeting() as (host, port):
        intruder = Guest("b", port, OTHER)
        await until(lambda: host.rejected_connections)
        async with guests(port, "a") as (first,):
            await until(lambda: first.client.view)
            assert first.client.view is not None
            assert first.client.view.stage is RendezvousStage.GATHERING, "the intruder is not counted as b"
            assert intruder.client.view is None
            intruder.client.leave()
        await all_come_together(port)


class _Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


HOSTILE = {
    "garbage": bytes(range(256)) * 4 + b"\n",
    "another protocol": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "a line without an end": b"pacekeeper " + b"a" * (4 * MAX_AUTHENTICATED_LINE_BYTES),
    "a giant length": b"\xff" * 8 + b"\n",
    "a membership without an end": b"pacekeeper " + b"0" * 32 + b" " + b"9" * 5000 + b"\n",
    "an unproved report": b"pacekeeper " + b"0" * 32 + b' 1\n{"worker": "a"}\n',
    "a guessed proof": b"pacekeeper " + b"0" * 32 + b" 1\n" + b"0" * 64 + b' {"worker": "a"}\n',
    "brackets": b"pacekeeper " + b"0" * 32 + b" 1\n" + b"0" * 64 + b" " + b"[" * 8000 + b"\n",
    "letters that are none": b"pacekeeper " + b"0" * 32 + b" 1\n\xff\xfe\xfd\n",
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE.keys())
async def test_what_proves_nothing_is_answered_by_hanging_up(content: bytes) -> None:
    async with meeting() as (host, port):
        said = await knock(port, content)
        assert said == b"" or (said.startswith(b"pacekeeper ") and len(said) < 64), "no more than a nonce"
        assert host.rejected_connections == 1
        await all_come_together(port)


async def test_a_pickle_that_is_sent_is_not_unpickled(tmp_path: Path) -> None:
    bomb = pickle.dumps(_Bomb(tmp_path / "exploded"))
    async with meeting() as (host, port):
        await knock(port, bomb + b"\n")
        await knock(port, b"pacekeeper " + b"0" * 32 + b" 1\n" + b"0" * 64 + b" " + bomb + b"\n")
        assert host.rejected_connections == 2
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize(
    "content", [b"", b"pace", b"pacekeeper " + b"0" * 32 + b" 1\n", b"pacekeeper " + b"0" * 32 + b" 9\n"]
)
async def test_whoever_keeps_silent_is_hung_up_on(content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """At any point before the proof, a membership that this host will never hear of included."""
    monkeypatch.setattr(transport, "RENDEZVOUS_AUTHENTICATION_SECONDS", 0.05)
    async with meeting() as (host, port):
        await knock(port, content)
        assert host.rejected_connections == 1


async def test_silent_strangers_without_end_keep_no_member_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "MAX_UNAUTHENTICATED_PARTICIPANTS", 4)
    monkeypatch.setattr(transport, "RENDEZVOUS_AUTHENTICATION_SECONDS", PATIENCE)  # they are not waited out
    async with meeting() as (host, port):
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(40)]
        await until(lambda: host.rejected_connections >= 36)
        await all_come_together(port)
        for _, writer in silent:
            writer.close()


async def test_strangers_are_counted_and_said_a_few_times_only(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    async with meeting() as (host, port):
        for _ in range(12):
            await knock(port, b"again\n")
        assert host.rejected_connections == 12
    said = [record.getMessage() for record in caplog.records if "were rejected" in record.getMessage()]
    assert [words.split()[0] for words in said] == ["1", "10"]
    assert "127.0.0.1" in said[0]


async def test_what_was_recorded_on_one_connection_proves_nothing_on_another() -> None:
    async with meeting() as (host, port):
        recorded = bytearray()

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            from_host, to_host = await asyncio.open_connection("127.0.0.1", port)

            async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter, keep: bytearray) -> None:
                while part := await source.read(1 << 16):
                    keep += part
                    target.write(part)
                target.close()

            await asyncio.gather(pump(reader, to_host, recorded), pump(from_host, writer, bytearray()))

        listener = await asyncio.start_server(relay, "127.0.0.1", 0)
        async with guests(listener.sockets[0].getsockname()[1], "a") as (member,):
            await until(lambda: member.client.view)
        assert recorded.count(b"\n") >= 2, "the greeting, and a report"
        assert host.rejected_connections == 0
        await knock(port, bytes(recorded))
        assert host.rejected_connections == 1
        listener.close()


async def test_a_host_without_the_secret_is_not_believed(caplog: pytest.LogCaptureFixture) -> None:
    visits = 0

    async def pretend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal visits
        visits += 1
        writer.write(b"pacekeeper " + b"0" * 32 + b"\n")
        await reader.readline()
        writer.write(b"0" * 64 + b' {"membership": 1, "phase": "Halted", "ending": 0, "reason": "go home"}\n')

    server = await asyncio.start_server(pretend, "127.0.0.1", 0)
    member = Guest("a", server.sockets[0].getsockname()[1])
    await until(lambda: visits >= 3)
    member.client.leave()
    server.close()
    assert member.client.view is None
    assert member.client.view_received_at is None, "it does not count as contact to the peers"
    assert sum("does not authenticate" in record.getMessage() for record in caplog.records) == 1


async def test_a_member_whose_plan_comes_before_the_hosts_is_kept_waiting_at_the_door() -> None:
    async with meeting(secret=None) as (host, port), guests(port, "a", "b") as both:
        await until(lambda: len(host._unauthenticated) == 2)
        host.admit(1, SECRET)
        for guest in both:
            await guest.wait_until_included()
        assert host.rejected_connections == 0


async def test_a_plan_without_a_secret_lets_anybody_in_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    async with meeting(secret="") as (_, port):
        members = [Guest(worker, port, secret="") for worker in "ab"]
        for member in members:
            await member.wait_until_included()
            member.client.leave()
    assert sum("has no secret" in record.getMessage() for record in caplog.records) == 1


async def test_no_secret_is_no_way_into_a_membership_that_has_one() -> None:
    async with meeting() as (host, port):
        intruder = Guest("a", port, secret="")
        await until(lambda: host.rejected_connections >= 2)
        assert intruder.client.view is None
        intruder.client.leave()


@asynccontextmanager
async def channels(
    host_secret: str = SECRET, guest_secret: str = SECRET
) -> AsyncIterator[tuple[AuthenticatedChannel, AuthenticatedChannel]]:
    """The host's end and the guest's."""
    ends: asyncio.Queue[tuple[AuthenticatedChannel, asyncio.StreamWriter]] = asyncio.Queue()

    async def attend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await ends.put((await authenticate_client(reader, writer, lambda _: _soon(host_secret)), writer))

    server = await asyncio.start_server(attend, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
    guest = await authenticate_to_server(reader, writer, 1, guest_secret)
    host, host_writer = await ends.get()
    try:
        yield host, guest
    finally:
        writer.close()
        host_writer.close()
        server.close()


async def _soon(secret: str) -> str:
    return secret


async def test_messages_pass_both_ways_in_their_order() -> None:
    async with channels() as (host, guest):
        for number in range(3):
            guest.write({"number": number})
            host.write({"number": -number})
        for number in range(3):
            assert await host.read() == {"number": number}
            assert await guest.read() == {"number": -number}


@pytest.mark.parametrize(
    "tamper",
    [
        lambda first, _: first + first,  # said again
        lambda first, second: second + first,  # out of order
        lambda _, second: second,  # the first withheld
        lambda first, second: first + second.replace(b"2", b"3"),
        lambda first, second: first + second[64:],
    ],
    ids=["again", "out of order", "withheld", "changed", "unproved"],
)
async def test_a_message_counts_once_at_its_place_and_as_it_was_said(
    tamper: Callable[[bytes, bytes], bytes],
) -> None:
    async with channels() as (host, guest):
        kept = _Kept()
        guest._writer, wire_ = kept, guest._writer  # type: ignore[assignment]
        guest.write({"number": 1})
        guest.write({"number": 2})
        wire_.write(tamper(*kept.lines))
        with pytest.raises(AuthenticationError):
            await _read_both(host)


async def _read_both(end: AuthenticatedChannel) -> None:
    for _ in range(2):
        await end.read()


class _Kept:
    """Keeps what is written."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []

    def is_closing(self) -> bool:
        return False

    def write(self, line: bytes) -> None:
        self.lines.append(line)


async def test_a_message_that_is_sent_back_proves_nothing() -> None:
    async with channels() as (host, guest):
        kept = _Kept()
        host._writer = kept  # type: ignore[assignment]
        host.write({"number": 1})
        guest._writer.write(kept.lines[0])
        with pytest.raises(AuthenticationError):
            await host.read()


async def _say(guest: AuthenticatedChannel, *reports: ParticipantReport) -> None:
    for its in reports:
        guest.write(its.to_json())


@pytest.mark.parametrize(
    "reports",
    [(report("a", membership=2),), (report("a"), report("b"))],
    ids=["of another membership", "of another worker"],
)
async def test_a_connection_speaks_for_one_worker_of_one_membership(reports: tuple[ParticipantReport, ...]) -> None:
    async with meeting() as (host, port):
        host.admit(2, OTHER)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        guest = await authenticate_to_server(reader, writer, 1, SECRET)
        await _say(guest, *reports)
        async with asyncio.timeout(PATIENCE):
            while await guest.read() is not None:
                pass
        await until(lambda: not host._connections)
        writer.close()
        await all_come_together(port)
