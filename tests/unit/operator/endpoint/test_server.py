"""The endpoint for sidecars, over real HTTP(S); only the API server's review of tokens is made up."""

from __future__ import annotations

import asyncio
import asyncio.constants
import asyncio.sslproto
import base64
import gc
import json
import logging
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import aiohttp
import kopf
import pytest
import yaml
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from pacekeeper_analysis.failures import hang
from pacekeeper_analysis.failures.gpu_health import GpuSign
from pacekeeper_analysis.protocol.communicators import MAX_COMMUNICATORS, Communicator, format_entered
from pacekeeper_analysis.protocol.decoding import parse_json
from pacekeeper_analysis.protocol.plan import EvidencePart, ProfileRequest, WorkerPlan
from pacekeeper_analysis.protocol.records import MAX_ENTERED_GROUPS
from pacekeeper_analysis.protocol.reports import (
    MAX_WORKER_GPUS,
    MAX_WORKER_RANKS,
    BlockedConnection,
    Evidence,
    GpuHealth,
    Heartbeat,
    LauncherState,
    RankOperations,
    RankState,
    RankWindow,
)
from pacekeeper_operator.async_runtime import OperatorRuntime
from pacekeeper_operator.endpoint import certificates, connections, server, sidecars, token_review
from pacekeeper_operator.endpoint.connections import EndpointConnections
from pacekeeper_operator.endpoint.server import (
    MAX_EVIDENCE_BYTES,
    MAX_FAULT_BYTES,
    MAX_HEARTBEAT_BYTES,
    create_application,
    serve_endpoint,
)
from pacekeeper_operator.endpoint.sidecars import SidecarService
from pacekeeper_operator.file_limits import FileLimits
from pacekeeper_operator.kube.client import Cluster, Object, ResourceKind
from pacekeeper_operator.observe import faults
from pacekeeper_operator.observe.job_cache import JobCache, JobRegistry, WorkerContact
from testing.operators.observations import NOW, build_crash, build_stall, build_training

WORLD = build_training(replicas=2, spares=1)
Client = TestClient[web.Request, web.Application]


class Clock(OperatorRuntime):
    """The real one, but that its clocks stand still until they are moved: what moves them is work."""

    def __init__(self) -> None:
        super().__init__()
        self.at = NOW

    def now(self) -> float:
        return self.at

    def monotonic(self) -> float:
        return self.at

    def thread_seconds(self) -> float:
        return self.at


@dataclass
class Reviews:
    """The API server's token reviews. The claims of a token say whose it is, and nobody forges here."""

    asked: int = 0
    error: Exception | None = None
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.gate.set()

    async def create(self, _kind: ResourceKind, body: Object) -> Object:
        self.asked += 1
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        payload = body["spec"]["token"].split(".")[1]
        claims = json.loads(base64.urlsafe_b64decode(payload + "=="))
        if claims.get("forged"):
            return {"status": {"authenticated": False, "error": "the signature is wrong"}}
        pod, uid = claims["pod"], claims["uid"]
        extra = {"authentication.kubernetes.io/pod-name": [pod], "authentication.kubernetes.io/pod-uid": [uid]}
        user = {"username": "system:serviceaccount:ns:default", "extra": extra if pod else {}}
        return {"status": {"authenticated": True, "audiences": body["spec"]["audiences"], "user": user}}


@pytest.fixture
def reviews() -> Reviews:
    return Reviews()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def memory() -> JobRegistry:
    return JobRegistry(0.0)


@pytest.fixture
async def job(memory: JobRegistry) -> JobCache:
    job = memory.get_or_create(WORLD.job)
    job.publish(WORLD.desired, "1")
    return job


@pytest.fixture
def served(memory: JobRegistry, job: JobCache, reviews: Reviews, clock: Clock) -> SidecarService:  # noqa: ARG001
    return SidecarService(cast(Cluster, reviews), memory, clock)


@pytest.fixture
async def client(served: SidecarService, clock: Clock) -> AsyncIterator[Client]:
    async with TestClient(TestServer(create_application(served, clock))) as client:
        yield client
    assert not clock.failed.is_set()


def token(pod: str, uid: str, **claims: Any) -> str:
    payload = {"aud": ["pacekeeper"], "exp": NOW + 3600, "pod": pod, "uid": uid} | claims
    return f"header.{base64.urlsafe_b64encode(json.dumps(payload).encode()).decode().rstrip('=')}.signature"


def bearing(text: str) -> dict[str, Any]:
    return {"headers": {"Authorization": f"Bearer {text}"}}


def as_worker(name: str, uid: str, **claims: Any) -> dict[str, Any]:
    return bearing(token(name, uid, **claims))


W0 = as_worker("j-w0-0", "uid-0")
PARTS = (EvidencePart.WINDOWS, EvidencePart.OPERATIONS)
BEAT = Heartbeat(worker="j-w0-0", state=LauncherState.RUNNING).to_json()


async def test_a_worker_gets_its_own_part_of_the_plan(client: Client) -> None:
    answer = await client.post("/v1/plan", json=BEAT, **W0)
    assert answer.status == 200
    assert WorkerPlan.from_json(await answer.json()) == WORLD.plan.build_worker_plan("j-w0-0")


