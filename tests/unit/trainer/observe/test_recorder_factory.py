"""Which process may act as a rank: the one that the launcher forked, and none that it starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pacekeeper.environment import Environment
from pacekeeper.observe.monitoring import open_rank_recorder
from pacekeeper.observe.ring_reader import RingReader
from pacekeeper.runtime_folder import RuntimeFolder
from pacekeeper_rank.record_ring import FIRST_PROCESS_OWNER, create_ring, may_take_ring
from pacekeeper_rank.recorder import NoRing

TAKES_PART = """
from pacekeeper.environment import Environment
print("takes part" if Environment.read().runtime is not None else "is left out")
"""


@pytest.fixture
def runtime(tmp_path: Path) -> RuntimeFolder:
    """With the communicators of a rank, which is this process."""
    runtime = RuntimeFolder(tmp_path).create()
    create_ring(runtime.ring(0), 0, 1, capacity=64, owner=os.getpid())
    runtime.communicators_file(0).write_text("{}")
    return runtime


def test_the_process_that_the_launcher_forked_takes_the_ring(runtime: RuntimeFolder) -> None:
    recorder = open_rank_recorder(Environment.read({"PACEKEEPER_RUNTIME": str(runtime.root)}))
    assert not isinstance(recorder.ring, NoRing)
    assert RingReader(runtime.ring(0)).state()["pid"] == os.getpid()
    assert not runtime.communicators_file(0).exists(), "they were of the round before"


def test_a_child_that_inherits_the_environment_does_not_use_the_ranks_files(runtime: RuntimeFolder) -> None:
    """A spawned DataLoader's worker imports the script, and with it `pacekeeper.auto`."""
    variables = {"PACEKEEPER_RUNTIME": str(runtime.root)}
    pid = os.fork()
    if pid == 0:
        recorder = open_rank_recorder(Environment.read(variables))
        os._exit(0 if isinstance(recorder.ring, NoRing) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert RingReader(runtime.ring(0)).state()["pid"] == 0
    assert runtime.communicators_file(0).exists()


def test_a_program_executed_by_the_rank_is_the_rank_and_its_children_are_not(runtime: RuntimeFolder) -> None:
    """`exec` keeps the process id."""
    environment = {**os.environ, "PACEKEEPER_RUNTIME": str(runtime.root), "TAKES_PART": TAKES_PART}
    take_ring = "import os, sys; from pathlib import Path; from pacekeeper_rank.record_ring import create_ring"
    become_rank = f"{take_ring}; create_ring(Path({str(runtime.ring(0))!r}), 0, 1, 64, owner=os.getpid())"
    program = f'{sys.executable} -c "$TAKES_PART"; exec {sys.executable} -c "$TAKES_PART"'
    code = f"{become_rank}; os.execv('/bin/sh', ['sh', '-c', {program!r}])"
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert run.stdout.splitlines() == ["is left out", "takes part"]


def test_any_process_may_record_without_a_ring_or_if_the_ring_names_no_owner(tmp_path: Path) -> None:
    runtime = RuntimeFolder(tmp_path).create()
    assert may_take_ring(runtime.ring(0))
    create_ring(runtime.ring(0), 0, 1, capacity=64)
    assert may_take_ring(runtime.ring(0))
    runtime.ring(0).write_bytes(b"short")
    assert may_take_ring(runtime.ring(0))


def test_the_ring_of_a_program_rank_belongs_to_the_first_process_that_takes_it(
    runtime: RuntimeFolder,
) -> None:
    """A shell script starts the Python that trains, and a child of that Python is not the rank."""
    create_ring(runtime.ring(0), 0, 1, capacity=64, owner=FIRST_PROCESS_OWNER)
    variables = {"PACEKEEPER_RUNTIME": str(runtime.root)}
    pid = os.fork()
    if pid == 0:
        recorder = open_rank_recorder(Environment.read(variables))
        again = Environment.read(variables).runtime
        os._exit(0 if not isinstance(recorder.ring, NoRing) and again is not None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert RingReader(runtime.ring(0)).state()["pid"] == pid
    assert Environment.read(variables).runtime is None
