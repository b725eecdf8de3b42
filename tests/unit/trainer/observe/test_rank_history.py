"""What the sidecar makes of a rank's records."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from pacekeeper.health.rank_rings import RankRings
from pacekeeper.observe.rank_history import (
    BASELINE_SKIPPED_STEPS,
    BASELINE_WINDOWS,
    MAX_EARLIER_SHARE_STEPS,
    RankHistory,
)
from pacekeeper.observe.ring_reader import RingReader
from pacekeeper.runtime_folder import RuntimeFolder
from pacekeeper_analysis.protocol.records import RING_RECORD
from pacekeeper_rank.record_ring import RingWriter, create_ring
from pacekeeper_rank.recorder import Recorder
from pacekeeper_rank.records import Collective, Phase, RecordKind


def build_records(steps: range, step_ms: int, compute_ms: int, samples: int = 8, mode: int = 0) -> NDArray[np.void]:
    rows = np.zeros(2 * len(steps), RING_RECORD)
    for row, step in zip(range(0, len(rows), 2), steps, strict=True):
        for offset, (kind, length) in enumerate(((RecordKind.STEP, step_ms), (RecordKind.COMPUTE, compute_ms))):
            rows[row + offset]["kind"] = kind
            rows[row + offset]["phase"] = Phase.TRAIN
            rows[row + offset]["step"] = step
            rows[row + offset]["start_ns"] = step * 1_000_000_000
            rows[row + offset]["end_ns"] = step * 1_000_000_000 + length * 1_000_000
            rows[row + offset]["flags"] = mode
            rows[row + offset]["value"] = samples
    return rows


def test_the_window_holds_the_last_steps_with_own_work_separate_from_waits() -> None:
    history = RankHistory(window_steps=4)
    history.add(build_records(range(10), step_ms=100, compute_ms=60))
    window = history.build_window(rank=3)
    assert window.rank == 3
    assert window.steps == (6, 7, 8, 9)
    assert window.step_seconds == pytest.approx((0.1,) * 4)
    assert window.compute_seconds == pytest.approx((0.06,) * 4)
    assert window.samples == (8,) * 4
    assert history.compute_seconds_per_sample == pytest.approx(0.0075)
    assert (history.steps_total, history.samples_total) == (10, 80)


@pytest.mark.parametrize("is_recorded_later", [False, True])
def test_a_step_enters_the_window_once_its_own_work_is_recorded(is_recorded_later: bool) -> None:
    """A rank whose waits are not measured must not seem to work all the time."""
    history = RankHistory(window_steps=4)
    records = build_records(range(3), step_ms=100, compute_ms=60)
    history.add(records[:-1])
    assert history.build_window(0).steps == (0, 1)
    if is_recorded_later:
        history.add(records[-1:])
    history.add(build_records(range(3, 4), step_ms=100, compute_ms=60))
    window = history.build_window(0)
    assert window.steps == ((0, 1, 2, 3) if is_recorded_later else (0, 1, 3))
    assert window.compute_seconds == pytest.approx((0.06,) * len(window.steps))
    assert history.steps_total == 4


@pytest.mark.parametrize(("step_ms", "kept"), [(100, 32), (250, 20), (1000, 8), (10_000, 8)])
def test_a_window_covers_a_few_seconds_but_at_least_eight_steps(step_ms: int, kept: int) -> None:
    history = RankHistory(window_steps=32)
    history.add(build_records(range(100), step_ms, compute_ms=60))
    assert history.build_window(0).steps == tuple(range(100 - kept, 100))


def test_the_window_grows_and_shrinks_with_the_steps() -> None:
    """After one that held a checkpoint, as after others that are slow."""
    history = RankHistory(window_steps=32)
    history.add(np.concatenate([build_records(range(50), 100, 60), build_records(range(50, 51), 60_000, 60)]))
    assert len(history.build_window(0).steps) == 8
    history.add(build_records(range(51, 66), 100, 60))
    assert history.build_window(0).steps == tuple(range(51, 66)), "it has left, and the others stay"
    history.add(build_records(range(66, 200), 100, 60))
    assert len(history.build_window(0).steps) == 32


def test_some_long_steps_from_before_the_share_changed_stay() -> None:
    history = RankHistory(window_steps=32)
    history.add(
        np.concatenate(
            [build_records(range(40), 100, 60, samples=8), build_records(range(40, 60), 2000, 30, samples=3)]
        )
    )
    assert history.build_window(0).samples == (8,) * MAX_EARLIER_SHARE_STEPS + (3,) * 8


def test_steps_outside_of_training_do_not_count() -> None:
    rows = build_records(range(5), step_ms=9000, compute_ms=9000)
    rows["phase"] = Phase.START
    history = RankHistory(window_steps=4)
    history.add(rows)
    assert history.step_seconds is None
    assert history.steps_total == 5


def test_the_baseline_is_of_the_first_steady_steps_and_stays() -> None:
    history = RankHistory(window_steps=4)
    history.add(build_records(range(BASELINE_SKIPPED_STEPS), step_ms=900, compute_ms=900))
    assert history.first_steps_seconds is None
    history.add(build_records(range(5, 9), step_ms=100, compute_ms=90))
    history.add(build_records(range(9, 50), step_ms=300, compute_ms=290))
    assert history.first_steps_seconds == pytest.approx(0.1)
    assert history.build_window(0).baseline_seconds == pytest.approx(0.1)
    assert history.build_window(0).baseline_own_seconds == pytest.approx(0.09)
    assert history.step_seconds == pytest.approx(0.3)


def test_the_baseline_is_of_the_fastest_early_window_of_synchronous_steps() -> None:
    """While a job starts, its nodes are busy with more than its steps."""
    history, skipped = RankHistory(window_steps=4), BASELINE_SKIPPED_STEPS
    history.add(build_records(range(skipped + 4), step_ms=300, compute_ms=250))
    assert history.first_steps_seconds == pytest.approx(0.3)
    history.add(build_records(range(skipped + 4, skipped + 12), step_ms=20, compute_ms=20, mode=2))
    assert history.first_steps_seconds == pytest.approx(0.3), "local steps wait for no rank"
    history.add(build_records(range(skipped + 12, skipped + 16), step_ms=120, compute_ms=100))
    assert history.first_steps_seconds == pytest.approx(0.12)
    assert history.first_steps_own_seconds == pytest.approx(0.1)
    last = skipped + 8 + 4 * BASELINE_WINDOWS
    history.add(build_records(range(skipped + 16, last), step_ms=500, compute_ms=100))
    history.add(build_records(range(last, last + 4), step_ms=60, compute_ms=50))
    assert history.first_steps_seconds == pytest.approx(0.12), "later luck does not count"


def test_a_new_round_begins_a_new_window_and_keeps_the_baseline(tmp_path: Path) -> None:
    runtime = RuntimeFolder(tmp_path).create()
    ranks = RankRings(runtime, window_steps=2)
    for round_, steps in ((1, range(1, 12)), (2, range(12, 14))):
        create_ring(runtime.ring(0), rank=5, round_=round_, capacity=64)
        ring = RingWriter(runtime.ring(0))
        ring.enter_phase(Phase.TRAIN)
        for step in steps:
            for kind in (RecordKind.STEP, RecordKind.COMPUTE):
                ring.write(kind, 0, 10_000_000 * round_, step, Phase.TRAIN, 4.0)
        (rank,) = ranks.refresh()
    assert rank.state["round"] == 2
    assert rank.history.build_window(5).steps == (12, 13)
    assert rank.history.first_steps_seconds == pytest.approx(0.01)
    assert ranks.build_evidence("e1", "w", 2).windows[0].rank == 5
    assert ranks.build_evidence("e1", "w", 2).windows[0].share_granularity == 1
    ring.state.share_granularity = 8
    assert ranks.build_evidence("e1", "w", 2).windows[0].share_granularity == 8


LAYERS, MICROBATCHES = 80, 4
OF_A_MICROBATCH = [
    *[Collective.ALL_GATHER] * (2 * LAYERS + 1),  # FSDP2: parameters, before each layer's forward and backward pass
    *[Collective.REDUCE_SCATTER] * (LAYERS + 1),
    *[Collective.ALL_GATHER, Collective.REDUCE_SCATTER] * (4 * LAYERS),  # tensor and sequence parallelism within
]


def write_step(ring: RingWriter, step: int) -> None:
    """Write a step of 80 layers, sharded by FSDP2 and over tensors: 1 s, of which a tenth waits for peers."""
    start = step * 10**9
    for microbatch in range(MICROBATCHES):
        ring.write(RecordKind.DATA, start, start, step, Phase.TRAIN)
        for place, collective in enumerate(OF_A_MICROBATCH):
            at = start + (microbatch * len(OF_A_MICROBATCH) + place) * 250_000
            ring.write(RecordKind.COLLECTIVE, at, at + 100_000, step, Phase.TRAIN, 0.0, collective)
    ring.write(RecordKind.GC, start, start + 10**7, step, Phase.TRAIN)
    ring.write(RecordKind.LENGTHS, start, start + 10**9, step, Phase.TRAIN, 100.0 + step)
    ring.write(RecordKind.STEP, start, start + 10**9, step, Phase.TRAIN, 8.0)
    ring.write(RecordKind.COMPUTE, start, start + 9 * 10**8, step, Phase.TRAIN, 8.0)


@pytest.mark.usefixtures("python_or_c")
def test_a_ring_holds_the_windows_of_a_job_of_eighty_layers(tmp_path: Path) -> None:
    """32 steps, `detection.windowSteps`: the window of a launcher, or of a sidecar that has just started."""
    runtime = RuntimeFolder(tmp_path).create()
    create_ring(runtime.ring(0), rank=5, round_=1)
    ring = RingWriter(runtime.ring(0))
    ranks = RankRings(runtime, window_steps=32)
    for step in range(1, 41):
        write_step(ring, step)
        ranks.refresh()
    (read_in_time,) = ranks.refresh()
    (read_at_once,) = RankRings(runtime, window_steps=32).refresh()
    held = read_at_once.ring.records()
    steps = held["step"][held["kind"] == RecordKind.STEP]
    assert np.count_nonzero(steps > held["step"][0]) >= 32, "whole ones"
    assert read_in_time.lost_records == read_at_once.lost_records == 0
    assert read_in_time.history.steps_total == 40
    assert read_in_time.history.collective_seconds_total == pytest.approx(
        40 * MICROBATCHES * len(OF_A_MICROBATCH) / 1e4
    )
    for rank in (read_in_time, read_at_once):
        window = rank.history.build_window(5)
        assert window.steps == tuple(range(33, 41)), "eight are enough where they take a second each"
        assert window.step_seconds == pytest.approx((1.0,) * 8)
        assert window.compute_seconds == pytest.approx((0.9,) * 8)
        assert window.gc_seconds == pytest.approx((0.01,) * 8)
        assert window.lengths == pytest.approx([100.0 + step for step in window.steps])


@pytest.mark.usefixtures("python_or_c")
def test_unread_records_that_were_overwritten_are_detected(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The rest of the step that they belonged to is in no window; the figures of the others are right."""
    runtime = RuntimeFolder(tmp_path).create()
    of_a_step = MICROBATCHES * (1 + len(OF_A_MICROBATCH)) + 4
    capacity = of_a_step + of_a_step // 2
    create_ring(runtime.ring(0), rank=5, round_=1, capacity=capacity)
    ring, ranks = RingWriter(runtime.ring(0)), RankRings(runtime, window_steps=32)
    for steps in ((1,), (2,), (3, 4, 5, 6), (7,), (8, 9)):
        for step in steps:
            write_step(ring, step)
        (rank,) = ranks.refresh()
    assert rank.history.build_window(5).steps == (1, 2, 6, 7, 9)
    assert rank.history.build_window(5).gc_seconds == pytest.approx((0.01,) * 5)
    assert rank.history.build_window(5).lengths == (101.0, 102.0, 106.0, 107.0, 109.0)
    assert rank.lost_records == 4 * of_a_step - capacity + 2 * of_a_step - capacity
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith(f"rank 5: {4 * of_a_step - capacity} records were overwritten before they were read")
    create_ring(runtime.ring(0), rank=5, round_=2)
    (again,) = ranks.refresh()
    assert again.lost_records == rank.lost_records, "a counter goes on in the next round"


