"""What one tenant's large objects take of the operator's memory: 145 pods of 1 MiB that carry the label of a job, and
200 suspended TrainingJobs with templates of 1 MiB, or as large as is allowed: in text, and in tiny values.

The real operator, as a process of its own, against a stand-in API server: its largest resident size (VmHWM) until it
has taken up all jobs, and listed all pods twice. `QUICK=1`: half as many.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LIMIT_MB = 512 * 2**20 / 1e6
"""`resources.limits.memory` of the chart."""
QUICK = bool(os.environ.get("QUICK"))
PODS, JOBS = (72, 100) if QUICK else (145, 200)
TIMEOUT_SECONDS = 300.0
"""An operator that has not done it by then never does."""
LEADING_SECONDS = 10.0
"""It leads by then."""
SETTLED_SECONDS = 75.0
"""The resync comes around each minute."""
GROUP = "/apis/pacekeeper.dev/v1alpha1"
CASES = {
    "nothing": (0, 0, ""),
    "pods": (PODS, 0, ""),
    "jobs_too_large": (0, JOBS, "too large"),
    "jobs_of_text": (0, JOBS, "text"),
    "jobs_of_values": (0, JOBS, "values"),
    "all": (PODS, JOBS, "too large"),
}


def main() -> None:
    names = sys.argv[1:] or list(CASES)
    peaks = {name: measure_peak_memory(name, *CASES[name]) for name in names}
    print(
        json.dumps(
            {
                "bench": "large_objects",
                "peak_mb": {name: None if peak is None else round(peak) for name, peak in peaks.items()},
                "limit_mb": round(LIMIT_MB),
                "pods": PODS,
                "jobs": JOBS,
                "holds": {name: peak is not None and peak < LIMIT_MB for name, peak in peaks.items()},
            }
        )
    )
    sys.exit(0 if all(peak is not None and peak < LIMIT_MB for peak in peaks.values()) else 1)


def measure_peak_memory(name: str, pods: int, jobs: int, content: str) -> float | None:
    """Largest resident size in MB; None: the operator has not come so far."""
    with (
        tempfile.TemporaryDirectory() as folder,
        run_stand_in(Path(folder), generate_objects(pods, jobs, content)) as address,
        run_operator(Path(folder), address) as process,
    ):
        start, settled_at = time.monotonic(), 0.0
        while time.monotonic() - start < TIMEOUT_SECONDS:
            time.sleep(1)
            if process.poll() is not None:
                log_progress(f"{name}: the operator has ended with status {process.returncode}")
                return None
            reported_count = count_reported_jobs(address)
            if not settled_at and reported_count == jobs and time.monotonic() - start > LEADING_SECONDS:
                settled_at = time.monotonic()
            if settled_at and time.monotonic() - settled_at > SETTLED_SECONDS:
                return read_peak_mb(process.pid)
            if int(time.monotonic() - start) % 10 == 0:
                log_progress(
                    f"{name}: {reported_count} of {jobs} jobs have a phase; at most {read_peak_mb(process.pid):.0f} MB"
                )
        log_progress(f"{name}: not done in time; at most {read_peak_mb(process.pid):.0f} MB")
        return None


def generate_objects(pods: int, jobs: int, content: str) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "/api/v1/nodes", {"metadata": {"name": "node-1"}, "status": {}}
    large = "x" * 2**20
    for number in range(pods):
        metadata: dict[str, Any] = {
            "name": f"pod-{number}",
            "namespace": "tenant",
            "labels": {"pacekeeper.dev/job": "none"},
        }
        container = {"name": "c", "image": "i", "args": [large]}
        yield "/api/v1/pods", {"metadata": metadata, "spec": {"containers": [container]}, "status": {}}
    arguments: dict[str, list[str]] = {"too large": [large], "text": ["x" * 260_000], "": []}
    arguments["values"] = [str(number) for number in range(8_000)]
    for number in range(jobs):
        metadata = {"name": f"job-{number}", "namespace": "tenant", "generation": 1}
        trainer = {"name": "trainer", "image": "i", "args": arguments[content]}
        spec = {"suspend": True, "replicas": 1, "template": {"spec": {"containers": [trainer]}}}
        body = {"apiVersion": "pacekeeper.dev/v1alpha1", "kind": "TrainingJob", "metadata": metadata, "spec": spec}
        yield f"{GROUP}/trainingjobs", body


@contextmanager
def run_stand_in(folder: Path, objects: Iterator[tuple[str, dict[str, Any]]]) -> Iterator[str]:
    """Its address."""
    path = folder / "objects.json"
    with path.open("w") as file:
        file.writelines(json.dumps(item) + "\n" for item in objects)
    command = [sys.executable, "-m", "bench.scripts.large_objects.api_server", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


@contextmanager
def run_operator(folder: Path, address: str) -> Iterator[subprocess.Popen[bytes]]:
    user, context = {"name": "u", "user": {"token": "t"}}, {"name": "c", "context": {"cluster": "c", "user": "u"}}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "clusters": [{"name": "c", "cluster": {"server": address}}],
        "users": [user],
        "contexts": [context],
    }
    (folder / "kubeconfig").write_text(json.dumps(config))
    environment = os.environ | {
        "KUBECONFIG": str(folder / "kubeconfig"),
        "PACEKEEPER_IDENTITY": "bench",
        "PACEKEEPER_PORT": "18443",
        "PACEKEEPER_LIVENESS_PORT": "18080",
        "PACEKEEPER_METRICS_PORT": "19464",
    }
    with (folder / "log").open("w") as log:
        command = [sys.executable, "-m", "pacekeeper_operator"]
        with subprocess.Popen(command, env=environment, stdout=log, stderr=log) as process:
            try:
                yield process
            finally:
                process.kill()
                log_progress((folder / "log").read_text()[-2_000:])


def count_reported_jobs(address: str) -> int:
    """Jobs that have a phase."""
    with urllib.request.urlopen(f"{address}/count?of={GROUP}/trainingjobs", timeout=60) as response:
        return int(json.load(response))


def read_peak_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024 / 1e6
    return 0.0


def log_progress(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
