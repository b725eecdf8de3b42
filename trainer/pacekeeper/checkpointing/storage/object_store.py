"""Requests to an object store by fsspec: each has a time limit, and is repeated a limited number of times.

Objects are written as a whole: a reader sees the previous object or the new one. What fsspec raises becomes an OSError.
FileNotFoundError and PermissionError are the store's answer. StorageUnavailableError means that there is none.
"""

from __future__ import annotations

import errno
import inspect
import logging
import os
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from pacekeeper.runtime_folder import RuntimeFolder
from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.protocol.plan import CLAIM_SCHEME

from ..background import run_in_background
from .checkpoint_storage import Result, StorageUnavailableError, WritableStream
from .claim_filesystem import open_claim_filesystem

STORAGE_REQUEST_TIMEOUT_SECONDS = 60.0
"""Time limit of a request, in addition to the time that its content takes."""
MIN_STORAGE_BYTES_PER_SECOND = 1 << 20
"""Rate below which a request with content has timed out."""
MAX_STORAGE_ATTEMPTS = 4
"""Attempts of one request."""
MAX_STORED_FILE_ATTEMPTS = 2
"""Attempts of a whole file, whose parts fsspec's implementations repeat themselves."""
FIRST_STORAGE_RETRY_SECONDS, LONGEST_STORAGE_RETRY_SECONDS = 0.5, 8.0
_MIN_PART_BYTES = 16 << 20
_MAX_PARTS = 8000
"""Parts of an upload. S3 accepts 10,000."""
_PART_UNIT_BYTES = 1 << 20
_MAX_LISTED_OBJECTS = 1 << 20
"""Names of a listing that are read."""
_URI_PATTERN = re.compile(r"([a-z][a-z0-9+.-]*)://([^\s?#]*[^\s?#/])")
_REFUSED_SCHEMES = frozenset({"memory", "http", "https", "data", "zip", "tar", "reference", "github", "git"})
"""Schemes of what outlives no process, or cannot be written."""
_STORAGE_ANSWERS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})
"""Errors of a file system that another attempt would meet again."""
_log = logging.getLogger(__name__)
_Answer = TypeVar("_Answer")


