"""Control groups, version 1 (one tree per controller) or 2 (one tree). A `path` is relative: `pacekeeper/node-1`.

Everything that the cluster starts is below `pacekeeper` (`pacekeeper-NAME` for a named one). So the kernel records
which processes belong to the cluster. None is missed if `up` is killed before it can write down a process ID. No other
process is taken for one of the cluster if IDs are reused.
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
    """Return the root folder of every tree. With version 1, include the version 2 tree without controllers."""
    if is_v2():
        return (_ROOT,)
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    return tuple(dict.fromkeys(Path(mount[1]) for mount in mounts if mount[2] in ("cgroup", "cgroup2")))


def get_controller_folder(name: str, path: str) -> Path:
    """Return the folder of cgroup `path` in the tree of controller `name`."""
    return _ROOT / path if is_v2() else _ROOT / name / path


def create_cgroup(path: str) -> None:
    """Create cgroup `path` and its parents in every tree, able to hold processes."""
    for tree in _list_trees():
        folder = tree
        for part in Path(path).parts:
            if is_v2():
                _enable_controllers(folder)
            folder = folder / part
            folder.mkdir(exist_ok=True)
            for name in ("cpuset.cpus", "cpuset.mems"):  # a new version 1 cpuset is empty, and accepts no process
                if not is_v2() and (file := folder / name).exists() and not file.read_text().strip():
                    file.write_text((folder.parent / name).read_text())


def set_cpu_weight(path: str, processes: int) -> None:
    """Give cgroup `path` the CPU weight of `processes` processes outside of all cgroups."""
    file, default_weight = ("cpu.weight", 100) if is_v2() else ("cpu.shares", 1024)
    (get_controller_folder("cpu", path) / file).write_text(str(default_weight * processes))


def _enable_controllers(folder: Path) -> None:
    available = (folder / "cgroup.controllers").read_text().split()
    (folder / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in available))


def build_launch_command(path: str, command: tuple[str, ...]) -> tuple[str, ...]:
    """Return the command that enters cgroup `path`, starts `command` there in the background, and exits.

    With version 1, it also enters the tree that counts CPU time, and none that would limit it.
    """
    folders = dict.fromkeys(str(get_controller_folder(name, path)) for name in ("pids", "cpuacct"))
    script = 'until [ "$1" = -- ]; do echo $$ > "$1"/cgroup.procs || exit; shift; done; shift; "$@" &'
    return ("sh", "-c", script, "sh", *folders, "--", *command)


def list_pids(path: str, recursive: bool = False) -> list[int]:
    """Return the processes in cgroup `path`; empty if it does not exist."""
    top = get_controller_folder("pids", path)
    folders = [Path(folder) for folder, _, _ in os.walk(top)] if recursive else [top]
    pids: list[int] = []
    for folder in folders:
        try:
            pids += [int(line) for line in (folder / "cgroup.procs").read_text().split()]
        except OSError:  # the cgroup does not exist, or was removed in the meantime
            continue
    return pids


def read_cpu_seconds(path: str) -> float:
    """Return the CPU time that the processes of cgroup `path`, and below, have used so far."""
    if is_v2():
        statistics = (get_controller_folder("cpu", path) / "cpu.stat").read_text().split()
        return int(statistics[statistics.index("usage_usec") + 1]) * 1e-6
    return int((get_controller_folder("cpuacct", path) / "cpuacct.usage").read_text()) * 1e-9


def read_memory_bytes(path: str) -> int:
    """Return the anonymous memory of cgroup `path`, and below. File pages can be reclaimed by the machine."""
    return _read_memory(path, "anon" if is_v2() else "total_rss")


def read_shared_bytes(path: str) -> int:
    """Return the memory that processes share, such as files in /dev/shm, of cgroup `path` and below."""
    return _read_memory(path, "shmem" if is_v2() else "total_shmem")


def _read_memory(path: str, kind: str) -> int:
    lines = get_controller_folder("memory", path).joinpath("memory.stat").read_text().splitlines()
    return int(dict(line.split() for line in lines)[kind])


def kill_cgroup(path: str, timeout: float = 20) -> None:
    """Kill every process in cgroup `path` and below, and wait until all have exited. Raises ClusterError."""
    deadline = time.monotonic() + timeout
    while remaining := list_pids(path, recursive=True):
        if time.monotonic() > deadline:
            raise ClusterError(
                f"processes {remaining} in cgroup {path} cannot be killed; restart the machine to remove them"
            )
        for pid in remaining:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.02)


def remove_cgroup(path: str) -> None:
    """Remove cgroup `path` and all below it. No process may be left in them."""
    for tree in _list_trees():
        for folder, _, _ in os.walk(tree / path, topdown=False):
            os.rmdir(folder)
