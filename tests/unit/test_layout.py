"""The layout that keeps imports sane."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("source_root", ["analysis", "operator", "trainer"])
def test_source_roots_hold_packages_only(source_root: str) -> None:
    """A module operator/__init__.py would hide the standard library's `operator` from every `python -m` of the root."""
    assert not list((ROOT / source_root).glob("*.py"))


def test_the_sidecar_and_the_operator_start_without_torch() -> None:
    """torch costs 300 MB and two seconds, which neither has to give."""
    program = "import sys, pacekeeper, pacekeeper.sidecar, pacekeeper_analysis; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd="/", check=False, timeout=60).returncode == 0


def test_every_decision_record_is_numbered_once() -> None:
    numbers = [path.name[:4] for path in (ROOT / "docs/decisions").glob("*.md")]
    assert len(numbers) == len(set(numbers))
    assert all(number.isdigit() for number in numbers)
