"""TrainingJobs as the operator keeps them in memory: without what it never reads, and within a size. kopf holds each
job as long as it exists, and anybody who may make jobs decides how many bytes one has.
"""

from __future__ import annotations

from typing import Any

import orjson

from .api import ANNOTATION_PROFILE, LABEL_PREBUILT, LABEL_PRIORITY, LABEL_QUEUE, DROPPED_TEMPLATE_KEY, Object
from .manifests import TOO_DEEP_MESSAGE

MAX_SPEC_BYTES = 2**18
"""Of a job's spec, as JSON. `kubectl apply` takes no more either: it writes the object into an annotation, and
annotations have 256 KiB."""
MAX_TEMPLATE_VALUES = 8192
"""In a template. Each takes about 100 bytes of memory, however few it has as JSON."""
_IDENTITY_FIELDS = ("name", "namespace", "uid", "resourceVersion", "generation", "creationTimestamp", "deletionTimestamp")
_RETAINED_METADATA = frozenset({*_IDENTITY_FIELDS, "finalizers", "labels", "annotations"})
_RETAINED_LABELS = frozenset({LABEL_QUEUE, LABEL_PRIORITY, LABEL_PREBUILT})
_KOPF_ANNOTATION_PREFIX = "kopf.zalando.org/"
"""What kopf's own annotations begin with: it keeps there how far its handlers are."""


def trim_job(job: Object) -> None:
    """In place. A template that is too large becomes one that says so: `manifests.find_template_refusal` reads it."""
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
    if isinstance(spec, dict) and (words := explain_oversized_spec(spec)):
        spec["template"] = {DROPPED_TEMPLATE_KEY: words}


def explain_oversized_spec(spec: Object) -> str:
    """What of it is too large, with the remedy; "": nothing."""
    try:
        size = len(orjson.dumps(spec))
    except TypeError:  # it writes 254 levels
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
    """Than so many values. Level by level, as no recursion goes as deep as a tenant may nest."""
    left, level = limit, [value]
    while level:
        left -= len(level)
        if left < 0:
            return True
        inner = [each for each in level if isinstance(each, dict | list)]
        level = [part for each in inner for part in (each.values() if isinstance(each, dict) else each)]
    return False
