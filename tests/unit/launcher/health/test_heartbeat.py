"""What a worker reports of itself, built from its ranks' states."""

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


def build_rank_state(step: int, snapshot_step: int = -1, **fields: int) -> np.void:
    state = np.zeros((), RING_STATE)
    state["step"], state["steps_in_round"], state["snapshot_step"] = step, step, snapshot_step
    for name, value in {"bad_loss_step": -1, "sync_mode": -1, **fields}.items():
        state[name] = value
    copy: np.void = np.frombuffer(state.tobytes(), RING_STATE)[0]
    return copy


@pytest.mark.parametrize(
    ("snapshots", "replicated", "expected"),
    [
        ((40, -1), (40, 0), (40, 40)),  # with replicas, one rank of a worker saves the snapshots for all
        ((40, 38), (36, 38), (38, 36)),  # with shards, every rank saves its own, and all are needed
        ((40, 40), (40, 0), (40, None)),  # the copy of one has never arrived
        ((-1, -1), (0, 0), (None, None)),
    ],
)
def test_the_newest_snapshots_that_help_the_worker_and_its_loss_are_reported(
    snapshots: tuple[int, int], replicated: tuple[int, int], expected: tuple[int | None, int | None]
) -> None:
    running = RoundState(stage=LauncherState.RUNNING, round=1, started=5.0)
    ranks = [
        build_rank_state(step=41, snapshot_step=step, replicated_step=copied)
        for step, copied in zip(snapshots, replicated, strict=True)
    ]
    checkpoint = build_next_heartbeat(
        Heartbeat("w", round=1), running, None, ranks, wall=100.0, monotonic=9.0
    ).checkpoint
    assert (checkpoint.snapshot_step, checkpoint.replicated_step) == expected


def test_the_slowest_rank_determines_the_workers_progress() -> None:
    running = RoundState(stage=LauncherState.RUNNING, round=1, started=5.0)
    heartbeat = build_next_heartbeat(
        Heartbeat("w", round=1),
        running,
        None,
        [build_rank_state(9, -1), build_rank_state(7, -1)],
        wall=100.0,
        monotonic=9.0,
    )
    assert (heartbeat.progress.step, heartbeat.start.started_at) == (7, 96.0)


def test_the_number_of_steps_that_the_script_requests_is_reported() -> None:
    running = RoundState(stage=LauncherState.RUNNING, round=1, started=5.0)
    heartbeat = build_next_heartbeat(
        Heartbeat("w", round=1), running, None, [build_rank_state(9, total_steps=300)], wall=100.0, monotonic=9.0
    )
    assert heartbeat.progress.total_steps == 300
    assert Heartbeat.from_json(heartbeat.to_json()).progress.total_steps == 300


