"""The launcher's small edges: control groups, interfaces, output, messages, settings, the command line."""

from __future__ import annotations

import ast
import asyncio
import inspect
import io
import json
import os
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.utils.api import macros

from pacekeeper import cgroup, cli
from pacekeeper.health.fault_formatting import describe_fault
from pacekeeper.launcher.command import launch_from_plan
from pacekeeper.launcher.health.heartbeat import WriteFailures
from pacekeeper.launcher.launcher import Launcher, Script, build_rank_starts, publish_finish
from pacekeeper.launcher.network import interfaces
from pacekeeper.launcher.ranks.output_pipe import TAIL_BYTES, TAIL_LINES, OutputPipe
from pacekeeper.launcher.ranks.rank_options import OutputOptions, RankOptions
from pacekeeper.launcher.rendezvous.plan_file import PlanFile
from pacekeeper.launcher.rendezvous.rounds import StartRound
from pacekeeper.launcher.settings import LauncherSettings
from pacekeeper.runtime_folder import RuntimeFolder, write_json
from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.protocol.plan import WorkerPlan, WorkerRole
from pacekeeper_analysis.protocol.reports import FINISHED_MESSAGE, FaultKind, FaultReport, Heartbeat, LauncherState

FAULT = FaultReport("n", FaultKind.RANK_FAILED, "w", round=2, noticed_at=0.0, rank=3, exit_code=-9, step=7)


def test_a_second_torchrun_of_a_container_is_refused_once_the_first_has_finished(tmp_path: Path) -> None:
    runtime = RuntimeFolder(tmp_path).create()
    finished = Heartbeat("w", LauncherState.FINISHED).to_json()
    write_json(runtime.heartbeat, finished)
    with pytest.raises(InputError, match="a TrainingJob of its own"):
        launch_from_plan(Script("train.py", False, ()), LauncherSettings("w", "127.0.0.1"), runtime)
    assert json.loads(runtime.heartbeat.read_text()) == finished


@pytest.mark.parametrize(
    ("membership", "files", "kills", "processors"),
    [
        ("0::/pod\n", {"pod/memory.events": "oom 3\noom_kill 2\n", "pod/cpu.max": "50000 100000\n"}, 2, 0.5),
        ("0::/\n", {"memory.events": "oom_kill 1\n", "cpu.max": "max 100000\n"}, 1, float("inf")),
        (
            "4:memory:/kubepods/x\n3:cpu,cpuacct:/kubepods/x\n",
            {
                "memory/kubepods/x/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 4\n",
                "cpu,cpuacct/kubepods/x/cpu.cfs_quota_us": "150000\n",
                "cpu,cpuacct/kubepods/x/cpu.cfs_period_us": "100000\n",
            },
            4,
            1.5,
        ),
        (
            "4:memory:/outside\n3:cpu:/outside\n",
            {
                "memory/memory.oom_control": "oom_kill 5\n",
                "cpu/cpu.cfs_quota_us": "-1\n",
                "cpu/cpu.cfs_period_us": "100000\n",
            },
            5,
            float("inf"),
        ),
        ("0::/\n", {}, 0, float("inf")),
    ],
)
def test_control_groups_of_both_versions_are_read(
    tmp_path: Path, membership: str, files: dict[str, str], kills: int, processors: float
) -> None:
    (tmp_path / "membership").write_text(membership)
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert cgroup.count_oom_kills(tmp_path, tmp_path / "membership") == kills
    assert cgroup.read_cpu_limit(tmp_path, tmp_path / "membership") == processors


def test_without_a_control_group_nothing_is_known(tmp_path: Path) -> None:
    missing = tmp_path / "membership"
    assert cgroup.count_oom_kills(tmp_path, missing) == 0
    assert cgroup.read_cpu_limit(tmp_path, missing) == float("inf")
    assert cgroup.read_throttling(tmp_path, missing) == (0, 0)


def test_the_interface_of_an_address_is_found() -> None:
    assert interfaces.find_interface("127.0.0.3") == "lo"
    assert interfaces.find_interface("203.0.113.1") is None
    assert set(interfaces._list_interfaces_v4()) >= {"127.0.0.1"}


async def test_output_is_passed_on_by_line_with_the_rank_in_front_and_its_end_is_stored() -> None:
    target = io.BytesIO()
    stream = OutputPipe(target, b"[3] ")
    os.write(stream.write_end, b"".join(b"line %d\n" % number for number in range(100)) + b"no end")
    os.close(stream.write_end)
    await asyncio.sleep(0)
    stream.pump()
    lines = target.getvalue().splitlines()
    assert (lines[0], lines[-1], len(lines)) == (b"[3] line 0", b"[3] no end", 101)
    assert stream.tail().splitlines()[0] == f"line {101 - TAIL_LINES}"


