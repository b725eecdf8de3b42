"""torchtitan trains on GPUs. Here its sources are held to what the integration relies on; and where all that it needs
is installed, its own loop runs, with everything around the loop left out."""

from __future__ import annotations

import ast
import importlib.util
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from pacekeeper.integrations.torchtitan import watched
from pacekeeper.observe.ring import RingReader
from pacekeeper.runtime import Runtime
from pacekeeper_analysis.records import Kind, Phase
from tests.support.ranks import run_ranks

FOUND = importlib.util.find_spec("torchtitan")
pytestmark = pytest.mark.skipif(FOUND is None, reason="torchtitan is not installed")


def methods(module: str, class_: str) -> dict[str, ast.FunctionDef]:
    assert FOUND is not None
    assert FOUND.submodule_search_locations
    tree = ast.parse((Path(FOUND.submodule_search_locations[0]) / module).read_text())
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_)
    return {node.name: node for node in found.body if isinstance(node, ast.FunctionDef)}


def parameters(method: ast.FunctionDef) -> list[str]:
    return [argument.arg for argument in method.args.args]


def names(node: ast.AST) -> set[str]:
    """All that is called, read and assigned below, as it is written."""
    return {ast.unparse(child) for child in ast.walk(node) if isinstance(child, (ast.Attribute, ast.Call))}


def test_the_trainer_has_the_methods_that_are_overridden_and_calls_them_in_this_order() -> None:
    trainer = methods("train.py", "Trainer")
    assert parameters(trainer["train"]) == parameters(trainer["should_continue_training"]) == ["self"]
    assert parameters(trainer["train_step"]) == ["self", "data_iterator"]
    assert parameters(trainer["close"]) == ["self"]
    text = ast.unparse(trainer["train"])
    calls = [
        "self.checkpointer.load(",
        "while self.should_continue_training()",
        "self.step += 1",
        "self.train_step(data_iterator)",
        "self.checkpointer.save(self.step, last_step=self.step == job_config.training.steps)",
        "self.validator.should_validate(self.step)",
    ]
    places = [text.index(call) for call in calls]
    assert places == sorted(places)
    assert "self.metrics_processor.log(self.step, global_avg_loss," in ast.unparse(trainer["train_step"])


def test_the_checkpointer_saves_when_the_integration_takes_it_to() -> None:
    checkpointer = methods("components/checkpoint.py", "CheckpointManager")
    due = ast.unparse(checkpointer["_should_save"])
    assert "if not self.enable or self.load_only:" in due
    assert "curr_step % self.interval == 0" in due
    assert "self.save_future" in names(checkpointer["save"])
    assert "self.interval" in names(checkpointer["__init__"])
    assert "'.metadata'" in ast.unparse(checkpointer["_find_load_step"])


class Checkpointer:
    """Keeps the steps that it was to write."""

    interval, enable, load_only = 4, True, False

    def __init__(self) -> None:
        self.written: list[int] = []

    def load(self, step: int) -> None: ...

    def close(self) -> None: ...

    def save(self, step: int, last_step: bool) -> None:
        if self.enable and (last_step or step % self.interval == 0):
            self.written.append(step)


def loop_of_torchtitan(from_step: int, until: int, at_step: Callable[[int], None], keeps: bool = True) -> Any:
    """Its Trainer with nothing but its loop."""
    titan = pytest.importorskip("torchtitan.train", exc_type=ImportError)

    class Bare(titan.Trainer):  # type: ignore[misc,name-defined]  # imported where it is installed
        def __init__(self) -> None:
            self.step = from_step
            self.job_config = SimpleNamespace(
                checkpoint=SimpleNamespace(load_step=-1),
                training=SimpleNamespace(steps=until),
                validation=SimpleNamespace(enable=True),
                profiling=SimpleNamespace(enable_profiling=False, enable_memory_snapshot=False),
                job=SimpleNamespace(dump_folder=""),
                comm=SimpleNamespace(train_timeout_seconds=100),
            )
            self.checkpointer = Checkpointer()
            self.checkpointer.enable = keeps
            self.metrics_processor = SimpleNamespace(log=lambda *_: None, close=lambda: None)
            self.validator = SimpleNamespace(should_validate=lambda step: step % 3 == 0, validate=lambda *_: None)
            self.gc_handler = SimpleNamespace(run=lambda _: None)
            self.dataloader = self.model_parts = ()

        def train_step(self, _: Any) -> None:
            at_step(self.step)
            self.metrics_processor.log(self.step, 0.5, 0.6, 1.0)

    return watched(Bare)()


@pytest.mark.parametrize("keeps", [True, False], ids=["checkpoints", "none"])
def test_its_loop_is_told_and_all_ranks_leave_behind_a_checkpoint(keeps: bool, tmp_path: Path) -> None:
    pytest.importorskip("torchtitan.train", exc_type=ImportError)

    def rank_main(rank: int) -> tuple[object, list[int]]:
        dist.init_process_group("gloo")

        def at_step(step: int) -> None:
            if step == 6 and rank == 1:
                signal.raise_signal(signal.SIGTERM)

        trainer = loop_of_torchtitan(2, 20, at_step, keeps)
        try:
            trainer.train()
        except SystemExit as left:
            return left.code, trainer.checkpointer.written
        return None, trainer.checkpointer.written

    assert run_ranks(rank_main, 2, runtime=tmp_path) == [(143, [4, 7] if keeps else [])] * 2
    ring = RingReader(Runtime(tmp_path).ring(0))
    records = ring.records()
    assert records[records["kind"] == Kind.STEP]["step"].tolist() == [3, 4, 5, 6, 7]
    phases = records[records["kind"] == Kind.PHASE]
    evaluated, checkpointed = [
        [int(one["step"]) - 1 for one in phases if one["phase"] == phase]
        for phase in (Phase.EVALUATE, Phase.CHECKPOINT)
    ]
    assert (evaluated, checkpointed) == ([3, 6], [4, 7] if keeps else [])
    state = ring.state()
    assert (state["checkpoint_step"], state["restored_step"], state["loss"]) == (7 if keeps else 2, 2, 0.5)
