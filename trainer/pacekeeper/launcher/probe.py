"""Links measured between launchers, on the operator's request: pings and transfers, small enough to hurt nobody.

`LinkProbeServer` answers, at a port that the heartbeat announces; `Prober` measures, in the turns that the plan gives, and
writes what it has found. Both ends prove first that they hold the membership's secret (`seal`). Messages after that,
the guest's first: {"ping": n} → {"pong": n}; {"transfer": bytes}, the bytes themselves → {"took": bytes}.
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

from pacekeeper.runtime import write_json
from pacekeeper.seal import AuthenticatedChannel, AuthenticationError, authenticate_client, authenticate_to_server
from pacekeeper_analysis.plan import ProbeTarget, LinkProbeTask
from pacekeeper_analysis.reports import LinkProbe

PROBE_SLOT_SECONDS = 1.0
PROBE_MEASUREMENT_SECONDS = 0.9
"""Of its slot that a measurement may take: it ends before the next turn begins, however slow the link."""
PROBE_PING_SECONDS = 0.25
"""Of these, for pings."""
PROBE_PINGS, PROBE_TRANSFERS, PROBE_TRANSFER_BYTES = 50, 3, 8_000_000
PING_LOST_SECONDS = 0.2
"""A ping that takes longer was sent again: the kernel waits for so long at least before it does that."""
MAX_PROBE_SLOTS = 16
"""Of one request: more is none that an operator makes."""
MAX_PROBE_CONNECTIONS = 16
"""At a time. A request takes a handful; of more, those who have proved nothing go first, the eldest of them."""
PROBE_CONNECTION_SECONDS = 5.0
PROBE_AUTHENTICATION_SECONDS = 2.0
_PROBE_BUFFER_BYTES = 1 << 18
_PROBE_PAYLOAD = memoryview(bytes(_PROBE_BUFFER_BYTES))
_PROBE_CONNECTION_ERRORS = (OSError, TimeoutError, ValueError, KeyError, TypeError, EOFError, OverflowError, RecursionError)
_TCP_INFO_ACKED = struct.Struct("=120xQ")  # bytes_acked of a tcp_info (linux/tcp.h)

log = logging.getLogger(__name__)


class LinkProbeServer:
    """The end that answers."""

    def __init__(self) -> None:
        self._secret: tuple[int, str] | None = None  # of the membership in force
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.StreamWriter] = set()
        self._unauthenticated: dict[asyncio.StreamWriter, None] = {}
        """Of these, those who have proved nothing yet, the eldest first."""

    async def serve(self, listener: socket.socket) -> None:
        self._server = await asyncio.start_server(self._handle_connection, sock=listener, limit=_PROBE_BUFFER_BYTES)

    def admit(self, membership: int, secret: str) -> None:
        """From now on only whoever proves to have this membership's `secret` (hex) is answered; "": nobody."""
        self._secret = (membership, secret) if secret else None

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for guest in self._connections:
            guest.transport.abort()

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
        """Strangers who come and stay keep nobody out: a member proves itself in milliseconds."""
        if len(self._connections) >= MAX_PROBE_CONNECTIONS and self._unauthenticated:
            eldest = next(iter(self._unauthenticated))
            self._remove_connection(eldest)
            eldest.transport.abort()
        return len(self._connections) < MAX_PROBE_CONNECTIONS

    def _remove_connection(self, guest: asyncio.StreamWriter) -> None:
        self._connections.discard(guest)
        self._unauthenticated.pop(guest, None)

    async def _read_secret(self, membership: int) -> str:
        if self._secret is None or self._secret[0] != membership:
            raise AuthenticationError("another membership")
        return self._secret[1]


async def _answer_requests(reader: asyncio.StreamReader, channel: AuthenticatedChannel, message: dict[str, object] | None) -> None:
    """Whatever a guest asks for, up to what one measurement needs. Raises what _BROKEN lists."""
    pings = transfers = 0
    while message is not None:
        if "ping" in message and pings < PROBE_PINGS:
            pings += 1
            channel.write({"pong": message["ping"]})
        elif message.get("transfer") == PROBE_TRANSFER_BYTES and transfers < PROBE_TRANSFERS:
            transfers += 1
            left = PROBE_TRANSFER_BYTES
            while left:
                taken = await reader.read(min(left, _PROBE_BUFFER_BYTES))
                if not taken:
                    return
                left -= len(taken)
            channel.write({"took": PROBE_TRANSFER_BYTES})
        else:
            raise AuthenticationError("a message that no probe sends")
        message = await channel.read()


