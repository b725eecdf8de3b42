"""torchtitan trains on GPUs. Here its sources are held to what the integration relies on, and stand-ins for its loop
run; where all that it needs is installed, its own loop does, with everything around it left out.

`TORCHTITAN_SOURCES=…/torchtitan pytest tests/distributed/test_torchtitan.py` holds a checkout to the same.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from pacekeeper.integrations.torchtitan import run_training, wrap_trainer
from pacekeeper.observe.ring_reader import RingReader
from pacekeeper.runtime_folder import RuntimeFolder
from pacekeeper_analysis.errors import InputError
from pacekeeper_rank.records import Phase, RecordKind
from testing.training.ranks import run_ranks

SOURCES = "TORCHTITAN_SOURCES"
"""Names a checkout of torchtitan to be held to the same, as its newest: a folder with `torchtitan/` in it."""


def list_source_folders() -> list[Path]:
    """Folders of the package."""
    found = importlib.util.find_spec("torchtitan")
    installed = (found.submodule_search_locations or []) if found is not None else []
    checked_out = [Path(os.environ[SOURCES], "torchtitan")] if SOURCES in os.environ else []
    return [Path(folder) for folder in installed[:1]] + checked_out


@pytest.fixture(params=[*list_source_folders(), *([] if list_source_folders() else [None])], ids=str)
def titan(request: pytest.FixtureRequest) -> Path:
    if request.param is None:
        pytest.skip("torchtitan is not installed")
    folder: Path = request.param
    return folder


def parse_file(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def list_methods(path: Path, class_: str) -> dict[str, ast.FunctionDef]:
    (found,) = (node for node in parse_file(path).body if isinstance(node, ast.ClassDef) and node.name == class_)
    return {node.name: node for node in found.body if isinstance(node, ast.FunctionDef)}


def list_parameters(method: ast.FunctionDef) -> list[str]:
    return [argument.arg for argument in method.args.args]


def list_names(node: ast.AST) -> set[str]:
    """All that is called, read and assigned below, as it is written."""
    return {ast.unparse(child) for child in ast.walk(node) if isinstance(child, (ast.Attribute, ast.Call))}


def test_the_trainer_has_the_methods_that_are_overridden_and_calls_them_in_this_order(titan: Path) -> None:
    newer = titan / "trainer.py"
    trainer = list_methods(newer if newer.exists() else titan / "train.py", "Trainer")
    assert list_parameters(trainer["train"]) == list_parameters(trainer["should_continue_training"]) == ["self"]
    assert list_parameters(trainer["train_step"]) == ["self", "data_iterator"]
    assert list_parameters(trainer["close"]) == ["self"]
    text = ast.unparse(trainer["train"])
    config, validates = ("config", "config.validator") if newer.exists() else ("job_config", "job_config.validation")
    assert f"self.{config} = {config}" in ast.unparse(trainer["__init__"])
    calls = [
        "self.checkpointer.load(",
        "while self.should_continue_training()",
        "self.step += 1",
        "self.train_step(data_iterator)",
        f"self.checkpointer.save(self.step, last_step=self.step == {config}.training.steps)",
        f"self.{validates}.enable",
        "self.validator.should_validate(self.step)",
    ]
    places = [text.index(call) for call in calls]
    assert places == sorted(places)
    assert "self.metrics_processor.log(self.step, global_avg_loss," in ast.unparse(trainer["train_step"])


def test_main_builds_the_trainer_in_a_supported_manner(titan: Path) -> None:
    (main,) = (
        node
        for node in parse_file(titan / "train.py").body
        if isinstance(node, ast.FunctionDef) and node.name == "main"
    )
    text = ast.unparse(main)
    if len(main.args.args) == 1:
        assert "trainer = trainer_class(config)" in text
        return
    assert main.args.args == []
    steps = ["config_manager = ConfigManager()", "config = config_manager.parse_args()", "trainer = config.build()"]
    assert [text.index(step) for step in steps] == sorted(text.index(step) for step in steps)
    configurable = parse_file(titan / "config" / "configurable.py")
    (build,) = (node for node in ast.walk(configurable) if isinstance(node, ast.FunctionDef) and node.name == "build")
    assert "return self._owner(config=replace(self))" in ast.unparse(build)
    (made,) = (
        node
        for node in ast.walk(configurable)
        if isinstance(node, ast.FunctionDef) and node.name == "__init_subclass__"
    )
    assert "if 'Config' in cls.__dict__:" in ast.unparse(made), (
        "what is derived from a trainer does not change its Config"
    )


def test_the_checkpointer_saves_when_the_integration_expects_it(titan: Path) -> None:
    newer = titan / "components" / "checkpointer" / "dcp.py"
    path = newer if newer.exists() else titan / "components" / "checkpoint.py"
    checkpointer = list_methods(path, "CheckpointManager")
    due = ast.unparse(checkpointer["_should_save"])
    assert "if not self.enable or self.load_only:" in due
    assert "curr_step % self.interval == 0" in due
    assert "self.save_future" in list_names(checkpointer["_save" if newer.exists() else "save"])
    assert {"self.interval", "self.enable", "self.load_only"} <= list_names(checkpointer["__init__"])
    assert "'.metadata'" in ast.unparse(checkpointer["_find_load_step"])
    assert "self._find_load_step() if step == -1" in ast.unparse(checkpointer["load"])
    assert {"dcp.save", "dcp.async_save", "dcp.load"} <= list_names(parse_file(path))


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


class Loop:
    """torchtitan's loop without what it trains, as a stand-in: its own needs a GPU."""

    def __init__(self, config: Any) -> None:
        self.step = 2
        self.checkpointer: Any = Checkpointer()
        if not config.keeps:
            self.checkpointer = SimpleNamespace(enable=False, affinity=lambda: None, save=lambda *_, **__: None)
        self.metrics_processor = SimpleNamespace(log=lambda *_: None)
        self.validator = SimpleNamespace(should_validate=lambda step: step % 3 == 0)
        self.steps, self.at_step = config.training.steps, config.at_step

    def should_continue_training(self) -> bool:
        return bool(self.step < self.steps)

    def train_step(self, _: Any) -> None:
        self.at_step(self.step)
        self.metrics_processor.log(self.step, 0.5, 0.6, 1.0)

    def train(self) -> None:
        while self.should_continue_training():
            self.step += 1
            self.train_step(iter(()))
            self.checkpointer.save(self.step, last_step=self.step == self.steps)

    def close(self) -> None:
        WRITTEN.extend(getattr(self.checkpointer, "written", ()))


