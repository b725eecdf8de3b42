"""The ranks' output: passed on, with the rank in front of each line where there are several; its end is kept."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from typing import BinaryIO, Protocol

TAIL_LINES = 50
TAIL_BYTES = 64 * 2**10
_CHUNK = 1 << 16
_LONGEST_LINE = 1 << 20  # a line beyond this is passed on in pieces


class Copy(Protocol):
    """Takes what comes out of a pipe as it is, next to the pipe's target."""

    def write(self, chunk: bytes) -> None: ...

    def close(self) -> None: ...


class OutputPipe:
    """One pipe from a rank. Its writing end is for the rank; what comes out goes to `target`."""

    def __init__(self, target: BinaryIO, prefix: bytes = b"", copy: Copy | None = None) -> None:
        self._read_end, self.write_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._read_end, False)
        self._open = True
        self._target = target
        self._prefix = prefix
        self._copy = copy
        self._rest = b""
        self._tail: deque[bytes] = deque(maxlen=TAIL_LINES)
        asyncio.get_running_loop().add_reader(self._read_end, self.pump)

    def pump(self) -> None:
        """Passes on what is there; at its end, closes."""
        while self._open:
            try:
                chunk = os.read(self._read_end, _CHUNK)
            except BlockingIOError:
                return
            if not chunk:
                self._keep(self._rest)
                self._rest = b""
                self.close()
                return
            if self._copy is not None:
                self._copy.write(chunk)
            if not self._prefix:
                self._write(chunk)  # at once: a progress bar has no line ends
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            for line in lines:
                self._keep(line + b"\n")
            if len(self._rest) > _LONGEST_LINE:
                self._keep(self._rest + b"\n")
                self._rest = b""

    def tail(self) -> str:
        """The last lines that came through, but `TAIL_BYTES` at most: a line may be as long as it likes."""
        return b"".join(self._tail)[-TAIL_BYTES:].decode(errors="replace")

    def close(self) -> None:
        if self._open:
            self._open = False
            asyncio.get_running_loop().remove_reader(self._read_end)
            os.close(self._read_end)
            if self._copy is not None:
                self._copy.close()

    def _keep(self, line: bytes) -> None:
        if not line:
            return
        self._tail.append(line)
        if self._prefix:
            self._write(self._prefix + line)

    def _write(self, output: bytes) -> None:
        self._target.write(output)
        self._target.flush()
