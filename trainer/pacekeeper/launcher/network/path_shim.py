"""Whether ranks run with the shim that puts their sockets on the planned paths (native/paths.c).

It must be loaded before libc's own `connect` is bound. So the launcher executes itself again with the shim preloaded.
The shim is inactive in the launcher and in the warm process: only a rank has paths (PACEKEEPER_PATHS). Other processes
that the launcher or a rank starts do not load it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import MutableMapping
from pathlib import Path

SHIM_PATH = Path(__file__).parents[2] / "native" / "paths.so"
"""Where the package's build installs it (hatch_build.py). A pure wheel has none."""
SHIM_SYMBOL = "pacekeeper_paths"
_PREVIOUS_PRELOAD_VARIABLE = "PACEKEEPER_PREVIOUS_PRELOAD"
"""Holds the original LD_PRELOAD."""


def preload_shim(environment: MutableMapping[str, str] = os.environ, shim: Path = SHIM_PATH) -> None:
    """Execute this process again with the shim preloaded. Return if it has the shim, or cannot have it.

    Call it before the process opens anything that it keeps, and before torch is imported.
    """
    if _PREVIOUS_PRELOAD_VARIABLE in environment:
        previous = environment.pop(_PREVIOUS_PRELOAD_VARIABLE)
        environment.pop("LD_PRELOAD", None)
        if previous:
            environment["LD_PRELOAD"] = previous
        return
    if explain_unusable_shim(shim):
        return
    previous = environment.get("LD_PRELOAD", "")
    preloaded = {_PREVIOUS_PRELOAD_VARIABLE: previous, "LD_PRELOAD": " ".join(filter(None, (str(shim), previous)))}
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    with contextlib.suppress(OSError):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**environment, **preloaded})


def explain_missing_shim() -> str:
    """Return why this process, and its forks, have no shim; "": they have it."""
    if hasattr(ctypes.CDLL(None), SHIM_SYMBOL):
        return ""
    return (
        explain_unusable_shim(SHIM_PATH) or "this process was not started as `pacekeeper run`, or could not start again"
    )


def explain_unusable_shim(shim: Path) -> str:
    """Return why the shim cannot be preloaded; "": it can.

    A shim for another libc or machine would prevent the start.
    """
    if not shim.exists():
        return "this installation has no shim; a wheel that is built with a C compiler has one"
    if any(character.isspace() or character == ":" for character in str(shim)):
        return f"LD_PRELOAD takes no path with blanks or colons: {shim}"
    try:
        library = ctypes.CDLL(str(shim))
    except OSError as error:
        return f"the shim cannot be loaded: {error}"
    return "" if hasattr(library, SHIM_SYMBOL) else f"{shim} is no shim: it has no {SHIM_SYMBOL}"
