"""A worker is lost, and the others go on with its samples while the next one starts."""

from __future__ import annotations

from typing import Any

import pytest

from testcluster.images import TRAINER_IMAGE
from testing.kubernetes.cluster import KubectlCluster
from testing.kubernetes.jobs import SAMPLES, STEPS_PER_EPOCH, ClusterJob, build_paced_job

pytestmark = pytest.mark.usefixtures("operator")

LONG = 100_000


def build_gated_job(name: str, **spec: Any) -> dict[str, Any]:
    """A job whose workers start as long as no file `open` lies on its volume."""
    mount = {"name": "gate", "mountPath": "/gate"}
    gate = {
        "name": "gate",
        "image": TRAINER_IMAGE,
        "imagePullPolicy": "Never",
        "command": ["sh", "-c", "until [ -e /gate/open ]; do sleep 0.1; done"],
        "volumeMounts": [mount],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    volume = {"name": "gate", "persistentVolumeClaim": {"claimName": name}}
    return build_paced_job(name, LONG, pod={"initContainers": [gate], "volumes": [volume]}, **spec)


def test_the_others_train_with_every_sample_while_a_new_worker_starts(cluster: KubectlCluster, namespace: str) -> None:
    job = ClusterJob.apply(cluster, namespace, build_gated_job("survivors", replicas=3, minReplicas=2))
    job.wait_until(lambda: len(job.list_nodes()) == 3 and all(job.list_nodes().values()), 120, "all are on nodes")
    gate = job.find_claim_folder() / "open"
    gate.touch()
    job.wait_until_calm()
    gate.unlink()
    known, lost = job.list_incident_names(), job.delete_worker(1)
    incident = job.wait_until_incident_ended("worker-lost", known)
    assert incident["spec"]["worker"] == lost
    assert len(job.read_plan()["members"]) == 2
    job.wait_for_more_steps(20)
    (starting,) = (pod for pod in job.list_pods() if pod["metadata"]["name"] not in str(job.read_plan()["members"]))
    assert starting["spec"]["nodeName"]
    assert starting["status"]["phase"] == "Pending"
    degraded = job.get_condition("Degraded")
    assert (degraded["reason"], job.get_condition("Ready")["status"]) == ("FewerReplicas", "True")
    assert "2 of 3 workers train, until others have started" in degraded["message"]

    gate.touch()
    job.wait_until(lambda: len(job.read_plan()["members"]) == 3, 120, "the new worker has been taken in")
    job.wait_for_more_steps(20)
    assert len(job.list_start_steps()) == 3, "one round without it, and one with it"
    job.wait_for_step(2 * STEPS_PER_EPOCH + 1)
    assert [sorted(used) for used in job.read_samples_by_epoch()[:2]] == [list(range(SAMPLES))] * 2
