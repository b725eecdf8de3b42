"""Builds the wheels: a pure one, and one with the parts in C for each platform."""

from __future__ import annotations

import re
import sys
import zipfile
from pathlib import Path

import hatch_build
from release.commands import ReleaseError, run_command
from release.native import GLIBC

_BUILD_SECONDS = 300


def build_wheel(source: Path, target: Path, seconds: int, *, native: Path | None, machine: str = "") -> Path:
    """Build a wheel from exported sources into the folder `target`, and return it.

    native: folder with the compiled parts for `machine`. None: the pure wheel.
    """
    variables = {"SOURCE_DATE_EPOCH": str(seconds)}
    if native is None:
        tag, variables["PACEKEEPER_PURE"] = "py3-none-any", "1"
    else:
        platform = f"manylinux_{GLIBC[0]}_{GLIBC[1]}_{machine}"
        tag = f"{hatch_build.ABI}-{platform}"
        variables |= {"PACEKEEPER_NATIVE": str(native.resolve()), "PACEKEEPER_PLATFORM": platform}
    command = (sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", target.resolve())
    run_command(*command, folder=source, variables=variables, timeout_seconds=_BUILD_SECONDS)
    (wheel,) = target.glob(f"pacekeeper-*-{tag}.whl")
    if problem := find_problem(wheel, has_parts=native is not None):
        raise ReleaseError(f"{wheel.name}: {problem}")
    return wheel


def find_problem(wheel: Path, *, has_parts: bool) -> str:
    """Return why a wheel cannot be released. Empty: it can."""
    tag = "-".join(wheel.stem.split("-")[-3:])
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (about,) = (name for name in names if name.endswith(".dist-info/WHEEL"))
        tags = re.findall(r"^Tag: (\S+)$", archive.read(about).decode(), re.MULTILINE)
    parts = {hatch_build.find_target(name, Path(f"{name}.c")).as_posix() for name in hatch_build.PARTS}
    built = {name for name in names if name.endswith((".so", ".bin"))}
    if built != (parts if has_parts else set()):
        return f"its compiled parts are {', '.join(sorted(built)) or 'none'}"
    if tags != [tag]:
        return f"it names {', '.join(tags)} inside"
    if foreign := sorted(name for name in names if name.split("/")[0] in ("tests", "testing", "release")):
        return f"it has {foreign[0]}, which is no part of the product"
    return ""
