"""Control groups, version 1 (one tree per controller) or 2 (one tree). A `path` is relative: `pacekeeper/node-1`.

Everything that the cluster starts lives below `pacekeeper` (`pacekeeper-NAME` for a named one). The kernel thus
remembers for us what is ours: no process is missed when we were killed before we could write its id down, and no
stranger is taken for ours when ids are reused.
"""

from __future__ import annotations

import os
import signal
import time
from functools import cache
from pathlib import Path

from testcluster.settings import CGROUP
from testcluster.shell import ClusterError

CLUSTER_CGROUP = CGROUP
_ROOT = Path("/sys/fs/cgroup")


@cache
def is_v2() -> bool:
    return (_ROOT / "cgroup.controllers").exists()


@cache
def _list_trees() -> tuple[Path, ...]:
    """The root folder of every tree; with version 1 also that of the version 2 tree without controllers beside them."""
    if is_v2():
        return (_ROOT,)
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    return tuple(dict.fromkeys(Path(mount[1]) for mount in mounts if mount[2] in ("cgroup", "cgroup2")))


def get_controller_folder(name: str, path: str) -> Path:
    """The folder of cgroup `path` in the tree of controller `name`."""
    return _ROOT / path if is_v2() else _ROOT / name / path


def create_cgroup(path: str) -> None:
    """Make cgroup `path` and its parents in every tree, able to hold processes."""
    for tree in _list_trees():
        folder = tree
        for part in Path(path).parts:
            if is_v2():
                _enable_controllers(folder)
            folder = folder / part
            folder.mkdir(exist_ok=True)
            for name in ("cpuset.cpus", "cpuset.mems"):  # empty in a new version 1 cpuset, which then takes no process
                if not is_v2() and (file := folder / name).exists() and not file.read_text().strip():
                    file.write_text((folder.parent / name).read_text())


def set_cpu_weight(path: str, times: int) -> None:
    """Where processors are short, give cgroup `path` as much as so many processes outside all cgroups get."""
    file, usual = ("cpu.weight", 100) if is_v2() else ("cpu.shares", 1024)
    (get_controller_folder("cpu", path) / file).write_text(str(usual * times))


def _enable_controllers(folder: Path) -> None:
    available = (folder / "cgroup.controllers").read_text().split()
    (folder / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in available))


def build_launch_command(path: str, command: tuple[str, ...]) -> tuple[str, ...]:
    """Return the command that enters cgroup `path`, starts `command` there in the background, and exits.

    With version 1 it enters the tree that counts processor time, too, and none that would limit it.
    """
    folders = dict.fromkeys(str(get_controller_folder(name, path)) for name in ("pids", "cpuacct"))
    script = 'until [ "$1" = -- ]; do echo $$ > "$1"/cgroup.procs || exit; shift; done; shift; "$@" &'
    return ("sh", "-c", script, "sh", *folders, "--", *command)


def list_pids(path: str, recursive: bool = False) -> list[int]:
    """The processes in cgroup `path`; empty if there is no such cgroup."""
    top = get_controller_folder("pids", path)
    folders = [Path(folder) for folder, _, _ in os.walk(top)] if recursive else [top]
    found: list[int] = []
    for folder in folders:
        try:
            found += [int(line) for line in (folder / "cgroup.procs").read_text().split()]
        except OSError:  # there is no such cgroup, or none any more
            continue
    return found


def read_cpu_seconds(path: str) -> float:
    """What the processes of cgroup `path`, and below, have used so far."""
    if is_v2():
        statistics = (get_controller_folder("cpu", path) / "cpu.stat").read_text().split()
        return int(statistics[statistics.index("usage_usec") + 1]) * 1e-6
    return int((get_controller_folder("cpuacct", path) / "cpuacct.usage").read_text()) * 1e-9


def read_memory_bytes(path: str) -> int:
    """The anonymous memory of cgroup `path` and below; file pages are the machine's to take back."""
    return _read_memory(path, "anon" if is_v2() else "total_rss")


def read_shared_bytes(path: str) -> int:
    """The same of memory that processes share, as files in /dev/shm."""
    return _read_memory(path, "shmem" if is_v2() else "total_shmem")


def _read_memory(path: str, kind: str) -> int:
    lines = get_controller_folder("memory", path).joinpath("memory.stat").read_text().splitlines()
    return int(dict(line.split() for line in lines)[kind])


def kill_cgroup(path: str, timeout: float = 20) -> None:
    """Kill every process in cgroup `path` and below, and wait until all are gone."""
    deadline = time.monotonic() + timeout
    while remaining := list_pids(path, recursive=True):
        if time.monotonic() > deadline:
            raise ClusterError(
                f"processes {remaining} in cgroup {path} do not die; a restart of the machine frees them"
            )
        for pid in remaining:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.02)


def remove_cgroup(path: str) -> None:
    """Remove cgroup `path` and all below it; no process may be left in them."""
    for tree in _list_trees():
        for folder, _, _ in os.walk(tree / path, topdown=False):
            os.rmdir(folder)
