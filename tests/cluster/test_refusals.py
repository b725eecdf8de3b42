"""Refusals of the API server are reported with its message: by jobs that cannot begin, and by one without a remedy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from testing.kubernetes.cluster import KubectlCluster, scratch_namespace, wait_for
from testing.kubernetes.jobs import ClusterJob, build_paced_job
from testing.operators.operator_process import OperatorProcess

pytestmark = pytest.mark.usefixtures("resources")

REPORT_SECONDS = 60
LONG = 100_000  # steps: until the tests end it
ONE_POD: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "ResourceQuota",
    "metadata": {"name": "one"},
    "spec": {"hard": {"pods": "1"}},
}


@pytest.fixture(scope="module")
def namespace(cluster: KubectlCluster, operator_process: OperatorProcess) -> Iterator[str]:  # noqa: ARG001  # it serves the jobs
    with scratch_namespace(cluster) as name:
        yield name


@pytest.fixture(scope="module")
def live(cluster: KubectlCluster, namespace: str) -> ClusterJob:
    """Applied first, so that it starts while the others are refused."""
    return ClusterJob.apply(cluster, namespace, build_paced_job("live", LONG))


@pytest.mark.usefixtures("live")
@pytest.mark.parametrize(
    ("name", "pod", "message"),
    [
        ("missing", {"serviceAccountName": "missing"}, 'serviceaccount "missing" not found'),
        ("urgent", {"priorityClassName": "no-such-class"}, "no-such-class"),
    ],
)
def test_a_job_whose_pods_are_refused_reports_the_reason(
    cluster: KubectlCluster, namespace: str, name: str, pod: dict[str, str], message: str
) -> None:
    job = ClusterJob.apply(cluster, namespace, build_paced_job(name, LONG, pod=pod))

    def is_reported() -> bool:
        running = job.get_condition("Running")
        return running.get("reason") == "PodDenied" and message in running.get("message", "")

    job.wait_until(is_reported, REPORT_SECONDS, f"{name} reports that {message}")
    assert job.phase == "Pending"
    assert job.get_condition("ActionBlocked")["status"] == "True"
    assert not job.list_pods()
    job.delete()


def test_a_live_job_whose_new_pod_is_refused_reports_it_and_goes_on_once_it_is_admitted(
    cluster: KubectlCluster, namespace: str, live: ClusterJob
) -> None:
    live.wait_for_phase("Running", timeout=120)
    cluster.apply(ONE_POD, namespace)
    used = {"pods": "2"}
    wait_for(
        lambda: cluster.get("resourcequota", "one", namespace).get("status", {}).get("used") == used,
        timeout=120,
        what="the quota counts the two pods",
    )
    cluster.kubectl("delete", "pod", "live-w1-0", "-n", namespace, "--grace-period=1", "--wait=false")

    def is_reported() -> bool:
        blocked = live.get_condition("ActionBlocked")
        return blocked.get("reason") == "PodDenied" and "exceeded quota" in blocked.get("message", "")

    live.wait_until(lambda: len(live.list_pods()) == 1, 120, "the pod is gone")
    live.wait_until(is_reported, REPORT_SECONDS, "the job reports that its quota is exceeded")
    assert live.phase == "Recovering"
    live.wait_until(lambda: live.list_incident_names(), REPORT_SECONDS, "the incident is written all the same")
    assert [incident["spec"]["cause"] for incident in live.list_incidents()] == ["worker-lost"]

    cluster.kubectl("delete", "resourcequota", "one", "-n", namespace)
    live.wait_until_healed("worker-lost", timeout=120)
    live.wait_until(
        lambda: live.get_condition("ActionBlocked")["status"] == "False", REPORT_SECONDS, "nothing is blocked any more"
    )
    live.delete()
