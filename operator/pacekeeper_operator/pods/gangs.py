"""Gang scheduling: pods that the cluster's scheduler places together or not at all, if it can. Pure.

Kubernetes 1.36 and later (alpha, feature gates GenericWorkload and GangScheduling): pods that name a PodGroup wait
until `minCount` of them exist and have room at the same time. Without it pods are placed one by one, and the operator
deletes all of them if some are not placed in time (`decide.placement.workforce`).
"""

from __future__ import annotations

from dataclasses import dataclass

from ..api.names import LABEL_JOB, Object
from ..api.training_job import TrainingJob
from .manifests import build_owner_reference

SCHEDULING_API_GROUP = "scheduling.k8s.io"
POD_GROUP_VERSIONS = ("v1alpha3", "v1alpha2")
"""Newest first. The fields used here are the same in both."""


@dataclass(frozen=True)
class Gang:
    """The pods of one attempt to place a job. A later replacement is placed alone, next to the existing pods."""

    size: int  # pods that are placed together; others, as spares, may come in addition
    attempt: int = 0  # number of failed attempts before this one


def build_pod_group(job: TrainingJob, gang: Gang, version: str) -> Object:
    """Build the job's PodGroup. A job has one at a time."""
    return {
        "apiVersion": f"{SCHEDULING_API_GROUP}/{version}",
        "kind": "PodGroup",
        "metadata": {
            "name": job.name,
            "namespace": job.namespace,
            "labels": {LABEL_JOB: job.name},
            "ownerReferences": [build_owner_reference(job)],
        },
        "spec": {"schedulingPolicy": {"gang": {"minCount": gang.size}}},
    }


def is_owned_by(pod_group: Object, job: TrainingJob) -> bool:
    """Return whether the PodGroup is this job's, and not another object of its name."""
    return any(owner["uid"] == job.uid for owner in pod_group["metadata"].get("ownerReferences", ()))


def is_current_pod_group(pod_group: Object, gang: Gang) -> bool:
    """Return whether the PodGroup still has the wanted size, which cannot be changed."""
    size = pod_group["spec"]["schedulingPolicy"].get("gang", {}).get("minCount")
    return "deletionTimestamp" not in pod_group["metadata"] and size == gang.size
