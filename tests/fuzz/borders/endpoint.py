"""What sidecars, or whoever calls itself so, send to the operator over HTTP."""

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

from pacekeeper_operator.cluster import Cluster, ResourceKind, Object
from pacekeeper_operator.observe.memory import JobRegistry
from pacekeeper_operator.runtime import OperatorRuntime
from pacekeeper_operator.server import serve_endpoint
from pacekeeper_operator.services import sidecars
from pacekeeper_operator.services.sidecars import SidecarService
from tests.support.patterns import HEALTHY_WORK, build_answers, build_pattern
from tests.support.worlds import NOW, build_training

from ..border import Border, Enter
from ..mutations import Mutated, one_of, text, word, written
from .reports import evidence, faults, heartbeat

POD, UID = "j-w0-0", "uid-0"
WORLD = build_training(replicas=2, spares=1)
CLAIMS = {"aud": ["pacekeeper"], "exp": NOW + 3600, "kubernetes.io": {"pod": {"name": POD, "uid": UID}}}


class Refused(Exception):
    """With a status and words."""


class _Clock(OperatorRuntime):
    def now(self) -> float:
        return NOW


class _Reviews:
    """Nobody forges here: whatever is not refused before is this worker's."""

    async def create(self, _kind: ResourceKind, body: Object) -> Object:
        extra = {"authentication.kubernetes.io/pod-name": [POD], "authentication.kubernetes.io/pod-uid": [UID]}
        user = {"username": "system:serviceaccount:ns:default", "extra": extra}
        return {"status": {"authenticated": True, "audiences": body["spec"]["audiences"], "user": user}}


@contextmanager
def served() -> Iterator[Enter]:
    loop = asyncio.new_event_loop()
    troubles: list[str] = []
    loop.set_exception_handler(lambda _, context: troubles.append(str(context.get("exception") or context["message"])))
    memory, runtime = JobRegistry(0.0), _Clock()

    ends = AsyncExitStack()

    async def begin() -> ClientSession:
        memory.get_or_create(WORLD.job).publish(WORLD.desired.with_plan(evidence_request="why"), "1")
        sidecars = SidecarService(cast(Cluster, _Reviews()), memory, runtime)
        port = await ends.enter_async_context(serve_endpoint(sidecars, runtime, 0, None, address="127.0.0.1"))
        return await ends.enter_async_context(ClientSession(f"http://127.0.0.1:{port}"))

    async def ask(call: dict[str, Any]) -> object:
        claims = base64.urlsafe_b64encode(written(call["claims"])).decode().rstrip("=")
        headers = {"Authorization": f"Bearer header.{claims}.signature"}
        answer = await client.post(call["path"], data=written(call["body"]), headers=headers)
        words = await answer.text()
        if answer.status == 503:  # it is looked into
            return answer.status
        if answer.status >= 500:
            raise RuntimeError(f"status {answer.status}: {words}")
        if answer.status >= 400:
            raise Refused(json.loads(words)["error"] if words.startswith("{") else words)
        return words

    client = loop.run_until_complete(begin())

    def enter(call: dict[str, Any]) -> object:
        found = loop.run_until_complete(ask(call))
        assert not troubles, troubles
        return found

    try:
        with patch.object(sidecars, "FAULT_ACK_TIMEOUT_SECONDS", 0.0):
            yield enter
    finally:
        loop.run_until_complete(ends.aclose())
        loop.close()


def calls() -> list[dict[str, Any]]:
    beat = heartbeat().to_json() | {"worker": POD}
    window = json.loads(build_answers([build_pattern(0, HEALTHY_WORK, 0.7)])[0][1])
    bodies = [
        ("/v1/plan?after=-1&wait=0&hold=0", beat),
        ("/v1/faults", replace(faults()[1], worker=POD, name=f"{POD}-x-stall-1").to_json()),
        ("/v1/evidence/why", evidence().to_json()),
        ("/v1/patterns/b/0", window),
    ]
    return [{"path": path, "claims": CLAIMS, "body": body} for path, body in bodies]


def mutate(dice: Random, call: dict[str, Any]) -> Mutated:
    how = {"body": text, "claims": text, "path": path}
    return one_of(dice, call, how if dice.random() < 0.4 else {"body": text})


def path(dice: Random, valid: str) -> Mutated:
    """The query, or a part of the way."""
    found = word(dice, valid[4:])
    return Mutated("/v1/" + found.value.replace("#", "").replace(" ", "%20"), found.how)


BORDERS = [Border("the operator's endpoint", calls, mutate, served, (Refused,), cases=150)]
