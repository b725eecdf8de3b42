"""No process that a command starts outlives the command or its caller, even if they are interrupted or killed.

`run_guarded` starts the command below a guard: `python -m bench.scripts.guard SECONDS COMMAND …`, in a session of its
own. All that the command starts stays below the guard, also in a session of its own (PR_SET_CHILD_SUBREAPER); the
guard receives a signal when the process that waits for it is gone, by SIGKILL as well (PR_SET_PDEATHSIG). What is in a
cgroup of its own stays: the daemons of the test cluster, which is meant to stay.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

TIMED_OUT = 124
"""Exit status, as of timeout(1)."""
GRACE_SECONDS = 15.0
"""How long an interrupted command may take to clean up: network namespaces, folders."""

KILL_SECONDS = 10.0
"""A process that is not gone this long after the first SIGKILL hangs in the kernel."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def run_guarded(command: Sequence[str], seconds: float, on_line: Callable[[str], None], cwd: Path | None = None) -> int:
    """The command's exit status (TIMED_OUT after `seconds`), when it and all that it started are gone.

    on_line: called with each line of its standard output.
    """
    guard = [sys.executable, "-m", __spec__.name, str(os.getpid()), str(seconds), *command]
    previous_handler = signal.signal(signal.SIGTERM, _raise_keyboard_interrupt)
    process = subprocess.Popen(guard, cwd=cwd, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            on_line(line)
        return process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise
    finally:
        signal.signal(signal.SIGTERM, previous_handler)


def _raise_keyboard_interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def main(parent: int, seconds: float, command: Sequence[str]) -> int:
    """The guard itself."""
    _call_prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _call_prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored where a shell started us in the background, and inherited
    signal.signal(signal.SIGTERM, _raise_interrupted)
    if os.getppid() != parent:  # gone before the signal was set up
        return TIMED_OUT
    process: subprocess.Popen[bytes] | None = None
    try:
        process = subprocess.Popen(command)
        try:
            return _compute_exit_status(process.wait(timeout=seconds))
        except subprocess.TimeoutExpired:
            print(f"not done in {seconds:.0f} s: ended", file=sys.stderr, flush=True)
            return TIMED_OUT
    except _Interrupted:
        return 128 + signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if process is not None:
            _interrupt_and_wait(process)
        killed = kill_descendants()
        if killed:
            print(f"ended {killed} processes that were left", file=sys.stderr, flush=True)


class _Interrupted(BaseException):
    """This process received a signal to end, or its caller is gone."""


def _raise_interrupted(_: int, __: FrameType | None) -> NoReturn:
    raise _Interrupted


def _interrupt_and_wait(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=GRACE_SECONDS)


def kill_descendants() -> int:
    """Kills all that this process has started, and what they have: how many there were. It must be their subreaper.

    Until none is left: what is killed last may have started another one before.
    """
    killed: set[int] = set()
    deadline = math.inf
    while pids := list_descendants(os.getpid()):
        running = {pid for pid in pids if _read_state(pid) not in ("Z", "")}
        for pid in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed |= running
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        # The time begins after the first kill: on a busy machine, listing the processes alone may take longer.
        now = time.monotonic()
        if now > deadline:
            break
        deadline = min(deadline, now + KILL_SECONDS)
        time.sleep(0.01)
    return len(killed)


def list_descendants(root: int) -> set[int]:
    """Process ids of the children of `root`, of their children, and so on, in its own cgroup."""
    cgroup = _read_proc_file(root, "cgroup")
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*"):
        pid = int(path.name)
        status, process_cgroup = _read_proc_file(pid, "stat").rpartition(")")[2].split(), _read_proc_file(pid, "cgroup")
        if status and (status[0] == "Z" or process_cgroup == cgroup):  # a dead one is in no cgroup of its own any more
            children.setdefault(int(status[1]), []).append(pid)
    pids: set[int] = set()
    queue = [root]
    while queue:
        child_pids = children.get(queue.pop(), [])
        pids.update(child_pids)
        queue += child_pids
    return pids


def _read_state(pid: int) -> str:
    """Its letter; "Z": it has ended, and its parent has not waited for it."""
    return _read_proc_file(pid, "stat").rpartition(")")[2].strip()[:1]


def _read_proc_file(pid: int, name: str) -> str:
    """Of /proc; nothing where the process has just gone."""
    try:
        return Path("/proc", str(pid), name).read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _call_prctl(option: int, value: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _compute_exit_status(returncode: int) -> int:
    """As a shell returns it."""
    return returncode if returncode >= 0 else 128 - returncode


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
