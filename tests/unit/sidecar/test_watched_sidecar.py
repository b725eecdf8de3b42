"""The sidecar of a watched container: what it sends, from the files that processes of others write."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from pacekeeper.runtime_folder import RuntimeFolder
from pacekeeper.sidecar.connection_sampler import SAMPLES_PER_LINK_WINDOW, ConnectionSampler
from pacekeeper.sidecar.container_monitor import ContainerMonitor
from pacekeeper.sidecar.operator_client import OperatorClient, OperatorUnavailable
from pacekeeper.sidecar.settings import SidecarSettings
from pacekeeper.sidecar.sidecar import Sidecar
from pacekeeper.watch.container import WatchedContainer
from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.protocol.poll import PollAnswer
from pacekeeper_analysis.protocol.reports import FaultKind, FaultReport, Heartbeat
from pacekeeper_analysis.protocol.requests import EvidencePart, EvidenceRequest
from pacekeeper_analysis.protocol.watched_container import RankDescription
from pacekeeper_analysis.protocol.watched_report import RecordingLevel, ReportedProgress
from pacekeeper_rank.record_ring import RingWriter, create_ring
from pacekeeper_rank.records import Phase, RecordKind
from pacekeeper_rank.watching.watch_folder import WatchFolder
from testing.operators.observations import build_crash, build_stall

WORKER = "train-0-abcde"


class RecordingClient:
    """An operator that records what it receives."""

    def __init__(self) -> None:
        self.heartbeats: list[Heartbeat] = []
        self.faults: list[FaultReport] = []
        self.refused = 1  # deliveries of faults that fail first

    @property
    def knows_ranks(self) -> bool:
        report = self.heartbeats[-1].watched if self.heartbeats else None
        return report is not None and bool(report.ranks)

    async def poll(self, heartbeat: Heartbeat, *_: Any) -> PollAnswer | None:
        self.heartbeats.append(Heartbeat.from_json(json.loads(json.dumps(heartbeat.to_json()))))
        await asyncio.sleep(0.01)
        return None

    async def send_fault(self, fault: FaultReport) -> None:
        if self.refused:
            self.refused -= 1
            raise OperatorUnavailable("busy")
        self.faults.append(FaultReport.from_json(json.loads(json.dumps(fault.to_json()))))


class UnresponsiveClient(RecordingClient):
    """An operator that answers the first delivery never, and the next at once."""

    def __init__(self) -> None:
        super().__init__()
        self.refused = 0
        self.waiting = 0  # deliveries
        self._is_first = True

    async def send_fault(self, fault: FaultReport) -> None:
        if self._is_first:
            self._is_first, self.waiting = False, 1
            try:
                await asyncio.Event().wait()
            finally:
                self.waiting = 0
        await super().send_fault(fault)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    WatchFolder(tmp_path).create()
    return tmp_path


def describe_rank(folder: Path, slot: int, rank: int, world_size: int = 4, /, **changes: Any) -> int:
    """Write what a rank writes. Returns the descriptor of its lock, which shows that it lives.

    The lock is of an open file, as another process would have it.
    """
    values = {
        "rank": rank,
        "world_size": world_size,
        "slot": slot,
        "pid": 100 + rank,
        "restart": 0,
        "started_at": 1000.0,
        "recording": "Pure",
        "python": "3.11.7",
        "torch": "2.9.0",
        "rendezvous": "host:29500",
        "run_id": "run",
    }
    (folder / f"ranks/{slot}.json").write_text(json.dumps(values | changes))
    descriptor = os.open(folder / f"locks/{slot}", os.O_RDWR | os.O_CREAT)
    fcntl.fcntl(descriptor, F_OFD_SETLK, LOCK)
    return descriptor


F_OFD_SETLK = 37
LOCK = b"\1\0\0\0\0\0\0\0" + bytes(24)
"""F_WRLCK from the file's beginning."""


def build_monitor(folder: Path) -> ContainerMonitor:
    return ContainerMonitor(WatchedContainer(folder, WORKER), WORKER)


