"""Answers requests for the stack of a rank's main thread.

The watch's thread answers. It needs Python's lock; if another thread keeps it, the process monitor asks by a signal,
for which faulthandler is registered here.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import traceback
from typing import TextIO

from .process_files import STACK_SIGNAL
from .watch_folder import WatchFolder, write_json

MAX_FRAMES = 100


class StackResponder:
    """Answers requests for the stack of slot `slot`."""

    def __init__(self, folder: WatchFolder, slot: int) -> None:
        self._folder, self._slot = folder, slot
        self._answered = folder.read_stack_request()  # of before this process
        self._dump: TextIO | None = None

    def start(self) -> None:
        """Prepare for requests. Call it in the main thread."""
        self._folder.get_file("stacks", self._slot).unlink(missing_ok=True)
        self._dump = register_stack_signal(self._folder, self._slot)

    def answer(self) -> None:
        """Answer the newest request, unless that has been done. Call it often, in another than the main thread."""
        request = self._folder.read_stack_request()
        if request and request != self._answered:
            self._answered = request
            content = {"request": request, "stack": read_main_stack()}
            write_json(self._folder.get_file("stacks", self._slot), content)


def read_main_stack() -> list[dict[str, object]]:
    """Return the newest MAX_FRAMES frames of the main thread, outermost first."""
    identity = threading.main_thread().ident
    frame = None if identity is None else sys._current_frames().get(identity)
    stack = [] if frame is None else list(traceback.walk_stack(frame))[:MAX_FRAMES]
    return [
        {"file": each.f_code.co_filename, "line": line, "function": each.f_code.co_name}
        for each, line in reversed(stack)
    ]


def register_stack_signal(folder: WatchFolder, slot: int) -> TextIO | None:
    """Have faulthandler write all stacks on STACK_SIGNAL; None: the signal is in use, or this is not the main thread.

    The signal is ignored first: at exit, faulthandler restores what was in force before it. The default action would
    end the process.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(STACK_SIGNAL) is not signal.SIG_DFL:
        return None
    path = folder.stack_dump(slot)
    path.unlink(missing_ok=True)
    file = os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), "w")
    file.write(f"main thread 0x{threading.main_thread().ident:016x}\n")
    file.flush()
    signal.signal(STACK_SIGNAL, signal.SIG_IGN)
    faulthandler.register(STACK_SIGNAL, file=file, all_threads=True, chain=False)
    return file
