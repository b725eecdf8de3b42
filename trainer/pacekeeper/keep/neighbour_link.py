"""A connection between neighbours on which each message proves that its sender holds the membership's secret.

As the launchers' (`pacekeeper.seal`), for much in a thread: it blocks in the kernel, without Python's lock, and what
comes goes where it is to lie. The host's nonce comes first, then the guest's with its membership; then both ways:
length of the content (4 bytes, big-endian) | HMAC-SHA256 of the content and its number | content.
"""

from __future__ import annotations

import hmac
import json
import socket
import struct
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Self

from pacekeeper.seal import Forged, Seal, keys_of, nonce
from pacekeeper_analysis.reading import parse_json

PATIENCE_SECONDS = 10.0
"""For a message, from its first wait to its last byte, either way."""
LONGEST = 4 << 20
"""Bytes of a message."""
_LONGEST_WORDS = 1 << 13
_PURPOSE = b"neighbours"
_MEMBERSHIP = struct.Struct("!Q")
_LENGTH = struct.Struct("!L")
_PROOF_BYTES = 32
_NONCE_BYTES = len(nonce())


class Link:
    """One end. All of it raises OSError where the other one is slow, silent or gone, Forged where it proves nothing."""

    def __init__(self, connection: socket.socket, keys: tuple[bytes, bytes]) -> None:
        """`keys`: of what is read, and of what is written."""
        self._connection = connection
        self._reading, self._writing = Seal(keys[0]), Seal(keys[1])

    @classmethod
    def to_guest(cls, connection: socket.socket, membership: int, secret: str) -> Self:
        """The host's end. The guest has proved nothing before its first message is read."""
        _be_patient(connection)
        ours, deadline = nonce(), _Deadline(PATIENCE_SECONDS)
        _pour(connection, ours, deadline)
        theirs = _exactly(connection, _NONCE_BYTES, deadline)
        if _MEMBERSHIP.unpack(_exactly(connection, _MEMBERSHIP.size, deadline)) != (membership,):
            raise Forged("another membership")
        to_host, to_guest = keys_of(_PURPOSE, secret, membership, ours, theirs)
        return cls(connection, (to_host, to_guest))

    @classmethod
    def to_host(cls, connection: socket.socket, membership: int, secret: str) -> Self:
        """The guest's end. The host has proved nothing before its first message is read."""
        _be_patient(connection)
        deadline = _Deadline(PATIENCE_SECONDS)
        theirs = _exactly(connection, _NONCE_BYTES, deadline)
        ours = nonce()
        _pour(connection, ours + _MEMBERSHIP.pack(membership), deadline)
        to_host, to_guest = keys_of(_PURPOSE, secret, membership, theirs, ours)
        return cls(connection, (to_guest, to_host))

    def say(self, words: Mapping[str, Any]) -> None:
        self.send(memoryview(json.dumps(words).encode()))

    def hear(self, work_seconds: float = 0.0) -> dict[str, Any]:
        """What the other end says. Raises ValueError where it is no JSON object.

        work_seconds: that it may take before it says anything, beside the usual patience.
        """
        words = parse_json(self.receive(work_seconds))
        if not isinstance(words, dict):
            raise ValueError(f"a message that is a {type(words).__name__}")
        return words

    def send(self, content: memoryview) -> None:
        """At most `LONGEST` bytes."""
        deadline = _Deadline(PATIENCE_SECONDS)
        _pour(self._connection, _LENGTH.pack(len(content)) + self._writing.next(content), deadline)
        _pour(self._connection, content, deadline)

    def receive(self, work_seconds: float = 0.0) -> bytes:
        """A short message. `work_seconds`: as in `hear`."""
        deadline = _Deadline(PATIENCE_SECONDS + work_seconds)
        length, proof = self._head(deadline)
        if length > _LONGEST_WORDS:
            raise Forged(f"a message of {length} bytes")
        content = _exactly(self._connection, length, deadline)
        self._check(memoryview(content), proof)
        return content

    def receive_into(self, room: memoryview) -> None:
        """A message that has as many bytes as `room`; they are not proved before this returns."""
        deadline = _Deadline(PATIENCE_SECONDS)
        length, proof = self._head(deadline)
        if length != len(room):
            raise Forged(f"a message of {length} bytes where {len(room)} were to come")
        _fill(self._connection, room, deadline)
        self._check(room, proof)

    def _head(self, deadline: _Deadline) -> tuple[int, bytes]:
        (length,) = _LENGTH.unpack(_exactly(self._connection, _LENGTH.size, deadline))
        return length, _exactly(self._connection, _PROOF_BYTES, deadline)

    def _check(self, content: memoryview, proof: bytes) -> None:
        if not hmac.compare_digest(self._reading.next(content), proof):
            raise Forged("a message without proof of the membership's secret")


def hang_up(connection: socket.socket) -> None:
    """For whoever else has the socket, too: processes that a rank has forked hold its sockets."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


class _Deadline:
    """Of one message."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._end = time.monotonic() + seconds

    def check(self) -> None:
        """Between two calls of the kernel, of which each waits for `PATIENCE_SECONDS` at most. Raises TimeoutError."""
        if time.monotonic() >= self._end:
            raise TimeoutError(f"the other end has not done its part of a message within {self._seconds:.0f} s")


def _be_patient(connection: socket.socket) -> None:
    """The kernel counts the time: Python's own time-outs would wake the thread for each few packets."""
    connection.settimeout(None)
    seconds = struct.pack("@ll", int(PATIENCE_SECONDS), 0)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, seconds)


def _exactly(connection: socket.socket, nbytes: int, deadline: _Deadline) -> bytes:
    content = bytearray(nbytes)
    _fill(connection, memoryview(content), deadline)
    return bytes(content)


def _fill(connection: socket.socket, room: memoryview, deadline: _Deadline) -> None:
    while room:
        with suppress(BlockingIOError):  # the kernel's "try again" is that its time is over
            came = connection.recv_into(room, len(room), socket.MSG_WAITALL)
            if not came:
                raise ConnectionError("the other end has hung up")
            room = room[came:]
        if room:
            deadline.check()


def _pour(connection: socket.socket, content: bytes | memoryview, deadline: _Deadline) -> None:
    rest = memoryview(content)
    while rest:
        with suppress(BlockingIOError):
            rest = rest[connection.send(rest) :]
        if rest:
            deadline.check()
