"""What launchers exchange at a rendezvous, and the peer replicas that ranks send: over real connections.

A stranger has no secret. A member does, and may be of another version, broken or hostile: it may end its own
connection, and no other.
"""

from __future__ import annotations

import asyncio
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import torch

from pacekeeper.checkpointing.rank_state import RANK_STATE_BYTES
from pacekeeper.checkpointing.snapshots import peer_replication
from pacekeeper.checkpointing.snapshots.peer_link import PeerLink, close_connection
from pacekeeper.checkpointing.snapshots.peer_replication import MembershipSecret, ReplicaReceiver
from pacekeeper.checkpointing.snapshots.snapshot_slots import SLOT_HEADER_BYTES, SlotMemory, Snapshots
from pacekeeper.checkpointing.versions import NO_STATE_VERSION
from pacekeeper.launcher.network.interfaces import bind_socket
from pacekeeper.launcher.rendezvous.rendezvous import (
    ParticipantReport,
    ParticipantStatus,
    RanksEnding,
    RendezvousStage,
    RendezvousView,
)
from pacekeeper.launcher.rendezvous.transport import RendezvousClient, RendezvousServer
from pacekeeper.message_authentication import (
    MAX_AUTHENTICATED_LINE_BYTES,
    authenticate_client,
    authenticate_to_server,
)

from ..border import Border, Enter
from ..mutations import Mutated, as_json, mutate_bytes, mutate_document, mutate_one_part, to_bytes

SECRET = "5ec2e7" * 8
MEMBERSHIP = MembershipSecret(membership=5, secret="ab" * 32)
KEY = "3"
TIMEOUT_SECONDS = 30.0
USED_HEADER_BYTES = 72
"""Bytes of a slot's header that mean something; what lies between them and SLOT_HEADER_BYTES is not read."""


@contextmanager
def create_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """One that forgets no exception."""
    loop = asyncio.new_event_loop()
    problems: list[BaseException | str] = []
    loop.set_exception_handler(lambda _, context: problems.append(context.get("exception") or context["message"]))
    loop.__dict__["troubles"] = problems
    try:
        yield loop
    finally:
        loop.close()


def write_authenticated(channel: Any, message: Any) -> None:
    """As `AuthenticatedChannel.write`, of anything."""
    data = to_bytes(message)
    channel._writer.write(channel._write_authenticator.sign(data).hex().encode() + b" " + data + b"\n")


@contextmanager
def run_server() -> Iterator[Enter]:
    """Another member sends it; afterwards two others still complete a rendezvous."""
    with create_loop() as loop:

        async def run_exchange(message: dict[str, Any]) -> object:
            server = RendezvousServer(lambda: 777)
            listener = bind_socket("127.0.0.1")
            port: int = listener.getsockname()[1]
            await server.serve(listener)
            server.admit(1, SECRET)
            try:
                return await send_message(port, message)
            finally:
                await server.close()

        async def send_message(port: int, message: dict[str, Any]) -> object:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=MAX_AUTHENTICATED_LINE_BYTES)
            async with asyncio.timeout(TIMEOUT_SECONDS):
                if "stranger" in message:
                    writer.write(message["stranger"])
                    writer.write_eof()
                    await reader.read()
                    writer.close()
                    return None
                channel = await authenticate_to_server(reader, writer, 1, SECRET)
                write_authenticated(channel, message["report"])
                with suppress(ConnectionError, ValueError):
                    reply = await channel.read()
                    return None if reply is None else RendezvousView.from_json(reply).stage
                return None

        def enter(message: dict[str, Any]) -> object:
            result = loop.run_until_complete(run_exchange(message))
            if problems := loop.__dict__["troubles"]:
                raise RuntimeError(f"left behind: {problems.pop()!r}")
            return result

        yield enter


def build_participant_messages() -> list[dict[str, Any]]:
    report = ParticipantReport("a", "first", 1, ParticipantStatus.READY, 0, RanksEnding.ENDED, workers=2)
    return [{"report": report.to_json()}, {"stranger": b"pacekeeper 0123456789abcdef0123456789abcdef 1\n00 {}\n"}]


