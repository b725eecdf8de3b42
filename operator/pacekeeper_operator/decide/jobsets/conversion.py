"""The TrainingJob of a JobSet.

Kueue admits the JobSet, not the TrainingJob: it holds the JobSet by `spec.suspend`, and adds labels of nodes,
tolerations, labels, annotations, and scheduling gates to the pod templates of a JobSet that it admits. These fields,
the placement, may change while the JobSet is suspended.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from typing import Any

from ...api.jobset import JOBSET_API_VERSION, JOBSET_KIND
from ...api.names import ANNOTATION_TRAINER, GROUP, Object
from ...api.training_job import MAX_JOB_NAME
from ...convert.draft import Conversion, ConversionRefused, NoteKind
from ...convert.objects import convert_object
from ...pods.queues import ANNOTATION_DIGEST, KUEUE

PLACEMENT_FIELDS = (
    ("metadata", "labels"),
    ("metadata", "annotations"),
    ("spec", "nodeSelector"),
    ("spec", "tolerations"),
    ("spec", "schedulingGates"),
)
"""The fields of a pod template that may change while its job is suspended."""
_NODE_FIELDS = ("nodeSelector", "tolerations")
_DROPPED_PREFIXES = (f"{GROUP}/", f"{KUEUE}/", "kubectl.kubernetes.io/")
"""Prefixes of labels and annotations that are the JobSet's alone. A TrainingJob with a queue would be queued, too."""
_REPLICATED_JOB = re.compile(r"spec\.replicatedJobs\[[^\]]*\]")


def convert_managed_jobset(body: Object) -> Conversion:
    """Return the TrainingJob of the JobSet, which owns it. The notes say what has no counterpart.

    Raises ConversionRefused, which names the field and the remedy.
    """
    metadata = body["metadata"]
    container = str((metadata.get("annotations") or {}).get(ANNOTATION_TRAINER, ""))
    try:
        conversion = convert_object(_select_fields(body), container=container)
    except ConversionRefused as error:
        remedy = f"by the annotation {ANNOTATION_TRAINER} of the JobSet"
        raise ConversionRefused(str(error).replace("by --container", remedy)) from error
    _require_all_parts(body, conversion)
    job = conversion.job
    job["metadata"] |= {
        "annotations": {**job["metadata"].get("annotations", {}), ANNOTATION_DIGEST: join_digests(body)},
        "ownerReferences": [_build_owner_reference(metadata)],
    }
    return conversion


def describe_losses(conversion: Conversion) -> str:
    """Return what of the JobSet has no counterpart in its TrainingJob."""
    notes = [
        f"{', '.join(note.fields)}: {note.text}"
        for note in conversion.notes
        if note.kind is NoteKind.NO_COUNTERPART and not note.fields[0].endswith(".groupName")
    ]
    return "; ".join(notes)


def is_convertible_elsewhere(body: Object) -> bool:
    """Return whether the JobSet can be converted but for its placement, which Kueue may have set."""
    other = {**body, "spec": copy.deepcopy(body["spec"])}
    _take_placement(other["spec"])
    try:
        convert_managed_jobset(other)
    except ConversionRefused:
        return False
    return True


def compute_digests(body: Object) -> tuple[str, str]:
    """Return the digests of the JobSet's placement, and of the rest of its spec, which may not change.

    They are of what the user and Kueue have written: another version of the operator may convert it differently, which
    must not restart a job.
    """
    spec = copy.deepcopy(body["spec"])
    placement = _take_placement(spec)
    for name in ("suspend", "ttlSecondsAfterFinished"):
        spec.pop(name, None)
    return _compute_digest(placement), _compute_digest(spec)


def join_digests(body: Object, fixed: str = "") -> str:
    """Return the annotation's value. `fixed`: of the spec that the TrainingJob was made from; "": the present one."""
    placement, present = compute_digests(body)
    return f"{placement}-{fixed or present}"


def read_digests(job: Object) -> tuple[str, str]:
    """Return the digests that a TrainingJob was made from; "": unknown."""
    text = str((job["metadata"].get("annotations") or {}).get(ANNOTATION_DIGEST, ""))
    placement, _, fixed = text.partition("-")
    return placement, fixed


def _select_fields(body: Object) -> Object:
    """Return the JobSet without what belongs to it alone."""
    metadata = body["metadata"]
    entries = {
        kind: {name: value for name, value in metadata[kind].items() if not name.startswith(_DROPPED_PREFIXES)}
        for kind in ("labels", "annotations")
        if metadata.get(kind)
    }
    spec = {name: value for name, value in body["spec"].items() if name not in ("managedBy", "ttlSecondsAfterFinished")}
    identity = {name: metadata[name] for name in ("name", "namespace")}
    return {"apiVersion": JOBSET_API_VERSION, "kind": JOBSET_KIND, "metadata": {**identity, **entries}, "spec": spec}


def _require_all_parts(body: Object, conversion: Conversion) -> None:
    """Raise ConversionRefused if the TrainingJob would lack a part of the JobSet that its ranks may need."""
    name = body["metadata"]["name"]
    if conversion.job["metadata"]["name"] != name:
        raise ConversionRefused(
            f"metadata.name: {name} must have 1 to {MAX_JOB_NAME} characters a-z, 0-9 and -, and start with a letter, "
            "as a TrainingJob's; choose another name"
        )
    if body["spec"].get("volumeClaimPolicies"):
        raise ConversionRefused(
            "spec.volumeClaimPolicies: the operator creates no claims; create them, name them in spec.volumes of the "
            "pod template, and remove the policies"
        )
    for note in conversion.notes:
        left_out = [field for field in note.fields if _REPLICATED_JOB.fullmatch(field)]
        if left_out and note.kind is NoteKind.NO_COUNTERPART:
            raise ConversionRefused(
                f"{left_out[0]}: has no ranks, and a TrainingJob has only workers with ranks; run it as a Job before, "
                "or leave out managedBy"
            )
    _require_one_placement(body["spec"]["replicatedJobs"])


def _require_one_placement(replicated_jobs: list[Object]) -> None:
    pods = {job["name"]: _get_pod_template(job).get("spec") or {} for job in replicated_jobs}
    (first, one), *others = pods.items()
    for name, other in others:
        differing = [field for field in _NODE_FIELDS if (one.get(field) or None) != (other.get(field) or None)]
        if differing:
            raise ConversionRefused(
                f"spec.replicatedJobs: {first} and {name} differ in {', '.join(differing)} of their pods, but workers "
                "of a TrainingJob have one template; give them the same, or a queue whose flavors admit both alike"
            )


def _take_placement(spec: Object) -> list[Any]:
    """Take the placement out of a JobSet's spec, which changes."""
    placement = []
    for job in spec.get("replicatedJobs") or ():
        template = _get_pod_template(job)
        placement.append([(template.get(parent) or {}).get(name) or None for parent, name in PLACEMENT_FIELDS])
        template.pop("metadata", None)
        for parent, name in PLACEMENT_FIELDS:
            (template.get(parent) or {}).pop(name, None)
    return placement


def _get_pod_template(replicated_job: Object) -> Object:
    job = (replicated_job.get("template") or {}).get("spec") or {}
    return job.get("template") or {}


def _compute_digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _build_owner_reference(metadata: Object) -> Object:
    """Return the reference to the JobSet. It does not block the deletion, for which the operator would need a right."""
    return {
        "apiVersion": JOBSET_API_VERSION,
        "kind": JOBSET_KIND,
        "name": metadata["name"],
        "uid": metadata["uid"],
        "controller": True,
        "blockOwnerDeletion": False,
    }
