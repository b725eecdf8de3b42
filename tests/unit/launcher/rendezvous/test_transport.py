"""The rendezvous over real connections: members come together, and unauthenticated peers are not trusted."""

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
PATIENCE = 60.0
STORE_PORT = 777


def build_report(worker: str, membership: int = 1) -> ParticipantReport:
    return ParticipantReport(worker, "first", membership, ParticipantStatus.READY, round=0, workers=2)


class RendezvousParticipant:
    """A launcher's client that reports that it is ready."""

    def __init__(self, worker: str, port: int, secret: str = SECRET, membership: int = 1) -> None:
        self._seen = asyncio.Event()
        self.client = RendezvousClient(on_view=self._seen.set)
        self.client.join("127.0.0.1", port, membership, secret)
        self.client.report(build_report(worker, membership))

    async def wait_until_included(self) -> None:
        async with asyncio.timeout(PATIENCE):
            while not ((view := self.client.view) and view.stage is RendezvousStage.RUNNING and view.included):
                self._seen.clear()
                await self._seen.wait()


@asynccontextmanager
async def run_server(secret: str | None = SECRET) -> AsyncIterator[tuple[RendezvousServer, int]]:
    """Yield a server and its port. `secret`: of membership 1; None: the server has not received it yet."""
    rendezvous_server = RendezvousServer(lambda: STORE_PORT)
    listener = bind_socket("127.0.0.1")
    port: int = listener.getsockname()[1]
    await rendezvous_server.serve(listener)
    if secret is not None:
        rendezvous_server.admit(1, secret)
    try:
        yield rendezvous_server, port
    finally:
        await rendezvous_server.close()


@asynccontextmanager
async def connect_participants(port: int, *workers: str) -> AsyncIterator[list[RendezvousParticipant]]:
    participants = [RendezvousParticipant(worker, port) for worker in workers]
    try:
        yield participants
    finally:
        for participant in participants:
            participant.client.leave()


async def assert_members_come_together(port: int) -> None:
    async with connect_participants(port, "a", "b") as both:
        for participant in both:
            await participant.wait_until_included()
            assert participant.client.view is not None
            assert participant.client.view.port == STORE_PORT


