"""The Helm chart as tests render it."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import yaml

from testcluster import programs

REPOSITORY = Path(__file__).resolve().parent.parent.parent
CHART = REPOSITORY / "charts/pacekeeper"
RELEASE = "pacekeeper"
SYSTEM = "pacekeeper-system"


def helm(*arguments: str, program: Path | None = None) -> str:
    """Standard output of Helm, the present one. subprocess.CalledProcessError with its messages if it fails."""
    command = [str(program or programs.helm()), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode != 0:
        error = subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
        error.add_note(done.stderr.strip())
        raise error
    return done.stdout


def helm_template(*arguments: str, chart: Path = CHART, program: Path | None = None) -> list[dict[str, Any]]:
    """All objects that `helm install` would make, hooks included."""
    text = helm("template", RELEASE, str(chart), "--namespace", SYSTEM, *arguments, program=program)
    return [found for found in yaml.load_all(text, Loader=yaml.CSafeLoader) if found]