@pytest.mark.parametrize(
    ("caller", "status"),
    [
        ({}, 401),
        (as_worker("j-w0-0", "uid-0", aud=["another"]), 401),
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
    "body",
    [
        b'{"state": "Asleep"}',
        b'{"membership": {}',
        b"[]",
        b"",
        b'{"state": "Warm", "worker": }',
        b'{"step": NaN}',
        b'{"step": -Infinity}',
        b'{"worker": "\xff\xfe"}',
        b'{"step": ' + b"1" * 5000 + b"}",
        b'{"a":' * 8000 + b"1" + b"}" * 8000,
    ],
    ids=lambda body: str(body[:20]),
)
async def test_a_malformed_body_is_refused(client: Client, body: bytes) -> None:
    answer = await client.post("/v1/plan", data=body, **W0)
    assert answer.status == 400
    assert (await answer.json())["error"]


@pytest.mark.parametrize(
    ("path", "most"),
    [
        ("/v1/plan", MAX_HEARTBEAT_BYTES),
        ("/v1/faults", MAX_FAULT_BYTES),
        ("/v1/evidence/why", MAX_EVIDENCE_BYTES),
    ],
)
@pytest.mark.parametrize("told", [True, False], ids=["its length is told", "in pieces"])
async def test_a_huge_body_is_refused_before_it_is_read(
    client: Client, job: JobCache, path: str, most: int, told: bool
) -> None:
    job.publish(WORLD.desired.with_plan(evidence_request="why"), "2")
    sent, endless = 0, 2**30

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal sent
        while sent < endless:
            sent += most // 4
            yield b" " * (most // 4)

    headers = W0["headers"] | ({"Content-Length": str(endless)} if told else {})
    answer = await client.post(path, data=pieces(), headers=headers)
    assert answer.status == 413
    assert sent < 2**26, "what lies in the buffers on the way"


@pytest.mark.parametrize(
    "query",
    [
        *("wait=nan", "wait=inf", "wait=-1", "wait=1e309", "wait=x", "wait="),
        *("after=nan", "after=1e3", "after=x", "after=", "after=" + "1" * 5000),
    ],
)
async def test_a_senseless_query_is_refused(client: Client, query: str) -> None:
    answer = await client.post(f"/v1/plan?{query}", json=BEAT, **W0)
    assert answer.status == 400
    assert query[:4] in (await answer.json())["error"]


async def test_a_slow_body_is_not_waited_for(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "BODY_TIMEOUT_SECONDS", 0.05)
    answered = asyncio.Event()

    async def pieces() -> AsyncIterator[bytes]:
        yield b"{"
        await answered.wait()

    answer = await client.post("/v1/plan", data=pieces(), **W0)
    answered.set()
    assert answer.status == 408


class TestBodies:
    """However many come at once, and whatever is in them."""

    async def test_one_worker_sends_one_at_a_time(self, client: Client, clock: Clock) -> None:
        begun, go_on = asyncio.Event(), asyncio.Event()
        first = asyncio.create_task(client.post("/v1/plan", data=halves(begun, go_on), **W0))
        await asyncio.wait_for(begun.wait(), 60)
        bodies = client.app[server.BODY_BUDGET_KEY]
        await until(lambda: bodies.remaining < server.MAX_BODIES_BYTES)
        second = asyncio.create_task(client.post("/v1/plan", json=BEAT, **W0))
        other = await client.post("/v1/plan", json=BEAT | {"worker": "j-w1-0"}, **as_worker("j-w1-0", "uid-1"))
        assert other.status == 200, "others do not wait for it"
        assert bodies.remaining == server.MAX_BODIES_BYTES - MAX_HEARTBEAT_BYTES, "the second is not begun"
        assert not second.done()
        go_on.set()
        assert [(await asyncio.wait_for(call, 60)).status for call in (first, second)] == [200, 200]
        assert bodies.remaining == server.MAX_BODIES_BYTES
        assert not clock.failed.is_set()

    async def test_who_waits_for_its_turn_waits_no_longer_than_a_body_may_take(
        self, client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(server, "BODY_TIMEOUT_SECONDS", 0.05)
        go_on = asyncio.Event()
        calls = [client.post("/v1/plan", data=halves(asyncio.Event(), go_on), **W0) for _ in range(3)]
        assert [answer.status for answer in await asyncio.gather(*calls)] == [408] * 3
        assert client.app[server.BODY_BUDGET_KEY].remaining == server.MAX_BODIES_BYTES
        assert (await client.post("/v1/plan", json=BEAT, **W0)).status == 200

    @pytest.mark.parametrize("told", [True, False], ids=["its length is told", "in pieces"])
    async def test_what_there_is_no_room_for_is_to_be_sent_again(self, client: Client, told: bool) -> None:
        bodies = client.app[server.BODY_BUDGET_KEY]
        data = json.dumps(BEAT).encode()
        bodies.remaining = least = (len(data) if told else MAX_HEARTBEAT_BYTES) - 1

        async def pieces() -> AsyncIterator[bytes]:
            yield data

        refused = await client.post("/v1/plan", data=data if told else pieces(), **W0)
        assert refused.status == 503
        assert refused.headers["Retry-After"]
        assert bodies.remaining == least
        bodies.remaining += 1
        assert (await client.post("/v1/plan", data=data if told else pieces(), **W0)).status == 200

    async def test_what_is_refused_gives_its_room_back(self, client: Client) -> None:
        for body in (b"{", b"[]", b"x" * 2 * MAX_HEARTBEAT_BYTES):
            await client.post("/v1/plan", data=body, **W0)
        assert client.app[server.BODY_BUDGET_KEY].remaining == server.MAX_BODIES_BYTES

    @pytest.mark.parametrize(
        ("path", "most"),
        [
            ("/v1/plan", server.MAX_HEARTBEAT_TOKENS),
            ("/v1/faults", server.MAX_FAULT_TOKENS),
            ("/v1/evidence/why", server.MAX_EVIDENCE_TOKENS),
        ],
    )
    @pytest.mark.parametrize("value", [b"{}", b"[]", b"1", b'"\\""', b'"\\\\"'], ids=str)
    async def test_a_crowd_of_values_is_refused_before_it_is_parsed(
        self, client: Client, job: JobCache, monkeypatch: pytest.MonkeyPatch, path: str, most: int, value: bytes
    ) -> None:
        job.publish(WORLD.desired.with_plan(evidence_request="why"), "2")
        monkeypatch.setattr(server, "parse_json", None)
        answer = await client.post(path, data=b'{"x":[' + b",".join([value] * most) + b"]}", **W0)
        assert answer.status == 400
        assert str(most) in (await answer.json())["error"]

    async def test_a_crowd_of_groups_is_refused_before_it_is_read(
        self, client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fault = build_crash("j-w0-0", 0).to_json()
        told = [{"entered": ",".join(["1:1"] * 500)}] * (server.MAX_FAULT_TOKENS // 500 + 1)
        monkeypatch.setattr(server, "FaultReport", None)
        for escaped in (False, True):
            body = json.dumps(fault | {"ranks": told})
            body = body.replace("entered", "\\u0065ntered").replace(",1", "\\u002c1") if escaped else body
            answer = await client.post("/v1/faults", data=body, **W0)
            assert answer.status == 400
            assert str(server.MAX_FAULT_TOKENS) in (await answer.json())["error"]

    @pytest.mark.parametrize("ranks", [7, [7], [{"entered": 7}]], ids=str)
    async def test_groups_that_are_none_are_refused_as_others_are(self, client: Client, ranks: Any) -> None:
        body = build_crash("j-w0-0", 0).to_json() | {"ranks": ranks}
        assert (await client.post("/v1/faults", json=body, **W0)).status == 400

    async def test_a_worker_whose_ranks_are_all_in_many_groups_has_room(
        self, client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sidecars, "FAULT_ACK_TIMEOUT_SECONDS", 0.0)
        entered = format_entered({2**32 - 1 - n: 2**40 for n in range(MAX_ENTERED_GROUPS)})
        stack = 'File "x", line 1, in f(a, b)\n' * 100
        rank = RankState(1, "TRAIN", 0.5, 1, "NONE", 1, 1, 1, 0.5, "S", True, stack, entered=entered)
        groups = tuple(Communicator(identity, "0-1023") for identity in range(MAX_COMMUNICATORS))
        names, blocked = ("j-w1-0",) * 64, (BlockedConnection(0, "10.0.0.1:1", 2.0),) * 64
        fault = replace(
            build_crash("j-w0-0", 0), ranks=(rank,) * 128, unreachable=names, missing=names, blocked=blocked
        )
        fault = replace(fault, communicators=groups)
        assert (await client.post("/v1/faults", json=fault.to_json(), **W0)).status == 503, "it is looked into"

    async def test_the_marks_inside_of_words_do_not_count(self, client: Client) -> None:
        words = '{"[,\\' * 2000
        assert (await client.post("/v1/plan", json=BEAT | {"refused": words}, **W0)).status == 200

    async def test_a_worker_whose_gpus_all_show_all_signs_has_room(self, client: Client) -> None:
        most = 2**53
        gpu = GpuHealth(f"GPU-{36 * 'f'}", tuple(map(str, GpuSign)), *(most,) * 8, 0.123456789, most, 1e6 / 3)
        beat = BEAT | {"gpus": [asdict(gpu)] * MAX_WORKER_GPUS}
        assert (await client.post("/v1/plan", json=beat, **W0)).status == 200

    async def test_the_fullest_reports_pass(self, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sidecars, "FAULT_ACK_TIMEOUT_SECONDS", 0.0)
        beat = BEAT | {"unkillable_ranks": list(range(MAX_WORKER_RANKS))}
        assert (await client.post("/v1/plan", json=beat, **W0)).status == 200
        rank = RankState(1, "TRAIN", 0.5, 1, "NONE", 1, 1, 1, 0.5, "S", True, 'File "x", line 1, in f(a, b)\n' * 10)
        names = tuple(f"j-w{number}-0" for number in range(64))
        groups = tuple(Communicator(identity, "0-1023") for identity in range(MAX_COMMUNICATORS))
        fault = replace(build_crash("j-w0-0", 0), ranks=(rank,) * MAX_WORKER_RANKS, unreachable=names, missing=names)
        fault = replace(fault, communicators=groups)
        assert (await client.post("/v1/faults", json=fault.to_json(), **W0)).status == 503, "it is looked into"


class TestWhatBodiesCost:
    """Their worker gets a tenth of the event loop, however few calls it is."""

    @pytest.fixture
    def dear(self, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each takes 0.2 s."""

        def slowly(*given: Any, **named: Any) -> Any:
            clock.at += 0.2
            return parse_json(*given, **named)

        monkeypatch.setattr(server, "parse_json", slowly)

    @pytest.mark.usefixtures("dear")
    @pytest.mark.parametrize(("body", "status"), [(json.dumps(BEAT), 200), ("[", 400)], ids=["good", "refused"])
    async def test_counts_as_calls(self, client: Client, clock: Clock, body: str, status: int) -> None:
        read = 0
        while clock.at < NOW + 60:
            answer = await client.post("/v1/plan", data=body, **W0)
            assert answer.status in (status, 429)
            if answer.status == status:
                read += 1
                continue
            assert answer.headers["Retry-After"]
            clock.at += 0.25
        assert 5.0 < 0.2 * read < 6.0 + sidecars.WORKER_CALL_BURST * sidecars.WORKER_CALL_COST_SECONDS + 0.2
        other = json.dumps(BEAT | {"worker": "j-w1-0"})
        assert (await client.post("/v1/plan", data=other, **as_worker("j-w1-0", "uid-1"))).status == 200

    @pytest.mark.usefixtures("dear")
    async def test_counts_for_those_that_came_with_it(self, client: Client, served: SidecarService) -> None:
        begun, go_on = asyncio.Event(), asyncio.Event()
        first = asyncio.create_task(client.post("/v1/plan", data=halves(begun, go_on), **W0))
        await asyncio.wait_for(begun.wait(), 60)
        await until(lambda: client.app[server.BODY_BUDGET_KEY].remaining < server.MAX_BODIES_BYTES)
        others = [asyncio.create_task(client.post("/v1/plan", json=BEAT, **W0)) for _ in range(19)]
        calls = served._calls._buckets[sidecars.Caller("ns", "j", "j-w0-0")]
        await until(lambda: calls.left == sidecars.WORKER_CALL_BURST - 20)
        go_on.set()
        statuses = [(await asyncio.wait_for(call, 60)).status for call in (first, *others)]
        assert (statuses.count(200), statuses.count(429)) == (2, 18)

    @pytest.mark.parametrize("what", ["fault", "evidence"])
    async def test_counts_where_it_is_looked_at_later(
        self, served: SidecarService, job: JobCache, clock: Clock, monkeypatch: pytest.MonkeyPatch, what: str
    ) -> None:
        def fits(*_: Any) -> bool:
            clock.at += 0.5
            return True

        monkeypatch.setattr(sidecars, "FAULT_ACK_TIMEOUT_SECONDS", 0.0)
        monkeypatch.setattr(Communicator, "fits_world_size", fits)
        job.publish(WORLD.desired.with_plan(evidence_request="why", evidence_parts=PARTS), "2")
        groups = (Communicator(1, "0-1"),)
        for _ in range(2):
            caller = await served.authenticate(token("j-w0-0", "uid-0"), "")
            if what == "fault":
                with pytest.raises(sidecars.RetryLater):
                    await served.receive_fault(caller, replace(build_crash("j-w0-0", 0), communicators=groups))
            else:
                served.receive_evidence(caller, Evidence("why", "j-w0-0", 1, communicators=groups))
        with pytest.raises(token_review.TooManyRequests):
            await served.authenticate(token("j-w0-0", "uid-0"), "")

    async def test_of_the_largest_honest_ones_is_never_too_much(self, served: SidecarService, clock: Clock) -> None:
        heartbeat, stall, evidence = (1.0, 0.002), (30.0, 0.03), (1.5, 0.12)
        due = [(NOW + every, every, cost) for every, cost in (heartbeat, stall, stall, stall, stall, evidence)]
        while clock.at < NOW + 600:
            at, every, cost = min(due)
            due[due.index(min(due))] = (at + every, every, cost)
            clock.at = max(clock.at, at)
            caller = await served.authenticate(token("j-w0-0", "uid-0"), "")
            served.recheck_rate(caller)
            with served.charge_time(caller):
                clock.at += cost

    async def test_of_a_process_that_stands_still_is_not_its_workers(
        self, served: SidecarService, clock: Clock
    ) -> None:
        for _ in range(3):
            caller = await served.authenticate(token("j-w0-0", "uid-0"), "")
            with served.charge_time(caller):
                clock.at += 5


async def halves(begun: asyncio.Event, go_on: asyncio.Event) -> AsyncIterator[bytes]:
    """A heartbeat whose second half comes when it may."""
    data = json.dumps(BEAT).encode()
    yield data[:9]
    begun.set()
    await go_on.wait()
    yield data[9:]


async def test_two_tokens_are_none(client: Client) -> None:
    headers = [("Authorization", W0["headers"]["Authorization"])] * 2
    assert (await client.post("/v1/plan", json=BEAT, headers=headers)).status == 401


async def test_a_defect_is_said_to_nobody_and_logged_once(
    client: Client, job: JobCache, caplog: pytest.LogCaptureFixture
) -> None:
    cast(Any, job).contacts = None
    for _ in range(3):
        answer = await client.post("/v1/plan", json=BEAT, **W0)
        assert answer.status == 500
        assert (await answer.json()) == {"error": "the operator cannot answer this; its log says why"}
    assert len([record for record in caplog.records if record.levelno >= logging.ERROR]) == 1


async def heard(job: JobCache) -> None:
    """Returns when the first of its workers has been."""
    async with asyncio.timeout(60):
        while not job.contacts:  # noqa: ASYNC110  # one of several tells nobody
            await asyncio.sleep(0)


async def test_a_poll_is_held_until_the_plan_changes(client: Client, job: JobCache) -> None:
    version = WORLD.plan.version
    poll = asyncio.create_task(client.post(f"/v1/plan?after={version}&wait=10", json=BEAT, **W0))
    await heard(job)
    assert not poll.done()
    changed = WORLD.desired.with_plan(checkpoint_request=7)
    job.publish(changed, "2")
    answer = await asyncio.wait_for(poll, 60)
    assert (await answer.json())["checkpoint_request"] == 7


async def test_a_poll_without_news_ends_with_204(client: Client) -> None:
    answer = await client.post(f"/v1/plan?after={WORLD.plan.version}&wait=0.05", json=BEAT, **W0)
    assert answer.status == 204


async def test_a_fault_is_taken_once_what_was_decided_is_written(client: Client, job: JobCache) -> None:
    fault = build_crash("j-w0-0", 0)
    post = asyncio.create_task(client.post("/v1/faults", json=fault.to_json(), **W0))
    await asyncio.wait_for(job.wake.wait(), 60)
    assert list(job.faults.values()) == [fault]
    assert not post.done()
    job.publish(WORLD.desired.settle_faults((fault.name,)), "2")
    assert (await asyncio.wait_for(post, 60)).status == 202
    assert not job.faults
    again = await client.post("/v1/faults", json=fault.to_json(), **W0)
    assert again.status == 202


async def test_a_fault_that_is_looked_into_is_to_be_sent_again(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sidecars, "FAULT_ACK_TIMEOUT_SECONDS", 0.05)
    answer = await client.post("/v1/faults", json=build_crash("j-w0-0", 0).to_json(), **W0)
    assert answer.status == 503
    assert answer.headers["Retry-After"]


async def test_nobody_speaks_for_another(client: Client) -> None:
    for path, body in (("/v1/faults", build_crash("j-w1-0", 1)), ("/v1/plan", Heartbeat(worker="j-w1-0"))):
        answer = await client.post(path, json=body.to_json(), **W0)
        assert answer.status == 403, path


async def test_evidence_is_kept_while_it_is_asked_for(client: Client, job: JobCache) -> None:
    job.publish(WORLD.desired.with_plan(evidence_request="why"), "2")
    old, new = (Evidence(request, "j-w0-0", 1) for request in ("before", "why"))
    for evidence in (old, new):
        answer = await client.post(f"/v1/evidence/{evidence.request}", json=evidence.to_json(), **W0)
        assert answer.status == 202
    assert job.evidence == {"j-w0-0": new}
    mismatch = await client.post("/v1/evidence/why", json=old.to_json(), **W0)
    assert mismatch.status == 400


async def test_evidence_about_other_ranks_or_groups_beyond_the_job_is_dropped(client: Client, job: JobCache) -> None:
    job.publish(WORLD.desired.with_plan(evidence_request="why", evidence_parts=PARTS), "2")
    own, other = RankOperations(0, ""), RankOperations(1, "")
    for group, kept in ((Communicator(1, "0-1"), (own,)), (Communicator(1, "0-1048575"), ())):
        told = Evidence("why", "j-w0-0", 1, communicators=(group,), operations=(own, other))
        assert (await client.post("/v1/evidence/why", json=told.to_json(), **W0)).status == 202
        assert job.evidence["j-w0-0"].operations == kept
        assert bool(job.evidence["j-w0-0"].communicators) is bool(kept)


async def test_more_collectives_than_there_is_room_for_are_to_be_sent_again(
    client: Client, job: JobCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sidecars, "MAX_OPERATION_BYTES", 40)
    told = Evidence("why", "j-w0-0", 1).to_json()
    job.evidence["j-w1-0"] = Evidence("why", "j-w1-0", 1, operations=(RankOperations(1, "A" * 128),))
    for parts, status in ((PARTS, 503), (PARTS[:1], 202)):
        job.publish(WORLD.desired.with_plan(evidence_request="why", evidence_parts=parts), "2")
        assert (await client.post("/v1/evidence/why", json=told, **W0)).status == status


async def test_operations_that_are_none_are_refused(client: Client, job: JobCache) -> None:
    job.publish(WORLD.desired.with_plan(evidence_request="why"), "2")
    body = Evidence("why", "j-w0-0", 1).to_json() | {"operations": [{"rank": 0, "operations": "!"}]}
    assert (await client.post("/v1/evidence/why", json=body, **W0)).status == 400
    assert not job.evidence


async def test_only_what_matters_wakes_the_loop(client: Client, job: JobCache) -> None:
    await client.post("/v1/plan", json=BEAT, **W0)
    job.wake.clear()
    await client.post("/v1/plan", json=BEAT | {"progress": {"step": 5}}, **W0)
    assert not job.wake.is_set()
    await client.post("/v1/plan", json=BEAT | {"progress": {"step": 5}, "round": 1}, **W0)
    assert job.wake.is_set()
    assert job.contacts["j-w0-0"].heartbeat.progress.step == 5


async def test_members_that_come_to_a_new_operator_wake_the_loop_once_all_have(client: Client, job: JobCache) -> None:
    job.wake.clear()
    await client.post("/v1/plan", json=BEAT, **W0)
    assert not job.wake.is_set()
    await client.post("/v1/plan", json=BEAT | {"worker": "j-w1-0"}, **as_worker("j-w1-0", "uid-1"))
    assert job.wake.is_set()


@pytest.mark.parametrize(
    "trouble",
    [
        {"state": "Lost"},
        {"training": {"bad_loss": {"rank": 1, "step": 7}}},
        {"training": {"refused": "too many ranks"}},
    ],
)
async def test_one_that_is_in_trouble_wakes_it_at_once(client: Client, job: JobCache, trouble: dict[str, Any]) -> None:
    job.wake.clear()
    await client.post("/v1/plan", json=BEAT | trouble, **W0)
    assert job.wake.is_set()


class TestHolds:
    @pytest.mark.parametrize(
        ("workers", "hold"),
        [(1, 3.0), (510, 3.0), (511, 5.0), (2_000, 12.0), (3_000, 20.0), (5_000, 30.0), (20_000, 30.0)],
    )
    async def test_are_as_long_as_all_workers_together_need(
        self, served: SidecarService, workers: int, hold: float
    ) -> None:
        served._polls = cast(Any, dict.fromkeys(range(workers)))
        contact = WorkerContact(Heartbeat(), NOW)
        longest = max(
            served._choose_hold_seconds(replace(contact, poll_phase=part / 100), 3.0, 30.0) for part in range(100)
        )
        assert hold <= longest <= (3.0 if hold == 3.0 else min(30.0, hold + 3.0))
        assert served._choose_hold_seconds(contact, 3.0, 0.0) == 3.0, "an older sidecar's"
        assert served._choose_hold_seconds(contact, 3.0, 4.0) <= 4.0

    async def test_come_to_an_end_one_after_the_other(self, served: SidecarService, clock: Clock) -> None:
        """So that the steps of a job are heard of more often than each worker's."""
        served._polls = cast(Any, dict.fromkeys(range(3_000)))
        for number in range(4):
            caller = sidecars.Caller("ns", "j", f"j-w{number}-0")
            with suppress(TimeoutError):
                await served.poll(caller, Heartbeat(caller.worker), WORLD.plan.version, 0.0)
        job = served._get_job(sidecars.Caller("ns", "j", "j-w0-0"))
        ends = sorted(
            (clock.monotonic() + served._choose_hold_seconds(c, 3.0, 30.0)) % 20 for c in job.contacts.values()
        )
        gaps = [(after - before) % 20 for before, after in zip(ends, [*ends[1:], ends[0]], strict=True)]
        assert 2 < min(gaps) <= max(gaps) < 8

    async def test_a_worker_is_heard_until_its_machine_was_heard_last(
        self, served: SidecarService, clock: Clock
    ) -> None:
        caller = sidecars.Caller("ns", "j", "j-w0-0")
        job = served._get_job(caller)
        poll = asyncio.create_task(
            served.poll(caller, Heartbeat("j-w0-0"), WORLD.plan.version, 30.0, 30.0, lambda: 6.0)
        )
        await heard(job)
        contact = job.contacts["j-w0-0"]
        clock.at += 20.0
        assert contact.is_reporting(clock.now(), 10.0)
        job.wake.clear()
        poll.cancel()  # its connection has ended
        await asyncio.gather(poll, return_exceptions=True)
        assert job.wake.is_set(), "its job is looked at"
        assert contact.last_seen_at == clock.now() - 6.0
        clock.at += 3.0
        assert contact.is_reporting(clock.now(), 10.0)
        clock.at += 2.0
        assert not contact.is_reporting(clock.now(), 10.0)


class TestPolls:
    async def test_a_new_one_ends_the_older_one_of_its_worker(self, client: Client, job: JobCache) -> None:
        path = f"/v1/plan?after={WORLD.plan.version}&wait=30"
        older = asyncio.create_task(client.post(path, json=BEAT, **W0))
        await heard(job)
        newer = asyncio.create_task(client.post(path, json=BEAT, **W0))
        assert (await asyncio.wait_for(older, 60)).status == 204
        assert not newer.done()
        assert job.contacts["j-w0-0"].open_polls == 1
        job.publish(WORLD.desired.with_plan(checkpoint_request=7), "2")
        assert (await asyncio.wait_for(newer, 60)).status == 200

    async def test_a_heartbeat_in_between_ends_none(self, client: Client, job: JobCache) -> None:
        held = asyncio.create_task(client.post(f"/v1/plan?after={WORLD.plan.version}&wait=30", json=BEAT, **W0))
        await heard(job)
        beat = await client.post(f"/v1/plan?after={WORLD.plan.version}&wait=0", json=BEAT, **W0)
        assert beat.status == 204
        assert not held.done()
        job.publish(WORLD.desired.with_plan(checkpoint_request=7), "2")
        assert (await asyncio.wait_for(held, 60)).status == 200

    async def test_who_calls_without_end_is_told_to_wait(self, client: Client, clock: Clock) -> None:
        statuses = [
            (await client.post("/v1/plan", json=BEAT, **W0)).status for _ in range(sidecars.WORKER_CALL_BURST + 1)
        ]
        assert statuses[-2:] == [200, 429]
        other = BEAT | {"worker": "j-w1-0"}
        assert (await client.post("/v1/plan", json=other, **as_worker("j-w1-0", "uid-1"))).status == 200
        clock.at += 1
        assert (await client.post("/v1/plan", json=BEAT, **W0)).status == 200


class TestTokens:
    async def test_one_is_reviewed_once_a_minute(self, client: Client, reviews: Reviews, clock: Clock) -> None:
        for _ in range(3):
            await client.post("/v1/plan", json=BEAT, **W0)
        assert reviews.asked == 1
        clock.at += token_review.TOKEN_REVIEW_TTL_SECONDS
        await client.post("/v1/plan", json=BEAT, **W0)
        assert reviews.asked == 2

    @pytest.mark.parametrize("there", [True, False])
    async def test_of_a_pod_that_is_known_to_stay_it_is_seldom_reviewed(
        self, memory: JobRegistry, job: JobCache, reviews: Reviews, clock: Clock, there: bool
    ) -> None:
        assert job.desired is not None
        stays = there
        served = SidecarService(cast(Cluster, reviews), memory, clock, lambda holder: stays and holder.uid == "uid-0")
        proof = token("j-w0-0", "uid-0")
        for _ in range(10):
            await served.authenticate(proof, "192.0.2.1")
            clock.at += 14.0
        assert reviews.asked == (1 if there else 2)
        clock.at += token_review.LIVE_POD_TOKEN_TTL_SECONDS
        await served.authenticate(proof, "192.0.2.1")
        assert reviews.asked == (2 if there else 3), "for ever is never"
        clock.at += token_review.TOKEN_REVIEW_TTL_SECONDS
        stays, asked, reviews.error = False, reviews.asked, None
        await served.authenticate(proof, "192.0.2.1")
        assert reviews.asked == asked + 1, "its pod has gone: whether the token has, too, says the API server"

    async def test_those_that_came_together_are_not_due_together(self) -> None:
        parts = [token_review._get_ttl_share(bytes([n])) for n in range(256)]
        assert min(parts) * token_review.LIVE_POD_TOKEN_TTL_SECONDS > token_review.TOKEN_REVIEW_TTL_SECONDS
        assert max(parts) <= 1 < len(set(parts))

    async def test_many_calls_share_one_review(self, client: Client, reviews: Reviews) -> None:
        reviews.gate.clear()
        calls = [asyncio.create_task(client.post("/v1/plan", json=BEAT, **W0)) for _ in range(20)]
        await until(lambda: reviews.asked > 0)
        reviews.gate.set()
        assert {(await call).status for call in calls} == {200}
        assert reviews.asked == 1

    async def test_who_hangs_up_takes_nobodys_review_away(self, served: SidecarService, reviews: Reviews) -> None:
        reviews.gate.clear()
        good = token("j-w0-0", "uid-0")
        first, second = (asyncio.create_task(served.authenticate(good, "10.0.0.1")) for _ in range(2))
        await until(lambda: reviews.asked > 0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        reviews.gate.set()
        assert (await second).worker == "j-w0-0"
        assert reviews.asked == 1

    @pytest.mark.parametrize(
        "text",
        [
            "garbage",
            "a.b.c",
            "a." + base64.urlsafe_b64encode(b"[]").decode() + ".c",
            "a." + base64.urlsafe_b64encode(b"[" * 6000).decode().rstrip("=") + ".c",
            token("j-w0-0", "uid-0", aud="https://kubernetes.default.svc"),
            token("j-w0-0", "uid-0", aud={"pacekeeper": 1, "x": [7]}),
            token("j-w0-0", "uid-0", exp=NOW - 86400),
            token("j-w0-0", "uid-0", exp="tomorrow"),
            token("j-w0-0", "uid-0", exp=float("nan")),
        ],
        ids=["words", "no base64", "no claims", "no end", "audience", "audiences", "expired", "never", "NaN"],
    )
    async def test_what_is_no_token_is_refused_without_asking(
        self, client: Client, reviews: Reviews, text: str
    ) -> None:
        assert (await client.post("/v1/plan", json=BEAT, **bearing(text))).status == 401
        assert reviews.asked == 0

    async def test_a_clock_that_is_hours_off_refuses_nobody(self, client: Client, clock: Clock) -> None:
        clock.at += 5 * 3600
        assert (await client.post("/v1/plan", json=BEAT, **W0)).status == 200

    async def test_a_refused_one_is_not_asked_about_again_at_once(
        self, client: Client, reviews: Reviews, clock: Clock
    ) -> None:
        forged = as_worker("j-w0-0", "uid-0", forged=1)
        for _ in range(3):
            assert (await client.post("/v1/plan", json=BEAT, **forged)).status == 401
        assert reviews.asked == 1
        clock.at += token_review.TOKEN_REFUSAL_TTL_SECONDS
        await client.post("/v1/plan", json=BEAT, **forged)
        assert reviews.asked == 2

    async def test_a_storm_of_bad_ones_is_limited_and_good_ones_pass(
        self, client: Client, reviews: Reviews, clock: Clock
    ) -> None:
        assert (await client.post("/v1/plan", json=BEAT, **W0)).status == 200
        storm = [as_worker("j-w0-0", "uid-0", forged=number) for number in range(1, 301)]
        statuses = [(await client.post("/v1/plan", json=BEAT, **bad)).status for bad in storm]
        assert statuses.count(401) == token_review.TOKEN_REFUSAL_BURST
        assert statuses[-1] == 429
        assert reviews.asked == 1 + token_review.TOKEN_REFUSAL_BURST
        assert (await client.post("/v1/plan", json=BEAT, **W0)).status == 200, "one that is known as good"
        clock.at += 10
        fresh = as_worker("j-w1-0", "uid-1")
        answer = await client.post("/v1/plan", json=BEAT | {"worker": "j-w1-0"}, **fresh)
        assert answer.status == 200, "one that is new, once the storm is over"

    async def test_good_ones_do_not_count(self, client: Client, reviews: Reviews, clock: Clock) -> None:
        for number in range(2 * token_review.TOKEN_REFUSAL_BURST):
            clock.at += 1 / sidecars.WORKER_CALLS_PER_SECOND
            answer = await client.post("/v1/plan", json=BEAT, **as_worker("j-w0-0", "uid-0", jti=number))
            assert answer.status == 200
        assert reviews.asked == 2 * token_review.TOKEN_REFUSAL_BURST

    async def test_an_api_server_that_is_away_refuses_nobody(
        self, client: Client, reviews: Reviews, caplog: pytest.LogCaptureFixture
    ) -> None:
        for error in (kopf.TemporaryError("10.0.0.1 does not answer"), kopf.PermanentError("denied")):
            reviews.error = error
            answer = await client.post("/v1/plan", json=BEAT, **W0)
            assert answer.status == 503
            assert "10.0.0.1" not in await answer.text()
        (said,) = (record for record in caplog.records if "cannot be answered" in record.getMessage())
        assert (said.levelname, said.exc_info) == ("WARNING", None), "who reads the log looks for no defect"
        assert "10.0.0.1 does not answer" in said.getMessage()
        reviews.error = None
        assert (await client.post("/v1/plan", json=BEAT, **W0)).status == 200


class TestLevels:
    @pytest.mark.parametrize("deep", ["[" * 40 + "]" * 40, '{"a":' * 40 + "1" + "}" * 40, "[[]," * 40 + "0" + "]" * 40])
    async def test_a_body_that_is_nested_deeply_is_refused_before_it_is_read(self, client: Client, deep: str) -> None:
        body = json.dumps(BEAT | {"rank_metrics": "?"}).replace('"?"', deep)
        answer = await client.post("/v1/plan", data=body, **W0)
        assert (answer.status, "nested in more than 32 levels" in await answer.text()) == (400, True)

    async def test_what_stands_in_words_is_no_nesting(self, client: Client) -> None:
        assert (await client.post("/v1/plan", json=BEAT | {"refused": "[" * 100}, **W0)).status == 200

    @pytest.mark.parametrize("name", ["membership", "round"])
    async def test_the_next_membership_and_round_have_room(self, client: Client, name: str) -> None:
        near = WORLD.plan.membership + sidecars.MAX_COUNTER_JUMP
        assert (await client.post("/v1/plan", json=BEAT | {name: near}, **W0)).status == 200
        answer = await client.post("/v1/plan", json=BEAT | {name: 10**9}, **W0)
        assert (answer.status, f"{name}: 1000000000 is far above the plan's" in await answer.text()) == (400, True)


class TestFaults:
    @pytest.fixture(autouse=True)
    def impatient(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sidecars, "FAULT_ACK_TIMEOUT_SECONDS", 0.0)

    async def send(self, client: Client, name: str, **changes: Any) -> int:
        fault = replace(build_crash("j-w0-0", 0), name=name, **changes)
        return (await client.post("/v1/faults", json=fault.to_json(), **W0)).status

    async def test_a_name_is_its_workers_own(self, client: Client, job: JobCache) -> None:
        for name in ("j-w1-0-rank-1-round-1", "x", "j-w0-0", "j-w0-0-" + "x" * 300):
            assert await self.send(client, name) == 400
        assert not job.faults

    async def test_a_worker_tells_of_its_own_ranks_only_and_of_each_once(self, client: Client, job: JobCache) -> None:
        stalled, others = build_stall("j-w0-0", 0), build_stall("j-w1-0", 1).ranks
        earlier = replace(stalled.ranks[0], step=1)
        told = replace(stalled, ranks=(earlier, *stalled.ranks, *others))
        assert (await client.post("/v1/faults", json=told.to_json(), **W0)).status == 503
        assert job.faults[stalled.name].ranks == stalled.ranks

    async def test_of_too_many_the_oldest_stay(
        self, client: Client, job: JobCache, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(faults, "MAX_FAULTS_PER_WORKER", 3)
        statuses = [await self.send(client, f"j-w0-0-{number}") for number in range(5)]
        assert statuses == [503, 503, 503, 429, 429]
        assert list(job.faults) == ["j-w0-0-0", "j-w0-0-1", "j-w0-0-2"]
        assert await self.send(client, "j-w0-0-1") == 503, "one that is known is asked for again"
        job.publish(WORLD.desired.settle_faults(("j-w0-0-1",)), "2")
        clock.at += 1
        assert await self.send(client, "j-w0-0-4") == 503, "there is room again"

    async def test_of_a_workers_stalls_the_newest_is_kept_and_the_others_need_no_answer(
        self, client: Client, job: JobCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A rank that evaluates for half an hour has all others stall, again and again."""
        monkeypatch.setattr(faults, "MAX_FAULTS_PER_WORKER", 2)

        async def tell(number: int, round_: int = 1) -> int:
            fault = replace(
                build_stall("j-w0-0", 0, noticed_at=NOW - 60 + number), name=f"j-w0-0-stall-{number}", round=round_
            )
            return (await client.post("/v1/faults", json=fault.to_json(), **W0)).status

        assert await self.send(client, "j-w0-0-crash") == 503
        assert [await tell(number) for number in (1, 3, 9)] == [503, 503, 503]
        assert list(job.faults) == ["j-w0-0-crash", "j-w0-0-stall-9"]
        assert [await tell(number) for number in (3, 1)] == [202, 202], "told anew"
        assert await tell(9) == 503, "it is not dealt with"
        assert await tell(2, round_=2) == 503, "of a later round"
        assert list(job.faults) == ["j-w0-0-crash", "j-w0-0-stall-2"]
        assert await self.send(client, "j-w0-0-crash-2") == 429, "there is room for one more stall only"
        other = build_stall("j-w1-0", 1)
        assert (await client.post("/v1/faults", json=other.to_json(), **as_worker("j-w1-0", "uid-1"))).status == 503
        assert other.name in job.faults

    async def test_a_stall_that_is_too_large_leaves_the_one_before(
        self, job: JobCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = build_stall("j-w0-0", 0, noticed_at=NOW)
        monkeypatch.setattr(faults, "MAX_FAULT_BYTES_PER_WORKER", 2000)
        assert job.faults.add(first, 3) == ""
        large = replace(build_stall("j-w0-0", 0, noticed_at=NOW + 3), name="j-w0-0-large", error="x" * 1500)
        assert "bytes" in job.faults.add(large, 3)
        assert list(job.faults) == [first.name]
        again = replace(first, name="j-w0-0-again", noticed_at=NOW + 6)
        for number in range(100):  # of none does anything stay
            again = replace(again, name=f"j-w0-0-{number}", noticed_at=NOW + 6 + number)
            assert job.faults.add(again, 3) == ""
        assert list(job.faults) == ["j-w0-0-99"]

    async def test_what_is_sent_again_starts_no_pass(self, client: Client, job: JobCache) -> None:
        job.wake.clear()
        assert await self.send(client, "j-w0-0-crash") == 503
        assert job.wake.is_set()
        job.wake.clear()
        assert await self.send(client, "j-w0-0-crash") == 503
        assert not job.wake.is_set()

    async def test_a_stall_that_waits_is_answered_once_it_is_told_anew(self, job: JobCache) -> None:
        earlier, later = (replace(build_stall("j-w0-0", 0, noticed_at=NOW + at), name=f"j-w0-0-{at}") for at in (1, 2))
        assert job.faults.add(earlier, 3) == ""
        assert not job.faults.is_superseded(earlier)
        assert job.faults.add(later, 3) == ""
        assert job.faults.is_superseded(earlier)
        assert not job.faults.is_superseded(later)
        job.faults.retain(lambda fault: fault.name != later.name)
        assert not job.faults
        assert not job.faults.is_superseded(earlier)

    async def test_their_bytes_count_too(self, client: Client, job: JobCache, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(faults, "MAX_FAULT_BYTES_PER_WORKER", 3000)
        statuses = [await self.send(client, f"j-w0-0-{number}", error="x" * 1500) for number in range(2)]
        assert statuses == [503, 429]
        assert len(job.faults) == 1

    async def test_so_do_those_of_odd_characters_and_of_all_jobs(
        self, client: Client, job: JobCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert await self.send(client, "j-w0-0-plain", error="x" * 4000) == 503
        plain = job.faults.total_bytes
        assert await self.send(client, "j-w0-0-odd", error="\N{FIRE}" + "x" * 3999) == 503
        assert job.faults.total_bytes - plain > 16_000, "each of its characters takes four bytes"
        monkeypatch.setattr(sidecars, "MAX_OPEN_FAULT_BYTES", job.faults.total_bytes - 1)
        assert await self.send(client, "j-w0-0-long", error="x" * 4000) == 503, "it is taken in few words"
        assert len(job.faults["j-w0-0-long"].error) == faults.SHORTENED_FAULT_CHARACTERS
        monkeypatch.setattr(sidecars, "GUARANTEED_FAULT_BYTES", 0)
        assert await self.send(client, "j-w0-0-more") == 429
        assert await self.send(client, "j-w0-0-odd") == 503, "that one is held"
        job.publish(WORLD.desired.settle_faults(tuple(job.faults)), "2")
        assert (job.faults.total_bytes, await self.send(client, "j-w0-0-more")) == (0, 503)

    async def test_nobody_elses_keep_a_hang_from_being_judged(
        self, client: Client, job: JobCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sidecars, "MAX_OPEN_FAULT_BYTES", -1)
        monkeypatch.setattr(sidecars, "GUARANTEED_FAULT_BYTES", 0)
        for number in range(2):
            told = build_stall(f"j-w{number}-0", number, culprit=number == 1, noticed_at=NOW)
            stack = 'File "a.py", line 1 in main\n' * 100 + 'File "b.py", line 7 in innermost'
            told = replace(told, ranks=(replace(told.ranks[0], stack=stack),), ras="x" * 2000)
            answer = await client.post("/v1/faults", json=told.to_json(), **as_worker(told.worker, f"uid-{number}"))
            assert answer.status == 503
        held = list(job.faults.values())
        assert [fault.ranks[0].stack for fault in held] == ['File "b.py", line 7 in innermost'] * 2
        assert hang.diagnose_hang(held, 2) is not None

    async def test_a_jobs_are_bounded_whoever_sends_them(
        self, client: Client, job: JobCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(faults, "MAX_JOB_FAULTS_PER_WORKER", 0)
        monkeypatch.setattr(faults, "MAX_JOB_FAULTS_BASE", 1)
        assert await self.send(client, "j-w0-0-1") == 503
        other = build_crash("j-w1-0", 1).to_json()
        answer = await client.post("/v1/faults", json=other, **as_worker("j-w1-0", "uid-1"))
        assert answer.status == 429
        assert answer.headers["Retry-After"]
        assert len(job.faults) == 1

    async def test_those_of_a_worker_that_is_gone_make_room(self, job: JobCache) -> None:
        for number in range(faults.MAX_FAULTS_PER_WORKER):
            assert job.faults.add(build_crash("j-w0-0", number), 3) == ""
        assert job.faults.add(build_crash("j-w0-0", 99), 3)
        job.publish(WORLD.desired.with_placement(workers=WORLD.state.placement.workers[1:]), "2")
        assert not job.faults
        assert job.faults.add(build_crash("j-w0-0", 99), 3) == ""


class TestClocks:
    """Of workers: they may be hours off, and may be made up."""

    @pytest.mark.parametrize("off", [-7200.0, 0.0, 7200.0])
    async def test_a_fault_is_placed_by_its_age(
        self, client: Client, job: JobCache, monkeypatch: pytest.MonkeyPatch, off: float
    ) -> None:
        monkeypatch.setattr(sidecars, "FAULT_ACK_TIMEOUT_SECONDS", 0.0)
        fault = build_crash("j-w0-0", 0, noticed_at=NOW + off - 3, sent_at=NOW + off)
        await client.post("/v1/faults", json=fault.to_json(), **W0)
        assert next(iter(job.faults.values())).noticed_at == pytest.approx(NOW - 3)

    @pytest.mark.parametrize(
        ("noticed", "sent", "placed"),
        [
            (NOW + 7200, None, NOW),
            (NOW - 7200, None, NOW - 3600),
            (NOW + 7200, 0.0, NOW),
            (NOW, NOW + 10**9, NOW - 3600),
            (NOW + 10**9, NOW, NOW),
        ],
    )
    async def test_nothing_made_up_leaves_the_last_hour(
        self,
        client: Client,
        job: JobCache,
        monkeypatch: pytest.MonkeyPatch,
        noticed: float,
        sent: float | None,
        placed: float,
    ) -> None:
        monkeypatch.setattr(sidecars, "FAULT_ACK_TIMEOUT_SECONDS", 0.0)
        fault = build_crash("j-w0-0", 0, noticed_at=noticed, sent_at=sent)
        await client.post("/v1/faults", json=fault.to_json(), **W0)
        assert next(iter(job.faults.values())).noticed_at == placed

    async def test_a_first_step_is_placed_by_its_age_and_stays_there(
        self, client: Client, job: JobCache, clock: Clock
    ) -> None:
        theirs = NOW - 7200
        beat = BEAT | {"start": {"first_step_at": theirs - 40, "started_at": theirs - 50}, "sent_at": theirs}
        await client.post("/v1/plan", json=beat, **W0)
        heard = job.contacts["j-w0-0"].heartbeat
        assert heard.start.first_step_at == pytest.approx(NOW - 40)
        assert heard.start.started_at == pytest.approx(NOW - 50)
        job.wake.clear()
        clock.at += 30  # of which the message was on its way for 10
        await client.post("/v1/plan", json=beat | {"sent_at": theirs + 20}, **W0)
        assert job.contacts["j-w0-0"].heartbeat.start.first_step_at == heard.start.first_step_at
        assert job.contacts["j-w0-0"].last_seen_at == clock.at
        assert not job.wake.is_set(), "nothing has happened"

    async def test_a_step_of_the_future_was_just_now(self, client: Client, job: JobCache) -> None:
        await client.post("/v1/plan", json=BEAT | {"start": {"first_step_at": NOW + 999.0}, "sent_at": NOW}, **W0)
        assert job.contacts["j-w0-0"].heartbeat.start.first_step_at == NOW


async def test_nobody_measures_for_another(client: Client, job: JobCache) -> None:
    job.publish(WORLD.desired.with_plan(evidence_request="why"), "2")
    anothers = Evidence("why", "j-w1-0", 1).to_json()
    assert (await client.post("/v1/evidence/why", json=anothers, **W0)).status == 403
    own, others = (RankWindow(rank, (1,), (0.1,), (0.1,), (1,)) for rank in (0, 1))
    evidence = Evidence("why", "j-w0-0", 1, (own, others))
    assert (await client.post("/v1/evidence/why", json=evidence.to_json(), **W0)).status == 202
    assert job.evidence["j-w0-0"].windows == (own,)


async def test_a_spares_evidence_is_not_read(client: Client, job: JobCache) -> None:
    job.publish(WORLD.desired.with_plan(evidence_request="why"), "2")
    answer = await client.post("/v1/evidence/why", data=b"x" * 2 * MAX_EVIDENCE_BYTES, **as_worker("j-w2-0", "uid-2"))
    assert answer.status == 202
    assert not job.evidence


class TestConnections:
    async def test_of_one_address_are_bounded(self, served: SidecarService, clock: Clock) -> None:
        held = EndpointConnections(max_per_address=2)
        async with serve_endpoint(served, clock, 0, None, address="127.0.0.1", connections=held) as port:
            first = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
            await until(lambda: held.total == 2)
            refused, third = await asyncio.open_connection("127.0.0.1", port)
            assert await closed(refused)
            third.close()
            for reader, writer in first:
                writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
                assert b"200" in await reader.readline()
                writer.close()
            await until(lambda: held.total == 0)
            assert not held.counts_by_address

    @pytest.mark.parametrize("secure", [False, True], ids=["plain", "TLS"])
    async def test_of_those_without_a_token_the_oldest_makes_room(
        self, served: SidecarService, clock: Clock, secure: bool
    ) -> None:
        body = json.dumps(BEAT).encode()
        request = (
            f"POST /v1/plan HTTP/1.1\r\nHost: x\r\nAuthorization: {W0['headers']['Authorization']}\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        ).encode() + body
        held = EndpointConnections(max_unauthenticated=2, grace_seconds=0.0)
        async with serve_endpoint(
            served, clock, 0, shown() if secure else None, address="127.0.0.1", connections=held
        ) as port:
            reader, known = await asyncio.open_connection("127.0.0.1", port, ssl=trusting() if secure else None)
            known.write(request)
            await asyncio.wait_for(reader.readuntil(b"}"), 60)
            silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
            assert await closed(silent[0][0])
            await until(lambda: held.total == 3)
            known.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"ok" in await asyncio.wait_for(reader.readuntil(b"\r\n\r\nok"), 60)
            for _, writer in silent:
                writer.close()
            await until(lambda: held.total == 1)
            known.close()
            await until(lambda: held.total == 0)
            assert not held._unauthenticated

    async def test_that_say_nothing_leave_nothing_behind(self, served: SidecarService, clock: Clock) -> None:
        """The kubelet's probes, for as long as nothing looks for circles of objects."""
        held = EndpointConnections()
        gc.collect()
        gc.disable()
        try:
            async with serve_endpoint(served, clock, 0, shown(), address="127.0.0.1", connections=held) as port:
                for _ in range(3):
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                    await until(lambda: held.total == 1)
                    writer.close()
                    await until(lambda: held.total == 0)
            assert not [each for each in gc.get_objects() if type(each) is asyncio.sslproto.SSLProtocol]
        finally:
            gc.enable()

    async def test_that_say_nothing_are_closed_in_time(
        self, served: SidecarService, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(server, "HANDSHAKE_TIMEOUT_SECONDS", 0.05)
        held = EndpointConnections()
        async with serve_endpoint(served, clock, 0, shown(), address="127.0.0.1", connections=held) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            assert await closed(reader)
            writer.close()
            assert held.total == 0

    async def test_have_small_buffers(
        self, served: SidecarService, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Fails with a Python whose asyncio has these by other names: find them, or measure a connection anew."""
        monkeypatch.setattr(asyncio.sslproto.SSLProtocol, "max_size", 256 * 2**10)
        monkeypatch.setattr(asyncio.constants, "FLOW_CONTROL_HIGH_WATER_SSL_READ", 256)
        async with serve_endpoint(served, clock, 0, shown(), address="127.0.0.1"):
            loop = asyncio.get_running_loop()
            made: Any = asyncio.sslproto.SSLProtocol(
                loop, asyncio.Protocol(), shown(), loop.create_future(), server_side=True
            )
        assert len(made._ssl_buffer) == connections.TLS_BUFFER_BYTES
        assert made._incoming_high_water == connections.TLS_BUFFER_BYTES

    @pytest.mark.parametrize(
        ("limit", "most"), [("536870912", 3072), ("max", 3072), ("", 3072), ("2147483648", 12288), ("1" * 15, 32768)]
    )
    def test_are_as_many_as_the_memory_holds(self, tmp_path: Path, limit: str, most: int) -> None:
        told = tmp_path / "memory.max"
        if limit:
            told.write_text(f"{limit}\n")
        assert connections.compute_max_by_memory(told) == most

    def test_are_no_more_than_there_are_files_for(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        few = FileLimits(1_024)
        assert connections.compute_max_connections(tmp_path / "none", FileLimits(2**20)) == 3072
        assert connections.compute_max_connections(tmp_path / "none", few) == few.connections < 3072
        EndpointConnections(max_total=few.connections).report_capacity()
        assert f"allows {few.connections} connections" in caplog.text

    def test_and_bodies_take_less_than_half_of_the_usual_memory(self, tmp_path: Path) -> None:
        held = connections.compute_max_by_memory(tmp_path / "none") * connections.CONNECTION_BYTES
        assert held + server.MAX_BODIES_BYTES < connections.DEFAULT_MEMORY_BYTES / 2
        values = yaml.safe_load((Path(__file__).parents[4] / "charts/pacekeeper/values.yaml").read_text())
        assert values["resources"]["limits"]["memory"] == f"{connections.DEFAULT_MEMORY_BYTES // 2**20}Mi"

    async def test_count_before_they_have_said_anything(self, served: SidecarService, clock: Clock) -> None:
        held = EndpointConnections(max_total=1)
        async with serve_endpoint(served, clock, 0, shown(), address="127.0.0.1", connections=held) as port:
            _, silent = await asyncio.open_connection("127.0.0.1", port)
            await until(lambda: held.total == 1)
            refused, second = await asyncio.open_connection("127.0.0.1", port)
            assert await closed(refused)
            second.close()
            silent.write(b"this is no TLS")
            await until(lambda: held.total == 0)
            silent.close()

    @pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="the machine has no IPv6")
    async def test_come_by_both_protocols(self, served: SidecarService, clock: Clock) -> None:
        async with serve_endpoint(served, clock, 0, None) as port, aiohttp.ClientSession() as session:
            for host in ("127.0.0.1", "[::1]"):
                async with session.get(f"http://{host}:{port}/healthz") as answer:
                    assert answer.status == 200

    async def test_what_is_not_http_is_answered_and_not_logged(
        self, served: SidecarService, clock: Clock, caplog: pytest.LogCaptureFixture
    ) -> None:
        requests = [
            b"garbage\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 100_000 + b"\r\n\r\n",
            b"POST /v1/plan HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
            b"POST /v1/plan HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
            b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\xff: \xff\r\n\r\n",
        ]
        async with serve_endpoint(served, clock, 0, None, address="127.0.0.1") as port:
            for request in requests:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(request)
                status = await asyncio.wait_for(reader.readline(), 60)
                assert status.split()[1:2] == [b"400"], request[:40]
                assert b"Traceback" not in await asyncio.wait_for(reader.read(), 60)
                writer.close()
        assert not caplog.records

    async def test_an_idle_one_is_closed(
        self, served: SidecarService, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(server, "KEEPALIVE_TIMEOUT_SECONDS", 0.1)
        async with serve_endpoint(served, clock, 0, None, address="127.0.0.1") as port:
            for begun in (b"", b"POST /v1/plan HTTP/1.1\r\nHost:"):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(begun)
                assert await closed(reader), begun
                writer.close()

    async def test_at_a_full_door_each_has_its_time(self, served: SidecarService, clock: Clock) -> None:
        held = EndpointConnections(max_unauthenticated=2, grace_seconds=30.0)
        async with serve_endpoint(served, clock, 0, None, address="127.0.0.1", connections=held) as port:
            first = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
            await until(lambda: held.total == 2)
            reader, third = await asyncio.open_connection("127.0.0.1", port)
            third.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(first[0][0].read(), 0.2)
            assert held.total == 2
            first[0][1].close()  # it makes room by itself
            assert b"200" in await asyncio.wait_for(reader.readline(), 60)
            for writer in (first[1][1], third):
                writer.close()
            await until(lambda: held.total == 0)
            assert not held._unauthenticated_counts

    async def test_who_crowds_the_door_makes_room_at_once(
        self, served: SidecarService, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(connections, "MAX_UNAUTHENTICATED_PER_ADDRESS", 2)
        held = EndpointConnections(max_unauthenticated=4, grace_seconds=30.0)
        async with serve_endpoint(served, clock, 0, None, address="127.0.0.1", connections=held) as port:
            patient = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0))
            await until(lambda: held.total == 1)
            crowd = [await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.3", 0)) for _ in range(4)]
            assert await closed(crowd[0][0])
            await until(lambda: held.total == 4)
            assert held.counts_by_address == {"127.0.0.2": 1, "127.0.0.3": 3}
            for _, writer in (patient, *crowd):
                writer.close()
            await until(lambda: held.total == 0)

    async def test_thousands_at_once_are_all_served_in_turn(self, served: SidecarService, clock: Clock) -> None:
        context = trusting()  # one for all: it reads the machine's list of authorities

        async def call(port: int, number: int) -> bytes:
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", port, ssl=context, local_addr=(f"127.0.1.{1 + number % 50}", 0)
            )
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            status = await reader.readline()
            writer.close()
            return status

        held = EndpointConnections(max_unauthenticated=8)
        async with serve_endpoint(served, clock, 0, shown(), address="127.0.0.1", connections=held) as port:
            answers = await asyncio.gather(*(call(port, number) for number in range(200)))
        assert {answer.split()[1] for answer in answers} == {b"200"}

    async def test_the_kernel_asks_after_the_other_side(self, served: SidecarService, clock: Clock) -> None:
        """So a machine that is gone does not hold its poll for longer than a short one would last."""
        held, began = EndpointConnections(), time.monotonic() - 0.1  # the kernel counts in ticks
        async with serve_endpoint(served, clock, 0, None, address="127.0.0.1", connections=held) as port:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            await until(lambda: held.total == 1)
            (connection,) = held._open.values()
            for option in (socket.TCP_KEEPIDLE, socket.TCP_USER_TIMEOUT):
                assert connection.getsockopt(socket.IPPROTO_TCP, option)
            assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            await asyncio.sleep(0.2)
            assert connection.silent_seconds is not None
            assert 0.2 <= connection.silent_seconds <= time.monotonic() - began
            writer.close()
            await until(lambda: held.total == 0)
            at_the_end = connection.silent_seconds
            assert at_the_end is not None
            assert at_the_end <= time.monotonic() - began
            await asyncio.sleep(0.1)
            assert connection.silent_seconds == at_the_end

    async def test_a_poll_ends_with_its_connection(self, served: SidecarService, clock: Clock, job: JobCache) -> None:
        body = json.dumps(BEAT).encode()
        request = (
            f"POST /v1/plan?after={WORLD.plan.version}&wait=30 HTTP/1.1\r\nHost: x\r\n"
            f"Authorization: {W0['headers']['Authorization']}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        async with serve_endpoint(served, clock, 0, None, address="127.0.0.1") as port:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request.encode() + body)
            await heard(job)
            assert job.contacts["j-w0-0"].open_polls == 1
            writer.close()
            await until(lambda: job.contacts["j-w0-0"].open_polls == 0)


def shown() -> ssl.SSLContext:
    """With a certificate that nobody trusts."""
    return (
        certificates.create_authority(datetime.now(UTC))
        .issue_serving_certificate(("127.0.0.1",), datetime.now(UTC))
        .to_ssl_context()
    )


def trusting() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


async def closed(reader: asyncio.StreamReader) -> bool:
    """Whether the other side ends the connection without a word."""
    try:
        return await asyncio.wait_for(reader.read(), 10) == b""
    except ConnectionError:
        return True


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  # of others' state, which sets no event
            await asyncio.sleep(0)


class TestPatterns:
    @pytest.fixture
    async def asked(self, job: JobCache) -> JobCache:
        job.publish(WORLD.desired.with_plan(profile=ProfileRequest("profile-7", 100)), "2")
        return job

    async def test_are_kept_as_they_came_while_they_are_asked_for(self, client: Client, asked: JobCache) -> None:
        assert (await client.post("/v1/patterns/profile-7/0", data=b'{"any":1}', **W0)).status == 202
        assert asked.profile.by_rank == {0: b'{"any":1}'}
        assert asked.profile.newest_at is not None
        asked.publish(WORLD.desired, "3")
        assert asked.profile.by_rank == {}

    @pytest.mark.parametrize("path", ["profile-6/0", "profile-7/1", "profile-7/999"], ids=str)
    async def test_of_other_windows_and_ranks_are_not_even_read(
        self, client: Client, asked: JobCache, path: str
    ) -> None:
        assert (await client.post(f"/v1/patterns/{path}", data=b"x" * 2**20, **W0)).status == 202
        assert asked.profile.by_rank == {}

    async def test_are_bounded(self, client: Client, asked: JobCache, monkeypatch: pytest.MonkeyPatch) -> None:
        assert (await client.post("/v1/patterns/profile-7/0", data=b"x" * 2**15, **W0)).status == 413
        assert (await client.post("/v1/patterns/profile-7/0", data=b"[" * 5000, **W0)).status == 400
        assert (await client.post("/v1/patterns/profile-7/x", data=b"{}", **W0)).status == 400
        monkeypatch.setattr(sidecars, "MAX_HELD_PROFILE_BYTES", -1)
        assert (await client.post("/v1/patterns/profile-7/0", data=b"{}", **W0)).status == 503
        assert asked.profile.by_rank == {}

    async def test_all_of_them_wake_the_loop(self, client: Client, asked: JobCache) -> None:
        asked.profile.by_rank = dict.fromkeys(range(1, WORLD.plan.world_size), b"{}")
        asked.wake.clear()
        await client.post("/v1/patterns/profile-7/0", data=b"{}", **W0)
        assert asked.wake.is_set()
