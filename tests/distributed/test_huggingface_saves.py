"""Hugging Face's Trainer with FSDP2 resumes from the newest save that all ranks can read, to the bit."""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.tensor import DTensor

from pacekeeper.checkpointing.peer_saves import background_saves
from pacekeeper.checkpointing.peer_saves.rank_channel import RankChannel
from pacekeeper.checkpointing.peer_saves.save_group import open_save_group
from pacekeeper.checkpointing.peer_saves.save_hooks import derive_name
from pacekeeper.checkpointing.peer_saves.trainer_folders import (
    SHARDED_PARTS,
    Completeness,
    begin_checkpoint,
    get_completeness,
    is_stored,
    mark_complete,
)
from pacekeeper.checkpointing.peer_saves.trainer_saves import choose_checkpoint, wrap_trainer_saves
from testing.training.frameworks import run_example
from testing.training.ranks import import_before_forks, run_ranks
from tests.distributed.test_peer_saves import delete_memory, start

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")

SCRIPT = Path(__file__).parents[2] / "testing" / "scripts" / "sharded_trainer.py"
RANKS = 2
SAVED = 3
"""Step of the newest save when the ranks are killed. Its upload is blocked."""


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    import_before_forks(["transformers.trainer", "testing.scripts.sharded_trainer"])


def block_storage_of(name: str) -> None:
    """From here on, the storage of this process never answers for checkpoints of this name."""
    write_data = FileSystemWriter.write_data

    def write(self: Any, *arguments: Any) -> Any:
        if f"/{name}/" in str(self.checkpoint_id):
            threading.Event().wait()
        return write_data(self, *arguments)

    setattr(FileSystemWriter, "write_data", write)  # noqa: B010  # of another signature


def wait_for_uploads() -> None:
    for save in background_saves._pending:
        assert save.uploaded.result() is background_saves.UploadOutcome.STORED


def find_newest_in_memory() -> int:
    """The newest step of which the model is in memory; -1: there is none, or no memory."""
    group = open_save_group(derive_name(SHARDED_PARTS[0]), None)
    entries = () if group is None else group.memory.list_saves("").entries
    return max(
        (int(Path(entry.checkpoint_id).parent.name.removeprefix("checkpoint-")) for entry in entries), default=-1
    )


def train(
    folder: Path, resumed: Any = None, on_save: Callable[[int], None] = lambda _: None
) -> tuple[int, int, list[torch.Tensor]]:
    """The step that the training goes on from, the newest in memory then, and this rank's state at the end."""
    from transformers import TrainerCallback

    from testing.scripts.sharded_trainer import ShardedTrainer, make_trainer

    begun: list[int] = []

    class CheckingTrainer(ShardedTrainer):
        def _save_rng_state(self, output_dir: str) -> None:
            assert get_completeness(Path(output_dir)) is not Completeness.MARKED, "it is being written"
            super()._save_rng_state(output_dir)

    class Callback(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
            begun.extend((state.global_step, find_newest_in_memory()))

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
            on_save(state.global_step)

    trainer = make_trainer(folder / "output", CheckingTrainer, save_total_limit=1)
    trainer.add_callback(Callback())
    trainer.train(resume_from_checkpoint=resumed)
    model: Any = trainer.model
    optimizer: Any = trainer.optimizer
    tensors = [*model.parameters(), *(its["exp_avg_sq"] for its in optimizer.state.values())]
    return (
        begun[0],
        begun[1],
        [(its.to_local() if isinstance(its, DTensor) else its).detach().clone() for its in tensors],
    )


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each rank ends with in a training without any loss."""

    def rank_main(rank: int) -> Any:
        start(rank, folder, "ab")
        return train(folder)[2]

    folder = tmp_path_factory.mktemp("uninterrupted")
    return run_ranks(rank_main, RANKS)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a job of workers a and b that was killed after step 3 before its upload had ended, and a backup."""

    def rank_main(rank: int) -> None:
        start(rank, folder, "ab")
        wrap_trainer_saves()
        block_storage_of(f"checkpoint-{SAVED}")

        def on_save(step: int) -> None:
            if step < SAVED:
                wait_for_uploads()
                return
            assert all(save.counts.result() for save in background_saves._pending), "with the other worker"
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)

        train(folder, on_save=on_save)

    base = tmp_path_factory.mktemp("killed")
    folder = base / "job"
    folder.mkdir()
    with pytest.raises(AssertionError, match="ended without a result"):
        run_ranks(rank_main, RANKS)
    shutil.copytree(folder, base / "backup")
    return base


@dataclass(frozen=True)
class Loss:
    """What befalls the job after that."""

    happens: Callable[[Path], object]
    workers: str
    """Those of the next round; c and d have nothing in memory."""
    restored: int