class ObjectStore:
    """The objects below one URI."""

    def __init__(
        self,
        filesystem: Any,
        root: str,
        uri: str,
        sleep: Callable[[float], object] = time.sleep,
        *,
        field: str = "spec.checkpoint.uri",
    ) -> None:
        """Create the store. `filesystem`: fsspec's, without caches. `root`: path of `uri` in it.

        `field`: field of the TrainingJob that names the store.
        """
        self.uri = uri
        self.field = field
        self._filesystem = filesystem
        self._root = root.rstrip("/")
        self._sleep = sleep
        self._is_failing = False
        """Whether the last request had no answer. While it lasts, a request has one attempt: each may take a minute."""
        self.has_conditional_writes = _has_create_mode(filesystem)
        """Whether fsspec can send them. The store may ignore them."""

    def put(self, name: str, content: bytes) -> None:
        """Store an object, and replace the previous one. Raises OSError."""
        self._request(lambda: self._filesystem.pipe_file(self._join(name), content), len(content))

    def create(self, name: str, content: bytes) -> bool:
        """Store an object unless one of this name exists, and return whether it is there with this content now.

        `content` must be unique: a client that reads it back has created it, although an answer was lost. A store
        without conditional writes replaces an object that another client creates at the same time; the last one
        remains. Raises OSError.
        """
        options = {"mode": "create"} if self.has_conditional_writes else {}
        try:
            if self.has_conditional_writes or self.get(name) is None:
                self._request(lambda: self._filesystem.pipe_file(self._join(name), content, **options), len(content))
        except FileExistsError:
            pass
        except OSError:  # stores name a failed condition differently
            if self.get(name) is None:
                raise
        return self.get(name) == content

    def get(self, name: str) -> bytes | None:
        """Return the content of a small object; None: there is none. Raises OSError."""
        try:
            return bytes(self._request(lambda: self._filesystem.cat_file(self._join(name))))
        except (FileNotFoundError, IsADirectoryError):
            return None

    def get_range(self, name: str, offset: int, length: int) -> bytes:
        """Return `length` bytes from `offset` on, or fewer if the object is shorter. Raises OSError."""
        path = self._join(name)
        try:
            return bytes(
                self._request(lambda: self._filesystem.cat_file(path, start=offset, end=offset + length), length)
            )
        except StorageUnavailableError:
            if (self.get_size(name) or 0) <= offset:  # S3 refuses a range beyond the end
                return b""
            raise

    def get_size(self, name: str) -> int | None:
        """Return the bytes of an object; None: there is none. Raises OSError."""
        try:
            entry = self._request(lambda: self._filesystem.info(self._join(name)))
        except FileNotFoundError:
            return None
        return int(entry["size"]) if entry["type"] == "file" else None

    def list_entries(self, folder: str = "") -> dict[str, int | None]:
        """Return the names directly below `folder`, and the bytes of objects (None: a folder). Raises OSError.

        A store may list an object late. Reading an object by its name shows its present state.
        """
        path = self._join(folder)

        def list_once() -> list[Any]:
            self._filesystem.invalidate_cache()
            return list(self._filesystem.ls(path, detail=True))

        try:
            entries = self._request(list_once)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        return {
            entry["name"].rstrip("/").rpartition("/")[2]: int(entry["size"] or 0) if entry["type"] == "file" else None
            for entry in entries[:_MAX_LISTED_OBJECTS]
            if entry["name"].rstrip("/") != path
        }

    def delete(self, name: str) -> None:
        """Delete an object, if it exists. Raises OSError."""
        with suppress(FileNotFoundError):
            self._request(lambda: self._filesystem.rm_file(self._join(name)))

    def write_file(self, name: str, nbytes: int, write: Callable[[WritableStream], Result]) -> Result:
        """Store what `write` writes as an object, in parts, and return the result of `write`.

        `nbytes`: estimate of the size. `write` is called again after a failure. Raises OSError.
        """
        for attempt in range(MAX_STORED_FILE_ATTEMPTS):
            try:
                return self._write_once(name, nbytes, write)
            except StorageUnavailableError as error:
                if attempt + 1 == MAX_STORED_FILE_ATTEMPTS:
                    raise
                _log.warning("%s is written again: %s", self.describe(name), error)
                self._sleep(compute_retry_pause(attempt))
        raise AssertionError("the last attempt returns or raises")

    def describe(self, name: str) -> str:
        """Return the URI of an object."""
        return f"{self.uri}/{name}".rstrip("/")

    def _write_once(self, name: str, nbytes: int, write: Callable[[WritableStream], Result]) -> Result:
        part_bytes, path = choose_part_bytes(nbytes), self._join(name)
        file = self._request(lambda: self._filesystem.open(path, "wb", block_size=part_bytes))
        try:
            result = write(_PartWriter(file, part_bytes))
            _run_limited(file.close, part_bytes)  # stores the object
        except BaseException:
            _abandon_upload(file)
            raise
        return result

    def _request(self, call: Callable[[], _Answer], nbytes: int = 0) -> _Answer:
        attempts = 1 if self._is_failing else MAX_STORAGE_ATTEMPTS
        for attempt in range(attempts):
            try:
                answer = _run_limited(call, nbytes)
            except StorageUnavailableError:
                if attempt + 1 == attempts:
                    self._is_failing = True
                    raise
                self._sleep(compute_retry_pause(attempt))
            else:
                self._is_failing = False
                return answer
        raise AssertionError("the last attempt returns or raises")

    def _join(self, name: str) -> str:
        return f"{self._root}/{name}".rstrip("/")


def open_object_store(uri: str) -> ObjectStore:
    """Open the store of a URI like `s3://bucket/folder`. It sends no request.

    Raises InputError that names the field and the remedy.
    """
    if uri.startswith(CLAIM_SCHEME):
        if not os.environ.get("PACEKEEPER_RUNTIME"):
            raise InputError(
                f"spec.checkpoint.uri: {uri} is a URI that only the operator gives (spec.checkpoint.accessMode); take "
                "a folder or an object store, such as s3://bucket/folder"
            )
        filesystem = open_claim_filesystem(RuntimeFolder.from_environment())
        return ObjectStore(filesystem, "", uri, field="spec.checkpoint.volumeClaimName")
    if refusal := explain_uri_refusal(uri):
        raise InputError(f"spec.checkpoint.uri: {uri!r} {refusal}")
    try:
        import fsspec  # type: ignore[import-untyped]  # torch depends on it
    except ImportError as error:
        raise InputError(f"spec.checkpoint.uri: {uri} needs the package fsspec in the trainer's image") from error
    try:
        filesystem, root = fsspec.url_to_fs(uri, use_listings_cache=False, skip_instance_cache=True)
    except ImportError as error:
        raise InputError(
            f"spec.checkpoint.uri: {uri} needs a package that the trainer's image lacks: {error}. Add it to the image "
            "(s3fs for s3://, gcsfs for gs://, adlfs for abfs://)"
        ) from error
    except Exception as error:
        raise InputError(
            f"spec.checkpoint.uri: {uri} cannot be opened: {type(error).__name__}: {error}; use a URI of fsspec, such "
            "as s3://bucket/folder, and give credentials by the template's environment or service account"
        ) from error
    return ObjectStore(filesystem, str(root), uri)


