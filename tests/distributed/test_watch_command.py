"""`pacekeeper watch` with real ranks over gloo, in an interpreter that has torch and not Pacekeeper."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pacekeeper_analysis.whatif.command import main as analyze

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "testing/training/watched/training.py"
PREFIX = "pacekeeper: "
PATIENCE_SECONDS = 120.0
"""It only bounds a failure."""
WATCH = f"""
import sys
sys.path[:0] = {[str(ROOT / name) for name in ("analysis", "operator", "trainer")]!r}
from pacekeeper.cli import main
sys.exit(main())
"""


def build_environment(**variables: str) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**environment, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **variables}


class Watched:
    """A running `pacekeeper watch`."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WATCH, "watch", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=build_environment(),
            start_new_session=True,
        )
        self.errors = ""

    def wait_for(self, *patterns: str) -> list[re.Match[str]]:
        """Wait until a line of Pacekeeper matches each pattern."""
        assert self.process.stderr is not None
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not all(matches := [re.search(pattern, self.errors) for pattern in patterns]):
            assert time.monotonic() < deadline, f"{patterns} are not in\n{self.errors}"
            if select.select([self.process.stderr], [], [], 1.0)[0]:
                content = os.read(self.process.stderr.fileno(), 1 << 16)
                assert content, f"{patterns} are not in\n{self.errors}"
                self.errors += content.decode()
        return [match for match in matches if match is not None]

    def finish(self) -> tuple[int, str]:
        """Wait for the end; return exit code and output."""
        output, errors = self.process.communicate(timeout=PATIENCE_SECONDS)
        self.errors += errors.decode()
        return self.process.returncode, output.decode()

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()


@pytest.fixture
def watch(bare_python: str) -> Iterator[Callable[..., Watched]]:
    running: list[Watched] = []

    def start(*arguments: str, options: tuple[str, ...] = ()) -> Watched:
        running.append(Watched(*options, "--", bare_python, *arguments))
        return running[-1]

    yield start
    for each in running:
        each.close()


def find_rank(rank: int, watched: Watched) -> int:
    """The process of a rank, by the runtime folder in its environment."""
    for folder in Path("/dev/shm").glob(f"pacekeeper-watch-{watched.process.pid}-*"):
        for path in (folder / "ranks").glob("*.json"):
            content = json.loads(path.read_text())
            if content["rank"] == rank:
                return int(content["pid"])
    raise AssertionError(f"rank {rank} has no process")


def test_slow_stopped_sleeping_and_killed_ranks_are_named(watch: Callable[..., Watched], tmp_path: Path) -> None:
    actions = ("slow:1:60-100:0.08", "SIGSTOP:2:120", "sleep:0:140", "SIGKILL:1:160")
    watched = watch(str(SCRIPT), "3", "200", *actions, options=("--output", str(tmp_path)))
    (start,) = watched.wait_for(r"watching 3 ranks: torch \S+, Python \S+\n")
    assert start
    watched.wait_for(r"SLOW: rank 1 takes \d+\.\d+ × .*S = \d+\.\d+")
    watched.wait_for(r"HANG: rank 2 holds all others up \(Stopped\)", r"rank 2: step 120, .*process state T")
    os.kill(find_rank(2, watched), signal.SIGCONT)
    watched.wait_for(r"training goes on after", r"HANG: rank 0 holds all others up \(NeverEntered\)")
    watched.wait_for(r"ranks 1-2 wait in ALL_REDUCE \d+ of ranks 0-2 for rank 0", r"rank 0: File .* in fetch_features")
    os.kill(find_rank(0, watched), signal.SIGUSR1)
    watched.wait_for(r"CRASH: rank 1 .* in round 1 after step 160")
    code, output = watched.finish()
    assert (code, output) == (3, "exit codes other -9 other\n"), watched.errors
    assert re.search(r"rank 1 was slow for \d+ s, with S up to", watched.errors), "the summary counts it"
    assert watched.errors.count("no progress for") >= 4, "two hangs, with their evidence, and in the summary"
    assert analyze([str(path) for path in sorted(tmp_path.glob("*.ring"))]) == 0
    assert "SLOW" in (tmp_path / "watch.json").read_text()


def test_output_and_exit_code_are_those_of_the_command_alone(watch: Callable[..., Watched], bare_python: str) -> None:
    """A dataset raises an exception; loader workers are forked, and collect garbage."""
    arguments = (str(SCRIPT), "1", "30", "fail:0:20")
    alone = subprocess.run(
        [bare_python, *arguments], env=build_environment(), capture_output=True, text=True, check=False
    )
    watched = watch(*arguments)
    code, output = watched.finish()
    lines = watched.errors.splitlines(keepends=True)
    own = [line for line in lines if line.startswith(PREFIX)]
    assert alone.returncode == 3, alone.stderr
    assert (code, output) == (alone.returncode, alone.stdout)
    assert [line for line in lines if line not in own] == alone.stderr.splitlines(keepends=True)
    assert any("1 of 1 ranks, 20 steps" in line for line in own), "no worker has overwritten the rank's steps"


def test_torchrun_reports_how_a_rank_ended(watch: Callable[..., Watched], tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    script = (
        "import os, sys, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo'); rank = dist.get_rank()\n"
        "dist.barrier()\n"
        "if rank == 1: os._exit(7)\n"
        "dist.barrier()\n"
    )
    path = tmp_path / "exit_seven.py"
    path.write_text(script)
    watched = watch(*launcher, str(path))
    assert watched.finish()[0] == 1
    assert "CRASH: rank 1 ended with code 7 in round 1 before its first step" in watched.errors


@pytest.mark.parametrize("flag", ["-I", "-E", "-S"])
def test_python_that_ignores_the_environment_runs_unwatched(watch: Callable[..., Watched], flag: str) -> None:
    watched = watch(flag, "-c", "print('runs')")
    assert watched.finish() == (0, "runs\n")
    assert "nothing was watched: no process became a rank. Possible reasons: python -I, -E, or -S" in watched.errors


def test_a_command_that_is_missing_ends_as_in_a_shell() -> None:
    watched = Watched("--", "/no/such/command")
    assert watched.finish() == (127, "")
    assert watched.errors == f"{PREFIX}/no/such/command: No such file or directory\n"
    watched.close()


def test_signals_reach_the_command_and_its_end_by_a_signal_is_passed_on(watch: Callable[..., Watched]) -> None:
    watched = watch("-c", "import sys, time; print('ready', file=sys.stderr, flush=True); time.sleep(100)")
    watched.wait_for("ready")
    watched.process.send_signal(signal.SIGTERM)
    code, _ = watched.finish()
    assert code == -signal.SIGTERM
    assert "the command was ended by signal 15" in watched.errors


def test_an_error_of_the_watch_does_not_end_the_command(bare_python: str) -> None:
    broken = WATCH.replace("sys.exit", "from pacekeeper.watch import container\ndel container.Heartbeat\nsys.exit")
    program = "import time; time.sleep(0.5); print('runs')"
    result = subprocess.run(
        [sys.executable, "-c", broken, "watch", "--", bare_python, "-c", program],
        env=build_environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert (result.returncode, result.stdout) == (0, "runs\n")
    assert result.stderr.count(f"{PREFIX}the command is not watched any more, and runs on: NameError") == 1
