"""Runs ranks: `python -m bench.scripts.state.host MODULE`, in the virtual environment of the side.

Each line of its input names a function of MODULE, its arguments and a time-out. For each it forks the ranks, which have
torch imported by then; in a process group over gloo each calls the
function with its rank and the arguments. It answers with a line: what they gave
back, in rank order, or {"error": …}. A rank ends as one that is killed: nothing is closed, nobody is told.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed

from ..stragglers.host import wait_for
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
        order = json.loads(line)
        answers.write(json.dumps(perform(module, order["function"], order["arguments"], order["timeout"])) + "\n")
        answers.flush()


def perform(module: ModuleType, function: str, arguments: dict[str, Any], timeout: float) -> Any:
    """What each rank gave back, or an error."""
    folder = Path(tempfile.mkdtemp(prefix="bench-of-pacekeeper-"))
    paths = [folder / f"{rank}.json" for rank in range(RANKS)]
    children = [fork(module, function, arguments, rank, path) for rank, path in enumerate(paths)]
    try:
        wait_for(children, paths, timeout)
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)  # ended or not: a child that nobody has waited for keeps its id
            os.waitpid(pid, 0)
    answers = [json.loads(path.read_text()) for path in paths if path.exists()]
    shutil.rmtree(folder)
    errors = [answer["error"] for answer in answers if "error" in answer]
    if errors or len(answers) < RANKS:
        return {"error": errors[0] if errors else f"{RANKS - len(answers)} ranks gave nothing back in {timeout:.0f} s"}
    return [answer["value"] for answer in answers]


def fork(module: ModuleType, function: str, arguments: dict[str, Any], rank: int, path: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.distributed.init_process_group(
            "gloo", f"file://{path.parent}/store", rank=rank, world_size=RANKS, timeout=TIMEOUT
        )
        answer = {"value": getattr(module, function)(rank, **arguments)}
    except BaseException:
        answer = {"error": f"rank {rank}: {traceback.format_exc()}"}
    path.with_suffix(".new").write_text(json.dumps(answer))
    path.with_suffix(".new").rename(path)
    os._exit(0)


if __name__ == "__main__":
    main()