def explain_uri_refusal(uri: str) -> str:
    """Return why a URI cannot hold checkpoints; "": it can. The API server checks the same rules."""
    match = _URI_PATTERN.fullmatch(uri)
    if match is None or "::" in uri:
        return "must be a URI without a query and without a slash at its end, like s3://bucket/folder"
    if match[1] in _REFUSED_SCHEMES:
        return f"must outlive the workers and be writable, which {match[1]}:// is not; use a store such as s3://"
    if re.match(r"[^/]*:[^/]*@", match[2]):
        return "must not contain credentials; give them by the template's environment, a Secret, or service account"
    if any(part in (".", "..") for part in match[2].split("/")):
        return "must be a URI without . and .."
    return ""


def choose_part_bytes(nbytes: int) -> int:
    """Return the bytes of each part of an upload of about `nbytes` bytes."""
    needed = -(-nbytes // _MAX_PARTS)
    return max(_MIN_PART_BYTES, -(-needed // _PART_UNIT_BYTES) * _PART_UNIT_BYTES)


def compute_retry_pause(attempt: int) -> float:
    """Return the seconds to wait after a failed attempt, the first of which is 0."""
    return min(FIRST_STORAGE_RETRY_SECONDS * 2.0**attempt, LONGEST_STORAGE_RETRY_SECONDS)


def _has_create_mode(filesystem: Any) -> bool:
    """Return whether this version of the file system knows conditional writes."""
    method = getattr(filesystem, "_pipe_file", None) or filesystem.pipe_file
    try:
        return "mode" in inspect.signature(method).parameters
    except (TypeError, ValueError):
        return False


def _run_limited(call: Callable[[], _Answer], nbytes: int = 0) -> _Answer:
    """Return the result of `call`, which transfers `nbytes` bytes.

    A call that exceeds its time limit is left behind in its thread. Raises FileNotFoundError, FileExistsError,
    PermissionError and StorageUnavailableError.
    """
    timeout = STORAGE_REQUEST_TIMEOUT_SECONDS + nbytes / MIN_STORAGE_BYTES_PER_SECOND
    try:
        return run_in_background(call, "pacekeeper-storage").result(timeout)
    except (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError):
        raise
    except StorageUnavailableError:
        raise
    except TimeoutError as error:
        raise StorageUnavailableError(str(error) or f"no answer within {timeout:.0f} s") from error
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _STORAGE_ANSWERS:
            raise
        if "Credentials" in type(error).__name__:  # botocore, google.auth, and azure.identity have no common class
            raise PermissionError(f"{type(error).__name__}: {error}") from error
        raise StorageUnavailableError(f"{type(error).__name__}: {error}") from error


def _abandon_upload(file: Any) -> None:
    """Release an upload without storing its object. A file that is closed, or collected, would be stored."""
    with suppress(Exception):
        file.closed = True
    discard = getattr(file, "discard", None)
    if discard is not None:
        threading.Thread(target=_discard_quietly, args=(discard,), name="pacekeeper-storage", daemon=True).start()


def _discard_quietly(discard: Callable[[], object]) -> None:
    with suppress(Exception):  # the store's lifecycle rules remove unfinished uploads
        discard()


class _PartWriter:
    """Passes content to a file of fsspec. What makes it upload a part has a time limit."""

    def __init__(self, file: Any, part_bytes: int) -> None:
        self._file = file
        self._part_bytes = part_bytes
        self._buffered_bytes = 0

    def write(self, content: Any, /) -> int:
        view = memoryview(content).cast("B")
        for start in range(0, len(view), self._part_bytes):
            part = view[start : start + self._part_bytes]
            self._buffered_bytes += len(part)
            if self._buffered_bytes < self._part_bytes:
                self._file.write(part)  # into memory
                continue
            _run_limited(lambda part=part: self._file.write(part), self._buffered_bytes)  # type: ignore[misc]
            self._buffered_bytes = 0
        return len(view)
