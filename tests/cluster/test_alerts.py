"""The chart's alerts, as Prometheus evaluates them: when each fires, when it does not, and that it ends."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from testcluster.programs import promtool
from tests.support.chart import CHART

CASES = sorted(Path(__file__).with_name("alerts").glob("*.yaml"))


@pytest.fixture(scope="module")
def tool() -> Path:
    return promtool()


def test_the_rules_are_well_formed(tool: Path) -> None:
    checked(tool, "check", "rules", "--lint=all", "--lint-fatal", str(CHART / "files/alerts.yaml"))


@pytest.mark.parametrize("case", CASES, ids=lambda path: path.stem)
def test_it_fires_when_it_should_and_ends(tool: Path, case: Path) -> None:
    checked(tool, "test", "rules", str(case))


def checked(tool: Path, *arguments: str) -> None:
    done = subprocess.run([tool, *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
