"""Runs a function in ranks that share one GPU: fresh processes, each a worker with one rank, as in pods of their own.

Every worker finds the one GPU as its first (LOCAL_RANK 0). NCCL refuses two ranks of one host on one GPU: so each is
declared a host of its own (NCCL_HOSTID), and its bytes go through sockets, by NCCL's proxy threads, as they do
between machines without RDMA. Over gloo tensors of a GPU are staged through pinned memory.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pacekeeper.launcher.network.nccl_plugin import build_plugin_environment, find_usable_plugin
from pacekeeper.runtime_folder import RuntimeFolder
from pacekeeper_rank.record_ring import create_ring

from .machine import ON_GPU

PROJECT = Path(__file__).parents[3]
TIMEOUT_SECONDS = 240.0


def build_host_environment(rank: int) -> dict[str, str]:
    """The environment in which NCCL takes the rank for one on another host than all others."""
    sockets = {"NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}
    return {"NCCL_HOSTID": f"host-{rank}", **sockets}


def run_workers(
    function: str,
    ranks: int,
    *,
    watched: bool = True,
    environment: Mapping[str, str] | None = None,
    timeout: float = TIMEOUT_SECONDS,
    **arguments: Any,
) -> list[Any]:
    """What `function` ("module:name"), called with these arguments, returns in each rank; all of it JSON.

    watched: whether each has a ring, so that it records, and NCCL's plugin.
    Raises RuntimeError with the last lines of ranks that failed, or that did not end in time.
    """
    with tempfile.TemporaryDirectory(prefix="pacekeeper-gpu-") as path:
        folder = Path(path)
        job_variables = {"WORLD_SIZE": str(ranks), "MASTER_PORT": str(_find_free_port()), **(environment or {})}
        started = [_start_rank(function, rank, folder, watched, job_variables, arguments) for rank in range(ranks)]
        try:
            deadline = time.monotonic() + timeout
            for process in started:
                _wait_for_rank(process, deadline)
        finally:
            for process in started:
                process.kill()
                process.wait()
        answers = [_read_answer(folder, rank) for rank in range(ranks)]
        failed = [rank for rank, answer in enumerate(answers) if answer is None]
        if failed:
            logs = [f"rank {rank}: {(folder / f'log-{rank}').read_text()[-4000:]}" for rank in failed]
            raise RuntimeError(f"{function}: failed, or not done in {timeout:.0f} s\n" + "\n".join(logs))
        return [answer["value"] for answer in answers if answer is not None]


def _start_rank(
    function: str,
    rank: int,
    folder: Path,
    watched: bool,
    job_variables: Mapping[str, str],
    arguments: Mapping[str, Any],
) -> subprocess.Popen[bytes]:
    runtime = RuntimeFolder(folder / f"worker-{rank}").create()
    variables = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PACEKEEPER_ROUND": "1",
        **build_host_environment(rank),
        **job_variables,
    }
    if watched:
        create_ring(runtime.ring(0), rank, round_=1)
        variables["PACEKEEPER_RUNTIME"] = str(runtime.root)
        variables |= build_plugin_environment(variables, find_usable_plugin() if ON_GPU else None, runtime.transport(0))
    command = [
        sys.executable,
        "-m",
        __spec__.name,
        function,
        json.dumps(arguments),
        str(_get_answer_path(folder, rank)),
    ]
    with (folder / f"log-{rank}").open("wb") as log:
        return subprocess.Popen(command, cwd=PROJECT, env=variables, stdout=log, stderr=log)


def _wait_for_rank(process: subprocess.Popen[bytes], deadline: float) -> None:
    try:
        process.wait(timeout=max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return


def _get_answer_path(folder: Path, rank: int) -> Path:
    return folder / f"answer-{rank}.json"


def _read_answer(folder: Path, rank: int) -> dict[str, Any] | None:
    path = _get_answer_path(folder, rank)
    return json.loads(path.read_text()) if path.exists() else None


def _find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _run_function(function: str, arguments: str, answer: str) -> None:
    """In the rank."""
    module, name = function.split(":")
    try:
        value = getattr(importlib.import_module(module), name)(**json.loads(arguments))
        Path(answer).with_suffix(".new").write_text(json.dumps({"value": value}))
        Path(answer).with_suffix(".new").rename(answer)
        code = 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a rank that failed among peers would wait for them at its end


if __name__ == "__main__":
    _run_function(*sys.argv[1:])
