"""A rank's first moments: what happens in the forked process before the script runs, and after it."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import runpy
import signal
import sys
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NoReturn

import numpy as np

from pacekeeper.observe.ring import create_ring
from pacekeeper.runtime import FIRST_TO_TAKE

from . import end_signals, processes
from .program import become_program

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
    ring: str  # path of its ring of records
    stack: str  # path of its stack file
    threads: int  # of torch's operations; 0: torch's default
    is_program: bool = False  # the script is any program, and the rank becomes it


def run_rank(start: RankStart, parent: int, stdout: int, stderr: int) -> NoReturn:
    """Turns this process, forked by `parent`, into the rank, runs the script as `__main__` and ends as Python would."""
    processes.die_with_parent(parent)
    os.setpgid(0, 0)
    _reset_signals()
    _connect_output(stdout, stderr)
    os.environ.update(start.environment)
    _make_files(start)
    if start.is_program:
        become_program(start.script, start.arguments, STACK_SIGNAL)
    np.random.seed()  # a forked generator would be the same in every rank; Python's own reseeds itself
    if start.threads:
        import torch

        torch.set_num_threads(start.threads)
    code = _run_script(start)
    _note_end()
    _end(code)


def _make_files(start: RankStart) -> None:
    """Without room for them the rank trains unwatched, as it would without a launcher."""
    try:
        owner = FIRST_TO_TAKE if start.is_program else os.getpid()  # a shell may start what is to be watched
        create_ring(Path(start.ring), start.rank, start.round, owner=owner)
        _write_stacks_on_signal(start.stack)
    except OSError as error:
        with contextlib.suppress(OSError):
            Path(start.ring).unlink(missing_ok=True)  # of the round before
        signal.signal(STACK_SIGNAL, signal.SIG_IGN)
        print(f"pacekeeper: rank {start.rank} is not watched in this round: {error}", file=sys.stderr)


def _run_script(start: RankStart) -> int:
    """The script's exit code."""
    sys.argv = [start.script, *start.arguments]
    try:
        if start.is_module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(start.script, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(start.script).resolve().parent))
            runpy.run_path(start.script, run_name="__main__")
    except SystemExit as exit_:
        return _exit_code(exit_.code)
    except BaseException as error:
        error.__traceback__ = _script_part(error.__traceback__)  # torch's own hook takes it from here
        sys.excepthook(type(error), error, error.__traceback__)
        # As Python itself does: a KeyboardInterrupt that nobody has caught ends by the signal's code.
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _note_end() -> None:
    """Where the script is watched: what follows is no training."""
    watching = sys.modules.get("pacekeeper.observe.watching")
    if watching is not None:
        watching.note_end()


def _exit_code(code: object) -> int:
    """As sys.exit() defines it: None is success, a number itself, anything else is printed and a failure."""
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr)
    return 1


def _script_part(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the script's own first frame on."""
    launcher = {__file__, runpy.__file__, "<frozen runpy>"}
    part = trace
    while part is not None and part.tb_frame.f_code.co_filename in launcher:
        part = part.tb_next
    return part or trace


def _end(code: int) -> NoReturn:
    """Ends as Python does, but without tearing down C++ libraries: some wait for peers in their destructors."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for the script's non-daemon threads
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
        code = code or 1
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            code = code or 1
    os._exit(code)


def _reset_signals() -> None:
    for signum in (*end_signals.handled_signals(), signal.SIGCHLD):
        signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _connect_output(stdout: int, stderr: int) -> None:
    """No input; output and error are the launcher's pipes, line by line, so that nothing is lost in a kill."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (stdout, 1), (stderr, 2)):
        os.dup2(source, target)
        os.close(source)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", 1, "utf-8", "backslashreplace", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, "utf-8", "backslashreplace", closefd=False)


def _write_stacks_on_signal(path: str) -> None:
    """The stack file's first line names the main thread, the one whose stack explains a hang. What follows is appended,
    wherever the file ends by then: its reader drops what it has read."""
    Path(path).write_text(f"main thread 0x{threading.main_thread().ident:016x}\n")
    file = open(path, "a")  # noqa: SIM115  # faulthandler keeps it for the life of the process
    faulthandler.register(STACK_SIGNAL, file=file, all_threads=True, chain=False)
    _stack_files.append(file)


_stack_files: list[object] = []
