"""A rank's first moments: what happens in the forked process before the script runs, and after it."""

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
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NoReturn

import numpy as np

from pacekeeper.observe.ring import create_ring
from pacekeeper.runtime import FIRST_PROCESS_OWNER

from . import end_signals, processes
from .ending import end_process
from .late import handle_late_variables
from .program import become_program
from .threads import limit_threads

STACK_SIGNAL = signal.SIGRTMIN + 10
"""On this signal a rank writes its Python stacks to its stack file, whatever it is doing."""


@dataclass(frozen=True)
class RankStart:
    """What a rank is to be. Plain data: it travels from the launcher to the warm process."""

    key: str  # the launcher's name for this one process
    rank: int
    round: int
    script: str  # path, or the name of a module
    is_module: bool
    arguments: list[str]
    environment: dict[str, str]  # what is set on top of the launcher's own
    ring_path: str  # path of its ring of records
    stack_path: str  # path of its stack file
    threads: int  # of torch's operations; 0: torch's default
    is_program: bool = False  # the script is any program, and the rank becomes it

    @property
    def is_first_local(self) -> bool:
        """Whether it is the first rank of its worker."""
        return self.environment.get("PACEKEEPER_LOCAL_RANK", self.environment.get("LOCAL_RANK")) == "0"


def run_rank(start: RankStart, parent: int, stdout: int, stderr: int, stdin: int | None = None) -> NoReturn:
    """Turns this process, forked by `parent`, into the rank, runs the script as `__main__` and ends as Python would.

    stdin: its standard input; None: it has none.
    """
    processes.die_with_parent(parent)
    os.setpgid(0, 0)
    _reset_signals()
    _connect_standard_files(stdin, stdout, stderr)
    imported = dict(os.environ)  # that torch has seen
    os.environ.update(start.environment)
    _make_files(start)
    if start.is_program:
        become_program(start.script, start.arguments, STACK_SIGNAL)
    np.random.seed()  # a forked generator would be the same in every rank; Python's own reseeds itself
    if start.threads:
        limit_threads(start.threads)
    handle_late_variables({**imported, **start.environment}, warn=start.is_first_local)  # once a worker is enough
    code, failed = _run_script(start)
    _notify_end()
    end_process(code, failed)


def _make_files(start: RankStart) -> None:
    """Without room for them the rank trains unwatched, as it would without a launcher."""
    try:
        owner = FIRST_PROCESS_OWNER if start.is_program else os.getpid()  # a shell may start what is to be watched
        create_ring(Path(start.ring_path), start.rank, start.round, owner=owner)
        _write_stacks_on_signal(start.stack_path)
    except OSError as error:
        with contextlib.suppress(OSError):
            Path(start.ring_path).unlink(missing_ok=True)  # of the round before
        signal.signal(STACK_SIGNAL, signal.SIG_IGN)
        print(f"pacekeeper: rank {start.rank} is not watched in this round: {error}", file=sys.stderr)


def _run_script(start: RankStart) -> tuple[int, bool]:
    """The script's exit code, negative for a signal; whether it has ended by an exception."""
    sys.argv = [start.script, *start.arguments]
    try:
        _run_as_main(start)
    except SystemExit as exit_:
        return _convert_exit_code(exit_.code), False
    except BaseException as error:
        error.__traceback__ = _trim_traceback(error.__traceback__)  # torch's own hook takes it from here
        sys.excepthook(type(error), error, error.__traceback__)
        # As Python itself does: an uncaught KeyboardInterrupt ends by its signal.
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1, True
    return 0, False


def _run_as_main(start: RankStart) -> None:
    """Run the script or module as `python` does. Its module stays `__main__` until the process ends: what pickles at
    the end (a thread pool, `atexit`) looks its classes up there."""
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
    names = {"__file__": path, "__cached__": None, "__loader__": SourceFileLoader("__main__", path)}
    main.__dict__.update(names, __annotations__={})
    with io.open_code(path) as file:
        code = pkgutil.read_code(file)  # of a .pyc file
    if code is None:
        with io.open_code(path) as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, main.__dict__)


def _add_path(folder: str) -> None:
    if not sys.flags.safe_path:
        sys.path.insert(0, folder)


def _notify_end() -> None:
    """Where the script is watched: what follows is no training."""
    watching = sys.modules.get("pacekeeper.observe.watching")
    if watching is not None:
        watching.note_end()


def _convert_exit_code(code: object) -> int:
    """As sys.exit() defines it: None is success, a number itself, anything else is printed and a failure."""
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr)
    return 1


def _trim_traceback(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the script's own first frame on."""
    launcher = {__file__, runpy.__file__, "<frozen runpy>"}
    part = trace
    while part is not None and part.tb_frame.f_code.co_filename in launcher:
        part = part.tb_next
    return part or trace


def _reset_signals() -> None:
    """To Python's own; a signal that was ignored when the launcher started (`nohup`) stays ignored."""
    for signum in {*end_signals.read_handled_signals(), signal.SIGCHLD}:
        if signum not in processes.read_initially_ignored_signals():
            signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


class _UnbufferedFile(io.FileIO):
    """A file of which each write is whole, however many signals arrive: a text file does not look at what is left."""

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        left = view
        while left:
            written = super().write(left)
            if written is None:  # the script has made its output non-blocking, as asyncio's pipes do
                select.select([], [self], [])
            left = left[written or 0 :]
        return len(view)


def _connect_standard_files(stdin: int | None, stdout: int, stderr: int) -> None:
    """Output and error are the launcher's pipes, unbuffered as under torchrun, so that nothing is lost in a kill."""
    source = os.open(os.devnull, os.O_RDONLY) if stdin is None else stdin
    for descriptor, target in ((source, 0), (stdout, 1), (stderr, 2)):
        os.dup2(descriptor, target)
        os.close(descriptor)
    text = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)))
    sys.stdin = sys.__stdin__ = text  # type: ignore[misc]  # both are the rank's from here on
    sys.stdout = sys.__stdout__ = _open_text_stream(1)  # type: ignore[misc]  # the same
    sys.stderr = sys.__stderr__ = _open_text_stream(2)  # type: ignore[misc]  # the same


def _open_text_stream(descriptor: int) -> io.TextIOWrapper:
    raw: Any = _UnbufferedFile(descriptor, "w", closefd=False)
    return io.TextIOWrapper(raw, "utf-8", "backslashreplace", newline="\n", write_through=True)


def _write_stacks_on_signal(path: str) -> None:
    """The stack file's first line names the main thread, the one whose stack explains a hang. What follows is appended,
    wherever the file ends by then: its reader drops what it has read."""
    Path(path).write_text(f"main thread 0x{threading.main_thread().ident:016x}\n")
    file = open(path, "a")  # noqa: SIM115  # faulthandler keeps it for the life of the process
    signal.signal(STACK_SIGNAL, signal.SIG_IGN)  # what is in force again once faulthandler no longer listens
    faulthandler.register(STACK_SIGNAL, file=file, all_threads=True, chain=False)
    _stack_files.append(file)


_stack_files: list[object] = []
