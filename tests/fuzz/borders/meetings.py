"""What launchers say to each other at a meeting, and what ranks bring to their neighbours: over real connections.

A stranger knows no secret. A member does, and may be of another version, broken or hostile: it may end its own
conversation, and nobody else's.
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

from pacekeeper.keep import neighbours
from pacekeeper.keep.neighbour_link import PeerLink, close_connection
from pacekeeper.keep.neighbours import MembershipSecret, ReplicaReceiver
from pacekeeper.keep.rank_state import RANK_STATE_BYTES
from pacekeeper.keep.snapshots import SLOT_HEADER_BYTES, Snapshots
from pacekeeper.keep.versions import NO_STATE_VERSION
from pacekeeper.launcher.meeting import RanksEnding, RendezvousStage, ParticipantReport, ParticipantStatus, RendezvousView
from pacekeeper.launcher.network import bind_socket
from pacekeeper.launcher.wire import RendezvousClient, RendezvousServer
from pacekeeper.seal import MAX_AUTHENTICATED_LINE_BYTES, authenticate_client, authenticate_to_server

from ..border import Border, Enter
from ..mutations import Mutated, as_json, content, document, one_of, written

SECRET = "5ec2e7" * 8
CIRCLE = MembershipSecret(membership=5, secret="ab" * 32)
KEY = "3"
PATIENCE = 30.0
HEADER_WORDS = 72
"""Bytes of a slot's header that mean something; nobody reads what lies between them and HEADER_BYTES."""


@contextmanager
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """One that forgets no exception."""
    made = asyncio.new_event_loop()
    troubles: list[BaseException | str] = []
    made.set_exception_handler(lambda _, context: troubles.append(context.get("exception") or context["message"]))
    made.__dict__["troubles"] = troubles
    try:
        yield made
    finally:
        made.close()


def sealed(channel: Any, message: Any) -> None:
    """As `Channel.write`, of anything."""
    data = written(message)
    channel._writer.write(channel._writing.next(data).hex().encode() + b" " + data + b"\n")


@contextmanager
def hosted() -> Iterator[Enter]:
    """Another member says it; afterwards two others still come together."""
    with loop() as made:

        async def meet(said: dict[str, Any]) -> object:
            host = RendezvousServer(lambda: 777)
            listener = bind_socket("127.0.0.1")
            port: int = listener.getsockname()[1]
            await host.serve(listener)
            host.admit(1, SECRET)
            try:
                return await knock(port, said)
            finally:
                await host.close()

        async def knock(port: int, said: dict[str, Any]) -> object:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=MAX_AUTHENTICATED_LINE_BYTES)
            async with asyncio.timeout(PATIENCE):
                if "stranger" in said:
                    writer.write(said["stranger"])
                    writer.write_eof()
                    await reader.read()
                    writer.close()
                    return None
                channel = await authenticate_to_server(reader, writer, 1, SECRET)
                sealed(channel, said["report"])
                with suppress(ConnectionError, ValueError):
                    answer = await channel.read()
                    return None if answer is None else RendezvousView.from_json(answer).stage
                return None

        def enter(said: dict[str, Any]) -> object:
            found = made.run_until_complete(meet(said))
            if troubles := made.__dict__["troubles"]:
                raise RuntimeError(f"left behind: {troubles.pop()!r}")
            return found

        yield enter


def said_by_guests() -> list[dict[str, Any]]:
    report = ParticipantReport("a", "first", 1, ParticipantStatus.READY, 0, RanksEnding.ENDED, workers=2)
    return [{"report": report.to_json()}, {"stranger": b"pacekeeper 0123456789abcdef0123456789abcdef 1\n00 {}\n"}]


