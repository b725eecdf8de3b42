"""Whether ranks run with NCCL's profiler plugin, which records their transfers, and the variables that it needs.

The plugin is optional: without it, transfers are unknown, and nothing else changes.
"""

from __future__ import annotations

import ctypes
import logging
import signal
from collections.abc import Collection, Mapping
from pathlib import Path

PROFILER_PLUGIN_PATH = Path(__file__).parents[2] / "native" / "nccl_profiler.so"
"""Where the package's build installs it (hatch_build.py). A pure wheel has none."""
PROFILER_PLUGIN_SYMBOLS = ("ncclProfiler_v6", "ncclProfiler_v5", "ncclProfiler_v4")
"""Versions of the interface: of NCCL 2.29, 2.28, 2.27. Newer versions accept an older one."""
MAX_PLUGIN_PATH_CHARACTERS = 254
"""NCCL truncates longer paths."""
NATIVE_CRASH_EXIT_CODES = frozenset({-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGILL})

log = logging.getLogger(__name__)


def build_plugin_environment(environment: Mapping[str, str], plugin: Path | None, transport: Path) -> dict[str, str]:
    """Return the variables that a rank needs for the plugin in addition to `environment`; {}: it is not used.

    NCCL loads one profiler per process. A user who has set another one keeps it; "none" means no profiler. `plugin`:
    None: there is none to use. `transport`: file for the rank's transfers.
    """
    if plugin is None or "NCCL_PROFILER_PLUGIN" in environment:
        return {}
    return {"NCCL_PROFILER_PLUGIN": str(plugin), "PACEKEEPER_TRANSPORT": str(transport)}


def choose_next_plugin(plugin: Path | None, exit_codes: Collection[int | None]) -> Path | None:
    """Return the plugin for the next round; None after a crash in native code, which may be the plugin's."""
    if plugin is not None and has_native_crash(exit_codes):
        log.warning("a rank crashed in native code: from now on the ranks run without NCCL's profiler plugin")
        return None
    return plugin


def has_native_crash(exit_codes: Collection[int | None]) -> bool:
    """Return whether a rank crashed in native code."""
    return not NATIVE_CRASH_EXIT_CODES.isdisjoint(exit_codes)


def has_gpus(devices: Path = Path("/dev")) -> bool:
    """Return whether this container has an NVIDIA GPU: the driver creates a device file for each."""
    return any(devices.glob("nvidia[0-9]*"))


def find_usable_plugin(path: Path = PROFILER_PLUGIN_PATH) -> Path | None:
    """Return the plugin if NCCL can use it. Otherwise, log why transfers are unknown."""
    reason = explain_unusable_plugin(path)
    if reason:
        log.info("NCCL's transport is unknown: %s", reason)
        return None
    return path


def explain_unusable_plugin(path: Path) -> str:
    """Return why NCCL cannot load the plugin; "": it can."""
    if not path.exists():
        return "this installation has no profiler plugin; a wheel that is built with a C compiler has one"
    if len(str(path)) > MAX_PLUGIN_PATH_CHARACTERS:
        return f"NCCL takes no path of more than {MAX_PLUGIN_PATH_CHARACTERS} characters: {path}"
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return f"the profiler plugin cannot be loaded: {error}"
    if not any(hasattr(library, symbol) for symbol in PROFILER_PLUGIN_SYMBOLS):
        return f"{path} is not a profiler plugin: it has none of {', '.join(PROFILER_PLUGIN_SYMBOLS)}"
    return ""
