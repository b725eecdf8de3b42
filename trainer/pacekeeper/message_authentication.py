"""A connection on which both ends prove that they hold a membership's secret, before either is trusted.

Lines, the server's first:

    pacekeeper <nonce of the server>
    pacekeeper <nonce of the client> <membership>
    <HMAC-SHA256 of the message, hexadecimal> <message, JSON>        from here on, both ways

Each direction has its own key, derived from the secret and both nonces, and each message has a number. A recording of
another connection, of an earlier message, or of the other direction therefore proves nothing. Only the first two lines
are parsed before they are authenticated, and no line is longer than `MAX_AUTHENTICATED_LINE_BYTES`. The protocol
authenticates; it does not encrypt.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from pacekeeper_analysis.protocol.decoding import parse_json

MAX_AUTHENTICATED_LINE_BYTES = 1 << 13
"""Longest line in bytes; a report or a view takes a few hundred."""
_HANDSHAKE_NONCE_BYTES = 16
_RENDEZVOUS_PURPOSE = b"rendezvous"
_SERVER_GREETING = re.compile(rb"pacekeeper ([0-9a-f]{32})\n")
_CLIENT_GREETING = re.compile(rb"pacekeeper ([0-9a-f]{32}) (\d{1,18})\n")


class AuthenticationError(ValueError):
    """A message that is not from a holder of the secret, or not the next one of its direction."""


class AuthenticatedChannel:
    """One end of an authenticated connection."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, membership: int, keys: tuple[bytes, bytes]
    ) -> None:
        """Create one end. `keys`: the key of messages that are read, and the key of messages that are written."""
        self.membership = membership
        self._reader = reader
        self._writer = writer
        self._read_authenticator, self._write_authenticator = (
            MessageAuthenticator(keys[0]),
            MessageAuthenticator(keys[1]),
        )

    async def read(self) -> dict[str, Any] | None:
        """Return the next message, None at the end.

        Raises AuthenticationError, or ValueError if it is no JSON object.
        """
        line = await self._reader.readline()
        if not line:
            return None
        proof, _, content = line.rstrip(b"\n").partition(b" ")
        if not hmac.compare_digest(proof, self._read_authenticator.sign(content).hex().encode()):
            raise AuthenticationError("a message is not authenticated with the membership's secret")
        message = parse_json(content)
        if not isinstance(message, dict):
            raise ValueError(f"a message that is a {type(message).__name__}")
        return message

    def write(self, message: Mapping[str, Any]) -> None:
        if not self._writer.is_closing():
            content = json.dumps(message).encode()
            self._writer.write(self._write_authenticator.sign(content).hex().encode() + b" " + content + b"\n")

    async def drain(self) -> None:
        await self._writer.drain()


class MessageAuthenticator:
    """Numbers and signs the messages of one direction."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

    def sign(self, content: bytes | memoryview) -> bytes:
        """Return the signature of `content` as the next message."""
        proof = hmac.new(self._key, self._count.to_bytes(8, "big"), hashlib.sha256)
        proof.update(content)
        self._count += 1
        return proof.digest()


async def authenticate_client(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, get_secret: Callable[[int], Awaitable[str]]
) -> AuthenticatedChannel:
    """Open the server's end of a connection. `get_secret` returns a membership's secret once it is known here.

    The client is not authenticated before its first message is read. Raises AuthenticationError.
    """
    server_nonce = create_nonce()
    writer.write(b"pacekeeper " + server_nonce + b"\n")
    client_nonce, membership = await _read_greeting(reader, _CLIENT_GREETING)
    to_server_key, to_client_key = derive_keys(
        _RENDEZVOUS_PURPOSE, await get_secret(int(membership)), int(membership), server_nonce, client_nonce
    )
    return AuthenticatedChannel(reader, writer, int(membership), (to_server_key, to_client_key))


async def authenticate_to_server(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, membership: int, secret: str
) -> AuthenticatedChannel:
    """Open the client's end of a connection. Raises AuthenticationError.

    The server is not authenticated before its first message is read.
    """
    (server_nonce,) = await _read_greeting(reader, _SERVER_GREETING)
    client_nonce = create_nonce()
    writer.write(b"pacekeeper %b %d\n" % (client_nonce, membership))
    to_server_key, to_client_key = derive_keys(_RENDEZVOUS_PURPOSE, secret, membership, server_nonce, client_nonce)
    return AuthenticatedChannel(reader, writer, membership, (to_client_key, to_server_key))


async def _read_greeting(reader: asyncio.StreamReader, expected: re.Pattern[bytes]) -> tuple[bytes, ...]:
    match = expected.fullmatch(await reader.readline())
    if match is None:
        raise AuthenticationError("another protocol")
    return match.groups()


def create_nonce() -> bytes:
    """Return a random nonce in hexadecimal."""
    return secrets.token_hex(_HANDSHAKE_NONCE_BYTES).encode()


def derive_keys(purpose: bytes, secret: str, membership: int, server: bytes, client: bytes) -> tuple[bytes, bytes]:
    """Return the key of messages to the server, and the key of messages to the client.

    `purpose`: purpose of the connection; a signature for one purpose is not valid for another.
    `secret`: secret of the membership, hexadecimal.
    `server`, `client`: nonces of server and client.
    """

    def key(direction: bytes) -> bytes:
        info = b"pacekeeper %b, %b, membership %d, %b, %b" % (purpose, direction, membership, server, client)
        return hmac.new(bytes.fromhex(secret), info, hashlib.sha256).digest()

    return key(b"to the server"), key(b"to the client")