async def wait_until(is_met: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not is_met():  # noqa: ASYNC110  # the state that is polled has no event
            await asyncio.sleep(0.002)


async def send_and_read(port: int, content: bytes) -> bytes:
    """Send `content` only, and return all that the server sends until it disconnects."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    received = bytearray()
    try:
        writer.write(content)
        async with asyncio.timeout(PATIENCE):
            while part := await reader.read(1 << 16):
                received += part
    except ConnectionError:
        pass
    finally:
        writer.close()
    return bytes(received)


async def test_members_come_together() -> None:
    async with run_server() as (rendezvous_server, port):
        await assert_members_come_together(port)
        assert rendezvous_server.rejected_connections == 0


async def test_another_secret_is_rejected_and_the_members_are_not_delayed() -> None:
    async with run_server() as (rendezvous_server, port):
        intruder = RendezvousParticipant("b", port, OTHER)
        await wait_until(lambda: rendezvous_server.rejected_connections)
        async with connect_participants(port, "a") as (first,):
            await wait_until(lambda: first.client.view)
            assert first.client.view is not None
            assert first.client.view.stage is RendezvousStage.GATHERING, "the intruder is not counted as b"
            assert intruder.client.view is None
            intruder.client.leave()
        await assert_members_come_together(port)


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
async def test_an_invalid_proof_is_answered_by_disconnecting(content: bytes) -> None:
    async with run_server() as (rendezvous_server, port):
        received = await send_and_read(port, content)
        assert received == b"" or (received.startswith(b"pacekeeper ") and len(received) < 64), "no more than a nonce"
        assert rendezvous_server.rejected_connections == 1
        await assert_members_come_together(port)


async def test_a_received_pickle_is_not_unpickled(tmp_path: Path) -> None:
    bomb = pickle.dumps(_Bomb(tmp_path / "exploded"))
    async with run_server() as (rendezvous_server, port):
        await send_and_read(port, bomb + b"\n")
        await send_and_read(port, b"pacekeeper " + b"0" * 32 + b" 1\n" + b"0" * 64 + b" " + bomb + b"\n")
        assert rendezvous_server.rejected_connections == 2
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize(
    "content", [b"", b"pace", b"pacekeeper " + b"0" * 32 + b" 1\n", b"pacekeeper " + b"0" * 32 + b" 9\n"]
)
async def test_a_silent_connection_is_closed(content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """At any point before the proof, for a membership that this server will never receive too."""
    monkeypatch.setattr(transport, "RENDEZVOUS_AUTHENTICATION_SECONDS", 0.05)
    async with run_server() as (rendezvous_server, port):
        await send_and_read(port, content)
        assert rendezvous_server.rejected_connections == 1


async def test_endless_silent_connections_block_no_member(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "MAX_UNAUTHENTICATED_PARTICIPANTS", 4)
    monkeypatch.setattr(transport, "RENDEZVOUS_AUTHENTICATION_SECONDS", PATIENCE)  # their time-out is not waited for
    async with run_server() as (rendezvous_server, port):
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(40)]
        await wait_until(lambda: rendezvous_server.rejected_connections >= 36)
        await assert_members_come_together(port)
        for _, writer in silent:
            writer.close()


async def test_rejected_connections_are_counted_and_logged_only_a_few_times(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    async with run_server() as (rendezvous_server, port):
        for _ in range(12):
            await send_and_read(port, b"again\n")
        assert rendezvous_server.rejected_connections == 12
    received = [record.getMessage() for record in caplog.records if "were rejected" in record.getMessage()]
    assert [message.split()[0] for message in received] == ["1", "10"]
    assert "127.0.0.1" in received[0]


async def test_a_recording_of_one_connection_proves_nothing_on_another() -> None:
    async with run_server() as (rendezvous_server, port):
        recorded = bytearray()

        async def relay_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            from_host, to_host = await asyncio.open_connection("127.0.0.1", port)

            async def pump_bytes(source: asyncio.StreamReader, target: asyncio.StreamWriter, keep: bytearray) -> None:
                while part := await source.read(1 << 16):
                    keep += part
                    target.write(part)
                target.close()

            await asyncio.gather(pump_bytes(reader, to_host, recorded), pump_bytes(from_host, writer, bytearray()))

        listener = await asyncio.start_server(relay_connection, "127.0.0.1", 0)
        async with connect_participants(listener.sockets[0].getsockname()[1], "a") as (member,):
            await wait_until(lambda: member.client.view)
        assert recorded.count(b"\n") >= 2, "the greeting, and a report"
        assert rendezvous_server.rejected_connections == 0
        await send_and_read(port, bytes(recorded))
        assert rendezvous_server.rejected_connections == 1
        listener.close()


async def test_a_server_without_the_secret_is_not_trusted(caplog: pytest.LogCaptureFixture) -> None:
    visits = 0

    async def impersonate_server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal visits
        visits += 1
        writer.write(b"pacekeeper " + b"0" * 32 + b"\n")
        await reader.readline()
        writer.write(b"0" * 64 + b' {"membership": 1, "phase": "Halted", "ending": 0, "reason": "go home"}\n')

    server = await asyncio.start_server(impersonate_server, "127.0.0.1", 0)
    member = RendezvousParticipant("a", server.sockets[0].getsockname()[1])
    await wait_until(lambda: visits >= 3)
    member.client.leave()
    server.close()
    assert member.client.view is None
    assert member.client.view_received_at is None, "it does not count as contact to the peers"
    assert sum("does not authenticate" in record.getMessage() for record in caplog.records) == 1


async def test_a_member_whose_plan_comes_before_the_servers_waits_for_admission() -> None:
    async with run_server(secret=None) as (rendezvous_server, port), connect_participants(port, "a", "b") as both:
        await wait_until(lambda: len(rendezvous_server._unauthenticated) == 2)
        rendezvous_server.admit(1, SECRET)
        for participant in both:
            await participant.wait_until_included()
        assert rendezvous_server.rejected_connections == 0


async def test_a_plan_without_a_secret_admits_every_peer_and_logs_it(caplog: pytest.LogCaptureFixture) -> None:
    async with run_server(secret="") as (_, port):
        members = [RendezvousParticipant(worker, port, secret="") for worker in "ab"]
        for member in members:
            await member.wait_until_included()
            member.client.leave()
    assert sum("has no secret" in record.getMessage() for record in caplog.records) == 1


async def test_an_empty_secret_does_not_admit_to_a_membership_that_has_one() -> None:
    async with run_server() as (rendezvous_server, port):
        intruder = RendezvousParticipant("a", port, secret="")
        await wait_until(lambda: rendezvous_server.rejected_connections >= 2)
        assert intruder.client.view is None
        intruder.client.leave()


@asynccontextmanager
async def open_channels(
    server_secret: str = SECRET, client_secret: str = SECRET
) -> AsyncIterator[tuple[AuthenticatedChannel, AuthenticatedChannel]]:
    """Yield the server's end and the client's."""
    ends: asyncio.Queue[tuple[AuthenticatedChannel, asyncio.StreamWriter]] = asyncio.Queue()

    async def authenticate_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await ends.put((await authenticate_client(reader, writer, lambda _: _return_secret(server_secret)), writer))

    server = await asyncio.start_server(authenticate_connection, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
    participant = await authenticate_to_server(reader, writer, 1, client_secret)
    rendezvous_server, host_writer = await ends.get()
    try:
        yield rendezvous_server, participant
    finally:
        writer.close()
        host_writer.close()
        server.close()


async def _return_secret(secret: str) -> str:
    return secret


async def test_messages_pass_both_ways_in_their_order() -> None:
    async with open_channels() as (rendezvous_server, participant):
        for number in range(3):
            participant.write({"number": number})
            rendezvous_server.write({"number": -number})
        for number in range(3):
            assert await rendezvous_server.read() == {"number": number}
            assert await participant.read() == {"number": -number}


@pytest.mark.parametrize(
    "tamper",
    [
        lambda first, _: first + first,  # repeated
        lambda first, second: second + first,  # out of order
        lambda _, second: second,  # the first withheld
        lambda first, second: first + second.replace(b"2", b"3"),
        lambda first, second: first + second[64:],
    ],
    ids=["again", "out of order", "withheld", "changed", "unproved"],
)
async def test_a_message_counts_once_at_its_place_and_unchanged(
    tamper: Callable[[bytes, bytes], bytes],
) -> None:
    async with open_channels() as (rendezvous_server, participant):
        kept = _RecordingWriter()
        participant._writer, wire_ = kept, participant._writer  # type: ignore[assignment]
        participant.write({"number": 1})
        participant.write({"number": 2})
        wire_.write(tamper(*kept.lines))
        with pytest.raises(AuthenticationError):
            await _read_both(rendezvous_server)


async def _read_both(end: AuthenticatedChannel) -> None:
    for _ in range(2):
        await end.read()


class _RecordingWriter:
    """Stores what is written."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []

    def is_closing(self) -> bool:
        return False

    def write(self, line: bytes) -> None:
        self.lines.append(line)


async def test_a_message_that_is_sent_back_proves_nothing() -> None:
    async with open_channels() as (rendezvous_server, participant):
        kept = _RecordingWriter()
        rendezvous_server._writer = kept  # type: ignore[assignment]
        rendezvous_server.write({"number": 1})
        participant._writer.write(kept.lines[0])
        with pytest.raises(AuthenticationError):
            await rendezvous_server.read()


async def _write_reports(participant: AuthenticatedChannel, *reports: ParticipantReport) -> None:
    for its in reports:
        participant.write(its.to_json())


@pytest.mark.parametrize(
    "reports",
    [(build_report("a", membership=2),), (build_report("a"), build_report("b"))],
    ids=["of another membership", "of another worker"],
)
async def test_a_connection_speaks_for_one_worker_of_one_membership(reports: tuple[ParticipantReport, ...]) -> None:
    async with run_server() as (rendezvous_server, port):
        rendezvous_server.admit(2, OTHER)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        participant = await authenticate_to_server(reader, writer, 1, SECRET)
        await _write_reports(participant, *reports)
        async with asyncio.timeout(PATIENCE):
            while await participant.read() is not None:
                pass
        await wait_until(lambda: not rendezvous_server._connections)
        writer.close()
        await assert_members_come_together(port)
