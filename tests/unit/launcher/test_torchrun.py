"""A command line of torchrun, given to `pacekeeper run`. The parser of torch itself says which options there are."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from pacekeeper.launcher import torchrun
from pacekeeper.launcher.command import main, parse
from pacekeeper_analysis.errors import InputError

POD = {"PACEKEEPER_WORKER": "gpt-w0-1", "PACEKEEPER_NPROC": "8"}
OURS = {"--max-restarts", "--max_restarts", "-m", "--module", "-h", "--help"}


def ranks(line: str, environment: Mapping[str, str] | None = None, devices: Path = Path("/none")) -> int | None:
    return torchrun.local_ranks(parse([*line.split(), "train.py"]), environment or {}, devices)


@pytest.mark.oldest_torch
def test_every_option_of_torchrun_is_known_in_each_spelling_and_takes_as_many_values() -> None:
    known = {
        name: option.flag
        for option in torchrun.OPTIONS
        for name in (option.name, f"--{option.destination}", *option.short)
    }
    for action in get_args_parser()._actions:
        for name in set(action.option_strings) - OURS:
            assert known[name] is (action.nargs == 0), name


def test_what_follows_the_script_is_the_scripts() -> None:
    line = (
        "--nproc-per-node=8 --nnodes=2 --rdzv-backend=c10d --rdzv_endpoint=host:29400 --max-restarts=3 -m train --lr 1"
    )
    asked = parse([*line.split(), "--master-port", "2"])
    assert (asked.script, asked.module, asked.max_restarts) == ("train", True, 3)
    assert asked.arguments == ["--lr", "1", "--master-port", "2"]
    assert asked.master_port is None


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", None),
        ("--master-port 1", None),
        ("--local 3", 3),
        ("--local 3 --nproc-per-node 3 --nnodes 2", 3),
        ("--local 3 --nproc-per-node gpu", 3),
        ("--standalone", 1),
        ("--nnodes 1:4 --nproc_per_node 2", 2),
        ("--nproc-per-node cpu", len(os.sched_getaffinity(0))),
        ("--nproc-per-node auto", len(os.sched_getaffinity(0))),
    ],
)
def test_without_a_plan_all_ranks_are_here(line: str, expected: int | None) -> None:
    assert ranks(line) == expected


def test_gpus_are_counted_as_far_as_they_are_visible(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl"):
        (tmp_path / name).touch()
    assert ranks("--nproc-per-node gpu", devices=tmp_path) == 3
    assert ranks("--nproc-per-node auto", {"CUDA_VISIBLE_DEVICES": "0,2"}, tmp_path) == 2
    with pytest.raises(InputError, match="none is visible"):
        ranks("--nproc-per-node gpu", {"CUDA_VISIBLE_DEVICES": "-1"}, tmp_path)


@pytest.mark.parametrize("line", ["", "--nproc-per-node 8 --nnodes 64", "--nproc-per-node gpu", "--standalone"])
def test_in_a_pod_the_plan_says_how_many(line: str) -> None:
    assert ranks(line, POD) is None


@pytest.mark.parametrize(
    ("line", "environment", "words"),
    [
        ("--nproc-per-node 4", POD, r"--nproc-per-node 4: the TrainingJob has 8 ranks a worker; set its spec"),
        ("--nproc-per-node many", POD, r"--nproc-per-node many: give a number"),
        ("--nproc-per-node 0", {}, r"--nproc-per-node 0: give a number"),
        ("--nproc-per-node xpu", {}, r"none is visible here; give the number"),
        ("--nproc-per-node gpu", {}, r"none is visible here; give the number"),
        ("--nnodes 2:4", {}, r"--nnodes 2:4: without a plan .* spec.replicas 2"),
        ("--nnodes two", {}, r"--nnodes two: give a number"),
        ("--local 2 --nproc-per-node 4", {}, r"--local 2 and --nproc-per-node 4 contradict"),
        ("--no-python", POD, r"--no-python: .* give the Python script itself"),
        ("--virtual-local-rank", {}, r"--virtual-local-rank: .* leave it out"),
        ("--print-completion bash", {}, r"--print-completion: .* ask torchrun"),
    ],
)
def test_contradictions_are_told_with_the_remedy(line: str, environment: dict[str, str], words: str) -> None:
    with pytest.raises(InputError, match=words):
        ranks(line, environment)


def test_what_is_passed_over_is_said_in_one_line() -> None:
    line = "--standalone --rdzv-id x --tee 3 -r 3 --nnodes 1 --nproc-per-node 2 train.py"
    asked = parse(line.split())
    assert torchrun.passed_over(asked, local=True) == (
        "--rdzv-id passed over: the ranks meet on this machine; "
        "--redirects, --tee passed over: the launcher passes the ranks' output on, each line with its rank"
    )
    assert torchrun.passed_over(asked, local=False).startswith("--nnodes passed over: the plan says who takes part")
    assert torchrun.passed_over(parse(["--local", "2", "train.py"]), local=True) == ""


def test_it_is_told_before_anything_is_started(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.touch()
    with pytest.raises(InputError, match="--nnodes 2"):
        main(["--nnodes", "2", "--master-port", "1", str(script)])
    with pytest.raises(InputError, match="PACEKEEPER_WORKER"):
        main(["--master-port", "1", str(script)])
    assert "--master-port passed over" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse(["--local", "2", "--max-restarts", "-1", str(script)])
    assert "0 or more" in capsys.readouterr().err
