"""From a device's marks to stragglers, shares, and the pace of A-EDiT: as if every call had waited for its work."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pacekeeper.observe.rank_history import BASELINE_SKIPPED_STEPS, RankHistory
from pacekeeper.observe.ring_reader import RingReader
from pacekeeper.sync.step_timer import StepTimer
from pacekeeper_analysis.protocol.reports import RankWindow
from pacekeeper_analysis.stragglers import strategies
from pacekeeper_analysis.stragglers.step_model import StepModel as OwnWork
from pacekeeper_analysis.stragglers.strategies import Bottleneck
from pacekeeper_analysis.whatif import data_parallel
from pacekeeper_rank import record_ring, recorder, torch_internals
from pacekeeper_rank.collectives import collective_monitor
from pacekeeper_rank.collectives.collective_monitor import CollectiveMonitor
from pacekeeper_rank.record_ring import RingWriter, create_ring
from pacekeeper_rank.recorder import Recorder
from pacekeeper_rank.records import MAX_STEPS_AHEAD, NOTICED_LATE, Phase, RecordKind
from pacekeeper_rank.work_clock import Clock, HostClock
from testing.training.async_device import DeviceRank, DeviceWorld, Event, FakeGroup, FakeWork, GroupLinks, Stream

pytestmark = [
    pytest.mark.usefixtures("python_or_c"),
    pytest.mark.skipif(
        torch_internals.HookOpName is None,
        reason="the double has process groups' own hooks, which torch has from 2.15 on",
    ),
]

RANKS, SLOW, SAMPLES = 4, 2, 8
WINDOW = 12
BEGIN = 1 + BASELINE_SKIPPED_STEPS + WINDOW
"""Steps before a fault: those of the baseline."""
STEPS = BEGIN + MAX_STEPS_AHEAD + 1 + WINDOW
"""A window in which no step is one that the host was ahead by before."""
MS = 1_000_000
THRESHOLD = 1.1

Program = Callable[["RankUnderTest", int, int], None]
"""A step's forward and backward pass, of this many nanoseconds of computation and of each collective."""


@dataclass
class RankUnderTest:
    """All that is between the simulated device and the ring, and all of it real."""

    rank: DeviceRank
    recorder: Recorder
    watcher: CollectiveMonitor
    group: FakeGroup
    side: Stream

    @classmethod
    def build(cls, rank: DeviceRank, links: GroupLinks, ring: Path, clock: Clock | None = None) -> RankUnderTest:
        create_ring(ring, rank.number, 1)
        recorder = Recorder(RingWriter(ring), clock or rank.clock())
        watcher, group = CollectiveMonitor(recorder), FakeGroup(rank, links)
        watcher.monitor_group(group)  # type: ignore[arg-type]  # a double
        return cls(rank, recorder, watcher, group, Stream())


@dataclass(frozen=True)
class Faults:
    """Faults of one rank, or of all, from step BEGIN on."""

    slower: float = 1.0
    """The slow rank's computation."""
    transfer: int = 3 * MS
    """Of each collective."""
    load: int = 0
    """That the slow rank's host takes for its loader."""
    noise: float = 0.03


