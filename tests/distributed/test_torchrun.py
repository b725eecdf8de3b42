"""torchrun's command lines, given to `pacekeeper run`. PyTorch's own tests of torchrun were the list to go by."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pacekeeper.launcher.command import main
from testing.training.launchers import fork_process, wait_until_true

SCRIPT = Path(__file__).resolve().parents[2] / "testing" / "scripts" / "launcher_environment.py"
OPTIONS = [
    *("--standalone", "--nproc_per_node=2", "--nnodes", "1", "--rdzv-id", "x", "--max-restarts=3", "--tee", "3"),
    *("--role", "trainer", "--monitor-interval=1", "--start-method=spawn", "--node-rank=0", "--redirect=1"),
]


def run_script(launcher: list[str], folder: Path) -> tuple[list[Any], dict[str, str], list[str]]:
    """What the script has written down in each rank, the log files' content, and the lines on the console."""
    folder.mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PACEKEEPER_")}
    options = [*OPTIONS, "--log-dir", str(folder / "logs")]
    command = [
        sys.executable,
        "-m",
        *launcher,
        *options,
        str(SCRIPT),
        str(folder),
        "--lr",
        "${local_rank}",
        "--nnodes",
        "7",
    ]
    ran = subprocess.run(command, env=environment, check=True, timeout=600, stdout=subprocess.PIPE, text=True)
    (run,) = (folder / "logs").iterdir()
    files = {str(path.relative_to(run)): path.read_text() for path in run.rglob("*.log")}
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)], files, ran.stdout.splitlines()


@pytest.mark.oldest_torch
def test_a_script_sees_the_same_as_under_torchrun(tmp_path: Path) -> None:
    """Its files and its output are the same, too."""
    ours, our_files, our_lines = run_script(["pacekeeper.cli", "run"], tmp_path / "ours")
    theirs, their_files, their_lines = run_script(["torch.distributed.run"], tmp_path / "theirs")
    for one, other in zip(ours, theirs, strict=True):
        other["arguments"][0] = one["arguments"][0]  # the folder
        assert one == other
    assert our_files.keys() == their_files.keys()
    for name in (name for name in their_files if name.endswith("stdout.log")):
        assert our_files[name] == their_files[name]
    our_lines, their_lines = ([line for line in lines if "[Gloo]" not in line] for lines in (our_lines, their_lines))
    assert sorted(our_lines) == sorted(their_lines) == ["[trainer0]:rank 0 is here", "[trainer1]:rank 1 is here"]


@dataclass
class Running:
    """A `pacekeeper run` with its output in one file."""

    pid: int
    log: Path
    over: bool = False

    def wait_for(self, *texts: str) -> None:
        wait_until_true(lambda: all(text in self.log.read_text() for text in texts), f"{texts} in {self.log}")

    def end(self) -> int:
        """The exit code."""

        def ended() -> tuple[int, int] | None:
            found = os.waitpid(self.pid, os.WNOHANG)
            return found if found[0] else None

        try:
            _, status = wait_until_true(ended, "the run ends")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log.read_text()}") from None
        self.over = True
        return os.waitstatus_to_exitcode(status)


@contextmanager
def start_run(tmp_path: Path, *arguments: str, **environment: str) -> Iterator[Running]:
    one = Running(fork_process(lambda: main(arguments), tmp_path / "log", environment), tmp_path / "log")
    try:
        yield one
    finally:
        if not one.over:
            os.kill(one.pid, signal.SIGKILL)
            os.waitpid(one.pid, 0)


PROGRAM = """
echo "out $RANK of $WORLD_SIZE: $ROLE_NAME $TORCHELASTIC_RUN_ID $1"
echo "err $RANK" >&2
[ "$RANK" = 1 ] && [ "$TORCHELASTIC_RESTART_COUNT" = 0 ] && exit 3
exit 0
"""


