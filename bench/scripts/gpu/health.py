"""What a launcher reads of this machine's GPU through NVML. Runs in a rank of `run_workers`: it starts a thread."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from pacekeeper.launcher.gpu import open_gpu_monitor

from .machine import Busy, wait_until_done

PATIENCE_SECONDS = 30.0


def look(seconds: float) -> dict[str, Any]:
    """While the GPU works for so long: its `health`, and the `events` that there were."""
    gpus, busy = open_gpu_monitor(), Busy()
    deadline = time.monotonic() + PATIENCE_SECONDS
    events: list[Any] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end or not gpus.health:
        if time.monotonic() > deadline:
            raise TimeoutError(f"NVML has told nothing in {PATIENCE_SECONDS:g} s")
        busy(0.2)
        wait_until_done()
        events += gpus.poll(time.monotonic())
    return {"health": [asdict(each) for each in gpus.health], "events": [asdict(each) for each in events]}
