"""What the API server refuses is said in its own words: by jobs that cannot begin, and by one that cannot be healed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.cluster import Cluster, scratch_namespace, wait_for
from tests.support.jobs import Job, paced
from tests.support.operator_process import OperatorProcess

pytestmark = pytest.mark.usefixtures("resources")

SAID_SECONDS = 5
LONG = 100_000  # steps: until the tests end it
ONE_POD: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "ResourceQuota",
    "metadata": {"name": "one"},
    "spec": {"hard": {"pods": "1"}},
}


@pytest.fixture(scope="module")
def namespace(cluster: Cluster, operator_process: OperatorProcess) -> Iterator[str]:  # noqa: ARG001  # it serves the jobs
    with scratch_namespace(cluster) as name:
        yield name


@pytest.fixture(scope="module")
def live(cluster: Cluster, namespace: str) -> Job:
    """Applied first, so that it starts while the others are refused."""
    return Job.apply(cluster, namespace, paced("live", LONG))


@pytest.mark.usefixtures("live")
@pytest.mark.parametrize(
    ("name", "pod", "words"),
    [
        ("nobody", {"serviceAccountName": "nobody"}, 'serviceaccount "nobody" not found'),
        ("urgent", {"priorityClassName": "no-such-class"}, "no-such-class"),
    ],
)
def test_a_job_that_cannot_have_pods_says_why(
    cluster: Cluster, namespace: str, name: str, pod: dict[str, str], words: str
) -> None:
    job = Job.apply(cluster, namespace, paced(name, LONG, pod=pod))

    def told() -> bool:
        running = job.condition("Running")
        return running.get("reason") == "PodDenied" and words in running.get("message", "")

    job.until(told, SAID_SECONDS, f"{name} says that {words}")
    assert job.phase == "Pending"
    assert job.condition("Hindered")["status"] == "True"
    assert not job.pods()
    job.delete()


def test_a_live_job_that_may_not_have_another_pod_says_so_and_goes_on_once_it_may(
    cluster: Cluster, namespace: str, live: Job
) -> None:
    live.until_phase("Running", timeout=60)
    cluster.apply(ONE_POD, namespace)
    used = {"pods": "2"}
    wait_for(
        lambda: cluster.get("resourcequota", "one", namespace).get("status", {}).get("used") == used,
        timeout=20,
        what="the quota counts the two pods",
    )
    cluster.kubectl("delete", "pod", "live-w1-0", "-n", namespace, "--grace-period=1", "--wait=false")

    def told() -> bool:
        hindered = live.condition("Hindered")
        return hindered.get("reason") == "PodDenied" and "exceeded quota" in hindered.get("message", "")

    live.until(lambda: len(live.pods()) == 1, 15, "the pod is gone")
    live.until(told, SAID_SECONDS, "the job says that its quota is exceeded")
    assert live.phase == "Recovering"
    live.until(lambda: live.incident_names(), SAID_SECONDS, "the incident is written all the same")
    assert [incident["spec"]["cause"] for incident in live.incidents()] == ["worker-lost"]

    cluster.kubectl("delete", "resourcequota", "one", "-n", namespace)
    live.until_healed("worker-lost", timeout=60)
    live.until(lambda: live.condition("Hindered")["status"] == "False", SAID_SECONDS, "nothing is hindered any more")
    live.delete()
