"""Measures links between launchers at the operator's request.

Pings and transfers are too small to disturb training.

`LinkProbeServer` answers at a port that the heartbeat announces. `LinkProber` measures in the time slots that the plan
assigns, and writes the results. Both ends first authenticate with the membership's secret (`message_authentication`).
Messages after that, the client's first: {"ping": n} → {"pong": n}; {"transfer": bytes}, the bytes themselves →
{"took": bytes}.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
import time
from pathlib import Path
from statistics import median

from pacekeeper.message_authentication import (
    AuthenticatedChannel,
    AuthenticationError,
    authenticate_client,
    authenticate_to_server,
)
from pacekeeper.runtime_folder import write_json
from pacekeeper_analysis.protocol.reports import LinkProbe
from pacekeeper_analysis.protocol.requests import LinkProbeTask, ProbeTarget

PROBE_SLOT_SECONDS = 1.0
PROBE_MEASUREMENT_SECONDS = 0.9
"""Maximum duration of a measurement: it ends before the next slot starts, however slow the link is."""
PROBE_PING_SECONDS = 0.25
"""The part of it for pings."""
PROBE_PINGS, PROBE_TRANSFERS, PROBE_TRANSFER_BYTES = 50, 3, 8_000_000
PING_LOST_SECONDS = 0.2
"""A ping that takes longer counts as lost: the kernel waits at least this long before it retransmits."""
MAX_PROBE_SLOTS = 16
"""Maximum of one request. The operator requests no more."""
MAX_PROBE_CONNECTIONS = 16
"""Maximum at a time. A request takes a few. Beyond it, the oldest unauthenticated connection is closed."""
PROBE_CONNECTION_SECONDS = 5.0
PROBE_AUTHENTICATION_SECONDS = 2.0
_PROBE_BUFFER_BYTES = 1 << 18
_PROBE_PAYLOAD = memoryview(bytes(_PROBE_BUFFER_BYTES))
_PROBE_CONNECTION_ERRORS = (
    OSError,
    TimeoutError,
    ValueError,
    KeyError,
    TypeError,
    EOFError,
    OverflowError,
    RecursionError,
)
_TCP_INFO_ACKED = struct.Struct("=120xQ")  # bytes_acked of a tcp_info (linux/tcp.h)

log = logging.getLogger(__name__)


class LinkProbeServer:
    """The end that answers."""

    def __init__(self) -> None:
        self._secret: tuple[int, str] | None = None  # of the present membership
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.StreamWriter] = set()
        self._unauthenticated: dict[asyncio.StreamWriter, None] = {}
        """The unauthenticated ones, oldest first."""

    async def serve(self, listener: socket.socket) -> None:
        self._server = await asyncio.start_server(self._handle_connection, sock=listener, limit=_PROBE_BUFFER_BYTES)

    def admit(self, membership: int, secret: str) -> None:
        """Admit only clients that prove to have this membership's `secret` (hex) from now on; "": none."""
        self._secret = (membership, secret) if secret else None

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in self._connections:
            writer.transport.abort()

    async def _handle_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._secret is None or not self._free_connection_slot():
            writer.close()
            return
        self._connections.add(writer)
        self._unauthenticated[writer] = None
        try:
            async with asyncio.timeout(PROBE_CONNECTION_SECONDS):
                async with asyncio.timeout(PROBE_AUTHENTICATION_SECONDS):
                    channel = await authenticate_client(reader, writer, self._read_secret)
                    message = await channel.read()
                    self._unauthenticated.pop(writer, None)
                await _answer_requests(reader, channel, message)
        except _PROBE_CONNECTION_ERRORS as error:
            log.debug("a probe's connection ended: %r", error)
        finally:
            self._remove_connection(writer)
            writer.close()

    def _free_connection_slot(self) -> bool:
        """Close the oldest unauthenticated connection if there are too many. A member authenticates in milliseconds."""
        if len(self._connections) >= MAX_PROBE_CONNECTIONS and self._unauthenticated:
            oldest = next(iter(self._unauthenticated))
            self._remove_connection(oldest)
            oldest.transport.abort()
        return len(self._connections) < MAX_PROBE_CONNECTIONS

    def _remove_connection(self, writer: asyncio.StreamWriter) -> None:
        self._connections.discard(writer)
        self._unauthenticated.pop(writer, None)

    async def _read_secret(self, membership: int) -> str:
        if self._secret is None or self._secret[0] != membership:
            raise AuthenticationError("another membership")
        return self._secret[1]


async def _answer_requests(
    reader: asyncio.StreamReader, channel: AuthenticatedChannel, message: dict[str, object] | None
) -> None:
    """Answer a client's requests, as many as one measurement needs. Raises what _PROBE_CONNECTION_ERRORS lists."""
    pings = transfers = 0
    while message is not None:
        if "ping" in message and pings < PROBE_PINGS:
            pings += 1
            channel.write({"pong": message["ping"]})
        elif message.get("transfer") == PROBE_TRANSFER_BYTES and transfers < PROBE_TRANSFERS:
            transfers += 1
            remaining = PROBE_TRANSFER_BYTES
            while remaining:
                chunk = await reader.read(min(remaining, _PROBE_BUFFER_BYTES))
                if not chunk:
                    return
                remaining -= len(chunk)
            channel.write({"took": PROBE_TRANSFER_BYTES})
        else:
            raise AuthenticationError("a message that no probe sends")
        message = await channel.read()


