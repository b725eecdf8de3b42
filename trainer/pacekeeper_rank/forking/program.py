"""A rank that is any program (torchrun's --no-python): the forked process executes it."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import NoReturn

_NOT_EXECUTABLE, _NOT_FOUND = 126, 127
"""Exit codes, as in a shell."""


def become_program(name: str, arguments: Sequence[str], stack_signal: int) -> NoReturn:
    """Replace this process by the program. Process ID, group, environment, and output stay.

    `stack_signal`: the signal by which the launcher requests Python stacks. It is ignored, because it would kill a
    program without a handler.
    """
    signal.signal(stack_signal, signal.SIG_IGN)
    for signum in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and the program would inherit that
        signal.signal(signum, signal.SIG_DFL)
    try:
        os.execvp(name, [name, *arguments])
    except OSError as error:
        os.write(2, f"pacekeeper run: {name} cannot be run: {error.strerror}\n".encode())
        os._exit(_NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE)
