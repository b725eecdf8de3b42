"""A rank's stack is requested by a signal, which ends a process that has no handler for it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pacekeeper.health.stack_file import StackFile
from pacekeeper.launcher.health.process_sampling import sample_process
from pacekeeper.launcher.ranks.processes import has_signal_handler
from pacekeeper_rank.watching.process_files import STACK_SIGNAL

A_RANK = """
import os, signal, sys, time
from pacekeeper_rank.forking.rank import STACK_SIGNAL, _write_stacks_on_signal
_write_stacks_on_signal(sys.argv[1])
print("listens", flush=True)
sys.stdin.readline()
{}
time.sleep(60)
"""


@pytest.mark.parametrize(
    "then", ["os.execv('/bin/sleep', ['sleep', '60'])", "signal.signal(STACK_SIGNAL, signal.SIG_DFL)"]
)
def test_a_process_without_the_handler_is_not_sent_the_signal(tmp_path: Path, then: str) -> None:
    command = [sys.executable, "-c", A_RANK.format(then), str(tmp_path / "0")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as rank:
        try:
            assert rank.stdin is not None
            assert rank.stdout is not None
            rank.stdout.readline()
            assert has_signal_handler(rank.pid, STACK_SIGNAL)
            rank.stdin.write(b"\n")
            rank.stdin.flush()
            deadline = time.monotonic() + 60
            while has_signal_handler(rank.pid, STACK_SIGNAL):
                assert time.monotonic() < deadline
            sample = asyncio.run(sample_process(rank.pid, StackFile(tmp_path / "0")))
            assert (sample.stack, rank.poll()) == ("", None)
        finally:
            rank.kill()
    assert not has_signal_handler(rank.pid, STACK_SIGNAL), "it is gone"
