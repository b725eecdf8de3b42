"""Jobs that meet in one folder of checkpoints, as their scripts see it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pacekeeper as pk
from pacekeeper.checkpointing.storage.checkpoint_folder import CheckpointFolder
from pacekeeper.checkpointing.storage.checkpoint_status import read_checkpoint_status
from pacekeeper.checkpointing.storage.checkpoint_writer import RoundSupersededError
from pacekeeper.environment import JobIdentity
from pacekeeper.runtime_folder import RuntimeFolder
from pacekeeper_analysis.errors import InputError
from testing.training.ranks import run_ranks

RANKS = 2


def build_job_environment(name: str, uid: str, **more: str) -> dict[str, str]:
    return {"PACEKEEPER_JOB": name, "PACEKEEPER_NAMESPACE": "team", "PACEKEEPER_JOB_UID": uid, **more}


def train_until(
    volume: Path, until: int, width: int = 1, after: Callable[[int, int], None] = lambda *_: None
) -> tuple[int, int]:
    """The steps that it went on from and has come to. `after`: is called with rank and step after each step."""
    job = pk.init(checkpoints=pk.Checkpoints(volume, every=1))
    model = job.replicate(nn.Linear(4, width))
    optimizer = job.optimizer(torch.optim.AdamW(model.parameters()))
    loader = job.dataloader(torch.utils.data.TensorDataset(torch.ones(64, 4)), 8, max_microbatch=4)
    restored = job.restore(model=model, optimizer=optimizer, loader=loader)
    for step in job.steps(loader, until=until):
        for (x,) in step.microbatches():
            step.backward(model(x).sum())
        optimizer.step()
        optimizer.zero_grad()
        after(job.rank, step.number)
    return restored, job.step


def read_content(path: Path) -> dict[str, bytes | None]:
    """All that is below a folder."""
    return {str(its.relative_to(path)): its.read_bytes() if its.is_file() else None for its in path.rglob("*")}


def catch_refusal(main: Callable[[], object]) -> str:
    with pytest.raises(InputError) as refused:
        main()
    return str(refused.value)


def test_a_job_that_is_not_the_owner_changes_nothing_and_one_that_loses_the_folder_ends_its_round(
    tmp_path: Path,
) -> None:
    volume, runtime = tmp_path / "volume", tmp_path / "runtime"

    def in_job(name: str, uid: str, main: Callable[[], Any], ranks: int = 1) -> list[Any]:
        return run_ranks(lambda _: main(), ranks, environment=build_job_environment(name, uid))

    assert in_job("one", "uid-1", lambda: train_until(volume, 3), RANKS) == [(0, 3)] * RANKS
    CheckpointFolder(volume, 9, job=JobIdentity("team/one", "uid-1")).get_partial_path(4).mkdir()
    before = read_content(volume)

    (why,) = in_job("other", "uid-3", lambda: catch_refusal(lambda: train_until(volume, 9)))
    assert "holds checkpoints of another job, team/one (UID uid-1); this one is team/other" in why
    (why,) = in_job("one", "uid-2", lambda: catch_refusal(lambda: train_until(volume, 9, width=2)))
    assert "is of another model" in why

    def evaluate() -> tuple[int, dict[str, list[float]]]:
        job = pk.init(checkpoints=pk.Checkpoints(volume, read_only=True))
        model = nn.Linear(4, 1)
        step = job.restore(model=model)
        return step, {name: value.flatten().tolist() for name, value in model.state_dict().items()}

    ((step, values),) = in_job("evaluation", "uid-4", evaluate)
    assert step == 3
    assert set(values) == {"weight", "bias"}
    assert read_content(volume) == before, (
        "neither a job of another name, nor another model, nor an evaluation changed it"
    )

    def wait_until_taken(_: int) -> str:
        def adopt(rank: int, number: int) -> None:
            if rank == 0 and number == 5:
                CheckpointFolder(volume, 1, job=JobIdentity("team/other", "uid-3"), adopt="team/one").claim()

        with pytest.raises(RoundSupersededError) as over:
            train_until(volume, 20, after=adopt)
        return str(over.value)

    messages = run_ranks(wait_until_taken, RANKS, runtime=runtime, environment=build_job_environment("one", "uid-2"))
    for message in messages:
        assert "belongs to team/other (UID uid-3) by now: this round keeps no checkpoint, and ends" in message
    assert "team/other (UID uid-3)" in read_checkpoint_status(RuntimeFolder(runtime).checkpoints).error
    assert not list(volume.glob("step-*.partial-*")), "the job applied again has cleared what its run before left"
    adopted = CheckpointFolder(volume, 1, job=JobIdentity("team/other", "uid-3"))
    assert {manifest.job for manifest in adopted.list_published()} == {"team/one"}, "all is there to go on from"
