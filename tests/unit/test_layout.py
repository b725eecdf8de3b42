"""The layout that keeps imports sane."""

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
    """torch costs 300 MB and two seconds, which none of them has to give."""
    modules = "pacekeeper, pacekeeper.launcher.command, pacekeeper.sidecar.__main__, pacekeeper_analysis"
    program = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd="/", check=False, timeout=60).returncode == 0


def test_every_decision_record_is_numbered_once() -> None:
    numbers = [path.name[:4] for path in (ROOT / "docs/decisions").glob("*.md")]
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


def _calls_past_the_seam(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if (node.value.id, node.attr) in SEAM:
                yield f"{path.name}:{node.lineno} {node.value.id}.{node.attr}"
        elif isinstance(node, ast.Import) and (found := CHANCE & {name.name for name in node.names}):
            yield f"{path.name}:{node.lineno} import {', '.join(found)}"
        elif isinstance(node, ast.ImportFrom) and node.module in CHANCE | {"time"}:
            yield f"{path.name}:{node.lineno} from {node.module}"


def test_time_chance_and_tasks_come_into_the_operator_through_one_seam() -> None:
    """So that all of it runs under a simulated one."""
    package = ROOT / "operator/pacekeeper_operator"
    exempt = {package / "runtime.py", package / "probe.py", package / "__main__.py"}  # a pod's, and a process' own
    found = [
        call for path in sorted(package.rglob("*.py")) if path not in exempt for call in _calls_past_the_seam(path)
    ]
    assert not found
