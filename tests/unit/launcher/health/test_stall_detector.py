"""When ranks count as stalled, and what is reported of them."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from pacekeeper.health.stack_file import StackFile, extract_main_stack
from pacekeeper.health.stall_detector import (
    ProcessSample,
    RankInspection,
    StallDetector,
    build_rank_state,
    compute_stall_deadline,
    estimate_step_seconds,
)
from pacekeeper.launcher.health import nccl_ras
from pacekeeper.launcher.health.inspection import Inspector, is_reachable
from pacekeeper.launcher.health.process_sampling import read_process_state, sample_process
from pacekeeper.launcher.rendezvous.rounds import RoundState
from pacekeeper.launcher.settings import LauncherSettings
from pacekeeper.observe.ring_reader import RingReader
from pacekeeper_analysis.protocol.communicators import Communicator, parse_entered
from pacekeeper_analysis.protocol.reports import FaultReport, LauncherState
from pacekeeper_rank.record_ring import NO_PLACE, RingWriter, create_ring
from pacekeeper_rank.records import Collective, Device, Phase, RecordKind

SETTINGS = LauncherSettings(worker="w", address="127.0.0.1")
RUNNING = RoundState(stage=LauncherState.RUNNING, membership=1, round=3, running=3)


@pytest.mark.parametrize(
    ("phase", "steps", "step_seconds", "hang", "expected"),
    [
        (Phase.TRAIN, 5, 0.1, None, 2.0),
        (Phase.TRAIN, 5, 3.0, None, 30.0),
        (Phase.TRAIN, 4, 0.1, None, 1800.0),
        (Phase.TRAIN, 1, 0.1, 7.0, 7.0),
        *[(phase, 100, 0.1, hang, 1800.0) for phase in Phase if phase is not Phase.TRAIN for hang in (None, 7.0)],
    ],
)
def test_each_phase_has_its_deadline(
    phase: Phase, steps: int, step_seconds: float, hang: float | None, expected: float
) -> None:
    assert compute_stall_deadline(phase, steps, step_seconds, replace(SETTINGS, hang_deadline=hang)) == expected


@pytest.mark.parametrize(("earlier", "expected"), [(None, 1800.0), (0.1, 30.0), (0.5, 50.0)])
def test_the_first_steps_of_a_later_round_have_a_deadline_too(earlier: float | None, expected: float) -> None:
    assert compute_stall_deadline(Phase.TRAIN, 1, 0.1, SETTINGS, earlier) == expected
    assert compute_stall_deadline(Phase.START, 0, 0.0, SETTINGS, earlier) == 1800.0


@pytest.mark.parametrize(("longest", "expected"), [(None, 1800.0), (0.01, 60.0), (4.0, 80.0), (100.0, 1800.0)])
def test_the_deadline_of_a_loader_follows_its_longest_wait(longest: float | None, expected: float) -> None:
    assert compute_stall_deadline(Phase.LOAD, 100, 0.1, SETTINGS, longest_load=longest) == expected
    for marked in (Phase.CHECKPOINT, Phase.DATA):  # with job.phase("data"), for example: the script requests the time
        assert compute_stall_deadline(marked, 100, 0.1, SETTINGS, longest_load=longest) == 1800.0


@dataclass
class StallBench:
    """A stall detector over one simulated rank that takes a tenth of a second for a step."""

    path: Path
    stopped: bool = False
    faults: list[FaultReport] = field(default_factory=list)
    now: float = 1_000.0
    known_communicators: tuple[Communicator, ...] = ()

    def __post_init__(self) -> None:
        create_ring(self.path, rank=5, round_=3, capacity=64)
        self.writer, self.reader = RingWriter(self.path), RingReader(self.path)
        self.watch = StallDetector(
            SETTINGS, lambda _: estimate_step_seconds(self.reader.records()), lambda _: self.stopped
        )
        self.writer.enter_phase(Phase.TRAIN)

    def run_steps(self, count: int) -> None:
        for _ in range(count):
            end = int(self.now * 1e9)
            self.writer.write(RecordKind.STEP, end - 100_000_000, end, 1, Phase.TRAIN)
            self.writer.end_step(1, end)

    def records(self, local_rank: int) -> NDArray[np.void]:  # noqa: ARG002  # there is one rank
        return self.reader.records()

    def communicators(self, local_rank: int) -> tuple[Communicator, ...]:  # noqa: ARG002  # as above
        return self.known_communicators

    def describe_transfers(self) -> str:
        return "rank 5: sends to rank 1"

    def check_after(self, after: float) -> int:
        """Return how many stalls have been reported after a further check."""
        self.now += after
        ranks = {0: self.reader.state()}
        if self.watch.check(ranks, self.now):
            self.watch.begin_report(self.now)
            found = RankInspection({}, {}, ["192.0.2.1"], self.known_communicators)
            report = self.watch.build_fault(RUNNING, ranks, found, self.now, wall=5e9)
            self.faults.append(report)
        return len(self.faults)


@pytest.fixture
def bench(tmp_path: Path) -> StallBench:
    return StallBench(tmp_path / "0")


def test_a_rank_that_steps_is_not_stalled(bench: StallBench) -> None:
    for _ in range(30):
        bench.run_steps(1)
        assert bench.check_after(after=1.9) == 0


def test_a_rank_stalls_after_its_deadline_and_is_reported_less_and_less_often(bench: StallBench) -> None:
    bench.run_steps(10)
    assert [bench.check_after(after) for after in (0.0, 1.9, 0.2, 2.0, 1.1, 5.0, 1.1, 11.0, 1.1, 13.0, 2.1)] == [
        0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5,
    ]  # fmt: skip
    assert len({fault.name for fault in bench.faults}) == 5
    (rank,) = bench.faults[0].ranks
    assert (rank.rank, rank.phase, rank.step, rank.process_state) == (5, "TRAIN", 1, "")
    assert (bench.faults[0].completed_step, bench.faults[0].noticed_at) == (True, 5e9)
    assert bench.faults[0].unreachable == ("192.0.2.1",)


def test_progress_ends_the_stall(bench: StallBench) -> None:
    bench.run_steps(10)
    bench.check_after(0.0)
    assert bench.check_after(2.1) == 1
    bench.run_steps(1)
    assert bench.check_after(60.0) == 1
    assert bench.check_after(1.9) == 1
    assert bench.check_after(0.2) == 2
    assert len({fault.name for fault in bench.faults}) == 2, "the operator may have settled the first one"


def test_the_first_steps_of_a_round_have_a_longer_deadline(bench: StallBench) -> None:
    bench.run_steps(4)
    bench.check_after(0.0)
    assert bench.check_after(600.0) == 0


def test_a_stopped_process_is_a_stall_in_every_phase(bench: StallBench) -> None:
    bench.stopped = True
    bench.writer.enter_phase(Phase.CHECKPOINT)
    assert [bench.check_after(0.0), bench.check_after(1.9), bench.check_after(0.2)] == [0, 0, 1]


async def test_the_processes_of_stalled_ranks_are_inspected(
    bench: StallBench, sleeping_process: subprocess.Popen[bytes]
) -> None:
    _stop_process(sleeping_process)
    inspector = Inspector(SETTINGS, bench, bench.faults.append)
    for now in (0.0, 2.1):
        assert not bench.faults
        stacks = {0: StackFile(bench.path.with_suffix(".stack"))}
        inspector.check(RUNNING, {0: bench.reader.state()}, {0: sleeping_process.pid}, stacks, [], now)
    assert inspector._inspection is not None
    await inspector._inspection
    assert bench.faults[0].ranks[0].process_state == "T"


async def test_a_rank_that_exited_recently_has_crashed_and_does_not_hang(
    bench: StallBench, sleeping_process: subprocess.Popen[bytes]
) -> None:
    """If the exit is never reported, the next report of the stall has it."""
    bench.run_steps(10)
    sleeping_process.kill()
    await asyncio.to_thread(os.waitid, os.P_PID, sleeping_process.pid, os.WEXITED | os.WNOWAIT)  # it remains a zombie
    inspector, reported = Inspector(SETTINGS, bench, bench.faults.append), []
    for now in (0.0, 2.1, 5.2):
        stacks = {0: StackFile(bench.path.with_suffix(".stack"))}
        inspector.check(RUNNING, {0: bench.reader.state()}, {0: sleeping_process.pid}, stacks, [], now)
        if inspector._inspection is not None:
            await inspector._inspection
        reported.append([fault.ranks[0].process_state for fault in bench.faults])
    assert reported == [[], [], ["Z"]]


async def test_nccls_answer_is_part_of_the_next_report_and_delays_none(
    bench: StallBench, sleeping_process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    answered, questions = asyncio.Event(), []

    async def query_nccl(environment: object) -> str:
        questions.append(environment)
        await answered.wait()
        return "communicator 0xa1 of 8: dead: rank 3"

    monkeypatch.setattr(nccl_ras, "query_ras", query_nccl)
    _stop_process(sleeping_process)
    bench.writer.state.device = Device.STARTED
    inspector, stacks = Inspector(SETTINGS, bench, bench.faults.append), {0: StackFile(bench.path.with_suffix(".s"))}
    for now in (0.0, 2.1, 5.2):
        inspector.check(RUNNING, {0: bench.reader.state()}, {0: sleeping_process.pid}, stacks, [], now)
        if inspector._inspection is not None:
            await inspector._inspection
            answered.set()
    assert [(fault.ras, fault.transfers) for fault in bench.faults] == [
        ("", "rank 5: sends to rank 1"),
        ("communicator 0xa1 of 8: dead: rank 3", "rank 5: sends to rank 1"),
    ]
    assert len(questions) == 1, "the first question was under way still"


@pytest.mark.parametrize(("device", "rank"), [(Device.NONE, 0), (Device.STARTED, 16)])
async def test_nccl_is_not_queried_about_ranks_without_a_gpu_nor_by_every_worker(
    bench: StallBench,
    sleeping_process: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
    device: Device,
    rank: int,
) -> None:
    monkeypatch.setattr(nccl_ras, "query_ras", None)
    _stop_process(sleeping_process)
    bench.writer.state.device, bench.writer.state.rank = device, rank
    inspector, stacks = Inspector(SETTINGS, bench, bench.faults.append), {0: StackFile(bench.path.with_suffix(".s"))}
    for now in (0.0, 2.1):
        inspector.check(RUNNING, {0: bench.reader.state()}, {0: sleeping_process.pid}, stacks, [], now)
    assert inspector._inspection is not None
    await inspector._inspection
    assert bench.faults[0].ras == ""


def test_the_next_round_remembers_how_long_a_step_takes(bench: StallBench) -> None:
    assert bench.watch.step_seconds({0: bench.reader.state()}) is None
    bench.run_steps(4)
    assert bench.watch.step_seconds({0: bench.reader.state()}) is None
    bench.run_steps(1)
    assert bench.watch.step_seconds({0: bench.reader.state()}) == pytest.approx(0.1)
    bench.writer.write(RecordKind.SYNCHRONIZATION, 0, 700_000_000, 1, Phase.TRAIN)
    assert bench.watch.step_seconds({0: bench.reader.state()}) == pytest.approx(0.7)


def test_a_rank_that_finished_training_may_run_indefinitely_but_not_stop(bench: StallBench) -> None:
    bench.run_steps(10)
    bench.writer.enter_phase(Phase.FINISHED)
    bench.check_after(0.0)
    assert bench.check_after(100_000.0) == 0
    bench.stopped = True
    assert bench.check_after(1.0) == 1


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase not in (Phase.TRAIN, Phase.FINISHED)])
def test_a_minute_in_another_phase_is_no_stall(bench: StallBench, phase: Phase) -> None:
    bench.run_steps(10)
    bench.writer.enter_phase(phase)
    bench.check_after(0.0)
    assert bench.check_after(60.0) == 0
    assert bench.check_after(1800.0) == 1


def test_a_loader_that_hangs_is_overdue_after_a_minute(bench: StallBench) -> None:
    bench.run_steps(10)
    bench.writer.end_load(2_000_000_000)
    bench.writer.end_load(1_000_000_000)
    bench.writer.enter_phase(Phase.LOAD)
    bench.check_after(0.0)
    assert bench.check_after(59.0) == 0
    assert bench.check_after(1.1) == 1
    (rank,) = bench.faults[0].ranks
    assert (rank.phase, rank.overdue) == ("LOAD", True)


def test_gpu_state_that_is_read_later_is_no_progress(bench: StallBench) -> None:
    bench.run_steps(10)
    bench.check_after(0.0)
    state = bench.writer.state
    state.device, state.device_sequence, state.device_group = Device.STARTED, 17, 4
    state.device_collective = Collective.ALL_REDUCE
    assert bench.check_after(2.1) == 1
    (rank,) = bench.faults[0].ranks
    reported = (rank.device, rank.device_collective, rank.device_group, rank.device_sequence)
    assert reported == ("STARTED", "ALL_REDUCE", 4, 17)


def test_a_stall_names_the_members_and_the_progress_of_each_group(bench: StallBench) -> None:
    data, tensor = (bench.writer.take_place(identity) for identity in (7, 2**32 - 1))
    bench.known_communicators = (
        Communicator(7, "0-8:4", "data"),
        Communicator(9, "4,5"),
        Communicator(7, "0-8:4", "data"),
    )
    bench.writer.enter_collective(Collective.ALL_REDUCE, 2**32 - 1, 40, 0, tensor)
    bench.writer.state.peer = 4
    bench.writer.enter_collective(Collective.RECV, 7, 12, 0, data)
    bench.run_steps(10)
    bench.check_after(0.0)
    assert bench.check_after(2.1) == 1
    (rank,) = bench.faults[0].ranks
    assert parse_entered(rank.entered) == {7: 12, 2**32 - 1: 40}
    assert (rank.collective, rank.group, rank.peer) == ("RECV", 7, 4)
    assert bench.faults[0].communicators == (Communicator(7, "0-8:4", "data"),)
    bench.writer.release_place(tensor)
    bench.writer.enter_collective(Collective.ALL_REDUCE, 7, 13, 0, data)
    bench.check_after(1.0)
    assert bench.check_after(2.1) == 2
    (rank,) = bench.faults[1].ranks
    assert (parse_entered(rank.entered), rank.peer) == ({7: 13}, None), "the peer is no longer one"


def test_entering_another_collective_is_progress(bench: StallBench) -> None:
    bench.run_steps(10)
    for number in range(10):
        bench.writer.enter_collective(Collective.ALL_REDUCE, 1, number, 0, NO_PLACE)
        assert bench.check_after(after=1.5) == 0


def test_a_rank_in_a_collective_waits_from_its_entry(tmp_path: Path) -> None:
    create_ring(tmp_path / "0", rank=1, round_=3, capacity=64)
    writer = RingWriter(tmp_path / "0")
    writer.enter_phase(Phase.TRAIN, 90_000_000_000)
    writer.enter_collective(Collective.ALL_REDUCE, 4, 17, 95_000_000_000, NO_PLACE)
    state = RingReader(tmp_path / "0").state()
    reported = build_rank_state(
        state, (ProcessSample("S", 3, "a"), ProcessSample("S", 3, "a")), since=91.0, now=100.0, overdue=False
    )
    assert (reported.phase_seconds, reported.waiting_seconds) == (10.0, 5.0)
    assert (reported.collective, reported.group, reported.sequence) == ("ALL_REDUCE", 4, 17)
    assert not reported.moving
    writer.leave_collective()
    state = RingReader(tmp_path / "0").state()
    reported = build_rank_state(
        state, (ProcessSample("S", 3, "a"), ProcessSample("S", 5, "a")), since=91.0, now=100.0, overdue=False
    )
    assert not reported.moving, "the sampling itself may cost this much"
    reported = build_rank_state(
        state, (ProcessSample("R", 3, "a"), ProcessSample("R", 6, "a")), since=91.0, now=100.0, overdue=False
    )
    assert (reported.collective, reported.waiting_seconds, reported.moving) == ("NONE", 9.0, True)


def test_a_rank_that_has_exited_with_success_is_not_stalled_and_reported_as_such(bench: StallBench) -> None:
    bench.run_steps(10)
    ranks = {0: bench.reader.state()}
    assert not bench.watch.check(ranks, 1_000.0, ended={0})
    assert not bench.watch.check(ranks, 9_000.0, ended={0})
    (rank,) = bench.watch.build_fault(RUNNING, ranks, RankInspection({}, {}), 9_000.0, 5e9, ended={0}).ranks
    assert rank.ended


@pytest.mark.parametrize(("device", "expected"), [(device, device in (Device.NONE, Device.IDLE)) for device in Device])
def test_a_wait_for_an_external_cause_is_excused_for_a_limited_time(
    tmp_path: Path, device: Device, expected: bool
) -> None:
    """While work runs on its GPU, a rank may wait for that work."""
    create_ring(tmp_path / "0", rank=1, round_=3, capacity=64)
    RingWriter(tmp_path / "0").state.device = device
    state, sample = RingReader(tmp_path / "0").state(), ProcessSample("S", 3, "a", waits_for="a socket")
    young = build_rank_state(state, (sample, sample), since=100.0, now=399.0, overdue=True)
    late = build_rank_state(state, (sample, sample), since=100.0, now=401.0, overdue=True)
    reported = build_rank_state(state, (sample, sample), since=100.0, now=110.0, overdue=True, patience=9.0)
    assert [each.excused for each in (young, late, reported)] == [expected, False, False]
    assert young.waits_for == ("a socket" if expected else "")
    assert not build_rank_state(state, (ProcessSample("S"), sample), since=100.0, now=101.0, overdue=False).excused


def test_work_of_child_processes_counts_for_the_rank(tmp_path: Path) -> None:
    create_ring(tmp_path / "0", rank=1, round_=3, capacity=64)
    state = RingReader(tmp_path / "0").state()
    samples = ProcessSample("S", 3, "a", helper_ticks=5), ProcessSample("S", 3, "a", helper_ticks=40)
    assert build_rank_state(state, samples, since=91.0, now=100.0, overdue=False).moving


@pytest.mark.parametrize("device", [device for device in Device if device is not Device.NONE])
def test_a_rank_that_spins_for_its_gpu_does_not_move(tmp_path: Path, device: Device) -> None:
    create_ring(tmp_path / "0", rank=1, round_=3, capacity=64)
    RingWriter(tmp_path / "0").state.device = device
    state = RingReader(tmp_path / "0").state()
    spins = build_rank_state(
        state, (ProcessSample("R", 3, "a"), ProcessSample("R", 50, "a")), since=69.0, now=100.0, overdue=False
    )
    moves = build_rank_state(
        state, (ProcessSample("R", 3, "a"), ProcessSample("R", 50, "b")), since=69.0, now=100.0, overdue=False
    )
    assert (spins.moving, moves.moving) == (False, True)
    young = build_rank_state(
        state, (ProcessSample("R", 3, "a"), ProcessSample("R", 50, "a")), since=91.0, now=100.0, overdue=False
    )
    assert young.moving is (device is Device.IDLE), "with nothing under way on its GPU it may work on its host"


DUMP = """Thread 0x00007f0000000002 (most recent call first):
  File "other.py", line 1 in wait

