"""The ranks' output: forwarded with the rank as a prefix if there are several. The last lines are kept."""

from __future__ import annotations

import asyncio
import os
import re
from collections import deque
from typing import BinaryIO, Protocol

from .output_writer import OutputWriter

TAIL_LINES = 50
TAIL_BYTES = 64 * 2**10
PARTIAL_LINE_SECONDS = 1.0
"""An incomplete line is forwarded after this time: it may be a prompt, or a progress bar."""
_READ_CHUNK_BYTES = 1 << 16
_CHUNKS_PER_PUMP = 16
"""Chunks that are read before other streams get their turn. A pipe holds less."""
_MAX_OUTPUT_LINE_BYTES = 1 << 20  # a longer line is forwarded in pieces
_LINE_ENDS = re.compile(rb"(\r\n|\r|\n)")


class OutputCopy(Protocol):
    """Receives an unmodified copy of a pipe's content."""

    def write(self, chunk: bytes) -> None: ...

    def close(self) -> None: ...


class OutputPipe:
    """One pipe from a rank. The rank gets the write end; the content is forwarded to `target`."""

    def __init__(self, target: BinaryIO | OutputWriter, prefix: bytes = b"", copy: OutputCopy | None = None) -> None:
        self._read_end, self.write_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._read_end, False)
        self._open = True
        self._target = target
        self._prefix = prefix
        self._copy = copy
        self._rest = b""  # of the last line, for the tail
        self._tail: deque[bytes] = deque(maxlen=TAIL_LINES)
        self._pending = b""  # of the last line, not forwarded yet
        self._in_line = False  # whether a part of the last line has been forwarded
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._resume_reading()

    def pump(self) -> None:
        """Forward what is in the pipe, and close it at its end."""
        for _ in range(_CHUNKS_PER_PUMP):
            if not self._open:
                return
            try:
                chunk = os.read(self._read_end, _READ_CHUNK_BYTES)
            except BlockingIOError:
                return
            if not chunk:
                self.close()
                return
            if self._copy is not None:
                self._copy.write(chunk)
            self._append_tail(chunk)
            if self._prefix:
                self._forward(chunk)
            else:
                self._write(chunk)

    def tail(self) -> str:
        """Return the last lines, `TAIL_BYTES` at most: the length of a line is not limited."""
        return b"".join(self._tail)[-TAIL_BYTES:].decode(errors="replace")

    def close(self) -> None:
        if self._open:
            self._open = False
            self._loop.remove_reader(self._read_end)
            os.close(self._read_end)
            self._forward_rest()
            if self._rest:
                self._tail.append(self._rest)
                self._rest = b""
            if self._copy is not None:
                self._copy.close()

    def _resume_reading(self) -> None:
        if self._open:
            self._loop.add_reader(self._read_end, self._handle_readable)

    def _handle_readable(self) -> None:
        """Forward the content, or leave it in the pipe while the target is full: the rank then blocks in its write."""
        if isinstance(self._target, OutputWriter) and self._target.is_full:
            self._loop.remove_reader(self._read_end)
            self._target.call_when_writable(self._resume_reading)
        else:
            self.pump()

    def _append_tail(self, chunk: bytes) -> None:
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        self._tail.extend(line + b"\n" for line in lines)
        if len(self._rest) > _MAX_OUTPUT_LINE_BYTES:
            self._tail.append(self._rest + b"\n")
            self._rest = b""

    def _forward(self, chunk: bytes) -> None:
        """Forward whole lines at once, the rest after a delay.

        A carriage return ends a line, too, which the next one overwrites.
        """
        text = self._pending + chunk
        end = max(text.rfind(b"\n"), text.rfind(b"\r", 0, -1)) + 1  # a last \r may be the first half of \r\n
        self._pending = text[end:]
        self._write_lines(text[:end])
        if len(self._pending) > _MAX_OUTPUT_LINE_BYTES:
            self._forward_rest()
        elif self._pending and self._timer is None:
            self._timer = self._loop.call_later(PARTIAL_LINE_SECONDS, self._forward_rest)

    def _forward_rest(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        pending, self._pending = self._pending, b""
        self._write_lines(pending)

    def _write_lines(self, text: bytes) -> None:
        if not text:
            return
        parts = []
        if isinstance(self._target, OutputWriter) and self._target.partial_line_owner is not self:
            if self._target.partial_line_owner is not None and not text.startswith(b"\r"):
                parts.append(b"\n")  # ends the line of another rank
            self._in_line = False
        for part in _LINE_ENDS.split(text):
            if part == b"":
                continue
            is_end = part in (b"\r\n", b"\r", b"\n")
            if not self._in_line and part != b"\r":
                parts.append(self._prefix)
            parts.append(part)
            self._in_line = not is_end
        if isinstance(self._target, OutputWriter):
            self._target.partial_line_owner = self if self._in_line else None
        self._write(b"".join(parts))

    def _write(self, output: bytes) -> None:
        self._target.write(output)
        self._target.flush()
