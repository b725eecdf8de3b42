"""Builds the package's native parts into a wheel for this platform; without a C compiler the wheel is a pure one.

`PACEKEEPER_PURE=1` asks for the pure wheel where there is a compiler. An editable installation has them beside their
source. All works without them: what they would tell is unknown then.
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = Path("trainer/pacekeeper/native")
PARTS = {
    "nccl_profiler": "NCCL's transport will be unknown",
    "paths": "traffic will take the paths that it takes by itself",
}
"""What is there without each of them."""
OPTIONS = ("-std=c11", "-O2", "-shared", "-fPIC", "-fvisibility=hidden", "-pthread", "-Wl,-z,nodelete")
"""nodelete: NCCL unloads a plugin with its last communicator, while a proxy thread may still be inside of it."""


class NativeParts(BuildHookInterface[Any]):
    """Called by hatchling (pyproject.toml, `tool.hatch.build.targets.wheel.hooks.custom`)."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if not sys.platform.startswith("linux") or os.environ.get("PACEKEEPER_PURE", "0") not in ("", "0"):
            return
        for name, without in PARTS.items():
            source = Path(self.root) / FOLDER / f"{name}.c"
            library = source.with_suffix(".so")
            if self._compile(source, library, without) and version != "editable":
                build_data["force_include"][str(library)] = str(FOLDER.relative_to("trainer") / library.name)
                build_data["pure_python"] = False
                platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
                build_data["tag"] = f"py3-none-{platform}"  # no part of it is for one Python only

    def _compile(self, source: Path, library: Path, without: str) -> bool:
        """False, with a warning, where that does not work: it is no reason for an installation to fail."""
        compiler = shlex.split(os.environ.get("CC", "cc"))
        fresh = library.with_name(f".{os.getpid()}.so")  # running ranks may have mapped the one that is there
        try:
            subprocess.run([*compiler, *OPTIONS, "-o", str(fresh), str(source)], check=True, timeout=60)
            fresh.replace(library)
        except (OSError, subprocess.SubprocessError) as error:
            self.app.display_warning(f"{source.name} is left out, so that {without}: {error}")
            return False
        return True