async def test_a_limited_part_of_a_line_without_an_end_is_stored() -> None:
    stream = OutputPipe(io.BytesIO())
    for _ in range(40):
        os.write(stream.write_end, b"x" * 2**15)
        stream.pump()
    os.write(stream.write_end, b"\nValueError: 3")
    os.close(stream.write_end)
    stream.pump()
    assert len(stream.tail()) == TAIL_BYTES
    assert stream.tail().endswith("x\nValueError: 3")


async def test_a_single_ranks_output_is_passed_on_at_once() -> None:
    target = io.BytesIO()
    stream = OutputPipe(target)
    os.write(stream.write_end, b"\r 10 %")
    stream.pump()
    assert target.getvalue() == b"\r 10 %"
    os.close(stream.write_end)
    stream.close()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (FAULT, "rank 3 was killed by SIGKILL in round 2 after step 7"),
        (replace(FAULT, out_of_memory=True), "rank 3 was killed by SIGKILL, out of memory in round 2 after step 7"),
        (
            replace(FAULT, exit_code=1, step=None, error="Traceback\nValueError: no\n"),
            "rank 3 ended with code 1 in round 2 before its first step: ValueError: no",
        ),
        (replace(FAULT, kind=FaultKind.TERMINATING), "Terminating in round 2"),
    ],
)
def test_faults_are_described(fault: FaultReport, message: str) -> None:
    assert describe_fault(fault) == message


def test_errors_of_settings_name_the_variable_and_the_remedy() -> None:
    good = {"PACEKEEPER_WORKER": "w", "PACEKEEPER_POD_IP": "127.0.0.1"}
    assert LauncherSettings.from_environment({**good, "PACEKEEPER_HANG_SECONDS": "auto"}).hang_deadline is None
    assert LauncherSettings.from_environment({**good, "PACEKEEPER_HANG_SECONDS": "2.5"}).hang_deadline == 2.5
    of_a_service = {**good, "PACEKEEPER_METRICS_PORT": "tcp://10.96.0.7:9464"}
    assert LauncherSettings.from_environment(of_a_service).peer_port == LauncherSettings.peer_port
    with pytest.raises(InputError, match=r"PACEKEEPER_POD_IP.*--local"):
        LauncherSettings.from_environment({"PACEKEEPER_WORKER": "w"})
    for text in ("soon", "-1", "0"):
        for name in ("GRACE", "KILL", "IMPORT"):
            variable = f"PACEKEEPER_{name}_SECONDS"
            with pytest.raises(InputError, match=f"{variable}=.*give a number above 0"):
                LauncherSettings.from_environment({**good, variable: text})
    longer = {"PACEKEEPER_KILL_SECONDS": "90", "PACEKEEPER_IMPORT_SECONDS": "600"}
    for name, seconds in longer.items():
        with pytest.raises(InputError, match=f"{name}: {seconds} s must be below PACEKEEPER_GATHER_SECONDS, 60 s"):
            LauncherSettings.from_environment({**good, name: seconds})
    longer["PACEKEEPER_GATHER_SECONDS"] = "601"
    settings = LauncherSettings.from_environment({**good, **longer})
    assert (settings.kill_timeout, settings.import_timeout) == (90, 600)


def test_a_plan_that_cannot_be_read_leaves_the_one_before_in_force(tmp_path: Path) -> None:
    file = PlanFile(tmp_path / "plan.json")
    assert file.read() is None
    write_json(tmp_path / "plan.json", WorkerPlan(version=1).to_json())
    assert file.read() == WorkerPlan(version=1)
    write_json(tmp_path / "plan.json", {"role": "Emperor"})
    assert file.read() == WorkerPlan(version=1)
    write_json(tmp_path / "plan.json", WorkerPlan(version=2).to_json())
    assert file.read() == WorkerPlan(version=2)


def test_a_rank_receives_the_environment_of_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "TORCH_NCCL_ASYNC_ERROR_HANDLING"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PACEKEEPER_JOB", "gpt")
    plan = WorkerPlan(
        role=WorkerRole.MEMBER, ranks=(4, 5), world_size=8, workers=4, store="127.0.0.2:29400", restarts=7
    )
    settings = LauncherSettings(worker="w", address="127.0.0.1")
    first, second = build_rank_starts(
        StartRound(3, 4711, plan), Script("s.py", False, ("-x",)), settings, RuntimeFolder(tmp_path)
    )
    expected = {
        "RANK": "5",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.2",
        "MASTER_PORT": "4711",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "7",
        "TORCHELASTIC_RUN_ID": "gpt",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "GROUP_RANK": "2",
        "GROUP_WORLD_SIZE": "4",
        "ROLE_NAME": "default",
        "ROLE_RANK": "5",
        "ROLE_WORLD_SIZE": "8",
        "PACEKEEPER_ROUND": "3",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCHELASTIC_ERROR_FILE": str(tmp_path / "errors/1.json"),
    }
    assert {name: second.environment[name] for name in expected} == expected
    assert (first.rank, first.threads, first.arguments) == (4, 1, ["-x"])
    assert first.ring_path != second.ring_path
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth9")
    first, _ = build_rank_starts(
        StartRound(3, 4711, plan), Script("s.py", False, ()), settings, RuntimeFolder(tmp_path)
    )
    assert first.threads is None
    assert "OMP_NUM_THREADS" not in first.environment
    assert first.environment["GLOO_SOCKET_IFNAME"] == "eth9"


