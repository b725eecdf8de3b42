"""The ranks' log files (torchrun's --log-dir, --redirects, --tee), and the error files that torch's @record writes.

The layout is torchrun's: `<log dir>/<run id>_<random>/attempt_<N>/<local rank>/{stdout.log,stderr.log,error.json}`.
"""

from __future__ import annotations

import logging
import os
import queue
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import BinaryIO, Protocol

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.protocol.decoding import parse_json
from pacekeeper_rank.forking.rank_start import RankStart

from .output_pipe import TAIL_BYTES, TAIL_LINES, OutputPipe
from .output_writer import OutputWriter
from .rank_options import OutputOptions, RankOptions, RankPlace, StandardStream, StreamPlan

ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
"""Variable that names the file to which torch's @record writes the exception that ended a rank."""
_MAX_ERROR_FILE_BYTES = 1 << 20
_MAX_PENDING_LOG_BYTES = 64 << 20
"""Maximum of output that waits for the file system. Further output is not written to the file, but counted."""
_LOG_DRAIN_SECONDS = 10.0

log = logging.getLogger(__name__)


def make_run_folder(log_dir: str, run_id: str) -> Path:
    """Make the folder of one run's log files. `log_dir`: "" for a temporary folder. Raises InputError."""
    try:
        parent = Path(log_dir).absolute() if log_dir else Path(tempfile.mkdtemp(prefix="pacekeeper-logs-"))
        parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f"{run_id.replace('/', '_')}_", dir=parent))
    except OSError as error:
        raise InputError(f"--log-dir {log_dir}: {error.strerror}; name a folder that this user may write to") from error


class RankStream(Protocol):
    """One output stream of a rank, on the launcher's side."""

    write_end: int
    """File descriptor that the rank writes to."""

    def pump(self) -> None: ...

    def tail(self) -> str: ...

    def close(self) -> None: ...