def test_ranks_are_reported_as_they_describe_themselves(folder: Path) -> None:
    describe_rank(folder, 0, 2)
    describe_rank(folder, 1, 3, resumed_from=400)
    monitor = build_monitor(folder)
    monitor.check(1.0, 1001.0)
    report = monitor.heartbeat.watched
    assert report is not None
    assert [(rank.rank, rank.world_size, rank.pid) for rank in report.ranks] == [(2, 4, 102), (3, 4, 103)]
    assert {rank.recording for rank in report.ranks} == {RecordingLevel.PURE}
    assert report.ranks[1].resumed_from == 400
    assert monitor.heartbeat.worker == WORKER
    assert monitor.heartbeat.start.first_step_at is None


def test_a_stall_after_a_resumption_has_the_steps_of_the_job(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator takes a stall for over if the heartbeat has a later step."""
    describe_rank(folder, 0, 0, 1, resumed_from=400)
    container = WatchedContainer(folder, WORKER)
    state = container.read(1.0, 1001.0)
    faults = build_stall(WORKER, 0, culprit=True), build_crash(WORKER, 0, step=60)
    stalled = replace(state, faults=tuple(replace(fault, step=60) for fault in faults))
    monkeypatch.setattr(container, "read", lambda *_, **__: stalled)
    monitor = ContainerMonitor(container, WORKER)
    monitor.reported_progress = ReportedProgress(7)
    monitor.check(2.0, 1002.0)
    stall, crash = (monitor.read_fault(name) for name in monitor.list_faults())
    assert stall is not None
    assert crash is not None
    assert (stall.step, stall.ranks[0].step, crash.step) == (460, 900, 60)
    assert monitor.heartbeat.reported_progress == ReportedProgress(7)


def train(folder: Path, rank: int, last_step: int) -> None:
    """Write a ring with steps of 0.1 s from the clock's 100th second on, as the process of `describe_rank` would."""
    create_ring(folder / f"rings/{rank}", rank, 1, 64)
    ring = RingWriter(folder / f"rings/{rank}")
    ring.state.pid = 100 + rank
    ring.enter_phase(Phase.TRAIN)
    for step in range(1, last_step + 1):
        begin, end = (int((100 + step * 0.1 + offset) * 1e9) for offset in (0, 0.1))
        phase = Phase.START if step == 1 else Phase.TRAIN
        ring.write(RecordKind.COMPUTE, begin, begin + 30_000_000, step, phase)
        ring.write(RecordKind.STEP, begin, end, step, phase)
        ring.end_step(step, end)


def test_a_stall_and_its_end_are_reported_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each once: the operator dates a hang by the steps before it and after it."""
    describe_rank(folder, 0, 0, 1)
    container = WatchedContainer(folder, WORKER)
    state = container.read(1.0, 1001.0)
    monitor = ContainerMonitor(container, WORKER)
    other = replace(state.ranks[0], pid=200)

    def count_changes(steps: int, *faults: FaultReport, rank: RankDescription = state.ranks[0]) -> int:
        progress = replace(state.heartbeat.progress, steps_in_round=steps)
        seen = replace(state, heartbeat=replace(state.heartbeat, progress=progress), faults=faults, ranks=(rank,))
        monkeypatch.setattr(container, "read", lambda *_, **__: seen)
        monitor.check(2.0, 1002.0)
        return monitor.urgent_changes

    assert count_changes(10, build_crash(WORKER, 0)) == 0, "a fault of its own is sent anyway"
    assert count_changes(10, build_stall(WORKER, 0)) == 1
    assert count_changes(10) == 1
    assert [count_changes(11), count_changes(12)] == [2, 2]
    assert count_changes(12, build_stall(WORKER, 0)) == 3
    assert count_changes(20, rank=other) == 3, "another process has not stalled"


def test_steps_count_as_the_jobs_once_the_rank_knows_from_where_it_has_resumed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is described at the rank's third step. The process, and the time of its first step, stay the same."""
    lock = describe_rank(folder, 0, 0, 1)
    train(folder, 0, 4)
    monitor = build_monitor(folder)
    monkeypatch.setattr(WatchedContainer, "measure_first_step", lambda _self, _now, wall: wall)
    steps = []
    for now in (101.0, 102.0):
        monitor.check(now, 1000.0 + now)
        heartbeat = monitor.heartbeat
        evidence = monitor.build_evidence(EvidenceRequest("ask", (EvidencePart.WINDOWS,)), None)
        assert evidence is not None
        assert heartbeat.watched is not None
        (metrics,) = monitor.measure_metrics()
        (sums,), (window,) = heartbeat.watched.sums, evidence.windows
        steps.append((heartbeat.progress.step, metrics.metrics.last_step, sums.last_step, window.steps[-1]))
        assert heartbeat.progress.steps_in_round == 4
        assert heartbeat.start.first_step_at == 1101.0
        os.close(lock)
        lock = describe_rank(folder, 0, 0, 1, resumed_from=400)
    assert steps == [(4,) * 4, (404,) * 4]


def test_a_container_without_ranks_reports_that_there_are_none(folder: Path) -> None:
    monitor = build_monitor(folder)
    monitor.check(1.0, 1001.0)
    assert monitor.heartbeat.watched is not None
    assert monitor.heartbeat.watched.ranks == ()


@pytest.mark.parametrize(
    "changes",
    [{"rank": 4}, {"world_size": 1 << 20}, {"rank": "2"}, {"recording": "All"}, {"torch": "2" * 10_000}, {"pid": -1}],
    ids=str,
)
def test_a_hostile_description_harms_only_its_own_rank(changes: dict[str, Any], folder: Path) -> None:
    describe_rank(folder, 0, 2)
    describe_rank(folder, 1, 3, **changes)
    monitor = build_monitor(folder)
    monitor.check(1.0, 1001.0)
    assert monitor.heartbeat.watched is not None
    assert [rank.rank for rank in monitor.heartbeat.watched.ranks] == [2]
    Heartbeat.from_json(json.loads(json.dumps(monitor.heartbeat.to_json())))


def test_a_folder_that_is_gone_is_survived(folder: Path) -> None:
    describe_rank(folder, 0, 0, 1)
    monitor = build_monitor(folder)
    monitor.check(1.0, 1001.0)
    for name in ("ranks", "rings", "communicators"):
        (folder / name).rename(folder / f"{name}.gone")
        (folder / name).write_text("a file")
    monitor.check(2.0, 1002.0)
    assert not monitor.measure_metrics()


@asynccontextmanager
async def run_sidecar(folder: Path, client: RecordingClient) -> AsyncIterator[asyncio.Task[None]]:
    settings = SidecarSettings(RuntimeFolder(folder), "", WORKER, "", "", Path(), watched=True)
    sidecar = Sidecar(settings, cast(OperatorClient, client), build_monitor(folder))
    task = asyncio.create_task(sidecar.run())
    try:
        yield task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def wait_until(condition: Callable[[], object]) -> None:
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("not within 30 s")


async def test_a_rank_that_dies_is_reported_until_the_operator_has_the_fault(folder: Path) -> None:
    client = RecordingClient()
    lock = describe_rank(folder, 0, 0, 1)
    async with run_sidecar(folder, client):
        await wait_until(lambda: client.knows_ranks)
        end = {"pid": 100, "at": 1001.0, "kind": "ValueError", "error": "ValueError: no such column"}
        (folder / "ends/0.json").write_text(json.dumps(end))
        os.close(lock)
        await wait_until(lambda: client.faults)
    (fault,) = client.faults
    assert (fault.kind, fault.rank, fault.exit_code) == (FaultKind.RANK_FAILED, 0, 1)
    assert fault.name.startswith(f"{WORKER}-")
    assert "no such column" in fault.error


@pytest.mark.parametrize("leaves_message", [True, False])
async def test_what_happened_last_is_sent_before_the_sidecar_ends(folder: Path, leaves_message: bool) -> None:
    """The container ends, and its sidecar is terminated at once. Of a rank that was killed, no agent will report."""
    client = RecordingClient()
    lock = describe_rank(folder, 0, 0, 1)
    async with run_sidecar(folder, client) as task:
        await wait_until(lambda: client.knows_ranks)
        if leaves_message:
            end = {"pid": 100, "at": 1001.0, "kind": "ValueError", "error": "ValueError: no such column"}
            (folder / "ends/0.json").write_text(json.dumps(end))
        os.close(lock)
        task.cancel()
    assert [(fault.rank, fault.exit_code) for fault in client.faults] == [(0, int(leaves_message))]


async def test_a_delivery_that_waits_for_its_answer_ends_before_the_final_one(folder: Path) -> None:
    """Otherwise the fault is sent by both, until the process ends."""
    client = UnresponsiveClient()
    lock = describe_rank(folder, 0, 0, 1)
    async with run_sidecar(folder, client) as task:
        await wait_until(lambda: client.knows_ranks)
        (folder / "ends/0.json").write_text(json.dumps({"pid": 100, "at": 1001.0, "kind": "E", "error": "E"}))
        os.close(lock)
        await wait_until(lambda: client.waiting)
        task.cancel()
    assert (client.waiting, len(client.faults)) == (0, 1)


def test_a_terminated_sidecar_ends_with_code_0(folder: Path) -> None:
    """Also if it has never reached the operator: the pod of a job that has ended must not look as if it had failed."""
    describe_rank(folder, 0, 0, 1)
    environment = {
        **os.environ,
        "PACEKEEPER_WATCHED": "1",
        "PACEKEEPER_RUNTIME": str(folder),
        "PACEKEEPER_WORKER": WORKER,
        "PACEKEEPER_OPERATOR": "https://127.0.0.1:9",
        "PACEKEEPER_TOKEN_FILE": os.devnull,
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, "-m", "pacekeeper.sidecar"]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert "operator not reached" in process.stderr.readline()
    process.terminate()
    assert process.wait(120) == 0, process.stderr.read()


@pytest.fixture
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname()[:2])
        other, _ = listener.accept()
        with one, other:
            yield one, other


