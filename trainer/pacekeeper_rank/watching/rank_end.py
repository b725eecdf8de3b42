"""Writes how a rank's script ended. A rank that a signal ends writes nothing: readers notice its lock."""

from __future__ import annotations

import atexit
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from ..tracebacks import hide_own_frames
from .guard import guard
from .watch_folder import write_json

MAX_TRACEBACK_CHARACTERS = 8000


class EndReporter:
    """The end of the process that creates this object, not of its forked children."""

    def __init__(self, path: Path, on_exit: Callable[[], None]) -> None:
        """Register for the end. `on_exit`: called when the interpreter begins to exit."""
        self._path, self._pid, self._on_exit = path, os.getpid(), on_exit
        self._reported = False
        self._previous_hook = sys.excepthook
        path.unlink(missing_ok=True)  # of an earlier process in this slot
        sys.excepthook = self._report_exception
        atexit.register(self._report_exit)
        _call_before_child_exit(self._report_child_exit)

    def _report_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        guard.run("uncaught exception", self._write, error, trace)
        guard.run("traceback", hide_own_frames, error)
        self._previous_hook(kind, error, trace)

    def _report_exit(self) -> None:
        guard.run("exit", self._write_exit)

    def _report_child_exit(self) -> None:
        """Report the end of a process of `multiprocessing`, which handles its exceptions itself."""
        guard.run("exit of a child process", self._write_child_exit, sys.exc_info()[1])

    def _write_child_exit(self, error: BaseException | None) -> None:
        if os.getpid() != self._pid or self._reported:
            return
        if isinstance(error, SystemExit):  # torch.multiprocessing raises it for the script's own exception
            error = error.__context__ if error.code else None
        self._on_exit()
        self._write(error, None if error is None else error.__traceback__)

    def _write_exit(self) -> None:
        if os.getpid() != self._pid:
            return
        self._on_exit()
        if not self._reported:
            # Set by Python for each uncaught exception, also if the script has replaced sys.excepthook.
            error = getattr(sys, "last_value", None)
            self._write(error, getattr(sys, "last_traceback", None))

    def _write(self, error: BaseException | None, trace: TracebackType | None) -> None:
        if os.getpid() != self._pid:
            return
        self._reported = True
        text = "" if error is None else "".join(traceback.format_exception(type(error), error, trace))
        content = {
            "pid": self._pid,
            "at": time.time(),
            "kind": "" if error is None else type(error).__name__,
            "error": text[-MAX_TRACEBACK_CHARACTERS:],
        }
        write_json(self._path, content)


def _call_before_child_exit(function: Callable[[], None]) -> None:
    """Call `function` when a process of `multiprocessing` exits, while the exception that ends it is handled."""
    util = sys.modules.get("multiprocessing.util")
    process = sys.modules.get("multiprocessing.process")
    if util is not None and process is not None and process.parent_process() is not None:
        util.Finalize(None, function, exitpriority=100)
