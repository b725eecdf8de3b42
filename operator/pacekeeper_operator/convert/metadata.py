"""Name, labels, and annotations of the TrainingJob."""

from __future__ import annotations

import re

from ..api.names import GROUP, LABEL_PREBUILT, LABEL_QUEUE
from ..api.training_job import MAX_JOB_NAME
from .draft import ConversionRefused, Draft
from .fields import SourceFields, check_type

_JOB_NAME = re.compile(r"[a-z](?:[a-z0-9-]*[a-z0-9])?")
_SERVER_FIELDS = (
    *("uid", "resourceVersion", "generation", "creationTimestamp", "deletionTimestamp", "selfLink"),
    *("deletionGracePeriodSeconds", "managedFields", "ownerReferences", "finalizers"),
)
_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
_CONTROLLER_PREFIXES = (
    "batch.kubernetes.io/",
    "jobset.sigs.k8s.io/",
    "training.kubeflow.org/",
    "trainer.kubeflow.org/",
)
_CONTROLLER_KEYS = ("controller-uid", "job-name", _LAST_APPLIED, LABEL_PREBUILT)


def convert_metadata(draft: Draft, metadata: SourceFields) -> None:
    """Set the metadata.

    Raises ConversionRefused if there is no name.
    """
    name, prefix = metadata.take_text("name"), metadata.take_text("generateName")
    if not name and not prefix:
        raise ConversionRefused("metadata.name: is missing; give the job a name")
    draft.metadata["name"] = _convert_name(draft, name or prefix.rstrip("-"), "name" if name else "generateName")
    if name and prefix:
        draft.note_no_counterpart("the job has a name", "metadata.generateName")
    if namespace := metadata.take_text("namespace"):
        draft.metadata["namespace"] = namespace
        draft.note_taken(namespace, "metadata.namespace")
    for kind in ("labels", "annotations"):
        convert_labels(draft, metadata.take_object(kind), kind, f"metadata.{kind}")
    set_by_server = [metadata.get_path(field) for field in _SERVER_FIELDS if metadata.take(field) not in (None, [], {})]
    if set_by_server:
        draft.note_no_counterpart("belongs to the object in the cluster, not to the job", *set_by_server)
    metadata.note_rest(draft)


def convert_labels(draft: Draft, entries: object, kind: str, path: str) -> None:
    """Add labels or annotations, but for those of controllers."""
    kept: dict[str, str] = {}
    for key, value in check_type(entries, dict, path).items():
        text = check_type(value, str, f"{path}[{key}]")
        if key in _CONTROLLER_KEYS or key.startswith(_CONTROLLER_PREFIXES) or key.startswith(f"{GROUP}/"):
            draft.note_no_counterpart("belongs to the object in the cluster, not to the job", f"{path}[{key}]")
        elif key.startswith("alpha.jobset.sigs.k8s.io/"):
            draft.note_no_counterpart(
                "a TrainingJob is not placed by it; use affinity in spec.template, or a queue with topology",
                f"{path}[{key}]",
            )
        else:
            kept[key] = text
    if kept:
        draft.metadata.setdefault(kind, {}).update(kept)
        draft.note_taken(f"in metadata.{kind}", *(f"{path}[{key}]" for key in kept))


def has_queue(draft: Draft) -> bool:
    return bool((draft.metadata.get("labels") or {}).get(LABEL_QUEUE))


def _convert_name(draft: Draft, name: str, field: str) -> str:
    """Return a name that the CRD takes: it is the prefix of the names of the pods."""
    converted = re.sub(r"[^a-z0-9-]", "-", name.lower())
    converted = converted if converted[:1].isalpha() else f"job-{converted}"
    converted = converted[:MAX_JOB_NAME].rstrip("-")
    if not _JOB_NAME.fullmatch(converted):
        raise ConversionRefused(f"metadata.{field}: choose a name of a-z, 0-9 and - that starts with a letter")
    if field == "name" and converted == name:
        draft.note_taken(name, "metadata.name")
    elif field == "name":
        draft.note_changed(
            f"{converted}: names have 1 to {MAX_JOB_NAME} characters a-z, 0-9 and -, and start with a letter",
            "metadata.name",
        )
    else:
        draft.note_changed(f"metadata.name: {converted}: a name of its own, without a suffix", "metadata.generateName")
    return converted