def build_record(kind: RecordKind, milliseconds: int, value: float = 0.0, nbytes: int = 0) -> NDArray[np.void]:
    row = np.zeros(1, RING_RECORD)
    row["kind"], row["end_ns"], row["value"], row["bytes"] = kind, milliseconds * 1_000_000, value, nbytes
    return row


def test_a_window_holds_steps_of_one_mode_only() -> None:
    history = RankHistory(window_steps=8)
    history.add(np.concatenate([build_records(range(6), 100, 60), build_record(RecordKind.SYNCHRONIZATION, 9)]))
    assert history.build_window(0).sync_mode == "Sync"
    rows = [
        build_records(range(6, 9), 80, 60, mode=2),
        build_record(RecordKind.SYNCHRONIZATION, 80, value=0.03),  # the rest is hidden by the forward pass
        build_records(range(9, 10), 80, 60, mode=2),
    ]
    history.add(np.concatenate(rows))
    window = history.build_window(0)
    assert (window.sync_mode, window.steps) == ("AsyncEDiT", (6, 7, 8, 9))
    assert window.transfers == pytest.approx((0.03,))
    assert history.synchronization_seconds == pytest.approx(0.03)
    assert history.build_window(0, managed=False).sync_mode == ""


def test_some_steps_from_before_the_share_changed_stay() -> None:
    """Without them a step's fixed cost cannot be separated from that of its samples, as shares change seldom."""
    history = RankHistory(window_steps=16)
    history.add(
        np.concatenate([build_records(range(40), 100, 60, samples=8), build_records(range(40, 44), 60, 30, samples=3)])
    )
    assert history.build_window(0).steps == tuple(range(24, 44))
    history.add(build_records(range(44, 100), 60, 30, samples=3))
    window = history.build_window(0)
    assert window.steps == (*range(40 - MAX_EARLIER_SHARE_STEPS, 40), *range(84, 100))
    assert window.samples == (8,) * MAX_EARLIER_SHARE_STEPS + (3,) * 16
    history.add(
        np.concatenate(
            [build_records(range(100, 101), 60, 30, samples=1), build_records(range(101, 120), 60, 30, samples=3)]
        )
    )
    assert history.build_window(0).samples.count(8) == MAX_EARLIER_SHARE_STEPS - 2, (
        "an epoch's end is hardly a new share"
    )
    history.add(build_records(range(120, 140), 60, 30, samples=3, mode=2))
    assert history.build_window(0).steps == tuple(range(124, 140)), "steps of another mode are ignored"