def test_the_start_of_a_round_is_reported_with_its_first_step() -> None:
    def build_started_rank(**fields: int) -> np.void:
        stamps = {"device_ns": 6, "joined_ns": 7, "restoring_ns": 7, "restored_ns": 8}
        seconds = {name: int(1e9 * at) for name, at in (stamps | fields).items() if name.endswith("_ns")}
        others = {name: value for name, value in fields.items() if not name.endswith("_ns")}
        return build_rank_state(1, **seconds, **({"step_end_ns": 9_000_000_000, "origin": 2} | others))

    running = RoundState(stage=LauncherState.RUNNING, round=2, started=5.0, teardown_seconds=0.25)

    def build_heartbeat(*ranks: np.void) -> Heartbeat:
        return build_next_heartbeat(Heartbeat("w", round=1), running, None, ranks, wall=100.0, monotonic=9.0)

    heartbeat = build_heartbeat(build_started_rank(rank=4), build_started_rank(rank=5, joined_ns=8, origin=3))
    assert [(one.stage, one.seconds, one.rank) for one in heartbeat.start.stages] == [
        *(("Device", 1.0, 5), ("Communicators", 3.0, 5), ("Script", 2.0, 5), ("Load", 3.0, 5)),
        ("FirstStep", 4.0, 4),
    ]
    assert (heartbeat.start.teardown_seconds, heartbeat.start.origin) == (0.25, "PEER")
    later = replace(running, teardown_seconds=9.0)
    assert (
        build_next_heartbeat(heartbeat, later, None, [build_started_rank(rank=4)], 101.0, 10.0).start.stages
        == heartbeat.start.stages
    ), "once a round"
    unfinished = build_next_heartbeat(
        heartbeat, replace(running, round=3), None, [build_rank_state(0, rank=4)], 101.0, 10.0
    )
    assert (unfinished.start.stages, unfinished.start.teardown_seconds, unfinished.start.origin) == ((), 0.0, "UNKNOWN")
    for nonsense in ({"joined_ns": 0}, {"joined_ns": -(2**62) // 10**9}, {"joined_ns": 2**62 // 10**9}):
        heartbeat = build_heartbeat(build_started_rank(rank=4), build_started_rank(rank=5, **nonsense))
        assert [one.stage for one in heartbeat.start.stages] == ["Device", "Script", "Load", "FirstStep"]
    for origin in (0, 99, -(2**62)):
        assert (
            build_heartbeat(build_started_rank(rank=4), build_started_rank(rank=5, origin=origin)).start.origin
            == "UNKNOWN"
        )


def test_supported_rank_counts_are_reported_and_remembered_while_no_rank_runs() -> None:
    running = RoundState(stage=LauncherState.RUNNING, round=1, started=5.0)
    heartbeat = build_next_heartbeat(
        Heartbeat("w", round=1), running, None, [build_rank_state(9, replica_ranks=4)], wall=100.0, monotonic=9.0
    )
    gathering = replace(running, stage=LauncherState.GATHERING)
    heartbeat = build_next_heartbeat(
        Heartbeat.from_json(heartbeat.to_json()), gathering, None, [], wall=101.0, monotonic=10.0
    )
    assert heartbeat.training.replica_ranks == 4


def test_the_mode_and_problems_are_reported() -> None:
    running = RoundState(stage=LauncherState.RUNNING, round=1, started=5.0)
    ranks = [
        build_rank_state(9, rank=0, sync_mode=2, bad_loss_step=8),
        build_rank_state(8, rank=5, sync_mode=2, bad_loss_step=6),
        build_rank_state(9, rank=6, sync_mode=2),
    ]
    refused = RankZeroNotes("shares: too few")
    heartbeat = build_next_heartbeat(Heartbeat("w", round=1), running, None, ranks, 100.0, 9.0, refused)
    assert (heartbeat.training.sync_mode, heartbeat.training.refused) == ("AsyncEDiT", "shares: too few")
    assert heartbeat.training.bad_loss == BadLoss(5, 6)
    elsewhere = build_next_heartbeat(heartbeat, running, None, ranks[1:], 101.0, 10.0, refused)
    assert elsewhere.training.refused == "", "rank 0 has gone to another worker, and left its message behind"
    good = build_next_heartbeat(heartbeat, running, None, [build_rank_state(12, sync_mode=0)], 101.0, 10.0)
    assert (good.training.sync_mode, good.training.refused, good.training.bad_loss) == ("Sync", "", None)


def test_an_unmanaged_script_has_no_mode_and_a_new_round_has_no_bad_loss() -> None:
    before = Heartbeat("w", round=1, training=TrainingReport(sync_mode="EDiT", bad_loss=BadLoss(2, 7)))
    gathering = RoundState(stage=LauncherState.GATHERING, round=2)
    heartbeat = build_next_heartbeat(before, gathering, None, [], 100.0, 9.0)
    assert heartbeat.training.bad_loss is None
    assert build_next_heartbeat(heartbeat, gathering, None, [build_rank_state(3)], 100.0, 9.0).training.sync_mode == ""


def test_the_checkpoint_status_is_reported_by_the_worker_of_rank_0() -> None:
    running = RoundState(stage=LauncherState.RUNNING, round=1, started=5.0)
    status = CheckpointStatus(step=4, published_ns=60 * 10**9, failed_rank=7, error="/checkpoints: no room")
    notes = RankZeroNotes(checkpoints=status)
    heartbeat = build_next_heartbeat(
        Heartbeat("w", round=1), running, None, [build_rank_state(9, rank=0)], 100.0, 90.0, notes
    )
    assert (heartbeat.checkpoint.failed_rank, heartbeat.checkpoint.error) == (7, "/checkpoints: no room")
    assert heartbeat.checkpoint.age_seconds == 30.0
    elsewhere = build_next_heartbeat(heartbeat, running, None, [build_rank_state(9, rank=1)], 101.0, 91.0, notes)
    assert (elsewhere.checkpoint.failed_rank, elsewhere.checkpoint.error) == (None, "")
    assert elsewhere.checkpoint.age_seconds is None
    notes = RankZeroNotes(checkpoints=replace(status, step=None))
    heartbeat = build_next_heartbeat(heartbeat, running, None, [build_rank_state(9, rank=0)], 101.0, 91.0, notes)
    assert heartbeat.checkpoint.age_seconds is None


def test_passing_time_is_written_periodically_and_a_failure_at_once(tmp_path: Path) -> None:
    path = tmp_path / "heartbeat.json"
    file = HeartbeatFile(path, "w")
    heartbeat = Heartbeat("w", checkpoint=CheckpointReport(age_seconds=1.0))

    def write_heartbeat(heartbeat: Heartbeat, now: float) -> Heartbeat:
        file.write(heartbeat, now)
        return Heartbeat.from_json(json.loads(path.read_text()))

    assert write_heartbeat(heartbeat, 10.0) == heartbeat
    soon = replace(heartbeat, checkpoint=CheckpointReport(age_seconds=1.1), progress=StepProgress(3))
    assert write_heartbeat(soon, 10.1) == heartbeat
    later = replace(heartbeat, checkpoint=CheckpointReport(age_seconds=1.6), progress=StepProgress(4))
    assert write_heartbeat(later, 10.6) == later
    failed = replace(later, checkpoint=CheckpointReport(age_seconds=1.6, error="no room"))
    assert write_heartbeat(failed, 10.7) == failed


def test_gpu_signs_are_written_at_once_and_gpu_metrics_periodically(tmp_path: Path) -> None:
    path = tmp_path / "heartbeat.json"
    file = HeartbeatFile(path, "w")

    def write_health(now: float, *signs: str, temperature: int) -> int | None:
        file.write(Heartbeat("w", gpus=(GpuHealth("GPU-1", signs, temperature=temperature),)), now)
        (gpu,) = Heartbeat.from_json(json.loads(path.read_text())).gpus
        return gpu.temperature

    assert write_health(10.0, temperature=60) == 60
    assert write_health(10.1, temperature=61) == 60
    assert write_health(10.2, "RowsPending", temperature=62) == 62
    assert write_health(10.3, temperature=63) == 63


def test_ranks_that_cannot_be_killed_are_named_until_they_exit() -> None:
    stuck = RoundState(stage=LauncherState.FAILED, round=1, running=1, unkillable=(3,))
    heartbeat = build_next_heartbeat(Heartbeat("w", round=1), stuck, None, [], 100.0, 9.0)
    assert (heartbeat.state, heartbeat.unkillable_ranks) == (LauncherState.FAILED, (3,))
    gone = RoundState(stage=LauncherState.GATHERING, round=1)
    assert build_next_heartbeat(heartbeat, gone, None, [], 101.0, 10.0).unkillable_ranks == ()


def test_a_heartbeat_that_a_full_volume_refuses_is_logged_once_and_written_when_there_is_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    volume = tmp_path / "volume"
    missed, path = WriteFailures(), volume / "heartbeat.json"
    file = HeartbeatFile(path, "w")
    assert "the first heartbeat: [Errno 2]" in caplog.text
    caplog.clear()
    heartbeat = Heartbeat("w", state=LauncherState.RUNNING, progress=StepProgress(step=3))
    for now in (1.0, 1.05, 1.1):
        with missed.suppress_errors("the heartbeat"):
            file.write(heartbeat, now)
    assert caplog.text.count("cannot be written for the operator: the heartbeat: ") == 1
    assert file.last == heartbeat, "what comes next is counted from it all the same"
    volume.mkdir()
    with missed.suppress_errors("the heartbeat"):
        file.write(heartbeat, 1.15)
    assert json.loads(path.read_text())["progress"] == {"step": 3}
