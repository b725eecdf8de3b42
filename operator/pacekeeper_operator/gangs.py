"""Pods that the cluster's scheduler places together or not at all, where it can do so. Pure.

Kubernetes 1.36 and later (alpha, feature gates GenericWorkload and GangScheduling): pods that name a PodGroup wait
until `minCount` of them are there and have room at the same time. Without it pods are placed one by one, and the
operator takes all back where some are not placed in time (`decide.workforce`).
"""

from __future__ import annotations

from dataclasses import dataclass

from .api import LABEL_JOB, TrainingJob, Object
from .manifests import build_owner_reference

SCHEDULING_API_GROUP = "scheduling.k8s.io"
POD_GROUP_VERSIONS = ("v1alpha3", "v1alpha2")
"""Newest first. What is used of them here is the same in both."""


@dataclass(frozen=True)
class Gang:
    """The pods of an attempt to place a job. Who is replaced later is placed alone, beside those that are there."""

    size: int  # pods that are placed together; further ones, as spares, may come besides
    attempt: int = 0  # that have failed before


def build_pod_group(job: TrainingJob, gang: Gang, version: str) -> Object:
    """A job has one at a time."""
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


def is_owned_by(found: Object, job: TrainingJob) -> bool:
    """Whether the PodGroup is this job's, not somebody's who likes its name."""
    return any(owner["uid"] == job.uid for owner in found["metadata"].get("ownerReferences", ()))


def is_current_pod_group(found: Object, gang: Gang) -> bool:
    """Whether the PodGroup is still the one that is wanted: its size cannot be changed."""
    size = found["spec"]["schedulingPolicy"].get("gang", {}).get("minCount")
    return "deletionTimestamp" not in found["metadata"] and size == gang.size
