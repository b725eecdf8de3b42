"""What the kernel reports of processes that stand still, each a real one."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pacekeeper.health.stack_file import StackFile
from pacekeeper.launcher.health.process_sampling import read_process_state, sample_process
from pacekeeper.launcher.health.wait_reasons import count_helper_ticks, list_descendants
from pacekeeper_analysis.protocol.reports import DEBUGGER_WAIT
from pacekeeper_rank.watching.process_files import STACK_SIGNAL

HEAD = f"""
import faulthandler, os, socket, subprocess, sys, threading, time
path = sys.argv[1]
with open(path, "w") as file:
    print(f"main thread 0x{{threading.main_thread().ident:016x}}", file=file)
faulthandler.register({int(STACK_SIGNAL)}, file=open(path, "a"), all_threads=True, chain=False)
lock, (near, far) = threading.Lock(), socket.socketpair()
lock.acquire()
def ready(): print("ready", flush=True)
"""
LOCK = "ready(); lock.acquire()"
IDLE_THREAD = "threading.Thread(target=threading.Event().wait, daemon=True).start();"


@contextmanager
def start_sleeping_process(folder: Path, code: str) -> Iterator[tuple[int, StackFile]]:
    """Start a process that runs `code`, and yield once it sleeps in it. It prints a line just before."""
    path = folder / "stack"
    command = [sys.executable, "-c", HEAD + code, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline()
            sleeps = Path(f"/proc/{process.pid}/stat")
            wait_until(lambda: sleeps.read_text().rpartition(")")[2].split()[0] == "S")
            yield process.pid, StackFile(path)
        finally:
            os.killpg(process.pid, 9)


def wait_until(met: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not met():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("ready(); time.sleep(60)", "a clock (sleep)"),
        ("ready(); near.recv(1)", "a socket"),
        ("read, write = os.pipe(); ready(); os.read(read, 1)", "a pipe"),
        ("os.mkfifo(path + '.fifo'); ready(); open(path + '.fifo')", "a file or device"),
        ("child = subprocess.Popen(['sleep', '60']); ready(); child.wait()", "a child process"),
        ("subprocess.Popen(['sleep', '60']);" + LOCK, "one of its threads or child processes"),
        ("threading.Thread(target=lambda: near.recv(1), daemon=True).start();" + LOCK, "its thread at"),
        ("ready(); sys.stdin = near.makefile(); breakpoint()", DEBUGGER_WAIT),
        (LOCK, ""),
        (IDLE_THREAD + LOCK, ""),
    ],
)
async def test_the_wait_reason_of_a_process_is_named(tmp_path: Path, code: str, expected: str) -> None:
    with start_sleeping_process(tmp_path, code) as (pid, file):
        waits_for = (await sample_process(pid, file)).waits_for
        assert expected in waits_for
        assert bool(expected) is bool(waits_for), waits_for


async def test_an_attached_debugger_is_detected(tmp_path: Path) -> None:
    attach, detach, libc = 16, 17, ctypes.CDLL(None, use_errno=True)
    with start_sleeping_process(tmp_path, LOCK) as (pid, file):
        assert libc.ptrace(attach, pid, 0, 0) == 0
        wait_until(lambda: read_process_state(pid)[0] == "t")
        sample = await sample_process(pid, file)
        libc.ptrace(detach, pid, 0, 0)
        assert (sample.process_state, sample.waits_for) == ("t", DEBUGGER_WAIT)
        wait_until(lambda: read_process_state(pid)[0] == "S")
        assert (await sample_process(pid, file)).waits_for == ""


def test_work_of_child_processes_counts_also_after_they_exit(tmp_path: Path) -> None:
    busy = "subprocess.Popen(['sh', '-c', 'while true; do /bin/true; done']); ready(); time.sleep(60)"
    with start_sleeping_process(tmp_path, busy) as (pid, _):
        before = count_helper_ticks(pid)
        assert list_descendants(pid)
        wait_until(lambda: count_helper_ticks(pid) > before + 2)


def test_work_of_other_threads_counts(tmp_path: Path) -> None:
    busy = "threading.Thread(target=lambda: [None for _ in iter(int, 1)], daemon=True).start(); ready(); time.sleep(60)"
    with start_sleeping_process(tmp_path, busy) as (pid, _):
        before = count_helper_ticks(pid)
        wait_until(lambda: count_helper_ticks(pid) > before + 2)


def test_a_missing_process_has_no_wait_reason() -> None:
    assert (list_descendants(2**22), count_helper_ticks(2**22)) == ([], 0)
