"""The reader of a watched container, whose files may be anything."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pacekeeper.observe.collectives.communicator_file import read_communicators
from pacekeeper.observe.profiling.known_spans import PEER_WAIT_SPAN_NAME
from pacekeeper.watch.container import ContainerState, WatchedContainer
from pacekeeper.watch.runtime_files import RuntimeFiles
from pacekeeper_analysis.profiling.pattern import ProfileAnswer, RankPattern
from pacekeeper_analysis.protocol.reports import FaultReport, LauncherState
from pacekeeper_rank.record_ring import RingWriter, create_ring
from pacekeeper_rank.records import Collective, Phase, RecordKind
from pacekeeper_rank.watching.process_monitor import ProcessMonitor
from pacekeeper_rank.watching.slot_lock import take_lock, take_slot
from pacekeeper_rank.watching.watch_folder import WatchFolder, write_json

WALL = 1_000_000.0


class Rank:
    """A process that holds its slot's lock until it is ended, and that has described itself."""

    def __init__(self, folder: WatchFolder, rank: int, world_size: int = 2, **fields: Any) -> None:
        self.folder, self.rank = folder, rank
        ready, locked = os.pipe()
        self.pid, self._ended = os.fork(), False
        if self.pid == 0:
            os.write(locked, b"1" if take_lock(folder.lock(rank)) else b"0")
            while True:
                signal.pause()
        assert os.read(ready, 1) == b"1"
        os.close(ready)
        os.close(locked)
        create_ring(folder.ring(rank), rank, 1, 64)
        self.ring = RingWriter(folder.ring(rank))
        self.ring.state.pid = self.pid
        self.ring.enter_phase(Phase.TRAIN)
        description: dict[str, Any] = {
            "rank": rank,
            "world_size": world_size,
            "slot": rank,
            "pid": self.pid,
            "restart": 0,
        }
        description |= {"started_at": WALL, "recording": "Native", "rendezvous": "host:1", **fields}
        self.write("ranks", description)

    def write(self, kind: str, content: dict[str, Any]) -> None:
        self.folder.get_file(kind, self.rank).write_text(json.dumps(content))

    def end(self) -> None:
        if not self._ended:
            self._ended = True
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


@pytest.fixture
def folder(tmp_path: Path) -> WatchFolder:
    return WatchFolder(tmp_path).create()


@pytest.fixture
def start(folder: WatchFolder) -> Iterator[Callable[..., Rank]]:
    ranks: list[Rank] = []

    def start_rank(rank: int, **fields: Any) -> Rank:
        ranks.append(Rank(folder, rank, **fields))
        return ranks[-1]

    yield start_rank
    for rank in ranks:
        rank.end()


def write_processes(folder: WatchFolder, at: float, states: dict[Rank, str], oom_kills: int = 0) -> None:
    ranks = {str(rank.rank): {"pid": rank.pid, "state": state, "cpu_ticks": 7} for rank, state in states.items()}
    content = {"at": at, "by": 1, "oom_kills": oom_kills, "ranks": ranks}
    folder.processes.write_text(json.dumps(content))


def read(container: WatchedContainer, seconds: float, *, is_over: bool = False) -> ContainerState:
    return container.read(100.0 + seconds, WALL + seconds, is_over=is_over)