Current thread 0x00007f0000000001 (most recent call first):
  File "train.py", line 9 in forward
  File "train.py", line 5 in main
"""


def test_the_main_threads_stack_is_read_with_the_innermost_call_last() -> None:
    frames = 'File "train.py", line 5 in main\nFile "train.py", line 9 in forward'
    assert extract_main_stack(DUMP, "0x00007f0000000001") == frames
    assert extract_main_stack("", "0x00007f0000000001") == ""


def test_only_the_newest_stacks_of_a_rank_are_stored(tmp_path: Path) -> None:
    path = tmp_path / "0"
    file = StackFile(path)
    assert file.drop_dumps() == 0, "it has not begun yet"
    stacks, sizes = [], []
    with subprocess.Popen([sys.executable, "-c", A_RANK, str(path)], stdout=subprocess.PIPE) as rank:
        assert rank.stdout is not None
        rank.stdout.readline()
        for _ in range(3):
            stacks.append(asyncio.run(sample_process(rank.pid, file)).stack)
            sizes.append(path.stat().st_size)
        rank.kill()
    assert all(stack.endswith("in waits") for stack in stacks)
    assert sizes[2] == sizes[0], "a stall may last for long, and the file lies in memory"


A_RANK = """
import sys, time
from pacekeeper_rank.forking.rank import _write_stacks_on_signal
def waits():
    print("waits", flush=True)
    time.sleep(60)
