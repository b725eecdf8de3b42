"""Fixtures of tests on a real cluster, which is proven itself before anything that needs it."""

from __future__ import annotations

import subprocess
from collections.abc import Generator, Iterator
from contextlib import contextmanager

import pytest

from testcluster.job_controllers import JOBSET, KUEUE, TRAINER, JobController
from testcluster.shell import log_step
from testing.kubernetes.cluster import KubectlCluster, apart, cluster, namespace
from testing.kubernetes.resources import resources
from testing.operators.operator_process import operator_process
from testing.operators.operator_release import operator

__all__ = ["apart", "cluster", "namespace", "operator", "operator_process", "resources"]


@pytest.fixture(scope="module")
def jobset(cluster: KubectlCluster) -> Iterator[None]:
    """JobSet's controller runs."""
    with run_job_controller(cluster, JOBSET):
        yield


@pytest.fixture(scope="module")
def kueue(cluster: KubectlCluster) -> Iterator[None]:
    """Kueue's controller runs. A test with JobSets or TrainJobs requests their controllers before it."""
    with run_job_controller(cluster, KUEUE):
        yield


@pytest.fixture(scope="module")
def kubeflow_trainer(cluster: KubectlCluster) -> Iterator[None]:
    """Kubeflow Trainer's controller runs. A test requests `jobset` before it."""
    with run_job_controller(cluster, TRAINER):
        yield


@contextmanager
def run_job_controller(cluster: KubectlCluster, controller: JobController) -> Iterator[None]:
    if not cluster.is_testcluster:
        pytest.skip("the controllers run as processes on the test cluster's machine")
    try:
        with log_step(f"{controller.name} installed"):
            controller.install()
        yield
    finally:
        with log_step(f"{controller.name} uninstalled"):
            controller.uninstall()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
    call: pytest.CallInfo[None],  # noqa: ARG001  # as the hook has it
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With the operators' logs of the test, where it fails: their pods may be gone soon."""
    report = yield
    cluster = getattr(item, "funcargs", {}).get("cluster")
    if report.failed and report.when == "call" and cluster is not None:
        selected = ("-n", "pacekeeper-system", "-l", "app.kubernetes.io/name=pacekeeper")
        try:
            logs = cluster.kubectl("logs", *selected, "--prefix", "--since=120s", "--tail=200")
        except (subprocess.SubprocessError, OSError, AssertionError) as error:
            logs = str(error)
        report.sections.append(("operators' logs", logs))
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_get_stage)


def _get_stage(item: pytest.Item) -> tuple[bool, bool, bool]:
    """The cluster is proven first. What wants no operator in it comes before all that wants one: it changes once."""
    wants_none = "resources" in getattr(item, "fixturenames", ())
    return (_needs_cluster(item), item.path.name != "test_testcluster.py", not wants_none)


def _needs_cluster(item: pytest.Item) -> bool:
    return item.path.parent.name == "cluster"
