"""Links measured between launchers, on the operator's request: pings and transfers, small enough to hurt nobody.

`ProbeHost` answers, at a port that the heartbeat announces; `Prober` measures, in the turns that the plan gives, and
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
from pacekeeper.seal import Channel, Forged, greet_guest, greet_host
from pacekeeper_analysis.plan import ProbeTarget, ProbeTask
from pacekeeper_analysis.reports import LinkProbe

SLOT_SECONDS = 1.0
TURN_SECONDS = 0.9
"""Of its slot that a measurement may take: it ends before the next turn begins, however slow the link."""
PING_SECONDS = 0.25
"""Of these, for pings."""
PINGS, TRANSFERS, TRANSFER_BYTES = 50, 3, 8_000_000
LOST_SECONDS = 0.2
"""A ping that takes longer was sent again: the kernel waits for so long at least before it does that."""
MOST_TURNS = 16
"""Of one request: more is none that an operator makes."""
GUESTS = 16
"""At a time. A request takes a handful; of more, those who have proved nothing go first, the eldest of them."""
GUEST_SECONDS = 5.0
PROOF_SECONDS = 2.0
_BUFFER = 1 << 18
_CHUNK = memoryview(bytes(_BUFFER))
_BROKEN = (OSError, TimeoutError, ValueError, KeyError, TypeError, EOFError, OverflowError, RecursionError)
_ACKED = struct.Struct("=120xQ")  # bytes_acked of a tcp_info (linux/tcp.h)

log = logging.getLogger(__name__)


class ProbeHost:
    """The end that answers."""

    def __init__(self) -> None:
        self._secret: tuple[int, str] | None = None  # of the membership in force
        self._server: asyncio.Server | None = None
        self._guests: set[asyncio.StreamWriter] = set()
        self._strangers: dict[asyncio.StreamWriter, None] = {}
        """Of these, those who have proved nothing yet, the eldest first."""

    async def serve(self, listener: socket.socket) -> None:
        self._server = await asyncio.start_server(self._attend, sock=listener, limit=_BUFFER)

    def admit(self, membership: int, secret: str) -> None:
        """From now on only whoever proves to have this membership's `secret` (hex) is answered; "": nobody."""
        self._secret = (membership, secret) if secret else None

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for guest in self._guests:
            guest.transport.abort()

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._secret is None or not self._has_room():
            writer.close()
            return
        self._guests.add(writer)
        self._strangers[writer] = None
        try:
            async with asyncio.timeout(GUEST_SECONDS):
                async with asyncio.timeout(PROOF_SECONDS):
                    channel = await greet_guest(reader, writer, self._secret_of)
                    message = await channel.read()
                    self._strangers.pop(writer, None)
                await _answer(reader, channel, message)
        except _BROKEN as error:
            log.debug("a probe's connection ended: %r", error)
        finally:
            self._leave(writer)
            writer.close()

    def _has_room(self) -> bool:
        """Strangers who come and stay keep nobody out: a member proves itself in milliseconds."""
        if len(self._guests) >= GUESTS and self._strangers:
            eldest = next(iter(self._strangers))
            self._leave(eldest)
            eldest.transport.abort()
        return len(self._guests) < GUESTS

    def _leave(self, guest: asyncio.StreamWriter) -> None:
        self._guests.discard(guest)
        self._strangers.pop(guest, None)

    async def _secret_of(self, membership: int) -> str:
        if self._secret is None or self._secret[0] != membership:
            raise Forged("another membership")
        return self._secret[1]


async def _answer(reader: asyncio.StreamReader, channel: Channel, message: dict[str, object] | None) -> None:
    """Whatever a guest asks for, up to what one measurement needs. Raises what _BROKEN lists."""
    pings = transfers = 0
    while message is not None:
        if "ping" in message and pings < PINGS:
            pings += 1
            channel.write({"pong": message["ping"]})
        elif message.get("transfer") == TRANSFER_BYTES and transfers < TRANSFERS:
            transfers += 1
            left = TRANSFER_BYTES
            while left:
                taken = await reader.read(min(left, _BUFFER))
                if not taken:
                    return
                left -= len(taken)
            channel.write({"took": TRANSFER_BYTES})
        else:
            raise Forged("a message that no probe sends")
        message = await channel.read()


