"""Processor time of the test clusters.

The cgroups of a cluster count what no parent process waits for, above all its pods. With cgroups of version 2 they also
hold the daemons, which a part that takes its cluster down counts a second time, as its children.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from testcluster import cgroups


def read_clusters() -> dict[str, float]:
    """Return the processor seconds of each test cluster that is there, by the name of its cgroup."""
    root = cgroups.get_controller_folder("cpu" if cgroups.is_v2() else "cpuacct", "")
    readings = {}
    for folder in root.glob("pacekeeper*"):
        with suppress(OSError):  # taken down since
            readings[folder.name] = cgroups.read_cpu_seconds(folder.name)
    return readings


class Usage:
    """Adds up counters that vanish and begin again at zero, from one reading to the next."""

    def __init__(self, readings: Mapping[str, float]) -> None:
        self._last = dict(readings)
        self.total = 0.0

    def add(self, readings: Mapping[str, float]) -> None:
        for name, value in readings.items():
            previous = self._last.get(name, 0.0)
            self.total += value - previous if value >= previous else value
        self._last = dict(readings)