@contextmanager
def run_client() -> Iterator[Enter]:
    """A server sends it; the client goes on, and has accepted or ignored it."""
    with create_loop() as loop:

        async def run_exchange(view: Any) -> object:
            view_received, view_sent = asyncio.Event(), asyncio.Event()

            async def send_view(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                channel = await authenticate_client(reader, writer, get_secret)
                if not view_sent.is_set():
                    write_authenticated(channel, view)
                    view_sent.set()
                with suppress(ConnectionError, ValueError):
                    await reader.read(1)
                    while await reader.read(4096):
                        pass
                writer.close()

            async def get_secret(_: int) -> str:
                return SECRET

            server = await asyncio.start_server(send_view, "127.0.0.1", 0, limit=MAX_AUTHENTICATED_LINE_BYTES)
            client = RendezvousClient(view_received.set)
            client.join("127.0.0.1", server.sockets[0].getsockname()[1], 1, SECRET)
            task = client._task
            assert task is not None
            try:
                async with asyncio.timeout(TIMEOUT_SECONDS):
                    await view_sent.wait()
                    for _ in range(20):
                        await asyncio.sleep(0)
                with suppress(TimeoutError):
                    async with asyncio.timeout(0.02):
                        await view_received.wait()
                if task.done():
                    raise RuntimeError(f"the client has ended: {task.exception()!r}")
                return client.view
            finally:
                client.leave()
                server.close()

        def enter(view: Any) -> object:
            result = loop.run_until_complete(run_exchange(view))
            if problems := loop.__dict__["troubles"]:
                raise RuntimeError(f"left behind: {problems.pop()!r}")
            return result

        yield enter


VIEW = RendezvousView(1, RendezvousStage.RUNNING, 3, 777, 1, True, "b", RanksEnding.SIGNAL, "", ("c",)).to_json()


def open_shard(folder: Path) -> Snapshots:
    return Snapshots(folder, "shard-3-of-4", round_=1, world_size=4, fingerprint=7, memory=SlotMemory(lambda: 1e12))


@contextmanager
def run_replica_receiver() -> Iterator[Enter]:
    """A member brings it; what is kept then is what the rank had, or nothing."""
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as listener:
        ReplicaReceiver({KEY: open_shard(Path(folder))}, MEMBERSHIP).serve(listener)

        def enter(message: dict[str, Any]) -> object:
            for path in Path(folder).glob("shard*"):
                path.unlink()
            connection = socket.create_connection(listener.getsockname(), timeout=TIMEOUT_SECONDS)
            try:
                send_replica(
                    PeerLink.authenticate_to_server(connection, MEMBERSHIP.membership, MEMBERSHIP.secret), message
                )
            except (OSError, ValueError, KeyError):
                pass  # it has hung up, or has refused it
            finally:
                close_connection(connection)
            snapshots = open_shard(Path(folder))
            slots = [snapshots.read(version) for version, _ in snapshots.list_versions() if version != NO_STATE_VERSION]
            contents = [bytes(slot.numpy().data) for slot in slots if slot is not None]
            return [(data[:USED_HEADER_BYTES], data[SLOT_HEADER_BYTES:]) for data in contents]

        yield enter


def send_replica(link: PeerLink, message: dict[str, Any]) -> None:
    link.send(memoryview(to_bytes(message["offer"])))
    if link.receive_json()["refused"]:
        return
    data = message["slot"]
    for start in range(SLOT_HEADER_BYTES, len(data), peer_replication.MIN_SNAPSHOT_PART_BYTES):
        link.send(memoryview(data)[start : start + peer_replication.MIN_SNAPSHOT_PART_BYTES])
    link.send(memoryview(data[:SLOT_HEADER_BYTES]))
    link.receive_json()


def build_replicas() -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        snapshots = open_shard(Path(folder))
        snapshots.write(5, {"model": {"weight": torch.full((100,), 5.0)}}, fingerprint=7)
        snapshots.publish(torch.full((4 * RANK_STATE_BYTES,), 5, dtype=torch.uint8))
        data = Path(folder, "shard-3-of-4.0").read_bytes()
    return [{"offer": {"key": KEY, "bytes": len(data), "part": peer_replication.MIN_SNAPSHOT_PART_BYTES}, "slot": data}]


def check_whole_or_none(result: Any, valid: Any) -> str:
    return "" if result in ([], valid) else f"something else is kept: {str(result)[:200]}"


def mutate_line(rng: Random, valid: Any) -> Mutated:
    """What fits into a line."""
    while len(as_json((mutated := mutate_document(rng, valid)).value)) > MAX_AUTHENTICATED_LINE_BYTES - 100:
        pass
    return mutated


def mutate_participant(rng: Random, message: dict[str, Any]) -> Mutated:
    return mutate_one_part(rng, message, {"report": mutate_line, "stranger": mutate_bytes})


def mutate_replica(rng: Random, message: dict[str, Any]) -> Mutated:
    return mutate_one_part(rng, message, {"offer": mutate_line, "slot": mutate_bytes})


BORDERS = [
    Border("the rendezvous server", build_participant_messages, mutate_participant, run_server, refusals=(), cases=150),
    Border("the rendezvous client", lambda: [VIEW], mutate_line, run_client, refusals=(), cases=60),
    Border(
        "peer replicas",
        build_replicas,
        mutate_replica,
        run_replica_receiver,
        refusals=(),
        check=check_whole_or_none,
        cases=150,
    ),
]
