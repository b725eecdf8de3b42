"""JobSets that the operator runs, for tests."""

from __future__ import annotations

from typing import Any

from pacekeeper_operator.api.names import DEFAULT_MANAGER, Object

JOBSET_NAME, JOBSET_UID = "train", "uid-of-jobset"


def build_pod_template(**pod: Any) -> Object:
    container = {"name": "pytorch", "image": "i", "command": ["torchrun", "t.py"]}
    return {"metadata": {}, "spec": {"restartPolicy": "Never", "containers": [container], **pod}}


def build_replicated_job(name: str, replicas: int = 1, pods: int = 2, **pod: Any) -> Object:
    spec = {"parallelism": pods, "completions": pods, "template": build_pod_template(**pod)}
    return {"name": name, "groupName": "default", "replicas": replicas, "template": {"metadata": {}, "spec": spec}}


def build_managed_jobset(*jobs: Object, name: str = JOBSET_NAME, queue: str = "", **spec: Any) -> Object:
    """Return a JobSet as the API server stores it."""
    metadata: Object = {"name": name, "namespace": "ns", "uid": JOBSET_UID, "generation": 1, "resourceVersion": "1"}
    if queue:
        metadata["labels"] = {"kueue.x-k8s.io/queue-name": queue, "kueue.x-k8s.io/priority-class": "high"}
    replicated = list(jobs) or [build_replicated_job("node")]
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {"managedBy": DEFAULT_MANAGER, "replicatedJobs": replicated, **spec},
    }
