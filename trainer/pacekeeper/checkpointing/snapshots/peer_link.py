"""A connection between peers on which each message is authenticated with the membership's secret.

It works like the launchers' (`pacekeeper.message_authentication`), but for bulk data in a thread: it blocks in the
kernel without the GIL, and data is received into its destination. The server's nonce comes first, then the client's
with its membership. Then in both directions:
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

from pacekeeper.message_authentication import AuthenticationError, MessageAuthenticator, create_nonce, derive_keys
from pacekeeper_analysis.protocol.decoding import parse_json

PEER_MESSAGE_TIMEOUT_SECONDS = 10.0
"""Limit in seconds for a message in either direction, from the first wait to its last byte."""
MAX_PEER_MESSAGE_BYTES = 4 << 20
"""Longest message in bytes."""
_MAX_CONTROL_MESSAGE_BYTES = 1 << 13
_PEER_LINK_PURPOSE = b"peer replicas"
_MEMBERSHIP_STRUCT = struct.Struct("!Q")
_LENGTH_STRUCT = struct.Struct("!L")
_PROOF_BYTES = 32
_PEER_NONCE_BYTES = len(create_nonce())


class PeerLink:
    """One end.

    Methods raise OSError if the other end is slow or gone, AuthenticationError if it fails to authenticate.
    """

    def __init__(self, connection: socket.socket, keys: tuple[bytes, bytes]) -> None:
        """Create one end. `keys`: the key of messages that are read, and the key of messages that are written."""
        self._connection = connection
        self._read_authenticator, self._write_authenticator = (
            MessageAuthenticator(keys[0]),
            MessageAuthenticator(keys[1]),
        )

    @classmethod
    def authenticate_client(cls, connection: socket.socket, membership: int, secret: str) -> Self:
        """Open the server's end. The client is not authenticated before its first message is read."""
        _set_kernel_timeouts(connection)
        server_nonce, deadline = create_nonce(), _MessageDeadline(PEER_MESSAGE_TIMEOUT_SECONDS)
        _send_all(connection, server_nonce, deadline)
        client_nonce = _receive_exactly(connection, _PEER_NONCE_BYTES, deadline)
        if _MEMBERSHIP_STRUCT.unpack(_receive_exactly(connection, _MEMBERSHIP_STRUCT.size, deadline)) != (membership,):
            raise AuthenticationError("another membership")
        to_server_key, to_client_key = derive_keys(_PEER_LINK_PURPOSE, secret, membership, server_nonce, client_nonce)
        return cls(connection, (to_server_key, to_client_key))

    @classmethod
    def authenticate_to_server(cls, connection: socket.socket, membership: int, secret: str) -> Self:
        """Open the client's end. The server is not authenticated before its first message is read."""
        _set_kernel_timeouts(connection)
        deadline = _MessageDeadline(PEER_MESSAGE_TIMEOUT_SECONDS)
        server_nonce = _receive_exactly(connection, _PEER_NONCE_BYTES, deadline)
        client_nonce = create_nonce()
        _send_all(connection, client_nonce + _MEMBERSHIP_STRUCT.pack(membership), deadline)
        to_server_key, to_client_key = derive_keys(_PEER_LINK_PURPOSE, secret, membership, server_nonce, client_nonce)
        return cls(connection, (to_client_key, to_server_key))

    def send_json(self, message: Mapping[str, Any]) -> None:
        self.send(memoryview(json.dumps(message).encode()))

    def receive_json(self, work_seconds: float = 0.0) -> dict[str, Any]:
        """Return the next message of the other end. Raises ValueError if it is no JSON object.

        `work_seconds`: time that the other end may take before it sends, in addition to the usual time-out.
        """
        message = parse_json(self.receive(work_seconds))
        if not isinstance(message, dict):
            raise ValueError(f"a message that is a {type(message).__name__}")
        return message

    def send(self, content: memoryview) -> None:
        """Send at most `MAX_PEER_MESSAGE_BYTES` bytes."""
        deadline = _MessageDeadline(PEER_MESSAGE_TIMEOUT_SECONDS)
        _send_all(
            self._connection, _LENGTH_STRUCT.pack(len(content)) + self._write_authenticator.sign(content), deadline
        )
        _send_all(self._connection, content, deadline)

    def receive(self, work_seconds: float = 0.0) -> bytes:
        """Return a short message. `work_seconds`: as in `receive_json`."""
        deadline = _MessageDeadline(PEER_MESSAGE_TIMEOUT_SECONDS + work_seconds)
        length, proof = self._receive_header(deadline)
        if length > _MAX_CONTROL_MESSAGE_BYTES:
            raise AuthenticationError(f"a message of {length} bytes")
        content = _receive_exactly(self._connection, length, deadline)
        self._check_proof(memoryview(content), proof)
        return content

    def receive_into(self, buffer: memoryview) -> None:
        """Receive a message of exactly `buffer`'s size; its bytes are not authenticated before this returns."""
        deadline = _MessageDeadline(PEER_MESSAGE_TIMEOUT_SECONDS)
        length, proof = self._receive_header(deadline)
        if length != len(buffer):
            raise AuthenticationError(f"a message of {length} bytes, {len(buffer)} were expected")
        _fill_buffer(self._connection, buffer, deadline)
        self._check_proof(buffer, proof)

    def _receive_header(self, deadline: _MessageDeadline) -> tuple[int, bytes]:
        (length,) = _LENGTH_STRUCT.unpack(_receive_exactly(self._connection, _LENGTH_STRUCT.size, deadline))
        return length, _receive_exactly(self._connection, _PROOF_BYTES, deadline)

    def _check_proof(self, content: memoryview, proof: bytes) -> None:
        if not hmac.compare_digest(self._read_authenticator.sign(content), proof):
            raise AuthenticationError("a message is not authenticated with the membership's secret")


def close_connection(connection: socket.socket) -> None:
    """Close the connection for other holders of the socket, too: processes that a rank has forked hold its sockets."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


class _MessageDeadline:
    """Deadline of one message."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._end = time.monotonic() + seconds

    def check(self) -> None:
        """Raise TimeoutError after the deadline. Call it between system calls, of which each has a kernel time-out."""
        if time.monotonic() >= self._end:
            raise TimeoutError(f"the peer has not completed a message within {self._seconds:.0f} s")


def _set_kernel_timeouts(connection: socket.socket) -> None:
    """Set time-outs in the kernel: Python's own would wake the thread every few packets."""
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
        with suppress(BlockingIOError):  # EAGAIN: the kernel's time-out has expired
            received = connection.recv_into(buffer, len(buffer), socket.MSG_WAITALL)
            if not received:
                raise ConnectionError("the peer has closed the connection")
            buffer = buffer[received:]
        if buffer:
            deadline.check()


def _send_all(connection: socket.socket, content: bytes | memoryview, deadline: _MessageDeadline) -> None:
    remaining = memoryview(content)
    while remaining:
        with suppress(BlockingIOError):
            remaining = remaining[connection.send(remaining) :]
        if remaining:
            deadline.check()
