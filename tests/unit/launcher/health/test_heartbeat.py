"""What a worker says of itself, made from its ranks' states."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pacekeeper.checkpointing.storage.checkpoint_status import CheckpointStatus
from pacekeeper.launcher.health.heartbeat import HeartbeatFile, RankZeroNotes, WriteFailures, build_next_heartbeat
from pacekeeper.launcher.rendezvous.rounds import RoundState
from pacekeeper_analysis.protocol.records import RING_STATE
from pacekeeper_analysis.protocol.reports import (
    BadLoss,
    CheckpointReport,
    GpuHealth,
    Heartbeat,
    LauncherState,
    StepProgress,
    TrainingReport,
)


def rank(step: int, snapshot_step: int = -1, **fields: int) -> np.void:
    state = np.zeros((), RING_STATE)
    state["step"], state["steps_in_round"], state["snapshot_step"] = step, step, snapshot_step
    for name, value in {"bad_loss_step": -1, "sync_mode": -1, **fields}.items():
        state[name] = value
    copy: np.void = np.frombuffer(state.tobytes(), RING_STATE)[0]
    return copy


@pytest.mark.parametrize(
    ("snapshots", "said"),
    [
        ((40, -1), 40),  # of replicas one rank a worker keeps snapshots, for all
        ((40, 38), 38),  # of shards every rank keeps its own, and all are needed
        ((-1, -1), None),
    ],
)
def test_the_newest_snapshot_that_helps_the_worker(snapshots: tuple[int, int], said: int | None) -> None:
    running = RoundState(stage=LauncherState.RUNNING, round=1, started=5.0)
    ranks = [rank(step=41, snapshot_step=step) for step in snapshots]
    beat = build_next_heartbeat(Heartbeat("w", round=1), running, None, ranks, wall=100.0, monotonic=9.0)
    assert beat.checkpoint.snapshot_step == said


def test_the_slowest_rank_speaks_for_the_worker() -> None:
    running = RoundState(stage=LauncherState.RUNNING, round=1, started=5.0)
    beat = build_next_heartbeat(
        Heartbeat("w", round=1), running, None, [rank(9, -1), rank(7, -1)], wall=100.0, monotonic=9.0
    )
    assert (beat.progress.step, beat.start.started_at) == (7, 96.0)


def test_how_many_steps_the_script_wants_is_told_as_it_says() -> None:
    running = RoundState(stage=LauncherState.RUNNING, round=1, started=5.0)
    beat = build_next_heartbeat(
        Heartbeat("w", round=1), running, None, [rank(9, total_steps=300)], wall=100.0, monotonic=9.0
    )
    assert beat.progress.total_steps == 300
    assert Heartbeat.from_json(beat.to_json()).progress.total_steps == 300


def test_how_a_round_started_is_told_with_its_first_step() -> None:
    def started(**fields: int) -> np.void:
        stamps = {"device_ns": 6, "joined_ns": 7, "restoring_ns": 7, "restored_ns": 8}
        seconds = {name: int(1e9 * at) for name, at in (stamps | fields).items() if name.endswith("_ns")}
        others = {name: value for name, value in fields.items() if not name.endswith("_ns")}
        return rank(1, **seconds, **({"step_end_ns": 9_000_000_000, "origin": 2} | others))

    running = RoundState(stage=LauncherState.RUNNING, round=2, started=5.0, teardown_seconds=0.25)

    def told(*ranks: np.void) -> Heartbeat:
        return build_next_heartbeat(Heartbeat("w", round=1), running, None, ranks, wall=100.0, monotonic=9.0)

    beat = told(started(rank=4), started(rank=5, joined_ns=8, origin=3))
    assert [(one.stage, one.seconds, one.rank) for one in beat.start.stages] == [
        *(("Device", 1.0, 5), ("Communicators", 3.0, 5), ("Script", 2.0, 5), ("Load", 3.0, 5)),
        ("FirstStep", 4.0, 4),
    ]
    assert (beat.start.teardown_seconds, beat.start.origin) == (0.25, "PEER")
    later = replace(running, teardown_seconds=9.0)
    assert build_next_heartbeat(beat, later, None, [started(rank=4)], 101.0, 10.0).start.stages == beat.start.stages, (
        "once a round"
    )
    unfinished = build_next_heartbeat(beat, replace(running, round=3), None, [rank(0, rank=4)], 101.0, 10.0)
    assert (unfinished.start.stages, unfinished.start.teardown_seconds, unfinished.start.origin) == ((), 0.0, "UNKNOWN")
    for nonsense in ({"joined_ns": 0}, {"joined_ns": -(2**62) // 10**9}, {"joined_ns": 2**62 // 10**9}):
        beat = told(started(rank=4), started(rank=5, **nonsense))
        assert [one.stage for one in beat.start.stages] == ["Device", "Script", "Load", "FirstStep"]
    for origin in (0, 99, -(2**62)):
        assert told(started(rank=4), started(rank=5, origin=origin)).start.origin == "UNKNOWN"


def test_with_how_many_ranks_the_script_can_train_is_told_as_it_says_and_known_while_none_runs() -> None:
    running = RoundState(stage=LauncherState.RUNNING, round=1, started=5.0)
    beat = build_next_heartbeat(
        Heartbeat("w", round=1), running, None, [rank(9, replica_ranks=4)], wall=100.0, monotonic=9.0
    )
    gathering = replace(running, stage=LauncherState.GATHERING)
    beat = build_next_heartbeat(Heartbeat.from_json(beat.to_json()), gathering, None, [], wall=101.0, monotonic=10.0)
    assert beat.training.replica_ranks == 4


def test_the_mode_and_what_is_wrong_are_told() -> None:
    running = RoundState(stage=LauncherState.RUNNING, round=1, started=5.0)
    ranks = [
        rank(9, rank=0, sync_mode=2, bad_loss_step=8),
        rank(8, rank=5, sync_mode=2, bad_loss_step=6),
        rank(9, rank=6, sync_mode=2),
    ]
    refused = RankZeroNotes("shares: too few")
    beat = build_next_heartbeat(Heartbeat("w", round=1), running, None, ranks, 100.0, 9.0, refused)
    assert (beat.training.sync_mode, beat.training.refused) == ("AsyncEDiT", "shares: too few")
    assert beat.training.bad_loss == BadLoss(5, 6)
    elsewhere = build_next_heartbeat(beat, running, None, ranks[1:], 101.0, 10.0, refused)
    assert elsewhere.training.refused == "", "rank 0 has gone to another worker, and left its words behind"
    good = build_next_heartbeat(beat, running, None, [rank(12, sync_mode=0)], 101.0, 10.0)
    assert (good.training.sync_mode, good.training.refused, good.training.bad_loss) == ("Sync", "", None)


def test_a_script_that_is_only_watched_has_no_mode_and_a_new_round_no_bad_loss_yet() -> None:
    before = Heartbeat("w", round=1, training=TrainingReport(sync_mode="EDiT", bad_loss=BadLoss(2, 7)))
    gathering = RoundState(stage=LauncherState.GATHERING, round=2)
    beat = build_next_heartbeat(before, gathering, None, [], 100.0, 9.0)
    assert beat.training.bad_loss is None
    assert build_next_heartbeat(beat, gathering, None, [rank(3)], 100.0, 9.0).training.sync_mode == ""


def test_what_has_come_of_the_checkpoints_is_told_by_the_worker_of_rank_0() -> None:
    running = RoundState(stage=LauncherState.RUNNING, round=1, started=5.0)
    news = CheckpointStatus(step=4, published_ns=60 * 10**9, failed_rank=7, error="/checkpoints: no room")
    notes = RankZeroNotes(checkpoints=news)
    beat = build_next_heartbeat(Heartbeat("w", round=1), running, None, [rank(9, rank=0)], 100.0, 90.0, notes)
    assert (beat.checkpoint.failed_rank, beat.checkpoint.error) == (7, "/checkpoints: no room")
    assert beat.checkpoint.age_seconds == 30.0
    elsewhere = build_next_heartbeat(beat, running, None, [rank(9, rank=1)], 101.0, 91.0, notes)
    assert (elsewhere.checkpoint.failed_rank, elsewhere.checkpoint.error) == (None, "")
    assert elsewhere.checkpoint.age_seconds is None
    notes = RankZeroNotes(checkpoints=replace(news, step=None))
    beat = build_next_heartbeat(beat, running, None, [rank(9, rank=0)], 101.0, 91.0, notes)
    assert beat.checkpoint.age_seconds is None


def test_that_time_passes_is_written_now_and_then_and_a_failure_at_once(tmp_path: Path) -> None:
    path = tmp_path / "heartbeat.json"
    file = HeartbeatFile(path, "w")
    beat = Heartbeat("w", checkpoint=CheckpointReport(age_seconds=1.0))

    def written(beat: Heartbeat, now: float) -> Heartbeat:
        file.write(beat, now)
        return Heartbeat.from_json(json.loads(path.read_text()))

    assert written(beat, 10.0) == beat
    soon = replace(beat, checkpoint=CheckpointReport(age_seconds=1.1), progress=StepProgress(3))
    assert written(soon, 10.1) == beat
    later = replace(beat, checkpoint=CheckpointReport(age_seconds=1.6), progress=StepProgress(4))
    assert written(later, 10.6) == later
    failed = replace(later, checkpoint=CheckpointReport(age_seconds=1.6, error="no room"))
    assert written(failed, 10.7) == failed


def test_of_gpus_a_sign_is_written_at_once_and_their_figures_now_and_then(tmp_path: Path) -> None:
    path = tmp_path / "heartbeat.json"
    file = HeartbeatFile(path, "w")

    def written(now: float, *signs: str, temperature: int) -> int | None:
        file.write(Heartbeat("w", gpus=(GpuHealth("GPU-1", signs, temperature=temperature),)), now)
        (gpu,) = Heartbeat.from_json(json.loads(path.read_text())).gpus
        return gpu.temperature

    assert written(10.0, temperature=60) == 60
    assert written(10.1, temperature=61) == 60
    assert written(10.2, "RowsPending", temperature=62) == 62
    assert written(10.3, temperature=63) == 63


def test_ranks_that_cannot_be_killed_are_named_until_they_are_gone() -> None:
    stuck = RoundState(stage=LauncherState.FAILED, round=1, running=1, unkillable=(3,))
    beat = build_next_heartbeat(Heartbeat("w", round=1), stuck, None, [], 100.0, 9.0)
    assert (beat.state, beat.unkillable_ranks) == (LauncherState.FAILED, (3,))
    gone = RoundState(stage=LauncherState.GATHERING, round=1)
    assert build_next_heartbeat(beat, gone, None, [], 101.0, 10.0).unkillable_ranks == ()


def test_a_heartbeat_that_a_full_volume_refuses_is_said_once_and_written_when_there_is_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    volume = tmp_path / "volume"
    missed, path = WriteFailures(), volume / "heartbeat.json"
    file = HeartbeatFile(path, "w")
    assert "the first heartbeat: [Errno 2]" in caplog.text
    caplog.clear()
    beat = Heartbeat("w", state=LauncherState.RUNNING, progress=StepProgress(step=3))
    for now in (1.0, 1.05, 1.1):
        with missed.suppress_errors("the heartbeat"):
            file.write(beat, now)
    assert caplog.text.count("cannot be written for the operator: the heartbeat: ") == 1
    assert file.last == beat, "what comes next is counted from it all the same"
    volume.mkdir()
    with missed.suppress_errors("the heartbeat"):
        file.write(beat, 1.15)
    assert json.loads(path.read_text())["progress"] == {"step": 3}
