"""NCCL's profiler plugin, played by a stand-in for NCCL (nccl_driver.c), for machines without a GPU."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from pacekeeper.launcher.network.nccl_plugin import PROFILER_PLUGIN_PATH
from pacekeeper.observe.collectives.nccl_transport import TransportReader

PLUGIN_SOURCE = PROFILER_PLUGIN_PATH.with_suffix(".c")
DRIVER_SOURCE = Path(__file__).parents[1] / "nccl_driver.c"
OPTIONS = ("-std=c11", "-Wall", "-Wextra", "-Werror", "-pthread")


@dataclass(frozen=True)
class NcclDriver:
    """Both, compiled in a folder."""

    folder: Path

    @property
    def plugin(self) -> Path:
        return self.folder / "nccl_profiler.so"

    def run_scenario(
        self, version: int, scenario: str, *numbers: int, transport: Path | None = None
    ) -> TransportReader:
        """What the plugin has written of a scenario."""
        path = transport or self.folder / "0.transport"
        path.unlink(missing_ok=True)
        self.run(version, scenario, *numbers, transport=str(path))
        return TransportReader(path)

    def run(self, version: int, scenario: str, *numbers: int, transport: str, ring: str = "") -> str:
        """The driver's output. Raises AssertionError with its error if it fails."""
        command = [str(self.folder / "nccl_driver"), str(self.plugin), str(version), scenario, *map(str, numbers)]
        environment = {**os.environ, "PACEKEEPER_TRANSPORT": transport, "PACEKEEPER_RING": ring}
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert result.returncode == 0, f"{scenario} ends with {result.returncode}: {result.stderr[-4000:]}"
        return result.stdout


def build_driver(folder: Path, *sanitizer: str) -> NcclDriver:
    """Compiles plugin and driver, with a sanitizer where one is named: `-fsanitize=…`."""
    folder.mkdir(parents=True, exist_ok=True)
    compile_plugin(folder / "nccl_profiler.so", *sanitizer)
    _compile_source(DRIVER_SOURCE, folder / "nccl_driver", *sanitizer, "-ldl", "-rdynamic")
    return NcclDriver(folder)


def compile_plugin(library: Path, *options: str) -> None:
    _compile_source(PLUGIN_SOURCE, library, "-shared", "-fPIC", "-fvisibility=hidden", "-Wl,-z,nodelete", *options)


def _compile_source(source: Path, target: Path, *options: str) -> None:
    command = ["cc", *OPTIONS, "-O1", "-g", "-fno-sanitize-recover=all", "-o", str(target), str(source), *options]
    subprocess.run(command, check=True, timeout=60)