_write_stacks_on_signal(sys.argv[1])
waits()
"""


@pytest.fixture
def sleeping_process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        yield process
        process.kill()


def _stop_process(process: subprocess.Popen[bytes]) -> None:
    os.kill(process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)


def test_the_process_state_distinguishes_a_stopped_process_from_an_exited_one(
    sleeping_process: subprocess.Popen[bytes],
) -> None:
    assert read_process_state(sleeping_process.pid)[0] in {"S", "R", "D"}
    _stop_process(sleeping_process)
    assert read_process_state(sleeping_process.pid)[0] == "T"
    sleeping_process.kill()
    sleeping_process.wait()
    assert read_process_state(sleeping_process.pid) == ("", 0)


async def test_a_refused_connection_is_an_answer_and_silence_is_none() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        open_port = server.getsockname()[1]
        assert await is_reachable("127.0.0.1", open_port)
    assert await is_reachable("127.0.0.1", open_port), "the host is there, its port is closed"
    with socket.socket() as deaf, ExitStack() as stack:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        for _ in range(3):  # its queue is full now, and the kernel drops further connections
            knocking = stack.enter_context(socket.socket())
            knocking.setblocking(False)
            knocking.connect_ex(deaf.getsockname())
        # The kernel would try for two minutes.
        assert not await asyncio.wait_for(is_reachable("127.0.0.1", deaf.getsockname()[1]), 60)