class Prober:
    """The end that measures. One request at a time: a new one ends the one before."""

    def __init__(self, results: Path) -> None:
        self._results = results
        self._name = ""
        self._task: asyncio.Task[None] | None = None

    def follow(self, task: ProbeTask | None, membership: int, secret: str) -> None:
        """Begin with what the plan asks for, unless that was done, or is being done."""
        if task is None or task.name == self._name:
            return
        self.close()
        self._name = task.name
        self._task = asyncio.create_task(self._measure(task, membership, secret))

    async def done(self) -> None:
        """Returns when nothing is being measured (any more)."""
        if self._task is not None:
            await asyncio.wait([self._task])

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _measure(self, task: ProbeTask, membership: int, secret: str) -> None:
        """All turns are counted from now: the plan comes to all launchers within a fraction of a slot."""
        began = time.monotonic()
        turns = sorted(task.targets[:MOST_TURNS], key=lambda target: target.slot)
        measuring = [asyncio.create_task(_in_turn(target, began, membership, secret)) for target in turns]
        try:
            found = await asyncio.gather(*measuring)
        finally:
            for each in measuring:
                each.cancel()
        write_json(self._results, {"name": task.name, "probes": [vars(probe) for probe in found]})


async def _in_turn(target: ProbeTarget, began: float, membership: int, secret: str) -> LinkProbe:
    await asyncio.sleep(max(0.0, began + min(target.slot, MOST_TURNS) * SLOT_SECONDS - time.monotonic()))
    if not secret:
        return LinkProbe(target.worker, failed="the membership has no secret to prove")
    measured = _Measured(target.worker)
    try:
        await _measure(target.address, membership, secret, measured, time.monotonic() + TURN_SECONDS)
    except _BROKEN as error:
        measured.failed = str(error) or type(error).__name__
    return measured.told()


class _Measured:
    """What has been measured so far; a turn that runs out of time keeps it."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.pings: list[float] = []  # seconds
        self.rates: list[float] = []  # bytes a second, of whole transfers
        self.unfinished: float = 0.0  # of one that did not come to its end
        self.failed = ""

    def told(self) -> LinkProbe:
        rate = max(self.rates, default=self.unfinished)  # whatever else the machines do only makes one slower
        return LinkProbe(
            target=self.target,
            bytes_per_second=rate,
            ping_seconds=median(self.pings) if self.pings else 0.0,
            pings_lost=sum(seconds >= LOST_SECONDS for seconds in self.pings),
            failed="" if rate else self.failed or "nothing came through",
        )


async def _measure(address: str, membership: int, secret: str, measured: _Measured, deadline: float) -> None:
    """Raises what _BROKEN lists."""
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(deadline - time.monotonic()):
        reader, writer = await asyncio.open_connection(host.strip("[]"), int(port), limit=_BUFFER)
        try:
            channel = await greet_host(reader, writer, membership, secret)
            await _ping(channel, measured, min(deadline, time.monotonic() + PING_SECONDS))
            for _ in range(TRANSFERS):
                await _transfer(writer, channel, measured)
        finally:
            writer.transport.abort()  # what is still unsent is nobody's


async def _ping(channel: Channel, measured: _Measured, until: float) -> None:
    for number in range(PINGS):
        asked_at = time.monotonic()
        if asked_at >= until:
            return
        channel.write({"ping": number})
        answer = await channel.read()
        if answer is None or answer.get("pong") != number:
            raise Forged("another answer than to this ping")
        measured.pings.append(time.monotonic() - asked_at)


async def _transfer(writer: asyncio.StreamWriter, channel: Channel, measured: _Measured) -> None:
    acked, began = _acked(writer), time.monotonic()
    try:
        channel.write({"transfer": TRANSFER_BYTES})
        for start in range(0, TRANSFER_BYTES, _BUFFER):
            writer.write(_CHUNK[: min(_BUFFER, TRANSFER_BYTES - start)])
            await writer.drain()
        answer = await channel.read()
        if answer is None or answer.get("took") != TRANSFER_BYTES:
            raise Forged("another answer than to this transfer")
        measured.rates.append(TRANSFER_BYTES / (time.monotonic() - began))
    finally:
        with contextlib.suppress(OSError):
            measured.unfinished = (_acked(writer) - acked) / (time.monotonic() - began)


def _acked(writer: asyncio.StreamWriter) -> int:
    """Bytes that the other end has acknowledged. Raises OSError."""
    info = writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ACKED.size)
    return int(_ACKED.unpack(info)[0]) if len(info) >= _ACKED.size else 0
