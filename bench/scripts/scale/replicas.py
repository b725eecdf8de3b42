"""How soon the standby operator has taken over: when the leader is killed, and when it receives SIGTERM.

Two operator processes with the test cluster's API server (`make cluster`), each the real `python -m
pacekeeper_operator`; an operator that is installed there is removed. Ten suspended jobs exist there: what counts is
when the new leader has made its first pass over all of them. With a restart of the API server before each end, too.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from pacekeeper_operator.settings import Settings
from testcluster import api, cluster, faults, programs, release
from testcluster.images import OPERATOR_IMAGE
from testcluster.settings import HOST_ADDRESS, KUBECONFIG, REPOSITORY
from testcluster.shell import run_command, wait_for

from .measurement import Measurement

ROUNDS, QUICK_ROUNDS = 20, 2
AFTER_LEASE_SECONDS, AFTER_SIGTERM_SECONDS = 3.0, 1.0
"""Goals."""
SYSTEM_NAMESPACE, JOBS_NAMESPACE = "bench-replicas-system", "bench-replicas"
JOB_COUNT = 10
LEASE_SECONDS = Settings.lease_seconds
LEASE_PATH = f"/apis/coordination.k8s.io/v1/namespaces/{SYSTEM_NAMESPACE}/leases/pacekeeper-operator"
LEASE_POLL_SECONDS = 0.02
"""So exact are the figures."""
TIMEOUT_SECONDS = 60.0


@dataclass
class OperatorReplica:
    """One operator, started again under its name and at its ports as often as it has ended."""

    name: str
    log: Path
    ports: list[int] = field(default_factory=lambda: [_find_free_port() for _ in range(3)])
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """As in a new pod: another name."""
        endpoint, liveness, metrics = self.ports
        environment = {
            **os.environ,
            "KUBECONFIG": str(KUBECONFIG),
            "POD_NAME": f"{self.name}-{time.monotonic_ns()}",
            "PACEKEEPER_POD_IP": HOST_ADDRESS,
            "PACEKEEPER_NAMESPACE": SYSTEM_NAMESPACE,
            "PACEKEEPER_WATCH_NAMESPACES": JOBS_NAMESPACE,
            "PACEKEEPER_IMAGE": OPERATOR_IMAGE,
            "PACEKEEPER_ADDRESS": f"{HOST_ADDRESS}:{endpoint}",
            "PACEKEEPER_PORT": str(endpoint),
            "PACEKEEPER_LIVENESS_PORT": str(liveness),
            "PACEKEEPER_METRICS_PORT": str(metrics),
        }
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pacekeeper_operator"], cwd=REPOSITORY, env=environment, stdout=log, stderr=log
            )

    def end(self, signal_number: signal.Signals) -> None:
        """Returns at once."""
        assert self.process is not None
        self.process.send_signal(signal_number)

    def wait(self) -> None:
        assert self.process is not None
        self.process.wait(timeout=TIMEOUT_SECONDS)

    def is_ready(self) -> bool:
        """Live, and with a certificate to show."""
        assert self.process is not None
        if self.process.poll() is not None:
            raise RuntimeError(f"operator {self.name} has ended: see {self.log}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.ports[1]}/healthz", timeout=5):
                pass
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            with (
                socket.create_connection((HOST_ADDRESS, self.ports[0]), timeout=5) as connection,
                context.wrap_socket(connection, server_hostname=HOST_ADDRESS),
            ):
                return True
        except (OSError, urllib.error.URLError):
            return False

    def read_metrics(self) -> dict[str, float]:
        """Its metrics without labels; none where it does not serve them."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.ports[2]}/metrics", timeout=5) as response:
                lines = response.read().decode().splitlines()
        except (OSError, urllib.error.URLError):
            return {}
        pairs = (line.split() for line in lines if line.startswith("pacekeeper_") and "{" not in line)
        return {name: float(value) for name, value in pairs}

    def is_leader(self) -> bool:
        return self.read_metrics().get("pacekeeper_leader") == 1

    def has_passed(self) -> bool:
        """Over every job, without an error in the last passes."""
        metrics = self.read_metrics()
        passes = metrics.get("pacekeeper_reconcile_seconds_count", 0.0)
        return passes - metrics.get("pacekeeper_reconcile_errors_total", 0.0) >= JOB_COUNT


def run_measurements(quick: bool) -> Sequence[Measurement]:
    rounds, measurements = QUICK_ROUNDS if quick else ROUNDS, list[Measurement]()
    cluster.bring_up()
    release.uninstall_release()
    with _create_jobs(), _run_two_operators() as operators:
        for restarts in (False, True):
            condition = ", API server restarted before" if restarts else ""
            killed_seconds, sigterm_seconds = list[float](), list[float]()
            for number in range(rounds):
                killed_seconds.append(_measure_lease_takeover(operators, restarts))
                sigterm_seconds.append(_measure_signal_takeover(operators, restarts))
                _log_progress(
                    f"{number + 1} of {rounds}{condition}: killed {killed_seconds[-1]:.2f} s, "
                    f"SIGTERM {sigterm_seconds[-1]:.2f} s"
                )
            ends = (
                ("killed, after its lease", killed_seconds, AFTER_LEASE_SECONDS),
                ("SIGTERM", sigterm_seconds, AFTER_SIGTERM_SECONDS),
            )
            for cause, seconds, goal in ends:
                measurements.append(
                    Measurement(f"leader {cause}{condition}: next leads, most", max(seconds), goal, "s")
                )
                measurements.append(
                    Measurement(f"leader {cause}{condition}: next leads, median", statistics.median(seconds), goal, "s")
                )
    return measurements


