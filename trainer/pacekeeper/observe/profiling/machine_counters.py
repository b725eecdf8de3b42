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
    ran_ns: int | None  # by the training thread; None: unknown
    delayed_ns: int | None  # time that it was ready to run while others ran; None: unknown
    periods: int  # of the processor quota
    throttled: int  # periods in which the quota throttled the worker


def read_machine_counters(thread: int) -> MachineCounters:
    """Read the counters. `thread`: identity of the training thread."""
    at_ns = time.monotonic_ns()
    ran_ns, delayed_ns = _read_schedule_times(thread)
    return MachineCounters(at_ns, ran_ns, delayed_ns, *cgroup.read_throttling())


def build_setup(before: MachineCounters, after: MachineCounters) -> ProcessSetup:
    """Return the present setup, with the machine's statistics between the two readings."""
    seconds, periods = max(1, after.at_ns - before.at_ns), after.periods - before.periods
    limit = min(cgroup.read_cpu_limit(), float(len(os.sched_getaffinity(0))))
    return ProcessSetup(
        threads=torch.get_num_threads(),
        processors=round(limit, 2) if math.isfinite(limit) else None,
        ranks=int(os.environ.get("LOCAL_WORLD_SIZE") or 0) or None,
        throttled=_compute_share(after.throttled - before.throttled, periods) if periods > 0 else 0.0,
        ran=_compute_run_share(before.ran_ns, after.ran_ns, seconds),
        delayed=_compute_run_share(before.delayed_ns, after.delayed_ns, seconds),
        infiniband=INFINIBAND_FOLDER.is_dir() and any(INFINIBAND_FOLDER.iterdir()),
        anomalies=torch.is_anomaly_enabled(),
        variables=tuple(
            f"{name}={os.environ[name][:MAX_VARIABLE_CHARACTERS]}"
            for name in sorted(REPORTED_VARIABLES & os.environ.keys())
        ),
    )


def _compute_run_share(before_ns: int | None, after_ns: int | None, total_ns: int) -> float | None:
    """Return the share of `total_ns` between two readings; None: it is unknown."""
    return None if before_ns is None or after_ns is None else _compute_share(after_ns - before_ns, total_ns)


def _compute_share(count: int, total: int) -> float:
    return round(min(1.0, max(0.0, count / total)), 4)


def _read_schedule_times(thread: int) -> tuple[int, int] | tuple[None, None]:
    """Return the ns that the thread ran, and waited for a processor; None: the kernel does not report them."""
    native_id = next((candidate.native_id for candidate in threading.enumerate() if candidate.ident == thread), None)
    try:
        ran, delayed, _ = Path(f"/proc/self/task/{native_id}/schedstat").read_text().split()
    except (OSError, ValueError):
        return None, None
    return int(ran), int(delayed)