def read_links(monitor: ContainerMonitor, request: EvidenceRequest) -> tuple[object, ...]:
    evidence = monitor.build_evidence(request, None)
    assert evidence is not None
    return evidence.links


def test_connections_are_those_of_the_containers_present_ranks(
    folder: Path, connection: tuple[socket.socket, socket.socket]
) -> None:
    """The other end claims a rank of another container."""
    describe_rank(folder, 0, 2)
    own, foreign = (os.fstat(end.fileno()).st_ino for end in connection)
    (folder / "sockets.json").write_text(json.dumps({own: 2, foreign: 0}))
    container = WatchedContainer(folder, WORKER)
    sampler = ConnectionSampler(RuntimeFolder(folder), container.read_socket_ranks)
    monitor = ContainerMonitor(container, WORKER, sampler)
    monitor.check(1.0, 1001.0)
    for at in range(2 * SAMPLES_PER_LINK_WINDOW + 1):
        connection[0].sendall(bytes(400_000))
        received = 0
        while received < 400_000:
            received += len(connection[1].recv(1 << 20))
        sampler.sample(float(at))
    links, windows = (EvidenceRequest("ask", (part,)) for part in (EvidencePart.LINKS, EvidencePart.WINDOWS))
    evidence = monitor.build_evidence(links, None)
    assert evidence is not None
    assert {(end.rank, end.age) for end in evidence.links} == {(2, 0), (2, 1)}
    assert read_links(monitor, windows) == ()
    assert read_links(build_monitor(folder), links) == (), "not sampled"


