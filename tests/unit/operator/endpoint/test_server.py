"""The endpoint for sidecars, over real HTTP(S). Only the token reviews of the API server are simulated."""

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

from pacekeeper.checkpointing.server.job_secret import ServerSettings, obtain_secret
from pacekeeper_analysis.failures import hang
from pacekeeper_analysis.failures.gpu_health import GpuSign
from pacekeeper_analysis.protocol.communicators import Communicator, format_entered
from pacekeeper_analysis.protocol.decoding import parse_json
from pacekeeper_analysis.protocol.plan import CheckpointEndpoint, WorkerPlan
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
from pacekeeper_analysis.protocol.requests import (
    EvidencePart,
    EvidenceRequest,
    ProbeRequest,
    ProbeTarget,
    ProfileRequest,
    WorkerRequests,
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
from pacekeeper_operator.pods.checkpoint_server import build_checkpoint_server_name
from pacekeeper_rank.collectives.communicators import MAX_COMMUNICATORS
from pacekeeper_rank.records import MAX_ENTERED_GROUPS
from testing.operators.observations import NOW, build_crash, build_stall, build_training

OBSERVATION = build_training(replicas=2, spares=1)
Client = TestClient[web.Request, web.Application]


class ManualClock(OperatorRuntime):
    """A runtime whose clocks stand still until a test moves them."""

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
    """The API server's token reviews. The claims of a token name its pod, without a signature."""

    requests: int = 0
    error: Exception | None = None
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.gate.set()

    async def create(self, _kind: ResourceKind, body: Object) -> Object:
        self.requests += 1
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
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def registry() -> JobRegistry:
    return JobRegistry(0.0)


@pytest.fixture
async def job(registry: JobRegistry) -> JobCache:
    job = registry.get_or_create(OBSERVATION.job)
    job.publish(OBSERVATION.desired, "1")
    return job


@pytest.fixture
def sidecar_service(registry: JobRegistry, job: JobCache, reviews: Reviews, clock: ManualClock) -> SidecarService:  # noqa: ARG001
    return SidecarService(cast(Cluster, reviews), registry, clock)


@pytest.fixture
async def client(sidecar_service: SidecarService, clock: ManualClock) -> AsyncIterator[Client]:
    async with TestClient(TestServer(create_application(sidecar_service, clock))) as client:
        yield client
    assert not clock.failed.is_set()


def build_token(pod: str, uid: str, **claims: Any) -> str:
    payload = {"aud": ["pacekeeper"], "exp": NOW + 3600, "pod": pod, "uid": uid} | claims
    return f"header.{base64.urlsafe_b64encode(json.dumps(payload).encode()).decode().rstrip('=')}.signature"


def build_bearer_header(text: str) -> dict[str, Any]:
    return {"headers": {"Authorization": f"Bearer {text}"}}


def build_worker_request(name: str, uid: str, **claims: Any) -> dict[str, Any]:
    return build_bearer_header(build_token(name, uid, **claims))


W0 = build_worker_request("j-w0-0", "uid-0")
PARTS = (EvidencePart.WINDOWS, EvidencePart.OPERATIONS)
HEARTBEAT = Heartbeat(worker="j-w0-0", state=LauncherState.RUNNING).to_json()


async def test_a_worker_receives_its_own_part_of_the_plan(client: Client) -> None:
    answer = await client.post("/v1/plan", json=HEARTBEAT, **W0)
    assert answer.status == 200
    assert WorkerPlan.from_json(await answer.json()) == OBSERVATION.plan.build_worker_plan("j-w0-0")


@pytest.mark.parametrize(
    ("caller", "status"),
    [
        ({}, 401),
        (build_worker_request("j-w0-0", "uid-0", aud=["another"]), 401),
        (build_worker_request("", ""), 403),
        (build_worker_request("j-w0-0", "uid-of-another"), 403),
        (build_worker_request("j-w9-0", "uid-9"), 403),
        (build_worker_request("somebody", "uid"), 403),
        (build_worker_request("k-w0-0", "uid-0"), 503),
    ],
    ids=["no token", "other audience", "not of a pod", "another's uid", "no worker", "no worker's name", "no such job"],
)
async def test_a_caller_that_is_no_worker_is_refused(client: Client, caller: dict[str, Any], status: int) -> None:
    answer = await client.post("/v1/plan", json=HEARTBEAT, **caller)
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
    ("path", "limit"),
    [
        ("/v1/plan", MAX_HEARTBEAT_BYTES),
        ("/v1/faults", MAX_FAULT_BYTES),
        ("/v1/evidence/why", MAX_EVIDENCE_BYTES),
    ],
)
@pytest.mark.parametrize("announced", [True, False], ids=["with its length", "in pieces"])
async def test_a_huge_body_is_refused_before_it_is_read(
    client: Client, job: JobCache, path: str, limit: int, announced: bool
) -> None:
    job.publish(OBSERVATION.desired.with_requests(evidence=EvidenceRequest("why")), "2")
    sent, endless = 0, 2**30

    async def send_pieces() -> AsyncIterator[bytes]:
        nonlocal sent
        while sent < endless:
            sent += limit // 4
            yield b" " * (limit // 4)

    headers = W0["headers"] | ({"Content-Length": str(endless)} if announced else {})
    answer = await client.post(path, data=send_pieces(), headers=headers)
    assert answer.status == 413
    assert sent < 2**26, "the buffers on the way hold some"


@pytest.mark.parametrize(
    "query",
    [
        *("wait=nan", "wait=inf", "wait=-1", "wait=1e309", "wait=x", "wait="),
        *("after=nan", "after=1e3", "after=x", "after=", "after=" + "1" * 5000),
    ],
)
async def test_an_invalid_query_is_refused(client: Client, query: str) -> None:
    answer = await client.post(f"/v1/plan?{query}", json=HEARTBEAT, **W0)
    assert answer.status == 400
    assert query[:4] in (await answer.json())["error"]


async def test_a_slow_body_times_out(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "BODY_TIMEOUT_SECONDS", 0.05)
    answered = asyncio.Event()

    async def send_pieces() -> AsyncIterator[bytes]:
        yield b"{"
        await answered.wait()

    answer = await client.post("/v1/plan", data=send_pieces(), **W0)
    answered.set()
    assert answer.status == 408


class TestBodies:
    """Bodies of any number and content."""

    async def test_one_body_per_worker_is_read_at_a_time(self, client: Client, clock: ManualClock) -> None:
        begun, go_on = asyncio.Event(), asyncio.Event()
        first = asyncio.create_task(client.post("/v1/plan", data=send_in_halves(begun, go_on), **W0))
        await asyncio.wait_for(begun.wait(), 60)
        bodies = client.app[server.BODY_BUDGET_KEY]
        await wait_until(lambda: bodies.remaining < server.MAX_BODIES_BYTES)
        second = asyncio.create_task(client.post("/v1/plan", json=HEARTBEAT, **W0))
        other = await client.post(
            "/v1/plan", json=HEARTBEAT | {"worker": "j-w1-0"}, **build_worker_request("j-w1-0", "uid-1")
        )
        assert other.status == 200, "others do not wait for it"
        assert bodies.remaining == server.MAX_BODIES_BYTES - MAX_HEARTBEAT_BYTES, "the second has not begun"
        assert not second.done()
        go_on.set()
        assert [(await asyncio.wait_for(call, 60)).status for call in (first, second)] == [200, 200]
        assert bodies.remaining == server.MAX_BODIES_BYTES
        assert not clock.failed.is_set()

    async def test_a_queued_body_waits_no_longer_than_the_body_timeout(
        self, client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(server, "BODY_TIMEOUT_SECONDS", 0.05)
        go_on = asyncio.Event()
        calls = [client.post("/v1/plan", data=send_in_halves(asyncio.Event(), go_on), **W0) for _ in range(3)]
        assert [answer.status for answer in await asyncio.gather(*calls)] == [408] * 3
        assert client.app[server.BODY_BUDGET_KEY].remaining == server.MAX_BODIES_BYTES
        assert (await client.post("/v1/plan", json=HEARTBEAT, **W0)).status == 200

    @pytest.mark.parametrize("announced", [True, False], ids=["with its length", "in pieces"])
    async def test_a_body_beyond_the_memory_budget_is_to_be_sent_again(self, client: Client, announced: bool) -> None:
        bodies = client.app[server.BODY_BUDGET_KEY]
        data = json.dumps(HEARTBEAT).encode()
        bodies.remaining = least = (len(data) if announced else MAX_HEARTBEAT_BYTES) - 1

        async def send_pieces() -> AsyncIterator[bytes]:
            yield data

        refused = await client.post("/v1/plan", data=data if announced else send_pieces(), **W0)
        assert refused.status == 503
        assert refused.headers["Retry-After"]
        assert bodies.remaining == least
        bodies.remaining += 1
        assert (await client.post("/v1/plan", data=data if announced else send_pieces(), **W0)).status == 200

    async def test_a_refused_body_returns_its_memory_budget(self, client: Client) -> None:
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
    async def test_too_many_values_are_refused_before_they_are_parsed(
        self, client: Client, job: JobCache, monkeypatch: pytest.MonkeyPatch, path: str, most: int, value: bytes
    ) -> None:
        job.publish(OBSERVATION.desired.with_requests(evidence=EvidenceRequest("why")), "2")
        monkeypatch.setattr(server, "parse_json", None)
        answer = await client.post(path, data=b'{"x":[' + b",".join([value] * most) + b"]}", **W0)
        assert answer.status == 400
        assert str(most) in (await answer.json())["error"]

    async def test_too_many_groups_are_refused_before_they_are_read(
        self, client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fault = build_crash("j-w0-0", 0).to_json()
        report = [{"entered": ",".join(["1:1"] * 500)}] * (server.MAX_FAULT_TOKENS // 500 + 1)
        monkeypatch.setattr(server, "FaultReport", None)
        for escaped in (False, True):
            body = json.dumps(fault | {"ranks": report})
            body = body.replace("entered", "\\u0065ntered").replace(",1", "\\u002c1") if escaped else body
            answer = await client.post("/v1/faults", data=body, **W0)
            assert answer.status == 400
            assert str(server.MAX_FAULT_TOKENS) in (await answer.json())["error"]

    @pytest.mark.parametrize("ranks", [7, [7], [{"entered": 7}]], ids=str)
    async def test_malformed_groups_are_refused(self, client: Client, ranks: Any) -> None:
        body = build_crash("j-w0-0", 0).to_json() | {"ranks": ranks}
        assert (await client.post("/v1/faults", json=body, **W0)).status == 400

    async def test_a_fault_whose_ranks_are_all_in_many_groups_fits(
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
        assert (await client.post("/v1/faults", json=fault.to_json(), **W0)).status == 503, "it is not decided yet"

    async def test_punctuation_inside_of_strings_does_not_count(self, client: Client) -> None:
        text = '{"[,\\' * 2000
        assert (await client.post("/v1/plan", json=HEARTBEAT | {"refused": text}, **W0)).status == 200

    async def test_a_heartbeat_whose_gpus_all_show_all_signs_fits(self, client: Client) -> None:
        most = 2**53
        gpu = GpuHealth(f"GPU-{36 * 'f'}", tuple(map(str, GpuSign)), *(most,) * 8, 0.123456789, most, 1e6 / 3)
        heartbeat = HEARTBEAT | {"gpus": [asdict(gpu)] * MAX_WORKER_GPUS}
        assert (await client.post("/v1/plan", json=heartbeat, **W0)).status == 200

    async def test_the_largest_reports_fit(self, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sidecars, "FAULT_ACK_TIMEOUT_SECONDS", 0.0)
        heartbeat = HEARTBEAT | {"unkillable_ranks": list(range(MAX_WORKER_RANKS))}
        assert (await client.post("/v1/plan", json=heartbeat, **W0)).status == 200
        rank = RankState(1, "TRAIN", 0.5, 1, "NONE", 1, 1, 1, 0.5, "S", True, 'File "x", line 1, in f(a, b)\n' * 10)
        names = tuple(f"j-w{number}-0" for number in range(64))
        groups = tuple(Communicator(identity, "0-1023") for identity in range(MAX_COMMUNICATORS))
        fault = replace(build_crash("j-w0-0", 0), ranks=(rank,) * MAX_WORKER_RANKS, unreachable=names, missing=names)
        fault = replace(fault, communicators=groups)
        assert (await client.post("/v1/faults", json=fault.to_json(), **W0)).status == 503, "it is not decided yet"


class TestBodyCost:
    """A worker gets a tenth of the event loop, however few its calls are."""

    @pytest.fixture
    def _expensive_bodies(self, clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let each body take 0.2 s to parse."""

        def parse_slowly(*given: Any, **named: Any) -> Any:
            clock.at += 0.2
            return parse_json(*given, **named)

        monkeypatch.setattr(server, "parse_json", parse_slowly)

    @pytest.mark.usefixtures("_expensive_bodies")
    @pytest.mark.parametrize(("body", "status"), [(json.dumps(HEARTBEAT), 200), ("[", 400)], ids=["good", "refused"])
    async def test_expensive_bodies_count_against_the_call_rate(
        self, client: Client, clock: ManualClock, body: str, status: int
    ) -> None:
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
        other = json.dumps(HEARTBEAT | {"worker": "j-w1-0"})
        assert (await client.post("/v1/plan", data=other, **build_worker_request("j-w1-0", "uid-1"))).status == 200

    @pytest.mark.usefixtures("_expensive_bodies")
    async def test_an_expensive_body_delays_concurrent_calls_of_its_worker(
        self, client: Client, sidecar_service: SidecarService
    ) -> None:
        begun, go_on = asyncio.Event(), asyncio.Event()
        first = asyncio.create_task(client.post("/v1/plan", data=send_in_halves(begun, go_on), **W0))
        await asyncio.wait_for(begun.wait(), 60)
        await wait_until(lambda: client.app[server.BODY_BUDGET_KEY].remaining < server.MAX_BODIES_BYTES)
        others = [asyncio.create_task(client.post("/v1/plan", json=HEARTBEAT, **W0)) for _ in range(19)]
        calls = sidecar_service._calls._buckets[sidecars.Caller("ns", "j", "j-w0-0")]
        await wait_until(lambda: calls.left == sidecars.WORKER_CALL_BURST - 20)
        go_on.set()
        statuses = [(await asyncio.wait_for(call, 60)).status for call in (first, *others)]
        assert (statuses.count(200), statuses.count(429)) == (2, 18)

    @pytest.mark.parametrize("what", ["fault", "evidence"])
    async def test_later_evaluation_counts_against_the_call_rate(
        self,
        sidecar_service: SidecarService,
        job: JobCache,
        clock: ManualClock,
        monkeypatch: pytest.MonkeyPatch,
        what: str,
    ) -> None:
        def fits_slowly(*_: Any) -> bool:
            clock.at += 0.5
            return True

        monkeypatch.setattr(sidecars, "FAULT_ACK_TIMEOUT_SECONDS", 0.0)
        monkeypatch.setattr(Communicator, "fits_world_size", fits_slowly)
        job.publish(OBSERVATION.desired.with_requests(evidence=EvidenceRequest("why", PARTS)), "2")
        groups = (Communicator(1, "0-1"),)
        for _ in range(2):
            caller = await sidecar_service.authenticate(build_token("j-w0-0", "uid-0"), "")
            if what == "fault":
                with pytest.raises(sidecars.RetryLater):
                    await sidecar_service.receive_fault(caller, replace(build_crash("j-w0-0", 0), communicators=groups))
            else:
                sidecar_service.receive_evidence(caller, Evidence("why", "j-w0-0", 1, communicators=groups))
        with pytest.raises(token_review.TooManyRequests):
            await sidecar_service.authenticate(build_token("j-w0-0", "uid-0"), "")

    async def test_the_largest_honest_bodies_stay_within_the_rate(
        self, sidecar_service: SidecarService, clock: ManualClock
    ) -> None:
        heartbeat, stall, evidence = (1.0, 0.002), (30.0, 0.03), (1.5, 0.12)
        due = [(NOW + every, every, cost) for every, cost in (heartbeat, stall, stall, stall, stall, evidence)]
        while clock.at < NOW + 600:
            at, every, cost = min(due)
            due[due.index(min(due))] = (at + every, every, cost)
            clock.at = max(clock.at, at)
            caller = await sidecar_service.authenticate(build_token("j-w0-0", "uid-0"), "")
            sidecar_service.recheck_rate(caller)
            with sidecar_service.charge_time(caller):
                clock.at += cost

    async def test_a_stalled_operator_is_not_charged_to_a_worker(
        self, sidecar_service: SidecarService, clock: ManualClock
    ) -> None:
        for _ in range(3):
            caller = await sidecar_service.authenticate(build_token("j-w0-0", "uid-0"), "")
            with sidecar_service.charge_time(caller):
                clock.at += 5


async def send_in_halves(begun: asyncio.Event, go_on: asyncio.Event) -> AsyncIterator[bytes]:
    """Send a heartbeat whose second half waits for `go_on`."""
    data = json.dumps(HEARTBEAT).encode()
    yield data[:9]
    begun.set()
    await go_on.wait()
    yield data[9:]


async def test_two_tokens_in_a_request_are_refused(client: Client) -> None:
    headers = [("Authorization", W0["headers"]["Authorization"])] * 2
    assert (await client.post("/v1/plan", json=HEARTBEAT, headers=headers)).status == 401


async def test_a_defect_is_logged_once_and_not_revealed(
    client: Client, job: JobCache, caplog: pytest.LogCaptureFixture
) -> None:
    cast(Any, job).contacts = None
    for _ in range(3):
        answer = await client.post("/v1/plan", json=HEARTBEAT, **W0)
        assert answer.status == 500
        assert (await answer.json()) == {"error": "the operator cannot answer this; its log says why"}
    assert len([record for record in caplog.records if record.levelno >= logging.ERROR]) == 1


async def wait_for_contact(job: JobCache) -> None:
    """Wait until a worker of the job has reported."""
    async with asyncio.timeout(60):
        while not job.contacts:  # noqa: ASYNC110  # no event is set
            await asyncio.sleep(0)


async def test_a_poll_is_held_until_the_plan_changes(client: Client, job: JobCache) -> None:
    version = OBSERVATION.plan.version
    poll = asyncio.create_task(client.post(f"/v1/plan?after={version}&wait=10", json=HEARTBEAT, **W0))
    await wait_for_contact(job)
    assert not poll.done()
    changed = OBSERVATION.desired.with_plan(checkpoint_request=7)
    job.publish(changed, "2")
    answer = await asyncio.wait_for(poll, 60)
    assert (await answer.json())["checkpoint_request"] == 7


async def test_a_poll_without_a_change_ends_with_204(client: Client) -> None:
    answer = await client.post(f"/v1/plan?after={OBSERVATION.plan.version}&wait=0.05", json=HEARTBEAT, **W0)
    assert answer.status == 204


async def test_a_fault_is_acknowledged_once_the_decision_is_written(client: Client, job: JobCache) -> None:
    fault = build_crash("j-w0-0", 0)
    post = asyncio.create_task(client.post("/v1/faults", json=fault.to_json(), **W0))
    await asyncio.wait_for(job.wake.wait(), 60)
    assert list(job.faults.values()) == [fault]
    assert not post.done()
    job.publish(OBSERVATION.desired.settle_faults((fault.name,)), "2")
    assert (await asyncio.wait_for(post, 60)).status == 202
    assert not job.faults
    again = await client.post("/v1/faults", json=fault.to_json(), **W0)
    assert again.status == 202


async def test_an_undecided_fault_is_to_be_sent_again(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sidecars, "FAULT_ACK_TIMEOUT_SECONDS", 0.05)
    answer = await client.post("/v1/faults", json=build_crash("j-w0-0", 0).to_json(), **W0)
    assert answer.status == 503
    assert answer.headers["Retry-After"]


async def test_a_worker_cannot_report_for_another(client: Client) -> None:
    for path, body in (("/v1/faults", build_crash("j-w1-0", 1)), ("/v1/plan", Heartbeat(worker="j-w1-0"))):
        answer = await client.post(path, json=body.to_json(), **W0)
        assert answer.status == 403, path


async def test_evidence_is_stored_only_for_the_current_request(client: Client, job: JobCache) -> None:
    job.publish(OBSERVATION.desired.with_requests(evidence=EvidenceRequest("why")), "2")
    old, new = (Evidence(request, "j-w0-0", 1) for request in ("before", "why"))
    for evidence in (old, new):
        answer = await client.post(f"/v1/evidence/{evidence.request}", json=evidence.to_json(), **W0)
        assert answer.status == 202
    assert job.evidence == {"j-w0-0": new}
    mismatch = await client.post("/v1/evidence/why", json=old.to_json(), **W0)
    assert mismatch.status == 400


async def test_evidence_about_other_ranks_or_groups_beyond_the_job_is_dropped(client: Client, job: JobCache) -> None:
    job.publish(OBSERVATION.desired.with_requests(evidence=EvidenceRequest("why", PARTS)), "2")
    own, other = RankOperations(0, ""), RankOperations(1, "")
    for group, accepted in ((Communicator(1, "0-1"), (own,)), (Communicator(1, "0-1048575"), ())):
        report = Evidence("why", "j-w0-0", 1, communicators=(group,), operations=(own, other))
        assert (await client.post("/v1/evidence/why", json=report.to_json(), **W0)).status == 202
        assert job.evidence["j-w0-0"].operations == accepted
        assert bool(job.evidence["j-w0-0"].communicators) is bool(accepted)


async def test_operations_beyond_the_memory_limit_are_to_be_sent_again(
    client: Client, job: JobCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sidecars, "MAX_OPERATION_BYTES", 40)
    report = Evidence("why", "j-w0-0", 1).to_json()
    job.evidence["j-w1-0"] = Evidence("why", "j-w1-0", 1, operations=(RankOperations(1, "A" * 128),))
    for parts, status in ((PARTS, 503), (PARTS[:1], 202)):
        job.publish(OBSERVATION.desired.with_requests(evidence=EvidenceRequest("why", parts)), "2")
        assert (await client.post("/v1/evidence/why", json=report, **W0)).status == status


async def test_malformed_operations_are_refused(client: Client, job: JobCache) -> None:
    job.publish(OBSERVATION.desired.with_requests(evidence=EvidenceRequest("why")), "2")
    body = Evidence("why", "j-w0-0", 1).to_json() | {"operations": [{"rank": 0, "operations": "!"}]}
    assert (await client.post("/v1/evidence/why", json=body, **W0)).status == 400
    assert not job.evidence


async def test_only_relevant_heartbeats_wake_the_loop(client: Client, job: JobCache) -> None:
    await client.post("/v1/plan", json=HEARTBEAT, **W0)
    job.wake.clear()
    await client.post("/v1/plan", json=HEARTBEAT | {"progress": {"step": 5}}, **W0)
    assert not job.wake.is_set()
    await client.post("/v1/plan", json=HEARTBEAT | {"progress": {"step": 5}, "round": 1}, **W0)
    assert job.wake.is_set()
    assert job.contacts["j-w0-0"].heartbeat.progress.step == 5


async def test_the_last_member_to_reach_a_new_operator_wakes_the_loop(client: Client, job: JobCache) -> None:
    job.wake.clear()
    await client.post("/v1/plan", json=HEARTBEAT, **W0)
    assert not job.wake.is_set()
    await client.post("/v1/plan", json=HEARTBEAT | {"worker": "j-w1-0"}, **build_worker_request("j-w1-0", "uid-1"))
    assert job.wake.is_set()


@pytest.mark.parametrize(
    "problem",
    [
        {"state": "Lost"},
        {"training": {"bad_loss": {"rank": 1, "step": 7}}},
        {"training": {"refused": "too many ranks"}},
    ],
)
async def test_a_heartbeat_with_a_problem_wakes_the_loop(
    client: Client, job: JobCache, problem: dict[str, Any]
) -> None:
    job.wake.clear()
    await client.post("/v1/plan", json=HEARTBEAT | problem, **W0)
    assert job.wake.is_set()


class TestPollHolds:
    @pytest.mark.parametrize(
        ("workers", "hold"),
        [(1, 3.0), (510, 3.0), (511, 5.0), (2_000, 12.0), (3_000, 20.0), (5_000, 30.0), (20_000, 30.0)],
    )
    async def test_the_hold_of_a_poll_grows_with_the_number_of_workers(
        self, sidecar_service: SidecarService, workers: int, hold: float
    ) -> None:
        sidecar_service._polls = cast(Any, dict.fromkeys(range(workers)))
        contact = WorkerContact(Heartbeat(), NOW)
        longest = max(
            sidecar_service._choose_hold_seconds(replace(contact, poll_phase=part / 100), 3.0, 30.0)
            for part in range(100)
        )
        assert hold <= longest <= (3.0 if hold == 3.0 else min(30.0, hold + 3.0))
        assert sidecar_service._choose_hold_seconds(contact, 3.0, 0.0) == 3.0, "the hold of an older sidecar"
        assert sidecar_service._choose_hold_seconds(contact, 3.0, 4.0) <= 4.0

    async def test_the_holds_of_a_job_end_at_different_times(
        self, sidecar_service: SidecarService, clock: ManualClock
    ) -> None:
        """The steps of a job are reported more often than those of each worker."""
        sidecar_service._polls = cast(Any, dict.fromkeys(range(3_000)))
        for number in range(4):
            caller = sidecars.Caller("ns", "j", f"j-w{number}-0")
            with suppress(TimeoutError):
                await sidecar_service.poll(caller, Heartbeat(caller.worker), OBSERVATION.plan.version, 0.0)
        job = sidecar_service._get_job(sidecars.Caller("ns", "j", "j-w0-0"))
        ends = sorted(
            (clock.monotonic() + sidecar_service._choose_hold_seconds(c, 3.0, 30.0)) % 20 for c in job.contacts.values()
        )
        gaps = [(after - before) % 20 for before, after in zip(ends, [*ends[1:], ends[0]], strict=True)]
        assert 2 < min(gaps) <= max(gaps) < 8

    async def test_a_worker_counts_as_reporting_until_its_host_last_answered(
        self, sidecar_service: SidecarService, clock: ManualClock
    ) -> None:
        caller = sidecars.Caller("ns", "j", "j-w0-0")
        job = sidecar_service._get_job(caller)
        poll = asyncio.create_task(
            sidecar_service.poll(caller, Heartbeat("j-w0-0"), OBSERVATION.plan.version, 30.0, 30.0, lambda: 6.0)
        )
        await wait_for_contact(job)
        contact = job.contacts["j-w0-0"]
        clock.at += 20.0
        assert contact.is_reporting(clock.now(), 10.0)
        job.wake.clear()
        poll.cancel()  # its connection has ended
        await asyncio.gather(poll, return_exceptions=True)
        assert job.wake.is_set(), "a pass of its job starts"
        assert contact.last_seen_at == clock.now() - 6.0
        clock.at += 3.0
        assert contact.is_reporting(clock.now(), 10.0)
        clock.at += 2.0
        assert not contact.is_reporting(clock.now(), 10.0)


class TestPolls:
    async def test_a_new_poll_ends_the_older_poll_of_its_worker(self, client: Client, job: JobCache) -> None:
        path = f"/v1/plan?after={OBSERVATION.plan.version}&wait=30"
        older = asyncio.create_task(client.post(path, json=HEARTBEAT, **W0))
        await wait_for_contact(job)
        newer = asyncio.create_task(client.post(path, json=HEARTBEAT, **W0))
        assert (await asyncio.wait_for(older, 60)).status == 204
        assert not newer.done()
        assert job.contacts["j-w0-0"].open_polls == 1
        job.publish(OBSERVATION.desired.with_plan(checkpoint_request=7), "2")
        assert (await asyncio.wait_for(newer, 60)).status == 200

    async def test_a_heartbeat_does_not_end_a_held_poll(self, client: Client, job: JobCache) -> None:
        poll = asyncio.create_task(
            client.post(f"/v1/plan?after={OBSERVATION.plan.version}&wait=30", json=HEARTBEAT, **W0)
        )
        await wait_for_contact(job)
        heartbeat = await client.post(f"/v1/plan?after={OBSERVATION.plan.version}&wait=0", json=HEARTBEAT, **W0)
        assert heartbeat.status == 204
        assert not poll.done()
        job.publish(OBSERVATION.desired.with_plan(checkpoint_request=7), "2")
        assert (await asyncio.wait_for(poll, 60)).status == 200

    async def test_too_frequent_calls_are_rejected_with_429(self, client: Client, clock: ManualClock) -> None:
        statuses = [
            (await client.post("/v1/plan", json=HEARTBEAT, **W0)).status for _ in range(sidecars.WORKER_CALL_BURST + 1)
        ]
        assert statuses[-2:] == [200, 429]
        other = HEARTBEAT | {"worker": "j-w1-0"}
        assert (await client.post("/v1/plan", json=other, **build_worker_request("j-w1-0", "uid-1"))).status == 200
        clock.at += 1
        assert (await client.post("/v1/plan", json=HEARTBEAT, **W0)).status == 200


class TestRequests:
    """A poll also returns when the caller's part of the open requests changes."""

    PROBE = ProbeRequest("probe-1", ("j-w0-0",), ((ProbeTarget("j-w1-0", "10.0.0.1:1"),),))
    VERSION = OBSERVATION.plan.version

    async def poll(self, client: Client, number: int = 0, received: str | None = "", wait: float = 0.0) -> Any:
        """Return the answer to a poll of worker `number` that has received this; None: there is nothing new."""
        name = f"j-w{number}-0"
        query = {"after": str(self.VERSION), "wait": str(wait)}
        query |= {} if received is None else {"requests": received}
        headers = build_worker_request(name, f"uid-{number}")
        answer = await client.post("/v1/plan", params=query, json=HEARTBEAT | {"worker": name}, **headers)
        return await answer.json() if answer.status == 200 else None

    async def hold_polls(self, client: Client, job: JobCache) -> dict[int, asyncio.Task[Any]]:
        """Hold a poll of each worker: two members and a spare."""
        polls = {number: asyncio.create_task(self.poll(client, number, wait=20.0)) for number in range(3)}
        await wait_until(lambda: sum(contact.open_polls for contact in job.contacts.values()) == len(polls))
        return polls

    @pytest.mark.parametrize(
        ("requests", "concerned"),
        [
            ({"evidence": EvidenceRequest("why-1")}, {0, 1}),
            ({"profile": ProfileRequest("profile-1", 100)}, {0, 1}),
            ({"probe": PROBE}, {0}),
        ],
        ids=["evidence", "profile", "probe"],
    )
    async def test_only_the_workers_concerned_are_answered(
        self, client: Client, job: JobCache, requests: dict[str, Any], concerned: set[int]
    ) -> None:
        polls = await self.hold_polls(client, job)
        job.publish_requests(replace(job.requests, **requests))
        answers = {number: await asyncio.wait_for(polls[number], 60) for number in concerned}
        assert {number for number, poll in polls.items() if poll.done()} == concerned
        assert all(set(answer) == {"requests"} for answer in answers.values()), "the plan is unchanged"
        assert job.plan is not None
        assert job.plan.version == self.VERSION
        for poll in polls.values():
            poll.cancel()

    async def test_a_part_is_sent_until_the_worker_returns_its_identity(self, client: Client, job: JobCache) -> None:
        """The first answer may have been lost, or the sidecar has started again."""
        job.publish_requests(replace(job.requests, evidence=EvidenceRequest("why-1")))
        first, second = await self.poll(client, wait=20.0), await self.poll(client, wait=20.0)
        assert first == second
        assert first["requests"]["evidence"]["name"] == "why-1"
        assert await self.poll(client, received=first["requests"]["identity"]) is None

    async def test_a_new_leader_withdraws_the_requests_of_the_one_before(self, client: Client) -> None:
        answer = await self.poll(client, received="why-9-ab,profile-8-cd", wait=20.0)
        assert WorkerRequests.from_json(answer["requests"]) == WorkerRequests()

    async def test_an_older_sidecar_is_answered_for_plans_only(self, client: Client, job: JobCache) -> None:
        poll = asyncio.create_task(self.poll(client, received=None, wait=20.0))
        await wait_until(lambda: any(contact.open_polls for contact in job.contacts.values()))
        job.publish_requests(replace(job.requests, evidence=EvidenceRequest("why-1")))
        await asyncio.sleep(0)
        assert not poll.done()
        assert job.desired is not None
        job.publish(job.desired.with_plan(checkpoint_request=7), "2")
        answer = await asyncio.wait_for(poll, 60)
        assert (answer["checkpoint_request"], "requests" in answer) == (7, False)

    async def test_answers_to_a_request_that_is_not_open_are_dropped(self, client: Client, job: JobCache) -> None:
        job.publish_requests(replace(job.requests, evidence=EvidenceRequest("why-2")))
        old = Evidence("why-1", "j-w0-0", 1)
        assert (await client.post("/v1/evidence/why-1", json=old.to_json(), **W0)).status == 202
        assert job.evidence == {}
        new = replace(old, request="why-2")
        await client.post("/v1/evidence/why-2", json=new.to_json(), **W0)
        assert job.evidence == {"j-w0-0": new}
        job.publish_requests(replace(job.requests, evidence=None))
        assert job.evidence == {}


class TestTokens:
    async def test_a_token_is_reviewed_once_per_minute(
        self, client: Client, reviews: Reviews, clock: ManualClock
    ) -> None:
        for _ in range(3):
            await client.post("/v1/plan", json=HEARTBEAT, **W0)
        assert reviews.requests == 1
        clock.at += token_review.TOKEN_REVIEW_TTL_SECONDS
        await client.post("/v1/plan", json=HEARTBEAT, **W0)
        assert reviews.requests == 2

    @pytest.mark.parametrize("there", [True, False])
    async def test_the_token_of_a_living_pod_is_reviewed_rarely(
        self, registry: JobRegistry, job: JobCache, reviews: Reviews, clock: ManualClock, there: bool
    ) -> None:
        assert job.desired is not None
        stays = there
        sidecar_service = SidecarService(
            cast(Cluster, reviews), registry, clock, lambda holder: stays and holder.uid == "uid-0"
        )
        proof = build_token("j-w0-0", "uid-0")
        for _ in range(10):
            await sidecar_service.authenticate(proof, "192.0.2.1")
            clock.at += 14.0
        assert reviews.requests == (1 if there else 2)
        clock.at += token_review.LIVE_POD_TOKEN_TTL_SECONDS
        await sidecar_service.authenticate(proof, "192.0.2.1")
        assert reviews.requests == (2 if there else 3), "the longest validity is bounded"
        clock.at += token_review.TOKEN_REVIEW_TTL_SECONDS
        stays, requests, reviews.error = False, reviews.requests, None
        await sidecar_service.authenticate(proof, "192.0.2.1")
        assert reviews.requests == requests + 1, "its pod is deleted: the API server decides whether the token is valid"

    async def test_reviews_of_tokens_are_spread_over_time(self) -> None:
        parts = [token_review._get_ttl_share(bytes([n])) for n in range(256)]
        assert min(parts) * token_review.LIVE_POD_TOKEN_TTL_SECONDS > token_review.TOKEN_REVIEW_TTL_SECONDS
        assert max(parts) <= 1 < len(set(parts))

    async def test_many_calls_share_one_review(self, client: Client, reviews: Reviews) -> None:
        reviews.gate.clear()
        calls = [asyncio.create_task(client.post("/v1/plan", json=HEARTBEAT, **W0)) for _ in range(20)]
        await wait_until(lambda: reviews.requests > 0)
        reviews.gate.set()
        assert {(await call).status for call in calls} == {200}
        assert reviews.requests == 1

    async def test_a_cancelled_call_does_not_cancel_a_shared_review(
        self, sidecar_service: SidecarService, reviews: Reviews
    ) -> None:
        reviews.gate.clear()
        good = build_token("j-w0-0", "uid-0")
        first, second = (asyncio.create_task(sidecar_service.authenticate(good, "10.0.0.1")) for _ in range(2))
        await wait_until(lambda: reviews.requests > 0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        reviews.gate.set()
        assert (await second).worker == "j-w0-0"
        assert reviews.requests == 1

    @pytest.mark.parametrize(
        "text",
        [
            "garbage",
            "a.b.c",
            "a." + base64.urlsafe_b64encode(b"[]").decode() + ".c",
            "a." + base64.urlsafe_b64encode(b"[" * 6000).decode().rstrip("=") + ".c",
            build_token("j-w0-0", "uid-0", aud="https://kubernetes.default.svc"),
            build_token("j-w0-0", "uid-0", aud={"pacekeeper": 1, "x": [7]}),
            build_token("j-w0-0", "uid-0", exp=NOW - 86400),
            build_token("j-w0-0", "uid-0", exp="tomorrow"),
            build_token("j-w0-0", "uid-0", exp=float("nan")),
        ],
        ids=["words", "no base64", "no claims", "no end", "audience", "audiences", "expired", "never", "NaN"],
    )
    async def test_an_invalid_token_is_refused_without_a_review(
        self, client: Client, reviews: Reviews, text: str
    ) -> None:
        assert (await client.post("/v1/plan", json=HEARTBEAT, **build_bearer_header(text))).status == 401
        assert reviews.requests == 0

    async def test_a_clock_that_is_hours_off_refuses_no_token(self, client: Client, clock: ManualClock) -> None:
        clock.at += 5 * 3600
        assert (await client.post("/v1/plan", json=HEARTBEAT, **W0)).status == 200

    async def test_a_refused_token_is_not_reviewed_again_at_once(
        self, client: Client, reviews: Reviews, clock: ManualClock
    ) -> None:
        forged = build_worker_request("j-w0-0", "uid-0", forged=1)
        for _ in range(3):
            assert (await client.post("/v1/plan", json=HEARTBEAT, **forged)).status == 401
        assert reviews.requests == 1
        clock.at += token_review.TOKEN_REFUSAL_TTL_SECONDS
        await client.post("/v1/plan", json=HEARTBEAT, **forged)
        assert reviews.requests == 2

    async def test_a_storm_of_bad_tokens_is_limited_and_good_ones_pass(
        self, client: Client, reviews: Reviews, clock: ManualClock
    ) -> None:
        assert (await client.post("/v1/plan", json=HEARTBEAT, **W0)).status == 200
        storm = [build_worker_request("j-w0-0", "uid-0", forged=number) for number in range(1, 301)]
        statuses = [(await client.post("/v1/plan", json=HEARTBEAT, **bad)).status for bad in storm]
        assert statuses.count(401) == token_review.TOKEN_REFUSAL_BURST
        assert statuses[-1] == 429
        assert reviews.requests == 1 + token_review.TOKEN_REFUSAL_BURST
        assert (await client.post("/v1/plan", json=HEARTBEAT, **W0)).status == 200, "a token that is known as good"
        clock.at += 10
        fresh = build_worker_request("j-w1-0", "uid-1")
        answer = await client.post("/v1/plan", json=HEARTBEAT | {"worker": "j-w1-0"}, **fresh)
        assert answer.status == 200, "a new token, once the storm is over"

    async def test_good_tokens_do_not_count_against_the_limit(
        self, client: Client, reviews: Reviews, clock: ManualClock
    ) -> None:
        for number in range(2 * token_review.TOKEN_REFUSAL_BURST):
            clock.at += 1 / sidecars.WORKER_CALLS_PER_SECOND
            answer = await client.post(
                "/v1/plan", json=HEARTBEAT, **build_worker_request("j-w0-0", "uid-0", jti=number)
            )
            assert answer.status == 200
        assert reviews.requests == 2 * token_review.TOKEN_REFUSAL_BURST

    async def test_an_unavailable_api_server_refuses_no_token(
        self, client: Client, reviews: Reviews, caplog: pytest.LogCaptureFixture
    ) -> None:
        for error in (kopf.TemporaryError("10.0.0.1 does not answer"), kopf.PermanentError("denied")):
            reviews.error = error
            answer = await client.post("/v1/plan", json=HEARTBEAT, **W0)
            assert answer.status == 503
            assert "10.0.0.1" not in await answer.text()
        (logged,) = (record for record in caplog.records if "cannot be answered" in record.getMessage())
        assert (logged.levelname, logged.exc_info) == ("WARNING", None), "the log shows no defect"
        assert "10.0.0.1 does not answer" in logged.getMessage()
        reviews.error = None
        assert (await client.post("/v1/plan", json=HEARTBEAT, **W0)).status == 200


class TestNesting:
    @pytest.mark.parametrize("deep", ["[" * 40 + "]" * 40, '{"a":' * 40 + "1" + "}" * 40, "[[]," * 40 + "0" + "]" * 40])
    async def test_a_body_that_is_nested_deeply_is_refused_before_it_is_read(self, client: Client, deep: str) -> None:
        body = json.dumps(HEARTBEAT | {"rank_metrics": "?"}).replace('"?"', deep)
        answer = await client.post("/v1/plan", data=body, **W0)
        assert (answer.status, "nested in more than 32 levels" in await answer.text()) == (400, True)

    async def test_brackets_inside_of_strings_are_no_nesting(self, client: Client) -> None:
        assert (await client.post("/v1/plan", json=HEARTBEAT | {"refused": "[" * 100}, **W0)).status == 200

    @pytest.mark.parametrize("name", ["membership", "round"])
    async def test_a_membership_or_round_far_above_the_plan_is_refused(self, client: Client, name: str) -> None:
        near = OBSERVATION.plan.membership + sidecars.MAX_COUNTER_JUMP
        assert (await client.post("/v1/plan", json=HEARTBEAT | {name: near}, **W0)).status == 200
        answer = await client.post("/v1/plan", json=HEARTBEAT | {name: 10**9}, **W0)
        assert (answer.status, f"{name}: 1000000000 is far above the plan's" in await answer.text()) == (400, True)


class TestFaults:
    @pytest.fixture(autouse=True)
    def _no_ack_wait(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sidecars, "FAULT_ACK_TIMEOUT_SECONDS", 0.0)

    async def send_fault(self, client: Client, name: str, **changes: Any) -> int:
        fault = replace(build_crash("j-w0-0", 0), name=name, **changes)
        return (await client.post("/v1/faults", json=fault.to_json(), **W0)).status

    async def test_the_name_of_a_fault_begins_with_its_worker(self, client: Client, job: JobCache) -> None:
        for name in ("j-w1-0-rank-1-round-1", "x", "j-w0-0", "j-w0-0-" + "x" * 300):
            assert await self.send_fault(client, name) == 400
        assert not job.faults

    async def test_a_fault_contains_only_ranks_of_its_worker_and_each_once(self, client: Client, job: JobCache) -> None:
        stalled, others = build_stall("j-w0-0", 0), build_stall("j-w1-0", 1).ranks
        earlier = replace(stalled.ranks[0], step=1)
        report = replace(stalled, ranks=(earlier, *stalled.ranks, *others))
        assert (await client.post("/v1/faults", json=report.to_json(), **W0)).status == 503
        assert job.faults[stalled.name].ranks == stalled.ranks

    async def test_of_too_many_faults_the_oldest_stay(
        self, client: Client, job: JobCache, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(faults, "MAX_FAULTS_PER_WORKER", 3)
        statuses = [await self.send_fault(client, f"j-w0-0-{number}") for number in range(5)]
        assert statuses == [503, 503, 503, 429, 429]
        assert list(job.faults) == ["j-w0-0-0", "j-w0-0-1", "j-w0-0-2"]
        assert await self.send_fault(client, "j-w0-0-1") == 503, "a known fault is requested again"
        job.publish(OBSERVATION.desired.settle_faults(("j-w0-0-1",)), "2")
        clock.at += 1
        assert await self.send_fault(client, "j-w0-0-4") == 503, "there is room again"

    async def test_only_the_newest_stall_of_a_worker_is_stored(
        self, client: Client, job: JobCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A rank that evaluates for half an hour lets all others report stalls again and again."""
        monkeypatch.setattr(faults, "MAX_FAULTS_PER_WORKER", 2)

        async def send_stall(number: int, round_: int = 1) -> int:
            fault = replace(
                build_stall("j-w0-0", 0, noticed_at=NOW - 60 + number), name=f"j-w0-0-stall-{number}", round=round_
            )
            return (await client.post("/v1/faults", json=fault.to_json(), **W0)).status

        assert await self.send_fault(client, "j-w0-0-crash") == 503
        assert [await send_stall(number) for number in (1, 3, 9)] == [503, 503, 503]
        assert list(job.faults) == ["j-w0-0-crash", "j-w0-0-stall-9"]
        assert [await send_stall(number) for number in (3, 1)] == [202, 202], "sent again"
        assert await send_stall(9) == 503, "it is not settled"
        assert await send_stall(2, round_=2) == 503, "of a later round"
        assert list(job.faults) == ["j-w0-0-crash", "j-w0-0-stall-2"]
        assert await self.send_fault(client, "j-w0-0-crash-2") == 429, "there is room for one more stall only"
        other = build_stall("j-w1-0", 1)
        assert (
            await client.post("/v1/faults", json=other.to_json(), **build_worker_request("j-w1-0", "uid-1"))
        ).status == 503
        assert other.name in job.faults

    async def test_a_stall_that_is_too_large_does_not_replace_the_earlier_one(
        self, job: JobCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = build_stall("j-w0-0", 0, noticed_at=NOW)
        monkeypatch.setattr(faults, "MAX_FAULT_BYTES_PER_WORKER", 2000)
        assert job.faults.add(first, 3) == ""
        large = replace(build_stall("j-w0-0", 0, noticed_at=NOW + 3), name="j-w0-0-large", error="x" * 1500)
        assert "bytes" in job.faults.add(large, 3)
        assert list(job.faults) == [first.name]
        again = replace(first, name="j-w0-0-again", noticed_at=NOW + 6)
        for number in range(100):  # no replaced stall leaves bytes behind
            again = replace(again, name=f"j-w0-0-{number}", noticed_at=NOW + 6 + number)
            assert job.faults.add(again, 3) == ""
        assert list(job.faults) == ["j-w0-0-99"]

    async def test_a_repeated_fault_starts_no_pass(self, client: Client, job: JobCache) -> None:
        job.wake.clear()
        assert await self.send_fault(client, "j-w0-0-crash") == 503
        assert job.wake.is_set()
        job.wake.clear()
        assert await self.send_fault(client, "j-w0-0-crash") == 503
        assert not job.wake.is_set()

    async def test_a_stall_is_superseded_by_a_later_one(self, job: JobCache) -> None:
        earlier, later = (replace(build_stall("j-w0-0", 0, noticed_at=NOW + at), name=f"j-w0-0-{at}") for at in (1, 2))
        assert job.faults.add(earlier, 3) == ""
        assert not job.faults.is_superseded(earlier)
        assert job.faults.add(later, 3) == ""
        assert job.faults.is_superseded(earlier)
        assert not job.faults.is_superseded(later)
        job.faults.retain(lambda fault: fault.name != later.name)
        assert not job.faults
        assert not job.faults.is_superseded(earlier)

    async def test_the_bytes_of_faults_are_limited(
        self, client: Client, job: JobCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(faults, "MAX_FAULT_BYTES_PER_WORKER", 3000)
        statuses = [await self.send_fault(client, f"j-w0-0-{number}", error="x" * 1500) for number in range(2)]
        assert statuses == [503, 429]
        assert len(job.faults) == 1

    async def test_fault_bytes_count_by_character_width_and_over_all_jobs(
        self, client: Client, job: JobCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert await self.send_fault(client, "j-w0-0-plain", error="x" * 4000) == 503
        plain = job.faults.total_bytes
        assert await self.send_fault(client, "j-w0-0-odd", error="\N{FIRE}" + "x" * 3999) == 503
        assert job.faults.total_bytes - plain > 16_000, "each of its characters takes four bytes"
        monkeypatch.setattr(sidecars, "MAX_OPEN_FAULT_BYTES", job.faults.total_bytes - 1)
        assert await self.send_fault(client, "j-w0-0-long", error="x" * 4000) == 503, "it is shortened"
        assert len(job.faults["j-w0-0-long"].error) == faults.SHORTENED_FAULT_CHARACTERS
        monkeypatch.setattr(sidecars, "GUARANTEED_FAULT_BYTES", 0)
        assert await self.send_fault(client, "j-w0-0-more") == 429
        assert await self.send_fault(client, "j-w0-0-odd") == 503, "that one is stored"
        job.publish(OBSERVATION.desired.settle_faults(tuple(job.faults)), "2")
        assert (job.faults.total_bytes, await self.send_fault(client, "j-w0-0-more")) == (0, 503)

    async def test_faults_of_other_jobs_do_not_prevent_a_diagnosis(
        self, client: Client, job: JobCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sidecars, "MAX_OPEN_FAULT_BYTES", -1)
        monkeypatch.setattr(sidecars, "GUARANTEED_FAULT_BYTES", 0)
        for number in range(2):
            report = build_stall(f"j-w{number}-0", number, culprit=number == 1, noticed_at=NOW)
            stack = 'File "a.py", line 1 in main\n' * 100 + 'File "b.py", line 7 in innermost'
            report = replace(report, ranks=(replace(report.ranks[0], stack=stack),), ras="x" * 2000)
            answer = await client.post(
                "/v1/faults", json=report.to_json(), **build_worker_request(report.worker, f"uid-{number}")
            )
            assert answer.status == 503
        stored = list(job.faults.values())
        assert [fault.ranks[0].stack for fault in stored] == ['File "b.py", line 7 in innermost'] * 2
        assert hang.diagnose_hang(stored, 2) is not None

    async def test_the_faults_of_a_job_are_bounded(
        self, client: Client, job: JobCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(faults, "MAX_JOB_FAULTS_PER_WORKER", 0)
        monkeypatch.setattr(faults, "MAX_JOB_FAULTS_BASE", 1)
        assert await self.send_fault(client, "j-w0-0-1") == 503
        other = build_crash("j-w1-0", 1).to_json()
        answer = await client.post("/v1/faults", json=other, **build_worker_request("j-w1-0", "uid-1"))
        assert answer.status == 429
        assert answer.headers["Retry-After"]
        assert len(job.faults) == 1

    async def test_faults_of_a_deleted_worker_are_dropped(self, job: JobCache) -> None:
        for number in range(faults.MAX_FAULTS_PER_WORKER):
            assert job.faults.add(build_crash("j-w0-0", number), 3) == ""
        assert job.faults.add(build_crash("j-w0-0", 99), 3)
        job.publish(OBSERVATION.desired.with_placement(workers=OBSERVATION.state.placement.workers[1:]), "2")
        assert not job.faults
        assert job.faults.add(build_crash("j-w0-0", 99), 3) == ""


class TestClocks:
    """Clocks of workers may be hours off, or false."""

    @pytest.mark.parametrize("off", [-7200.0, 0.0, 7200.0])
    async def test_a_fault_is_dated_by_its_age(
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
    async def test_a_false_time_of_a_fault_stays_within_the_last_hour(
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

    async def test_a_first_step_is_dated_once_by_its_age(
        self, client: Client, job: JobCache, clock: ManualClock
    ) -> None:
        worker_now = NOW - 7200
        heartbeat = HEARTBEAT | {
            "start": {"first_step_at": worker_now - 40, "started_at": worker_now - 50},
            "sent_at": worker_now,
        }
        await client.post("/v1/plan", json=heartbeat, **W0)
        first = job.contacts["j-w0-0"].heartbeat
        assert first.start.first_step_at == pytest.approx(NOW - 40)
        assert first.start.started_at == pytest.approx(NOW - 50)
        job.wake.clear()
        clock.at += 30  # of which the message was on its way for 10
        await client.post("/v1/plan", json=heartbeat | {"sent_at": worker_now + 20}, **W0)
        assert job.contacts["j-w0-0"].heartbeat.start.first_step_at == first.start.first_step_at
        assert job.contacts["j-w0-0"].last_seen_at == clock.at
        assert not job.wake.is_set(), "nothing has happened"

    async def test_the_last_step_is_dated_by_its_age_whatever_the_clock_of_the_pod(
        self, client: Client, job: JobCache
    ) -> None:
        worker_now = NOW + 7.0
        heartbeat = HEARTBEAT | {"progress": {"step": 5, "step_ended_at": worker_now - 40}, "sent_at": worker_now}
        await client.post("/v1/plan", json=heartbeat, **W0)
        received = job.contacts["j-w0-0"].heartbeat
        assert received.progress.step_ended_at == pytest.approx(NOW - 40)
        assert received.sent_at == NOW

    async def test_a_step_in_the_future_is_dated_now(self, client: Client, job: JobCache) -> None:
        await client.post("/v1/plan", json=HEARTBEAT | {"start": {"first_step_at": NOW + 999.0}, "sent_at": NOW}, **W0)
        assert job.contacts["j-w0-0"].heartbeat.start.first_step_at == NOW


async def test_a_worker_cannot_send_evidence_for_another(client: Client, job: JobCache) -> None:
    job.publish(OBSERVATION.desired.with_requests(evidence=EvidenceRequest("why")), "2")
    anothers = Evidence("why", "j-w1-0", 1).to_json()
    assert (await client.post("/v1/evidence/why", json=anothers, **W0)).status == 403
    own, others = (RankWindow(rank, (1,), (0.1,), (0.1,), (1,)) for rank in (0, 1))
    evidence = Evidence("why", "j-w0-0", 1, (own, others))
    assert (await client.post("/v1/evidence/why", json=evidence.to_json(), **W0)).status == 202
    assert job.evidence["j-w0-0"].windows == (own,)


async def test_a_spares_evidence_is_not_read(client: Client, job: JobCache) -> None:
    job.publish(OBSERVATION.desired.with_requests(evidence=EvidenceRequest("why")), "2")
    answer = await client.post(
        "/v1/evidence/why", data=b"x" * 2 * MAX_EVIDENCE_BYTES, **build_worker_request("j-w2-0", "uid-2")
    )
    assert answer.status == 202
    assert not job.evidence


class TestConnections:
    async def test_connections_of_one_address_are_bounded(
        self, sidecar_service: SidecarService, clock: ManualClock
    ) -> None:
        open_connections = EndpointConnections(max_per_address=2)
        async with serve_endpoint(
            sidecar_service, clock, 0, None, address="127.0.0.1", connections=open_connections
        ) as port:
            first = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
            await wait_until(lambda: open_connections.total == 2)
            refused, third = await asyncio.open_connection("127.0.0.1", port)
            assert await is_closed_silently(refused)
            third.close()
            for reader, writer in first:
                writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
                assert b"200" in await reader.readline()
                writer.close()
            await wait_until(lambda: open_connections.total == 0)
            assert not open_connections.counts_by_address

    @pytest.mark.parametrize("secure", [False, True], ids=["plain", "TLS"])
    async def test_the_oldest_unauthenticated_connection_is_closed_for_a_new_one(
        self, sidecar_service: SidecarService, clock: ManualClock, secure: bool
    ) -> None:
        body = json.dumps(HEARTBEAT).encode()
        request = (
            f"POST /v1/plan HTTP/1.1\r\nHost: x\r\nAuthorization: {W0['headers']['Authorization']}\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        ).encode() + body
        open_connections = EndpointConnections(max_unauthenticated=2, grace_seconds=0.0)
        async with serve_endpoint(
            sidecar_service,
            clock,
            0,
            build_server_context() if secure else None,
            address="127.0.0.1",
            connections=open_connections,
        ) as port:
            reader, known = await asyncio.open_connection(
                "127.0.0.1", port, ssl=build_client_context() if secure else None
            )
            known.write(request)
            await asyncio.wait_for(reader.readuntil(b"}"), 60)
            silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
            assert await is_closed_silently(silent[0][0])
            await wait_until(lambda: open_connections.total == 3)
            known.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"ok" in await asyncio.wait_for(reader.readuntil(b"\r\n\r\nok"), 60)
            for _, writer in silent:
                writer.close()
            await wait_until(lambda: open_connections.total == 1)
            known.close()
            await wait_until(lambda: open_connections.total == 0)
            assert not open_connections._unauthenticated

    async def test_silent_connections_leave_no_objects_behind(
        self, sidecar_service: SidecarService, clock: ManualClock
    ) -> None:
        """Probes of the kubelet leave no reference cycles, while the garbage collector is off."""
        open_connections = EndpointConnections()
        gc.collect()
        gc.disable()
        try:
            async with serve_endpoint(
                sidecar_service, clock, 0, build_server_context(), address="127.0.0.1", connections=open_connections
            ) as port:
                for _ in range(3):
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                    await wait_until(lambda: open_connections.total == 1)
                    writer.close()
                    await wait_until(lambda: open_connections.total == 0)
            assert not [each for each in gc.get_objects() if type(each) is asyncio.sslproto.SSLProtocol]
        finally:
            gc.enable()

    async def test_silent_connections_time_out(
        self, sidecar_service: SidecarService, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(server, "HANDSHAKE_TIMEOUT_SECONDS", 0.05)
        open_connections = EndpointConnections()
        async with serve_endpoint(
            sidecar_service, clock, 0, build_server_context(), address="127.0.0.1", connections=open_connections
        ) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            assert await is_closed_silently(reader)
            writer.close()
            assert open_connections.total == 0

    async def test_connections_have_small_buffers(
        self, sidecar_service: SidecarService, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Fails with a Python whose asyncio renames these: find them, or measure a connection again."""
        monkeypatch.setattr(asyncio.sslproto.SSLProtocol, "max_size", 256 * 2**10)
        monkeypatch.setattr(asyncio.constants, "FLOW_CONTROL_HIGH_WATER_SSL_READ", 256)
        async with serve_endpoint(sidecar_service, clock, 0, build_server_context(), address="127.0.0.1"):
            loop = asyncio.get_running_loop()
            made: Any = asyncio.sslproto.SSLProtocol(
                loop, asyncio.Protocol(), build_server_context(), loop.create_future(), server_side=True
            )
        assert len(made._ssl_buffer) == connections.TLS_BUFFER_BYTES
        assert made._incoming_high_water == connections.TLS_BUFFER_BYTES

    @pytest.mark.parametrize(
        ("limit", "most"), [("536870912", 3072), ("max", 3072), ("", 3072), ("2147483648", 12288), ("1" * 15, 32768)]
    )
    def test_the_number_of_connections_is_bounded_by_memory(self, tmp_path: Path, limit: str, most: int) -> None:
        limit_file = tmp_path / "memory.max"
        if limit:
            limit_file.write_text(f"{limit}\n")
        assert connections.compute_max_by_memory(limit_file) == most

    def test_the_number_of_connections_is_bounded_by_files(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        few = FileLimits(1_024)
        assert connections.compute_max_connections(tmp_path / "none", FileLimits(2**20)) == 3072
        assert connections.compute_max_connections(tmp_path / "none", few) == few.connections < 3072
        EndpointConnections(max_total=few.connections).report_capacity()
        assert f"allows {few.connections} connections" in caplog.text

    def test_connections_and_bodies_take_less_than_half_of_the_default_memory(self, tmp_path: Path) -> None:
        connection_bytes = connections.compute_max_by_memory(tmp_path / "none") * connections.CONNECTION_BYTES
        assert connection_bytes + server.MAX_BODIES_BYTES < connections.DEFAULT_MEMORY_BYTES / 2
        values = yaml.safe_load((Path(__file__).parents[4] / "charts/pacekeeper/values.yaml").read_text())
        assert values["resources"]["limits"]["memory"] == f"{connections.DEFAULT_MEMORY_BYTES // 2**20}Mi"

    async def test_silent_connections_count(self, sidecar_service: SidecarService, clock: ManualClock) -> None:
        open_connections = EndpointConnections(max_total=1)
        async with serve_endpoint(
            sidecar_service, clock, 0, build_server_context(), address="127.0.0.1", connections=open_connections
        ) as port:
            _, silent = await asyncio.open_connection("127.0.0.1", port)
            await wait_until(lambda: open_connections.total == 1)
            refused, second = await asyncio.open_connection("127.0.0.1", port)
            assert await is_closed_silently(refused)
            second.close()
            silent.write(b"this is no TLS")
            await wait_until(lambda: open_connections.total == 0)
            silent.close()

    @pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="the machine has no IPv6")
    async def test_connections_arrive_over_ipv4_and_ipv6(
        self, sidecar_service: SidecarService, clock: ManualClock
    ) -> None:
        async with serve_endpoint(sidecar_service, clock, 0, None) as port, aiohttp.ClientSession() as session:
            for host in ("127.0.0.1", "[::1]"):
                async with session.get(f"http://{host}:{port}/healthz") as answer:
                    assert answer.status == 200

    async def test_what_is_not_http_is_answered_and_not_logged(
        self, sidecar_service: SidecarService, clock: ManualClock, caplog: pytest.LogCaptureFixture
    ) -> None:
        requests = [
            b"garbage\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 100_000 + b"\r\n\r\n",
            b"POST /v1/plan HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
            b"POST /v1/plan HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
            b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\xff: \xff\r\n\r\n",
        ]
        async with serve_endpoint(sidecar_service, clock, 0, None, address="127.0.0.1") as port:
            for request in requests:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(request)
                status = await asyncio.wait_for(reader.readline(), 60)
                assert status.split()[1:2] == [b"400"], request[:40]
                assert b"Traceback" not in await asyncio.wait_for(reader.read(), 60)
                writer.close()
        assert not caplog.records

    async def test_an_idle_connection_is_closed(
        self, sidecar_service: SidecarService, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(server, "KEEPALIVE_TIMEOUT_SECONDS", 0.1)
        async with serve_endpoint(sidecar_service, clock, 0, None, address="127.0.0.1") as port:
            for begun in (b"", b"POST /v1/plan HTTP/1.1\r\nHost:"):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(begun)
                assert await is_closed_silently(reader), begun
                writer.close()

    async def test_at_the_limit_each_connection_has_its_grace_period(
        self, sidecar_service: SidecarService, clock: ManualClock
    ) -> None:
        open_connections = EndpointConnections(max_unauthenticated=2, grace_seconds=30.0)
        async with serve_endpoint(
            sidecar_service, clock, 0, None, address="127.0.0.1", connections=open_connections
        ) as port:
            first = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
            await wait_until(lambda: open_connections.total == 2)
            reader, third = await asyncio.open_connection("127.0.0.1", port)
            third.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(first[0][0].read(), 0.2)
            assert open_connections.total == 2
            first[0][1].close()  # it closes by itself
            assert b"200" in await asyncio.wait_for(reader.readline(), 60)
            for writer in (first[1][1], third):
                writer.close()
            await wait_until(lambda: open_connections.total == 0)
            assert not open_connections._unauthenticated_counts

    async def test_an_address_with_many_connections_loses_its_oldest_at_once(
        self, sidecar_service: SidecarService, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(connections, "MAX_UNAUTHENTICATED_PER_ADDRESS", 2)
        open_connections = EndpointConnections(max_unauthenticated=4, grace_seconds=30.0)
        async with serve_endpoint(
            sidecar_service, clock, 0, None, address="127.0.0.1", connections=open_connections
        ) as port:
            patient = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0))
            await wait_until(lambda: open_connections.total == 1)
            crowd = [await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.3", 0)) for _ in range(4)]
            assert await is_closed_silently(crowd[0][0])
            await wait_until(lambda: open_connections.total == 4)
            assert open_connections.counts_by_address == {"127.0.0.2": 1, "127.0.0.3": 3}
            for _, writer in (patient, *crowd):
                writer.close()
            await wait_until(lambda: open_connections.total == 0)

    async def test_many_simultaneous_connections_are_all_served(
        self, sidecar_service: SidecarService, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(server, "HANDSHAKE_TIMEOUT_SECONDS", 120.0)
        context = build_client_context()  # shared: creating one reads the list of authorities of the machine

        async def call_healthz(port: int, number: int) -> bytes:
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", port, ssl=context, local_addr=(f"127.0.1.{1 + number % 50}", 0)
            )
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            status = await reader.readline()
            writer.close()
            return status

        open_connections = EndpointConnections(max_unauthenticated=8, grace_seconds=120.0)
        async with serve_endpoint(
            sidecar_service, clock, 0, build_server_context(), address="127.0.0.1", connections=open_connections
        ) as port:
            answers = await asyncio.gather(*(call_healthz(port, number) for number in range(200)))
        assert {answer.split()[1] for answer in answers} == {b"200"}

    async def test_the_kernel_probes_the_other_side(self, sidecar_service: SidecarService, clock: ManualClock) -> None:
        """A host that is lost does not hold its poll for longer than a short poll would last."""
        open_connections, began = EndpointConnections(), time.monotonic() - 0.1  # the kernel counts in ticks
        async with serve_endpoint(
            sidecar_service, clock, 0, None, address="127.0.0.1", connections=open_connections
        ) as port:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            await wait_until(lambda: open_connections.total == 1)
            (connection,) = open_connections._open.values()
            for option in (socket.TCP_KEEPIDLE, socket.TCP_USER_TIMEOUT):
                assert connection.getsockopt(socket.IPPROTO_TCP, option)
            assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            await asyncio.sleep(0.2)
            assert connection.silent_seconds is not None
            assert 0.2 <= connection.silent_seconds <= time.monotonic() - began
            writer.close()
            await wait_until(lambda: open_connections.total == 0)
            at_the_end = connection.silent_seconds
            assert at_the_end is not None
            assert at_the_end <= time.monotonic() - began
            await asyncio.sleep(0.1)
            assert connection.silent_seconds == at_the_end

    async def test_a_poll_ends_with_its_connection(
        self, sidecar_service: SidecarService, clock: ManualClock, job: JobCache
    ) -> None:
        body = json.dumps(HEARTBEAT).encode()
        request = (
            f"POST /v1/plan?after={OBSERVATION.plan.version}&wait=30 HTTP/1.1\r\nHost: x\r\n"
            f"Authorization: {W0['headers']['Authorization']}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        async with serve_endpoint(sidecar_service, clock, 0, None, address="127.0.0.1") as port:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request.encode() + body)
            await wait_for_contact(job)
            assert job.contacts["j-w0-0"].open_polls == 1
            writer.close()
            await wait_until(lambda: job.contacts["j-w0-0"].open_polls == 0)


def build_server_context() -> ssl.SSLContext:
    """Return a context with a certificate that no client trusts."""
    return (
        certificates.create_authority(datetime.now(UTC))
        .issue_serving_certificate(("127.0.0.1",), datetime.now(UTC))
        .to_ssl_context()
    )


def build_client_context() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


async def is_closed_silently(reader: asyncio.StreamReader) -> bool:
    """Return whether the other side closes the connection without an answer."""
    try:
        return await asyncio.wait_for(reader.read(), 60) == b""
    except ConnectionError:
        return True


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  # the state of others sets no event
            await asyncio.sleep(0)


class TestCheckpointServer:
    """It asks for the secret of its job, and is no worker."""

    @pytest.fixture
    def name(self, job: JobCache) -> str:
        job.publish(OBSERVATION.desired.with_plan(checkpoint_server=CheckpointEndpoint("5a" * 32)), "2")
        return build_checkpoint_server_name(OBSERVATION.job, "5a" * 32)

    async def test_its_client_takes_the_secret_from_the_operator_once(
        self, sidecar_service: SidecarService, clock: ManualClock, job: JobCache, name: str, tmp_path: Path
    ) -> None:
        authority = certificates.create_authority(datetime.now(UTC))
        context = authority.issue_serving_certificate(("127.0.0.1",), datetime.now(UTC)).to_ssl_context()
        token = tmp_path / "token"
        token.write_text(build_token("j-checkpoints-00000000", "uid"))
        async with serve_endpoint(sidecar_service, clock, 0, context, address="127.0.0.1") as port:
            settings = ServerSettings(
                "/checkpoints", 1, name, f"https://127.0.0.1:{port}", authority.trusted, token, tmp_path / "secret"
            )
            # The first token is that of a pod that serves another folder.
            secret = await asyncio.to_thread(
                obtain_secret, settings, lambda _: token.write_text(build_token(name, "uid"))
            )
        assert secret == "5a" * 32
        assert await asyncio.to_thread(obtain_secret, settings) == secret, "without the operator"
        assert settings.secret_file.stat().st_mode & 0o077 == 0
        assert not job.contacts

    async def test_it_may_report_nothing(self, client: Client, job: JobCache, name: str) -> None:
        caller = build_worker_request(name, "uid")
        for fault in (build_crash(name, 0), build_crash("j-w0-0", 0)):
            assert (await client.post("/v1/faults", json=fault.to_json(), **caller)).status == 403
        assert not job.faults


class TestProfiles:
    @pytest.fixture
    async def profiled_job(self, job: JobCache) -> JobCache:
        job.publish(OBSERVATION.desired.with_requests(profile=ProfileRequest("profile-7", 100)), "2")
        return job

    async def test_patterns_are_stored_unparsed_while_they_are_requested(
        self, client: Client, profiled_job: JobCache
    ) -> None:
        assert (await client.post("/v1/patterns/profile-7/0", data=b'{"any":1}', **W0)).status == 202
        assert profiled_job.profile.by_rank == {0: b'{"any":1}'}
        assert profiled_job.profile.newest_at is not None
        profiled_job.publish(OBSERVATION.desired, "3")
        assert profiled_job.profile.by_rank == {}

    @pytest.mark.parametrize("path", ["profile-6/0", "profile-7/1", "profile-7/999"], ids=str)
    async def test_patterns_of_other_windows_and_ranks_are_not_read(
        self, client: Client, profiled_job: JobCache, path: str
    ) -> None:
        assert (await client.post(f"/v1/patterns/{path}", data=b"x" * 2**20, **W0)).status == 202
        assert profiled_job.profile.by_rank == {}

    async def test_patterns_are_bounded(
        self, client: Client, profiled_job: JobCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert (await client.post("/v1/patterns/profile-7/0", data=b"x" * 2**15, **W0)).status == 413
        assert (await client.post("/v1/patterns/profile-7/0", data=b"[" * 5000, **W0)).status == 400
        assert (await client.post("/v1/patterns/profile-7/x", data=b"{}", **W0)).status == 400
        monkeypatch.setattr(sidecars, "MAX_HELD_PROFILE_BYTES", -1)
        assert (await client.post("/v1/patterns/profile-7/0", data=b"{}", **W0)).status == 503
        assert profiled_job.profile.by_rank == {}

    async def test_the_last_pattern_wakes_the_loop(self, client: Client, profiled_job: JobCache) -> None:
        profiled_job.profile.by_rank = dict.fromkeys(range(1, OBSERVATION.plan.world_size), b"{}")
        profiled_job.wake.clear()
        await client.post("/v1/patterns/profile-7/0", data=b"{}", **W0)
        assert profiled_job.wake.is_set()