WRITTEN: list[int] = []


def build_older_main(config: SimpleNamespace) -> ModuleType:
    """`torchtitan.train` up to 0.2.2."""

    class Trainer(Loop):
        def __init__(self, job_config: Any) -> None:
            self.job_config = job_config
            super().__init__(job_config)

    def main(trainer_class: type[Trainer]) -> None:
        trainer_class(config).train()

    config.validation = SimpleNamespace(enable=True)
    return replace_module(Trainer=Trainer, main=main)


def build_newer_main(config: SimpleNamespace) -> ModuleType:
    """`torchtitan.train` since then."""

    class Trainer(Loop):
        def __init__(self, config: Any) -> None:
            self.config = config
            super().__init__(config)

    class Config(SimpleNamespace):
        _owner: Any = Trainer

        def build(self) -> Any:
            return self._owner(config=self)

    class ConfigManager:
        def parse_args(self) -> Config:
            return Config(**vars(config), validator=SimpleNamespace(enable=True))

    def main() -> None:
        ConfigManager().parse_args().build().train()

    return replace_module(ConfigManager=ConfigManager, main=main)


def replace_module(**names: Any) -> ModuleType:
    module = ModuleType("torchtitan.train")
    vars(module).update(names)
    package = ModuleType("torchtitan")
    vars(package).update(train=module)
    sys.modules.update({"torchtitan": package, "torchtitan.train": module})
    return module


