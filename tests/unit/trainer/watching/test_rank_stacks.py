"""The signal for a rank's stack must never end a rank: not at its exit, and not where nothing handles it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pacekeeper_rank.watching.process_files import STACK_SIGNAL, catches_stack_signal
from pacekeeper_rank.watching.process_monitor import SIGNAL_AFTER_SECONDS, ProcessMonitor
from pacekeeper_rank.watching.watch_folder import WatchFolder

REGISTER = """
import sys
from pathlib import Path
from pacekeeper_rank.watching.rank_stacks import register_stack_signal
from pacekeeper_rank.watching.watch_folder import WatchFolder
register_stack_signal(WatchFolder(Path(sys.argv[1])), 0)
"""
REGISTER_IN_TRAINING_JOB = """
import sys
from pacekeeper_rank.forking.rank import _write_stacks_on_signal
_write_stacks_on_signal(sys.argv[1] + "/stacks.txt")
"""
EXIT_AND_RAISE = f"""
import ctypes
libc = ctypes.CDLL(None)
libc.on_exit(libc["raise"], None)  # calls raise(exit code), after the interpreter has restored all signals
sys.exit({int(STACK_SIGNAL)})
"""
ECHO = "print('ready', flush=True); print(input(), flush=True)"
WATCH = """
import atexit, sys, threading
from pathlib import Path
from types import SimpleNamespace

def list_threads():
    print(sorted(each.name for each in threading.enumerate() if each.name.startswith("pacekeeper")))

atexit.register(list_threads)  # the first one runs last
ignore = lambda *_: None
for name in ("monitoring", "recorder", "recorder_factory"):  # which import torch
    stand_in = SimpleNamespace(start_monitoring=ignore, Recorder=None, open_recorder=ignore)
    sys.modules["pacekeeper_rank." + name] = stand_in
from pacekeeper_rank.watching.rank_process import RankIdentity, WatchedRank
from pacekeeper_rank.watching.watch_folder import WatchFolder
identity = RankIdentity(0, 1, 0, 1, 0, 0.0, "Pure", "", "", "", "")
recorder = SimpleNamespace(restart_clock=ignore, enter_phase=ignore)
WatchedRank(WatchFolder(Path(sys.argv[1])), recorder, identity).start()
assert "torch" not in sys.modules
list_threads()
"""


@pytest.fixture
def folder(tmp_path: Path) -> WatchFolder:
    folder = WatchFolder(tmp_path)
    folder.create()
    return folder


@pytest.mark.parametrize("register", [REGISTER, REGISTER_IN_TRAINING_JOB], ids=["watched", "TrainingJob"])
def test_a_stack_signal_after_the_interpreter_has_ended_does_not_end_the_process(
    register: str, folder: WatchFolder
) -> None:
    command = [sys.executable, "-c", register + EXIT_AND_RAISE, str(folder.root)]
    ended = subprocess.run(command, env=dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)), check=False)
    assert ended.returncode == int(STACK_SIGNAL), "negative: the signal has ended it"


@pytest.mark.parametrize("handles", [True, False])
def test_only_a_process_that_handles_the_stack_signal_gets_it(handles: bool, folder: WatchFolder) -> None:
    script = (REGISTER if handles else "") + ECHO
    with subprocess.Popen(
        [sys.executable, "-c", script, str(folder.root)],
        env=dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as rank:
        assert rank.stdin is not None
        assert rank.stdout is not None
        assert rank.stdout.readline() == "ready\n"
        assert catches_stack_signal(rank.pid) is handles
        folder.get_file("ranks", 0).write_text(json.dumps({"pid": rank.pid, "rank": 0}))
        (folder.root / "stack_request").write_text("why-1")
        monitor = ProcessMonitor(folder)
        for now in (0.0, SIGNAL_AFTER_SECONDS):
            monitor.tick(now)
        rank.stdin.write("alive\n")
        rank.stdin.flush()
        assert rank.stdout.readline() == "alive\n", "a pending signal would have ended it first"
        assert rank.wait(120) == 0
    assert (folder.stack_dump(0).exists() and "File" in folder.stack_dump(0).read_text()) is handles


def test_the_threads_of_a_rank_end_before_the_interpreter_does(folder: WatchFolder) -> None:
    """A thread that runs on may hold a lock that the interpreter needs at its end."""
    command = [sys.executable, "-c", WATCH, str(folder.root)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.stdout.splitlines() == ["['pacekeeper-watch']", "[]"], ended.stderr
