"""The launcher's standard output and error. A thread writes them, so that a blocked reader blocks nothing else.

The writers limit what waits to be written: they check `is_full`, and stop reading from the ranks' pipes. A rank then
blocks in its own write, as if it wrote to the reader's pipe directly.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import select
import threading
from collections import deque
from collections.abc import Callable

OUTPUT_FULL_BYTES = 1 << 20
OUTPUT_RESUME_BYTES = OUTPUT_FULL_BYTES // 4
_WRITE_CHUNK_BYTES = 1 << 16
_WRITE_RETRY_SECONDS = 1.0
_ResumeCallback = tuple[asyncio.AbstractEventLoop, Callable[[], None]]


class OutputWriter:
    """A file descriptor to which a thread writes bytes in order. The thread starts with the first bytes."""

    def __init__(self, descriptor: int | None, name: str) -> None:
        """`descriptor`: None: it was closed before the start. `name`: readable name of the descriptor."""
        self.closed_reason = ""
        """Why nothing is written any more; "": output is written."""
        self.partial_line_owner: object = None
        """The stream that has written an incomplete line; None: there is none."""
        self._descriptor = descriptor
        self._name = name
        self._queue: deque[bytes] = deque()
        self._bytes = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._waiting: list[_ResumeCallback] = []

    def write(self, data: bytes) -> int:
        """Accept the bytes at once, regardless of how many are waiting."""
        with self._changed:
            if not data or self.closed_reason:
                return len(data)
            self._queue.append(data)
            self._bytes += len(data)
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"writes {self._name}", daemon=True)
                self._thread.start()
        return len(data)

    def flush(self) -> None:
        """Do nothing: no bytes are held back."""

    @property
    def is_full(self) -> bool:
        return self._bytes > OUTPUT_FULL_BYTES

    def call_when_writable(self, callback: Callable[[], None]) -> None:
        """Call back once, in the loop, when it is no longer full."""
        loop = asyncio.get_running_loop()
        with self._changed:
            if self._bytes <= OUTPUT_RESUME_BYTES:
                loop.call_soon(callback)
            else:
                self._waiting.append((loop, callback))

    def drain(self, seconds: float) -> bool:
        """Wait up to `seconds` until all is written. Return whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._bytes, seconds)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._queue))
                data = b"".join(self._queue)
                self._queue.clear()
            for start in range(0, len(data), _WRITE_CHUNK_BYTES):
                chunk = data[start : start + _WRITE_CHUNK_BYTES]
                self._write(chunk)
                with self._changed:
                    self._bytes -= len(chunk)
                    self._changed.notify_all()
                    waiting, self._waiting = (
                        (self._waiting, []) if self._bytes <= OUTPUT_RESUME_BYTES else ([], self._waiting)
                    )
                for loop, callback in waiting:
                    with contextlib.suppress(RuntimeError):  # the loop is closed
                        loop.call_soon_threadsafe(callback)

    def _write(self, data: bytes) -> None:
        """Write all of it, unless the reader has closed."""
        while data and not self.closed_reason:
            if self._descriptor is None:
                self._close(os.strerror(errno.EBADF))
                return
            try:
                data = data[os.write(self._descriptor, data) :]
            except BlockingIOError:  # the parent, or a process that shares the descriptor, has made it non-blocking
                select.select([], [self._descriptor], [], _WRITE_RETRY_SECONDS)
            except OSError as error:
                self._close(str(error.strerror))

    def _close(self, error: str) -> None:
        """Write nothing any more, because of this error."""
        self.closed_reason = f"{self._name} cannot be written to any more ({error}): what ranks print is dropped"


class LogStream:
    """A stream for log lines. Each begins a new line, even if a rank's line is incomplete."""

    def __init__(self, output: OutputWriter) -> None:
        self._output = output

    def write(self, text: str) -> int:
        line_end = b"\n" if self._output.partial_line_owner is not None else b""
        self._output.partial_line_owner = None
        self._output.write(line_end + text.encode(errors="backslashreplace"))
        return len(text)

    def flush(self) -> None:
        """Do nothing: no text is held back."""
