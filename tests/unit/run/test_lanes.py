"""The runner of parts, with real and tiny child processes."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.run.lanes import Runner, read_last_line
from tests.run.parts import ROOT, Part


class Trial:
    """A runner of fake parts in a folder, which stores what was reported."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.lines = folder, list[str]()
        self._readings: Iterator[float] = iter(())
        self._last = 0.0

    def run(self, *parts: Part, readings: tuple[float, ...] = (0.0,)) -> dict[str, tuple[int, float]]:
        self._readings = iter(readings)
        runner = Runner(parts, self.folder / "logs", self.lines.append, self._read_usage)
        return {result.part.name: (result.status, result.processor_seconds) for result in runner.run()}

    def read_log(self, name: str) -> str:
        return (self.folder / f"logs/{name}.log").read_text()

    def _read_usage(self) -> dict[str, float]:
        self._last = next(self._readings, self._last)
        return {"pacekeeper": self._last}


@pytest.fixture
def trial(tmp_path: Path) -> Trial:
    return Trial(tmp_path)


def build_shell_part(name: str, lane: str, script: str, idle: bool = False, more: str = "") -> Part:
    return Part(name, lane, 1, f"timeout 60 sh -c '{script}' {more}", idle)


def test_parts_of_a_lane_run_one_after_the_other(trial: Trial, tmp_path: Path) -> None:
    order = tmp_path / "order"
    script = "echo begin >> {0} && echo end >> {0}"
    results = trial.run(*(build_shell_part(name, "one", script.format(order)) for name in ("a", "b", "c")))
    assert list(results) == ["a", "b", "c"]
    assert order.read_text().split() == ["begin", "end"] * 3


def test_lanes_run_at_the_same_time(trial: Trial, tmp_path: Path) -> None:
    """Each part waits for the other, so that neither would end alone."""
    there, back = tmp_path / "there", tmp_path / "back"
    for path in (there, back):
        os.mkfifo(path)
    left = build_shell_part("left", "one", f"echo x > {there} && cat {back}")
    right = build_shell_part("right", "two", f"cat {there} && echo y > {back}")
    assert {status for status, _ in trial.run(left, right).values()} == {0}


def test_a_failure_does_not_keep_others_from_running(trial: Trial) -> None:
    results = trial.run(
        build_shell_part("bad", "one", "exit 3"),
        build_shell_part("next", "one", ":"),
        build_shell_part("other", "two", ":"),
    )
    assert {name: status for name, (status, _) in results.items()} == {"bad": 3, "next": 0, "other": 0}
    assert any("bad ends: FAILED (exit status 3)" in line for line in trial.lines)


def test_a_missing_program_is_reported_as_a_failure(trial: Trial) -> None:
    results = trial.run(Part("bad", "one", 1, "/no/such/program"), build_shell_part("next", "one", ":"))
    assert {name: status for name, (status, _) in results.items()} == {"bad": 127, "next": 0}
    assert "/no/such/program" in trial.read_log("bad")


def test_output_is_logged_and_printed_with_the_name_of_its_part(trial: Trial) -> None:
    trial.run(build_shell_part("a", "one", "echo out; echo err >&2"))
    assert trial.read_log("a") == "out\nerr\n"
    assert "a | out\na | err" in trial.lines


def test_an_idle_part_runs_at_idle_priority(trial: Trial) -> None:
    program = "import os; print(os.sched_getscheduler(0) == os.SCHED_IDLE or os.nice(0) == 19)"
    trial.run(Part("idle", "one", 1, f'{sys.executable} -c "{program}"', idle=True))
    assert trial.read_log("idle") == "True\n"


def test_processor_time_includes_children(trial: Trial) -> None:
    burn = "import time; [None for _ in iter(lambda: time.process_time() < 0.2, False)]"
    ((_, seconds),) = trial.run(Part("a", "one", 1, f"""sh -c '{sys.executable} -c "{burn}"; :'""")).values()
    assert seconds >= 0.2


def test_a_part_on_clusters_includes_their_processor_time(trial: Trial) -> None:
    readings = (500.0, 507.0)
    assert trial.run(build_shell_part("a", "one", ":", more="tests/cluster"), readings=readings)["a"][1] >= 7
    assert trial.run(build_shell_part("a", "one", ":"), readings=readings)["a"][1] < 7


def test_a_signal_ends_the_grandchildren_of_all_parts(tmp_path: Path) -> None:
    """Each grandchild holds the pipe open, and ignores the first signal."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    script = f'(trap "" INT; echo up; tail -f /dev/null) > {pipe} & wait'
    program = (
        "import pathlib, sys; from tests.run.__main__ import main; from tests.run.parts import Part;"
        "parts = [Part(lane, lane, 1, sys.argv[1]) for lane in ('a', 'b')];"
        "sys.exit(main([], parts, pathlib.Path(sys.argv[2])))"
    )
    command = [sys.executable, "-c", program, f"sh -c '{script}'", str(tmp_path)]
    runner = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    with pipe.open("rb", buffering=0) as reader:
        received = b""
        while received.count(b"up") < 2:
            assert select.select([reader], [], [], 60)[0]
            received += reader.read(100)
        runner.send_signal(signal.SIGTERM)
        output, _ = runner.communicate(timeout=300)
        assert select.select([reader], [], [], 60)[0]
        assert reader.read(100) == b""  # all processes that held the other end have exited
    assert runner.returncode == 128 + signal.SIGTERM
    assert output.splitlines()[-1] == "Stopped by SIGTERM."


@pytest.mark.parametrize(
    ("log", "last"),
    [("", "(no output yet)"), ("a\nb c  \n\n  \n", "b c"), ("tests/a.py .....", "tests/a.py .....")],
)
def test_the_last_line_of_a_log_is_found(tmp_path: Path, log: str, last: str) -> None:
    path = tmp_path / "log"
    path.write_text(log)
    assert read_last_line(path) == last