class LinkProber:
    """The end that measures. It handles one request at a time: a new one cancels the previous one."""

    def __init__(self, results: Path) -> None:
        self._results = results
        self._name = ""
        self._task: asyncio.Task[None] | None = None

    def start_task(self, task: LinkProbeTask | None, membership: int, secret: str) -> None:
        """Start the requested task, unless it is done or running."""
        if task is None or task.name == self._name:
            return
        self.close()
        self._name = task.name
        self._task = asyncio.create_task(self._run_task(task, membership, secret))

    async def wait_done(self) -> None:
        """Wait until no measurement is running."""
        if self._task is not None:
            await asyncio.wait([self._task])

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run_task(self, task: LinkProbeTask, membership: int, secret: str) -> None:
        """Run the task. Slots count from now: the request reaches all launchers within a fraction of a slot."""
        began = time.monotonic()
        targets = sorted(task.targets[:MAX_PROBE_SLOTS], key=lambda target: target.slot)
        measurements = [asyncio.create_task(_probe_in_slot(target, began, membership, secret)) for target in targets]
        try:
            probes = await asyncio.gather(*measurements)
        finally:
            for measurement in measurements:
                measurement.cancel()
        write_json(self._results, {"name": task.name, "probes": [vars(probe) for probe in probes]})


async def _probe_in_slot(target: ProbeTarget, began: float, membership: int, secret: str) -> LinkProbe:
    await asyncio.sleep(max(0.0, began + min(target.slot, MAX_PROBE_SLOTS) * PROBE_SLOT_SECONDS - time.monotonic()))
    if not secret:
        return LinkProbe(target.worker, failed="the membership has no secret to prove")
    measurement = _LinkMeasurement(target.worker)
    try:
        await _measure_link(
            target.address, membership, secret, measurement, time.monotonic() + PROBE_MEASUREMENT_SECONDS
        )
    except _PROBE_CONNECTION_ERRORS as error:
        measurement.failed = str(error) or type(error).__name__
    return measurement.to_link_probe()


class _LinkMeasurement:
    """Results so far. A measurement that runs out of time keeps them."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.pings: list[float] = []  # seconds
        self.rates: list[float] = []  # bytes per second, of complete transfers
        self.unfinished: float = 0.0  # bytes per second, of the incomplete transfer
        self.failed = ""

    def to_link_probe(self) -> LinkProbe:
        rate = max(self.rates, default=self.unfinished)  # other load on the machines can only lower a rate
        return LinkProbe(
            target=self.target,
            bytes_per_second=rate or None,
            ping_seconds=median(self.pings) if self.pings else None,
            pings_lost=sum(seconds >= PING_LOST_SECONDS for seconds in self.pings),
            failed="" if rate else self.failed or "nothing came through",
        )


async def _measure_link(
    address: str, membership: int, secret: str, measurement: _LinkMeasurement, deadline: float
) -> None:
    """Measure pings and transfers. Raises what _PROBE_CONNECTION_ERRORS lists."""
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(deadline - time.monotonic()):
        reader, writer = await asyncio.open_connection(host.strip("[]"), int(port), limit=_PROBE_BUFFER_BYTES)
        try:
            channel = await authenticate_to_server(reader, writer, membership, secret)
            await _measure_pings(channel, measurement, min(deadline, time.monotonic() + PROBE_PING_SECONDS))
            for _ in range(PROBE_TRANSFERS):
                await _measure_transfer(writer, channel, measurement)
        finally:
            writer.transport.abort()  # unsent bytes are not needed


async def _measure_pings(channel: AuthenticatedChannel, measurement: _LinkMeasurement, deadline: float) -> None:
    for number in range(PROBE_PINGS):
        sent_at = time.monotonic()
        if sent_at >= deadline:
            return
        channel.write({"ping": number})
        answer = await channel.read()
        if answer is None or answer.get("pong") != number:
            raise AuthenticationError("another answer than to this ping")
        measurement.pings.append(time.monotonic() - sent_at)


async def _measure_transfer(
    writer: asyncio.StreamWriter, channel: AuthenticatedChannel, measurement: _LinkMeasurement
) -> None:
    acked, began = _read_acked_bytes(writer), time.monotonic()
    try:
        channel.write({"transfer": PROBE_TRANSFER_BYTES})
        for start in range(0, PROBE_TRANSFER_BYTES, _PROBE_BUFFER_BYTES):
            writer.write(_PROBE_PAYLOAD[: min(_PROBE_BUFFER_BYTES, PROBE_TRANSFER_BYTES - start)])
            await writer.drain()
        answer = await channel.read()
        if answer is None or answer.get("took") != PROBE_TRANSFER_BYTES:
            raise AuthenticationError("another answer than to this transfer")
        measurement.rates.append(PROBE_TRANSFER_BYTES / (time.monotonic() - began))
    finally:
        with contextlib.suppress(OSError):
            measurement.unfinished = (_read_acked_bytes(writer) - acked) / (time.monotonic() - began)


def _read_acked_bytes(writer: asyncio.StreamWriter) -> int:
    """Return the bytes that the other end has acknowledged. Raises OSError."""
    info = writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_ACKED.size)
    return int(_TCP_INFO_ACKED.unpack(info)[0]) if len(info) >= _TCP_INFO_ACKED.size else 0
