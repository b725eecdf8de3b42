"""A connection on which both ends have proved that they hold the secret of a membership, before either is believed.

Lines, the host's first:

    pacekeeper <nonce of the host>
    pacekeeper <nonce of the guest> <membership>
    <HMAC-SHA256 of the message, hexadecimal> <message, JSON>        from here on, both ways

Either direction has a key of its own, made of the secret and both nonces, and every message its number: what was
recorded on another connection, earlier on this one or in the other direction proves nothing. Nothing is parsed before
its proof but the first two lines, and no line is longer than `MAX_AUTHENTICATED_LINE_BYTES`. It keeps strangers out; it hides nothing.
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

from pacekeeper_analysis.reading import parse_json

MAX_AUTHENTICATED_LINE_BYTES = 1 << 13
"""Bytes; a report or a view takes a few hundred."""
_HANDSHAKE_NONCE_BYTES = 16
_RENDEZVOUS_PURPOSE = b"meeting"
_SERVER_GREETING = re.compile(rb"pacekeeper ([0-9a-f]{32})\n")
_CLIENT_GREETING = re.compile(rb"pacekeeper ([0-9a-f]{32}) (\d{1,18})\n")


class AuthenticationError(ValueError):
    """What came is not from a holder of the secret, or not for this place in the conversation."""


class AuthenticatedChannel:
    """One end of such a connection."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, membership: int, keys: tuple[bytes, bytes]
    ) -> None:
        """`keys`: of what is read, and of what is written."""
        self.membership = membership
        self._reader = reader
        self._writer = writer
        self._read_authenticator, self._write_authenticator = MessageAuthenticator(keys[0]), MessageAuthenticator(keys[1])

    async def read(self) -> dict[str, Any] | None:
        """The next message; None at the end. Raises Forged, or ValueError where it is no JSON object."""
        line = await self._reader.readline()
        if not line:
            return None
        proof, _, content = line.rstrip(b"\n").partition(b" ")
        if not hmac.compare_digest(proof, self._read_authenticator.sign(content).hex().encode()):
            raise AuthenticationError("a message without proof of the membership's secret")
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
    """Numbers and proves the messages of one direction."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

    def sign(self, content: bytes | memoryview) -> bytes:
        """The proof of `content` as the next message."""
        proof = hmac.new(self._key, self._count.to_bytes(8, "big"), hashlib.sha256)
        proof.update(content)
        self._count += 1
        return proof.digest()


async def authenticate_client(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, get_secret: Callable[[int], Awaitable[str]]
) -> AuthenticatedChannel:
    """The host's end. `secret_of`: gives a membership's secret once it is known here.

    The guest has proved nothing before its first message is read. Raises Forged.
    """
    ours = create_nonce()
    writer.write(b"pacekeeper " + ours + b"\n")
    theirs, membership = await _read_greeting(reader, _CLIENT_GREETING)
    to_host, to_guest = derive_keys(_RENDEZVOUS_PURPOSE, await get_secret(int(membership)), int(membership), ours, theirs)
    return AuthenticatedChannel(reader, writer, int(membership), (to_host, to_guest))


async def authenticate_to_server(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, membership: int, secret: str
) -> AuthenticatedChannel:
    """The guest's end. The host has proved nothing before its first message is read. Raises Forged."""
    (theirs,) = await _read_greeting(reader, _SERVER_GREETING)
    ours = create_nonce()
    writer.write(b"pacekeeper %b %d\n" % (ours, membership))
    to_host, to_guest = derive_keys(_RENDEZVOUS_PURPOSE, secret, membership, theirs, ours)
    return AuthenticatedChannel(reader, writer, membership, (to_guest, to_host))


async def _read_greeting(reader: asyncio.StreamReader, expected: re.Pattern[bytes]) -> tuple[bytes, ...]:
    match = expected.fullmatch(await reader.readline())
    if match is None:
        raise AuthenticationError("another protocol")
    return match.groups()


def create_nonce() -> bytes:
    """Hexadecimal."""
    return secrets.token_hex(_HANDSHAKE_NONCE_BYTES).encode()


def derive_keys(purpose: bytes, secret: str, membership: int, host: bytes, guest: bytes) -> tuple[bytes, bytes]:
    """Of the messages to the host, and of those to the guest.

    purpose: of the connection; what was said for one is no proof for another. secret: of the membership, hexadecimal.
    host, guest: their nonces.
    """

    def key(direction: bytes) -> bytes:
        about = b"pacekeeper %b, %b, membership %d, %b, %b" % (purpose, direction, membership, host, guest)
        return hmac.new(bytes.fromhex(secret), about, hashlib.sha256).digest()

    return key(b"to the host"), key(b"to the guest")