class TestDeath:
    def test_the_first_to_release_its_lock_failed_first_and_the_agent_tells_how(
        self, folder: WatchFolder, start: Callable[..., Rank]
    ) -> None:
        first, second = start(0), start(1)
        container = WatchedContainer(folder.root)
        assert read(container, 0).heartbeat.state is LauncherState.RUNNING
        second.end()
        assert not read(container, 0.1).faults, "the agent may know more"
        first.write("ends", {"pid": first.pid, "at": WALL, "kind": "ValueError", "error": "Traceback\nValueError: 1"})
        first.end()
        assert not read(container, 0.2).faults, "the order stays"
        failure = {"pid": second.pid, "exit_code": -9, "at": WALL, "message": "Signal 9"}
        folder.get_file("exits", 1).write_text(json.dumps({"at": WALL + 0.3, "failures": {"1": failure}}))
        state = read(container, 0.4)
        assert [(fault.rank, fault.exit_code) for fault in state.faults] == [(1, -9), (0, 1)]
        assert state.faults[1].error.endswith("ValueError: 1")
        assert state.heartbeat.state is LauncherState.FAILED
        assert not read(container, 9).faults, "each is reported once"

    def test_without_an_agent_a_rank_without_a_message_is_reported_after_a_while_or_at_the_end(
        self, folder: WatchFolder, start: Callable[..., Rank]
    ) -> None:
        rank = start(0)
        containers = [WatchedContainer(folder.root) for _ in range(2)]
        for container in containers:
            read(container, 0)
        rank.end()
        assert not read(containers[0], 0.1).faults
        assert [fault.exit_code for fault in read(containers[0], 2.2).faults] == [0]
        assert len(read(containers[1], 0.1, is_over=True).faults) == 1

    def test_a_script_that_ends_well_is_no_fault(self, folder: WatchFolder, start: Callable[..., Rank]) -> None:
        rank = start(0, world_size=1)
        container = WatchedContainer(folder.root)
        read(container, 0)
        rank.write("ends", {"pid": rank.pid, "at": WALL, "kind": "", "error": ""})
        rank.end()
        assert not read(container, 0.1).faults
        state = read(container, 5)
        assert (state.heartbeat.state, state.faults) == (LauncherState.FINISHED, ())

    def test_a_process_that_closes_all_files_lives_as_long_as_the_monitor_sees_it(
        self, folder: WatchFolder, start: Callable[..., Rank]
    ) -> None:
        rank = start(0)
        container = WatchedContainer(folder.root)
        rank.end()  # as if only the lock were gone
        write_processes(folder, WALL + 1, {rank: "S"})
        assert read(container, 1).alive == {0}
        write_processes(folder, WALL + 2, {rank: "Z"}, oom_kills=1)
        state = read(container, 2.1)
        assert state.alive == frozenset()

    def test_a_kill_by_the_kernel_for_lack_of_memory_is_named(
        self, folder: WatchFolder, start: Callable[..., Rank]
    ) -> None:
        rank = start(0)
        container = WatchedContainer(folder.root)
        write_processes(folder, WALL, {rank: "S"})
        read(container, 0)
        rank.end()
        write_processes(folder, WALL + 1, {rank: ""}, oom_kills=1)
        read(container, 0.9)
        write_processes(folder, WALL + 3, {rank: ""}, oom_kills=1)
        (fault,) = (*read(container, 3.1).faults, *read(container, 6).faults)
        assert fault.out_of_memory

    def test_a_slot_whose_next_process_is_there_already_has_lost_its_first(
        self, folder: WatchFolder, start: Callable[..., Rank]
    ) -> None:
        container = WatchedContainer(folder.root)
        first = start(0)
        read(container, 0)
        first.end()
        second = start(0, restart=1, started_at=WALL + 5)
        assert second.pid != first.pid
        state = read(container, 5)
        assert (state.heartbeat.round, state.heartbeat.restarts, {*state.alive}) == (2, 1, {0})
        assert [fault.round for fault in read(container, 8).faults] == [1]


class TestStall:
    def test_a_stopped_rank_is_reported_with_the_collective_that_its_peer_waits_in(
        self, folder: WatchFolder, start: Callable[..., Rank]
    ) -> None:
        stopped, waiting = start(0), start(1)
        waiting.ring.enter_collective(Collective.ALL_REDUCE, 5, 9, 100_000_000_000, waiting.ring.take_place(5))
        for rank in (stopped, waiting):
            for step in range(1, 7):
                rank.ring.end_step(step, 100_000_000_000)
        container = WatchedContainer(folder.root)
        faults: list[FaultReport] = []
        for tick in range(60):
            seconds = tick / 10
            write_processes(folder, WALL + seconds + 0.05, {stopped: "T", waiting: "S"})
            request = folder.read_stack_request()
            frame = {"file": "train.py", "line": 3, "function": "train"}
            waiting.write("stacks", {"request": request, "stack": [frame]})
            faults += read(container, seconds).faults
        states = {state.rank: state for state in faults[0].ranks}
        assert (states[0].process_state, states[1].process_state) == ("T", "S")
        assert (states[1].collective, states[1].sequence) == ("ALL_REDUCE", 9)
        assert states[1].stack == 'File "train.py", line 3 in train'
        assert len({fault.name for fault in faults}) == len(faults)

    def test_ranks_of_which_nothing_is_known_are_not_reported(
        self, folder: WatchFolder, start: Callable[..., Rank]
    ) -> None:
        """No process monitor runs, and no thread answers: a missing signal is no signal."""
        for rank in (start(0), start(1)):
            for step in range(1, 7):
                rank.ring.end_step(step, 100_000_000_000)
        container = WatchedContainer(folder.root)
        assert not [fault for tick in range(100) for fault in read(container, tick / 10).faults]


HOSTILE = ("[]", "{", '{"rank": -1}', "\0" * 300_000, "[" * 100_000, '{"pid": 1e999}', "NaN", '"' + "x" * 300_000 + '"')


