"""Runs a function in forked ranks with a gloo process group's environment and a ring each; no launcher."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import pickle
import select
import signal
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pacekeeper.runtime_folder import RuntimeFolder
from pacekeeper_rank.forking.warm_server import import_modules
from pacekeeper_rank.record_ring import create_ring

Result = TypeVar("Result")

RANKS_TIMEOUT_SECONDS = 300.0
"""It only bounds a failure."""
_rounds = itertools.count(1)


PREIMPORTS = (
    "torch",
    "torch.distributed",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.utils.data",
    "torch._dynamo",  # an optimizer's first zero_grad() imports it
    "pacekeeper.job",
)
"""What training scripts import, and what torch itself imports at first use. Imported before ranks are forked."""


def run_ranks(
    function: Callable[[int], Result],
    ranks: int,
    runtime: Path | None = None,
    environment: dict[str, str] | None = None,
    patience: float = RANKS_TIMEOUT_SECONDS,
) -> list[Result]:
    """What `function(rank)` returns in each of the ranks, which start together.

    runtime: the folder that all of them share; None: no launcher is there, and nothing is recorded.
    Raises AssertionError with the tracebacks of ranks that failed, or that did not end in time.
    """
    import_modules(PREIMPORTS)
    variables = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_find_free_port()),
        "PACEKEEPER_ROUND": str(next(_rounds)),
        **(environment or {}),
    }
    if runtime is not None:
        variables["PACEKEEPER_RUNTIME"] = str(RuntimeFolder(runtime).create().root)
    children = [_fork_rank(function, rank, variables, runtime) for rank in range(ranks)]
    deadline = time.monotonic() + patience
    answers = [_read_result(answer, deadline) for _, answer in children]
    for pid, _ in children:
        os.kill(pid, signal.SIGKILL)  # ended or hanging: a child that waitpid has not seen keeps its id
        os.waitpid(pid, 0)
    failures = [f"rank {rank}: {answer[1]}" for rank, answer in enumerate(answers) if not answer[0]]
    assert not failures, "\n".join(failures)
    return [answer[1] for answer in answers]


def import_before_forks(names: Sequence[str]) -> None:
    """Import these modules, where there are such, into this process, so that none of its forks has to.

    What is there then is exempt from garbage collection. A collection in a fork would otherwise write to each page that
    it shares with this process, and copy it: that takes longer than most ranks live.
    """
    import_modules(names)
    gc.freeze()


def forbid_unpickling() -> None:
    """From here on this process fails where it would unpickle the content of a peer or a file."""
    import torch.distributed.distributed_c10d as c10d

    pickle.loads = pickle.load = _refuse_unpickling
    pickle.Unpickler = c10d._unpickler = _refuse_unpickling  # type: ignore[misc,assignment]


def _refuse_unpickling(*_: Any, **__: Any) -> NoReturn:
    raise AssertionError("unpickles")


def _fork_rank(
    function: Callable[[int], Any], rank: int, variables: dict[str, str], runtime: Path | None
) -> tuple[int, int]:
    """Process id, and the end of a pipe from which its pickled (succeeded, result or traceback) comes."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid != 0:
        os.close(write_end)
        return pid, read_end
    try:
        os.environ.update(variables, RANK=str(rank), LOCAL_RANK=str(rank))
        if runtime is not None:
            create_ring(RuntimeFolder(runtime).ring(rank), rank, int(variables["PACEKEEPER_ROUND"]), owner=os.getpid())
        import torch

        torch.set_num_threads(1)
        answer: tuple[bool, Any] = (True, function(rank))
    except BaseException:
        answer = (False, traceback.format_exc())
    with os.fdopen(write_end, "wb") as pipe:
        pickle.dump(answer, pipe)
    for worker in multiprocessing.active_children():  # of a DataLoader: it would hold the pipe open for seconds
        worker.kill()
    os._exit(0)


def _read_result(pipe: int, deadline: float) -> tuple[bool, Any]:
    content = b""
    with os.fdopen(pipe, "rb", buffering=0) as file:
        while select.select([file], [], [], max(0.0, deadline - time.monotonic()))[0]:
            chunk = file.read(1 << 20)
            if not chunk:
                return pickle.loads(content) if content else (False, "ended without a result")
            content += chunk
    return False, "did not end in time"


def _find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))  # free on every address: a store listens on all
        port: int = probe.getsockname()[1]
        return port
