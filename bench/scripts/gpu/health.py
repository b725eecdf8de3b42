"""What a launcher reads of this machine's GPU through NVML. Runs in a rank of `run_workers`: it starts a thread."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from pacekeeper.launcher.health.gpu_monitor import open_gpu_monitor

from .machine import Busy, wait_until_done

TIMEOUT_SECONDS = 30.0


def watch_health(seconds: float) -> dict[str, Any]:
    """While the GPU works for `seconds`: its `health`, and its `events`."""
    monitor, busy = open_gpu_monitor(), Busy()
    deadline = time.monotonic() + TIMEOUT_SECONDS
    events: list[Any] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end or not monitor.health:
        if time.monotonic() > deadline:
            raise TimeoutError(f"NVML has reported nothing in {TIMEOUT_SECONDS:g} s")
        busy(0.2)
        wait_until_done()
        events += monitor.poll(time.monotonic())
    return {"health": [asdict(health) for health in monitor.health], "events": [asdict(event) for event in events]}