def test_a_rank_receives_the_options(tmp_path: Path) -> None:
    plan = WorkerPlan(role=WorkerRole.MEMBER, ranks=(4, 5), world_size=8, workers=4, store="127.0.0.2:29400")
    settings = LauncherSettings(worker="w", address="127.0.0.1")
    options = RankOptions("trainer", "x", virtual_local_rank=True, output=OutputOptions(tmp_path / "logs"))
    script = Script("prog", False, ("--device=${local_rank}", "$HOME", "$$"), is_program=True, options=options)
    _, second = build_rank_starts(StartRound(3, 4711, plan), script, settings, RuntimeFolder(tmp_path))
    expected = {
        "ROLE_NAME": "trainer",
        "TORCHELASTIC_RUN_ID": "x",
        "LOCAL_RANK": "0",
        "PACEKEEPER_LOCAL_RANK": "1",
        "TORCHELASTIC_ERROR_FILE": str(tmp_path / "logs/attempt_2/1/error.json"),
    }
    assert {name: second.environment[name] for name in expected} == expected
    assert second.is_program
    assert second.arguments == macros.substitute(list(script.arguments), "1"), "as torchrun replaces them"


def test_no_variable_of_torchrun_is_missing(tmp_path: Path) -> None:
    tree = ast.parse(textwrap.dedent(inspect.getsource(LocalElasticAgent._start_workers)))
    (theirs,) = (
        {key.value for key in node.keys if isinstance(key, ast.Constant)}
        for node in ast.walk(tree)
        if isinstance(node, ast.Dict)
        and any(isinstance(key, ast.Constant) and key.value == "RANK" for key in node.keys)
    )
    plan = WorkerPlan(role=WorkerRole.MEMBER, ranks=(0,), world_size=1, workers=1, store="127.0.0.1:29400")
    settings = LauncherSettings(worker="w", address="127.0.0.1")
    (start,) = build_rank_starts(
        StartRound(1, 4711, plan), Script("s.py", False, ()), settings, RuntimeFolder(tmp_path)
    )
    assert "TORCHELASTIC_RUN_ID" in theirs
    assert theirs <= start.environment.keys()


def test_nccl_records_when_collectives_begin_unless_the_user_wants_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_ENABLE_TIMING")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    plan = WorkerPlan(role=WorkerRole.MEMBER, ranks=(0,), world_size=1, store="127.0.0.1:29400")
    settings = LauncherSettings(worker="w", address="127.0.0.1")

    def list_values() -> list[str | None]:
        (start,) = build_rank_starts(
            StartRound(1, 4711, plan), Script("s.py", False, ()), settings, RuntimeFolder(tmp_path)
        )
        return [start.environment.get(name) for name in names]

    assert list_values() == ["2000", None, "1"]
    monkeypatch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "0")
    monkeypatch.setenv("TORCH_NCCL_ENABLE_TIMING", "0")
    assert list_values() == [None, None, None]


def test_a_fault_that_a_full_volume_refuses_is_reported_when_there_is_space(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = RuntimeFolder(tmp_path / "run")
    launcher = object.__new__(Launcher)
    launcher._runtime, launcher._write_failures, launcher._pending_faults = runtime, WriteFailures(), []
    launcher.notify(FAULT)
    launcher.notify(replace(FAULT, name="m"))
    assert caplog.text.count("cannot be written for the operator: a fault: [Errno 2]") == 1
    runtime.create()
    launcher._write_pending_faults()
    assert sorted(path.name for path in runtime.faults.iterdir()) == ["m.json", "n.json"]
    launcher.notify(replace(FAULT, name="o"))
    assert len(list(runtime.faults.iterdir())) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "missing.py"], "missing.py: no such file"),
        (["run", __file__], "PACEKEEPER_WORKER is not set"),
        (["walk"], "no command 'walk'"),
        ([], "usage"),
    ],
)
def test_the_command_line_reports_errors(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PACEKEEPER_WORKER", raising=False)
    assert cli.main(arguments) == 2
    output = capsys.readouterr()
    assert message in output.out + output.err


@pytest.mark.parametrize("number", ["0", "-1", "two"])
def test_the_number_of_local_ranks_is_checked(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["run", "--local", number, __file__])
    assert "at least 1" in capsys.readouterr().err


def test_the_end_is_in_the_containers_termination_message_where_there_is_one(tmp_path: Path) -> None:
    message = tmp_path / "termination-log"
    publish_finish({"PACEKEEPER_TERMINATION_LOG": str(message)})
    assert not message.exists(), "it is the kubelet's file"
    message.write_text("the script's own\n")
    publish_finish({"PACEKEEPER_TERMINATION_LOG": str(message)})
    assert message.read_text() == f"the script's own\n{FINISHED_MESSAGE}\n"