def test_a_program_runs_once_for_each_rank_and_again_after_a_failure(tmp_path: Path) -> None:
    """And the options of its output: files of each attempt, which streams, which ranks, with which prefix."""
    options = [
        *("--nnodes=1", "--redirects=0:3,1:2", "--tee", "1:1", "--local_ranks_filter", "0,1", "--role=trainer"),
        *("--duplicate-stdout-filters", "of 3,nothing", "--log-dir", str(tmp_path / "logs"), "--event-log-handler=x"),
    ]
    variables = {
        "PET_NPROC_PER_NODE": "3",
        "PET_RDZV_ID": "job7",
        "PET_NO_PYTHON": "1",
        "PET_MODULE": "0",
        "PET_MAX_RESTARTS": "1",
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[${role_name} rank${rank}] ",
    }
    with start_run(tmp_path, *options, "sh", "-c", PROGRAM, "sh", "<${local_rank}>", **variables) as run:
        assert run.end() == 0, run.log.read_text()
    log = run.log.read_text()
    (folder,) = (tmp_path / "logs").glob("job7_*")
    assert f"log files are in {folder}" in log
    files = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*.log")}
    outputs = [f"out {rank} of 3: trainer job7 <{rank}>\n" for rank in range(3)]
    expected = {
        "attempt_1/0/stdout.log": outputs[0],
        "attempt_1/0/stderr.log": "err 0\n",
        "attempt_1/1/stdout.log": outputs[1],
        "attempt_1/1/stderr.log": "err 1\n",
        "attempt_1/filtered_stdout.log": f"[trainer rank1] {outputs[1]}",
    }
    assert {name: texts for name, texts in files.items() if name.startswith("attempt_1")} == expected
    assert files["attempt_0/1/stderr.log"] == "err 1\n"
    assert log.count(f"[trainer rank1] {outputs[1]}") == 2, "in both attempts"
    assert not [text for text in ("out 0", "err 0", "out 2", "err 2") if text in log], "redirected, or left out"
    assert "rank 1 ended with code 3 in round 1 before its first step: err 1" in log, "its last lines are in its file"
    assert "from the environment: PET_NPROC_PER_NODE=3, " in log
    assert "--event-log-handler ignored: faults are reported to the operator" in log


TRAPS = """
trap 'echo rank $RANK got ALRM; exit 0' ALRM
echo rank $RANK is here
while :; do sleep 0.05; done
"""


def test_a_signal_is_forwarded_to_the_ranks_and_ends_the_run(tmp_path: Path) -> None:
    """A shell that runs the program does not keep the signal from it: all of the rank's processes get it."""
    command = ["--local=2", "--signals-to-handle=SIGTERM,SIGALRM", "--no-python", "sh", "-c", 'sh -c "$TRAPS"; true']
    with start_run(tmp_path, *command, TRAPS=TRAPS) as run:
        run.wait_for("rank 0 is here", "rank 1 is here")
        os.kill(run.pid, signal.SIGALRM)
        assert run.end() == 143
    log = run.log.read_text()
    assert "rank 0 got ALRM" in log
    assert "rank 1 got ALRM" in log
    assert "received SIGALRM" in log


INTERRUPTED = """
import os, signal, time
def leave(*_):
    print("rank 1 has its checkpoint", flush=True)
    raise SystemExit(143)
if os.environ["RANK"] == "1":
    signal.signal(signal.SIGTERM, leave)
print("rank", os.environ["RANK"], "is here", flush=True)
try:
    time.sleep(600)
except KeyboardInterrupt:
    print("rank 0 is interrupted", flush=True)
    raise
"""


def test_ctrl_c_reaches_the_script_as_it_expects_it_and_the_run_ends_with_130(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(INTERRUPTED)
    with start_run(tmp_path, "--local=2", str(tmp_path / "script.py")) as run:
        run.wait_for("rank 0 is here", "rank 1 is here")
        os.kill(run.pid, signal.SIGINT)
        assert run.end() == 130
    log = run.log.read_text()
    assert "rank 0 is interrupted" in log
    assert "rank 1 has its checkpoint" in log, "a script that handles SIGTERM receives it"


RECORDED = """
import os, sys
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    raise ValueError("no data at " + os.environ["MASTER_PORT"])
try:
    main()
except ValueError:
    print("leaked semaphores", file=sys.stderr)
    sys.exit(5)
"""


def test_the_error_file_of_record_explains_the_failure_and_is_copied_to_the_launchers_file(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(RECORDED)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    own = tmp_path / "termination-log"
    options = ["--nnodes=1", "--max-restarts=0", "--master-addr=localhost", f"--master-port={port}", "--run-path"]
    with start_run(tmp_path, *options, str(tmp_path / "script.py"), TORCHELASTIC_ERROR_FILE=str(own)) as run:
        assert run.end() == 1
    message = f"ValueError: no data at {port}"
    assert f"rank 0 ended with code 5 in round 1 before its first step: {message}" in run.log.read_text()
    assert json.loads(own.read_text())["message"]["message"] == message


MEETS = """
import os, sys
import torch.distributed as dist
again = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
how = "env://" if again else sys.argv[1]
dist.init_process_group("gloo", init_method=how, rank=int(os.environ["RANK"]), world_size=2)
dist.barrier()
if os.environ["RANK"] == "1" and not again:
    sys.exit(3)
dist.destroy_process_group()
print("rank", os.environ["RANK"], "has met the other at", os.environ["MASTER_PORT"], flush=True)
"""


def test_a_script_with_its_own_port_connects_to_its_peers_in_each_round(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(MEETS)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ["--nnodes=1", "--nproc-per-node=2", "--master-addr=localhost", f"--master-port={port}"]
    with start_run(tmp_path, *options, str(tmp_path / "script.py"), f"tcp://localhost:{port}") as run:
        assert run.end() == 0, run.log.read_text()
    log = run.log.read_text()
    assert f"rank 1 has met the other at {port}" in log
    assert "round 2 starts" in log
