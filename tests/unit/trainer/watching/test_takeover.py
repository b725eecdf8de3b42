"""The launcher in torchrun's place: which commands are replaced, and by what."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed.run as torchrun

from pacekeeper.watch.payload import build_payload, build_watched_environment
from pacekeeper_rank.watching import takeover
from pacekeeper_rank.watching.takeover import (
    LAUNCHER,
    find_script_arguments,
    find_torchrun_arguments,
    format_arguments,
)


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("python /usr/bin/torchrun --nproc-per-node=2 train.py --lr 1", "--nproc-per-node=2 train.py --lr 1"),
        ("python -m torch.distributed.run train.py", "train.py"),
        ("python -um torch.distributed.run -m train", "-m train"),
        ("python -u -X dev -W ignore -Werror -m torch.distributed.run train.py", "train.py"),
        ("python -m torch.distributed.launch --nproc_per_node=2 t.py", "--pass-local-rank --nproc_per_node=2 t.py"),
        ("python -m torch.distributed.launch --use-env train.py", "train.py"),
        ("python train.py torchrun", None),
        ("python -c pass torchrun", None),
        ("python -m torch.utils.collect_env", None),
        ("python -m", None),
        ("python", None),
        ("python -", None),
        ("python - torchrun", None),
        ("python -mtorch.distributed.run train.py", "train.py"),
    ],
)
def test_torchrun_is_recognized_by_its_command_line(command: str, arguments: str | None) -> None:
    expected = None if arguments is None else arguments.split()
    assert find_torchrun_arguments(command.split()) == expected


@pytest.mark.parametrize(
    ("command", "name", "arguments", "options"),
    [
        ("python train.py --lr 1", "train.py", "train.py --lr 1", ""),
        ("python /app/train.py", "train.py", "/app/train.py", ""),
        ("python src/train.py", "src/train.py", "src/train.py", ""),
        ("python3 -O -W ignore -uX dev ./train.py -m x", "train.py", "./train.py -m x", "-O -W ignore -uX dev"),
        ("python --check-hash-based-pycs never train.py", "train.py", "train.py", "--check-hash-based-pycs never"),
        ("python -OWignore -Om package.train -x", "package.train", "-m package.train -x", "-OWignore -O"),
        ("python -mtrain train.py", "train", "-m train train.py", ""),
        ("python /venv/bin/my-train", "my-train", "/venv/bin/my-train", ""),
        ("python other/train.py", "src/train.py", None, ""),
        ("python prepare.py train.py", "train.py", None, ""),
        ("python retrain.py", "train.py", None, ""),
        ("python -m package.prepare package.train", "package.train", None, ""),
        ("python -m pip install train.py", "train.py", None, ""),
        ("python -c pass train.py", "train.py", None, ""),
        ("python -W train.py prepare.py", "train.py", None, ""),
        ("python - train.py", "train.py", None, ""),
        ("python", "train.py", None, ""),
    ],
)
def test_the_script_is_recognized_by_its_name(command: str, name: str, arguments: str | None, options: str) -> None:
    expected = None if arguments is None else (arguments.split(), options.split())
    assert find_script_arguments(command.split(), name) == expected


@pytest.mark.parametrize(
    "line",
    [
        "train.py --a b",
        "--nproc-per-node=2 --nnodes=3 --node-rank=1 --master-port=29501 train.py -x",
        "--standalone --max-restarts=3 -m package.train",
        "--no-python --tee=3 --rdzv-conf=timeout=5 ./run.sh --help",
    ],
)
def test_arguments_of_a_call_are_written_as_a_command_line_that_means_the_same(line: str) -> None:
    parsed = torchrun.parse_args(line.split())
    assert torchrun.parse_args(format_arguments(torchrun, parsed)) == parsed


LAUNCHER_SCRIPT = """#!/bin/sh
echo "launcher: $*"
"""
TORCHRUN_MODULE = """
import argparse, sys
def get_args_parser():
    parser = argparse.ArgumentParser()
    parser.add_argument("--nproc-per-node")
    parser.add_argument("training_script")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER)
    return parser
def run(args):
    print("torchrun:", args.training_script)
if __name__ == "__main__":
    run(get_args_parser().parse_args())
