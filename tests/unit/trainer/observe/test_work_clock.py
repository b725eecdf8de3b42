"""Times of a device's marks, and numbers on their way from it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from pacekeeper.observe.losses import LossTracker
from pacekeeper.observe.ring_reader import RingReader
from pacekeeper_rank.record_ring import RingWriter, create_ring
from pacekeeper_rank.recorder import Recorder
from pacekeeper_rank.records import RecordKind
from testing.training.async_device import DeviceRank, DeviceWorld, Stream

MS = 1_000_000


def test_a_mark_of_a_device_has_the_time_at_which_the_work_before_it_was_done() -> None:
    def mark_work(rank: DeviceRank) -> None:
        clock = rank.clock()
        begun = clock.mark()
        rank.launch(70 * MS)
        done = clock.mark()
        rank.busy(1 * MS)
        assert begun.reached
        assert not done.reached
        with pytest.raises(RuntimeError, match="wait"):
            _ = done.ns
        rank.busy(200 * MS)
        assert done.reached
        assert done.ns - begun.ns == 70 * MS
        assert rank.now - done.ns == 131 * MS

    DeviceWorld().run(mark_work)


def test_waiting_for_a_mark_is_waiting_for_the_work_before_it() -> None:
    def wait_for_mark(rank: DeviceRank) -> None:
        mark = rank.clock().mark()
        rank.launch(70 * MS)
        mark.wait()
        assert rank.now == mark.ns
        end = rank.clock().mark()
        end.wait()
        assert rank.now == end.ns == mark.ns + 70 * MS

    DeviceWorld().run(wait_for_mark)


@pytest.mark.parametrize("drift", [-1e-4, 0.0, 1e-4], ids=["slower", "alike", "faster"])
def test_a_devices_clock_that_drifts_follows_the_hosts(drift: float) -> None:
    """Off by the drift since the device was idle last, not by the drift since the beginning."""
    step, pause = 50 * MS, 700 * MS

    def mark_with_drift(rank: DeviceRank) -> None:
        rank.drift = drift
        clock, off = rank.clock(), abs(drift) * (pause + 4 * step) + 2
        for _ in range(300):
            rank.busy(pause)
            begun, marks = rank.now, []
            for _ in range(3):
                marks.append(clock.mark())
                rank.launch(step)
            marks[-1].wait()
            assert all(mark.reached for mark in marks)
            assert [mark.ns for mark in marks] == pytest.approx([begun, begun + step, begun + 2 * step], abs=off)

    DeviceWorld().run(mark_with_drift)


def test_times_stay_exact_where_the_host_is_always_ahead() -> None:
    """For hours: as milliseconds of 24 bits, they would be exact to half of one."""

    step = 20_000_777_123

    def mark_far_ahead(rank: DeviceRank) -> None:
        clock = rank.clock()
        marks = [clock.mark()]
        rank.launch(step)
        rank.busy(10 * MS)
        for _ in range(600):
            marks.append(clock.mark())
            rank.launch(step)
            rank.busy(step)
            assert all(mark.reached for mark in marks)
            assert marks[1].ns - marks[0].ns == pytest.approx(step, abs=2000)
            del marks[0]

    DeviceWorld().run(mark_far_ahead)


def test_events_are_reused() -> None:
    made = 0

    class CountingRank(DeviceRank):
        def event(self) -> Any:
            nonlocal made
            made += 1
            return super().event()

    def mark_repeatedly(rank: DeviceRank) -> None:
        rank.__class__ = CountingRank
        clock = rank.clock()
        for _ in range(100):
            marks = [clock.mark() for _ in range(5)]
            rank.launch(20 * MS)
            marks[-1].wait()
            assert all(mark.reached for mark in marks)

    DeviceWorld().run(mark_repeatedly)
    assert made <= 7  # five, the anchor, and the one before it


def test_a_number_arrives_on_the_host_without_a_stop() -> None:
    def fetch_number(rank: DeviceRank) -> None:
        clock, begun = rank.clock(), rank.now
        rank.launch(30 * MS)
        fetched = clock.fetch(torch.tensor(2.5, device="meta"))
        assert not fetched.ready
        assert rank.now == begun
        rank.busy(40 * MS)
        assert fetched.ready

    DeviceWorld().run(fetch_number)


@pytest.mark.usefixtures("python_or_c")
def test_waits_count_where_they_block_the_steps_work(tmp_path: Path) -> None:
    def wait_in_steps(rank: DeviceRank) -> None:
        create_ring(tmp_path / "ring", 0, 1)
        recorder, side = Recorder(RingWriter(tmp_path / "ring"), rank.clock()), Stream()
        for _ in range(3):
            rank.launch(50 * MS)
            with rank.on(side), recorder.time_peer_wait():
                rank.launch(500 * MS)
            with recorder.time_peer_wait():
                rank.launch(20 * MS)
                with recorder.time_peer_wait():
                    rank.launch(10 * MS)
            recorder.end_step()
        recorder.finish()

    DeviceWorld().run(wait_in_steps)
    found = RingReader(tmp_path / "ring").records()
    own = found[found["kind"] == RecordKind.COMPUTE]
    assert ((own["end_ns"] - own["start_ns"]) / MS).tolist() == pytest.approx([50.0] * 3)


@pytest.mark.usefixtures("python_or_c")
def test_garbage_is_collected_at_a_cost_where_the_device_runs_out_of_work(tmp_path: Path) -> None:
    def collect_in_steps(rank: DeviceRank) -> None:
        create_ring(tmp_path / "ring", 0, 1)
        recorder = Recorder(RingWriter(tmp_path / "ring"), rank.clock())
        for work in (20 * MS, 100 * MS):
            rank.launch(work)
            begun = recorder.clock.mark()
            rank.busy(50 * MS)
            recorder.record_gc(begun, recorder.clock.mark())
            recorder.end_step()
            rank.wait_for(rank.computing.tail[0])
        recorder.finish()

    DeviceWorld().run(collect_in_steps)
    found = RingReader(tmp_path / "ring").records()
    garbage = found[found["kind"] == RecordKind.GC]
    assert ((garbage["end_ns"] - garbage["start_ns"]) / MS).tolist() == pytest.approx([30.0, 0.0])
    assert found["kind"].tolist() == [RecordKind.GC, RecordKind.STEP, RecordKind.COMPUTE] * 2


@pytest.mark.usefixtures("python_or_c")
def test_garbage_just_behind_the_end_of_a_step_is_waited_for(tmp_path: Path) -> None:
    """Python collects at any time: also where the end of the step is marked and the next one has not begun."""

    def collect_between_steps(rank: DeviceRank) -> None:
        create_ring(tmp_path / "ring", 0, 1)
        recorder = Recorder(RingWriter(tmp_path / "ring"), rank.clock())
        recorder.end_step()
        step = recorder._step
        rank.launch(20 * MS)
        recorder.end_step()
        (end,) = rank.computing.tail
        rank.launch(20 * MS)
        step.collections.append((recorder.clock.mark(), recorder.clock.mark()))
        rank.wait_for(end)
        recorder.write_reached()
        rank.wait_for(rank.computing.tail[0])
        recorder.finish()

    DeviceWorld().run(collect_between_steps)
    found = RingReader(tmp_path / "ring").records()
    assert found["kind"].tolist() == [
        RecordKind.STEP,
        RecordKind.COMPUTE,
        RecordKind.GC,
        RecordKind.STEP,
        RecordKind.COMPUTE,
    ]


class ReportedStep:
    """What `Losses` needs of a step."""

    weight = 4.0

    def __init__(self, loss: float) -> None:
        self.loss_sum = torch.tensor(loss)


@pytest.mark.usefixtures("python_or_c")
def test_losses_arrive_a_step_or_two_later_and_none_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cpu", property(lambda _: False))  # the double's

    def report_losses(rank: DeviceRank) -> None:
        create_ring(tmp_path / "ring", 0, 1)
        recorder = Recorder(RingWriter(tmp_path / "ring"), rank.clock())
        recorder.restart_clock(1)
        losses, handed = LossTracker(recorder), []
        for number in range(1, 7):
            rank.launch(50 * MS)
            step: Any = ReportedStep(math.nan if number == 4 else float(number))
            recorder.end_step()
            began = rank.now
            losses.add_step(step)
            losses.add_step(step)
            handed.append(losses.take_sums()[1] / ReportedStep.weight)
            assert rank.now == began  # nothing waits
        assert handed == [0, 0, 1, 1, 1, 1]
        losses.finish()
        total, weight = losses.take_sums()
        assert (math.isnan(total), weight) == (False, 2 * ReportedStep.weight)

    DeviceWorld().run(report_losses)
    ring = RingReader(tmp_path / "ring")
    found = ring.records()
    assert found[found["kind"] == RecordKind.LOSS]["step"].tolist() == [1, 2, 3, 4, 5, 6]
    assert ring.state()["bad_loss_step"] == 4
