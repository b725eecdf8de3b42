"""What launcher and ranks read of their own control group, in version 1 and version 2."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")


def count_oom_kills(root: Path = CGROUP_ROOT, membership: Path = Path("/proc/self/cgroup")) -> int:
    """Processes that the kernel has killed for want of memory in this control group; 0 where that cannot be read."""
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
    """Bytes that this control group may still take, by the tightest limit from here up to `root`; infinity: no limit.

    Files in the page cache do not count as taken: the kernel gives them up before it kills anybody. Shared memory does.
    """
    left = math.inf
    for folder in _list_cgroup_folders(root, membership, "memory"):
        while folder.is_relative_to(root):
            left = min(left, _read_memory_left(folder))
            if folder == root:
                break
            folder = folder.parent
    return left


def _read_memory_left(folder: Path) -> float:
    for most, taken, total in (
        ("memory.max", "memory.current", ""),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        try:
            limit = (folder / most).read_text().strip()
            if limit == "max":
                return math.inf
            statistics = dict(line.split(" ", 1) for line in (folder / "memory.stat").read_text().splitlines())
            files = sum(int(statistics.get(f"{total}{state}_file", 0)) for state in ("active", "inactive"))
            in_use = int((folder / taken).read_text()) - files
        except (OSError, ValueError):
            continue
        return max(0, int(limit) - max(0, in_use))
    return math.inf


def read_cpu_limit(root: Path = CGROUP_ROOT, membership: Path = Path("/proc/self/cgroup")) -> float:
    """Processors that this control group may use at once; infinity: as many as there are."""
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
    """Periods of the processor quota so far, and those of them in which it has held this control group up; (0, 0) where
    that cannot be read, or there is no quota."""
    for folder in _list_cgroup_folders(root, membership, "cpu"):
        try:
            lines = (folder / "cpu.stat").read_text().splitlines()
        except OSError:
            continue
        figures = dict(line.split(" ", 1) for line in lines if " " in line)
        if "nr_periods" in figures:
            return int(figures["nr_periods"]), int(figures.get("nr_throttled", 0))
    return 0, 0


def read_cpu_wait_seconds(
    root: Path = CGROUP_ROOT, membership: Path = Path("/proc/self/cgroup"), machine: Path = Path("/proc/pressure/cpu")
) -> float | None:
    """Seconds so far in which some thread of this control group, or of the whole machine where it has no figure of its
    own, was ready to run and had no processor; None: the kernel does not count them."""
    for path in [folder / "cpu.pressure" for folder in _list_cgroup_folders(root, membership, "cpu")] + [machine]:
        try:
            lines = path.read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            kind, *figures = line.split()
            if kind == "some":
                return int(dict(its.split("=", 1) for its in figures)["total"]) * 1e-6
    return None


def _list_cgroup_folders(root: Path, membership: Path, controller: str) -> Iterator[Path]:
    """Where this process's group of the controller may be mounted, the likeliest place first."""
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
                yield mount  # in a container whose own group is mounted here, under the path of the outside
