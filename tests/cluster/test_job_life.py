"""A job from its manifest to its end, on a real cluster: what a user meets on the first day."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.cluster import Cluster, wait_for
from tests.support.jobs import claim, manifest, submit
from tests.support.operators import OperatorProcess, log_file, running

pytestmark = pytest.mark.usefixtures("resources", "operator")


@pytest.fixture(scope="module")
def operator(cluster: Cluster, resources: None) -> Iterator[OperatorProcess]:  # noqa: ARG001  # the kinds must exist
    with running(cluster, log_file()) as operator:
        yield operator


def test_it_trains_completes_and_leaves_nothing_behind(
    cluster: Cluster, namespace: str, operator: OperatorProcess
) -> None:
    job = submit(cluster, namespace, manifest("small", spares=1, steps=60))
    job.wait_for_phase("Complete")
    status = job.status()
    assert status["step"] == 60
    assert job.condition("Complete")["status"] == "True"
    assert not job.incidents()
    # Ended pods stay for their logs, the spare that still runs does not.
    wait_for(lambda: len(job.pods()) == 2, timeout=40, what="the spare is gone")
    cluster.kubectl("delete", "trainingjob", "small", "-n", namespace, "--timeout=40s")
    assert not job.pods()
    wait_for(lambda: cluster.get("configmap", "small-plan", namespace) is None, timeout=20, what="the plan is gone")
    assert operator.alive()
    assert "pacekeeper_reconcile_seconds_count" in operator.metrics()


def test_suspend_and_resume_go_on_from_the_checkpoint(cluster: Cluster, namespace: str) -> None:
    cluster.apply(claim("work"), namespace)
    checkpoint = {"path": "/checkpoints", "everySteps": 1000, "volumeClaimName": "work"}
    job = submit(cluster, namespace, manifest("pausing", steps=100_000, checkpoint=checkpoint))
    job.wait_for_phase("Running")
    job.patch({"suspend": True})
    wait_for(lambda: job.condition("Suspended")["status"] == "True", timeout=60, what="the job is suspended")
    assert not job.pods()
    saved = job.status()["lastCheckpointStep"]
    assert saved > 0
    job.patch({"suspend": False})
    job.wait_for_phase("Running")
    assert job.status()["step"] >= saved
    assert job.status()["round"] > 1
    assert job.status()["restarts"] == 0


def test_a_template_that_the_api_server_refuses_is_said_in_its_words(cluster: Cluster, namespace: str) -> None:
    job = submit(cluster, namespace, manifest("refused", container={"imagePullPolicy": "Sometimes"}))
    wait_for(lambda: job.condition("InvalidTemplate")["status"] == "True", timeout=20, what="InvalidTemplate")
    assert "imagePullPolicy" in job.condition("InvalidTemplate")["message"]
    assert not job.pods()


def test_an_image_that_cannot_be_pulled_fails_the_job_after_a_while(cluster: Cluster, namespace: str) -> None:
    missing = {"image": "nowhere.invalid/none:1", "imagePullPolicy": "IfNotPresent"}
    job = submit(cluster, namespace, manifest("pull", schedulingTimeout="10s", container=missing))
    wait_for(lambda: job.condition("Running").get("reason") == "ImagePullFailed", timeout=30, what="the reason is said")
    job.wait_for_phase("Failed", 40)
    assert "nowhere.invalid/none:1" in job.status()["message"]


def test_a_script_that_fails_at_once_fails_the_job_with_its_last_lines(cluster: Cluster, namespace: str) -> None:
    script = ["python", "-m", "pacekeeper.cli", "run", "examples/gpt.py", "--steps", "many"]
    job = submit(cluster, namespace, manifest("typo", command=script))
    job.wait_for_phase("Failed")
    assert job.status()["reason"] == "ScriptFailed"
    assert "invalid int value: 'many'" in job.status()["message"]


def test_a_command_that_does_not_exist_fails_the_job(cluster: Cluster, namespace: str) -> None:
    job = submit(cluster, namespace, manifest("command", command=["false"]))
    job.wait_for_phase("Failed")
    assert job.status()["reason"] == "ScriptFailed"


def test_of_two_jobs_that_do_not_both_fit_the_older_one_goes_first(cluster: Cluster, namespace: str) -> None:
    half = {"resources": {"requests": {"cpu": "20m", "memory": "13Gi"}}}
    first = submit(cluster, namespace, manifest("first", replicas=4, steps=100_000, container=half))
    first.wait_for_phase("Running")
    second = submit(
        cluster, namespace, manifest("second", replicas=4, steps=10, schedulingTimeout="10s", container=half)
    )
    wait_for(
        lambda: second.condition("Running").get("reason") == "SchedulingTimeout",
        timeout=40,
        what="it gives up its pods",
    )
    wait_for(lambda: not second.pods(), timeout=30, what="no pod of a job that cannot begin holds a place")
    assert first.phase() == "Running"
    cluster.kubectl("delete", "trainingjob", "first", "-n", namespace, "--timeout=60s")
    second.wait_for_phase("Complete")


def test_scaling_grows_and_shrinks_a_running_job(cluster: Cluster, namespace: str) -> None:
    job = submit(cluster, namespace, manifest("elastic", steps=100_000))
    job.wait_for_phase("Running")
    for replicas in (3, 2):
        cluster.kubectl("scale", "trainingjob", "elastic", "-n", namespace, f"--replicas={replicas}")
        wait_for(lambda n=replicas: len(job.plan()["members"]) == n, timeout=90, what=f"{replicas} members")  # type: ignore[misc]
        job.wait_until_calm()
    assert job.status()["restarts"] == 0
    assert not job.incidents()