@contextmanager
def attended() -> Iterator[Enter]:
    """A host says it; the client goes on, and has taken it or left it."""
    with loop() as made:

        async def meet(view: Any) -> object:
            heard, told = asyncio.Event(), asyncio.Event()

            async def attend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                channel = await authenticate_client(reader, writer, secret_of)
                if not told.is_set():
                    sealed(channel, view)
                    told.set()
                with suppress(ConnectionError, ValueError):
                    await reader.read(1)
                    while await reader.read(4096):
                        pass
                writer.close()

            async def secret_of(_: int) -> str:
                return SECRET

            server = await asyncio.start_server(attend, "127.0.0.1", 0, limit=MAX_AUTHENTICATED_LINE_BYTES)
            client = RendezvousClient(heard.set)
            client.join("127.0.0.1", server.sockets[0].getsockname()[1], 1, SECRET)
            task = client._task
            assert task is not None
            try:
                async with asyncio.timeout(PATIENCE):
                    await told.wait()
                    for _ in range(20):
                        await asyncio.sleep(0)
                with suppress(TimeoutError):
                    async with asyncio.timeout(0.02):
                        await heard.wait()
                if task.done():
                    raise RuntimeError(f"the client has ended: {task.exception()!r}")
                return client.view
            finally:
                client.leave()
                server.close()

        def enter(view: Any) -> object:
            found = made.run_until_complete(meet(view))
            if troubles := made.__dict__["troubles"]:
                raise RuntimeError(f"left behind: {troubles.pop()!r}")
            return found

        yield enter


VIEW = RendezvousView(1, RendezvousStage.RUNNING, 3, 777, 1, True, "b", RanksEnding.SIGNAL, "", ("c",)).to_json()


def shard(folder: Path) -> Snapshots:
    return Snapshots(folder, "shard-3-of-4", round_=1, world_size=4, fingerprint=7, read_memory_left=lambda: 1e12)


@contextmanager
def shelved() -> Iterator[Enter]:
    """A member brings it; what is kept then is what the rank had, or nothing."""
    with tempfile.TemporaryDirectory() as place, socket.create_server(("127.0.0.1", 0)) as listener:
        ReplicaReceiver({KEY: shard(Path(place))}, CIRCLE).serve(listener)

        def enter(said: dict[str, Any]) -> object:
            for path in Path(place).glob("shard*"):
                path.unlink()
            connection = socket.create_connection(listener.getsockname(), timeout=PATIENCE)
            try:
                bring(PeerLink.authenticate_to_server(connection, CIRCLE.membership, CIRCLE.secret), said)
            except (OSError, ValueError, KeyError):
                pass  # it has hung up, or has refused it
            finally:
                close_connection(connection)
            kept = shard(Path(place))
            slots = [kept.read(version) for version, _ in kept.list_versions() if version != NO_STATE_VERSION]
            whole = [bytes(slot.numpy().data) for slot in slots if slot is not None]
            return [(data[:HEADER_WORDS], data[SLOT_HEADER_BYTES:]) for data in whole]

        yield enter


def bring(link: PeerLink, said: dict[str, Any]) -> None:
    link.send(memoryview(written(said["offer"])))
    if link.receive_json()["refused"]:
        return
    data = said["slot"]
    for start in range(SLOT_HEADER_BYTES, len(data), neighbours.MIN_SNAPSHOT_PART_BYTES):
        link.send(memoryview(data)[start : start + neighbours.MIN_SNAPSHOT_PART_BYTES])
    link.send(memoryview(data[:SLOT_HEADER_BYTES]))
    link.receive_json()


def brought() -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as place:
        snapshots = shard(Path(place))
        snapshots.write(5, {"model": {"weight": torch.full((100,), 5.0)}}, fingerprint=7)
        snapshots.publish(torch.full((4 * RANK_STATE_BYTES,), 5, dtype=torch.uint8))
        data = Path(place, "shard-3-of-4.0").read_bytes()
    return [{"offer": {"key": KEY, "bytes": len(data), "part": neighbours.MIN_SNAPSHOT_PART_BYTES}, "slot": data}]


def whole_or_none(found: Any, valid: Any) -> str:
    return "" if found in ([], valid) else f"something else is kept: {str(found)[:200]}"


def short(dice: Random, valid: Any) -> Mutated:
    """What fits into a line."""
    while len(as_json((found := document(dice, valid)).value)) > MAX_AUTHENTICATED_LINE_BYTES - 100:
        pass
    return found


def mutate_guest(dice: Random, said: dict[str, Any]) -> Mutated:
    return one_of(dice, said, {"report": short, "stranger": content})


def mutate_bearer(dice: Random, said: dict[str, Any]) -> Mutated:
    return one_of(dice, said, {"offer": short, "slot": content})


BORDERS = [
    Border("the meeting's host", said_by_guests, mutate_guest, hosted, refusals=(), cases=150),
    Border("the meeting's guest", lambda: [VIEW], short, attended, refusals=(), cases=60),
    Border("the neighbours' shelf", brought, mutate_bearer, shelved, refusals=(), judge=whole_or_none, cases=150),
]
