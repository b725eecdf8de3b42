"""The guard ends all processes that a bench has started; with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.scripts import guard

PROJECT = Path(__file__).parents[3]
FAMILY = """
import subprocess, sys, time
# A child in a session of its own, which starts one more, and tells both; then it ignores what can be ignored.
young = "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
child = f'''
import os, subprocess, sys, time
grandchild = subprocess.Popen([sys.executable, "-c", {young!r}], start_new_session=True)
print(os.getpid(), grandchild.pid, flush=True)
time.sleep(600)
'''
subprocess.Popen([sys.executable, "-c", child], start_new_session=True)
"""
STAYS, ENDS = "time.sleep(600)", "sys.stdin.readline()"


def build_family_program(last: str, seconds: float) -> str:
    """Return a program in which the guard runs a command with two generations of children."""
    command = [sys.executable, "-c", FAMILY + last]
    return f"""
import signal, sys
from bench.scripts.guard import run_guarded
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in the background
sys.exit(run_guarded({command!r}, {seconds}, lambda line: print(line, end="", flush=True)))
"""


class WaitingProcess:
    """A process that waits for a command below the guard."""

    def __init__(self, last: str, seconds: float = 600.0) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", build_family_program(last, seconds)],
            cwd=PROJECT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.pids = [int(pid) for pid in self.process.stdout.readline().split()]
        assert len(self.pids) == 2
        assert all(map(is_running, self.pids))

    def __enter__(self) -> WaitingProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()
        for pid in filter(is_running, self.pids):
            os.kill(pid, signal.SIGKILL)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(condition: Callable[[], bool], seconds: float = 300.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_to_the_waiting_process_ends_all_processes(number: signal.Signals) -> None:
    with WaitingProcess(STAYS) as waiting:
        waiting.process.send_signal(number)
        assert wait_until(lambda: not any(map(is_running, waiting.pids)))
        assert waiting.process.wait(timeout=300) != 0


def test_processes_that_a_command_leaves_behind_are_ended() -> None:
    with WaitingProcess(ENDS) as waiting:
        assert waiting.process.stdin is not None
        waiting.process.stdin.write("\n")
        waiting.process.stdin.flush()
        assert waiting.process.wait(timeout=300) == 0
        assert not any(map(is_running, waiting.pids))


def test_a_command_that_takes_too_long_is_ended() -> None:
    with WaitingProcess(STAYS, seconds=2.0) as waiting:
        assert waiting.process.wait(timeout=300) == guard.TIMED_OUT
        assert not any(map(is_running, waiting.pids))


def test_all_are_killed_where_listing_them_takes_longer_than_they_may_take_to_end() -> None:
    program = f"""
import os, subprocess, sys, time
from bench.scripts import guard
guard._call_prctl(guard._PR_SET_CHILD_SUBREAPER, 1)
family = subprocess.Popen([sys.executable, "-c", {FAMILY + STAYS!r}], stdout=subprocess.PIPE)
family.stdout.readline()  # all three are there
list_descendants = guard.list_descendants

def list_slowly(root):
    time.sleep(0.05)
    return list_descendants(root)

guard.KILL_SECONDS, guard.list_descendants = 0.01, list_slowly
print(guard.kill_descendants())
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=PROJECT, capture_output=True, text=True, timeout=300)
    assert done.stdout == "3\n", done.stderr


def test_an_interrupted_command_removes_its_files(tmp_path: Path) -> None:
    made = tmp_path / "made"
    command = f"""
import time
from pathlib import Path
try:
    Path({str(made)!r}).touch()
    time.sleep(600)
finally:
    Path({str(made)!r}).unlink()
"""
    program = (
        f"import sys\nfrom bench.scripts.guard import run_guarded\n"
        f"run_guarded([sys.executable, '-c', {command!r}], 60, print)"
    )
    waiting = subprocess.Popen([sys.executable, "-c", program], cwd=PROJECT, stderr=subprocess.DEVNULL)
    assert wait_until(made.exists)
    waiting.terminate()
    assert waiting.wait(timeout=300) != 0
    assert not made.exists()


@pytest.mark.parametrize(("code", "status"), [("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", 137), ("pass", 0)])
def test_status_and_output_are_the_commands_own(code: str, status: int) -> None:
    lines: list[str] = []
    command = [sys.executable, "-c", f"import os, sys; print('one'); print('two', flush=True); {code}"]
    assert guard.run_guarded(command, 60, lines.append, cwd=PROJECT) == status
    assert lines == ["one\n", "two\n"]
