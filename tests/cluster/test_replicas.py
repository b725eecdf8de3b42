"""Two operators, as they are installed: one leads, the other follows, and jobs do not notice."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator

import pytest

from testcluster import faults, release
from testing.kubernetes.cluster import KubectlCluster, scratch_namespace, wait_for
from testing.kubernetes.jobs import ClusterJob, build_paced_job

pytestmark = pytest.mark.usefixtures("operator")

LONG = 100_000  # steps: until the test ends it
FOLLOWED_SECONDS = 120.0
"""Only a limit: the scale bench measures takeovers."""


@pytest.fixture(scope="module")
def job(cluster: KubectlCluster) -> Iterator[ClusterJob]:
    with scratch_namespace(cluster) as namespace:
        yield ClusterJob.apply(cluster, namespace, build_paced_job("watched", LONG, spares=1))


@pytest.fixture
def calm(job: ClusterJob) -> ClusterJob:
    wait_for(are_two_ready, 120, "two operators are ready, and one leads")
    job.wait_until_calm(spares=1)
    return job


def test_both_replicas_are_ready_and_the_budget_admits_one_eviction(cluster: KubectlCluster) -> None:
    wait_for(are_two_ready, 120, "two operators are ready, and one leads")
    wait_for(lambda: read_allowed_disruptions(cluster) == 1, 120, "the budget has seen both")


@pytest.mark.parametrize("how", ["its process is killed", "its pod is removed", "it receives SIGTERM", "it is stopped"])
def test_a_standby_takes_over_from_a_lost_leader_while_the_job_trains(
    cluster: KubectlCluster, calm: ClusterJob, how: str
) -> None:
    known, membership, round_ = calm.list_incident_names(), calm.read_plan()["membership"], calm.status["round"]
    before = release.get_leader_name()
    undo = GOES[how](cluster, before)
    wait_for(lambda: has_new_leader(before, how), FOLLOWED_SECONDS, f"{before} is followed: {how}")
    calm.wait_for_step(calm.read_step() + 60, timeout=120)  # longer than silence would need to become an incident
    undo()
    wait_for(are_two_ready, 120, "the other stands by")
    if how != "its process is killed":  # whose next container is as good as another pod
        assert release.get_leader_name() != before
    assert (calm.read_plan()["membership"], calm.status["round"]) == (membership, round_)
    assert calm.list_incident_names() == known, "no worker was missed"
    calm.crash_rank(0)
    calm.wait_until_incident_ended("crash", known)


def remove_pod(cluster: KubectlCluster, pod: str) -> Callable[[], None]:
    cluster.kubectl("delete", "pod", pod, "-n", release.SYSTEM, "--force", "--grace-period=0")
    return lambda: None


def terminate_operator(cluster: KubectlCluster, pod: str) -> Callable[[], None]:
    cluster.kubectl("delete", "pod", pod, "-n", release.SYSTEM, "--wait=false")
    return lambda: None


def kill_operator(_cluster: KubectlCluster, pod: str) -> Callable[[], None]:
    faults.kill_container(release.SYSTEM, pod, "operator")
    return lambda: None


def freeze_operator(_cluster: KubectlCluster, pod: str) -> Callable[[], None]:
    """It resumes when another replica leads, and restarts as a standby."""
    pids, starts = faults.list_container_pids(release.SYSTEM, pod, "operator"), count_restarts(pod)
    for pid in pids:
        faults.signal_process(pid, signal.SIGSTOP)

    def wake() -> None:
        for pid in pids:
            faults.signal_process(pid, signal.SIGCONT)
        wait_for(lambda: count_restarts(pod) > starts, 120, f"{pod} starts again")

    return wake


GOES: dict[str, Callable[[KubectlCluster, str], Callable[[], None]]] = {
    "its process is killed": kill_operator,
    "its pod is removed": remove_pod,
    "it receives SIGTERM": terminate_operator,
    "it is stopped": freeze_operator,
}


def count_restarts(pod: str) -> int:
    """Of its container."""
    (found,) = (one for one in release.list_operator_pods() if one["metadata"]["name"] == pod)
    return int(found["status"]["containerStatuses"][0]["restartCount"])


def has_new_leader(before: str, how: str) -> bool:
    after = release.get_leader_name()
    return bool(after) and (after != before or how == "its process is killed")


def are_two_ready() -> bool:
    found = release.list_operator_pods()
    return len(found) == 2 and all(map(_is_ready, found)) and release.find_leading_pod() is not None


def _is_ready(pod: dict[str, object]) -> bool:
    status = pod["status"]
    assert isinstance(status, dict)
    return any(c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions", ()))


def read_allowed_disruptions(cluster: KubectlCluster) -> int:
    """Operators that a drain may take now."""
    budget = cluster.get("poddisruptionbudget", release.RELEASE, release.SYSTEM)
    return 0 if budget is None else int(budget.get("status", {}).get("disruptionsAllowed", 0))
