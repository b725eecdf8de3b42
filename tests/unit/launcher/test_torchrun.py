"""A command line of torchrun, given to `pacekeeper run`. The parser of torch itself defines which options there are."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from torch.distributed.argparse_util import check_env, env
from torch.distributed.run import get_args_parser

from pacekeeper.environment import Environment
from pacekeeper.launcher import torchrun
from pacekeeper.launcher.command import _build_local_settings, main, parse_arguments
from pacekeeper.launcher.launcher import Script
from pacekeeper.launcher.ranks.rank_options import (
    OutputOptions,
    RankOptions,
    StandardStream,
    StreamSelection,
    build_rank_environment,
)
from pacekeeper.launcher.settings import LauncherSettings
from pacekeeper_analysis.errors import InputError

POD = {"PACEKEEPER_WORKER": "gpt-w0-1", "PACEKEEPER_NPROC": "8"}
ROOT = Path(__file__).resolve().parents[3]


def choose_ranks(line: str, environment: Mapping[str, str] | None = None, devices: Path = Path("/none")) -> int | None:
    return torchrun.choose_local_ranks(parse_arguments([*line.split(), "train.py"]), environment or {}, devices)


@pytest.mark.oldest_torch
def test_every_option_of_torchrun_is_known_in_each_spelling_with_its_variable_and_takes_as_many_values() -> None:
    """Where torch has a new option, this fails: decide in torchrun.OPTIONS what it does here."""
    known = {
        name: (option.flag, option.has_variable)
        for option in (*torchrun.TORCHRUN_OPTIONS, *torchrun.SHARED_OPTIONS)
        for name in (option.name, f"--{option.destination}", *option.short)
    }
    for action in get_args_parser()._actions:
        for name in set(action.option_strings) - {"-h", "--help"}:
            assert known[name] == (action.nargs == 0, isinstance(action, (env, check_env))), name


def test_the_documentation_describes_each_option() -> None:
    assert torchrun.format_option_table() in (ROOT / "docs/torchrun.md").read_text()
    for option in (*torchrun.TORCHRUN_OPTIONS, *torchrun.SHARED_OPTIONS):
        assert option.help, f"{option.name} does nothing, and no text describes it"


def test_arguments_after_the_script_belong_to_the_script() -> None:
    line = (
        "--nproc-per-node=8 --nnodes=2 --rdzv-backend=c10d --rdzv_endpoint=host:29400 --max-restarts=3 -m train --lr 1"
    )
    parsed = parse_arguments([*line.split(), "--master-port", "2"])
    assert (parsed.script, parsed.module, parsed.max_restarts) == ("train", True, 3)
    assert parsed.arguments == ["--lr", "1", "--master-port", "2"]
    assert parsed.master_port is None


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
def test_without_a_plan_all_ranks_are_local(line: str, expected: int | None) -> None:
    assert choose_ranks(line) == expected


def test_only_visible_gpus_are_counted(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl"):
        (tmp_path / name).touch()
    assert choose_ranks("--nproc-per-node gpu", devices=tmp_path) == 3
    assert choose_ranks("--nproc-per-node auto", {"CUDA_VISIBLE_DEVICES": "0,2"}, tmp_path) == 2
    with pytest.raises(InputError, match="none is visible"):
        choose_ranks("--nproc-per-node gpu", {"CUDA_VISIBLE_DEVICES": "-1"}, tmp_path)


@pytest.mark.parametrize("line", ["", "--nproc-per-node 8 --nnodes 64", "--nproc-per-node gpu", "--standalone"])
def test_in_a_pod_the_plan_sets_the_number_of_ranks(line: str) -> None:
    assert choose_ranks(line, POD) is None


@pytest.mark.parametrize(
    ("line", "environment", "message"),
    [
        ("--nproc-per-node 4", POD, r"--nproc-per-node 4: the TrainingJob has 8 ranks a worker; set its spec"),
        ("--nproc-per-node many", POD, r"--nproc-per-node many: give a number"),
        ("--nproc-per-node 0", {}, r"--nproc-per-node 0: give a number"),
        ("--nproc-per-node xpu", {}, r"none is visible here; give the number"),
        ("--nproc-per-node gpu", {}, r"none is visible here; give the number"),
        ("--nnodes 2:4", {}, r"--nnodes 2:4: without a plan .* spec.replicas 2"),
        ("--nnodes two", {}, r"--nnodes two: give a number"),
        ("--nnodes 1:20:30", {}, r"--nnodes 1:20:30: .*the smallest and the largest"),
        ("--nnodes 1:0", {}, r"--nnodes 0: give a number"),
        ("--local 2 --nproc-per-node 4", {}, r"--local 2 and --nproc-per-node 4 contradict"),
        ("--logs-specs unknown", {}, r"--logs-specs: .* use --log-dir"),
        ("--print-completion bash", {}, r"--print-completion: .* run torchrun"),
    ],
)
def test_contradictions_are_reported_with_the_remedy(line: str, environment: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        choose_ranks(line, environment)


def build_options(line: str, environment: Mapping[str, str] | None = None, ranks: int | None = 2) -> RankOptions:
    return torchrun.build_rank_options(parse_arguments([*line.split(), "train.py"]), environment or {}, ranks)


def test_ignored_options_are_reported_in_one_line() -> None:
    line = "--standalone --rdzv-id x --rdzv-conf a=1 --local-addr h --nnodes 1 --nproc-per-node 2 --max-restarts 3"
    parsed = parse_arguments([*line.split(), "train.py"])
    assert torchrun.describe_ignored_options(parsed, True, {}) == (
        "--rdzv-conf, --local-addr ignored: the rendezvous is on this machine"
    )
    in_a_pod = torchrun.describe_ignored_options(parsed, False, {"PYTHON_EXEC": "/usr/bin/python"})
    assert in_a_pod.startswith("--nnodes ignored: the plan sets the workers")
    assert "--max-restarts ignored: the plan has its own" in in_a_pod
    assert "PYTHON_EXEC ignored: ranks run in the launcher's Python" in in_a_pod
    assert torchrun.describe_ignored_options(parse_arguments(["--local", "2", "train.py"]), True, {}) == ""
    filters = parse_arguments(["--duplicate-stdout-filters", "loss", "train.py"])
    assert torchrun.describe_ignored_options(filters, True, {}) == (
        "--duplicate-stdout-filters ignored: they filter only streams that --tee names"
    )


def test_the_environment_of_torchrun_applies_unless_the_command_line_overrides_it() -> None:
    parsed = parse_arguments(["--nproc_per_node", "2", "train.py"])
    environment = {
        "PET_NPROC_PER_NODE": "4",
        "PET_NNODES": "1",
        "PET_RDZV_ID": "x",
        "PET_NO_PYTHON": "1",
        "PET_MODULE": "0",
        "PET_MAX_RESTARTS": "3",
        "PET_LOGS_SPECS": "none is read of this",
        "PET_RDZV_CONF": "",
    }
    message = torchrun.apply_variables(parsed, environment)
    assert message == (
        "from the environment: PET_NNODES=1, PET_RDZV_ID=x, PET_NO_PYTHON=1, PET_MAX_RESTARTS=3, PET_MODULE=0"
    )
    assert (parsed.nproc_per_node, parsed.nnodes, parsed.no_python, parsed.module) == ("2", "1", True, False)
    assert torchrun.parse_max_restarts(parsed) == 3
    assert torchrun.build_rank_options(parsed, environment, 2).run_id == "x"
    with pytest.raises(InputError, match="PET_STANDALONE=yes: give 1, or 0"):
        torchrun.apply_variables(parse_arguments(["train.py"]), {"PET_STANDALONE": "yes"})
    parsed = parse_arguments(["train.py"])
    torchrun.apply_variables(parsed, {"PET_MAX_RESTARTS": "many"})
    with pytest.raises(InputError, match="--max-restarts many: give a number"):
        torchrun.parse_max_restarts(parsed)
    assert torchrun.parse_max_restarts(parse_arguments(["train.py"])) == torchrun.DEFAULT_MAX_RESTARTS


def test_options_of_the_ranks_are_read_as_torchrun_reads_them() -> None:
    line = (
        "--role trainer --rdzv-id x --redirect=3 -t 0:1,11:2 --local_ranks_filter=0,2 --shutdown-timeout 0 "
        "--duplicate-stdout-filters a,,b,c --log-line-prefix-template ${rank}:"
    )
    assert build_options(line) == RankOptions(
        role="trainer",
        run_id="x",
        grace_seconds=0.0,
        output=OutputOptions(
            redirects=StreamSelection(StandardStream.OUT | StandardStream.ERR),
            tee=StreamSelection(streams_by_rank={0: StandardStream.OUT, 11: StandardStream.ERR}),
            shown_ranks=frozenset({0, 2}),
            prefix_template="${rank}:",
            stdout_filters=("a,b", "c"),
        ),
    )
    assert build_options("") == RankOptions()
    variables = {torchrun.LOG_PREFIX_VARIABLE: "[${rank}]", torchrun.SHUTDOWN_TIMEOUT_VARIABLE: "7"}
    read = build_options("", variables)
    assert (read.output.prefix_template, read.grace_seconds) == ("[${rank}]", 7.0)
    assert build_options("--shutdown-timeout 3", variables).grace_seconds == 3.0


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("", False),
        ("--log-dir x", True),
        ("-r 3", True),
        ("-t 0:1", True),
        ("-r 0", False),
        ("--log-dir /dev/null -t 3", False),
    ],
)
def test_log_files_are_created_if_an_option_requests_them(line: str, wanted: bool) -> None:
    parsed = parse_arguments([*line.split(), "train.py"])
    assert torchrun.needs_log_files(parsed, torchrun.build_rank_options(parsed, {}, 1)) is wanted


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--no-python -m", "--no-python and --module contradict"),
        ("-r 4", "--redirects 4: give 1"),
        ("--tee 0:1,1", "--tee 0:1,1: give 1"),
        ("--local-ranks-filter 0,x", "--local-ranks-filter 0,x: give local ranks"),
        ("--master-port http", "--master-port http: give a number below"),
        ("--shutdown-timeout soon", "--shutdown-timeout soon: give whole seconds"),
    ],
)
def test_nonsense_is_rejected_with_the_remedy(line: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        build_options(line)


@pytest.mark.parametrize(
    ("line", "port"),
    [("", 0), ("--master-port 29501", 29501), ("--standalone --master-port 1", 0), ("--rdzv-backend c10d", 0)],
)
def test_the_store_listens_where_torchrun_would_have_it(line: str, port: int) -> None:
    assert build_options(line).master_port == port
    assert build_options(line, ranks=None).master_port == 0, "in a pod"


def test_the_option_sets_the_time_that_ranks_have_to_leave() -> None:
    assert _build_local_settings(Script("s.py", False, (), options=build_options("--shutdown-timeout 3"))).grace == 3.0
    assert _build_local_settings(Script("s.py", False, ())).grace == LauncherSettings.grace


def test_with_virtual_local_ranks_each_rank_sees_its_own_gpu() -> None:
    virtual = build_options("--virtual-local-rank", ranks=None)
    assert build_rank_environment(RankOptions(), 1, {}) == {"LOCAL_RANK": "1"}
    mine = {"LOCAL_RANK": "0", "PACEKEEPER_LOCAL_RANK": "1"}
    assert build_rank_environment(virtual, 1, {}) == {**mine, "CUDA_VISIBLE_DEVICES": "1"}
    assert build_rank_environment(virtual, 1, {"CUDA_VISIBLE_DEVICES": "4, GPU-5"}) == {
        **mine, "CUDA_VISIBLE_DEVICES": "GPU-5"
    }  # fmt: skip
    amd = {"HIP_VISIBLE_DEVICES": "2,3", "CUDA_VISIBLE_DEVICES": "0,1"}
    assert build_rank_environment(virtual, 1, amd) == {**mine, "HIP_VISIBLE_DEVICES": "3", "CUDA_VISIBLE_DEVICES": "3"}
    with pytest.raises(InputError, match="local rank 1 has no GPU in CUDA_VISIBLE_DEVICES=7"):
        build_options("--virtual-local-rank", {"CUDA_VISIBLE_DEVICES": "7"}, ranks=2)
    with pytest.raises(InputError, match="local rank 1 has no GPU"):
        build_options("--virtual-local-rank", {"CUDA_VISIBLE_DEVICES": "7", "PACEKEEPER_NPROC": "2"}, ranks=None)
    library = Environment.read(build_rank_environment(virtual, 1, {}))
    assert (library.local_rank, library.device_index) == (1, 0)


def test_errors_are_reported_before_a_process_is_started(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.touch()
    with pytest.raises(InputError, match="--nnodes 2"):
        main(["--nnodes", "2", "--master-addr", "h", str(script)])
    with pytest.raises(InputError, match="PACEKEEPER_WORKER"):
        main(["--master-addr", "h", str(script)])
    assert "--master-addr ignored" in capsys.readouterr().err
    with pytest.raises(InputError, match="--python-option: needs --python"):
        main(["--local", "1", "--python-option=-O", str(script)])
    program = tmp_path / "no-program"
    with pytest.raises(InputError, match="no-program is no executable file here"):
        main(["--local", "1", "--no-python", str(program)])
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=f"--log-dir {tmp_path}/file: .*name a folder"):
        main(["--local", "1", "--log-dir", str(tmp_path / "file"), str(script)])
    with pytest.raises(SystemExit):
        parse_arguments(["--local", "2", "--max-restarts", "-1", str(script)])
    assert "0 or more" in capsys.readouterr().err
