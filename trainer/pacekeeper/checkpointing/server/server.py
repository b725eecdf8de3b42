"""The server: it answers the requests of a job's workers, which prove that they hold the job's secret.

Every pod of the cluster may be able to connect. What it sends before its proof is limited in size and time. File system
calls run in threads, so that a slow volume delays no other connection.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import hmac
import json
import logging
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from urllib.parse import parse_qsl, urlsplit

from pacekeeper.message_authentication import AuthenticationError, create_nonce

from .claim_files import ClaimFiles, get_wall_time
from .protocol import (
    CHECKSUM_HEADER,
    CHUNK_BYTES,
    MAX_PART_BYTES,
    PROOF_BYTES,
    PROOF_HEADER,
    ConnectionKeys,
    is_object_name,
)

STREAM_BUFFER_BYTES = 64 << 10
"""Bytes of a connection that are buffered, and the upper limit of a request's head."""
PROOF_TIMEOUT_SECONDS = 2.0
"""Time from the beginning of a connection to its first proof, as between launchers."""
MAX_UNPROVEN_CONNECTIONS = 512
"""Connections without a proof. The oldest makes room."""
TRANSFER_TIMEOUT_SECONDS = 60.0
"""Time for each chunk in either direction, and for the next request."""
MAX_CONCURRENT_REQUESTS = 32
"""Requests that are served at a time. Each holds `CHUNK_BYTES`; the others wait in order."""
_HEALTH_TARGET, _NONCE_PREFIX = "/healthz", "/nonce/"
_NONCE_PATTERN = re.compile(r"[0-9a-f]{32}")
_UPLOAD_PATTERN = re.compile(r"[0-9a-f]{32}")
_REASONS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 409: "Conflict"}
_REASONS |= {500: "Internal Server Error", 507: "Insufficient Storage"}
log = logging.getLogger(__name__)


class BadRequestError(Exception):
    """A request that no client of this version sends. The connection is closed."""


class ContentError(Exception):
    """Content that does not have the checksum of its request."""


@dataclass(frozen=True)
class Request:
    """The head of a request."""

    method: str
    target: str
    length: int = 0
    checksum: str = ""
    proof: str = ""

    @property
    def path(self) -> str:
        return urlsplit(self.target).path

    @property
    def parameters(self) -> dict[str, str]:
        return dict(parse_qsl(urlsplit(self.target).query))

    def read_number(self, name: str, default: int | None = None) -> int:
        """Return a number of the query. Raises BadRequestError."""
        text = self.parameters.get(name, "" if default is None else str(default))
        if not re.fullmatch(r"\d{1,18}", text):
            raise BadRequestError(f"{name}: no number")
        return int(text)


