"""Launchers measure their links over real connections, and only between holders of the membership's secret."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from pacekeeper.launcher.network import link_probes
from pacekeeper.launcher.network.interfaces import bind_socket
from pacekeeper.launcher.network.link_probes import (
    MAX_PROBE_CONNECTIONS,
    PROBE_MEASUREMENT_SECONDS,
    PROBE_TRANSFER_BYTES,
    LinkProber,
    LinkProbeServer,
)
from pacekeeper.message_authentication import AuthenticatedChannel, authenticate_to_server
from pacekeeper.runtime_folder import read_json
from pacekeeper_analysis.protocol.reports import Evidence, LinkProbe
from pacekeeper_analysis.protocol.requests import LinkProbeTask, ProbeTarget

SECRET, OTHER = "5ec2e7" * 8, "0a" * 24


@asynccontextmanager
async def run_server(secret: str = SECRET) -> AsyncIterator[tuple[LinkProbeServer, int]]:
    serving, listener = LinkProbeServer(), bind_socket("127.0.0.1")
    port: int = listener.getsockname()[1]
    await serving.serve(listener)
    serving.admit(1, secret)
    try:
        yield serving, port
    finally:
        serving.close()


async def measure_links(
    folder: Path, *targets: ProbeTarget, secret: str = SECRET, membership: int = 1
) -> list[LinkProbe]:
    prober = LinkProber(folder / "probes.json")
    prober.start_task(LinkProbeTask("p", targets), membership, secret)
    await prober.wait_done()
    found = read_json(folder / "probes.json")
    assert found is not None
    assert found["name"] == "p"
    return list(Evidence.from_json({"request": "p", "worker": "w", "round": 1, "probes": found["probes"]}).probes)


async def test_pings_and_transfers_of_every_target_are_measured_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("PROBE_MEASUREMENT_SECONDS", "PROBE_PING_SECONDS", "PING_LOST_SECONDS"):
        monkeypatch.setattr(link_probes, limit, 60.0)  # the link loses nothing; a machine under load is only slow
    async with run_server() as (_, port):
        began = time.monotonic()
        here, later = await measure_links(
            tmp_path, *(ProbeTarget(f"w{i}", f"127.0.0.1:{port}", slot=i) for i in range(2))
        )
        assert time.monotonic() - began > 1.0, "the second has a slot of its own"
    for found, name in ((here, "w0"), (later, "w1")):
        assert (found.target, found.failed, found.pings_lost) == (name, "", 0)
        assert found.bytes_per_second
        assert found.ping_seconds


async def test_a_ping_that_takes_as_long_as_a_retransmission_counts_as_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_probes, "PING_LOST_SECONDS", 0.0)
    monkeypatch.setattr(link_probes, "PROBE_PINGS", 3)
    for limit in ("PROBE_MEASUREMENT_SECONDS", "PROBE_PING_SECONDS"):
        monkeypatch.setattr(link_probes, limit, 60.0)
    async with run_server() as (_, port):
        (found,) = await measure_links(tmp_path, ProbeTarget("w", f"127.0.0.1:{port}"))
    assert found.pings_lost == 3


async def test_a_request_is_measured_once_and_a_new_one_ends_it(tmp_path: Path) -> None:
    results = tmp_path / "probes.json"
    async with run_server() as (_, port):
        prober = LinkProber(results)
        slow = LinkProbeTask("old", (ProbeTarget("w", f"127.0.0.1:{port}", slot=9),))
        prober.start_task(slow, 1, SECRET)
        prober.start_task(LinkProbeTask("new", (ProbeTarget("w", f"127.0.0.1:{port}"),)), 1, SECRET)
        await prober.wait_done()
        assert (read_json(results) or {})["name"] == "new"
        results.unlink()
        prober.start_task(LinkProbeTask("new", ()), 1, SECRET)
        prober.start_task(None, 1, SECRET)
        await prober.wait_done()
        assert not results.exists()


@pytest.mark.parametrize(("secret", "membership"), [(OTHER, 1), (SECRET, 2), ("", 1)])
async def test_a_worker_without_the_memberships_secret_measures_nothing(
    tmp_path: Path, secret: str, membership: int
) -> None:
    async with run_server() as (_, port):
        (found,) = await measure_links(
            tmp_path, ProbeTarget("w", f"127.0.0.1:{port}"), secret=secret, membership=membership
        )
    assert found.failed
    assert found.bytes_per_second is None


async def test_a_server_without_a_secret_answers_no_one(tmp_path: Path) -> None:
    async with run_server(secret="") as (_, port):
        (found,) = await measure_links(tmp_path, ProbeTarget("w", f"127.0.0.1:{port}"))
    assert found.failed


@pytest.mark.parametrize("address", ["127.0.0.1:1", "no-such-host.invalid:1", "127.0.0.1:none", "nonsense"])
async def test_an_address_without_a_listener_is_reported(tmp_path: Path, address: str) -> None:
    (found,) = await measure_links(tmp_path, ProbeTarget("w", address))
    assert found.failed
    assert found.bytes_per_second is None


async def test_a_silent_peer_costs_one_turn_only(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        (found,) = await measure_links(tmp_path, ProbeTarget("w", f"127.0.0.1:{silent.getsockname()[1]}"))
    assert time.monotonic() - began < PROBE_MEASUREMENT_SECONDS + 10
    assert found.failed


async def test_a_transfer_that_misses_its_deadline_reports_what_arrived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that takes 20 MB/s; the whole would take three seconds."""
    read = asyncio.StreamReader.read

    async def read_slowly(reader: asyncio.StreamReader, size: int = -1) -> bytes:
        await asyncio.sleep(0.01)
        return await read(reader, min(size, 200_000))

    monkeypatch.setattr(asyncio.StreamReader, "read", read_slowly)
    monkeypatch.setattr(link_probes, "PROBE_TRANSFER_BYTES", 8 * PROBE_TRANSFER_BYTES)
    async with run_server() as (_, port):
        (found,) = await measure_links(tmp_path, ProbeTarget("w", f"127.0.0.1:{port}"))
    assert found.failed == ""
    assert found.bytes_per_second is not None
    assert 1e6 < found.bytes_per_second < 60e6


