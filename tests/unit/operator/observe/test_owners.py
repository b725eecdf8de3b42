"""Which object owns a watched pod: by labels, and from controller to controller."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from pacekeeper_operator.api.watched_job import RootRef
from pacekeeper_operator.observe.owners import (
    MAX_OWNER_LEVELS,
    OwnedMetadata,
    UnreadOwner,
    find_root,
    parse_owned_metadata,
)

JOB = RootRef("Job", "train", "batch/v1", "job-uid")
JOBSET = RootRef("JobSet", "train", "jobset.x-k8s.io/v1alpha2", "set-uid")
TRAINJOB = RootRef("TrainJob", "train", "trainer.kubeflow.org/v1alpha1", "trainjob-uid")
PYTORCHJOB = RootRef("PyTorchJob", "train", "kubeflow.org/v1", "pytorch-uid")
MPIJOB = RootRef("MPIJob", "train", "kubeflow.org/v2beta1", "mpi-uid")
VOLCANO = RootRef("Job", "train", "batch.volcano.sh/v1alpha1", "volcano-uid")
RAY = RootRef("RayCluster", "train", "ray.io/v1", "ray-uid")
RAYJOB = RootRef("RayJob", "train", "ray.io/v1", "rayjob-uid")
STATEFULSET = RootRef("StatefulSet", "train", "apps/v1", "stateful-uid")
UNKNOWN = RootRef("Notebook", "train", "example.com/v1", "notebook-uid")


def build_metadata(controller: RootRef | None, labels: Mapping[str, str] = {}, uid: str = "uid") -> dict[str, Any]:
    owners = [
        {"kind": "ConfigMap", "name": "c", "apiVersion": "v1", "uid": "c"},  # an owner that does not control it
        *(
            []
            if controller is None
            else [
                {
                    "kind": controller.kind,
                    "name": controller.name,
                    "apiVersion": controller.api_version,
                    "uid": controller.uid,
                    "controller": True,
                }
            ]
        ),
    ]
    return {"uid": uid, "labels": dict(labels), "ownerReferences": owners}


def climb(pod: OwnedMetadata, objects: Mapping[RootRef, RootRef | None]) -> RootRef | None:
    """Read what is needed. `objects`: the controller of each object that exists, None: it has none."""
    read: dict[RootRef, OwnedMetadata | None] = {}
    by_name = {(ref.api_version, ref.kind, ref.name): ref for ref in objects}
    for _ in range(2 * MAX_OWNER_LEVELS):
        found = find_root(pod, read)
        if not isinstance(found, UnreadOwner):
            return found
        key = found.owner.api_version, found.owner.kind, found.owner.name
        ref = by_name.get(key)
        read[found.owner] = None if ref is None else parse_owned_metadata(build_metadata(objects[ref], uid=ref.uid))
    raise AssertionError("no end")


@pytest.mark.parametrize(
    ("labels", "controller", "objects", "root"),
    [
        ({}, JOB, {JOB: None}, JOB),
        ({"jobset.sigs.k8s.io/jobset-name": "train"}, JOB, {JOB: JOBSET, JOBSET: None}, JOBSET),
        ({"jobset.sigs.k8s.io/jobset-name": "train"}, JOB, {JOB: JOBSET, JOBSET: TRAINJOB, TRAINJOB: None}, TRAINJOB),
        ({}, JOB, {JOB: JOBSET, JOBSET: None}, JOBSET),
        ({"jobset.sigs.k8s.io/jobset-name": "other"}, JOB, {JOB: None}, JOB),
        ({"training.kubeflow.org/job-name": "train"}, PYTORCHJOB, {PYTORCHJOB: None}, PYTORCHJOB),
        ({"training.kubeflow.org/job-name": "train"}, MPIJOB, {MPIJOB: None}, MPIJOB),
        ({"volcano.sh/job-name": "train"}, VOLCANO, {VOLCANO: None}, VOLCANO),
        ({"ray.io/cluster": "train"}, RAY, {RAY: None}, RAY),
        ({"ray.io/cluster": "train"}, RAY, {RAY: RAYJOB}, RAYJOB),
        (
            {"leaderworkerset.sigs.k8s.io/name": "train"},
            STATEFULSET,
            {},
            RootRef("LeaderWorkerSet", "train", "leaderworkerset.x-k8s.io/v1"),
        ),
        ({}, STATEFULSET, {}, STATEFULSET),
        ({}, UNKNOWN, {}, UNKNOWN),
        ({}, JOB, {}, JOB),
        ({}, None, {}, None),
    ],
    ids=[
        *("Job", "JobSet", "TrainJob", "JobSet without a label", "a label of a JobSet that does not exist"),
        *("PyTorchJob", "MPIJob", "Volcano", "RayCluster", "RayJob", "LeaderWorkerSet", "StatefulSet"),
        *("an unknown kind", "a Job that is gone", "no controller"),
    ],
)
def test_the_root_is_the_outermost_owner(
    labels: Mapping[str, str],
    controller: RootRef | None,
    objects: Mapping[RootRef, RootRef | None],
    root: RootRef | None,
) -> None:
    assert climb(parse_owned_metadata(build_metadata(controller, labels)), objects) == root


def test_owners_that_control_each_other_end_somewhere() -> None:
    first, second = JOB, RootRef("Job", "other", "batch/v1", "other-uid")
    assert climb(parse_owned_metadata(build_metadata(first)), {first: second, second: first}) in (first, second)
