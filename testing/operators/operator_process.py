"""The operator as a process on the machine, for tests that kill it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from testcluster.images import OPERATOR_IMAGE
from testcluster.settings import HOST_ADDRESS, PROMETHEUS_URL
from testing.kubernetes.chart import REPOSITORY, SYSTEM
from testing.kubernetes.cluster import KubectlCluster, wait_for

CRASH_TEST_OPERATOR = "testing.operators.crash_test_operator"
"""An operator that ends itself right after its n-th write to the API server."""


@dataclass
class OperatorProcess:
    """Start and end it as often as wanted; it keeps its address, so that workers find it again."""

    cluster: KubectlCluster
    log: Path
    prometheus_url: str = PROMETHEUS_URL
    ports: list[int] = field(default_factory=lambda: [_find_free_port() for _ in range(3)])
    process: subprocess.Popen[bytes] | None = None
    settings: Mapping[str, str] = field(default_factory=dict)  # variables in addition

    def start(self, *, crash_after_writes: int = 0, module: str = "pacekeeper_operator") -> None:
        """`crash_after_writes`: writes to the API server; 0: it lives."""
        endpoint, liveness, metrics = self.ports
        environment = {
            **os.environ,
            "KUBECONFIG": str(self.cluster.kubeconfig),
            "POD_NAME": "test-operator",
            "PACEKEEPER_NAMESPACE": SYSTEM,
            "PACEKEEPER_IMAGE": OPERATOR_IMAGE,
            "PACEKEEPER_ADDRESS": f"{HOST_ADDRESS}:{endpoint}",
            "PACEKEEPER_PORT": str(endpoint),
            "PACEKEEPER_LIVENESS_PORT": str(liveness),
            "PACEKEEPER_METRICS_PORT": str(metrics),
            "PACEKEEPER_PROMETHEUS_URL": self.prometheus_url,
            "PACEKEEPER_DCGM_NAMESPACE": "gpu-monitoring",
            "PACEKEEPER_QUARANTINE_MODE": "Act",
            "CRASH_TEST_WRITES": str(crash_after_writes),
            **self.settings,
        }
        command = [sys.executable, "-m", CRASH_TEST_OPERATOR if crash_after_writes else module]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=log, stderr=log)
        if not crash_after_writes:
            wait_for(self.is_leading, timeout=60, what=f"the operator leads (see {self.log})")

    def is_leading(self) -> bool:
        """Whether it reports that it is alive (a pass, and no dead watch) and leads."""
        assert self.process is not None
        assert self.process.poll() is None, self.log.read_text()[-2000:]
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.ports[1]}/healthz", timeout=5) as response:
                return bool(response.status == 200) and "pacekeeper_leader 1.0" in self.read_metrics()
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            return False

    def read_metrics(self) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.ports[2]}/metrics", timeout=5) as response:
            return str(response.read().decode())

    def kill(self, signum: signal.Signals = signal.SIGKILL) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signum)
            self.process.wait(timeout=60)

    def wait_for_exit(self, *, or_: Callable[[], bool]) -> None:
        """Until it has ended itself, or the condition holds."""
        assert self.process is not None
        process = self.process
        wait_for(lambda: process.poll() is not None or or_(), 120, f"the operator dies (see {self.log})", pause=0.2)


@pytest.fixture(scope="module")
def operator_process(cluster: KubectlCluster, resources: None) -> Iterator[OperatorProcess]:  # noqa: ARG001  # the kinds must exist
    """It serves a module's jobs while their tests make faults on the test cluster's machine."""
    if not cluster.is_testcluster:
        pytest.skip("faults are made on the test cluster's machine")
    with run_operator_process(cluster) as operator:
        yield operator


@contextmanager
def run_operator_process(
    cluster: KubectlCluster, prometheus_url: str = PROMETHEUS_URL, settings: Mapping[str, str] | None = None
) -> Iterator[OperatorProcess]:
    """It ends when the jobs that are being deleted are gone."""
    log = Path(tempfile.mkdtemp(prefix="pacekeeper-operator-")) / "log"
    operator = OperatorProcess(cluster, log, prometheus_url, settings=settings or {})
    if cluster.get("namespace", SYSTEM) is None:
        cluster.kubectl("create", "namespace", SYSTEM)
    operator.start()
    try:
        yield operator
        wait_for(lambda: not _list_deleting_jobs(cluster), timeout=120, what="deleted jobs are gone")
    finally:
        operator.kill(signal.SIGTERM)


def _list_deleting_jobs(cluster: KubectlCluster) -> list[str]:
    """Jobs that wait for the operator to let them go."""
    jobs = json.loads(cluster.kubectl("get", "trainingjobs", "--all-namespaces", "--output=json"))["items"]
    return [job["metadata"]["name"] for job in jobs if "deletionTimestamp" in job["metadata"]]


def _find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
