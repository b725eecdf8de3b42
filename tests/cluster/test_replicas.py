"""Two operators, as they are installed: one leads, the other follows, and jobs do not notice."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator

import pytest

from testcluster import faults, release
from tests.support.cluster import Cluster, scratch_namespace, wait_for
from tests.support.jobs import Job, paced

pytestmark = pytest.mark.usefixtures("operator")

LONG = 100_000  # steps: until the test ends it
FOLLOWED_SECONDS = 30.0
"""Beyond which nobody follows any more; how soon it is the bench of scale measures."""


@pytest.fixture(scope="module")
def job(cluster: Cluster) -> Iterator[Job]:
    with scratch_namespace(cluster) as namespace:
        yield Job.apply(cluster, namespace, paced("watched", LONG, spares=1))


@pytest.fixture
def calm(job: Job) -> Job:
    wait_for(two_are_ready, 90, "two operators are ready, and one leads")
    job.until_calm(spares=1)
    return job


def test_both_are_ready_and_the_budget_lets_one_go(cluster: Cluster) -> None:
    wait_for(two_are_ready, 90, "two operators are ready, and one leads")
    wait_for(lambda: allowed(cluster) == 1, 30, "the budget has seen both")


@pytest.mark.parametrize("how", ["its process is killed", "its pod is removed", "it is told to end", "it is frozen"])
def test_a_leader_that_goes_is_followed_while_the_job_trains_on(cluster: Cluster, calm: Job, how: str) -> None:
    known, membership, round_ = calm.incident_names(), calm.plan()["membership"], calm.status["round"]
    before = release.leader()
    heal = GOES[how](cluster, before)
    wait_for(lambda: leads_anew(before, how), FOLLOWED_SECONDS, f"{before} is followed: {how}")
    calm.until_step(calm.step() + 60, timeout=120)  # longer than silence would need to become an incident
    heal()
    wait_for(two_are_ready, 90, "the other stands by")
    if how != "its process is killed":  # whose next container is as good as another pod
        assert release.leader() != before
    assert (calm.plan()["membership"], calm.status["round"]) == (membership, round_)
    assert calm.incident_names() == known, "nobody was missed"
    calm.crash(0)
    calm.until_over("crash", known)


def removed(cluster: Cluster, pod: str) -> Callable[[], None]:
    cluster.kubectl("delete", "pod", pod, "-n", release.SYSTEM, "--force", "--grace-period=0")
    return lambda: None


def told_to_end(cluster: Cluster, pod: str) -> Callable[[], None]:
    cluster.kubectl("delete", "pod", pod, "-n", release.SYSTEM, "--wait=false")
    return lambda: None


def killed(_cluster: Cluster, pod: str) -> Callable[[], None]:
    faults.kill_container(release.SYSTEM, pod, "operator")
    return lambda: None


def frozen(_cluster: Cluster, pod: str) -> Callable[[], None]:
    """It wakes up in a world that has gone on, and starts anew to stand by."""
    pids, starts = faults.container_pids(release.SYSTEM, pod, "operator"), restarts(pod)
    for pid in pids:
        faults.signal_process(pid, signal.SIGSTOP)

    def wake() -> None:
        for pid in pids:
            faults.signal_process(pid, signal.SIGCONT)
        wait_for(lambda: restarts(pod) > starts, 60, f"{pod} starts anew")

    return wake


GOES: dict[str, Callable[[Cluster, str], Callable[[], None]]] = {
    "its process is killed": killed,
    "its pod is removed": removed,
    "it is told to end": told_to_end,
    "it is frozen": frozen,
}


def restarts(pod: str) -> int:
    """Of its container."""
    (found,) = (one for one in release.pods() if one["metadata"]["name"] == pod)
    return int(found["status"]["containerStatuses"][0]["restartCount"])


def leads_anew(before: str, how: str) -> bool:
    after = release.leader()
    return bool(after) and (after != before or how == "its process is killed")


def two_are_ready() -> bool:
    found = release.pods()
    return len(found) == 2 and all(map(_ready, found)) and release.leading_pod() is not None


def _ready(pod: dict[str, object]) -> bool:
    status = pod["status"]
    assert isinstance(status, dict)
    return any(c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions", ()))


def allowed(cluster: Cluster) -> int:
    """Operators that a drain may take now."""
    budget = cluster.get("poddisruptionbudget", release.RELEASE, release.SYSTEM)
    return 0 if budget is None else int(budget.get("status", {}).get("disruptionsAllowed", 0))
