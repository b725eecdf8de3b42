"""A real Kubernetes for tests: the one that `make cluster` brings up, or that of the environment's KUBECONFIG.

The cluster is brought up once a session if it is not up already, and left up. Set PACEKEEPER_USE_KUBECONFIG=1 to run
against a cluster of your own; tests that make faults on the machine itself are then skipped.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

import testcluster.cluster
from testcluster import fabric, programs
from testcluster.isolation import enter_own_namespaces
from testcluster.settings import CLUSTER_NAME, KUBECONFIG, STATE
from testcluster.shell import log_progress
from testing.kubernetes.api_reader import ApiReader, api_reader

Value = TypeVar("Value")

_SCRATCH = "pacekeeper.dev/scratch"  # label of the tests' namespaces


@dataclass(frozen=True)
class KubectlCluster:
    """A cluster as kubectl sees it."""

    kubeconfig: Path
    is_testcluster: bool
    reader: ApiReader

    def kubectl(self, *arguments: str, stdin: str | None = None, timeout: float = 180) -> str:
        """Standard output of kubectl. subprocess.CalledProcessError with its messages if it fails."""
        return _run_command([*_build_kubectl_command(self.kubeconfig), *arguments], stdin, timeout)

    def run_cli(self, *arguments: str, timeout: float = 180) -> str:
        """The same of `kubectl pacekeeper`."""
        program = [sys.executable, "-m", "pacekeeper_operator.cli.command"]
        path = f"{programs.find_kubectl().parent}{os.pathsep}{os.environ['PATH']}"
        command = [*program, *arguments, f"--kubeconfig={self.kubeconfig}"]
        return _run_command(command, None, timeout, environment={**os.environ, "PATH": path})

    def apply(self, manifest: str | dict[str, Any], namespace: str = "default") -> None:
        text = manifest if isinstance(manifest, str) else json.dumps(manifest)
        self.kubectl("apply", "--namespace", namespace, "--filename", "-", stdin=text)

    def get(self, kind: str, name: str, namespace: str = "default") -> Any:
        """The object, or None where there is none."""
        return self.reader.get(kind, name, namespace)

    def list(self, kind: str, namespace: str = "default", selector: str = "") -> list[Any]:
        """`namespace`: "": those of all."""
        return self.reader.list(kind, namespace, selector)


def wait_for(
    condition: Callable[[], Value | None],
    timeout: float,
    what: str,
    *,
    situation: Callable[[], str] | None = None,
    pause: float = 0.1,
) -> Value:
    """The first answer of `condition` that counts as true; the test fails if there is none within `timeout` seconds.

    situation: describes then the state. pause: seconds between two polls.
    """
    deadline = time.monotonic() + timeout
    while True:
        if result := condition():
            return result
        if time.monotonic() > deadline:
            pytest.fail(f"{what}: not within {timeout:.0f} s" + (f"; {situation()}" if situation else ""))
        time.sleep(pause)


@pytest.fixture(scope="session")
def apart() -> None:
    """Tests of a named cluster live in its namespaces."""
    if CLUSTER_NAME:
        enter_own_namespaces()


@pytest.fixture(scope="session")
def cluster(apart: None) -> Iterator[KubectlCluster]:  # noqa: ARG001  # the cluster is brought up there
    with running_cluster() as kubectl_cluster:
        yield kubectl_cluster


@contextmanager
def running_cluster() -> Iterator[KubectlCluster]:
    """Hold the cluster exclusively. A named one lives in namespaces of this process, so that others do not reach it."""
    is_testcluster = not os.environ.get("PACEKEEPER_USE_KUBECONFIG")
    if is_testcluster and CLUSTER_NAME:
        enter_own_namespaces()
    kubeconfig = KUBECONFIG if is_testcluster else Path(os.environ["KUBECONFIG"])
    running = _running_testcluster() if is_testcluster else nullcontext()
    with _hold_session_lock(), running, api_reader(_build_kubectl_command(kubeconfig)) as reader:
        if is_testcluster and fabric.get_rate():  # tests that were ended half-way leave the fabric's links slow
            fabric.set_all_rates("")
        kubectl_cluster = KubectlCluster(kubeconfig, is_testcluster, reader)
        yield kubectl_cluster
        # A namespace that stays has an object in it whose finalizer no controller serves.
        selector = f"--selector={_SCRATCH}"
        kubectl_cluster.kubectl("wait", "namespace", selector, "--for=delete", "--timeout=120s")


@contextmanager
def _running_testcluster() -> Iterator[None]:
    """A named one goes with its namespaces; the machine's own is left up."""
    testcluster.cluster.bring_up()
    try:
        yield
    finally:
        if CLUSTER_NAME:
            testcluster.cluster.tear_down()


def _run_command(
    command: list[str], stdin: str | None, timeout: float, environment: Mapping[str, str] | None = None
) -> str:
    result = subprocess.run(
        command, input=stdin, capture_output=True, text=True, timeout=timeout, check=False, env=environment
    )
    if result.returncode != 0:
        error = subprocess.CalledProcessError(result.returncode, command, result.stdout, result.stderr)
        error.add_note(result.stderr.strip())
        raise error
    return result.stdout


def _build_kubectl_command(kubeconfig: Path) -> list[str]:
    return [str(programs.find_kubectl()), f"--kubeconfig={kubeconfig}"]


@contextmanager
def _hold_session_lock() -> Iterator[None]:
    """One session of tests at a time: there is one operator, and each session takes it away from the others."""
    with (Path(tempfile.gettempdir()) / f"{STATE.name}-tests.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log_progress("another session of tests uses the cluster: waiting for its end")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture
def namespace(cluster: KubectlCluster) -> Iterator[str]:
    """A namespace of the test's own. Its pods are gone when the test ends, the rest when the session ends."""
    with scratch_namespace(cluster) as name:
        yield name


@contextmanager
def scratch_namespace(cluster: KubectlCluster) -> Iterator[str]:
    """The same for as long as it is held open, for fixtures of a wider scope."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": {_SCRATCH: "true"}}})
    try:
        yield name
    finally:
        cluster.kubectl("delete", "namespace", name, "--wait=false")  # from now on nothing new is made in it
        cluster.kubectl("delete", "pods", "--all", "--namespace", name, "--grace-period=1", "--timeout=120s")