@pytest.mark.parametrize("version", [build_older_main, build_newer_main])
@pytest.mark.parametrize("keeps", [True, False], ids=["checkpoints", "none"])
def test_its_loop_is_stopped_and_all_ranks_leave_after_a_checkpoint(
    version: Callable[[SimpleNamespace], ModuleType], keeps: bool, tmp_path: Path
) -> None:
    def rank_main(rank: int) -> tuple[object, list[int]]:
        dist.init_process_group("gloo")

        def at_step(step: int) -> None:
            if step == 6 and rank == 1:
                signal.raise_signal(signal.SIGTERM)

        version(SimpleNamespace(training=SimpleNamespace(steps=20), keeps=keeps, at_step=at_step))
        try:
            run_training()
        except SystemExit as left:
            return left.code, WRITTEN
        return None, WRITTEN

    assert run_ranks(rank_main, 2, runtime=tmp_path) == [(143, [4, 7] if keeps else [])] * 2
    run_loop_to_step_7(tmp_path, keeps)


def test_an_unsupported_main_is_refused_with_a_message() -> None:
    def rank_main(_: int) -> str:
        replace_module(main=lambda: None)
        with pytest.raises(InputError) as refused:
            run_training()
        return str(refused.value)

    (message,) = run_ranks(rank_main, 1)
    assert "starts in an unknown way" in message
    assert "-m torchtitan.train" in message


def build_torchtitan_loop(from_step: int, until: int, at_step: Callable[[int], None], keeps: bool = True) -> Any:
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
            self.metrics_processor = SimpleNamespace(log=lambda *_: None, affinity=lambda: None)
            self.validator = SimpleNamespace(should_validate=lambda step: step % 3 == 0, validate=lambda *_: None)
            self.gc_handler = SimpleNamespace(run=lambda _: None)
            self.dataloader = self.model_parts = ()

        def train_step(self, _: Any) -> None:
            at_step(self.step)
            self.metrics_processor.log(self.step, 0.5, 0.6, 1.0)

    return wrap_trainer(Bare)()


@pytest.mark.parametrize("keeps", [True, False], ids=["checkpoints", "none"])
def test_its_real_loop_is_stopped_if_its_requirements_are_installed(keeps: bool, tmp_path: Path) -> None:
    pytest.importorskip("torchtitan.train", exc_type=ImportError)

    def rank_main(rank: int) -> tuple[object, list[int]]:
        dist.init_process_group("gloo")

        def at_step(step: int) -> None:
            if step == 6 and rank == 1:
                signal.raise_signal(signal.SIGTERM)

        trainer = build_torchtitan_loop(2, 20, at_step, keeps)
        try:
            trainer.train()
        except SystemExit as left:
            return left.code, trainer.checkpointer.written
        return None, trainer.checkpointer.written

    assert run_ranks(rank_main, 2, runtime=tmp_path) == [(143, [4, 7] if keeps else [])] * 2
    run_loop_to_step_7(tmp_path, keeps)


def run_loop_to_step_7(folder: Path, keeps: bool) -> None:
    ring = RingReader(RuntimeFolder(folder).ring(0))
    records = ring.records()
    assert records[records["kind"] == RecordKind.STEP]["step"].tolist() == [3, 4, 5, 6, 7]
    phases = records[records["kind"] == RecordKind.PHASE]
    evaluated, checkpointed = [
        [int(one["step"]) - 1 for one in phases if one["phase"] == phase]
        for phase in (Phase.EVALUATE, Phase.CHECKPOINT)
    ]
    assert (evaluated, checkpointed) == ([3, 6], [4, 7] if keeps else [])
    state = ring.state()
    assert (state["checkpoint_step"], state["restored_step"], state["loss"]) == (7 if keeps else 2, 2, 0.5)
