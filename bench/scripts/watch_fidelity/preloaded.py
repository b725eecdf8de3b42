"""Runs scripts in forks of an interpreter that has imported torch, which saves seconds of each run.

A fork runs the script as this interpreter's main program, and ends as an interpreter does. The watch gets into this
interpreter as into any other, before it imports torch.

Requests are lines of JSON on standard input: `arguments` of the script, `environments` of its ranks, and the `folder`
in which each rank's output is stored. The answer to each is one line: the ranks' exit codes; null: out of time.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import signal
import sys
import time
from typing import Any

TIMEOUT_SECONDS = 300.0
"""Seconds in which a rank must end."""


def main() -> dict[str, Any] | None:
    """Serve all requests. In a fork: return the rank's request."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        ranks = range(len(request["environments"]))
        pids = []
        for rank in ranks:
            pid = os.fork()
            if pid == 0:
                return {**request, "rank": rank}
            pids.append(pid)
        print(json.dumps([wait_for_exit(pid) for pid in pids]), file=answers, flush=True)
    return None


def wait_for_exit(pid: int) -> int | None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.WEXITSTATUS(status) if os.WIFEXITED(status) else -os.WTERMSIG(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def prepare_rank(rank: int, folder: str, environment: dict[str, str]) -> None:
    for target, name in ((0, os.devnull), (1, f"{folder}/{rank}.out"), (2, f"{folder}/{rank}.err")):
        file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, target)
        os.close(file)
    os.environ.update(environment)


for name in sys.argv[1:]:
    with contextlib.suppress(ImportError):  # not in this version
        importlib.import_module(name)
rank_request = main()
if rank_request is not None:
    rank = rank_request["rank"]
    prepare_rank(rank, rank_request["folder"], rank_request["environments"][rank])
    sys.argv = rank_request["arguments"]
    runpy.run_path(sys.argv[0], run_name="__main__")
