"""Compiles the parts in C for both platforms by Zig: one locked compiler, whose libraries fit old versions of glibc."""

from __future__ import annotations

import sys
from pathlib import Path

import hatch_build
from release.commands import ReleaseError, run_command
from release.debian import PYTHON
from release.elf import ElfFile, read_elf

GLIBC = (2, 17)
"""The oldest glibc that a library runs with, as wheels of `manylinux_2_17` do."""
_COMPILE_SECONDS = 600
"""For the first one, Zig builds a C library."""
_LIBRARIES = (
    "libc.so.6",
    "libdl.so.2",
    "libpthread.so.0",
    "libm.so.6",
    "ld-linux-x86-64.so.2",
    "ld-linux-aarch64.so.1",
)
_EXPORTED = {
    "pacekeeper/native/nccl_profiler": {"ncclProfiler_v4", "ncclProfiler_v5", "ncclProfiler_v6"},
    "pacekeeper/native/paths": {"connect", "bind", "dlvsym", "pacekeeper_paths"},
    "pacekeeper_rank/native/recording": {"PyInit_recording"},
}
"""What each library must export, at least."""


def build_parts(source: Path, target: Path, machine: str, headers: Path, cache: Path) -> None:
    """Compile each part of `hatch_build.PARTS` for a machine into `target`. `headers`: Python's, of that machine.

    Raises ReleaseError if the result does not run on each image that a wheel is for.
    """
    variables = {"ZIG_GLOBAL_CACHE_DIR": str(cache.resolve()), "ZIG_LOCAL_CACHE_DIR": str(cache.resolve())}
    for name in hatch_build.PARTS:
        is_program = name in hatch_build.EXECUTABLES
        file = hatch_build.find_target(name, target.resolve() / f"{name}.c")
        file.parent.mkdir(parents=True, exist_ok=True)
        libc = "musl" if is_program else f"gnu.{GLIBC[0]}.{GLIBC[1]}"
        options = [*(hatch_build.EXECUTABLE_OPTIONS if is_program else (*hatch_build.OPTIONS, "-s"))]
        if name in hatch_build.FOR_PYTHON:
            include = headers.resolve() / "usr/include"
            options += ["-isystem", f"{include}/python{PYTHON}", "-isystem", str(include)]
        run_command(
            *(sys.executable, "-m", "ziglang", "cc", "-target", f"{machine}-linux-{libc}", *options),
            *("-o", file, f"{hatch_build.FOLDER}/{name}.c"),
            folder=source, variables=variables, timeout_seconds=_COMPILE_SECONDS,
        )  # fmt: skip
        if problem := find_problem(name, read_elf(file.read_bytes()), machine):
            raise ReleaseError(f"{name} for {machine}: {problem}")


def find_problem(name: str, built: ElfFile, machine: str) -> str:
    """Return why a part cannot be released. Empty: it can."""
    if built.machine != machine:
        return f"it is for {built.machine}"
    if name in hatch_build.EXECUTABLES:
        return "" if built.is_static else f"it needs {', '.join(built.needed)}, which an image may not have"
    if unknown := sorted(set(built.needed) - set(_LIBRARIES)):
        return f"it needs {', '.join(unknown)}"
    if newer := sorted(version for version in built.versions if _is_newer_glibc(version)):
        return f"it needs {', '.join(newer)}, and wheels promise {GLIBC[0]}.{GLIBC[1]}"
    if missing := sorted(_EXPORTED[name] - built.exported):
        return f"it does not export {', '.join(missing)}"
    return ""


def _is_newer_glibc(version: str) -> bool:
    library, _, number = version.partition("_")
    if library != "GLIBC" or not number[:1].isdigit():
        return True
    return tuple(int(part) for part in number.split("."))[:2] > GLIBC
