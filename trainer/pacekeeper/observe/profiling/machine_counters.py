"""Setup of this process, and statistics of its machine between two readings."""

from __future__ import annotations

import math
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from pacekeeper import cgroup
from pacekeeper_analysis.profiling.pattern import REPORTED_VARIABLES, ProcessSetup

INFINIBAND_FOLDER = Path("/sys/class/infiniband")
MAX_VARIABLE_CHARACTERS = 80


@dataclass(frozen=True)
class MachineCounters:
    """Counters at one moment."""

    at_ns: int
    ran_ns: int  # by the training thread; -1: unknown
    delayed_ns: int  # time that it was ready to run while others ran
    periods: int  # of the processor quota
    throttled: int  # periods in which the quota throttled the worker


def read_machine_counters(thread: int) -> MachineCounters:
    """Read the counters. `thread`: identity of the training thread."""
    return MachineCounters(time.monotonic_ns(), *_read_schedule_times(thread), *cgroup.read_throttling())


def build_setup(before: MachineCounters, after: MachineCounters) -> ProcessSetup:
    """Return the present setup, with the machine's statistics between the two readings."""
    seconds, periods = max(1, after.at_ns - before.at_ns), after.periods - before.periods
    has_run_times = min(before.ran_ns, after.ran_ns) >= 0
    limit = min(cgroup.read_cpu_limit(), float(len(os.sched_getaffinity(0))))
    return ProcessSetup(
        threads=torch.get_num_threads(),
        processors=round(limit, 2) if math.isfinite(limit) else None,
        ranks=int(os.environ.get("LOCAL_WORLD_SIZE") or 0) or None,
        throttled=_compute_share(after.throttled - before.throttled, periods) if periods > 0 else 0.0,
        ran=_compute_share(after.ran_ns - before.ran_ns, seconds) if has_run_times else None,
        delayed=_compute_share(after.delayed_ns - before.delayed_ns, seconds) if has_run_times else None,
        infiniband=INFINIBAND_FOLDER.is_dir() and any(INFINIBAND_FOLDER.iterdir()),
        anomalies=torch.is_anomaly_enabled(),
        variables=tuple(
            f"{name}={os.environ[name][:MAX_VARIABLE_CHARACTERS]}"
            for name in sorted(REPORTED_VARIABLES & os.environ.keys())
        ),
    )


def _compute_share(count: int, total: int) -> float:
    return round(min(1.0, max(0.0, count / total)), 4)


def _read_schedule_times(thread: int) -> tuple[int, int]:
    """Return the ns that the thread ran, and waited for a processor; (-1, 0): the kernel does not report them."""
    native_id = next((candidate.native_id for candidate in threading.enumerate() if candidate.ident == thread), None)
    try:
        ran, delayed, _ = Path(f"/proc/self/task/{native_id}/schedstat").read_text().split()
    except (OSError, ValueError):
        return -1, 0
    return int(ran), int(delayed)