def _measure_lease_takeover(operators: Sequence[OperatorReplica], restarts: bool) -> float:
    leader, standby = _wait_until_calm(operators, restarts)
    leader.end(signal.SIGKILL)
    leader.wait()
    lease_end = _read_renew_time() + LEASE_SECONDS
    passed_at = _wait_for_pass(standby)
    leader.start()
    return passed_at - lease_end


def _measure_signal_takeover(operators: Sequence[OperatorReplica], restarts: bool) -> float:
    leader, standby = _wait_until_calm(operators, restarts)
    start = time.time()
    leader.end(signal.SIGTERM)
    passed_at = _wait_for_pass(standby)
    leader.wait()
    leader.start()
    return passed_at - start


def _wait_until_calm(operators: Sequence[OperatorReplica], restarts: bool) -> tuple[OperatorReplica, OperatorReplica]:
    """The one that leads, for a while or since the API server's restart, and the other."""
    wait_for(lambda: all(operator.is_ready() for operator in operators), TIMEOUT_SECONDS, "both operators are ready")
    if restarts:
        faults.restart_api_server()
    since = time.time()
    wait_for(
        lambda: any(operator.is_leader() and operator.has_passed() for operator in operators),
        TIMEOUT_SECONDS,
        "one leads",
    )
    wait_for(lambda: _read_renew_time() > since, TIMEOUT_SECONDS, "the Lease is renewed")
    time.sleep(random.uniform(0.0, 1.2))  # at any moment between two renewals
    leader, standby = sorted(operators, key=lambda operator: not operator.is_leader())
    return leader, standby


def _read_renew_time() -> float:
    """Seconds since the epoch, by this machine's clock, which is the operators'."""
    return datetime.fromisoformat(api.get_path(LEASE_PATH)["spec"]["renewTime"]).timestamp()


def _wait_for_pass(operator: OperatorReplica) -> float:
    """When, seconds since the epoch."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not operator.has_passed():
        if time.monotonic() > deadline:
            raise RuntimeError(f"operator {operator.name} does not take over: see {operator.log}")
        time.sleep(LEASE_POLL_SECONDS)
    return time.time()


@contextmanager
def _run_two_operators() -> Iterator[Sequence[OperatorReplica]]:
    folder = Path(tempfile.mkdtemp(prefix="pacekeeper-bench-replicas-"))
    operators = [OperatorReplica(name, folder / f"{name}.log") for name in ("a", "b")]
    _log_progress(f"logs: {folder}")
    try:
        for operator in operators:
            operator.start()
        yield operators
    finally:
        for operator in operators:
            if operator.process is not None and operator.process.poll() is None:
                operator.end(signal.SIGTERM)
                operator.wait()


@contextmanager
def _create_jobs() -> Iterator[None]:
    """They and their namespaces are removed; no operator runs that would remove their finalizers."""
    try:
        for namespace in (SYSTEM_NAMESPACE, JOBS_NAMESPACE):
            _run_kubectl("create", "namespace", namespace)
        _run_kubectl("apply", "--server-side", "--force-conflicts", "-f", str(REPOSITORY / "crds"))
        items = [_build_job(f"job-{number}") for number in range(JOB_COUNT)]
        _run_kubectl("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))
        yield
    finally:
        names = [job["metadata"]["name"] for job in api.get_path(_JOBS_PATH)["items"]]
        for name in names:
            _run_kubectl(
                "patch",
                "trainingjob",
                name,
                "-n",
                JOBS_NAMESPACE,
                "--type=merge",
                '--patch={"metadata":{"finalizers":null}}',
            )
        _run_kubectl("delete", "namespace", SYSTEM_NAMESPACE, JOBS_NAMESPACE, "--ignore-not-found", "--timeout=90s")


_JOBS_PATH = f"/apis/pacekeeper.dev/v1alpha1/namespaces/{JOBS_NAMESPACE}/trainingjobs"


def _build_job(name: str) -> dict[str, Any]:
    container = {"name": "trainer", "image": "none", "command": ["pacekeeper", "run", "x.py"]}
    return {
        "apiVersion": "pacekeeper.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name, "namespace": JOBS_NAMESPACE},
        "spec": {"replicas": 2, "suspend": True, "template": {"spec": {"containers": [container]}}},
    }


def _find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _run_kubectl(*arguments: str, stdin: str | None = None) -> None:
    run_command(programs.find_kubectl(), f"--kubeconfig={KUBECONFIG}", *arguments, stdin=stdin, timeout=100)


def _log_progress(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