class LinkProber:
    """The end that measures. One request at a time: a new one ends the one before."""

    def __init__(self, results: Path) -> None:
        self._results = results
        self._name = ""
        self._task: asyncio.Task[None] | None = None

    def start_task(self, task: LinkProbeTask | None, membership: int, secret: str) -> None:
        """Begin with what the plan asks for, unless that was done, or is being done."""
        if task is None or task.name == self._name:
            return
        self.close()
        self._name = task.name
        self._task = asyncio.create_task(self._run_task(task, membership, secret))

    async def wait_done(self) -> None:
        """Returns when nothing is being measured (any more)."""
        if self._task is not None:
            await asyncio.wait([self._task])

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run_task(self, task: LinkProbeTask, membership: int, secret: str) -> None:
        """All turns are counted from now: the plan comes to all launchers within a fraction of a slot."""
        began = time.monotonic()
        turns = sorted(task.targets[:MAX_PROBE_SLOTS], key=lambda target: target.slot)
        measuring = [asyncio.create_task(_probe_in_slot(target, began, membership, secret)) for target in turns]
        try:
            found = await asyncio.gather(*measuring)
        finally:
            for each in measuring:
                each.cancel()
        write_json(self._results, {"name": task.name, "probes": [vars(probe) for probe in found]})


async def _probe_in_slot(target: ProbeTarget, began: float, membership: int, secret: str) -> LinkProbe:
    await asyncio.sleep(max(0.0, began + min(target.slot, MAX_PROBE_SLOTS) * PROBE_SLOT_SECONDS - time.monotonic()))
    if not secret:
        return LinkProbe(target.worker, failed="the membership has no secret to prove")
    measured = _LinkMeasurement(target.worker)
    try:
        await _measure_link(target.address, membership, secret, measured, time.monotonic() + PROBE_MEASUREMENT_SECONDS)
    except _PROBE_CONNECTION_ERRORS as error:
        measured.failed = str(error) or type(error).__name__
    return measured.to_link_probe()


class _LinkMeasurement:
    """What has been measured so far; a turn that runs out of time keeps it."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.pings: list[float] = []  # seconds
        self.rates: list[float] = []  # bytes a second, of whole transfers
        self.unfinished: float = 0.0  # of one that did not come to its end
        self.failed = ""

    def to_link_probe(self) -> LinkProbe:
        rate = max(self.rates, default=self.unfinished)  # whatever else the machines do only makes one slower
        return LinkProbe(
            target=self.target,
            bytes_per_second=rate,
            ping_seconds=median(self.pings) if self.pings else 0.0,
            pings_lost=sum(seconds >= PING_LOST_SECONDS for seconds in self.pings),
            failed="" if rate else self.failed or "nothing came through",
        )


async def _measure_link(address: str, membership: int, secret: str, measured: _LinkMeasurement, deadline: float) -> None:
    """Raises what _BROKEN lists."""
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(deadline - time.monotonic()):
        reader, writer = await asyncio.open_connection(host.strip("[]"), int(port), limit=_PROBE_BUFFER_BYTES)
        try:
            channel = await authenticate_to_server(reader, writer, membership, secret)
            await _measure_pings(channel, measured, min(deadline, time.monotonic() + PROBE_PING_SECONDS))
            for _ in range(PROBE_TRANSFERS):
                await _measure_transfer(writer, channel, measured)
        finally:
            writer.transport.abort()  # what is still unsent is nobody's


async def _measure_pings(channel: AuthenticatedChannel, measured: _LinkMeasurement, until: float) -> None:
    for number in range(PROBE_PINGS):
        asked_at = time.monotonic()
        if asked_at >= until:
            return
        channel.write({"ping": number})
        answer = await channel.read()
        if answer is None or answer.get("pong") != number:
            raise AuthenticationError("another answer than to this ping")
        measured.pings.append(time.monotonic() - asked_at)


async def _measure_transfer(writer: asyncio.StreamWriter, channel: AuthenticatedChannel, measured: _LinkMeasurement) -> None:
    acked, began = _read_acked_bytes(writer), time.monotonic()
    try:
        channel.write({"transfer": PROBE_TRANSFER_BYTES})
        for start in range(0, PROBE_TRANSFER_BYTES, _PROBE_BUFFER_BYTES):
            writer.write(_PROBE_PAYLOAD[: min(_PROBE_BUFFER_BYTES, PROBE_TRANSFER_BYTES - start)])
            await writer.drain()
        answer = await channel.read()
        if answer is None or answer.get("took") != PROBE_TRANSFER_BYTES:
            raise AuthenticationError("another answer than to this transfer")
        measured.rates.append(PROBE_TRANSFER_BYTES / (time.monotonic() - began))
    finally:
        with contextlib.suppress(OSError):
            measured.unfinished = (_read_acked_bytes(writer) - acked) / (time.monotonic() - began)


def _read_acked_bytes(writer: asyncio.StreamWriter) -> int:
    """Bytes that the other end has acknowledged. Raises OSError."""
    info = writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_ACKED.size)
    return int(_TCP_INFO_ACKED.unpack(info)[0]) if len(info) >= _TCP_INFO_ACKED.size else 0
