"""Whether ranks run with the shim that puts their sockets on the planned paths (native/paths.c).

It has to be there before libc's own `connect` is bound, so the launcher starts itself again with it. It does nothing
there, nor in the warm process: only a rank is told of paths (PACEKEEPER_PATHS). What else the launcher or a rank
starts comes up without it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import MutableMapping
from pathlib import Path

SHIM_PATH = Path(__file__).parent.parent / "native" / "paths.so"
"""Where the package's build puts it (hatch_build.py); a pure wheel has none."""
SHIM_SYMBOL = "pacekeeper_paths"
_PREVIOUS_PRELOAD_VARIABLE = "PACEKEEPER_PRELOAD_BEFORE"
"""LD_PRELOAD as it was."""


def preload_shim(environment: MutableMapping[str, str] = os.environ, shim: Path = SHIM_PATH) -> None:
    """Starts this process again, as what it is, with the shim; returns where it has it, or cannot have it.

    To be called before anything is open that a process keeps, and before torch is imported.
    """
    if _PREVIOUS_PRELOAD_VARIABLE in environment:
        before = environment.pop(_PREVIOUS_PRELOAD_VARIABLE)
        environment.pop("LD_PRELOAD", None)
        if before:
            environment["LD_PRELOAD"] = before
        return
    if explain_unusable_shim(shim):
        return
    before = environment.get("LD_PRELOAD", "")
    preloaded = {_PREVIOUS_PRELOAD_VARIABLE: before, "LD_PRELOAD": " ".join(filter(None, (str(shim), before)))}
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    with contextlib.suppress(OSError):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**environment, **preloaded})


def explain_missing_shim() -> str:
    """ "" where this process, and with it its forks, has the shim."""
    if hasattr(ctypes.CDLL(None), SHIM_SYMBOL):
        return ""
    return explain_unusable_shim(SHIM_PATH) or "this process was not started as `pacekeeper run`, or could not start again"


def explain_unusable_shim(shim: Path) -> str:
    """ "" where it can be preloaded. Another libc's or machine's would keep the process from starting."""
    if not shim.exists():
        return "this installation has no shim; a wheel that is built where there is a C compiler has one"
    if any(character.isspace() or character == ":" for character in str(shim)):
        return f"LD_PRELOAD takes no path with blanks or colons: {shim}"
    try:
        library = ctypes.CDLL(str(shim))
    except OSError as error:
        return f"the shim cannot be loaded: {error}"
    return "" if hasattr(library, SHIM_SYMBOL) else f"{shim} is no shim: it has no {SHIM_SYMBOL}"
