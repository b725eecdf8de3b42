"""A worker is lost, and the others go on with its samples while the next one starts."""

from __future__ import annotations

from typing import Any

import pytest

from testcluster.images import TRAINER_IMAGE
from tests.support.cluster import Cluster
from tests.support.jobs import SAMPLES, STEPS_OF_AN_EPOCH, Job, paced

pytestmark = pytest.mark.usefixtures("operator")

LONG = 100_000


def gated(name: str, **spec: Any) -> dict[str, Any]:
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
    return paced(name, LONG, pod={"initContainers": [gate], "volumes": [volume]}, **spec)


def test_the_others_train_with_every_sample_while_a_new_worker_starts(cluster: Cluster, namespace: str) -> None:
    job = Job.apply(cluster, namespace, gated("survivors", replicas=3, minReplicas=2))
    job.until(lambda: len(job.nodes()) == 3 and all(job.nodes().values()), 60, "all are on nodes")
    gate = job.claimed() / "open"
    gate.touch()
    job.until_calm()
    gate.unlink()
    known, lost = job.incident_names(), job.delete_worker(1)
    incident = job.until_over("worker-lost", known)
    assert incident["spec"]["worker"] == lost
    assert len(job.plan()["members"]) == 2
    job.until_trained_on(20)
    (starting,) = (pod for pod in job.pods() if pod["metadata"]["name"] not in str(job.plan()["members"]))
    assert starting["spec"]["nodeName"]
    assert starting["status"]["phase"] == "Pending"
    degraded = job.condition("Degraded")
    assert (degraded["reason"], job.condition("Ready")["status"]) == ("FewerReplicas", "True")
    assert "2 of 3 workers train, until others have started" in degraded["message"]

    gate.touch()
    job.until(lambda: len(job.plan()["members"]) == 3, 60, "the new worker has been taken in")
    job.until_trained_on(20)
    assert len(job.began_behind()) == 3, "one round without it, and one with it"
    job.until_step(2 * STEPS_OF_AN_EPOCH + 1)
    assert [sorted(used) for used in job.samples_by_epoch()[:2]] == [list(range(SAMPLES))] * 2
