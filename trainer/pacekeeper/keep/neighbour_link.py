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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Self

from pacekeeper.seal import Forged, Seal, keys_of, nonce

PATIENCE_SECONDS = 10.0
"""For a word of the other end, or room for the next."""
LONGEST = 4 << 20
"""Bytes of a message."""
_LONGEST_WORDS = 1 << 13
_PURPOSE = b"neighbours"
_MEMBERSHIP = struct.Struct("!Q")
_LENGTH = struct.Struct("!L")
_PROOF_BYTES = 32
_NONCE_BYTES = len(nonce())


class Link:
    """One end. All of it raises OSError where the other one is silent or gone, Forged where it proves nothing."""

    def __init__(self, connection: socket.socket, keys: tuple[bytes, bytes]) -> None:
        """`keys`: of what is read, and of what is written."""
        self._connection = connection
        self._reading, self._writing = Seal(keys[0]), Seal(keys[1])

    @classmethod
    def to_guest(cls, connection: socket.socket, membership: int, secret: str) -> Self:
        """The host's end. The guest has proved nothing before its first message is read."""
        _be_patient(connection)
        ours = nonce()
        connection.sendall(ours)
        theirs = _exactly(connection, _NONCE_BYTES)
        if _MEMBERSHIP.unpack(_exactly(connection, _MEMBERSHIP.size)) != (membership,):
            raise Forged("another membership")
        to_host, to_guest = keys_of(_PURPOSE, secret, membership, ours, theirs)
        return cls(connection, (to_host, to_guest))

    @classmethod
    def to_host(cls, connection: socket.socket, membership: int, secret: str) -> Self:
        """The guest's end. The host has proved nothing before its first message is read."""
        _be_patient(connection)
        theirs = _exactly(connection, _NONCE_BYTES)
        ours = nonce()
        connection.sendall(ours + _MEMBERSHIP.pack(membership))
        to_host, to_guest = keys_of(_PURPOSE, secret, membership, theirs, ours)
        return cls(connection, (to_guest, to_host))

    def say(self, words: Mapping[str, Any]) -> None:
        self.send(memoryview(json.dumps(words).encode()))

    def hear(self) -> dict[str, Any]:
        """What the other end says. Raises ValueError where it is no JSON object."""
        words = json.loads(self.receive())
        if not isinstance(words, dict):
            raise ValueError(f"a message that is a {type(words).__name__}")
        return words

    def send(self, content: memoryview) -> None:
        """At most `LONGEST` bytes."""
        with _in_words():
            self._connection.sendall(_LENGTH.pack(len(content)) + self._writing.next(content))
            self._connection.sendall(content)

    def receive(self) -> bytes:
        """A short message."""
        length, proof = self._head()
        if length > _LONGEST_WORDS:
            raise Forged(f"a message of {length} bytes")
        content = _exactly(self._connection, length)
        self._check(memoryview(content), proof)
        return content

    def receive_into(self, room: memoryview) -> None:
        """A message that has as many bytes as `room`; they are not proved before this returns."""
        length, proof = self._head()
        if length != len(room):
            raise Forged(f"a message of {length} bytes where {len(room)} were to come")
        _fill(self._connection, room)
        self._check(room, proof)

    def _head(self) -> tuple[int, bytes]:
        (length,) = _LENGTH.unpack(_exactly(self._connection, _LENGTH.size))
        return length, _exactly(self._connection, _PROOF_BYTES)

    def _check(self, content: memoryview, proof: bytes) -> None:
        if not hmac.compare_digest(self._reading.next(content), proof):
            raise Forged("a message without proof of the membership's secret")


def hang_up(connection: socket.socket) -> None:
    """For whoever else has the socket, too: processes that a rank has forked hold its sockets."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def _be_patient(connection: socket.socket) -> None:
    """The kernel counts the time: Python's own time-outs would wake the thread for each few packets."""
    connection.settimeout(None)
    seconds = struct.pack("@ll", int(PATIENCE_SECONDS), 0)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, seconds)


def _exactly(connection: socket.socket, nbytes: int) -> bytes:
    content = bytearray(nbytes)
    _fill(connection, memoryview(content))
    return bytes(content)


def _fill(connection: socket.socket, room: memoryview) -> None:
    with _in_words():
        while room:
            came = connection.recv_into(room, len(room), socket.MSG_WAITALL)
            if not came:
                raise ConnectionError("the other end has hung up")
            room = room[came:]


@contextmanager
def _in_words() -> Iterator[None]:
    """The kernel's "try again" is that the time is over."""
    try:
        yield
    except BlockingIOError:
        raise TimeoutError(f"the other end has done nothing for {PATIENCE_SECONDS:.0f} s") from None
