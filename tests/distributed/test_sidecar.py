"""The sidecar as a process, against a server that speaks the operator's protocol over TLS."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from pacekeeper.launcher.network.sockets import SocketFile
from pacekeeper.runtime_folder import RuntimeFolder, read_json, write_json, write_text
from pacekeeper_analysis.protocol.plan import WorkerPlan, WorkerRole
from pacekeeper_analysis.protocol.poll import PollAnswer
from pacekeeper_analysis.protocol.reports import (
    Evidence,
    FaultKind,
    FaultReport,
    GpuHealth,
    Heartbeat,
    LauncherState,
    LinkProbe,
)
from pacekeeper_analysis.protocol.requests import (
    EvidencePart,
    EvidenceRequest,
    LinkProbeTask,
    ProbeTarget,
    WorkerRequests,
)
from pacekeeper_rank.record_ring import RingWriter, create_ring
from pacekeeper_rank.records import Phase, RecordKind
from testing.network.ports import find_free_port
from testing.operators.tls import Authority

TOKEN = "a-token"
LONG_POLL_SECONDS = 600.0
"""Nothing comes by its end: what comes, comes over another connection."""
PLAN = WorkerPlan(version=1, membership=1, role=WorkerRole.MEMBER, ranks=(0,), world_size=1, workers=1)


@dataclass
class Operator:
    """What the operator would answer; the test changes it, and reads what it received."""

    plan: WorkerPlan = PLAN
    requests: WorkerRequests = field(default_factory=WorkerRequests)
    away: bool = False
    heartbeats: list[Heartbeat] = field(default_factory=list)
    faults: dict[str, FaultReport] = field(default_factory=dict)  # by name: one whose answer is lost comes again
    evidence: list[Evidence] = field(default_factory=list)
    patterns: dict[str, bytes] = field(default_factory=dict)
    refused: int = 0
    longest: float = 0.0  # that it holds a poll which may be held for longer than its `wait`
    holds: list[float] = field(default_factory=list)  # that polls allowed

    def application(self) -> web.Application:
        @web.middleware
        async def check(
            request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
        ) -> web.StreamResponse:
            good = request.headers.get("Authorization") == f"Bearer {TOKEN}"
            if good and not self.away:
                return await handler(request)
            self.refused += 1
            return web.Response(status=503 if good else 401)

        app = web.Application(middlewares=[check])
        app.add_routes(
            [
                web.post("/v1/plan", self._plan),
                web.post("/v1/faults", self._fault),
                web.post("/v1/evidence/{request}", self._evidence),
                web.post("/v1/patterns/{window}/{rank}", self._pattern),
            ]
        )
        return app

    async def _plan(self, request: web.Request) -> web.Response:
        self.heartbeats.append(Heartbeat.from_json(await request.json()))
        wait, hold = float(request.query["wait"]), float(request.query["hold"])
        self.holds += [hold] if hold else []
        deadline = asyncio.get_running_loop().time() + max(wait, min(hold, self.longest))
        while (
            self.plan.version <= int(request.query.get("after", -1))
            and self.requests.identity == request.query["requests"]
        ):
            if asyncio.get_running_loop().time() >= deadline:
                return web.Response(status=204)
            await asyncio.sleep(0.01)
        return web.json_response(PollAnswer(self.plan, self.requests).to_json())

    async def _fault(self, request: web.Request) -> web.Response:
        fault = FaultReport.from_json(await request.json())
        self.faults[fault.name] = fault
        return web.Response(status=202)

    async def _evidence(self, request: web.Request) -> web.Response:
        self.evidence.append(Evidence.from_json(await request.json()))
        return web.Response(status=202)

    async def _pattern(self, request: web.Request) -> web.Response:
        self.patterns["/".join(request.match_info.values())] = await request.read()
        return web.Response(status=202)


@dataclass
class Worker:
    """A sidecar process with its runtime folder."""

    runtime: RuntimeFolder
    token_file: Path
    metrics_port: int
    process: asyncio.subprocess.Process
    receives_sigterm: bool = False

    def end(self) -> None:
        """As the kubelet does it when the trainer has ended."""
        self.process.terminate()
        self.receives_sigterm = True


@asynccontextmanager
async def run_sidecar(
    folder: Path, operator: Operator, token: str = TOKEN, poll_seconds: float = 3.0
) -> AsyncIterator[Worker]:
    authority = Authority(folder)
    # Polls that a sidecar has left behind are not waited for.
    runner = web.AppRunner(operator.application(), access_log=None, handler_cancellation=True)
    await runner.setup()
    port, metrics_port = find_free_port(), find_free_port()
    await web.TCPSite(runner, "127.0.0.1", port, ssl_context=authority.server_context()).start()
    token_file = folder / "token"
    token_file.write_text(token)
    runtime = RuntimeFolder(folder / "runtime").create()
    environment = os.environ | {
        "PACEKEEPER_RUNTIME": str(runtime.root),
        "PACEKEEPER_JOB": "gpt",
        "PACEKEEPER_WORKER": "gpt-w0-0",
        "PACEKEEPER_OPERATOR": f"https://localhost:{port}",
        "PACEKEEPER_CA": authority.pem,
        "PACEKEEPER_TOKEN_FILE": str(token_file),
        "PACEKEEPER_METRICS_PORT": str(metrics_port),
        "PACEKEEPER_WINDOW_STEPS": "4",
        "PACEKEEPER_POLL_SECONDS": str(poll_seconds),
    }
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "pacekeeper.sidecar", env=environment)
    try:
        worker = Worker(runtime, token_file, metrics_port, process)
        yield worker
        if not worker.receives_sigterm:
            assert process.returncode is None, "the sidecar must still run"
            process.terminate()
        assert await asyncio.wait_for(process.wait(), 300) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await runner.cleanup()


async def wait_until(condition: Callable[[], bool], what: str, seconds: float = 300) -> None:
    deadline = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, what
        await asyncio.sleep(0.02)


async def test_plans_are_received_and_heartbeats_are_sent(tmp_path: Path) -> None:
    operator = Operator()
    async with run_sidecar(tmp_path, operator, poll_seconds=LONG_POLL_SECONDS) as worker:
        await wait_until(lambda: read_json(worker.runtime.plan) == PLAN.to_json(), "the first plan")
        assert worker.runtime.operator_contact.exists()
        operator.plan = replace(PLAN, version=2, checkpoint_request=7)
        await wait_until(lambda: (read_json(worker.runtime.plan) or {}).get("version") == 2, "a changed plan")
        write_json(worker.runtime.heartbeat, Heartbeat("gpt-w0-0", LauncherState.RUNNING, round=3).to_json())
        await wait_until(
            lambda: any(heartbeat.round == 3 for heartbeat in operator.heartbeats), "a changed heartbeat, at once"
        )
        warned = GpuHealth("GPU-1", ("RowsPending",), temperature=60)
        heartbeat = Heartbeat("gpt-w0-0", LauncherState.RUNNING, round=3, gpus=(warned,))
        write_json(worker.runtime.heartbeat, heartbeat.to_json())
        await wait_until(
            lambda: any(heartbeat.gpus == (warned,) for heartbeat in operator.heartbeats), "a GPU's warning, at once"
        )


async def test_faults_are_sent_until_they_are_acknowledged(tmp_path: Path) -> None:
    operator = Operator(away=True)
    fault = FaultReport("gpt-w0-0-r1-crash", FaultKind.RANK_FAILED, "gpt-w0-0", 1, 5.0, rank=0, exit_code=-9)
    async with run_sidecar(tmp_path, operator) as worker:
        write_json(worker.runtime.fault(fault.name), fault.to_json())
        await wait_until(lambda: operator.refused >= 3, "tries while the operator is away")
        assert worker.runtime.fault(fault.name).exists()
        operator.away = False
        await wait_until(lambda: not worker.runtime.fault(fault.name).exists(), "acknowledged")
    (taken,) = operator.faults.values()
    assert replace(taken, sent_at=None) == fault
    assert taken.sent_at is not None
    assert taken.sent_at > fault.noticed_at, "by which the operator computes its age"


async def test_patterns_are_forwarded_unchanged_and_deleted(tmp_path: Path) -> None:
    operator = Operator(away=True)
    async with run_sidecar(tmp_path, operator) as worker:
        path = worker.runtime.pattern("profile-1.5", 12)
        write_text(path, '{"any": 1}')
        early = worker.runtime.early_pattern(12)
        write_text(early, "kept")
        await wait_until(lambda: operator.refused >= 3, "tries while the operator is away")
        assert path.exists()
        operator.away = False
        await wait_until(lambda: not path.exists(), "handed on")
    assert operator.patterns == {"profile-1.5/12": b'{"any": 1}'}
    assert early.exists()


async def test_an_invalid_pattern_is_dropped_and_stops_nothing(tmp_path: Path) -> None:
    operator = Operator()
    async with run_sidecar(tmp_path, operator) as worker:
        patterns = worker.runtime.patterns
        (patterns / "folder.1.json").mkdir(parents=True)
        os.mkfifo(patterns / "pipe.1.json")
        (patterns / "huge.1.json").write_bytes(bytes(1 << 20))
        (patterns / "no-rank.json").write_text("{}")
        path = worker.runtime.pattern("profile-1.5", 12)
        path.write_text("{}")
        await wait_until(lambda: not path.exists() and not (patterns / "huge.1.json").exists(), "the rest is sent")
        assert worker.process.returncode is None
    assert operator.patterns == {"profile-1.5/12": b"{}"}


async def test_evidence_is_answered_once_from_the_rings(tmp_path: Path) -> None:
    operator = Operator()
    async with run_sidecar(tmp_path, operator) as worker:
        create_ring(worker.runtime.ring(0), rank=0, round_=1, capacity=64)
        ring = RingWriter(worker.runtime.ring(0))
        for step in range(1, 9):
            ring.write(RecordKind.STEP, 0, 100_000_000, step, Phase.TRAIN, 8.0)
            ring.write(RecordKind.COMPUTE, 0, 60_000_000, step, Phase.TRAIN, 8.0)
        operator.requests = WorkerRequests("straggler-2", EvidenceRequest("straggler-2"))
        await wait_until(lambda: bool(operator.evidence), "the evidence")
        operator.requests = replace(operator.requests, identity="straggler-2,profile-3")
        await wait_until(lambda: "profile-3" in worker.runtime.requests.read_text(), "the next requests")
        page = await _read_metrics(worker)
    (evidence,) = operator.evidence
    assert evidence.request == "straggler-2"
    assert evidence.windows[0].steps == (5, 6, 7, 8)
    assert evidence.windows[0].compute_seconds == pytest.approx((0.06,) * 4)
    assert 'pacekeeper_rank_compute_seconds{rank="0",trainingjob="gpt",worker="gpt-w0-0"} 0.06' in page
    assert 'pacekeeper_rank_wait_seconds{rank="0",trainingjob="gpt",worker="gpt-w0-0"} 0.04' in page


async def test_metrics_go_with_each_heartbeat_and_at_once_when_a_rank_becomes_slow(tmp_path: Path) -> None:
    operator = Operator(plan=replace(PLAN, metrics_deadband=0.05))
    async with run_sidecar(tmp_path, operator, poll_seconds=LONG_POLL_SECONDS) as worker:
        create_ring(worker.runtime.ring(0), rank=5, round_=1, capacity=64)
        ring = RingWriter(worker.runtime.ring(0))
        clock = 0

        def train(own: float) -> None:
            nonlocal clock
            for _ in range(4):
                begun, clock = clock, clock + int(1e9 * (own + 0.04))
                ring.write(RecordKind.COMPUTE, begun, begun + int(1e9 * own), 1, Phase.TRAIN, 8.0)
                ring.write(RecordKind.STEP, begun, clock, 1, Phase.TRAIN, 8.0)

        train(0.06)
        write_json(worker.runtime.heartbeat, Heartbeat("gpt-w0-0", LauncherState.RUNNING, round=1).to_json())
        await wait_until(lambda: any(heartbeat.rank_metrics for heartbeat in operator.heartbeats), "the first metrics")
        await wait_until(lambda: operator.heartbeats[-1].round == 1, "the launcher runs")
        await asyncio.sleep(1.5)
        received_before = len(operator.heartbeats)
        train(0.06)
        await asyncio.sleep(1.5)
        assert len(operator.heartbeats) == received_before, "nothing has changed"
        train(0.12)
        await wait_until(
            lambda: len(operator.heartbeats) > received_before, "a slow rank is reported during the long poll"
        )
        (figures,) = operator.heartbeats[-1].rank_metrics
        assert (figures.rank, figures.steps) == (5, 4)
        assert figures.compute_seconds == pytest.approx(0.12)
        assert figures.compute_seconds_per_sample == pytest.approx(0.12 / 8)
        assert figures.wait_seconds == pytest.approx(0.04)


async def test_a_silent_launcher_is_reported_at_once_during_a_long_poll(tmp_path: Path) -> None:
    operator = Operator()
    async with run_sidecar(tmp_path, operator, poll_seconds=LONG_POLL_SECONDS) as worker:
        write_json(worker.runtime.heartbeat, Heartbeat("gpt-w0-0", LauncherState.RUNNING, round=1).to_json())
        worker.runtime.liveness.touch()
        await wait_until(lambda: any(heartbeat.round == 1 for heartbeat in operator.heartbeats), "the launcher runs")
        await wait_until(lambda: operator.heartbeats[-1].launcher_silent_seconds >= 8, "eight seconds of silence")
        assert operator.heartbeats[-1].state is LauncherState.RUNNING
        worker.runtime.liveness.touch()
        await wait_until(lambda: operator.heartbeats[-1].launcher_silent_seconds < 1, "it is back")


async def test_a_launcher_without_peers_polls_the_operator_during_a_long_poll(tmp_path: Path) -> None:
    operator = Operator()
    async with run_sidecar(tmp_path, operator, poll_seconds=LONG_POLL_SECONDS) as worker:
        await wait_until(
            lambda: len(operator.heartbeats) > 2, "the first answer, a heartbeat during it, and a poll is held"
        )
        received_before = len(operator.heartbeats)
        await asyncio.sleep(2.5)
        assert len(operator.heartbeats) == received_before, "no poll arrives"
        contact = worker.runtime.operator_contact.stat().st_mtime_ns
        worker.runtime.partitioned.touch()
        await wait_until(lambda: len(operator.heartbeats) > received_before, "the operator is polled at once")
        await wait_until(lambda: worker.runtime.operator_contact.stat().st_mtime_ns > contact, "its answer has come")


async def test_a_poll_may_be_held_for_twice_as_long_as_the_one_before(tmp_path: Path) -> None:
    """So an operator that stands still is given up after some seconds where it holds polls for some."""
    operator = Operator(longest=0.5)
    async with run_sidecar(tmp_path, operator, poll_seconds=0.1):
        await wait_until(lambda: operator.holds[-1:] >= [1.0], "the longest that this operator wants")
        count = len(operator.holds)
        operator.plan = replace(PLAN, version=2)
        await wait_until(lambda: len(operator.holds) > count + 2, "more polls, the first after a new plan")
    assert operator.holds[:2] == [0.1, 0.1]
    assert sorted(operator.holds[:count]) == operator.holds[:count]
    assert min(operator.holds[count:]) >= 1.0


async def test_the_end_of_the_launcher_is_reported_before_the_sidecar_ends(tmp_path: Path) -> None:
    """The operator is unavailable when the trainer ends and the kubelet stops the sidecar."""
    operator = Operator()
    fault = FaultReport("gpt-w0-0-r1-crash", FaultKind.RANK_FAILED, "gpt-w0-0", 1, 5.0, rank=0, exit_code=-9)
    async with run_sidecar(tmp_path, operator) as worker:
        await wait_until(lambda: bool(operator.heartbeats), "the first heartbeat")
        operator.away = True
        write_json(worker.runtime.heartbeat, Heartbeat("gpt-w0-0", LauncherState.FINISHED, round=1).to_json())
        write_json(worker.runtime.fault(fault.name), fault.to_json())
        worker.end()
        refused = operator.refused
        await wait_until(lambda: operator.refused > refused, "another try")
        operator.away = False
    assert operator.heartbeats[-1].state is LauncherState.FINISHED
    assert [replace(report, sent_at=None) for report in operator.faults.values()] == [fault]


async def test_a_sidecar_without_an_operator_ends(tmp_path: Path) -> None:
    operator = Operator(away=True)
    async with run_sidecar(tmp_path, operator):
        await wait_until(lambda: operator.refused > 0, "a try")


async def test_a_heartbeat_that_cannot_be_read_leaves_the_one_before_in_force(tmp_path: Path) -> None:
    operator = Operator()
    async with run_sidecar(tmp_path, operator) as worker:
        write_json(worker.runtime.heartbeat, Heartbeat("gpt-w0-0", LauncherState.RUNNING, round=3).to_json())
        await wait_until(lambda: any(heartbeat.round == 3 for heartbeat in operator.heartbeats), "the heartbeat")
        write_json(worker.runtime.heartbeat, {"worker": "gpt-w0-0", "round": "oops"})
        received_before = len(operator.heartbeats)
        operator.plan = replace(PLAN, version=2)
        await wait_until(lambda: len(operator.heartbeats) > received_before, "the next poll")
        assert operator.heartbeats[-1].round == 3


async def test_a_renewed_token_is_used_without_a_restart(tmp_path: Path) -> None:
    operator = Operator()
    async with run_sidecar(tmp_path, operator, token="an-expired-one") as worker:
        await wait_until(lambda: operator.refused >= 2, "refusals")
        assert not worker.runtime.plan.exists()
        worker.token_file.write_text(TOKEN)
        await wait_until(worker.runtime.plan.exists, "the plan, once the token is good")


async def test_the_launchers_measurements_are_reported_once_for_the_requested_probe(tmp_path: Path) -> None:
    task = LinkProbeTask("probe-7", (ProbeTarget("gpt-w1-0", "127.0.0.1:1"),))
    operator = Operator(requests=WorkerRequests("probe-7", probe=task))
    found = LinkProbe("gpt-w1-0", 1e8, 0.001)
    async with run_sidecar(tmp_path, operator) as worker:
        await wait_until(worker.runtime.requests.exists, "the request")
        write_json(worker.runtime.probes, {"name": "probe-6", "probes": [vars(found)]})
        received_before = len(operator.heartbeats)
        operator.plan = replace(operator.plan, version=2)
        await wait_until(lambda: len(operator.heartbeats) > received_before, "the next poll")
        assert operator.evidence == [], "an older probe's"
        write_json(worker.runtime.probes, {"name": "probe-7", "probes": [vars(found)]})
        await wait_until(lambda: bool(operator.evidence), "the answer")
        assert operator.evidence == [Evidence("probe-7", "gpt-w0-0", 0, probes=(found,))]
        received_before = len(operator.heartbeats)
        operator.plan = replace(operator.plan, version=3)
        await wait_until(lambda: len(operator.heartbeats) > received_before, "the next poll")
        assert len(operator.evidence) == 1


async def test_connections_are_reported_where_they_are_requested(tmp_path: Path) -> None:
    """Of a rank (here the test itself), once a window is over."""
    operator = Operator(plan=PLAN)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
        local = f"127.0.0.1:{one.getsockname()[1]}"
        with one, other:
            async with run_sidecar(tmp_path, operator) as worker:
                SocketFile(worker.runtime.sockets).refresh({0: os.getpid()}, now=0.0)
                number = 0

                async def request_evidence() -> Evidence:
                    nonlocal number
                    number, before = number + 1, len(operator.evidence)
                    request = EvidenceRequest(f"why-{number}", (EvidencePart.WINDOWS, EvidencePart.LINKS))
                    operator.requests = WorkerRequests(request.name, request)
                    await wait_until(lambda: len(operator.evidence) > before, "an answer")
                    return operator.evidence[-1]

                assert (await request_evidence()).links == (), "no window is over yet"
                for _ in range(100):
                    one.sendall(bytes(50_000))
                    for _ in range(5):
                        await asyncio.to_thread(other.recv, 10_000)
                    await asyncio.sleep(0.05)
                links = (await request_evidence()).links
                metrics = await _read_metrics(worker)
    assert [(link.local, link.rank) for link in links if link.acked_bytes > 1_000_000] == [(local, 0)]
    assert 'pacekeeper_rank_sent_bytes_total{rank="0"' in metrics


async def _read_metrics(worker: Worker) -> str:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{worker.metrics_port}/metrics") as answer,
    ):
        return await answer.text()
