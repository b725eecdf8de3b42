"""The Helm chart as tests render it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).resolve().parent.parent.parent
CHART = REPOSITORY / "charts/pacekeeper"
RELEASE = "pacekeeper"
SYSTEM = "pacekeeper-system"


def helm(*arguments: str) -> str:
    """Standard output of helm. subprocess.CalledProcessError with its messages if it fails."""
    command = [str(Path(sys.prefix, "bin", "helm")), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode != 0:
        error = subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
        error.add_note(done.stderr.strip())
        raise error
    return done.stdout


def helm_template(*arguments: str, chart: Path = CHART) -> list[dict[str, Any]]:
    """All objects that `helm install` would make, hooks included."""
    text = helm("template", RELEASE, str(chart), "--namespace", SYSTEM, *arguments)
    return [found for found in yaml.load_all(text, Loader=yaml.CSafeLoader) if found]
