"""The endpoint for sidecars, over real HTTP(S); only the API server's review of tokens is made up."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, cast

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from pacekeeper_analysis.plan import WorkerPlan
from pacekeeper_analysis.reports import Evidence, Heartbeat, LauncherState
from pacekeeper_operator import certificates
from pacekeeper_operator.cluster import Cluster, Kind, Object
from pacekeeper_operator.observe.memory import JobMemory, Memory
from pacekeeper_operator.server import MAX_BODY_BYTES, application
from pacekeeper_operator.services.sidecars import Sidecars
from tests.support.worlds import crash, training

WORLD = training(replicas=2, spares=1)
Client = TestClient[web.Request, web.Application]


@dataclass
class Reviews:
    """The API server's token reviews: a token is `<audience>/<pod>/<uid>`."""

    asked: int = 0

    async def create(self, _kind: Kind, body: Object) -> Object:
        self.asked += 1
        audience, _, rest = body["spec"]["token"].partition("/")
        pod, _, uid = rest.partition("/")
        if audience not in body["spec"]["audiences"]:
            return {"status": {"authenticated": False, "error": "token audiences do not match"}}
        extra = {
            "authentication.kubernetes.io/pod-name": [pod],
            "authentication.kubernetes.io/pod-uid": [uid],
        }
        user = {"username": "system:serviceaccount:ns:default", "extra": extra if pod else {}}
        return {"status": {"authenticated": True, "audiences": [audience], "user": user}}


@pytest.fixture
def reviews() -> Reviews:
    return Reviews()


@pytest.fixture
def memory() -> Memory:
    return Memory(0.0)


@pytest.fixture
async def job(memory: Memory) -> JobMemory:
    job = memory.of(WORLD.job)
    await job.publish(WORLD.draft, "1")
    return job


@pytest.fixture
async def client(memory: Memory, job: JobMemory, reviews: Reviews) -> AsyncIterator[Client]:  # noqa: ARG001
    sidecars = Sidecars(cast(Cluster, reviews), memory)
    async with TestClient(TestServer(application(sidecars))) as client:
        yield client


def as_worker(name: str, uid: str, audience: str = "pacekeeper") -> dict[str, Any]:
    return {"headers": {"Authorization": f"Bearer {audience}/{name}/{uid}"}}


W0 = as_worker("j-w0-0", "uid-0")
BEAT = Heartbeat(worker="j-w0-0", state=LauncherState.RUNNING).to_json()


async def test_a_worker_gets_its_own_part_of_the_plan(client: Client) -> None:
    answer = await client.post("/v1/plan", json=BEAT, **W0)
    assert answer.status == 200
    assert WorkerPlan.from_json(await answer.json()) == WORLD.plan.part("j-w0-0")


@pytest.mark.parametrize(
    ("caller", "status"),
    [
        ({}, 401),
        (as_worker("j-w0-0", "uid-0", "another-audience"), 401),
        (as_worker("", ""), 403),
        (as_worker("j-w0-0", "uid-of-another"), 403),
        (as_worker("j-w9-0", "uid-9"), 403),
        (as_worker("somebody", "uid"), 403),
        (as_worker("k-w0-0", "uid-0"), 503),
    ],
    ids=["no token", "other audience", "not of a pod", "another's uid", "no worker", "no worker's name", "no such job"],
)
async def test_who_is_not_a_worker_is_refused(client: Client, caller: dict[str, Any], status: int) -> None:
    answer = await client.post("/v1/plan", json=BEAT, **caller)
    assert answer.status == status
    assert (await answer.json())["error"]


@pytest.mark.parametrize(
    "body", ['{"state": "Asleep"}', '{"membership": {}', "[]", '{"state": "Warm", "worker": }'], ids=str
)
async def test_a_malformed_body_is_refused(client: Client, body: str) -> None:
    headers = W0["headers"] | {"Content-Type": "application/json"}
    answer = await client.post("/v1/plan", data=body, headers=headers)
    assert answer.status == 400


async def test_a_huge_body_is_refused(client: Client) -> None:
    answer = await client.post("/v1/faults", data=b"x" * (MAX_BODY_BYTES + 1), **W0)
    assert answer.status == 413


