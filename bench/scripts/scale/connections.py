"""5,000 sidecars on one endpoint: what a connection and a poll cost, and how soon all are back after a restart.

The real server with TLS and the real service in one process, all sidecars' polls in another (`endpoint`, `crowd`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from .measurement import Measurement

WORKERS, RANKS = 5_000, 8
QUICK_WORKERS = 300
HOLD_SECONDS = 30.0
"""What the sidecars allow; the endpoint decides how long it really holds a poll."""
CONNECT_SECONDS = 120.0
LIMIT_SECONDS = 30.0
"""Goal for all to be back."""
POLLS_A_SECOND, IDLE_CORES = 180, 0.25
"""How many polls 5,000 workers make, which are held for 28 s at the mean; and the goal for what they take: half of the
half core that a job of 5,000 idle workers may."""


def run_measurements(quick: bool) -> Sequence[Measurement]:
    workers = QUICK_WORKERS if quick else WORKERS
    with _run_endpoint(0, workers) as (startup, query_usage):
        empty_bytes = startup["resident"]
        with _run_crowd(startup["port"], workers):
            _wait_until_all_poll(query_usage, workers)
            _wait_until_settled(query_usage, workers)
            before = query_usage()
            time.sleep(10 if quick else 45)
            after = query_usage()
            idle_measurements = _measure_idle(workers, empty_bytes, before, after)
            startup["process"].kill()  # as a pod that is gone; the crowd goes on
            startup["process"].wait()
            start = time.monotonic()
            with _run_endpoint(startup["port"], workers) as (_, query_again):
                _wait_until_all_poll(query_again, workers)
                reconnect_seconds = time.monotonic() - start
                processor_seconds = query_again()["seconds"]
    return (
        *idle_measurements,
        Measurement(f"all of {workers} connected again after a restart", reconnect_seconds, LIMIT_SECONDS, "s"),
        Measurement("processor time of that, a worker", 1e3 * processor_seconds / workers, 4.0, "ms"),
    )


def _measure_idle(
    workers: int, empty_bytes: float, before: dict[str, float], after: dict[str, float]
) -> tuple[Measurement, ...]:
    seconds, polls = after["at"] - before["at"], after["polls"] - before["polls"]
    processor_seconds = after["seconds"] - before["seconds"]
    worker_bytes = (after["resident"] - empty_bytes) / workers
    return (
        Measurement(
            "memory of a worker, with its connection", worker_bytes / 2**10, 70, "KiB", "322 KiB with asyncio as it is"
        ),
        Measurement(f"memory of the endpoint, {workers} connected", after["resident"] / 1e6, 450, "MB"),
        Measurement(f"processor, {workers} connected and idle", processor_seconds / seconds, IDLE_CORES, "cores"),
        Measurement(
            "processor time of a poll",
            1e3 * processor_seconds / polls,
            1e3 * IDLE_CORES / POLLS_A_SECOND,
            "ms",
            f"{polls / seconds:.0f} polls a second",
        ),
    )


def _wait_until_all_poll(query_usage: Callable[[], dict[str, float]], workers: int) -> None:
    """Raises TimeoutError."""
    deadline = time.monotonic() + CONNECT_SECONDS
    while (held := query_usage()["held"]) < workers:
        if time.monotonic() > deadline:
            raise TimeoutError(f"only {held} of {workers} sidecars' polls are held after {CONNECT_SECONDS:.0f} s")
        time.sleep(0.2)


def _wait_until_settled(query_usage: Callable[[], dict[str, float]], workers: int) -> None:
    """Until everyone's first poll has ended and the next one is held: then each costs what it will."""
    while query_usage()["polls"] < 2 * workers:
        time.sleep(0.5)


@contextmanager
def _run_endpoint(port: int, workers: int) -> Iterator[tuple[dict[str, Any], Callable[[], dict[str, float]]]]:
    """Its first line, with its process; and a function that queries its usage."""
    command = [sys.executable, "-m", "bench.scripts.scale.endpoint", str(port), str(workers), str(RANKS)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def query_usage() -> dict[str, float]:
            stdin.write("poll\n")
            stdin.flush()
            answer: dict[str, float] = json.loads(stdout.readline())
            return answer

        try:
            yield json.loads(stdout.readline()) | {"process": process}, query_usage
        finally:
            process.kill()


@contextmanager
def _run_crowd(port: int, workers: int) -> Iterator[None]:
    command = [
        sys.executable,
        "-m",
        "bench.scripts.scale.crowd",
        str(port),
        str(workers),
        str(RANKS),
        str(HOLD_SECONDS),
    ]
    with subprocess.Popen(command, env=os.environ | {"PYTHONUNBUFFERED": "1"}) as process:
        try:
            yield
        finally:
            process.kill()
