"""Launchers of many workers, forked from one process that has imported torch for all of them.

    python -m bench.scripts.traffic.launchers    # `Place`s as JSON on standard input; ends them when that is closed

Each is what `pacekeeper run` is in a pod, on a host of the fabric and without privileges. Start it with the shim
preloaded: it and the ranks have it then, as `pacekeeper run` gets it by starting itself again.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pacekeeper.launcher.command import launch_from_plan
from pacekeeper.launcher.launcher import Script
from pacekeeper.launcher.ranks.processes import adopt_orphans
from pacekeeper.launcher.settings import LauncherSettings
from pacekeeper.runtime_folder import RuntimeFolder
from pacekeeper_rank.forking.warm_server import import_modules
from testing.training.launchers import fork_process
from testing.training.ranks import PREIMPORTS

UNPRIVILEGED_USER_ID = 65534
ALL_REDUCE_BYTES = 1_000_000
"""Of an all-reduce."""
RANK_SCRIPT = Path(__file__).with_name("rank.py")
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_SET_DUMPABLE = 4  # PR_SET_DUMPABLE


@dataclass(frozen=True)
class Place:
    """Where a launcher is to run. `folder`: what its job's ranks share."""

    namespace: str
    address: str
    worker: str
    runtime: str
    folder: str
    log: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def main() -> None:
    os.environ.pop("LD_PRELOAD", None)  # what ranks start comes up without the shim
    adopt_orphans()
    places = [Place(**fields) for fields in json.loads(sys.stdin.readline())]
    import_modules(PREIMPORTS)
    pids = [_start_launcher(place) for place in places]
    sys.stdin.read()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)  # and with it its warm process, and the ranks
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()


def _start_launcher(place: Place) -> int:
    environment = {
        "PACEKEEPER_WORKER": place.worker,
        "PACEKEEPER_POD_IP": place.address,
        "PACEKEEPER_RUNTIME": place.runtime,
        "FOLDER": place.folder,
        "BYTES": str(ALL_REDUCE_BYTES),
        "HOME": place.folder,
        "OMP_NUM_THREADS": "1",
    }
    return fork_process(lambda: _run_launcher(place), Path(place.log), environment)


def _run_launcher(place: Place) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{place.namespace}") as namespace_file:
        _check_result(libc.setns(namespace_file.fileno(), _NEW_NETWORK))
    os.setgroups([])
    os.setgid(UNPRIVILEGED_USER_ID)
    os.setuid(UNPRIVILEGED_USER_ID)
    _check_result(libc.prctl(_SET_DUMPABLE, 1, 0, 0, 0))  # as after an exec: a launcher reads its ranks' state in /proc
    settings = LauncherSettings.from_environment(os.environ)
    return launch_from_plan(Script(str(RANK_SCRIPT), False, ()), settings, RuntimeFolder.from_environment().create())


def _check_result(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


if __name__ == "__main__":
    main()