@pytest.mark.parametrize("content", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_files_harm_only_their_rank(content: str, folder: WatchFolder, start: Callable[..., Rank]) -> None:
    honest = start(0)
    for kind in ("ranks", "ends", "stacks", "broken", "exits", "communicators"):
        folder.get_file(kind, 1).write_text(content)
    for path in (folder.processes, folder.ring(1), folder.ring(7), folder.stack_dump(1)):
        path.write_text(content)
    state = read(WatchedContainer(folder.root), 0)
    assert [rank.pid for rank in state.ranks] == [honest.pid]
    assert not state.broken


def test_links_pipes_and_numbers_without_end_are_not_followed(
    folder: WatchFolder, start: Callable[..., Rank], tmp_path: Path
) -> None:
    start(0)
    os.mkfifo(folder.get_file("ranks", 1))
    folder.get_file("ranks", 2).symlink_to("/dev/zero")
    folder.get_file("ranks", "9" * 30).write_text("{}")
    os.mkfifo(folder.lock(3))
    folder.ring(4).symlink_to("/dev/zero")
    os.mkfifo(folder.get_file("communicators", 0))
    container = WatchedContainer(tmp_path)
    assert len(read(container, 0).ranks) == 1
    assert read_communicators(folder.get_file("communicators", 0)) == ()
    os.mkfifo(folder.ring(5))
    container.rings.selected = None
    assert [int(rank.state["rank"]) for rank in container.rings.refresh()] == [0]
    assert RuntimeFiles(tmp_path).is_locked(3) is False
    assert RuntimeFiles(tmp_path).is_locked(99) is None


def test_a_ring_whose_state_cannot_be_does_not_count(folder: WatchFolder, start: Callable[..., Rank]) -> None:
    start(0)
    start(1).ring.state.phase = 77
    state = read(WatchedContainer(folder.root), 0)
    assert [rank.rank for rank in state.ranks] == [0, 1]
    assert state.heartbeat.round == 1


def test_steps_are_dated_and_summed(folder: WatchFolder, start: Callable[..., Rank]) -> None:
    """The first step of a round is not measured. The steps that a rank has resumed from count as the job's."""
    rank = start(0, world_size=1, resumed_from=50)
    for step in range(1, 5):
        begin, end = (int((100 + step * 0.1 + offset) * 1e9) for offset in (0, 0.1))
        phase = Phase.START if step == 1 else Phase.TRAIN
        rank.ring.write(RecordKind.COMPUTE, begin, begin + 30_000_000, step, phase)
        rank.ring.write(RecordKind.STEP, begin, end, step, phase)
        rank.ring.end_step(step, end)
    container = WatchedContainer(folder.root)
    progress = read(container, 2).heartbeat.progress
    assert (progress.step, progress.steps_in_round) == (54, 4)
    assert progress.step_ended_at == pytest.approx(WALL + 0.5)
    assert container.measure_first_step(102, WALL + 2) == pytest.approx(WALL + 0.2)
    (sums,) = container.sum_steps()
    assert (sums.rank, sums.last_step, sums.steps) == (0, 54, 3)
    assert (sums.step_seconds, sums.own_seconds) == pytest.approx((0.3, 0.09))
    rank.ring.state.step_end_ns = -(2**62)
    assert read(container, 3).heartbeat.progress.step_ended_at == 0.0, "a rank may write anything"


def test_slots_are_taken_once_and_a_taken_one_gives_the_next(folder: WatchFolder, start: Callable[..., Rank]) -> None:
    start(0)
    start(2)
    assert take_slot(folder, 2) == 1
    assert [RuntimeFiles(folder.root).is_locked(slot) for slot in (0, 2)] == [True, True]


def test_one_process_of_the_container_samples_the_others(folder: WatchFolder, start: Callable[..., Rank]) -> None:
    rank = start(0)
    monitor = ProcessMonitor(folder)
    monitor.tick(0.0)
    samples = RuntimeFiles(folder.root).read_processes()
    assert samples is not None
    assert samples.by == os.getpid()
    assert samples.ranks["0"].pid == rank.pid
    assert samples.ranks["0"].state in {"S", "R"}
    rank.end()
    monitor.tick(1.0)
    samples = RuntimeFiles(folder.root).read_processes()
    assert samples is not None
    assert samples.ranks["0"].state == ""


@pytest.mark.parametrize("age_seconds", [0.0, 60.0], ids=["within the resolution of file times", "long before"])
def test_the_monitor_reads_the_ranks_again_after_each_change(age_seconds: float, folder: WatchFolder) -> None:
    """Its folder shows that a file was replaced, unless the kernel gives both states of it the same time."""
    monitor, path = ProcessMonitor(folder), folder.root / "ranks"
    changed = time.time_ns() - int(age_seconds * 1e9)
    for rank in (1, 2):
        write_json(folder.get_file("ranks", 0), {"pid": os.getpid(), "rank": rank})
        if not age_seconds or rank == 1:
            os.utime(path, ns=(changed, changed))
        first, second = monitor._read_ranks(), monitor._read_ranks()
        assert first == second == {"0": {"pid": os.getpid(), "rank": rank}}
        assert (first is second) == (bool(age_seconds) and rank == 1), "a folder that changed long ago is not read"


class TestProfiles:
    """What a rank has sampled in a profile window."""

    @pytest.fixture
    def rank(self, start: Callable[..., Rank]) -> Rank:
        """Return a rank with ten steps of 0.1 s, of which each begins with a wait of 0.02 s."""
        rank = start(0, world_size=1)
        for step in range(10):
            rank.ring.write(RecordKind.STEP, self.at(step), self.at(step + 1), step, Phase.TRAIN)
        return rank

    @staticmethod
    def at(step: float) -> int:
        return int(step * 1e8)

    def build_recording(self, rank: Rank, **changes: Any) -> dict[str, Any]:
        times = [self.at(0.1 * number) for number in range(20, 80)]
        return {
            "request": "one",
            "pid": rank.pid,
            "began_ns": self.at(2),
            "ended_ns": self.at(8),
            "names": ["./train.py:main", "./train.py:augment", "torch/x.py:forward"],
            "stacks": [[0, 1], [0, 2]],
            "taken_ns": times,
            "ran_ns": [0] * len(times),
            "stack_of_sample": [number % 2 for number in range(len(times))],
            "wait_begins_ns": [self.at(step) for step in range(10)],
            "wait_ends_ns": [self.at(step + 0.2) for step in range(10)],
            **changes,
        }

    def read_patterns(self, folder: WatchFolder, request: str = "one") -> dict[int, RankPattern]:
        container = WatchedContainer(folder.root)
        read(container, 0.0)
        return container.read_patterns(request, set())

    def test_the_pattern_has_the_functions_and_the_waits(self, rank: Rank, folder: WatchFolder) -> None:
        rank.write("profiles", self.build_recording(rank))
        pattern = self.read_patterns(folder)[0]
        assert (pattern.rank, pattern.first_step, pattern.steps) == (0, 2, 6)
        shares = {function.name: function.share for function in pattern.function_patterns}
        assert shares.pop(PEER_WAIT_SPAN_NAME) == pytest.approx(0.2, abs=0.01)
        assert shares == pytest.approx({"./train.py:augment": 0.4, "torch/x.py:forward": 0.4}, abs=0.02)

    @pytest.mark.parametrize(
        "changes",
        [
            {"request": "another"},
            {"pid": 1},
            {"began_ns": 2**61},
            {"began_ns": -1},
            {"ended_ns": "now"},
            {"names": ["x" * 100] * 30_000},
            {"stacks": [[0, 1], [0, 3]]},
            {"stacks": [[0, 1], []]},
            {"stacks": [[0, 1], list(range(3)) * 100]},
            {"stacks": [[0, 1]]},
            {"taken_ns": [10**30] * 60},
            {"taken_ns": list(range(60, 0, -1))},
            {"ran_ns": []},
            {"wait_begins_ns": []},
            {"wait_begins_ns": [0] * 50_000, "wait_ends_ns": [0] * 50_000},
            {"padding": "x" * (1 << 22)},
        ],
        ids=lambda changes: f"{next(iter(changes))}-{str(next(iter(changes.values())))[:12]}",
    )
    def test_a_hostile_recording_is_none(self, changes: dict[str, Any], rank: Rank, folder: WatchFolder) -> None:
        rank.write("profiles", self.build_recording(rank, **changes))
        assert self.read_patterns(folder) == {}

    @pytest.mark.parametrize(
        "changes",
        [
            {"taken_ns": [0] * 60},
            {"ran_ns": [2**62] * 60},
            {"ran_ns": list(range(60, 0, -1))},
            {"wait_begins_ns": [2**62], "wait_ends_ns": [0]},
            {"wait_begins_ns": [0] * 9, "wait_ends_ns": [2**62] * 9},
            {"names": ["\ud800", "\x00\n", ""]},
            {"taken_ns": [], "ran_ns": [], "stack_of_sample": []},
        ],
        ids=lambda changes: f"{next(iter(changes))}-{str(next(iter(changes.values())))[:12]}",
    )
    def test_what_makes_no_sense_stays_a_pattern_that_the_operator_can_read(
        self, changes: dict[str, Any], rank: Rank, folder: WatchFolder
    ) -> None:
        rank.write("profiles", self.build_recording(rank, **changes))
        ProfileAnswer.from_bytes(ProfileAnswer(self.read_patterns(folder)[0]).to_bytes())
