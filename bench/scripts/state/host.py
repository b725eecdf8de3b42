"""Runs ranks: `python -m bench.scripts.state.host MODULE`, in the virtual environment of the side.

Each line of its input names a function of MODULE, its arguments and a time-out. For each it forks the ranks, which have
torch imported by then; in a process group over gloo each calls the
function with its rank and the arguments. It answers with a line: what they gave
back, in rank order, or {"error": …}. A rank ends as one that is killed: nothing is closed, no peer is notified.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import shutil
import sys
import tempfile
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed

from ..stragglers.host import run_ranks
from .workload import RANKS

PREIMPORT = "torch._dynamo"
"""What an optimizer's first step imports."""
TIMEOUT = timedelta(seconds=120)
"""Of the ranks' collectives."""


def main() -> None:
    importlib.import_module(PREIMPORT)
    module = importlib.import_module(f"{__package__}.{sys.argv[1]}")
    gc.collect()
    gc.freeze()  # or each rank's first full collection would copy all pages of what is imported
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    for line in sys.stdin:
        request = json.loads(line)
        answers.write(
            json.dumps(call_in_ranks(module, request["function"], request["arguments"], request["timeout"])) + "\n"
        )
        answers.flush()


def call_in_ranks(module: ModuleType, function: str, arguments: dict[str, Any], timeout: float) -> Any:
    """What each rank gave back, or an error."""
    folder = Path(tempfile.mkdtemp(prefix="bench-of-pacekeeper-"))
    ranks = [partial(run_rank, module, function, arguments, rank, folder / "store") for rank in range(RANKS)]
    answers = run_ranks(ranks, folder, timeout)
    shutil.rmtree(folder)
    return answers if isinstance(answers, dict) else [answer["value"] for answer in answers]


def run_rank(module: ModuleType, function: str, arguments: dict[str, Any], rank: int, store: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=RANKS, timeout=TIMEOUT)
    return {"value": getattr(module, function)(rank, **arguments)}


if __name__ == "__main__":
    main()
