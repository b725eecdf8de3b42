"""A claim that only one node can mount, through the job's checkpoint server: the part of fsspec that a store needs.

The plan names the server's address, which changes whenever the operator has created the server's pod again. So each
attempt of a request reads it again. A request that has no answer yet is repeated while the operator does that.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import http.client
import os
import secrets
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Annotated, Any

from pacekeeper.message_authentication import AuthenticationError, create_nonce
from pacekeeper.runtime_folder import RuntimeFolder, read_bounded
from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.protocol.decoding import MaxLength, Within, parse_json, read_dataclass
from pacekeeper_analysis.protocol.plan import CheckpointEndpoint, WorkerPlan

from ..server.claim_files import MAX_LISTED_FILES
from ..server.protocol import (
    CHECKSUM_HEADER,
    MAX_PART_BYTES,
    PROOF_BYTES,
    PROOF_HEADER,
    ConnectionKeys,
    compute_content_checksum,
)
from .checkpoint_storage import StorageUnavailableError

SERVER_RESTART_SECONDS = 45.0
"""Time in which a request is repeated while the server does not answer: its pod is created again, or moves."""
_RECONNECT_PAUSE_SECONDS = 0.5
_CONNECT_TIMEOUT_SECONDS, _ANSWER_TIMEOUT_SECONDS = 5.0, 60.0
_MAX_PLAN_BYTES = 64 << 20
_MAX_ANSWER_BYTES = 64 << 20
"""Upper limit of an answer that is not the content of an object, such as a listing."""
_MAX_OBJECT_BYTES = 1 << 30
"""Upper limit of an object that is read as a whole."""
_MAX_NONCE_BYTES = 64


class CheckpointServerUnavailableError(StorageUnavailableError):
    """The checkpoint server does not answer. The operator starts it again."""


FindServer = Callable[[], CheckpointEndpoint | None]
"""Returns the server at its present address; None: it has none yet."""


@dataclass(frozen=True)
class _Refusal:
    errno: Annotated[int, Within(0, 4095)] = errno.EIO


@dataclass(frozen=True)
class _Entry:
    name: Annotated[str, MaxLength(1024)]
    size: Annotated[int, Within(0)] | None = None


@dataclass(frozen=True)
class _Entries:
    entries: Annotated[tuple[_Entry, ...], MaxLength(MAX_LISTED_FILES)] = ()


class ClaimFilesystem:
    """The server's objects by the methods of fsspec that `ObjectStore` uses. Each request has its own connection."""

    def __init__(self, find_server: FindServer, sleep: Callable[[float], object] = time.sleep) -> None:
        self._find_server = find_server
        self._sleep = sleep

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite") -> None:
        """Store an object. `mode` "create": raises FileExistsError if it exists."""
        file = ClaimUpload(self, path, MAX_PART_BYTES, creates=mode == "create")
        file.write(value)
        file.close()

    def open(self, path: str, mode: str, block_size: int) -> ClaimUpload:
        """Open an object for writing. Nothing is stored before it is closed."""
        assert mode == "wb", "objects are read by ranges"
        return ClaimUpload(self, path, min(block_size, MAX_PART_BYTES))

    def cat_file(self, path: str, start: int = 0, end: int | None = None) -> bytes:
        """Return a range of an object, which ends where the object ends. Raises FileNotFoundError."""
        query = f"?start={start}" + ("" if end is None else f"&end={end}")
        limit = _MAX_OBJECT_BYTES if end is None else max(0, end - start)
        return self.request("GET", f"/objects/{_get_name(path)}{query}", limit=limit)

    def info(self, path: str) -> dict[str, Any]:
        """Return size and type of an entry. Raises FileNotFoundError."""
        content = parse_json(self.request("GET", f"/entry/{_get_name(path)}", limit=_MAX_ANSWER_BYTES))
        return _describe_entry(read_dataclass(_Entry, content), path)

    def ls(self, path: str, detail: bool) -> list[dict[str, Any]]:  # noqa: ARG002  # fsspec's signature
        """Return the entries of a folder. Raises FileNotFoundError."""
        content = parse_json(self.request("GET", f"/entries/{_get_name(path)}", limit=_MAX_ANSWER_BYTES))
        entries = read_dataclass(_Entries, {"entries": content}).entries
        return [_describe_entry(entry, f"{path}/{entry.name}") for entry in entries]

    def rm_file(self, path: str) -> None:
        """Delete an object. Raises FileNotFoundError."""
        self.request("DELETE", f"/objects/{_get_name(path)}")

    def invalidate_cache(self) -> None:
        """Do nothing: there is no cache."""

    def request(
        self, method: str, target: str, content: bytes | bytearray = b"", *, limit: int = 1 << 10, repeats: bool = True
    ) -> bytes:
        """Send a request, and return the content of its answer, of at most `limit` bytes.

        `repeats`: whether it may be sent twice. Otherwise it is only repeated until it was sent. Raises OSError with
        the errno of the server's file system, and CheckpointServerUnavailableError.
        """
        deadline = time.monotonic() + SERVER_RESTART_SECONDS
        while True:
            exchange = _Exchange(method, target, content, limit)
            try:
                status, answer = exchange.run(self._find_server())
            except (OSError, http.client.HTTPException, AuthenticationError) as error:
                if (exchange.was_sent and not repeats) or time.monotonic() >= deadline:
                    raise CheckpointServerUnavailableError(f"{type(error).__name__}: {error}") from error
                self._sleep(_RECONNECT_PAUSE_SECONDS)
            else:
                if status != http.client.OK:
                    raise parse_refusal(status, answer, target)
                return answer


