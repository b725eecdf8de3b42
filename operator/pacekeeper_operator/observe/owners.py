"""The owner of a watched pod: the outermost object that controls it. Pure: objects that have been read are arguments.

Labels name the owner of most pods. Other pods are followed from controller to controller. An object of a kind that the
operator may not read counts as the outermost one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..api.watched_job import RootRef

LABELED_OWNERS = (
    ("jobset.sigs.k8s.io/jobset-name", "jobset.x-k8s.io/v1alpha2", "JobSet"),
    ("leaderworkerset.sigs.k8s.io/name", "leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"),
    ("ray.io/cluster", "ray.io/v1", "RayCluster"),
    ("volcano.sh/job-name", "batch.volcano.sh/v1alpha1", "Job"),
    ("training.kubeflow.org/job-name", "kubeflow.org/v1", ""),
)
"""Labels that name a pod's owner, with its apiVersion and kind. Kind "": that of the pod's controller."""
READABLE_KINDS: Mapping[tuple[str, str], str] = {
    ("batch", "Job"): "jobs",
    ("jobset.x-k8s.io", "JobSet"): "jobsets",
    ("trainer.kubeflow.org", "TrainJob"): "trainjobs",
    ("kubeflow.org", "PyTorchJob"): "pytorchjobs",
    ("kubeflow.org", "MPIJob"): "mpijobs",
    ("batch.volcano.sh", "Job"): "jobs",
    ("ray.io", "RayCluster"): "rayclusters",
}
"""Group and kind of the objects whose metadata the operator may read, with their plurals (the chart's RBAC)."""
MAX_OWNER_LEVELS = 8
"""Controllers that are followed upward, at most: a tenant's objects might form a circle."""


@dataclass(frozen=True)
class OwnedMetadata:
    """The part of an object's metadata that shows its owner."""

    uid: str
    controller: RootRef | None = None  # None: nothing controls it
    owner_labels: tuple[tuple[str, str], ...] = ()  # those of LABELED_OWNERS


@dataclass(frozen=True)
class UnreadOwner:
    """An owner whose metadata has to be read next."""

    owner: RootRef


ReadOwners = Mapping[RootRef, OwnedMetadata | None]
"""Objects that have been read. None: it does not exist."""


def find_root(pod: OwnedMetadata, read: ReadOwners) -> RootRef | UnreadOwner | None:
    """Return the pod's outermost owner, or what has to be read to find it; None: nothing controls the pod."""
    labeled = _find_labeled_owner(pod)
    if labeled is not None:
        found = _climb_owners(labeled, read)
        if found is not None:
            return found
    return None if pod.controller is None else _climb_owners(pod.controller, read) or pod.controller


def parse_owned_metadata(metadata: Mapping[str, Any]) -> OwnedMetadata:
    """Parse an object's metadata."""
    labels = metadata.get("labels") or {}
    controllers = (owner for owner in metadata.get("ownerReferences") or () if owner.get("controller"))
    controller = next(controllers, None)
    return OwnedMetadata(
        uid=metadata.get("uid", ""),
        controller=None
        if controller is None
        else RootRef(controller["kind"], controller["name"], controller["apiVersion"], controller["uid"]),
        owner_labels=tuple((label, labels[label]) for label, _, _ in LABELED_OWNERS if labels.get(label)),
    )


def is_readable(owner: RootRef) -> bool:
    """Return whether the operator may read the owner's metadata."""
    return (owner.api_version.partition("/")[0], owner.kind) in READABLE_KINDS


def _find_labeled_owner(pod: OwnedMetadata) -> RootRef | None:
    """Return the owner that a label names, without its UID; None: none does."""
    values = dict(pod.owner_labels)
    for label, api_version, kind in LABELED_OWNERS:
        if label in values:
            kind = kind or ("" if pod.controller is None else pod.controller.kind)
            return RootRef(kind, values[label], api_version) if kind else None
    return None


def _climb_owners(owner: RootRef, read: ReadOwners) -> RootRef | UnreadOwner | None:
    """Return the outermost owner above `owner`, or what to read next; None: `owner` does not exist.

    A controller that is gone is still the outermost owner: its name and UID are known from below.
    """
    level = owner
    for _ in range(MAX_OWNER_LEVELS):
        if not is_readable(level):
            return level
        if level not in read:
            return UnreadOwner(level)
        metadata = read[level]
        if metadata is None:
            return level if level.uid else None
        level = RootRef(level.kind, level.name, level.api_version, metadata.uid)
        if metadata.controller is None:
            return level
        level = metadata.controller
    return level
