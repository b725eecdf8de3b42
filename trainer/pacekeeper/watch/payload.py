"""Makes the payload: the folder from which a watched process loads the in-rank library.

boot/sitecustomize.py                    on PYTHONPATH
importlib_bootstrap/_pacekeeper_rank/    the package `pacekeeper_rank`, under a name that no image has
kubeflow_token                           no secret: transformers reports its progress only with some token
bin/environment_recorder                 in a pod: the program that runs in the image of the watched container

runtime/                                 in a worker's pod: the launcher with a Python of its own (`launcher_runtime`)
version                                  in a worker's pod: the version of Pacekeeper

`python -m pacekeeper.watch.payload TARGET` is the init container of a watched pod, and with `--launcher` of a worker's
pod. It may run again in the same pod, if the node restarts.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import pacekeeper.native
import pacekeeper_rank
from pacekeeper.local_folder import open_local_folder
from pacekeeper_analysis.errors import InputError
from pacekeeper_rank.watching.watch_folder import WatchFolder

from .launcher_runtime import build_launcher_runtime

PAYLOAD_PACKAGE = "_pacekeeper_rank"
PACKAGE_FOLDER = "importlib_bootstrap"
"""Python passes over files with these words in their path when it attributes a warning to a line of the script."""
BOOT_FOLDER = "boot"
RECORDER = Path(pacekeeper.native.__file__).with_name("environment_recorder.bin")
_LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.c", "*.pyi", BOOT_FOLDER)


@contextmanager
def open_local_payload() -> Iterator[Path]:
    """Yield a folder with a payload, which is removed afterwards. Raises OSError."""
    # Not in shared memory, from which some machines run no libraries.
    with open_local_folder("pacekeeper-payload-", in_memory=False) as folder:
        build_payload(folder)
        yield folder


def build_payload(target: Path) -> Path:
    """Copy the installed package into `target`, and return the folder for PYTHONPATH. Raises OSError.

    `target` is an empty folder, or has an earlier payload. The C extension is copied if there is one.
    """
    package = Path(pacekeeper_rank.__file__).parent
    shutil.copytree(package, target / PACKAGE_FOLDER / PAYLOAD_PACKAGE, ignore=_LEFT_OUT, dirs_exist_ok=True)
    boot = target / BOOT_FOLDER
    shutil.copytree(package / BOOT_FOLDER, boot, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    (target / "kubeflow_token").write_text("pacekeeper\n")
    return boot


def build_watched_environment(environment: Mapping[str, str], payload: Path) -> dict[str, str]:
    """Return the environment of a watched command: the boot folder comes before everything else on PYTHONPATH."""
    path = environment.get("PYTHONPATH")
    boot = str(payload / BOOT_FOLDER)
    return {**environment, "PYTHONPATH": boot if path is None else f"{boot}{os.pathsep}{path}"}


def main(arguments: list[str] | None = None) -> int:
    """Fill the volumes of a watched pod, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m pacekeeper.watch.payload", description=__doc__)
    parser.add_argument("target", type=Path, help="the volume of the payload")
    parser.add_argument("--launcher", action="store_true", help="include the launcher, for a worker of a TrainingJob")
    options = parser.parse_args(arguments)
    target: Path = options.target
    try:
        build_payload(target)
        if options.launcher:
            build_launcher_runtime(target / "runtime")
            (target / "version").write_text(f"{metadata.version('pacekeeper')}\n")
        recorder = target / "bin" / "environment_recorder"
        recorder.parent.mkdir(exist_ok=True)
        shutil.copyfile(RECORDER, recorder)
        recorder.chmod(0o755)
        folder = WatchFolder.from_environment()
        if folder is not None:
            folder.create()
    except (InputError, OSError) as error:
        print(f"the payload of the watch cannot be built: {error}", file=sys.stderr)
        if not RECORDER.exists():
            print("this image was built without a C compiler; build it from the Dockerfile's target", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