class CheckpointServer:
    """Serves the objects of one claim to the holders of one secret."""

    def __init__(self, files: ClaimFiles, secret: str) -> None:
        """Create the server. `secret`: the job's, hexadecimal."""
        self._files = files
        self._secret = secret
        self._unproven: dict[asyncio.StreamWriter, None] = {}
        self._slots = asyncio.Semaphore(MAX_CONCURRENT_REQUESTS)
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._refused = 0

    async def start(self, host: str | None, port: int) -> int:
        """Listen, and return the port. `host` None: all addresses. `port` 0 chooses one. Raises OSError."""
        self._server = await asyncio.start_server(self._serve, host, port, limit=STREAM_BUFFER_BYTES, backlog=1024)
        chosen: int = self._server.sockets[0].getsockname()[1]
        return chosen

    async def close(self) -> None:
        """Stop listening, and close all connections."""
        if self._server is not None:
            self._server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._unproven[writer] = None
        if len(self._unproven) > MAX_UNPROVEN_CONNECTIONS:
            oldest = next(iter(self._unproven))
            self._unproven.pop(oldest)
            oldest.close()
        try:
            async with asyncio.timeout(PROOF_TIMEOUT_SECONDS):
                keys, request = await self._authenticate(reader, writer)
            self._unproven.pop(writer)
            while True:
                async with self._slots:
                    await self._answer(reader, _ResponseWriter(writer, keys), request)
                async with asyncio.timeout(TRANSFER_TIMEOUT_SECONDS):
                    request = await _read_head(reader)
                _check_proof(keys, request)
        except AuthenticationError:
            self._refused += 1
            if self._refused & (self._refused - 1) == 0:
                log.warning("%d connections without the job's secret were refused", self._refused)
        except (OSError, TimeoutError, EOFError, asyncio.LimitOverrunError, BadRequestError) as error:
            log.debug("a connection ends: %r", error)
        finally:
            self._tasks.discard(task)
            self._unproven.pop(writer, None)
            with suppress(OSError):
                writer.close()

    async def _authenticate(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[ConnectionKeys, Request]:
        """Return the keys of a connection, and its first request with a proof.

        Raises EOFError for the kubelet's probe, which is answered, and AuthenticationError.
        """
        request = await _read_head(reader)
        if request.method == "GET" and request.target == _HEALTH_TARGET:
            await _ResponseWriter(writer, None).send(200, b"ok")
            raise EOFError
        client_nonce = request.target.removeprefix(_NONCE_PREFIX)
        if request.method != "GET" or not _NONCE_PATTERN.fullmatch(client_nonce):
            await _ResponseWriter(writer, None).send(401, b"")
            raise AuthenticationError("no nonce")
        nonce = create_nonce()
        await _ResponseWriter(writer, None).send(200, nonce)
        keys = ConnectionKeys.derive(self._secret, nonce, client_nonce.encode())
        request = await _read_head(reader)
        try:
            _check_proof(keys, request)
        except AuthenticationError:
            await _ResponseWriter(writer, None).send(401, b"")
            raise
        return keys, request

    async def _answer(self, reader: asyncio.StreamReader, writer: _ResponseWriter, request: Request) -> None:
        """Carry out one request with a proof. Raises BadRequestError, and what ends the connection."""
        try:
            await self._carry_out(reader, writer, request)
        except ContentError:
            await writer.send(400, b"{}")
        except (ConnectionError, TimeoutError, EOFError):
            raise
        except OSError as error:
            if writer.has_begun:  # the rest of the content cannot be read
                raise
            await writer.send(_choose_status(error), json.dumps({"errno": error.errno or errno.EIO}).encode())

    async def _carry_out(self, reader: asyncio.StreamReader, writer: _ResponseWriter, request: Request) -> None:
        """As `_answer`. Raises OSError of the file system too."""
        _, _, rest = request.path.partition("/")
        kind, _, name = rest.partition("/")
        if kind == "uploads" and not _UPLOAD_PATTERN.fullmatch(name):
            raise BadRequestError("no upload")
        if kind in ("objects", "entries") and not is_object_name(name) and (kind, name) != ("entries", ""):
            raise BadRequestError("no name of an object")
        match request.method, kind:
            case "PUT", "uploads":
                await self._receive_part(reader, request, name)
                await writer.send(200, b"{}")
            case "DELETE", "uploads":
                await asyncio.to_thread(self._files.drop_upload, name)
                await writer.send(200, b"{}")
            case "POST", "objects":
                await self._store_upload(request, name)
                await writer.send(200, b"{}")
            case "GET", "objects":
                await self._send_object(writer, request, name)
            case "DELETE", "objects":
                await asyncio.to_thread(self._files.delete_object, name)
                await writer.send(200, b"{}")
            case "GET", "entries":
                entries = await asyncio.to_thread(self._files.list_entries, name)
                await writer.send(200, json.dumps([asdict(entry) for entry in entries]).encode())
            case "GET", "entry":
                if not is_object_name(name):
                    raise BadRequestError("no name of an object")
                entry = await asyncio.to_thread(self._files.find_entry, name)
                await writer.send(200, json.dumps(asdict(entry)).encode())
            case _:
                raise BadRequestError("no such request")

    async def _receive_part(self, reader: asyncio.StreamReader, request: Request, upload: str) -> None:
        """Write the content of a request as a part of an upload. It is on the disk afterwards."""
        offset, checksum = request.read_number("offset"), hashlib.sha256()

        def write_chunk(chunk: bytes, position: int) -> None:
            checksum.update(chunk)
            self._files.write_part(upload, position, chunk)

        failure: OSError | None = None
        if offset == 0:
            await asyncio.to_thread(self._files.drop_abandoned_uploads, get_wall_time())
        for start in range(0, request.length, CHUNK_BYTES):
            async with asyncio.timeout(TRANSFER_TIMEOUT_SECONDS):
                chunk = await reader.readexactly(min(CHUNK_BYTES, request.length - start))
                try:
                    if failure is None:
                        await asyncio.to_thread(write_chunk, chunk, offset + start)
                except OSError as error:  # the client reads the answer only after it has sent all
                    failure = error
        if failure is not None:
            raise failure
        if request.length == 0:  # an empty object
            await asyncio.to_thread(self._files.write_part, upload, offset, b"")
        if not hmac.compare_digest(checksum.hexdigest(), request.checksum):
            raise ContentError
        await asyncio.to_thread(self._files.sync_upload, upload)

    async def _store_upload(self, request: Request, name: str) -> None:
        upload = request.parameters.get("upload", "")
        if not _UPLOAD_PATTERN.fullmatch(upload):
            raise BadRequestError("no upload")
        nbytes, creates = request.read_number("nbytes"), request.read_number("create", 0) == 1
        await asyncio.to_thread(self._files.store_upload, upload, name, nbytes, create=creates)

    async def _send_object(self, writer: _ResponseWriter, request: Request, name: str) -> None:
        """Send a range of an object, which ends where the object ends."""
        file, size = await asyncio.to_thread(self._files.open_object, name)
        try:
            start = min(request.read_number("start", 0), size)
            end = max(start, min(request.read_number("end", size), size))
            await writer.begin(200, end - start)
            for offset in range(start, end, CHUNK_BYTES):
                length = min(CHUNK_BYTES, end - offset)
                chunk = await asyncio.to_thread(writer.take_chunk, file, offset, length)
                if len(chunk) < length:
                    raise EOFError  # it was truncated by something else that has mounted the claim
                await writer.flush(chunk)
            await writer.end()
        finally:
            os.close(file)


class _ResponseWriter:
    """Writes one response: its head, its content, and the proof of both."""

    def __init__(self, writer: asyncio.StreamWriter, keys: ConnectionKeys | None) -> None:
        """Create the writer. `keys` None: the response has no proof."""
        self.has_begun = False
        self._writer = writer
        self._keys = keys
        self._status = 0
        self._checksum = hashlib.sha256()

    async def send(self, status: int, content: bytes) -> None:
        await self.begin(status, len(content))
        self._checksum.update(content)
        await self.flush(content)
        await self.end()

    def take_chunk(self, file: int, offset: int, length: int) -> bytes:
        """Read a chunk of the content, and add it to the checksum. It runs in a thread. Raises OSError."""
        chunk = os.pread(file, length, offset)
        self._checksum.update(chunk)
        return chunk

    async def begin(self, status: int, length: int) -> None:
        """Write the head. `length`: bytes of the content."""
        self.has_begun, self._status = True, status
        length += PROOF_BYTES if self._keys is not None else 0
        self._writer.write(f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Length: {length}\r\n\r\n".encode())

    async def flush(self, content: bytes) -> None:
        """Write content that the checksum contains."""
        self._writer.write(content)
        async with asyncio.timeout(TRANSFER_TIMEOUT_SECONDS):
            await self._writer.drain()

    async def end(self) -> None:
        if self._keys is not None:
            await self.flush(self._keys.sign_response(self._status, self._checksum.digest()))


async def _read_head(reader: asyncio.StreamReader) -> Request:
    """Read the head of a request. Raises BadRequestError, EOFError, and LimitOverrunError."""
    return parse_head(await reader.readuntil(b"\r\n\r\n"))


def parse_head(head: bytes) -> Request:
    """Parse the head of a request, which is not authenticated yet. Raises BadRequestError."""
    try:
        line, *lines = head.decode("ascii").removesuffix("\r\n\r\n").split("\r\n")
    except UnicodeDecodeError as error:
        raise BadRequestError("not ASCII") from error
    match = re.fullmatch(r"([A-Z]{3,8}) (/[!-~]{0,1000}) HTTP/1\.1", line)
    if match is None:
        raise BadRequestError("no request line of HTTP/1.1")
    fields = dict(_iterate_fields(lines))
    length = fields.get("content-length", "0")
    if not re.fullmatch(r"\d{1,9}", length) or int(length) > MAX_PART_BYTES or "transfer-encoding" in fields:
        raise BadRequestError("content of no or too great length")
    checksum, proof = fields.get(CHECKSUM_HEADER.lower(), ""), fields.get(PROOF_HEADER.lower(), "")
    return Request(match[1], match[2], int(length), checksum, proof)


def _iterate_fields(lines: list[str]) -> Iterator[tuple[str, str]]:
    for line in lines:
        name, _, value = line.partition(":")
        yield name.strip().lower(), value.strip()


def _check_proof(keys: ConnectionKeys, request: Request) -> None:
    """Raise AuthenticationError if the request is not the next one of a holder of the secret."""
    expected = keys.sign_request(request.method, request.target, request.length, request.checksum)
    if not hmac.compare_digest(expected, request.proof):
        raise AuthenticationError("a request without a valid proof")


def _choose_status(error: OSError) -> int:
    if isinstance(error, FileNotFoundError | NotADirectoryError) or error.errno == errno.ELOOP:  # a link is no object
        return 404
    if isinstance(error, FileExistsError):
        return 409
    return 507 if error.errno in (errno.ENOSPC, errno.EDQUOT) else 500
