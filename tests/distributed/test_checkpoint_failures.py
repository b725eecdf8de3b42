"""Checkpoints that fail on one rank fail on all: no rank waits, training goes on, and none of them counts as kept."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter

import pacekeeper as pk
from pacekeeper.checkpointing.storage import checkpoint_folder, checkpoint_writer, distributed_checkpoint
from pacekeeper.checkpointing.storage.checkpoint_status import read_checkpoint_status
from pacekeeper.observe.ring_reader import RingReader
from pacekeeper.runtime_folder import RuntimeFolder, write_json
from pacekeeper_analysis.protocol.plan import WorkerPlan, WorkerRole
from testing.training.launchers import wait_until_true
from testing.training.ranks import run_ranks

RANKS = 2
FULL = OSError(errno.ENOSPC, "No space left on device")
REMEDY = "make room on the volume, or keep fewer (spec.checkpoint.keep)"
FAULTS: dict[str, tuple[int, Any, str, str]] = {
    "manifest": (0, checkpoint_folder, "_write_durably", "manifest.json"),
    "publish": (0, checkpoint_folder.CheckpointFolder, "publish", ""),
    "metadata": (0, FileSystemWriter, "finish", ""),
    "checksum": (1, checkpoint_folder.FolderFiles, "compute_checksum", ""),
    "write": (1, distributed_checkpoint, "_write_items", ""),
    "copy": (1, distributed_checkpoint, "_copy_into_buffer", ""),
}
"""Rank, where the function is found and its name, and what an argument ends in if the call is to fail."""


def inject_fault(rank: int, fault: str, times: float = 1) -> None:
    """The volume is full for the first `times` calls, on the fault's rank: this process ends with the test."""
    victim, owner, name, ending = FAULTS[fault]
    function = getattr(owner, name)
    left = times

    def fails(*arguments: Any, **options: Any) -> Any:
        nonlocal left
        if left > 0 and any(str(argument).endswith(ending) for argument in arguments):
            left -= 1
            raise FULL
        return function(*arguments, **options)

    if rank == victim:
        setattr(owner, name, fails)


def train_until(
    volume: Path, every: int, until: int | None, after: Callable[[pk.Job, pk.Step], None] = lambda *_: None
) -> tuple[int, Any]:
    """The step that was reached, and the exit code of a job that received SIGTERM."""
    logging.getLogger("pacekeeper").addHandler(logging.StreamHandler())
    job = pk.init(checkpoints=pk.Checkpoints(volume, every=every))
    model = job.replicate(nn.Linear(4, 1))
    optimizer = job.optimizer(torch.optim.AdamW(model.parameters()))
    loader = job.dataloader(torch.utils.data.TensorDataset(torch.ones(64, 4)), 8, max_microbatch=4)
    job.register(model=model, optimizer=optimizer, loader=loader)
    job.restore()
    try:
        for step in job.steps(loader, until=until):
            for (x,) in step.microbatches():
                (model(x).sum() / step.total_weight).backward()
            optimizer.step()
            optimizer.zero_grad()
            after(job, step)
            assert step.number < 20
    except SystemExit as exit_:
        return job.step, exit_.code
    return job.step, 0


def read_state_field(runtime: Path, field: str) -> list[int]:
    """By each rank, to its launcher."""
    return [int(RingReader(RuntimeFolder(runtime).ring(rank)).state()[field]) for rank in range(RANKS)]


def list_kept(volume: Path) -> set[str]:
    """All that lies there; what is half-written has names of its own."""
    return {path.name for path in volume.iterdir() if not path.name.startswith((".owner-", "owner.json"))}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_checkpoint_that_fails_on_one_rank_stalls_no_rank_and_the_next_one_is_kept(
    fault: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def rank_main(rank: int) -> tuple[int, Any]:
        inject_fault(rank, fault)
        return train_until(tmp_path / "volume", every=2, until=6)

    assert run_ranks(rank_main, RANKS, runtime=tmp_path / "runtime") == [(6, 0)] * RANKS
    assert list_kept(tmp_path / "volume") == {"step-00000004", "step-00000006"}
    assert read_state_field(tmp_path / "runtime", "checkpoint_step") == [6] * RANKS
    message = f"the checkpoint of step 2 is not published: rank {FAULTS[fault][0]}: OSError: {FULL}: {REMEDY}\n"
    assert capfd.readouterr().err.count(message) == 1  # rank 0 reports it for all


@contextmanager
def mount_small_volume(path: Path) -> Iterator[Path]:
    """Of one mebibyte. Skips the test where this user may not mount one."""
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", path], check=False)
    if mounted.returncode != 0:
        pytest.skip("mounting a small volume needs root")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)


