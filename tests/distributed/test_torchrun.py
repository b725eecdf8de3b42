"""One command line, given to torchrun and to `pacekeeper run`: the script sees the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "support" / "scripts" / "what_it_sees.py"
OPTIONS = ["--standalone", "--nproc_per_node=2", "--nnodes", "1", "--rdzv-id", "x", "--max-restarts=3", "--tee", "3"]


def seen(launcher: list[str], folder: Path) -> list[Any]:
    folder.mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PACEKEEPER_")}
    command = [sys.executable, "-m", *launcher, *OPTIONS, str(SCRIPT), str(folder), "--lr", "1", "--nnodes", "7"]
    subprocess.run(command, env=environment, check=True, timeout=180)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.oldest_torch
def test_a_script_sees_the_same_as_under_torchrun(tmp_path: Path) -> None:
    ours = seen(["pacekeeper.cli", "run"], tmp_path / "ours")
    theirs = seen(["torch.distributed.run"], tmp_path / "theirs")
    for one, other in zip(ours, theirs, strict=True):
        other["arguments"][0] = one["arguments"][0]  # the folder
        assert one == other