async def connect_client(
    port: int, secret: str = SECRET
) -> tuple[AuthenticatedChannel, asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    return await authenticate_to_server(reader, writer, 1, secret), reader, writer


@pytest.mark.parametrize(
    "message",
    [{"transfer": 10**12}, {"transfer": -1}, {"transfer": "x"}, {}, {"quit": 1}],
)
async def test_a_client_that_sends_another_request_is_disconnected(message: dict[str, object]) -> None:
    async with run_server() as (_, port):
        channel, reader, writer = await connect_client(port)
        channel.write(message)
        async with asyncio.timeout(60):
            assert await reader.read() == b""
        writer.close()


async def test_the_number_of_pings_of_a_client_is_limited() -> None:
    async with run_server() as (_, port):
        channel, _, writer = await connect_client(port)
        answers = 0
        with contextlib.suppress(ConnectionError):
            for number in range(link_probes.PROBE_PINGS + 10):
                channel.write({"ping": number})
                if await channel.read() is None:
                    break
                answers += 1
        assert answers == link_probes.PROBE_PINGS
        writer.close()


async def test_unauthenticated_connections_fill_no_memory_and_block_no_member(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("PROBE_AUTHENTICATION_SECONDS", "PROBE_CONNECTION_SECONDS", "PROBE_MEASUREMENT_SECONDS"):
        monkeypatch.setattr(link_probes, limit, 120.0)
    async with run_server() as (serving, port):
        crowd = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3 * MAX_PROBE_CONNECTIONS)]
        async with asyncio.timeout(60):  # less than an unauthenticated connection is allowed
            for reader, _ in crowd[: 2 * MAX_PROBE_CONNECTIONS]:
                await reader.read()  # until it is disconnected
        assert len(serving._connections) == MAX_PROBE_CONNECTIONS
        (found,) = await measure_links(tmp_path, ProbeTarget("w", f"127.0.0.1:{port}"))
        assert found.failed == "", "an authenticated peer is admitted"
        for _, writer in crowd:
            writer.close()


async def test_an_unauthenticated_connection_is_closed_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_probes, "PROBE_AUTHENTICATION_SECONDS", 0.1)
    async with run_server() as (serving, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.timeout(60):
            await reader.read()  # until it is disconnected
        assert not serving._connections
        writer.close()


async def test_an_invalid_address_is_the_error(tmp_path: Path) -> None:
    (found,) = await measure_links(tmp_path, ProbeTarget("w", "127.0.0.1:99999"))
    assert "port must be 0-65535" in found.failed
