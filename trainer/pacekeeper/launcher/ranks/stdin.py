"""Standard input of the first rank of this worker.

A rank gets a pipe or a file directly: the next round reads what one round has not read. A terminal sends its input, and
Ctrl-C, to its foreground process group. That is the launcher's, so the launcher forwards lines.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

_STDIN_CHUNK_BYTES = 1 << 12


class StandardInput:
    """The launcher's standard input. `descriptor`: its file descriptor; None: it has none."""

    def __init__(self, descriptor: int | None = 0) -> None:
        self._descriptor = descriptor
        self._pipe: int | None = None  # to the present rank

    def open(self) -> int | None:
        """Return a descriptor for a new round's rank, which the caller closes; None: there is no input."""
        self.close()
        if self._descriptor is None:
            return None
        try:
            if not os.isatty(self._descriptor):
                return os.dup(self._descriptor)
        except OSError:
            return None
        read_end, self._pipe = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._pipe, False)
        signal.signal(
            signal.SIGTTIN, signal.SIG_IGN
        )  # in the background, reading fails instead of stopping the process
        asyncio.get_running_loop().add_reader(self._descriptor, self._forward_line)
        return read_end

    def close(self) -> None:
        """End the rank's input."""
        if self._pipe is not None:
            assert self._descriptor is not None
            asyncio.get_running_loop().remove_reader(self._descriptor)
            os.close(self._pipe)
            self._pipe = None

    def _forward_line(self) -> None:
        assert self._pipe is not None
        assert self._descriptor is not None
        try:
            line = os.read(self._descriptor, _STDIN_CHUNK_BYTES)
        except OSError:
            line = b""
        if not line:
            self.close()  # Ctrl-D, or the terminal is closed or belongs to another process group
            return
        with contextlib.suppress(BlockingIOError, BrokenPipeError):  # a rank that does not read loses the line
            os.write(self._pipe, line)
