"""The end of a rank: what Python does when a script is over, except that C++ libraries are not torn down.

Some of these wait for peers in their destructors. Everything else that a script may rely on happens: its threads are
joined, `atexit` runs, its objects are finalized, and each file that it has left open is flushed.
"""

from __future__ import annotations

import atexit
import gc
import io
import os
import signal
import sys
import threading
import traceback
import types
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from . import processes

FLUSH_FAILED_EXIT_CODE = 120
"""Python's exit code where standard output cannot be flushed."""


def end_process(code: int, failed: bool) -> NoReturn:
    """End the process as Python would, with this exit code; a negative one is the signal to end by.

    failed: the script has ended by an exception. Its frames still refer to its objects, so these are not finalized.
    """
    _run_and_print_errors(threading._shutdown)  # type: ignore[attr-defined]  # threads, and thread pools
    _run_and_print_errors(atexit._run_exitfuncs)
    code = FLUSH_FAILED_EXIT_CODE if not _flush_standard_streams() else code
    threading.excepthook = _ignore_exception  # in Python, daemon threads do not outlive this point
    flush_files()  # of objects that refer to each other, the collector finalizes the file before its buffer
    if not failed:
        _run_and_print_errors(_finalize_main)
        flush_files()
    _flush_standard_streams()
    processes.flush_c_streams()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def flush_files() -> None:
    """Flush each file object that this process has made, and complete those that have an end (gzip's trailer)."""
    files = [each for each in gc.get_objects() if io.IOBase in type(each).__mro__ or _RAW_IO_BASE in type(each).__mro__]
    text = [file for file in files if isinstance(file, io.TextIOWrapper)]
    buffers = [file for file in files if type(file) in _BUFFER_TYPES]
    others = [file for file in files if file not in text and type(file).__module__ not in {"_io", "io", __name__}]
    for group, complete in ((text, _flush_file), (others, _close_file), (text, _flush_file), (buffers, _flush_file)):
        for file in group:
            with suppress(Exception):
                complete(file)


_RAW_IO_BASE = io.IOBase.__mro__[1]
"""The base of file objects that are written in C."""
_BUFFER_TYPES = (io.BufferedWriter, io.BufferedRandom, io.BufferedRWPair)


def _flush_file(file: io.IOBase) -> None:
    if not file.closed:
        file.flush()


def _close_file(file: io.IOBase) -> None:
    """What the finalizer of an `io.IOBase` does."""
    if not file.closed and file.writable():
        file.close()


def _finalize_main() -> None:
    """Finalize the objects of the script's module.

    Python first drops the module and collects what only it refers to, so that finalizers still see its globals. Objects
    of a module that is referred to from elsewhere are dropped one by one.
    """
    main = sys.modules.pop("__main__")
    names = vars(main)
    names["__pacekeeper__"] = there = _ModuleSentinel()
    is_there = weakref.ref(there)
    del main, names, there
    gc.collect()
    if (left := is_there()) is None:
        return
    names = left.find_module_names(gc.get_referrers(left))
    del left
    for name in [*names]:
        if not isinstance(names[name], _DEFINITION_TYPES):
            del names[name]
    gc.collect()


_DEFINITION_TYPES = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)


class _ModuleSentinel:
    """A name of the script's module: it is gone when the module's dictionary is."""

    def find_module_names(self, referrers: list[object]) -> dict[str, object]:
        return next((each for each in referrers if isinstance(each, dict) and "__name__" in each), {})


def _flush_standard_streams() -> bool:
    """Whether standard output could be flushed."""
    done = True
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except Exception:
            done = done and stream is not sys.stdout
    return done


def _run_and_print_errors(function: Callable[[], object]) -> None:
    """As Python: an error at the interpreter's end is printed, and does not change the exit code."""
    try:
        function()
    except BaseException:
        with suppress(Exception):
            traceback.print_exc()


def _ignore_exception(*_: object) -> None:
    """In place of a traceback."""
