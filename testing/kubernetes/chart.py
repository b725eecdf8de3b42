"""The Helm chart as tests render it."""

from __future__ import annotations

import pickle
import subprocess
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from testcluster import programs

REPOSITORY = Path(__file__).resolve().parents[2]
CHART = REPOSITORY / "charts/pacekeeper"
RELEASE = "pacekeeper"
SYSTEM = "pacekeeper-system"


def run_helm(*arguments: str, program: Path | None = None) -> str:
    """Standard output of Helm, the present one. subprocess.CalledProcessError with its messages if it fails."""
    command = [str(program or programs.find_helm()), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if result.returncode != 0:
        error = subprocess.CalledProcessError(result.returncode, command, result.stdout, result.stderr)
        error.add_note(result.stderr.strip())
        raise error
    return result.stdout


def render_chart(*arguments: str, chart: Path = CHART, program: Path | None = None) -> list[dict[str, Any]]:
    """Return all objects that `helm install` would create, including hooks; each caller gets a copy of its own.

    Helm renders the chart once per process and set of arguments, unless they name a file that a test wrote.
    """
    files = [Path(value) for option, value in pairwise(arguments) if option in ("--values", "--set-file")]
    is_fixed = chart == CHART and all(file.is_relative_to(CHART) for file in files)
    render = _render_pickled if is_fixed else _render_pickled.__wrapped__
    objects: list[dict[str, Any]] = pickle.loads(render(arguments, chart, program))
    return objects


@cache
def _render_pickled(arguments: tuple[str, ...], chart: Path, program: Path | None) -> bytes:
    """Return the objects, pickled: that copies them faster than YAML or `deepcopy` does."""
    text = run_helm("template", RELEASE, str(chart), "--namespace", SYSTEM, *arguments, program=program)
    return pickle.dumps([document for document in yaml.load_all(text, Loader=yaml.CSafeLoader) if document])