@pytest.mark.parametrize(
    "content",
    ["[]", "{", '{"1": "2"}', '{"x": 2}', '{"1": -1}', '{"1": true}', f'{{"{10**30}": 2}}', " " * (1 << 21), None],
    ids=["list", "cut", "text", "name", "negative", "truth", "long", "large", "link"],
)
def test_a_hostile_list_of_sockets_is_none(content: str | None, folder: Path) -> None:
    describe_rank(folder, 0, 2)
    path = folder / "sockets.json"
    if content is None:
        (folder / "elsewhere").write_text('{"1": 2}')
        path.symlink_to(folder / "elsewhere")
    else:
        path.write_text(content)
    container = WatchedContainer(folder, WORKER)
    container.read(1.0, 1001.0)
    assert container.read_socket_ranks() == {}


def test_a_watched_sidecar_needs_no_job() -> None:
    environment = {
        "PACEKEEPER_WORKER": WORKER,
        "PACEKEEPER_OPERATOR": "https://operator",
        "PACEKEEPER_TOKEN_FILE": "/token",
    }
    with pytest.raises(InputError, match="PACEKEEPER_JOB"):
        SidecarSettings.from_environment(environment)
    settings = SidecarSettings.from_environment({**environment, "PACEKEEPER_WATCHED": "1"})
    assert settings == replace(settings, watched=True, job="", worker=WORKER, samples_connections=False)
    links = SidecarSettings.from_environment({**environment, "PACEKEEPER_WATCHED": "1", "PACEKEEPER_WATCH_LINKS": "1"})
    assert links.samples_connections