def run_ddp(under_test: RankUnderTest, compute: int, transfer: int) -> None:
    """Two buckets, and gradients that belong to none; C++ waits for the buckets at the end."""
    rank, group = under_test.rank, under_test.group
    rank.launch(compute // 2)
    works = [group.all_reduce(transfer)]
    rank.launch(compute // 4)
    works.append(group.all_reduce(transfer))
    rank.launch(compute - compute // 2 - compute // 4)
    under_test.recorder.backward_computed()
    for work in works:
        assert work is not None
        work.wait()
    under_test.watcher.backward_ended()


def run_without_work(under_test: RankUnderTest, compute: int, transfer: int) -> None:
    """The script reduces after its backward pass, and its stream waits at once."""
    under_test.rank.launch(compute)
    reduce_synchronously(under_test, transfer)


def run_on_a_side_stream(under_test: RankUnderTest, compute: int, transfer: int) -> None:
    """As FSDP2: two layers are gathered on another stream, for which the computing one waits."""
    rank, side = under_test.rank, under_test.side
    for part in (compute // 2, compute - compute // 2):
        side.wait_for(rank.computing.tail)
        with rank.on(side):
            reduce_synchronously(under_test, transfer)
        with under_test.recorder.time_peer_wait():
            rank.computing.wait_for(side.tail)
        rank.launch(part)


def wait_for(under_test: RankUnderTest, work: Any) -> None:
    """As a script, whose `Work.wait` is bracketed."""
    begun = under_test.watcher.begin_wait()
    work.wait()
    under_test.watcher.end_wait(begun, work)


def reduce_synchronously(under_test: RankUnderTest, transfer: int) -> None:
    work = under_test.group.all_reduce(transfer, async_op=False)
    if work is not None:
        wait_for(under_test, work)


PROGRAMS: dict[str, Program] = {"DDP": run_ddp, "no Work": run_without_work, "FSDP2": run_on_a_side_stream}


def record_windows(
    folder: Path,
    devices: DeviceWorld,
    program: Program,
    faults: Faults,
    clock: Callable[[DeviceRank], Clock] | None = None,
) -> list[RankWindow]:
    """Of all ranks after STEPS steps. clock: another one than the right one; its script reads the loss at each step."""
    links = GroupLinks(RANKS)

    def train_rank(rank: DeviceRank) -> None:
        ring = folder / f"{rank.number}"
        under_test = RankUnderTest.build(rank, links, ring, clock and clock(rank))
        recorder, random = under_test.recorder, np.random.default_rng(rank.number)
        for step in range(STEPS):
            now = faults if step >= BEGIN else replace(faults, slower=1.0, transfer=3 * MS, load=0)
            if now.load and rank.number == SLOW:
                recorder.load(lambda: rank.busy(faults.load))
            slower = now.slower if rank.number == SLOW else 1.0
            compute = round(60 * MS * slower * (1 + faults.noise * random.uniform(-1, 1)))
            program(under_test, compute, now.transfer)
            recorder.optimizer_begins()
            rank.launch(2 * MS)
            if clock is not None:
                rank.wait_for(rank.computing.tail[0])
            recorder.end_step(SAMPLES)
            assert sum(not step.reached for step in recorder._in_flight) <= MAX_STEPS_AHEAD
        recorder.finish()

    devices.run(*[train_rank] * RANKS)
    found = []
    for number in range(RANKS):
        history = RankHistory(WINDOW)
        history.add(RingReader(folder / f"{number}").records())
        found.append(history.build_window(number))
    return found


@pytest.fixture(autouse=True)
def virtual_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[DeviceWorld], DeviceWorld]:
    def follow_device(devices: DeviceWorld) -> DeviceWorld:
        monkeypatch.setattr(time, "monotonic_ns", lambda: devices.now if devices.ranks else 0)
        return devices

    return follow_device


@dataclass(frozen=True)
class Findings:
    """All that is concluded from the windows."""

    bottleneck: Bottleneck
    culprits: tuple[int, ...]
    shares: tuple[int, ...] | None
    figures: tuple[float, ...]
    """S of each bottleneck, of each rank, and by simulation; seconds of a step, and of its exposed communication."""

    @classmethod
    def from_windows(cls, given: Sequence[RankWindow]) -> Findings:
        diagnosis = strategies.diagnose_bottleneck(given, THRESHOLD)
        assert diagnosis is not None
        work = OwnWork.from_window(diagnosis.window, THRESHOLD)
        assert work is not None
        way = next(iter(strategies.propose_strategies(diagnosis, threshold=THRESHOLD)), None)
        simulated = data_parallel.analyze_compute_seconds(work.own, work.exposed_seconds).slowdown
        seconds = (diagnosis.step_seconds, diagnosis.exposed_seconds)
        figures = (*diagnosis.effects.values(), *diagnosis.rank_slowdown, simulated, *seconds)
        return cls(diagnosis.bottleneck, diagnosis.culprits, way.shares if way else None, figures)


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize(
    ("faults", "bottleneck", "culprits"),
    [
        (Faults(), Bottleneck.NONE, ()),
        (Faults(slower=2.0), Bottleneck.COMPUTE, (SLOW,)),
        (Faults(transfer=20 * MS), Bottleneck.COMMUNICATION, ()),
    ],
    ids=["healthy", "a slow rank", "a slow link"],
)
def test_the_devices_clock_finds_what_a_synchronous_run_finds(
    program: str,
    faults: Faults,
    bottleneck: Bottleneck,
    culprits: tuple[int, ...],
    tmp_path: Path,
    virtual_time: Callable[[DeviceWorld], DeviceWorld],
) -> None:
    found = []
    for asynchronous in (False, True):
        folder = tmp_path / str(asynchronous)
        folder.mkdir()
        found.append(
            Findings.from_windows(
                record_windows(folder, virtual_time(DeviceWorld(asynchronous)), PROGRAMS[program], faults)
            )
        )
    synchronous, asynchronous_ = found
    assert (synchronous.bottleneck, synchronous.culprits) == (bottleneck, culprits)
    assert replace(asynchronous_, figures=()) == replace(synchronous, figures=())
    assert asynchronous_.figures == pytest.approx(synchronous.figures, rel=1e-6, abs=1e-9)
    if culprits:
        assert synchronous.shares is not None
        assert min(range(RANKS), key=synchronous.shares.__getitem__) == SLOW


@pytest.mark.parametrize("asynchronous", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_records_and_state_are_those_of_python_field_by_field(
    program: str,
    asynchronous: bool,
    tmp_path: Path,
    virtual_time: Callable[[DeviceWorld], DeviceWorld],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    rings = []
    for way in ("given", "Python"):
        (folder := tmp_path / way).mkdir()
        if way == "Python":
            for module, name in (
                (record_ring, "RingWriter"),
                (recorder, "Recorder"),
                (collective_monitor, "CollectiveMonitor"),
            ):
                monkeypatch.setattr(request.module, name, vars(module)[name])
        record_windows(
            folder, virtual_time(DeviceWorld(asynchronous)), PROGRAMS[program], Faults(slower=2.0, load=5 * MS)
        )
        rings.append([RingReader(folder / f"{rank}") for rank in range(RANKS)])
    for given, python in zip(*rings, strict=True):
        assert len(given.records()) >= 3 * STEPS
        assert given.records().tolist() == python.records().tolist()
        assert str(given.state()) == str(python.state())


@pytest.mark.parametrize("program", PROGRAMS)
def test_own_work_is_what_a_rank_computes(
    program: str, tmp_path: Path, virtual_time: Callable[[DeviceWorld], DeviceWorld]
) -> None:
    given = record_windows(tmp_path, virtual_time(DeviceWorld()), PROGRAMS[program], Faults(slower=2.0, noise=0.0))
    own = [122 if rank == SLOW else 62 for rank in range(RANKS)]
    assert [window.compute_seconds[-1] for window in given] == pytest.approx([0.001 * each for each in own])


def test_a_late_host_is_found_if_no_work_of_its_device_hides_it(
    tmp_path: Path, virtual_time: Callable[[DeviceWorld], DeviceWorld]
) -> None:
    """The loader takes 150 ms, while the device takes 62 ms for the step before."""
    found = []
    for asynchronous, load in ((False, 88 * MS), (True, 150 * MS)):
        folder = tmp_path / str(asynchronous)
        folder.mkdir()
        faults = Faults(load=load, noise=0.0)
        found.append(
            Findings.from_windows(record_windows(folder, virtual_time(DeviceWorld(asynchronous)), run_ddp, faults))
        )
    assert found[1].culprits == found[0].culprits == (SLOW,)
    assert found[1].figures == pytest.approx(found[0].figures, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_hosts_clock_finds_no_straggler_on_a_device(
    program: str, tmp_path: Path, virtual_time: Callable[[DeviceWorld], DeviceWorld]
) -> None:
    """Although the script reads the loss at each step, so that a step takes as long on the host as on the device."""
    faults = Faults(slower=2.0)
    devices = virtual_time(DeviceWorld())
    given = record_windows(tmp_path, devices, PROGRAMS[program], faults, lambda rank: HostClock(rank.nanoseconds))
    found = Findings.from_windows(given)
    assert found.culprits == ()
    assert found.bottleneck is Bottleneck.NONE


def test_a_collective_without_a_work_is_recorded_as_long_as_it_blocks_its_stream(
    tmp_path: Path, virtual_time: Callable[[DeviceWorld], DeviceWorld]
) -> None:
    record_windows(tmp_path, virtual_time(DeviceWorld()), run_without_work, Faults(slower=2.0, noise=0.0))
    lengths = {}
    for rank in (0, SLOW):
        found = RingReader(tmp_path / f"{rank}").records()
        collectives = found[(found["kind"] == RecordKind.COLLECTIVE) & (found["step"] > BEGIN)]
        assert len(collectives) >= WINDOW
        assert not (collectives["flags"] & NOTICED_LATE).any()
        lengths[rank] = ((collectives["end_ns"] - collectives["start_ns"]) / MS).tolist()
    assert lengths[SLOW] == pytest.approx([3.0] * len(lengths[SLOW]))
    assert lengths[0] == pytest.approx([63.0] * len(lengths[0]))


def test_a_work_that_the_stream_waits_for_is_released_and_its_end_is_the_devices(
    tmp_path: Path, virtual_time: Callable[[DeviceWorld], DeviceWorld]
) -> None:
    """A work has its output's memory, and the host may be steps ahead of the device's end of it."""
    gone = []

    def reduce_once(rank: DeviceRank) -> None:
        under_test = RankUnderTest.build(rank, GroupLinks(1), tmp_path / "ring")
        rank.launch(10 * MS)
        work = under_test.group.all_reduce(3 * MS)
        assert work is not None
        wait_for(under_test, work)
        weak = weakref.ref(work)
        del work
        gone.append(weak() is None)
        rank.wait_for(rank.submit(0))
        under_test.watcher.notice_ends()

    virtual_time(DeviceWorld()).run(reduce_once)
    assert gone == [True]
    (found,) = RingReader(tmp_path / "ring").records()
    assert found["end_ns"] - found["start_ns"] == pytest.approx(13 * MS)
    assert not found["flags"] & NOTICED_LATE


def test_a_barrier_without_a_work_is_a_wait(tmp_path: Path, virtual_time: Callable[[DeviceWorld], DeviceWorld]) -> None:
    """NCCL's has no tensors, and no `Work` where the host waits for it."""

    def wait_at_barrier(rank: DeviceRank) -> None:
        under_test = RankUnderTest.build(rank, links, tmp_path / str(rank.number))
        under_test.recorder.end_step()
        rank.launch((20 if rank.number == SLOW else 10) * MS)
        under_test.group.barrier()
        under_test.recorder.end_step()
        under_test.recorder.finish()

    links = GroupLinks(RANKS)
    virtual_time(DeviceWorld()).run(*[wait_at_barrier] * RANKS)
    for rank in (0, SLOW):
        records = RingReader(tmp_path / f"{rank}").records()
        (barrier,) = records[records["kind"] == RecordKind.COLLECTIVE]
        own = records[(records["kind"] == RecordKind.COMPUTE) & (records["step"] == 1)]
        assert (barrier["end_ns"] - barrier["start_ns"]) / MS == pytest.approx(0 if rank == SLOW else 10)
        assert (own["end_ns"] - own["start_ns"]) / MS == pytest.approx([20 if rank == SLOW else 10])


def test_no_event_is_queried_while_a_graph_is_captured(
    tmp_path: Path, virtual_time: Callable[[DeviceWorld], DeviceWorld], monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA breaks a capture off where events are queried, and captured work does not run."""

    def capture_graph(rank: DeviceRank) -> None:
        under_test = RankUnderTest.build(rank, GroupLinks(1), tmp_path / "ring")
        for wait in (True, False):
            work = under_test.group.all_reduce(3 * MS)
            assert work is not None
            if wait:
                wait_for(under_test, work)
        rank.busy(10 * MS)
        with monkeypatch.context() as patch:
            patch.setattr(DeviceRank, "captures", True)
            patch.setattr(Event, "query", fail_on_query)
            patch.setattr(FakeWork, "is_completed", fail_on_query)
            for _ in range(2):
                work = under_test.group.all_reduce(3 * MS)
                assert work is not None
                wait_for(under_test, work)
        rank.busy(100 * MS)
        under_test.watcher.notice_ends()

    def fail_on_query(*_: object) -> bool:
        raise AssertionError("queried within a capture")

    virtual_time(DeviceWorld()).run(capture_graph)
    assert len(RingReader(tmp_path / "ring").records()) == 2


def test_work_in_another_phase_is_no_part_of_the_step(
    tmp_path: Path, virtual_time: Callable[[DeviceWorld], DeviceWorld]
) -> None:
    def evaluate_between_steps(rank: DeviceRank) -> None:
        under_test = RankUnderTest.build(rank, GroupLinks(1), tmp_path / "ring")
        for _ in range(3):
            rank.launch(50 * MS)
            with under_test.recorder.run_phase(Phase.EVALUATE):
                rank.launch(500 * MS)
                with under_test.recorder.run_phase(Phase.CHECKPOINT), under_test.recorder.time_peer_wait():
                    rank.launch(100 * MS)
            rank.launch(20 * MS)
            under_test.recorder.end_step()
        under_test.recorder.finish()

    virtual_time(DeviceWorld()).run(evaluate_between_steps)
    found = RingReader(tmp_path / "ring").records()
    for kind in (RecordKind.STEP, RecordKind.COMPUTE):
        chosen = found[found["kind"] == kind]
        assert ((chosen["end_ns"] - chosen["start_ns"]) / MS).tolist() == pytest.approx([70.0] * 3)


def test_steps_before_an_ordinal_are_no_part_of_the_interval_behind_it(
    tmp_path: Path, virtual_time: Callable[[DeviceWorld], DeviceWorld]
) -> None:
    """Where the mode has changed with steps in flight, for which no synchronization has waited."""

    def train_and_switch(rank: DeviceRank) -> None:
        under_test = RankUnderTest.build(rank, GroupLinks(1), tmp_path / "ring")
        pace = StepTimer(under_test.recorder, None, None)  # type: ignore[arg-type]  # it has no peers to agree with
        answers = []
        for step in range(10):
            if step == 5:
                pace.begin_interval()
            pace.begin_step()
            rank.launch(100 * MS)
            pace.end_step()
            answers.append(pace.is_interval_over(0.24))
            under_test.recorder.end_step()
        assert answers[5:] == [False, True, True, True, True]

    virtual_time(DeviceWorld()).run(train_and_switch)


def test_ranks_that_run_ahead_of_their_devices_synchronize_after_the_same_steps(
    tmp_path: Path, virtual_time: Callable[[DeviceWorld], DeviceWorld]
) -> None:
    """A-EDiT: every 0.49 s, with steps of 40 ms, and of 90 ms on the slow rank."""

    def count_intervals(asynchronous: bool) -> list[list[int]]:
        links = GroupLinks(RANKS)
        counts: list[list[int]] = [[] for _ in range(RANKS)]

        def train_rank(rank: DeviceRank) -> None:
            under_test = RankUnderTest.build(rank, links, tmp_path / f"{asynchronous}{rank.number}")
            pace = StepTimer(under_test.recorder, None, None)  # type: ignore[arg-type]  # it has no peers to agree with
            for _ in range(5):
                steps, ends = 0, False
                while not ends:
                    pace.begin_step()
                    rank.launch(90 * MS if rank.number == SLOW else 40 * MS)
                    pace.end_step()
                    ends = pace.is_interval_over(0.49)
                    under_test.recorder.end_step()
                    steps += 1
                work = under_test.group.all_reduce(10 * MS, async_op=False)
                if work is not None:
                    work.wait()
                rank.wait_for(rank.computing.tail[0])  # every rank reads the others' weights
                pace.begin_interval()
                counts[rank.number].append(steps)
            assert pace.step_seconds == pytest.approx(0.09 if rank.number == SLOW else 0.04)

        virtual_time(DeviceWorld(asynchronous)).run(*[train_rank] * RANKS)
        return counts

    assert count_intervals(True) == count_intervals(False) == [[5 if rank == SLOW else 12] * 5 for rank in range(RANKS)]
