"""When ranks run with NCCL's profiler plugin."""

from __future__ import annotations

import ctypes
import signal
import subprocess
from pathlib import Path

import pytest

from pacekeeper.environment import Environment
from pacekeeper.launcher.launcher import Script, build_rank_starts
from pacekeeper.launcher.network.nccl_plugin import (
    MAX_PLUGIN_PATH_CHARACTERS,
    PROFILER_PLUGIN_SYMBOLS,
    build_plugin_environment,
    choose_next_plugin,
    explain_unusable_plugin,
    find_usable_plugin,
    has_gpus,
)
from pacekeeper.launcher.ranks.rank_processes import RankProcesses
from pacekeeper.launcher.rendezvous.rounds import StartRound
from pacekeeper.launcher.settings import LauncherSettings
from pacekeeper.runtime_folder import RuntimeFolder
from pacekeeper_analysis.protocol.plan import WorkerPlan, WorkerRole
from testing.training.nccl import build_driver, compile_plugin

PLUGIN, TRANSPORT = Path("/lib/plugin.so"), Path("/run/pacekeeper/rings/0.transport")


@pytest.mark.parametrize(
    ("given", "plugin", "expected"),
    [
        ({}, PLUGIN, {"NCCL_PROFILER_PLUGIN": str(PLUGIN), "PACEKEEPER_TRANSPORT": str(TRANSPORT)}),
        ({"NCCL_DEBUG": "INFO"}, PLUGIN, {"NCCL_PROFILER_PLUGIN": str(PLUGIN), "PACEKEEPER_TRANSPORT": str(TRANSPORT)}),
        ({"NCCL_PROFILER_PLUGIN": "inspector"}, PLUGIN, {}),
        ({"NCCL_PROFILER_PLUGIN": "none"}, PLUGIN, {}),
        ({}, None, {}),
    ],
)
def test_the_plugin_is_set_only_where_the_user_has_not_set_one(
    given: dict[str, str], plugin: Path | None, expected: dict[str, str]
) -> None:
    assert build_plugin_environment(given, plugin, TRANSPORT) == expected


def test_each_rank_has_a_file_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_PROFILER_PLUGIN", raising=False)
    plan = WorkerPlan(role=WorkerRole.MEMBER, ranks=(4, 5), world_size=8, workers=4, store="127.0.0.2:29400")
    start, settings = StartRound(3, 4711, plan), LauncherSettings(worker="w", address="127.0.0.1")
    with_plugin = build_rank_starts(start, Script("s.py", False, ()), settings, RuntimeFolder(tmp_path), PLUGIN)
    assert [rank.environment["NCCL_PROFILER_PLUGIN"] for rank in with_plugin] == [str(PLUGIN)] * 2
    files = [rank.environment["PACEKEEPER_TRANSPORT"] for rank in with_plugin]
    assert files == [str(tmp_path / "rings" / f"{local}.transport") for local in (0, 1)]
    without = build_rank_starts(start, Script("s.py", False, ()), settings, RuntimeFolder(tmp_path))
    assert not {"NCCL_PROFILER_PLUGIN", "PACEKEEPER_TRANSPORT", "PACEKEEPER_NATIVE"} & without[0].environment.keys()
    in_python = build_rank_starts(start, Script("s.py", False, ()), settings, RuntimeFolder(tmp_path), native=False)
    assert [Environment.read(rank.environment).native for rank in (*without, *in_python)] == [True] * 2 + [False] * 2


@pytest.mark.parametrize("signum", [signal.SIGSEGV, signal.SIGBUS, signal.SIGILL])
def test_a_crash_in_native_code_is_blamed_on_the_plugin_until_the_contrary_is_known(
    signum: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    assert choose_next_plugin(PLUGIN, [0, None, -signum]) is None
    assert "without NCCL's profiler plugin" in caplog.text
    assert choose_next_plugin(None, [0]) is None, "it does not come back"


def test_other_exits_are_not_blamed_on_the_plugin() -> None:
    others = [0, 1, None, 143, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGABRT, int(signal.SIGSEGV)]
    assert choose_next_plugin(PLUGIN, others) == PLUGIN


class FakeWarmProcess:
    """A substitute for the warm process: it forks nothing."""

    def fork(self, *_: object) -> None:
        pass


async def test_the_transfers_of_ranks_are_read_from_their_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = RuntimeFolder(tmp_path / "run").create()
    runtime.transport(0).write_text("of the round before")
    ranks = RankProcesses(FakeWarmProcess(), runtime)  # type: ignore[arg-type]  # all that is used of it here
    plan = WorkerPlan(role=WorkerRole.MEMBER, ranks=(4, 5, 6), world_size=8, workers=4, store="127.0.0.2:29400")
    settings = LauncherSettings(worker="w", address="127.0.0.1")
    ranks.start(build_rank_starts(StartRound(3, 4711, plan), Script("s.py", False, ()), settings, runtime))
    assert not runtime.transport(0).exists()
    assert ranks.describe_transfers() == "", "unknown"
    assert ranks.exit_codes() == [None] * 3
    build_driver(tmp_path / "built").run_scenario(6, "running", transport=runtime.transport(0))
    runtime.transport(1).write_text("nonsense")
    description = ranks.describe_transfers()
    assert description.startswith("rank 4: sends to rank 3 in a communicator of 4 (BROADCAST 8, channel 3) for ")
    assert "\n" not in description
    assert "1.transport: 8 bytes, but a file of NCCL's transfers has" in caplog.text
    ranks.close()


def test_gpus_are_identified_by_their_devices(tmp_path: Path) -> None:
    assert not has_gpus(tmp_path / "missing")
    for name in ("nvidiactl", "nvidia-uvm", "nvidia-modeset"):
        (tmp_path / name).touch()
    assert not has_gpus(tmp_path), "the driver is there, and no GPU"
    (tmp_path / "nvidia3").touch()
    assert has_gpus(tmp_path)


def test_the_plugin_that_the_build_makes_is_usable(tmp_path: Path) -> None:
    plugin = tmp_path / "nccl_profiler.so"
    compile_plugin(plugin)
    assert find_usable_plugin(plugin) == plugin
    library = ctypes.CDLL(str(plugin))
    assert all(hasattr(library, symbol) for symbol in PROFILER_PLUGIN_SYMBOLS)


def test_a_pure_installation_reports_that_the_transport_is_unknown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        assert find_usable_plugin(tmp_path / "nccl_profiler.so") is None
    assert "transport is unknown: this installation has no profiler plugin" in caplog.text


def test_a_library_that_nccl_cannot_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.so").write_text("no library")
    assert "cannot be loaded" in explain_unusable_plugin(tmp_path / "text.so")
    source, older = tmp_path / "older.c", tmp_path / "older.so"
    source.write_text("int ncclProfiler_v3;")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(older), str(source)], check=True, timeout=600)
    assert "has none of ncclProfiler_v6, ncclProfiler_v5, ncclProfiler_v4" in explain_unusable_plugin(older)
    far = tmp_path.joinpath(*["folder" * 10] * 5)
    far.mkdir(parents=True)
    compile_plugin(far / "nccl_profiler.so")
    assert len(str(far)) > MAX_PLUGIN_PATH_CHARACTERS
    assert "254 characters" in explain_unusable_plugin(far / "nccl_profiler.so")