def fill_volume(volume: Path) -> None:
    with suppress(OSError), (volume / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 12))


def free_space(volume: Path) -> None:
    (volume / "filler").unlink()


def make_read_only(volume: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", volume.parent], check=True)


def make_writable(volume: Path) -> None:
    subprocess.run(["mount", "-o", "remount,rw", volume.parent], check=True)


def put_a_file_there(volume: Path) -> None:
    volume.rename(volume.with_suffix(".aside"))
    volume.write_text("")


def put_it_back(volume: Path) -> None:
    volume.unlink()
    volume.with_suffix(".aside").rename(volume)


@pytest.mark.parametrize(
    ("spoil", "repair", "reason"),
    [
        (fill_volume, free_space, f"No space left on device: {REMEDY}"),
        (make_read_only, make_writable, "mount the volume of spec.checkpoint.path writable"),
        (put_a_file_there, put_it_back, str(errno.ENOTDIR)),
    ],
    ids=["full", "read-only", "a file"],
)
def test_a_volume_that_fails_in_mid_training_is_named_at_once_and_used_again_when_it_recovers(
    spoil: Callable[[Path], None], repair: Callable[[Path], None], reason: str, tmp_path: Path
) -> None:
    status_file = RuntimeFolder(tmp_path / "runtime").checkpoints

    with mount_small_volume(tmp_path / "mount") as mount:
        volume = mount / "volume"

        def meddle(job: pk.Job, step: pk.Step) -> None:
            """Of the checkpoints after the steps 2, 4, 6 and 8, spoils the second one and the third."""
            if job.rank != 0 or step.number not in {3, 5, 7, 9}:
                return
            if step.number == 3:
                wait_until(lambda: read_checkpoint_status(status_file).step == 2, "the first one is kept")
                spoil(volume)
            elif step.number in {5, 7}:
                wait_until(
                    lambda: f"step {step.number - 1}: " in read_checkpoint_status(status_file).error,
                    "the failure is reported",
                )
                status = read_checkpoint_status(status_file)
                assert (status.step, status.failed_rank) == (2, 0), "the newest that is kept, and the rank that failed"
                assert status.error.startswith(str(volume))
                assert reason in status.error
                if step.number == 7:
                    repair(volume)
            else:
                wait_until(lambda: read_checkpoint_status(status_file).step == 8, "the one after that is kept")
                status = read_checkpoint_status(status_file)
                assert (status.failed_rank, status.error) == (None, "")

        assert (
            run_ranks(lambda _: train_until(volume, 2, 9, meddle), RANKS, runtime=tmp_path / "runtime")
            == [(9, 0)] * RANKS
        )
        assert {"step-00000002", "step-00000008", "step-00000009"} <= list_kept(volume)


def test_a_folder_that_was_emptied_is_used_again(tmp_path: Path) -> None:
    volume = tmp_path / "volume"

    def meddle(job: pk.Job, step: pk.Step) -> None:
        if job.rank == 0 and step.number == 3:
            wait_until(lambda: list_kept(volume) == {"step-00000002"}, "the first one is kept")
            shutil.rmtree(volume)

    run_ranks(lambda _: train_until(volume, 2, 4, meddle), RANKS, runtime=tmp_path / "runtime")
    assert list_kept(volume) == {"step-00000004"}


def test_training_that_waits_for_a_hanging_volume_reports_it(tmp_path: Path) -> None:
    status_file = RuntimeFolder(tmp_path / "runtime").checkpoints

    def rank_main(rank: int) -> tuple[int, Any]:
        checkpoint_writer._SLOW_WRITE_WARNING_SECONDS = 0.2
        publish = checkpoint_folder.CheckpointFolder.publish

        def hangs(*arguments: Any) -> bool:
            wait_until(
                lambda: "still being written" in read_checkpoint_status(status_file).error, "the wait is reported"
            )
            return publish(*arguments)

        if rank == 0:
            checkpoint_folder.CheckpointFolder.publish = hangs  # type: ignore[method-assign,assignment]
        return train_until(tmp_path / "volume", 2, 5)

    assert run_ranks(rank_main, RANKS, runtime=tmp_path / "runtime") == [(5, 0)] * RANKS
    assert list_kept(tmp_path / "volume") == {"step-00000002", "step-00000004", "step-00000005"}
    assert read_checkpoint_status(status_file).error == ""


def test_a_rank_that_ends_waits_for_a_hanging_volume_for_a_limited_time(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def rank_main(rank: int) -> tuple[int, Any]:
        checkpoint_writer._SLOW_WRITE_WARNING_SECONDS = checkpoint_writer._MAX_WRITE_WAIT_SECONDS = 0.2
        if rank == 1:
            distributed_checkpoint._write_items = wait_indefinitely  # type: ignore[assignment]
        return train_until(tmp_path / "volume", 2, 5)

    assert run_ranks(rank_main, RANKS, runtime=tmp_path / "runtime") == [(5, 0)] * RANKS
    log = capfd.readouterr().err
    assert log.count("the checkpoint of step 4 is not published: rank 0: an earlier one is still being written") == 1
    assert log.count("training no longer waits for the last checkpoint") == RANKS, "once, not at each one that is due"
    assert log.count("the state after step 5, the last one, is NOT saved on the volume") == RANKS
    assert not {name for name in list_kept(tmp_path / "volume") if "partial" not in name}


def test_a_save_that_times_out_on_one_rank_is_lost_on_all_and_no_rank_retries_by_itself(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 has received the failure, and would make the last checkpoint once more, without rank 1."""

    def rank_main(rank: int) -> tuple[int, Any]:
        inject_fault(rank, "manifest")
        if rank == 1:
            checkpoint_writer._SLOW_WRITE_WARNING_SECONDS = checkpoint_writer._MAX_WRITE_WAIT_SECONDS = 1.0
            checkpoint_folder.CheckpointFolder.discard = wait_indefinitely  # type: ignore[method-assign,assignment]
        return train_until(tmp_path / "volume", every=1000, until=4)

    assert run_ranks(rank_main, RANKS, runtime=tmp_path / "runtime") == [(4, 0)] * RANKS
    log = capfd.readouterr().err
    assert log.count("rank 1: training no longer waits for the last checkpoint") == 1
    assert log.count("the state after step 4, the last one, is NOT saved on the volume") == RANKS


def wait_indefinitely(*_: Any) -> NoReturn:
    while True:
        signal.pause()


def wait_until(condition: Callable[[], bool], what: str) -> None:
    wait_until_true(lambda: condition() or None, what)


@pytest.mark.parametrize("receives_sigterm", [False, True], ids=["the end", "SIGTERM"])
@pytest.mark.parametrize("fault", ["manifest", "write"])
def test_the_last_checkpoint_is_tried_again(fault: str, receives_sigterm: bool, tmp_path: Path) -> None:
    def terminate(job: pk.Job, step: pk.Step) -> None:
        if receives_sigterm and job.rank == 1 and step.number == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    def rank_main(rank: int) -> tuple[int, Any]:
        inject_fault(rank, fault)
        return train_until(tmp_path / "volume", every=1000, until=None if receives_sigterm else 4, after=terminate)

    results = run_ranks(rank_main, RANKS, runtime=tmp_path / "runtime")
    assert results == [(4, 143 if receives_sigterm else 0)] * RANKS
    assert list_kept(tmp_path / "volume") == {"step-00000004"}
    assert read_state_field(tmp_path / "runtime", "checkpoint_step") == [4] * RANKS


@pytest.mark.parametrize("failures", [1, float("inf")], ids=["once", "always"])
def test_a_request_at_a_step_that_could_not_be_written_is_answered_once_it_is_kept(
    failures: float, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plan = WorkerPlan(version=1, membership=1, role=WorkerRole.MEMBER)
    path = RuntimeFolder(tmp_path / "runtime").plan

    def request_checkpoint(job: pk.Job, step: pk.Step) -> None:
        if job.rank == 0 and step.number == 3:  # agreed on when step 4 is over
            write_json(path, replace(plan, version=2, checkpoint_request=1).to_json())
        step.checkpoint()  # the one that is due, before the ordinal where the request is found

    def rank_main(rank: int) -> tuple[int, Any]:
        if rank == 0:
            write_json(path, plan.to_json())
        inject_fault(rank, "manifest", failures)
        return train_until(tmp_path / "volume", every=4, until=6, after=request_checkpoint)

    assert run_ranks(rank_main, RANKS, runtime=tmp_path / "runtime") == [(6, 0)] * RANKS
    log = capfd.readouterr().err
    if failures == 1:
        assert list_kept(tmp_path / "volume") == {"step-00000004", "step-00000006"}
        assert read_state_field(tmp_path / "runtime", "checkpoint_request") == [1] * RANKS
        assert "NOT saved" not in log
    else:
        assert list_kept(tmp_path / "volume") == set()
        assert read_state_field(tmp_path / "runtime", "checkpoint_request") == [0] * RANKS
        assert read_state_field(tmp_path / "runtime", "checkpoint_step") == [-1] * RANKS
        assert log.count("checkpoint of step 4 is not published") == 2  # the one that was due, and the requested one
        assert log.count("checkpoint of step 6 is not published") == 2
        assert (
            "the state after step 6, the last one, is NOT saved on the volume: the newest checkpoint there is none"
            in log
        )