class ClaimUpload:
    """An object that is written in parts. A part may be sent again, also to a server that was started in between."""

    def __init__(self, filesystem: ClaimFilesystem, path: str, part_bytes: int, *, creates: bool = False) -> None:
        """Begin an upload. `creates`: it raises FileExistsError at its end if the object exists."""
        self.closed = False
        self._filesystem = filesystem
        self._name = _get_name(path)
        self._part_bytes = part_bytes
        self._creates = creates
        self._upload = secrets.token_hex(16)
        self._buffer = bytearray()
        self._sent_bytes = 0

    def write(self, content: Any) -> int:
        """Take content, and send the parts that are complete. Raises as `ClaimFilesystem.request`."""
        view = memoryview(content).cast("B")
        position = 0
        while position < len(view):
            taken = view[position : position + self._part_bytes - len(self._buffer)]
            position += len(taken)
            self._buffer += taken
            if len(self._buffer) == self._part_bytes:
                self._send_part(self._buffer)
                self._buffer.clear()
        return len(view)

    def close(self) -> None:
        """Send the rest, and store the object. Raises as `ClaimFilesystem.request`, and FileExistsError."""
        if self.closed:
            return
        if self._buffer or not self._sent_bytes:
            self._send_part(self._buffer)
            self._buffer.clear()
        query = f"upload={self._upload}&nbytes={self._sent_bytes}&create={int(self._creates)}"
        try:
            self._filesystem.request("POST", f"/objects/{self._name}?{query}", repeats=False)
        except FileNotFoundError as error:  # it was taken for abandoned
            message = f"{self._name} was not stored: its parts, or its folder, are not there"
            raise StorageUnavailableError(message) from error
        self.closed = True

    def discard(self) -> None:
        """Delete what was sent."""
        self.closed = True
        self._filesystem.request("DELETE", f"/uploads/{self._upload}")

    def _send_part(self, part: bytearray) -> None:
        self._filesystem.request("PUT", f"/uploads/{self._upload}?offset={self._sent_bytes}", part)
        self._sent_bytes += len(part)


