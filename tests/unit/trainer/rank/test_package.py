"""What may be in a script's process: little, nothing that the script has not imported, and under any name."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import pacekeeper_rank

PACKAGE = Path(pacekeeper_rank.__file__).parent
MAX_MODULES = 40
OTHERS = {"sitecustomize.py": ("imp", "_pacekeeper_rank")}
"""Imports of files that run outside of the package: a module of Python 2, and the package under its other name."""
MONITOR = """
import json, sys
from pathlib import Path
import torch, torch.distributed
before = set(sys.modules)
from pacekeeper_rank.monitoring import record_optimizer_steps, start_monitoring
from pacekeeper_rank.record_ring import create_ring
from pacekeeper_rank.recorder_factory import open_recorder
ring = Path(sys.argv[1])
create_ring(ring, 0, 1, capacity=1024)
recorder = open_recorder(ring, ring.with_suffix(".json"))
start_monitoring(recorder)
record_optimizer_steps(recorder)
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def list_imports(path: Path) -> Iterator[tuple[int, str]]:
    """Yield level and name of each module that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.level, node.module or ""


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_imports_are_relative_or_of_the_standard_library_or_torch(path: Path) -> None:
    """So it works under another name, next to an installed Pacekeeper of another version."""
    for level, name in list_imports(path):
        assert level > 0 or name.partition(".")[0] in {*sys.stdlib_module_names, *OTHERS.get(path.name, ()), "torch"}
        depth = len(path.relative_to(PACKAGE).parts)
        assert level <= depth, f"{name} is outside of the package"


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_the_oldest_python_can_read_it(path: Path) -> None:
    ast.parse(path.read_text(), feature_version=(3, 9))


def test_monitoring_imports_nothing_that_the_script_has_not_imported(tmp_path: Path) -> None:
    command = [sys.executable, "-c", MONITOR, str(tmp_path / "ring")]
    added = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=300).stdout)
    others = [name for name in added if name.partition(".")[0] not in {"pacekeeper_rank", *sys.stdlib_module_names}]
    assert others == []
    assert len(added) <= MAX_MODULES
