"""What the operator stores of a TrainingJob, and what kopf receives, over real HTTP by the client of kopf."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pacekeeper_analysis.errors import InputError
from pacekeeper_operator.api.names import ANNOTATION_PROFILE, DROPPED_TEMPLATE_KEY, LABEL_QUEUE
from pacekeeper_operator.api.training_job import TrainingJob
from pacekeeper_operator.pods.manifests import Installation, build_worker_pod, find_template_refusal
from pacekeeper_operator.pods.trimming import MAX_SPEC_BYTES, MAX_TEMPLATE_VALUES, trim_job


def build_job_object(**container: Any) -> dict[str, Any]:
    return {
        "kind": "TrainingJob",
        "metadata": {
            "name": "j",
            "namespace": "ns",
            "uid": "u",
            "resourceVersion": "5",
            "finalizers": ["somebody/else"],
            "labels": {LABEL_QUEUE: "q", "theirs": "x"},
            "annotations": {
                ANNOTATION_PROFILE: "1",
                "kopf.zalando.org/keep": "{}",
                "kubectl.kubernetes.io/last-applied-configuration": "x" * 200_000,
            },
            "managedFields": [{"manager": "kubectl", "fieldsV1": {"f:spec": {}}}],
        },
        "spec": {"suspend": True, "template": {"spec": {"containers": [{"name": "trainer", **container}]}}},
        "status": {"phase": "Suspended"},
    }


def test_fields_that_are_never_read_are_removed() -> None:
    trimmed, whole = build_job_object(), build_job_object()
    trim_job(trimmed)
    assert trimmed["metadata"] == {
        "name": "j",
        "namespace": "ns",
        "uid": "u",
        "resourceVersion": "5",
        "finalizers": ["somebody/else"],
        "labels": {LABEL_QUEUE: "q"},
        "annotations": {ANNOTATION_PROFILE: "1", "kopf.zalando.org/keep": "{}"},
    }
    assert (trimmed["spec"], trimmed["status"]) == (whole["spec"], whole["status"])
    assert TrainingJob.parse(trimmed) == TrainingJob.parse(whole)


def build_nested_list(levels: int) -> Any:
    found: Any = 0
    for _ in range(levels):
        found = [found]
    return found


@pytest.mark.parametrize(
    ("container", "message"),
    [
        ({"args": ["x" * MAX_SPEC_BYTES]}, r"262,\d\d\d bytes .* may have 262,144: move .* a ConfigMap"),
        ({"args": [""] * MAX_TEMPLATE_VALUES}, r"more than 8,192 fields and values .* ConfigMap \(envFrom\)"),
        ({"args": build_nested_list(1_000)}, "nested in more than 64 levels"),
    ],
)
def test_a_template_that_is_too_large_is_refused_by_field_and_remedy(container: Any, message: str) -> None:
    body = build_job_object(**container)
    trim_job(body)
    assert len(json.dumps(body)) < 1_000
    parsed = TrainingJob.parse(body)
    assert parsed.spec.suspend
    with pytest.raises(InputError, match=f"spec.template: .*{message}"):
        build_worker_pod(parsed, 0, 0, Installation("operator:8443", ""))
    assert find_template_refusal(parsed) == f"spec.template: {parsed.spec.template[DROPPED_TEMPLATE_KEY]}"


def test_a_template_of_the_largest_size_is_kept() -> None:
    body = build_job_object(args=["x" * (MAX_SPEC_BYTES - 200)])
    trim_job(body)
    assert DROPPED_TEMPLATE_KEY not in TrainingJob.parse(body).spec.template


def test_an_incomplete_job_is_trimmed_without_an_error() -> None:
    body: dict[str, Any] = {"kind": "TrainingJob", "metadata": {"name": "j", "labels": None}, "spec": None}
    trim_job(body)
    assert body["metadata"]["name"] == "j"
