"""The end of a rank: what Python does after a script, without the destructors of C++ libraries.

Some of those wait for peers. Everything else that a script may rely on happens: its threads are joined, `atexit` runs,
its objects are finalized, and the files that it left open are flushed.
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

from .process_setup import flush_c_streams

FLUSH_FAILED_EXIT_CODE = 120
"""Python's exit code if standard output cannot be flushed."""


def end_process(code: int, failed: bool) -> NoReturn:
    """End the process as Python would, with this exit code; a negative one is the signal to end by.

    `failed`: the script raised an exception. Its frames still refer to its objects, so these are not finalized.
    """
    _run_and_print_errors(threading._shutdown)  # type: ignore[attr-defined]  # threads, and thread pools
    _run_and_print_errors(atexit._run_exitfuncs)
    code = FLUSH_FAILED_EXIT_CODE if not _flush_standard_streams() else code
    threading.excepthook = _ignore_exception  # in Python, daemon threads end at this point
    flush_files()  # in a reference cycle, the collector finalizes the file before its buffer
    if not failed:
        _run_and_print_errors(_finalize_main)
        flush_files()
    _flush_standard_streams()
    flush_c_streams()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def flush_files() -> None:
    """Flush each file object of this process, and close those that need it (gzip's trailer)."""
    files = [item for item in gc.get_objects() if io.IOBase in type(item).__mro__ or _RAW_IO_BASE in type(item).__mro__]
    text = [file for file in files if isinstance(file, io.TextIOWrapper)]
    buffers = [file for file in files if type(file) in _BUFFER_TYPES]
    others = [file for file in files if file not in text and type(file).__module__ not in {"_io", "io", __name__}]
    for group, finish in ((text, _flush_file), (others, _close_file), (text, _flush_file), (buffers, _flush_file)):
        for file in group:
            with suppress(Exception):
                finish(file)


_RAW_IO_BASE = io.IOBase.__mro__[1]
"""The base class of file objects that are written in C."""
_BUFFER_TYPES = (io.BufferedWriter, io.BufferedRandom, io.BufferedRWPair)


def _flush_file(file: io.IOBase) -> None:
    if not file.closed:
        file.flush()


def _close_file(file: io.IOBase) -> None:
    """Close the file if it is writable, as the finalizer of an `io.IOBase` does."""
    if not file.closed and file.writable():
        file.close()


def _finalize_main() -> None:
    """Finalize the objects of the script's module.

    Python first drops the module and collects what only it refers to, so that finalizers still see its globals. If
    something else refers to the module, its objects are dropped one by one.
    """
    main = sys.modules.pop("__main__")
    names = vars(main)
    names["__pacekeeper__"] = sentinel = _ModuleSentinel()
    reference = weakref.ref(sentinel)
    del main, names, sentinel
    gc.collect()
    if (remaining := reference()) is None:
        return
    names = remaining.find_module_names(gc.get_referrers(remaining))
    del remaining
    for name in [*names]:
        if not isinstance(names[name], _DEFINITION_TYPES):
            del names[name]
    gc.collect()


_DEFINITION_TYPES = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)


class _ModuleSentinel:
    """An object in the namespace of the script's module. It exists as long as the module's dictionary."""

    def find_module_names(self, referrers: list[object]) -> dict[str, object]:
        return next((referrer for referrer in referrers if isinstance(referrer, dict) and "__name__" in referrer), {})


def _flush_standard_streams() -> bool:
    """Flush both streams, and return whether standard output could be flushed."""
    flushed = True
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except Exception:
            flushed = flushed and stream is not sys.stdout
    return flushed


def _run_and_print_errors(function: Callable[[], object]) -> None:
    """Call the function. As in Python, an error at exit is printed, and does not change the exit code."""
    try:
        function()
    except BaseException:
        with suppress(Exception):
            traceback.print_exc()


def _ignore_exception(*_: object) -> None:
    """Replace the hook that prints a traceback."""
