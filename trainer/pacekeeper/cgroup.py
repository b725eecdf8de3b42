"""Statistics and limits of the process's own control group, in cgroup versions 1 and 2."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")


def count_oom_kills(root: Path = CGROUP_ROOT, membership: Path = Path("/proc/self/cgroup")) -> int:
    """Return the number of processes of this control group that the OOM killer has ended; 0 if that is unreadable."""
    for folder in _list_cgroup_folders(root, membership, "memory"):
        for name in ("memory.events", "memory.oom_control"):
            try:
                lines = (folder / name).read_text().splitlines()
            except OSError:
                continue
            for line in lines:
                key, _, value = line.partition(" ")
                if key == "oom_kill":
                    return int(value)
    return 0


def compute_memory_left(root: Path = CGROUP_ROOT, membership: Path = Path("/proc/self/cgroup")) -> float:
    """Return the bytes that this control group may still use, by the tightest limit up to `root`; infinity: no limit.

    The page cache does not count as used: the kernel reclaims it before it kills a process. Shared memory counts.
    """
    remaining = math.inf
    for folder in _list_cgroup_folders(root, membership, "memory"):
        while folder.is_relative_to(root):
            remaining = min(remaining, _read_memory_left(folder))
            if folder == root:
                break
            folder = folder.parent
    return remaining


def _read_memory_left(folder: Path) -> float:
    for limit_file, usage_file, prefix in (
        ("memory.max", "memory.current", ""),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        try:
            limit = (folder / limit_file).read_text().strip()
            if limit == "max":
                return math.inf
            statistics = dict(line.split(" ", 1) for line in (folder / "memory.stat").read_text().splitlines())
            cached = sum(int(statistics.get(f"{prefix}{state}_file", 0)) for state in ("active", "inactive"))
            in_use = int((folder / usage_file).read_text()) - cached
        except (OSError, ValueError):
            continue
        return max(0, int(limit) - max(0, in_use))
    return math.inf


def read_cpu_limit(root: Path = CGROUP_ROOT, membership: Path = Path("/proc/self/cgroup")) -> float:
    """Return the number of processors that this control group may use at once; infinity: no limit."""
    for folder in _list_cgroup_folders(root, membership, "cpu"):
        try:
            quota, period = (folder / "cpu.max").read_text().split()
        except OSError:
            try:
                quota = (folder / "cpu.cfs_quota_us").read_text().strip()
                period = (folder / "cpu.cfs_period_us").read_text().strip()
            except OSError:
                continue
        return math.inf if quota in {"max", "-1"} else int(quota) / int(period)
    return math.inf


def read_throttling(root: Path = CGROUP_ROOT, membership: Path = Path("/proc/self/cgroup")) -> tuple[int, int]:
    """Return the periods of the processor quota so far, and the number of them that were throttled.

    It is (0, 0) without a quota, or if the statistics are unreadable.
    """
    for folder in _list_cgroup_folders(root, membership, "cpu"):
        try:
            lines = (folder / "cpu.stat").read_text().splitlines()
        except OSError:
            continue
        statistics = dict(line.split(" ", 1) for line in lines if " " in line)
        if "nr_periods" in statistics:
            return int(statistics["nr_periods"]), int(statistics.get("nr_throttled", 0))
    return 0, 0


def read_cpu_wait_seconds(
    root: Path = CGROUP_ROOT, membership: Path = Path("/proc/self/cgroup"), machine: Path = Path("/proc/pressure/cpu")
) -> float | None:
    """Return the seconds so far in which a thread of this control group was ready to run and had no processor.

    Without statistics of the control group, those of the whole machine are used. None: the kernel does not count them.
    """
    for path in [folder / "cpu.pressure" for folder in _list_cgroup_folders(root, membership, "cpu")] + [machine]:
        try:
            lines = path.read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            kind, *statistics = line.split()
            if kind == "some":
                return int(dict(statistic.split("=", 1) for statistic in statistics)["total"]) * 1e-6
    return None


def _list_cgroup_folders(root: Path, membership: Path, controller: str) -> Iterator[Path]:
    """Yield the folders where this process's group of the controller may be mounted, the most likely first."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:  # not every container runtime has this file
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield root / path.lstrip("/")
            yield root
        elif controller in controllers.split(","):
            for mount in (root / controllers, root / controller):
                yield mount / path.lstrip("/")
                yield mount  # in a container whose group is mounted here, while the path is that of the host
