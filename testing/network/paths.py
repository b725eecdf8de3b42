"""The shim that puts ranks' sockets on planned paths, compiled for a test and preloaded into a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pacekeeper.launcher.network.path_shim import SHIM_PATH

SHIM_SOURCE = SHIM_PATH.with_suffix(".c")
OPTIONS = ("-std=c11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-fvisibility=hidden")
RENAME_DLVSYM = "-Ddlvsym=shims_dlvsym"
"""The sanitizer calls dlvsym before it can bear what it has sanitized, so there the shim's own has another name."""
SANITIZER = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", RENAME_DLVSYM)


@dataclass(frozen=True)
class PathShim:
    """`libraries`: to be preloaded, in this order; the shim is the last."""

    libraries: tuple[str, ...]

    @property
    def is_sanitized(self) -> bool:
        return len(self.libraries) > 1

    def build_environment(self, entries: Path | None) -> dict[str, str]:
        """Of a process that has it. entries: its file; None: it gets no file."""
        paths = {} if entries is None else {"PACEKEEPER_PATHS": str(entries)}
        # Python itself leaks; the test checks only the shim.
        return {"LD_PRELOAD": " ".join(self.libraries), "ASAN_OPTIONS": "detect_leaks=0", **paths}


def build_shim(folder: Path, *, sanitized: bool = False) -> PathShim:
    library = folder / "paths.so"
    subprocess.run(
        ["cc", *OPTIONS, *(SANITIZER if sanitized else ()), "-o", library, SHIM_SOURCE], check=True, timeout=60
    )
    return PathShim((*(_find_sanitizer_runtimes() if sanitized else ()), str(library)))


def _find_sanitizer_runtimes() -> Sequence[str]:
    """A sanitized library in a program that is not needs these before it."""
    commands = (["cc", f"-print-file-name=lib{name}.so"] for name in ("asan", "ubsan"))
    return [subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() for command in commands]


def build_python_command(program: str) -> list[str]:
    """A command that runs it."""
    return [sys.executable, "-c", program]