"""
"""What of torch.distributed.run matters here: importing torch takes seconds."""
ACCELERATE_SCRIPT = """
import sys
import torch.distributed.run as torchrun
torchrun.run(torchrun.get_args_parser().parse_args(sys.argv[1:]))
"""
"""What accelerate does."""
ARGUMENTS = ["--nproc-per-node=2", "train.py", "--x"]


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packages")
    (folder / "torch" / "distributed").mkdir(parents=True)
    for name in ("torch/__init__.py", "torch/distributed/__init__.py"):
        (folder / name).touch()
    (folder / "torch" / "distributed" / "run.py").write_text(TORCHRUN_MODULE)
    return folder


@pytest.fixture(scope="module")
def payload(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A payload whose launcher prints its arguments."""
    folder = tmp_path_factory.mktemp("payload")
    build_payload(folder)
    launcher = folder / LAUNCHER
    launcher.parent.mkdir(parents=True)
    launcher.write_text(LAUNCHER_SCRIPT)
    launcher.chmod(0o755)
    (folder / "version").write_text("9.9.9\n")  # another one than that of this environment
    return folder


def run_python(payload: Path, packages: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    given = {**os.environ, "PACEKEEPER_PAYLOAD": str(payload), "PYTHONPATH": str(packages), **variables}
    environment = build_watched_environment(given, payload)
    command = (sys.executable, *command, *ARGUMENTS)
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("command", [["-m", "torch.distributed.run"], ["-c", ACCELERATE_SCRIPT]])
def test_a_process_becomes_the_launcher(payload: Path, packages: Path, command: list[str]) -> None:
    result = run_python(payload, packages, *command)
    assert result.stdout == f"launcher: run --python {sys.executable} {' '.join(ARGUMENTS)}\n", result.stderr
    assert result.stderr == ""


@pytest.mark.parametrize("command", [["-m", "torch.distributed.run"], ["-c", ACCELERATE_SCRIPT]])
def test_what_a_rank_starts_is_not_replaced(payload: Path, packages: Path, command: list[str]) -> None:
    result = run_python(payload, packages, *command, PACEKEEPER_ROUND="1")
    assert (result.stdout, result.stderr) == ("torchrun: train.py\n", "")


SHELL_SCRIPT = """
echo 'import sys; print(sys.argv[0], flush=True)' | tee prepare.py > train.py
python prepare.py && python -c 'print("code", flush=True)' train.py
python -u -O train.py --lr 1
python train.py
PACEKEEPER_ROUND=1 python train.py
"""


def test_one_process_of_the_named_script_becomes_the_launcher(payload: Path, tmp_path: Path) -> None:
    """What the shell starts before and after it, and a rank's own process of the script, run as they are."""
    variables = {"PACEKEEPER_LAUNCH_SCRIPT": "train.py", "PACEKEEPER_RUNTIME": str(tmp_path)}
    python = Path(sys.executable)
    environment = {**os.environ, **variables, "PATH": f"{python.parent}:{os.environ['PATH']}"}
    outputs = []
    for extra in ({}, {"PACEKEEPER_PAYLOAD": str(payload)}):
        result = subprocess.run(
            ["sh", "-c", SHELL_SCRIPT],
            cwd=tmp_path,
            env=build_watched_environment({**environment, **extra}, payload),
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        outputs.append(result.stdout.splitlines())
    alone, taken_over = outputs
    assert alone == ["prepare.py", "code", "train.py", "train.py", "train.py"]
    assert taken_over[2] == f"launcher: run --python {python} --python-option=-O train.py --lr 1"
    assert taken_over[:2] + taken_over[3:] == alone[:2] + alone[3:]
    assert "this process of PACEKEEPER_LAUNCH_SCRIPT runs as it is: the launcher has replaced" in result.stderr


def test_an_image_with_the_same_version_uses_its_own_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executed: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _, command: executed.append(command))
    for version, own in (("0.1.7", True), ("0.2.0", False), ("9.9.9", False)):
        (tmp_path / "version").write_text(f"{version}\n")
        for options in ([], ["-u"], ["-O"]):
            takeover.become_launcher(str(tmp_path), ["train.py"], options)
            command = executed.pop()
            assert (command[:3] == [sys.executable, "-m", "pacekeeper.cli"]) == own
            assert ("--python" in command) == (not own or options == ["-O"])


def test_without_a_launcher_torchrun_runs_and_says_why(tmp_path: Path, packages: Path) -> None:
    build_payload(tmp_path)
    result = run_python(tmp_path, packages, "-m", "torch.distributed.run")
    assert result.stdout == "torchrun: train.py\n"
    assert "the launcher cannot be executed, so that the command runs as it is" in result.stderr
