"""How this process is set up, and what its machine did with it between two looks."""

from __future__ import annotations

import math
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from pacekeeper import cgroup
from pacekeeper_analysis.behaviour.pattern import REPORTED_VARIABLES, ProcessSetup

INFINIBAND_FOLDER = Path("/sys/class/infiniband")
MAX_VARIABLE_CHARACTERS = 80


@dataclass(frozen=True)
class MachineCounters:
    """Counters at one moment."""

    at_ns: int
    ran_ns: int  # by the training thread; -1: not known
    delayed_ns: int  # that it was ready to run, and others ran
    periods: int  # of the quota
    throttled: int  # of these, those in which it held the worker up


def read_machine_counters(thread: int) -> MachineCounters:
    """`thread`: identity of the training thread."""
    return MachineCounters(time.monotonic_ns(), *_read_schedule_times(thread), *cgroup.read_throttling())


def build_setup(before: MachineCounters, after: MachineCounters) -> ProcessSetup:
    """Now, with what the machine did meanwhile."""
    seconds, periods = max(1, after.at_ns - before.at_ns), after.periods - before.periods
    known = min(before.ran_ns, after.ran_ns) >= 0
    limit = min(cgroup.read_cpu_limit(), float(len(os.sched_getaffinity(0))))
    return ProcessSetup(
        threads=torch.get_num_threads(),
        processors=round(limit, 2) if math.isfinite(limit) else 0.0,
        ranks=int(os.environ.get("LOCAL_WORLD_SIZE") or 0),
        throttled=_compute_share(after.throttled - before.throttled, periods) if periods > 0 else 0.0,
        ran=_compute_share(after.ran_ns - before.ran_ns, seconds) if known else -1.0,
        delayed=_compute_share(after.delayed_ns - before.delayed_ns, seconds) if known else -1.0,
        infiniband=INFINIBAND_FOLDER.is_dir() and any(INFINIBAND_FOLDER.iterdir()),
        anomalies=torch.is_anomaly_enabled(),
        variables=tuple(f"{name}={os.environ[name][:MAX_VARIABLE_CHARACTERS]}" for name in sorted(REPORTED_VARIABLES & os.environ.keys())),
    )


def _compute_share(count: int, of: int) -> float:
    return round(min(1.0, max(0.0, count / of)), 4)


def _read_schedule_times(thread: int) -> tuple[int, int]:
    """Nanoseconds that the thread ran, and waited for a processor; (-1, 0): this kernel does not tell."""
    native = next((each.native_id for each in threading.enumerate() if each.ident == thread), None)
    try:
        ran, delayed, _ = Path(f"/proc/self/task/{native}/schedstat").read_text().split()
    except (OSError, ValueError):
        return -1, 0
    return int(ran), int(delayed)