def test_steps_whose_numbers_repeat_keep_their_own_work() -> None:
    """A fast rank in AsyncEDiT counts further than the job, and goes back at the synchronization."""
    first, again = build_records(range(5, 7), 100, 60, mode=2), build_records(range(5, 7), 100, 30, mode=2)
    again["start_ns"] += 10_000_000_000
    again["end_ns"] += 10_000_000_000
    history = RankHistory(window_steps=8)
    history.add(np.concatenate([first, again]))
    assert history.build_window(0).steps == (5, 6, 5, 6)
    assert history.build_window(0).compute_seconds == pytest.approx((0.06, 0.06, 0.03, 0.03))


def test_garbage_belongs_to_the_step_that_it_was_collected_in() -> None:
    history = RankHistory(window_steps=8)
    history.add(
        np.concatenate(
            [build_records(range(1), 100, 60), build_record(RecordKind.GC, 7), build_record(RecordKind.GC, 5)]
        )
    )
    history.add(build_records(range(1, 3), 100, 60))
    assert history.build_window(0).gc_seconds == pytest.approx((0.0, 0.012, 0.0))
    assert history.gc_seconds_total == pytest.approx(0.012)


def test_lengths_count_where_all_steps_have_them() -> None:
    def build_step(number: int, tokens: float, squares: int) -> list[NDArray[np.void]]:
        return [build_record(RecordKind.LENGTHS, 0, tokens, squares), build_records(range(number, number + 1), 100, 60)]

    history = RankHistory(window_steps=2)
    history.add(np.concatenate([*build_step(0, 70.0, 900), build_records(range(1, 2), 100, 60)]))
    assert (history.build_window(0).lengths, history.build_window(0).squares) == ((), ())
    history.add(np.concatenate(build_step(2, 80.0, 0)))  # a script's weight of its batches
    history.add(build_step(3, 90.0, 1000)[0])  # one read may end between the two
    history.add(build_step(3, 90.0, 1000)[1])
    assert (history.build_window(0).lengths, history.build_window(0).squares) == ((80.0, 90.0), ())
    history.add(np.concatenate(build_step(4, 60.0, 800)))
    assert (history.build_window(0).lengths, history.build_window(0).squares) == ((90.0, 60.0), (1000.0, 800.0))


@pytest.mark.usefixtures("python_or_c")
def test_a_recorder_writes_the_lengths_before_the_step(tmp_path: Path) -> None:
    create_ring(tmp_path / "ring", rank=0, round_=1, capacity=64)
    recorder, history = Recorder(RingWriter(tmp_path / "ring")), RankHistory(window_steps=4)
    recorder.end_step(8, lengths=(5.0, 7.0))  # the first of a round is no training yet
    recorder.end_step(8, lengths=(70.5, 900.25))
    found = RingReader(tmp_path / "ring").records()
    assert found["kind"].tolist()[-3:] == [RecordKind.LENGTHS, RecordKind.STEP, RecordKind.COMPUTE]
    history.add(found)
    assert (history.build_window(0).lengths, history.build_window(0).squares) == ((70.5,), (900.0,))
