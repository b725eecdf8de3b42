"""TrainingJobs as the operator keeps them in memory: without what it never reads, and within a size.

kopf holds each job as long as it exists, and any user who may create jobs decides how many bytes one has.
"""

from __future__ import annotations

from typing import Any

import orjson

from ..api.names import ANNOTATION_PROFILE, DROPPED_TEMPLATE_KEY, LABEL_PREBUILT, LABEL_PRIORITY, LABEL_QUEUE, Object
from .manifests import TOO_DEEP_MESSAGE

MAX_SPEC_BYTES = 2**18
"""Bytes of a job's spec as JSON.

`kubectl apply` accepts no more: it writes the object into an annotation, and annotations have 256 KiB.
"""
MAX_TEMPLATE_VALUES = 8192
"""Values in a template. Each takes about 100 bytes of memory, however few it has as JSON."""
_IDENTITY_FIELDS = (
    "name",
    "namespace",
    "uid",
    "resourceVersion",
    "generation",
    "creationTimestamp",
    "deletionTimestamp",
)
_RETAINED_METADATA = frozenset({*_IDENTITY_FIELDS, "finalizers", "labels", "annotations"})
_RETAINED_LABELS = frozenset({LABEL_QUEUE, LABEL_PRIORITY, LABEL_PREBUILT})
_KOPF_ANNOTATION_PREFIX = "kopf.zalando.org/"
"""Prefix of the annotations in which kopf keeps the progress of its handlers."""


def trim_job(job: Object) -> None:
    """Trim a job in place.

    A template that is too large is replaced by a message, which `manifests.find_template_refusal` reads.
    """
    metadata = {name: value for name, value in job["metadata"].items() if name in _RETAINED_METADATA}
    if metadata.get("labels"):
        metadata["labels"] = {name: value for name, value in metadata["labels"].items() if name in _RETAINED_LABELS}
    if metadata.get("annotations"):
        metadata["annotations"] = {
            name: value
            for name, value in metadata["annotations"].items()
            if name == ANNOTATION_PROFILE or name.startswith(_KOPF_ANNOTATION_PREFIX)
        }
    job["metadata"] = metadata
    spec = job.get("spec")
    if isinstance(spec, dict) and (reason := explain_oversized_spec(spec)):
        spec["template"] = {DROPPED_TEMPLATE_KEY: reason}


def explain_oversized_spec(spec: Object) -> str:
    """Return which part of the spec is too large, with the remedy; "": none."""
    try:
        size = len(orjson.dumps(spec))
    except TypeError:  # orjson writes 254 levels
        return TOO_DEEP_MESSAGE
    if size > MAX_SPEC_BYTES:
        return (
            f"has {size:,} bytes with the rest of spec, and may have {MAX_SPEC_BYTES:,}: "
            "move scripts and data into the image, a ConfigMap or a volume"
        )
    if _has_more_values(spec, MAX_TEMPLATE_VALUES):
        return (
            f"has more than {MAX_TEMPLATE_VALUES:,} fields and values with the rest of spec: "
            "move lists of arguments and variables into the image, a ConfigMap (envFrom) or a volume"
        )
    return ""


def _has_more_values(value: Any, limit: int) -> bool:
    """Return whether a value has more than `limit` parts.

    It works level by level, as recursion would fail at the depth that a tenant may nest.
    """
    remaining, level = limit, [value]
    while level:
        remaining -= len(level)
        if remaining < 0:
            return True
        containers = [item for item in level if isinstance(item, dict | list)]
        level = [part for item in containers for part in (item.values() if isinstance(item, dict) else item)]
    return False
