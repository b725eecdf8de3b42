"""The webhook: the table of pods through HTTP, and calls that are not a review."""

from __future__ import annotations

import base64
import json
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import TestClient, TestServer

from pacekeeper_operator.api.names import LABEL_WATCH
from pacekeeper_operator.async_runtime import OperatorRuntime
from pacekeeper_operator.endpoint.admission_webhook import (
    MAX_REVIEW_BYTES,
    WEBHOOK_PATH,
    Injection,
    answer_review,
    create_webhook_application,
    serve_admission_webhook,
)
from testing.kubernetes.injection_cases import (
    ADDRESS,
    INJECTION_CASES,
    RULES,
    apply_json_patch,
    build_pod,
    check_injected_pod,
)

INJECTION = Injection(RULES, ADDRESS)


def build_review(pod: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": {"uid": "u", "object": pod}}


def test_each_pod_of_the_table_is_admitted_with_its_patch() -> None:
    for case in INJECTION_CASES:
        response = answer_review(json.dumps(build_review(case.pod)).encode(), INJECTION)["response"]
        assert (response["uid"], response["allowed"]) == ("u", True)
        assert ("patch" in response) == (not case.refused_by)
        patch = json.loads(base64.b64decode(response["patch"])) if "patch" in response else []
        check_injected_pod(case, apply_json_patch(case.pod, patch))


def test_nothing_is_injected_while_it_is_switched_off() -> None:
    response = answer_review(json.dumps(build_review(INJECTION_CASES[0].pod)).encode(), None)["response"]
    assert response == {"uid": "u", "allowed": True}


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (json.dumps(build_review(INJECTION_CASES[0].pod)).encode(), 200),
        (b"{", 400),
        (b"[]", 400),
        (b'{"request": {"uid": "u", "object": null}}', 400),
        (b'{"request": {"uid": "u", "object": {"metadata": {}, "spec": {"containers": []}}}}', 200),
        (
            json.dumps(
                build_review(build_pod(labels={LABEL_WATCH: "enabled"}) | {"spec": {"containers": []}})
            ).encode(),
            400,
        ),
        (b"[" * 5000, 400),
        (b" " * (MAX_REVIEW_BYTES + 1), 413),
    ],
)
async def test_calls_that_are_no_review_are_refused(body: bytes, status: int) -> None:
    app = create_webhook_application(lambda: INJECTION, OperatorRuntime())
    async with TestClient(TestServer(app)) as client:
        answer = await client.post(WEBHOOK_PATH, data=body)
        assert answer.status == status


async def test_it_answers_on_a_port_of_its_own() -> None:
    review = build_review(INJECTION_CASES[0].pod)
    async with (
        serve_admission_webhook(lambda: None, OperatorRuntime(), 0, None) as port,
        aiohttp.ClientSession() as session,
        session.post(f"http://127.0.0.1:{port}{WEBHOOK_PATH}", json=review) as answer,
    ):
        assert answer.status == 200
        assert await answer.json() == {
            "apiVersion": "admission.k8s.io/v1",
            "kind": "AdmissionReview",
            "response": {"uid": "u", "allowed": True},
        }
