"""One launcher, real ranks over gloo: rounds start in place, and their end is understood."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path

import pytest

from pacekeeper.checkpointing.storage.checkpoint_status import CheckpointStatusFile
from pacekeeper.launcher import command, launcher
from pacekeeper.launcher.health.gpu_monitor import GpuMonitor, open_gpu_monitor
from pacekeeper.launcher.launcher import Script
from pacekeeper.launcher.settings import LauncherSettings
from pacekeeper.runtime_folder import RuntimeFolder, read_json
from pacekeeper_analysis.protocol.plan import Plan, Stop
from pacekeeper_analysis.protocol.reports import FaultKind, Heartbeat, LauncherState
from testing.training.launchers import LauncherTeam, create_team, fork_process, wait_until_true
from testing.training.mounts import can_mount, fill_volume, mount_memory, unshare_mounts
from testing.training.nvml import GPU_IS_LOST, XID, NvmlDouble, build_nvml_double
from testing.training.ranks import run_ranks


def one_worker(team_: LauncherTeam, ranks: int = 2, restarts: int = 5) -> None:
    team_.start("a")
    members = team_.build_members(a=range(ranks))
    team_.give_plan(Plan(version=1, membership=1, members=members, store_port=29411, restarts=restarts))


def test_a_script_without_faults_runs_to_its_end(tmp_path: Path) -> None:
    with create_team(tmp_path, steps=3) as one:
        one_worker(one)
        assert one.workers["a"].wait() == 0, one.read_logs()
        assert one.read_diary(1) == [
            "round 1 start",
            "round 1 step 1",
            "round 1 step 2",
            "round 1 step 3",
            "round 1 end",
        ]
        assert one.workers["a"].read_faults() == []
        heartbeat = one.workers["a"].read_heartbeat()
        reached = (heartbeat.state, heartbeat.round, heartbeat.progress.step, heartbeat.restarts)
        assert reached == (LauncherState.FINISHED, 1, 3, 0)


def test_a_gpu_that_falls_off_the_bus_is_a_fault_and_ends_no_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, double = build_nvml_double(tmp_path), NvmlDouble(tmp_path, gpus=2)

    def open_double() -> GpuMonitor:
        ctypes.CDLL(str(library))  # pynvml then finds it under NVML's name
        return open_gpu_monitor()

    monkeypatch.setattr(launcher, "open_gpu_monitor", open_double)
    with create_team(tmp_path, steps=10_000) as one:
        one.environment |= double.environment
        one_worker(one)
        one.wait_for_step(2)
        one.wait_for(lambda: double.state.gpus[1].registered, "events are registered")
        double.state.gpus[0].rows_pending = 1
        one.wait_for(
            lambda: "RowsPending" in str(one.workers["a"].read_heartbeat().gpus), "its health in the heartbeat"
        )
        double.state.gpus[1].error = GPU_IS_LOST
        double.send_event(1, XID, 79)
        worker = one.workers["a"]
        (fault,) = one.wait_for(lambda: worker.read_faults(FaultKind.GPU_ERROR), "the fault")
        assert (fault.xid, fault.worker, fault.round, fault.error) == (79, "a", 1, "XID 79 on GPU-1")
        step = worker.read_heartbeat().progress.step or 0
        one.wait_for(lambda: (worker.read_heartbeat().progress.step or 0) > step, "the ranks train on")
        for xid in (31, 31, 31, 13, 31):  # a kernel with a wild pointer
            double.send_event(0, XID, xid)
        double.send_event(0, XID, 62)
        one.wait_for(lambda: 62 in [fault.xid for fault in worker.read_faults(FaultKind.GPU_ERROR)], "the last of them")
        assert sorted(fault.xid for fault in worker.read_faults(FaultKind.GPU_ERROR)) == [13, 31, 62, 79]


def test_the_checkpoint_status_of_rank_0_is_in_the_heartbeat(tmp_path: Path) -> None:
    with create_team(tmp_path, steps=10_000) as one:
        one_worker(one)
        one.wait_for_step(2)
        worker = one.workers["a"]
        status_file = CheckpointStatusFile(worker.runtime.checkpoints)
        status_file.report_published(1)
        one.wait_for(lambda: worker.read_heartbeat().checkpoint.age_seconds is not None, "a checkpoint is kept")
        status_file.report_failure("/checkpoints: no space", 1)
        one.wait_for(lambda: worker.read_heartbeat().checkpoint.error, "the failure")
        assert worker.read_heartbeat().checkpoint.failed_rank == 1
        before = worker.read_heartbeat().checkpoint.age_seconds or 0.0
        one.wait_for(lambda: (worker.read_heartbeat().checkpoint.age_seconds or 0.0) > before, "it grows older")
        status_file.report_published(5)
        one.wait_for(lambda: not worker.read_heartbeat().checkpoint.error, "the next one is kept")


@pytest.mark.skipif(not can_mount(), reason="mounts need root")
def test_a_full_volume_ends_neither_the_training_nor_the_launcher(tmp_path: Path) -> None:
    """What is not written in between is written when there is space. Records have their space from the beginning."""

    def main(_: int) -> None:
        unshare_mounts()
        mount_memory(tmp_path / "a", megabytes=20)
        with create_team(tmp_path, steps=10_000) as one:
            one_worker(one)
            one.wait_for_step(2)
            worker = one.workers["a"]
            fill_volume(worker.runtime.root / "filler")
            message = "cannot be written for the operator: the heartbeat: [Errno 28] No space left on device"
            one.wait_for(lambda: message in worker.log.read_text(), "it is logged")
            step = len(one.read_diary(0))
            one.wait_for(
                lambda: len(one.read_diary(0)) > step + 300, "the ranks train on, through more than a page of records"
            )
            assert worker.poll() is None
            written = worker.read_heartbeat().progress.step or 0
            assert worker.log.read_text().count(message) == 1
            (worker.runtime.root / "filler").unlink()
            one.wait_for(lambda: (worker.read_heartbeat().progress.step or 0) > written + 100, "it is written again")

    run_ranks(main, 1)


def test_a_launcher_sends_heartbeats_while_nothing_changes_and_none_after_its_end(tmp_path: Path) -> None:
    def sign() -> int:
        return worker.runtime.liveness.stat().st_mtime_ns if worker.runtime.liveness.exists() else 0

    with create_team(tmp_path, steps=3) as one:
        worker = one.start("a")
        first = one.wait_for(sign, "a sign of life, without a plan")
        one.wait_for(lambda: sign() > first, "another one")
        worker.kill(signal.SIGSTOP)
        os.waitpid(worker.pid, os.WUNTRACED)
        last = sign()
        for _ in range(30):
            worker.sleep_briefly()
        assert sign() == last
        worker.kill(signal.SIGCONT)
        one.wait_for(lambda: sign() > last, "it goes on")
        one.give_plan(Plan(stop=Stop.FINISH))
        assert worker.wait() == 0, one.read_logs()
        assert not worker.runtime.liveness.exists()


@pytest.mark.parametrize(
    ("kind", "exit_code", "error"),
    [("sigkill", -9, ""), ("raise", 1, "RuntimeError: scripted failure"), ("exit", 1, "")],
)
def test_a_failed_rank_starts_the_next_round_in_place(tmp_path: Path, kind: str, exit_code: int, error: str) -> None:
    with create_team(tmp_path, steps=6, faults=[{"rank": 1, "round": 1, "step": 4, "kind": kind}]) as one:
        one_worker(one)
        assert one.workers["a"].wait() == 0, one.read_logs()
        (fault,) = one.workers["a"].read_faults()
        assert (fault.kind, fault.rank, fault.exit_code, fault.round) == (FaultKind.RANK_FAILED, 1, exit_code, 1)
        assert (fault.step, fault.completed_step, fault.out_of_memory) == (3, True, False)
        assert error in fault.error
        assert one.read_diary(0)[-3:] == ["round 2 step 5", "round 2 step 6", "round 2 end"]
        assert one.workers["a"].read_heartbeat().restarts == 1


def test_a_warm_process_that_does_not_start_in_time_ends_its_launcher(tmp_path: Path) -> None:
    with create_team(tmp_path, steps=10_000, import_timeout=0.01) as one:
        one_worker(one)
        one.wait_for_step(2)
        worker = one.workers["a"]
        (warm,) = Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text().split()
        os.kill(int(warm), signal.SIGKILL)
        assert worker.wait() == 1, one.read_logs()
        assert "within 0.01 s; check the storage of the image, or raise PACEKEEPER_IMPORT_SECONDS" in one.read_logs()


def test_two_rounds_without_a_step_are_not_followed_by_a_third(tmp_path: Path) -> None:
    faults = [{"rank": 0, "round": number, "step": 1, "kind": "exit"} for number in (1, 2, 3)]
    with create_team(tmp_path, steps=2, faults=faults) as one:
        one_worker(one)
        one.wait_for_state("a", LauncherState.FAILED)
        assert [fault.round for fault in one.workers["a"].read_faults()] == [1, 2]
        # A new membership is the operator's request to try again.
        one.give_plan(
            Plan(version=2, membership=2, round=7, members=one.build_members(a=[0, 1]), store_port=29411, restarts=5)
        )
        assert one.workers["a"].wait() == 0, one.read_logs()
        assert one.read_diary(0)[-1] == "round 7 end"


def test_restarts_end_with_the_plans_budget(tmp_path: Path) -> None:
    faults = [{"rank": 0, "round": number, "step": 2 * number, "kind": "sigkill"} for number in (1, 2, 3)]
    with create_team(tmp_path, steps=9, faults=faults) as one:
        one_worker(one, restarts=1)
        one.wait_for_state("a", LauncherState.FAILED)
        assert one.workers["a"].read_heartbeat().round == 2


def test_sigterm_lets_the_ranks_leave_and_is_not_reported_as_finished(tmp_path: Path) -> None:
    with create_team(tmp_path, steps=10_000) as one:
        one_worker(one)
        one.wait_for_step(3)
        one.workers["a"].kill(signal.SIGTERM)
        assert one.workers["a"].wait() == 143, one.read_logs()
        assert [one.read_diary(rank)[-1] for rank in (0, 1)] == ["round 1 leave"] * 2
        assert [fault.kind for fault in one.workers["a"].read_faults()] == [FaultKind.TERMINATING]


def test_sigterm_while_torch_is_being_imported_ends_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = RuntimeFolder(tmp_path / "a").create()
    settings = LauncherSettings(worker="a", address="127.0.0.1")

    def import_for_long(*_: object) -> None:
        (tmp_path / "importing").touch()
        time.sleep(60)

    monkeypatch.setattr(command, "import_modules", import_for_long)
    pid = fork_process(
        lambda: command.launch_from_plan(Script("script.py", False, ()), settings, runtime), tmp_path / "log", {}
    )
    wait_until_true((tmp_path / "importing").exists, "the import has begun")
    assert Heartbeat.from_json(read_json(runtime.heartbeat) or {}).state is LauncherState.STARTING
    os.kill(pid, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 143


def test_ranks_die_with_their_launcher(tmp_path: Path) -> None:
    with create_team(tmp_path, steps=10_000) as one:
        one_worker(one)
        one.wait_for_step(1, rank=1)
        pids = [pid for rank in (0, 1) for pid in one.read_pids(rank)]
        one.workers["a"].kill()
        one.wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "no rank is left")


def test_a_stopped_rank_is_killed_for_the_next_membership(tmp_path: Path) -> None:
    with create_team(tmp_path, steps=8, faults=[{"rank": 1, "round": 1, "step": 3, "kind": "stop"}]) as one:
        one_worker(one)
        one.wait_for(lambda: "round 1 stop" in one.read_diary(1), "rank 1 stands still")
        one.give_plan(
            Plan(version=2, membership=2, round=2, members=one.build_members(a=[0, 1]), store_port=29411, restarts=5)
        )
        assert one.workers["a"].wait() == 0, one.read_logs()
        assert one.read_diary(1)[-1] == "round 2 end"
        for pid in one.read_pids(1):
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
