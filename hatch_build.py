"""Builds the package's native parts into a wheel for this platform; without a C compiler the wheel is a pure one.

`PACEKEEPER_PURE=1` asks for the pure wheel where there is a compiler. An editable installation has them beside their
source; `make native` builds them there anew. All works without them: see PARTS.

`PACEKEEPER_NATIVE` names a folder with parts that have been built already, for the platform `PACEKEEPER_PLATFORM` of a
wheel's name: `make release` compiles for other machines, too.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = Path("trainer")
PARTS = {
    "pacekeeper/native/environment_recorder": "this package cannot be the image of the watch",
    "pacekeeper/native/nccl_profiler": "NCCL's transport will be unknown",
    "pacekeeper/native/paths": "traffic will take the paths that it takes by itself",
    "pacekeeper_rank/native/recording": "recording will cost a rank twice as much",
}
"""What is there without each of them."""
ABI = "cp311-abi3"
FOR_PYTHON = {"pacekeeper_rank/native/recording": ABI}
"""Those that Python loads, which need its headers; and the Pythons that they are for, as in a wheel's name."""
EXECUTABLES = ("pacekeeper/native/environment_recorder",)
"""Those that are programs, which run in images of others: they contain all that they need."""
EXECUTABLE_OPTIONS = ("-std=c11", "-O2", "-static", "-s")
OPTIONS = ("-std=c11", "-O2", "-shared", "-fPIC", "-fvisibility=hidden", "-pthread", "-Wl,-z,nodelete")
"""nodelete: NCCL unloads a plugin with its last communicator, while a proxy thread may still be inside of it."""


class NativeParts(BuildHookInterface[Any]):
    """Called by hatchling (pyproject.toml, `tool.hatch.build.targets.wheel.hooks.custom`)."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if not sys.platform.startswith("linux") or os.environ.get("PACEKEEPER_PURE", "0") not in ("", "0"):
            return
        if built := os.environ.get("PACEKEEPER_NATIVE"):
            self._take_built(Path(built), os.environ["PACEKEEPER_PLATFORM"], build_data)
            return
        tag = "py3-none"  # no other part is for one Python only
        for name in PARTS:
            source = Path(self.root) / FOLDER / f"{name}.c"
            library = find_target(name, source)
            if self._compile(name, source, library) and version != "editable":
                tag = FOR_PYTHON.get(name, tag)
                build_data["force_include"][str(library)] = f"{name}{library.suffix}"
                build_data["pure_python"] = False
                platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
                build_data["tag"] = f"{tag}-{platform}"

    def _take_built(self, folder: Path, platform: str, build_data: dict[str, Any]) -> None:
        """Raises FileNotFoundError if a part is missing: this is no installation, which works without it."""
        for name in PARTS:
            library = find_target(name, folder / f"{name}.c")
            if not library.exists():
                raise FileNotFoundError(library)
            build_data["force_include"][str(library)] = f"{name}{library.suffix}"
        build_data["pure_python"] = False
        build_data["tag"] = f"{ABI}-{platform}"

    def _compile(self, name: str, source: Path, library: Path) -> bool:
        """False, with a warning, where that does not work: it is no reason for an installation to fail."""
        try:
            build(name, source, library)
        except (OSError, subprocess.SubprocessError) as error:
            self.app.display_warning(f"{source.name} is left out, so that {PARTS[name]}: {error}")
            return False
        return True


def find_target(name: str, source: Path) -> Path:
    """The file into which a part is built, next to its source."""
    return source.with_suffix(".bin" if name in EXECUTABLES else ".so")


def build(name: str, source: Path, library: Path) -> None:
    """Raises OSError or SubprocessError where there is no compiler, or where it fails."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    headers = [f"-I{sysconfig.get_path('include')}"] if name in FOR_PYTHON else []
    fresh = library.with_name(f".{os.getpid()}.so")  # running ranks may have mapped the one that is there
    options = EXECUTABLE_OPTIONS if name in EXECUTABLES else OPTIONS
    subprocess.run([*compiler, *options, *headers, "-o", str(fresh), str(source)], check=True, timeout=60)
    fresh.replace(library)


if __name__ == "__main__":
    for part in PARTS:
        source_file = FOLDER / f"{part}.c"
        build(part, source_file, find_target(part, source_file))
