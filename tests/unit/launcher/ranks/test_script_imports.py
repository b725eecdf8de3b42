"""What a script needs of torch is read from its source."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pacekeeper.launcher.ranks.script_imports import ALWAYS_IMPORTED_MODULES, FIRST_STEP_MODULES, find_import_needs
from pacekeeper_rank.forking.late_variables import is_read_at_import


@pytest.mark.parametrize(
    ("source", "modules"),
    [
        ("import json, numpy", ()),
        ("import torch.nn as nn\nfrom torch.utils.data import DataLoader", ("torch.nn", "torch.utils.data")),
        ("def f():\n    from torch.distributed import fsdp", ("torch.distributed", "torch.distributed.fsdp")),
        ("import pacekeeper.auto", ("pacekeeper.observe.monitoring",)),
        ("import pacekeeper as pk", ("pacekeeper.job",)),
        ("from pacekeeper import Checkpoints", ("pacekeeper.job",)),
        ("from pacekeeper.integrations.lightning import LightningCallback", ("pacekeeper.observe.monitoring",)),
        ("from torch.utils.tensorboard import SummaryWriter", ("torch.utils",)),
        ("this is no Python", ()),
        ("from . import torch", ()),
    ],
)
def test_the_imports_of_a_script_are_listed(tmp_path: Path, source: str, modules: tuple[str, ...]) -> None:
    (tmp_path / "train.py").write_text(source)
    needs = find_import_needs(str(tmp_path / "train.py"), False, [])
    assert needs.modules == [name for name in modules if name != "torch.utils"]
    assert needs.initial_modules == (*ALWAYS_IMPORTED_MODULES, *needs.modules)
    assert needs.deferred_modules == FIRST_STEP_MODULES


def test_the_scripts_own_modules_are_read_too_and_foreign_ones_are_not(tmp_path: Path) -> None:
    for name, source in {
        "train.py": "import sys\nfrom model import net\nimport numpy, trees.one",
        "model/__init__.py": "from model.parts import *",
        "model/net.py": "import torch.nn, train",
        "model/parts.py": "import torch.fx",
        "trees/one.py": "import torch.jit",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(source)
    needs = find_import_needs(str(tmp_path / "train.py"), False, [])
    assert sorted(needs.modules) == ["torch.fx", "torch.jit", "torch.nn"]
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text("import model")
    (tmp_path / "package" / "job.py").write_text("import model, torch.onnx")
    assert sorted(find_import_needs("package", True, [str(tmp_path)]).modules) == ["torch.fx"]
    assert sorted(find_import_needs("package.job", True, ["/nowhere", str(tmp_path)]).modules) == [
        "torch.fx",
        "torch.onnx",
    ]
    assert find_import_needs("missing", True, [str(tmp_path)]).modules == []


BEFORE = "import os\n{}\nimport torch"


@pytest.mark.parametrize(
    ("source", "names"),
    [
        (BEFORE.format("os.environ['TORCH_LOGS'] = '+dynamo'"), ["TORCH_LOGS"]),
        (BEFORE.format("os.environ.setdefault('OMP_NUM_THREADS', '8')"), ["OMP_NUM_THREADS"]),
        (BEFORE.format("os.putenv('PYTORCH_JIT', '0')"), ["PYTORCH_JIT"]),
        (BEFORE.format("os.environ.update({'TORCHDYNAMO_DISABLE': '1', **other})"), ["TORCHDYNAMO_DISABLE"]),
        (BEFORE.format("os.environ.update(MKL_NUM_THREADS='1', OTHER='2')"), ["MKL_NUM_THREADS"]),
        (BEFORE.format("os.environ['NCCL_DEBUG'] = 'INFO'\nprint(os.environ['OMP_NUM_THREADS'])"), []),
        ("import os, torch\nos.environ['TORCH_LOGS'] = 'dynamo'", []),
        ("import os, numpy\nos.environ['TORCH_LOGS'] = 'dynamo'\nimport torch", ["TORCH_LOGS"]),
        ("def main():\n    os.environ['TORCH_LOGS'] = 'dynamo'\n    import torch", ["TORCH_LOGS"]),
        ("import settings\nimport torch", ["OMP_NUM_THREADS"]),
    ],
)
def test_ranks_import_torch_themselves_if_the_script_sets_what_torch_reads_at_import(
    tmp_path: Path, source: str, names: list[str]
) -> None:
    (tmp_path / "train.py").write_text(source)
    own = "import os\nos.environ['OMP_NUM_THREADS'] = '1'\ndef more():\n    os.environ['TORCH_LOGS'] = 'all'"
    (tmp_path / "settings.py").write_text(own)
    needs = find_import_needs(str(tmp_path / "train.py"), False, [])
    assert needs.early_variables == names
    assert bool(needs.initial_modules) is not bool(names)
    assert bool(needs.deferred_modules) is not bool(names)


def test_the_compilers_variables_are_late_once_it_is_imported() -> None:
    assert is_read_at_import("TORCHDYNAMO_DISABLE")
    assert not is_read_at_import("TORCHDYNAMO_DISABLE", {"torch": sys})
    assert is_read_at_import("TORCHDYNAMO_DISABLE", {"torch._dynamo": sys})
    assert not is_read_at_import("PATH")
