"""One command line, given to torchrun and to `pacekeeper run`: the script sees the same."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.run

from pacekeeper import cli
from tests.support.launchers import fork

SCRIPT = Path(__file__).resolve().parents[1] / "support" / "scripts" / "what_it_sees.py"
OPTIONS = ["--standalone", "--nproc_per_node=2", "--nnodes", "1", "--rdzv-id", "x", "--max-restarts=3", "--tee", "3"]


def seen(main: Callable[[list[str]], object], folder: Path) -> list[Any]:
    """By both ranks of a launcher, which is forked from this process: it need not import torch."""
    folder.mkdir()
    command = [*OPTIONS, str(SCRIPT), str(folder), "--lr", "1", "--nnodes", "7"]
    pid = fork(lambda: int(main(command) or 0), folder / "log", {})  # type: ignore[call-overload]  # None, or a number
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0, (folder / "log").read_text()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.oldest_torch
def test_a_script_sees_the_same_as_under_torchrun(tmp_path: Path) -> None:
    ours = seen(lambda command: cli.main(["run", *command]), tmp_path / "ours")
    theirs = seen(torch.distributed.run.main, tmp_path / "theirs")
    for one, other in zip(ours, theirs, strict=True):
        other["arguments"][0] = one["arguments"][0]  # the folder
        assert one == other