def lose_optimizer(folder: Path) -> None:
    for worker in "ab":
        shutil.rmtree(folder / worker / "saves" / "optimizer")


LOSSES = {
    "a lost worker": Loss(lambda folder: delete_memory(folder, "b"), "ac", SAVED),
    "both workers": Loss(lambda _: None, "cd", SAVED - 1),
    "a save of the model without that of the optimizer": Loss(lose_optimizer, "ab", SAVED - 1),
    "a folder that not all ranks completed": Loss(
        lambda folder: begin_checkpoint(folder / "output" / f"checkpoint-{SAVED}"), "ba", SAVED - 1
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_newest_save_that_all_ranks_can_read_is_resumed_bit_for_bit(
    name: str, killed: Path, uninterrupted: list[Any]
) -> None:
    loss, folder = LOSSES[name], killed / "job"

    def rank_main(rank: int) -> tuple[int, int, list[torch.Tensor]]:
        start(rank, folder, loss.workers)
        wrap_trainer_saves()
        trained = train(folder, resumed=True)
        wait_for_uploads()
        return trained

    shutil.rmtree(folder)
    shutil.copytree(killed / "backup", folder)
    loss.happens(folder)
    resumed = run_ranks(rank_main, RANKS)
    for (restored, newest, end), expected in zip(resumed, uninterrupted, strict=True):
        assert restored == loss.restored
        assert newest <= restored, "outdated saves take no slot, and are not uploaded over those that follow"
        assert all(map(torch.equal, end, expected))
    assert is_stored(folder / "output" / "checkpoint-5")


def test_an_unchanged_script_under_the_launcher_resumes_from_a_save_that_is_not_in_the_storage(
    uninterrupted: list[Any], tmp_path: Path
) -> None:
    crashed = run_example(str(SCRIPT), tmp_path, crash="1 1 3", PACEKEEPER_PEER_SAVES="1")
    assert crashed.exit_code == 0, crashed.log
    assert [(tmp_path / f"resumed-{rank}").read_text() for rank in range(RANKS)] == ["2"] * RANKS
    for rank, expected in enumerate(uninterrupted):
        assert all(map(torch.equal, crashed.read_weights(rank).values(), expected))
    assert all(is_stored(tmp_path / "output" / f"checkpoint-{step}") for step in range(1, 6)), "before the ranks end"


def test_all_ranks_choose_what_each_of_them_can_read(tmp_path: Path) -> None:
    """Here, each sees another folder. One whose storage does not answer raises on all."""
    for rank in range(RANKS):
        for step in (10, 20):
            for part in SHARDED_PARTS:
                (tmp_path / str(rank) / f"checkpoint-{step}" / part).mkdir(parents=True)
                (tmp_path / str(rank) / f"checkpoint-{step}" / part / ".metadata").touch()
            mark_complete(tmp_path / str(rank) / f"checkpoint-{step}")
    begin_checkpoint(tmp_path / "1" / "checkpoint-20")

    def rank_main(rank: int) -> Any:
        dist.init_process_group("gloo")
        channel = RankChannel("chooses", range(RANKS))
        chosen = choose_checkpoint(channel, tmp_path / str(rank), True)
        if rank == 1:
            (tmp_path / "looped").symlink_to(tmp_path / "looped")
        with pytest.raises(OSError, match="symbolic links"):
            choose_checkpoint(channel, tmp_path / ("looped" if rank == 1 else "0"), True)
        return chosen

    assert run_ranks(rank_main, RANKS) == [f"{tmp_path}/{rank}/checkpoint-10" for rank in range(RANKS)]


@pytest.mark.parametrize("launched", [True, False])
def test_trainer_is_wrapped_when_it_is_imported_and_only_under_the_launcher(launched: bool, tmp_path: Path) -> None:
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "__init__.py").touch()
    methods = "def train(): ...\n    def _save_checkpoint(): ...\n    def _get_output_dir(): ..."
    (tmp_path / "transformers" / "trainer.py").write_text(f"class Trainer:\n    {methods}\n")

    def rank_main(_: int) -> list[bool]:
        for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
            del sys.modules[name]
        sys.path.insert(0, str(tmp_path))
        os.environ["PACEKEEPER_PEER_SAVES"] = "1"
        import pacekeeper.auto  # noqa: F401

        trainer: Any = importlib.import_module("transformers.trainer").Trainer
        return [hasattr(method, "__wrapped__") for method in (trainer.train, trainer._save_checkpoint)]

    assert run_ranks(rank_main, 1, runtime=tmp_path if launched else None) == [[launched] * 2]