class RankFile:
    """A file that the rank itself writes to. Its content does not pass through the launcher."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self._path = path
        self.write_end = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o666)

    def pump(self) -> None:
        """Do nothing: the rank writes the file itself."""

    def tail(self) -> str:
        """Return the last lines, as `OutputPipe` does."""
        try:
            with self._path.open("rb") as file:
                file.seek(max(file.seek(0, os.SEEK_END) - TAIL_BYTES, 0))
                lines = file.read(TAIL_BYTES).splitlines(keepends=True)
        except OSError:
            return ""
        return b"".join(lines[-TAIL_LINES:]).decode(errors="replace")

    def close(self) -> None:
        """Do nothing: only the rank holds the file."""


class FileWriter:
    """Writes to files in a separate thread, so that an unresponsive file system does not block the launcher."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[BinaryIO, bytes | None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._given = 0  # bytes; only the launcher's thread writes it
        self._done = 0  # bytes; only the writer's thread writes it
        self._lost = 0

    def write(self, file: BinaryIO, data: bytes) -> None:
        if self._given - self._done > _MAX_PENDING_LOG_BYTES:
            self._lost += len(data)
            return
        self._given += len(data)
        self._put((file, data))

    def close_file(self, file: BinaryIO) -> None:
        self._put((file, None))

    def close(self) -> None:
        """Wait up to _LOG_DRAIN_SECONDS until all is written, and log how many bytes are not."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(_LOG_DRAIN_SECONDS)
        if lost := self._lost + self._given - self._done:
            log.warning("log files lack %d bytes of the ranks' output: their file system was too slow or failed", lost)

    def _put(self, item: tuple[BinaryIO, bytes | None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="log-files", daemon=True)
            self._thread.start()
        self._queue.put(item)

    def _run(self) -> None:
        broken: set[BinaryIO] = set()
        while (item := self._queue.get()) is not None:
            file, data = item
            try:
                if data is None:
                    file.close()
                elif file not in broken:
                    unwritten = memoryview(data)
                    while unwritten:
                        unwritten = unwritten[file.write(unwritten) :]
                    self._done += len(data)
            except OSError as error:
                broken.add(file)
                log.warning("%s cannot be written to: %s", file.name, error.strerror)


class LogCopy:
    """The copy of a teed stream in files, in addition to the console."""

    def __init__(self, writer: FileWriter, plan: StreamPlan) -> None:
        """Raises OSError."""
        assert plan.file is not None
        self._writer = writer
        self._file: BinaryIO = plan.file.open("wb", buffering=0)
        # All ranks append to this file.
        self._filtered: BinaryIO | None = plan.filtered.open("ab", buffering=0) if plan.filtered is not None else None
        self._filters = [text.encode() for text in plan.filters]
        self._prefix = plan.prefix.encode()
        self._rest = b""

    def write(self, chunk: bytes) -> None:
        self._writer.write(self._file, chunk)
        if self._filtered is not None:
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            self._write_filtered(lines)

    def close(self) -> None:
        if self._filtered is not None:
            self._write_filtered([self._rest] if self._rest else [])
            self._writer.close_file(self._filtered)
        self._writer.close_file(self._file)

    def _write_filtered(self, lines: list[bytes]) -> None:
        assert self._filtered is not None
        for line in lines:
            if any(text in line for text in self._filters):
                self._writer.write(self._filtered, self._prefix + line + b"\n")


@cache
def _open_null_console() -> BinaryIO:
    """Return the console of ranks that --local-ranks-filter hides. It is never closed."""
    return open(os.open(os.devnull, os.O_WRONLY), "wb", buffering=0, closefd=False)


@dataclass
class RankOutput:
    """Opens the output streams of ranks according to the options."""

    options: RankOptions = field(default_factory=RankOptions)
    consoles: tuple[BinaryIO | OutputWriter, BinaryIO | OutputWriter] = field(
        default_factory=lambda: (sys.stdout.buffer, sys.stderr.buffer)
    )
    _writer: FileWriter = field(default_factory=FileWriter)

    def open(self, start: RankStart, local_rank: int, shares_console: bool) -> tuple[RankStream, RankStream]:
        """Return the rank's stdout and stderr, and delete the error file of an earlier rank."""
        output = self.options.output
        attempt = int(start.environment["TORCHELASTIC_RESTART_COUNT"])
        folder = output.rank_folder(attempt, local_rank)
        if folder is not None:
            with suppress(OSError):  # opening the files reports the error; the output then goes to the console only
                folder.mkdir(parents=True, exist_ok=True)
        with suppress(OSError):
            Path(start.environment[ERROR_FILE_VARIABLE]).unlink(missing_ok=True)
        place = RankPlace(start.rank, local_rank, attempt, shares_console)
        return self._open_stream(output, StandardStream.OUT, place), self._open_stream(
            output, StandardStream.ERR, place
        )

    def close(self) -> None:
        """Wait for the files. The streams must be closed."""
        self._writer.close()

    def _open_stream(self, output: OutputOptions, stream: StandardStream, place: RankPlace) -> RankStream:
        plan = output.plan_stream(stream, place, self.options.role, socket.gethostname())
        console = self.consoles[0 if stream is StandardStream.OUT else 1]
        try:
            if plan.file is not None and not plan.console:
                return RankFile(plan.file)
            copy = LogCopy(self._writer, plan) if plan.file is not None else None
        except OSError as error:
            log.warning("no log file for rank %d: %s", place.rank, error)
            copy = None
        target = console if plan.console else _open_null_console()
        return OutputPipe(target, plan.prefix.encode(), copy)


def choose_error_file(options: RankOptions, attempt: int, local_rank: int, errors: Path) -> Path:
    """Return where @record is to write. `errors`: the folder to use if there are no log files."""
    folder = options.output.rank_folder(attempt, local_rank)
    return folder / "error.json" if folder is not None else errors / f"{local_rank}.json"


def read_recorded_error(path: Path) -> str:
    """Return what @record has written: the traceback, or the message; "": the file is missing or malformed."""
    try:
        with path.open("rb") as file:
            content = parse_json(file.read(_MAX_ERROR_FILE_BYTES), path.name)
    except (OSError, InputError):
        return ""
    message = content.get("message") if isinstance(content, Mapping) else None
    if isinstance(message, Mapping):
        extra = message.get("extraInfo")
        stack = extra.get("py_callstack") if isinstance(extra, Mapping) else None
        message = stack if isinstance(stack, str) else message.get("message")
    return message.strip()[-TAIL_BYTES:] if isinstance(message, str) else ""


def merge_error_texts(tail: str, recorded: str) -> str:
    """Return the end of a rank's standard error, followed by what @record has written unless `tail` contains it."""
    last = recorded.rpartition("\n")[2]
    if not recorded or tail.rstrip().endswith(last):
        return tail
    return f"{tail.rstrip()}\n{recorded}\n".lstrip("\n")


def copy_error_file(path: Path, environment: Mapping[str, str]) -> None:
    """Copy a rank's error file to the one that the launcher's parent has named, if any, as torchrun does."""
    target = environment.get(ERROR_FILE_VARIABLE)
    if target and path.is_file():
        try:
            shutil.copyfile(path, target)
        except OSError as error:
            log.warning("%s=%s: %s", ERROR_FILE_VARIABLE, target, error.strerror)
