"""What sidecars, or clients that claim to be sidecars, send to the operator over HTTP."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from random import Random
from typing import Any, cast
from unittest.mock import patch

from aiohttp import ClientSession

from pacekeeper_analysis.protocol.requests import EvidenceRequest
from pacekeeper_operator.async_runtime import OperatorRuntime
from pacekeeper_operator.endpoint import sidecars
from pacekeeper_operator.endpoint.server import serve_endpoint
from pacekeeper_operator.endpoint.sidecars import SidecarService
from pacekeeper_operator.kube.client import Cluster, Object, ResourceKind
from pacekeeper_operator.observe.job_cache import JobRegistry
from testing.operators.observations import NOW, build_training
from testing.training.patterns import HEALTHY_WORK, build_answers, build_pattern

from ..border import Border, Enter
from ..mutations import Mutated, mutate_one_part, mutate_text, mutate_word, to_bytes
from .reports import build_evidence, build_faults, build_heartbeat

POD, UID = "j-w0-0", "uid-0"
OBSERVATION = build_training(replicas=2, spares=1)
CLAIMS = {"aud": ["pacekeeper"], "exp": NOW + 3600, "kubernetes.io": {"pod": {"name": POD, "uid": UID}}}


class Refused(Exception):
    """With a status and a message."""


class _Clock(OperatorRuntime):
    def now(self) -> float:
        return NOW


class _Reviews:
    """No call here is forged: all that is not refused before is this worker's."""

    async def create(self, _kind: ResourceKind, body: Object) -> Object:
        extra = {"authentication.kubernetes.io/pod-name": [POD], "authentication.kubernetes.io/pod-uid": [UID]}
        user = {"username": "system:serviceaccount:ns:default", "extra": extra}
        return {"status": {"authenticated": True, "audiences": body["spec"]["audiences"], "user": user}}


@contextmanager
def serve_operator() -> Iterator[Enter]:
    loop = asyncio.new_event_loop()
    problems: list[str] = []
    loop.set_exception_handler(lambda _, context: problems.append(str(context.get("exception") or context["message"])))
    registry, runtime = JobRegistry(0.0), _Clock()

    exit_stack = AsyncExitStack()

    async def begin() -> ClientSession:
        registry.get_or_create(OBSERVATION.job).publish(
            OBSERVATION.desired.with_requests(evidence=EvidenceRequest("why")), "1"
        )
        sidecars = SidecarService(cast(Cluster, _Reviews()), registry, runtime)
        port = await exit_stack.enter_async_context(serve_endpoint(sidecars, runtime, 0, None, address="127.0.0.1"))
        return await exit_stack.enter_async_context(ClientSession(f"http://127.0.0.1:{port}"))

    async def send_call(call: dict[str, Any]) -> object:
        claims = base64.urlsafe_b64encode(to_bytes(call["claims"])).decode().rstrip("=")
        headers = {"Authorization": f"Bearer header.{claims}.signature"}
        response = await client.post(call["path"], data=to_bytes(call["body"]), headers=headers)
        text = await response.text()
        if response.status == 503:  # its token is under review
            return response.status
        if response.status >= 500:
            raise RuntimeError(f"status {response.status}: {text}")
        if response.status >= 400:
            raise Refused(json.loads(text)["error"] if text.startswith("{") else text)
        return text

    client = loop.run_until_complete(begin())

    def enter(call: dict[str, Any]) -> object:
        result = loop.run_until_complete(send_call(call))
        assert not problems, problems
        return result

    try:
        with patch.object(sidecars, "FAULT_ACK_TIMEOUT_SECONDS", 0.0):
            yield enter
    finally:
        loop.run_until_complete(exit_stack.aclose())
        loop.close()


def build_calls() -> list[dict[str, Any]]:
    heartbeat = build_heartbeat().to_json() | {"worker": POD}
    window = json.loads(build_answers([build_pattern(0, HEALTHY_WORK, 0.7)])[0][1])
    bodies = [
        ("/v1/plan?after=-1&wait=0&hold=0", heartbeat),
        ("/v1/faults", replace(build_faults()[1], worker=POD, name=f"{POD}-x-stall-1").to_json()),
        ("/v1/evidence/why", build_evidence().to_json()),
        ("/v1/patterns/b/0", window),
    ]
    return [{"path": path, "claims": CLAIMS, "body": body} for path, body in bodies]


def mutate_call(rng: Random, call: dict[str, Any]) -> Mutated:
    mutations = {"body": mutate_text, "claims": mutate_text, "path": mutate_path}
    return mutate_one_part(rng, call, mutations if rng.random() < 0.4 else {"body": mutate_text})


def mutate_path(rng: Random, valid: str) -> Mutated:
    """The query, or a part of the path."""
    mutated = mutate_word(rng, valid[4:])
    return Mutated("/v1/" + mutated.value.replace("#", "").replace(" ", "%20"), mutated.how)


BORDERS = [Border("the operator's endpoint", build_calls, mutate_call, serve_operator, (Refused,), cases=150)]
