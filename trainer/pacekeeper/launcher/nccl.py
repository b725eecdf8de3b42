"""Whether ranks run with NCCL's profiler plugin, which tells of their transfers, and what they need for it.

It is no precondition of anything: without it the transport is unknown, and all else is as it is.
"""

from __future__ import annotations

import ctypes
import logging
import signal
from collections.abc import Collection, Mapping
from pathlib import Path

PROFILER_PLUGIN_PATH = Path(__file__).parent.parent / "native" / "nccl_profiler.so"
"""Where the package's build puts it (hatch_build.py); a pure wheel has none."""
PROFILER_PLUGIN_SYMBOLS = ("ncclProfiler_v6", "ncclProfiler_v5", "ncclProfiler_v4")
"""Versions of the interface: of NCCL 2.29, 2.28, 2.27, and what is newer takes an older one."""
MAX_PLUGIN_PATH_CHARACTERS = 254
"""NCCL cuts longer ones off."""
NATIVE_CRASH_EXIT_CODES = frozenset({-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGILL})

log = logging.getLogger(__name__)


def build_plugin_environment(given: Mapping[str, str], plugin: Path | None, transport: Path) -> dict[str, str]:
    """What a rank's environment needs for the plugin beside the `given` one; nothing where it is not to run.

    NCCL loads one profiler a process: whoever has set another one keeps it, and "none" has none.

    plugin: None: there is none to be used. transport: file for the rank's transfers.
    """
    if plugin is None or "NCCL_PROFILER_PLUGIN" in given:
        return {}
    return {"NCCL_PROFILER_PLUGIN": str(plugin), "PACEKEEPER_TRANSPORT": str(transport)}


def choose_next_plugin(plugin: Path | None, exit_codes: Collection[int | None]) -> Path | None:
    """The plugin for the next round: none, where a rank of this one ended as processes do whose native code is broken.

    That is taken for the fault of what is not the user's own.
    """
    if plugin is not None and has_native_crash(exit_codes):
        log.warning("a rank ended by a fault of native code: from now on the ranks run without NCCL's profiler plugin")
        return None
    return plugin


def has_native_crash(exit_codes: Collection[int | None]) -> bool:
    """Whether a rank ended as processes do whose native code is broken."""
    return not NATIVE_CRASH_EXIT_CODES.isdisjoint(exit_codes)


def has_gpus(devices: Path = Path("/dev")) -> bool:
    """Whether this container has an NVIDIA GPU: the driver makes a device for each."""
    return any(devices.glob("nvidia[0-9]*"))


def find_usable_plugin(path: Path = PROFILER_PLUGIN_PATH) -> Path | None:
    """The plugin, if NCCL will be able to use it; else the log says why the transport is unknown."""
    reason = explain_unusable_plugin(path)
    if reason:
        log.info("NCCL's transport is unknown: %s", reason)
        return None
    return path


def explain_unusable_plugin(path: Path) -> str:
    """ "" where NCCL can load it."""
    if not path.exists():
        return "this installation has no profiler plugin; a wheel that is built where there is a C compiler has one"
    if len(str(path)) > MAX_PLUGIN_PATH_CHARACTERS:
        return f"NCCL takes no path of more than {MAX_PLUGIN_PATH_CHARACTERS} characters: {path}"
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return f"the profiler plugin cannot be loaded: {error}"
    if not any(hasattr(library, symbol) for symbol in PROFILER_PLUGIN_SYMBOLS):
        return f"{path} is no profiler plugin: it has none of {', '.join(PROFILER_PLUGIN_SYMBOLS)}"
    return ""
