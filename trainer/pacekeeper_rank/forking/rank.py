"""The rank's process: what runs in the fork before and after the script."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import pkgutil
import runpy
import select
import signal
import sys
import threading
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NoReturn

from ..record_ring import FIRST_PROCESS_OWNER, create_ring
from ..watching.process_files import STACK_SIGNAL
from .handled_signals import read_handled_signals
from .late_variables import handle_late_variables
from .process_exit import end_process
from .process_setup import die_with_parent, read_initially_ignored_signals
from .program import become_program
from .rank_start import RankStart
from .threads import limit_threads


def run_rank(start: RankStart, parent: int, stdout: int, stderr: int, stdin: int | None = None) -> NoReturn:
    """Turn this process, forked by `parent`, into the rank. Run the script as `__main__`, and exit as Python would.

    `stdin`: its standard input; None: it has none.
    """
    die_with_parent(parent)
    os.setpgid(0, 0)
    _reset_signals()
    _connect_standard_files(stdin, stdout, stderr)
    import_environment = dict(os.environ)  # what torch read at its import
    os.environ.update(start.environment)
    _make_files(start)
    if start.is_program:
        become_program(start.script, start.arguments, STACK_SIGNAL)
    if "numpy" in sys.modules:  # otherwise every fork has the same generator; Python's own reseeds itself
        sys.modules["numpy"].random.seed()
    if start.threads is not None:
        limit_threads(start.threads)
    # One warning per worker.
    handle_late_variables({**import_environment, **start.environment}, warn=start.is_first_local)
    code, failed = _run_script(start)
    _notify_end()
    end_process(code, failed)


def _make_files(start: RankStart) -> None:
    """Create the ring and the stack file. If that fails, the rank trains without monitoring."""
    try:
        owner = FIRST_PROCESS_OWNER if start.is_program else os.getpid()  # a shell may start the process to monitor
        create_ring(Path(start.ring_path), start.rank, start.round, owner=owner)
        _write_stacks_on_signal(start.stack_path)
    except OSError as error:
        with contextlib.suppress(OSError):
            Path(start.ring_path).unlink(missing_ok=True)  # of the previous round
        signal.signal(STACK_SIGNAL, signal.SIG_IGN)
        print(f"pacekeeper: rank {start.rank} is not monitored in this round: {error}", file=sys.stderr)


def _run_script(start: RankStart) -> tuple[int, bool]:
    """Run the script. Return its exit code, negative for a signal, and whether it raised an exception."""
    sys.argv = [start.script, *start.arguments]
    try:
        _run_as_main(start)
    except SystemExit as exit_:
        return _convert_exit_code(exit_.code), False
    except BaseException as error:
        error.__traceback__ = _trim_traceback(error.__traceback__)  # torch's own hook may replace sys.excepthook
        sys.excepthook(type(error), error, error.__traceback__)
        # As in Python itself: an uncaught KeyboardInterrupt ends the process by its signal.
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1, True
    return 0, False


def _run_as_main(start: RankStart) -> None:
    """Run the script or module as `python` does.

    Its module stays `__main__` until the process ends: code that pickles at exit (a thread pool, `atexit`) looks up its
    classes there.
    """
    main = ModuleType("__main__")
    sys.modules["__main__"] = main
    if start.is_module:
        sys.argv[0] = "-m"
        _add_path(os.getcwd())
        runpy._run_module_as_main(start.script)  # type: ignore[attr-defined]  # as `python -m`; sets sys.argv[0]
        return
    path = os.path.abspath(start.script)
    if pkgutil.get_importer(path) is not None:  # a folder or an archive with a __main__.py
        _add_path(path)
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]  # the same
        return
    _add_path(str(Path(path).resolve().parent))
    attributes = {"__file__": path, "__cached__": None, "__loader__": SourceFileLoader("__main__", path)}
    main.__dict__.update(attributes, __annotations__={})
    with io.open_code(path) as file:
        code = pkgutil.read_code(file)  # if it is a .pyc file
    if code is None:
        with io.open_code(path) as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, main.__dict__)


def _add_path(folder: str) -> None:
    if not getattr(sys.flags, "safe_path", False):  # from Python 3.11 on
        sys.path.insert(0, folder)


def _notify_end() -> None:
    """Mark the end of a monitored script: what follows is not training."""
    library = __name__.partition(".")[0]
    for name in ("pacekeeper.observe.monitoring", f"{library}.watching.torch_hooks"):
        if name in sys.modules:
            sys.modules[name].mark_script_end()


def _convert_exit_code(code: object) -> int:
    """Convert the argument of sys.exit(): None is success, a number itself, anything else is printed, and 1."""
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr)
    return 1


def _trim_traceback(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback from the script's first frame on."""
    launcher = {__file__, runpy.__file__, "<frozen runpy>"}
    part = trace
    while part is not None and part.tb_frame.f_code.co_filename in launcher:
        part = part.tb_next
    return part or trace


def _reset_signals() -> None:
    """Restore Python's handlers. A signal that was ignored when the launcher started (`nohup`) stays ignored."""
    for signum in {*read_handled_signals(), signal.SIGCHLD}:
        if signum not in read_initially_ignored_signals():
            signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


class _UnbufferedFile(io.FileIO):
    """A file whose writes are complete even if signals interrupt them: a text file ignores the unwritten rest."""

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        remaining = view
        while remaining:
            written = super().write(remaining)
            if written is None:  # the script has made its output non-blocking, as asyncio's pipes do
                select.select([], [self], [])
            remaining = remaining[written or 0 :]
        return len(view)


def _connect_standard_files(stdin: int | None, stdout: int, stderr: int) -> None:
    """Connect output and error to the launcher's pipes, unbuffered as in torchrun: a kill loses no output."""
    source = os.open(os.devnull, os.O_RDONLY) if stdin is None else stdin
    for descriptor, target in ((source, 0), (stdout, 1), (stderr, 2)):
        os.dup2(descriptor, target)
        os.close(descriptor)
    stdin_stream = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)))
    sys.stdin = sys.__stdin__ = stdin_stream  # type: ignore[misc]  # both belong to the rank from here on
    sys.stdout = sys.__stdout__ = _open_text_stream(1)  # type: ignore[misc]  # the same
    sys.stderr = sys.__stderr__ = _open_text_stream(2)  # type: ignore[misc]  # the same


def _open_text_stream(descriptor: int) -> io.TextIOWrapper:
    raw: Any = _UnbufferedFile(descriptor, "w", closefd=False)
    return io.TextIOWrapper(raw, "utf-8", "backslashreplace", newline="\n", write_through=True)


def _write_stacks_on_signal(path: str) -> None:
    """Register faulthandler for STACK_SIGNAL. The stack file's first line names the main thread, which shows a hang.

    Dumps are appended at the file's present end: its reader truncates what it has read.
    """
    Path(path).write_text(f"main thread 0x{threading.main_thread().ident:016x}\n")
    file = open(path, "a")  # noqa: SIM115  # faulthandler keeps it for the life of the process
    signal.signal(STACK_SIGNAL, signal.SIG_IGN)  # in force again when faulthandler unregisters
    faulthandler.register(STACK_SIGNAL, file=file, all_threads=True, chain=False)
    _stack_files.append(file)


_stack_files: list[object] = []
