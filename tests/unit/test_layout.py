"""Rules of the layout and of imports."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("source_root", ["analysis", "operator", "trainer"])
def test_source_roots_hold_packages_only(source_root: str) -> None:
    """A module operator/__init__.py would hide the standard library's `operator` from every `python -m` of the root."""
    assert not list((ROOT / source_root).glob("*.py"))


def test_launcher_sidecar_and_operator_start_without_torch() -> None:
    """torch costs 300 MB and two seconds, which none of them can afford."""
    modules = "pacekeeper, pacekeeper.launcher.command, pacekeeper.sidecar.__main__, pacekeeper_analysis"
    modules += ", pacekeeper.checkpointing.server.__main__"
    program = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd="/", check=False, timeout=600).returncode == 0


def test_every_decision_record_is_numbered_once() -> None:
    numbers = [path.name[:4] for path in (ROOT / "docs/decisions").glob("*.md") if path.name != "README.md"]
    assert len(numbers) == len(set(numbers))
    assert all(number.isdigit() for number in numbers)


SEAM = {
    ("time", "time"),
    ("time", "time_ns"),
    ("time", "monotonic"),
    ("time", "sleep"),
    ("asyncio", "sleep"),
    ("asyncio", "create_task"),
    ("asyncio", "ensure_future"),
    ("datetime", "now"),
}
"""What only `runtime` may call: (module or class, name)."""
CHANCE = {"random", "secrets", "uuid"}


def _find_direct_calls(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if (node.value.id, node.attr) in SEAM:
                yield f"{path.name}:{node.lineno} {node.value.id}.{node.attr}"
        elif isinstance(node, ast.Import) and (found := CHANCE & {name.name for name in node.names}):
            yield f"{path.name}:{node.lineno} import {', '.join(found)}"
        elif isinstance(node, ast.ImportFrom) and node.module in CHANCE | {"time"}:
            yield f"{path.name}:{node.lineno} from {node.module}"


def test_the_operator_gets_time_chance_and_tasks_through_one_module() -> None:
    """The simulation replaces that module."""
    package = ROOT / "operator/pacekeeper_operator"
    exempt = {
        package / "async_runtime.py",
        package / "node_probe.py",
        package / "__main__.py",
    }  # of a pod, and of a process
    exempt |= set((package / "cli").glob("*.py"))  # a user's command
    found = [call for path in sorted(package.rglob("*.py")) if path not in exempt for call in _find_direct_calls(path)]
    assert not found


FOREIGN = {
    ("profiling/stack_sampler.py", "_current_frames"): "sys's, documented: the stacks of all threads",
    ("forking/process_exit.py", "_shutdown"): "threading's: what Python does before it ends",
    ("forking/process_exit.py", "_run_exitfuncs"): "atexit's: the same",
    ("forking/rank.py", "_run_module_as_main"): "runpy's: what `python -m` calls",
    ("boot/sitecustomize.py", ""): "importlib's, without the time that importing importlib.util takes",
    ("watching/guard.py", "_collections_abc"): "collections.abc's source, which each Python has loaded at its start",
    ("watching/import_hook.py", "_collections_abc"): "the same",
    ("watching/takeover.py", "_collections_abc"): "the same",
    ("watching/takeover.py", "_actions"): "argparse's: the options of torchrun's parser, which it lists nowhere else",
    ("watching/rank_stacks.py", "_current_frames"): "sys's, documented: the stacks of all threads",
    ("integrations/torchtitan.py", "_find_load_step"): "torchtitan's; test_torchtitan.py holds its sources to it",
    ("checkpointing/peer_saves/trainer_saves.py", "_save_checkpoint"): "Trainer's; test_huggingface_saves.py runs it",
    ("checkpointing/peer_saves/trainer_saves.py", "_get_output_dir"): "the same",
    ("torch_internals.py", ""): "the one place for torch's",
}
"""(File of the trainer, name, or all): why it may use a private name of another package."""


def _list_private_names(path: Path) -> Iterator[tuple[int, str]]:
    """Yield names with one leading underscore that a module imports, or reads from an object other than `self`."""
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.ImportFrom):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Attribute):
            names = [node.attr]
        for name in names:
            if name.startswith("_") and not name.startswith("__"):
                yield getattr(node, "lineno", 0), name


def _list_own_names(path: Path) -> Iterator[str]:
    """Yield names that a module defines or assigns to."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            yield node.attr
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def test_private_names_of_torch_are_used_in_one_module() -> None:
    """Each has a test there, in tests/distributed/test_torch_internals.py, before a newer torch is allowed."""
    packages = (ROOT / "trainer/pacekeeper", ROOT / "trainer/pacekeeper_rank")
    paths = sorted(path for package in packages for path in package.rglob("*.py"))
    own = {name for path in paths for name in _list_own_names(path)} | {
        "_exit",
        "_replace",
    }  # documented names of os and of named tuples
    found = []
    for path in paths:
        place = path.relative_to(ROOT / "trainer").as_posix().partition("/")[2]
        for line, name in _list_private_names(path):
            if name not in own and not {(place, name), (place, "")} & FOREIGN.keys():
                found.append(f"{place}:{line} {name}")
    assert not found


def _list_trainer_classes() -> Iterator[tuple[Path, ast.ClassDef]]:
    """Yield classes of the trainer and of the analysis package, except for its what-if engine."""
    trainer, analysis = ROOT / "trainer", ROOT / "analysis/pacekeeper_analysis"
    for path in sorted({*trainer.rglob("*.py"), *analysis.rglob("*.py")} - {*(analysis / "whatif").rglob("*.py")}):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                yield path, node


def test_one_name_has_one_meaning_in_the_trainer() -> None:
    places: dict[str, list[str]] = {}
    for path, found in _list_trainer_classes():
        if not found.name.startswith("_"):
            places.setdefault(found.name, []).append(path.relative_to(ROOT).as_posix())
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def test_no_class_of_the_trainer_takes_twelve_arguments() -> None:
    """A class that needs this many parts has more than one purpose. Records may have many fields."""
    for path, found in _list_trainer_classes():
        for method in found.body:
            if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                count = len(method.args.posonlyargs + method.args.args + method.args.kwonlyargs) - 1
                assert count < 12, f"{path}: {found.name}"
