"""A rank that is any program (torchrun's --no-python): the forked rank becomes it."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Sequence
from typing import NoReturn

from pacekeeper_analysis.errors import InputError

_NOT_EXECUTABLE, _NOT_FOUND = 126, 127
"""Exit codes, as a shell has them."""


def check_program(name: str) -> None:
    """Raise InputError where there is no such program, before any rank tries."""
    if shutil.which(name) is None:
        raise InputError(
            f"--no-python: {name} is no executable file here and not in PATH; give the program's path, or chmod +x"
        )


def become_program(name: str, arguments: Sequence[str], stack_signal: int) -> NoReturn:
    """Replace this process by the program, which keeps its process id, group, environment, and output.

    stack_signal: which the launcher sends to learn a rank's Python stack; it would end a program that knows nothing of
    it.
    """
    signal.signal(stack_signal, signal.SIG_IGN)
    for signum in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and a program would inherit that
        signal.signal(signum, signal.SIG_DFL)
    try:
        os.execvp(name, [name, *arguments])
    except OSError as error:
        os.write(2, f"pacekeeper run: {name} cannot be run: {error.strerror}\n".encode())
        os._exit(_NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE)