async def test_a_poll_is_held_until_the_plan_changes(client: Client, job: JobMemory) -> None:
    version = WORLD.plan.version
    poll = asyncio.create_task(client.post(f"/v1/plan?after={version}&wait=10", json=BEAT, **W0))
    await asyncio.wait_for(job.wake.wait(), 5)  # the operator hears of a worker for the first time
    assert not poll.done()
    changed = WORLD.draft.with_plan(checkpoint_request=7)
    await job.publish(changed, "2")
    answer = await asyncio.wait_for(poll, 5)
    assert (await answer.json())["checkpoint_request"] == 7


async def test_a_poll_without_news_ends_with_204(client: Client) -> None:
    answer = await client.post(f"/v1/plan?after={WORLD.plan.version}&wait=0.05", json=BEAT, **W0)
    assert answer.status == 204


async def test_a_fault_is_taken_once_what_was_decided_is_written(client: Client, job: JobMemory) -> None:
    fault = crash("j-w0-0", 0)
    post = asyncio.create_task(client.post("/v1/faults", json=fault.to_json(), **W0))
    await asyncio.wait_for(job.wake.wait(), 5)
    assert list(job.faults.values()) == [fault]
    assert not post.done()
    await job.publish(WORLD.draft.settle((fault.name,)), "2")
    assert (await asyncio.wait_for(post, 5)).status == 202
    assert not job.faults
    again = await client.post("/v1/faults", json=fault.to_json(), **W0)
    assert again.status == 202


async def test_a_fault_that_is_looked_into_is_to_be_sent_again(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pacekeeper_operator.services.sidecars.TAKE_SECONDS", 0.05)
    answer = await client.post("/v1/faults", json=crash("j-w0-0", 0).to_json(), **W0)
    assert answer.status == 503
    assert answer.headers["Retry-After"]


async def test_nobody_speaks_for_another(client: Client) -> None:
    for path, body in (("/v1/faults", crash("j-w1-0", 1)), ("/v1/plan", Heartbeat(worker="j-w1-0"))):
        answer = await client.post(path, json=body.to_json(), **W0)
        assert answer.status == 403, path


async def test_evidence_is_kept_while_it_is_asked_for(client: Client, job: JobMemory) -> None:
    await job.publish(WORLD.draft.with_plan(evidence_request="why"), "2")
    old, new = (Evidence(request, "j-w0-0", 1) for request in ("before", "why"))
    for evidence in (old, new):
        answer = await client.post(f"/v1/evidence/{evidence.request}", json=evidence.to_json(), **W0)
        assert answer.status == 202
    assert job.evidence == {"j-w0-0": new}
    mismatch = await client.post("/v1/evidence/other", json=new.to_json(), **W0)
    assert mismatch.status == 400


async def test_a_token_is_reviewed_once_a_minute(
    client: Client, reviews: Reviews, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        await client.post("/v1/plan", json=BEAT, **W0)
    assert reviews.asked == 1
    monkeypatch.setattr("pacekeeper_operator.services.sidecars.REVIEW_SECONDS", 0.0)
    await client.post("/v1/plan", json=BEAT, **W0)
    assert reviews.asked == 2


async def test_only_what_matters_wakes_the_loop(client: Client, job: JobMemory) -> None:
    await client.post("/v1/plan", json=BEAT, **W0)
    job.wake.clear()
    await client.post("/v1/plan", json=BEAT | {"step": 5}, **W0)
    assert not job.wake.is_set()
    await client.post("/v1/plan", json=BEAT | {"step": 5, "round": 1}, **W0)
    assert job.wake.is_set()
    assert job.contacts["j-w0-0"].heartbeat.step == 5


async def test_the_serving_certificate_is_trusted_by_the_authority_alone(memory: Memory, reviews: Reviews) -> None:
    now = datetime.now(UTC)
    authority, stranger = certificates.create(now), certificates.create(now)
    server = TestServer(application(Sidecars(cast(Cluster, reviews), memory)))
    await server.start_server(ssl=authority.serving_context(("localhost", "127.0.0.1"), now))
    try:
        async with aiohttp.ClientSession() as session:
            url = f"https://127.0.0.1:{server.port}/healthz"
            trusting = ssl.create_default_context(cadata=authority.certificate)
            async with session.get(url, ssl=trusting) as answer:
                assert answer.status == 200
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await session.get(url, ssl=ssl.create_default_context(cadata=stranger.certificate))
    finally:
        await server.close()
