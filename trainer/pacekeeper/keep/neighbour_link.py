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

from pacekeeper.seal import AuthenticationError, MessageAuthenticator, derive_keys, create_nonce
from pacekeeper_analysis.reading import parse_json

PEER_MESSAGE_TIMEOUT_SECONDS = 10.0
"""For a message, from its first wait to its last byte, either way."""
MAX_PEER_MESSAGE_BYTES = 4 << 20
"""Bytes of a message."""
_MAX_CONTROL_MESSAGE_BYTES = 1 << 13
_PEER_LINK_PURPOSE = b"neighbours"
_MEMBERSHIP_STRUCT = struct.Struct("!Q")
_LENGTH_STRUCT = struct.Struct("!L")
_PROOF_BYTES = 32
_PEER_NONCE_BYTES = len(create_nonce())


class PeerLink:
    """One end. All of it raises OSError where the other one is slow, silent or gone, Forged where it proves nothing."""

    def __init__(self, connection: socket.socket, keys: tuple[bytes, bytes]) -> None:
        """`keys`: of what is read, and of what is written."""
        self._connection = connection
        self._read_authenticator, self._write_authenticator = MessageAuthenticator(keys[0]), MessageAuthenticator(keys[1])

    @classmethod
    def authenticate_client(cls, connection: socket.socket, membership: int, secret: str) -> Self:
        """The host's end. The guest has proved nothing before its first message is read."""
        _set_kernel_timeouts(connection)
        ours, deadline = create_nonce(), _MessageDeadline(PEER_MESSAGE_TIMEOUT_SECONDS)
        _send_all(connection, ours, deadline)
        theirs = _receive_exactly(connection, _PEER_NONCE_BYTES, deadline)
        if _MEMBERSHIP_STRUCT.unpack(_receive_exactly(connection, _MEMBERSHIP_STRUCT.size, deadline)) != (membership,):
            raise AuthenticationError("another membership")
        to_host, to_guest = derive_keys(_PEER_LINK_PURPOSE, secret, membership, ours, theirs)
        return cls(connection, (to_host, to_guest))

    @classmethod
    def authenticate_to_server(cls, connection: socket.socket, membership: int, secret: str) -> Self:
        """The guest's end. The host has proved nothing before its first message is read."""
        _set_kernel_timeouts(connection)
        deadline = _MessageDeadline(PEER_MESSAGE_TIMEOUT_SECONDS)
        theirs = _receive_exactly(connection, _PEER_NONCE_BYTES, deadline)
        ours = create_nonce()
        _send_all(connection, ours + _MEMBERSHIP_STRUCT.pack(membership), deadline)
        to_host, to_guest = derive_keys(_PEER_LINK_PURPOSE, secret, membership, theirs, ours)
        return cls(connection, (to_guest, to_host))

    def send_json(self, words: Mapping[str, Any]) -> None:
        self.send(memoryview(json.dumps(words).encode()))

    def receive_json(self, work_seconds: float = 0.0) -> dict[str, Any]:
        """What the other end says. Raises ValueError where it is no JSON object.

        work_seconds: that it may take before it says anything, beside the usual patience.
        """
        words = parse_json(self.receive(work_seconds))
        if not isinstance(words, dict):
            raise ValueError(f"a message that is a {type(words).__name__}")
        return words

    def send(self, content: memoryview) -> None:
        """At most `LONGEST` bytes."""
        deadline = _MessageDeadline(PEER_MESSAGE_TIMEOUT_SECONDS)
        _send_all(self._connection, _LENGTH_STRUCT.pack(len(content)) + self._write_authenticator.sign(content), deadline)
        _send_all(self._connection, content, deadline)

    def receive(self, work_seconds: float = 0.0) -> bytes:
        """A short message. `work_seconds`: as in `hear`."""
        deadline = _MessageDeadline(PEER_MESSAGE_TIMEOUT_SECONDS + work_seconds)
        length, proof = self._receive_header(deadline)
        if length > _MAX_CONTROL_MESSAGE_BYTES:
            raise AuthenticationError(f"a message of {length} bytes")
        content = _receive_exactly(self._connection, length, deadline)
        self._check_proof(memoryview(content), proof)
        return content

    def receive_into(self, buffer: memoryview) -> None:
        """A message that has as many bytes as `room`; they are not proved before this returns."""
        deadline = _MessageDeadline(PEER_MESSAGE_TIMEOUT_SECONDS)
        length, proof = self._receive_header(deadline)
        if length != len(buffer):
            raise AuthenticationError(f"a message of {length} bytes where {len(buffer)} were to come")
        _fill_buffer(self._connection, buffer, deadline)
        self._check_proof(buffer, proof)

    def _receive_header(self, deadline: _MessageDeadline) -> tuple[int, bytes]:
        (length,) = _LENGTH_STRUCT.unpack(_receive_exactly(self._connection, _LENGTH_STRUCT.size, deadline))
        return length, _receive_exactly(self._connection, _PROOF_BYTES, deadline)

    def _check_proof(self, content: memoryview, proof: bytes) -> None:
        if not hmac.compare_digest(self._read_authenticator.sign(content), proof):
            raise AuthenticationError("a message without proof of the membership's secret")


def close_connection(connection: socket.socket) -> None:
    """For whoever else has the socket, too: processes that a rank has forked hold its sockets."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


class _MessageDeadline:
    """Of one message."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._end = time.monotonic() + seconds

    def check(self) -> None:
        """Between two calls of the kernel, of which each waits for `PATIENCE_SECONDS` at most. Raises TimeoutError."""
        if time.monotonic() >= self._end:
            raise TimeoutError(f"the other end has not done its part of a message within {self._seconds:.0f} s")


def _set_kernel_timeouts(connection: socket.socket) -> None:
    """The kernel counts the time: Python's own time-outs would wake the thread for each few packets."""
    connection.settimeout(None)
    seconds = struct.pack("@ll", int(PEER_MESSAGE_TIMEOUT_SECONDS), 0)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, seconds)


def _receive_exactly(connection: socket.socket, nbytes: int, deadline: _MessageDeadline) -> bytes:
    content = bytearray(nbytes)
    _fill_buffer(connection, memoryview(content), deadline)
    return bytes(content)


def _fill_buffer(connection: socket.socket, buffer: memoryview, deadline: _MessageDeadline) -> None:
    while buffer:
        with suppress(BlockingIOError):  # the kernel's "try again" is that its time is over
            came = connection.recv_into(buffer, len(buffer), socket.MSG_WAITALL)
            if not came:
                raise ConnectionError("the other end has hung up")
            buffer = buffer[came:]
        if buffer:
            deadline.check()


def _send_all(connection: socket.socket, content: bytes | memoryview, deadline: _MessageDeadline) -> None:
    rest = memoryview(content)
    while rest:
        with suppress(BlockingIOError):
            rest = rest[connection.send(rest) :]
        if rest:
            deadline.check()
