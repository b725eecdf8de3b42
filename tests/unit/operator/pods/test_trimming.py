"""What the operator keeps of a TrainingJob, and what kopf is given to read: over real HTTP, by kopf's own client."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pacekeeper_analysis.errors import InputError
from pacekeeper_operator.api.names import ANNOTATION_PROFILE, DROPPED_TEMPLATE_KEY, LABEL_QUEUE
from pacekeeper_operator.api.training_job import TrainingJob
from pacekeeper_operator.pods.manifests import Installation, build_worker_pod, find_template_refusal
from pacekeeper_operator.pods.trimming import MAX_SPEC_BYTES, MAX_TEMPLATE_VALUES, trim_job


def job(**container: Any) -> dict[str, Any]:
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


def test_what_is_never_read_is_not_kept() -> None:
    trimmed, whole = job(), job()
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


def deep(levels: int) -> Any:
    found: Any = 0
    for _ in range(levels):
        found = [found]
    return found


@pytest.mark.parametrize(
    ("container", "words"),
    [
        ({"args": ["x" * MAX_SPEC_BYTES]}, r"262,\d\d\d bytes .* may have 262,144: move .* a ConfigMap"),
        ({"args": [""] * MAX_TEMPLATE_VALUES}, r"more than 8,192 fields and values .* ConfigMap \(envFrom\)"),
        ({"args": deep(1_000)}, "nested in more than 64 levels"),
    ],
)
def test_a_template_that_is_too_large_is_refused_by_field_and_remedy(container: Any, words: str) -> None:
    body = job(**container)
    trim_job(body)
    assert len(json.dumps(body)) < 1_000
    read = TrainingJob.parse(body)
    assert read.spec.suspend
    with pytest.raises(InputError, match=f"spec.template: .*{words}"):
        build_worker_pod(read, 0, 0, Installation("operator:8443", ""))
    assert find_template_refusal(read) == f"spec.template: {read.spec.template[DROPPED_TEMPLATE_KEY]}"


def test_a_template_of_the_largest_size_is_kept() -> None:
    body = job(args=["x" * (MAX_SPEC_BYTES - 200)])
    trim_job(body)
    assert DROPPED_TEMPLATE_KEY not in TrainingJob.parse(body).spec.template


def test_names_and_what_is_no_job_yet_do_no_harm() -> None:
    body: dict[str, Any] = {"kind": "TrainingJob", "metadata": {"name": "j", "labels": None}, "spec": None}
    trim_job(body)
    assert body["metadata"]["name"] == "j"
