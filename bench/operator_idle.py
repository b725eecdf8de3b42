"""What the operator needs while it has nothing to do but to watch one job: processor time and memory.

On the test cluster (`make cluster`), by the cgroup of the operator's container: 60 s, or 20 s with QUICK=1.
"""

from __future__ import annotations

import json
import os
import sys
import time

from testcluster import api, cgroups, cluster, faults, programs, release
from testcluster.images import TRAINER_IMAGE
from testcluster.settings import KUBECONFIG
from testcluster.shell import run_command, wait_for

MEASURE_SECONDS = 20 if os.environ.get("QUICK") else 60
CPU_LIMIT, MEMORY_LIMIT = 0.01, 150.0  # share of a core, MB
NAMESPACE = "bench-operator-idle"
JOB = {
    "apiVersion": "pacekeeper.dev/v1alpha1",
    "kind": "TrainingJob",
    "metadata": {"name": "gpt", "namespace": NAMESPACE},
    "spec": {
        "replicas": 2,
        "checkpoint": {"volumeClaimName": "checkpoints"},
        "detection": {"stragglerSlowdown": 10},  # what two cores do to a rank shall not keep the operator busy
        "template": {
            "spec": {
                "containers": [
                    {
                        "name": "trainer",
                        "image": TRAINER_IMAGE,
                        "imagePullPolicy": "Never",
                        "command": ["pacekeeper", "run", "examples/gpt.py", "--steps=1000000"],
                        "resources": {"requests": {"cpu": "100m"}, "limits": {"cpu": "400m", "memory": "2Gi"}},
                    }
                ]
            }
        },
    },
}
CLAIM = {
    "apiVersion": "v1",
    "kind": "PersistentVolumeClaim",
    "metadata": {"name": "checkpoints", "namespace": NAMESPACE},
    "spec": {
        "storageClassName": "shared",
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": "1Gi"}},
    },
}


def main() -> None:
    cluster.bring_up()
    release.install_release()
    remove_job()
    try:
        run_kubectl("create", "namespace", NAMESPACE)
        run_kubectl("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": [CLAIM, JOB]}))
        wait_for(is_training, 120, "the job trains")
        share, memory = measure_usage()
    finally:
        remove_job()
    share_of_limit = max(share / CPU_LIMIT, memory / MEMORY_LIMIT)
    print(
        json.dumps(
            {
                "bench": "operator_idle",
                "cpu_share": round(share, 5),
                "memory_mb": round(memory, 1),
                "limits": {"cpu_share": CPU_LIMIT, "memory_mb": MEMORY_LIMIT},
                "seconds": MEASURE_SECONDS,
                "ratio": round(share_of_limit, 3),  # of the limit that is nearer; above 1 it is exceeded
                "holds": share_of_limit <= 1,
            }
        )
    )


def measure_usage() -> tuple[float, float]:
    """(share of a core, resident megabytes) of the operator's container; another one must not take its place."""
    container = find_operator_container()
    used_before, start = cgroups.read_cpu_seconds(container.cgroup), time.monotonic()
    while (remaining := start + MEASURE_SECONDS - time.monotonic()) > 0:
        log_progress(f"{remaining:.0f} s left, {read_memory_mb(container):.1f} MB")
        time.sleep(min(10.0, remaining))
    share = (cgroups.read_cpu_seconds(container.cgroup) - used_before) / (time.monotonic() - start)
    return share, read_memory_mb(container)


def find_operator_container() -> faults.Container:
    """Of the one that leads."""
    wait_for(lambda: release.find_leading_pod() is not None, 30, "an operator leads")
    return faults.find_container(release.SYSTEM, release.get_leader_name(), "operator")


def read_memory_mb(container: faults.Container) -> float:
    return cgroups.read_memory_bytes(container.cgroup) / 1e6


def is_training() -> bool:
    job = api.get_path(f"/apis/pacekeeper.dev/v1alpha1/namespaces/{NAMESPACE}/trainingjobs/gpt")
    return bool(job.get("status", {}).get("phase") == "Running")


def remove_job() -> None:
    run_kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found", "--timeout=90s")


def run_kubectl(*arguments: str, stdin: str | None = None) -> None:
    run_command(programs.find_kubectl(), f"--kubeconfig={KUBECONFIG}", *arguments, stdin=stdin, timeout=100)


def log_progress(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
