"""The machine with a GPU: whether there is one, what it is, and work of a known duration for it.

PACEKEEPER_TEST_DEVICE=cpu uses the CPU instead, so that all that a GPU runs can be tried without one: a sleep
stands in for a kernel then, and no measurement is meaningful.
"""

from __future__ import annotations

import fcntl
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch

DEVICE = torch.device(os.environ.get("PACEKEEPER_TEST_DEVICE", "cuda"))
ON_GPU = DEVICE.type == "cuda"
NCCL = "cuda:nccl,cpu:gloo" if ON_GPU else "gloo"
"""The backend of ranks that talk over NCCL where there is a GPU."""

_FACTS_PROGRAM = """
import json, torch
found = {"available": torch.cuda.is_available(), "torch": torch.__version__, "cuda": torch.version.cuda}
if found["available"]:
    card = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info(0)
    found |= {"card": card.name, "capability": f"{card.major}.{card.minor}", "memory_bytes": total, "free_bytes": free}
    found["nccl"] = list(torch.cuda.nccl.version()) if torch.distributed.is_nccl_available() else []
print(json.dumps(found))
"""


@cache
def read_machine_facts() -> dict[str, Any]:
    """Card, driver, and versions of torch, CUDA and NCCL.

    Queried in a process of its own: one that has touched CUDA cannot fork ranks any more.
    """
    process = subprocess.run(
        [sys.executable, "-c", _FACTS_PROGRAM], capture_output=True, text=True, timeout=300, check=False
    )
    if process.returncode != 0:
        return {"available": False, "torch": torch.__version__, "error": process.stderr[-2000:]}
    facts: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return facts | {"python": sys.version.split()[0], "driver": _read_driver_version(), "cores": os.cpu_count()}


def explain_missing_gpu() -> str:
    """Why GPU tests cannot run here; empty: they can."""
    if not ON_GPU:
        return ""
    facts = read_machine_facts()
    if facts["available"]:
        return ""
    reason = f"no GPU here that torch {facts['torch']} (CUDA {facts.get('cuda')}) can use"
    return f"{reason}: {facts['error']}" if "error" in facts else reason


def wait_until_done() -> None:
    """All that this process has launched."""
    if ON_GPU:
        torch.cuda.synchronize()


class Busy:
    """Keeps the device busy for a given time, in the current stream; on a GPU the call returns at once.

    On a GPU, a kernel that counts cycles of its clock, which is measured when this is made.
    """

    def __init__(self) -> None:
        self._cycles_a_second = _measure_cycles_per_second() if ON_GPU else 0.0

    def __call__(self, seconds: float) -> None:
        if ON_GPU:
            torch.cuda._sleep(round(seconds * self._cycles_a_second))
        else:
            time.sleep(seconds)

    def run_forever(self) -> None:
        if ON_GPU:
            torch.cuda._sleep(2**62)  # a century
        else:
            time.sleep(1e6)


def _measure_cycles_per_second() -> float:
    """Median of a few kernels, once the clock has come to its speed. Processes that share the GPU take turns."""
    cycles = 100_000_000
    rates: list[float] = []
    with Path(tempfile.gettempdir(), "pacekeeper-gpu-clock.lock").open("w") as lock_file:
        fcntl.flock(lock_file, fcntl.LOCK_EX)
        for _ in range(8):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            torch.cuda._sleep(cycles)
            end.record()
            end.synchronize()
            rates.append(cycles / (start.elapsed_time(end) * 1e-3))
    return statistics.median(rates[3:])


def _read_driver_version() -> str:
    try:
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):
        return _query_driver_version()


def _query_driver_version() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