class _Exchange:
    """One attempt of a request, on a connection of its own."""

    def __init__(self, method: str, target: str, content: bytes | bytearray, limit: int) -> None:
        self.was_sent = False
        self._method = method
        self._target = target
        self._content = content
        self._limit = limit

    def run(self, server: CheckpointEndpoint | None) -> tuple[int, bytes]:
        """Return status and content of the answer. Raises OSError, HTTPException, and AuthenticationError."""
        if server is None:
            raise ConnectionError("the plan names no checkpoint server yet")
        with closing(
            http.client.HTTPConnection(server.address, server.port, timeout=_CONNECT_TIMEOUT_SECONDS)
        ) as http_:
            keys = _agree_on_keys(http_, server.secret)
            http_.sock.settimeout(_ANSWER_TIMEOUT_SECONDS)
            checksum = compute_content_checksum(self._content)
            proof = keys.sign_request(self._method, self._target, len(self._content), checksum)
            headers = {CHECKSUM_HEADER: checksum, PROOF_HEADER: proof, "Content-Length": str(len(self._content))}
            self.was_sent = True
            http_.request(self._method, self._target, self._content or None, headers)
            status, answer = _read_answer(http_, self._limit + PROOF_BYTES)
        if len(answer) < PROOF_BYTES:
            raise AuthenticationError(f"an answer with status {status} and without a proof")
        view = memoryview(answer)[:-PROOF_BYTES]
        if not hmac.compare_digest(keys.sign_response(status, hashlib.sha256(view).digest()), answer[-PROOF_BYTES:]):
            raise AuthenticationError("the answer is not from this job's checkpoint server")
        return status, bytes(view)


def open_claim_filesystem(runtime: RuntimeFolder) -> ClaimFilesystem:
    """Open the claim of the job whose plan is in the runtime folder. It sends no request."""
    return ClaimFilesystem(lambda: read_checkpoint_server(runtime))


def read_checkpoint_server(runtime: RuntimeFolder) -> CheckpointEndpoint | None:
    """Return the server of the newest plan; None: it has no address, or there is no readable plan."""
    return parse_checkpoint_server(read_bounded(runtime.plan, _MAX_PLAN_BYTES) or b"")


def parse_checkpoint_server(plan: bytes) -> CheckpointEndpoint | None:
    """Return the server of a plan; None: it has no address, or the plan is not readable."""
    try:
        server = WorkerPlan.from_json(parse_json(plan)).checkpoint_server
    except InputError:
        return None
    return server if server is not None and server.address else None


def _agree_on_keys(connection: http.client.HTTPConnection, secret: str) -> ConnectionKeys:
    client_nonce = create_nonce()
    connection.request("GET", f"/nonce/{client_nonce.decode()}")
    status, server_nonce = _read_answer(connection, _MAX_NONCE_BYTES)
    if status != http.client.OK or not server_nonce:
        raise AuthenticationError(f"status {status} instead of a nonce")
    return ConnectionKeys.derive(secret, server_nonce, client_nonce)


def _read_answer(connection: http.client.HTTPConnection, limit: int) -> tuple[int, bytes]:
    answer = connection.getresponse()
    if answer.length is None or answer.length > limit:
        raise http.client.HTTPException(f"an answer of {answer.length} bytes, which is more than {limit}")
    return answer.status, answer.read()


def parse_refusal(status: int, answer: bytes, target: str) -> OSError:
    """Return the error that the server's file system has raised. `target`: what was requested."""
    code = {404: errno.ENOENT, 409: errno.EEXIST}.get(status)
    if code is None:
        with suppress(InputError):
            code = read_dataclass(_Refusal, parse_json(answer)).errno
    code = errno.EIO if code is None else code
    return OSError(code, f"the checkpoint server: {os.strerror(code)}", target.partition("?")[0])


def _describe_entry(entry: _Entry, path: str) -> dict[str, Any]:
    """Return an entry as fsspec does."""
    return {"name": path, "size": entry.size, "type": "directory" if entry.size is None else "file"}


def _get_name(path: str) -> str:
    return path.strip("/")
