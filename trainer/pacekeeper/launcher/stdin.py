"""Standard input of the first rank here.

A pipe or a file is given to the rank as it is: what one round has not read, the next one finds. A terminal gives its
input, and Ctrl-C, to the process group in its foreground, which is the launcher's: it passes lines on.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

_STDIN_CHUNK_BYTES = 1 << 12


class StandardInput:
    """The launcher's. `descriptor`: where it is."""

    def __init__(self, descriptor: int = 0) -> None:
        self._descriptor = descriptor
        self._pipe: int | None = None  # to the present rank

    def open(self) -> int | None:
        """A descriptor for the rank of a new round to read, the caller's to close; None: there is nothing to read."""
        self.close()
        try:
            if not os.isatty(self._descriptor):
                return os.dup(self._descriptor)
        except OSError:
            return None
        read_end, self._pipe = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._pipe, False)
        signal.signal(signal.SIGTTIN, signal.SIG_IGN)  # in the background, reading fails instead of stopping us
        asyncio.get_running_loop().add_reader(self._descriptor, self._forward_line)
        return read_end

    def close(self) -> None:
        """The rank's input ends here."""
        if self._pipe is not None:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            os.close(self._pipe)
            self._pipe = None

    def _forward_line(self) -> None:
        assert self._pipe is not None
        try:
            line = os.read(self._descriptor, _STDIN_CHUNK_BYTES)
        except OSError:
            line = b""
        if not line:
            self.close()  # Ctrl-D, a terminal that is gone, or one that is another's
            return
        with contextlib.suppress(BlockingIOError, BrokenPipeError):  # a rank that reads nothing loses what is typed
            os.write(self._pipe, line)
