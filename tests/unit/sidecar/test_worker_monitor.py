"""The files of a worker as its sidecar reads them: launcher and ranks write them, and a rank may damage them."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import cast

import pytest

from pacekeeper.health.rank_rings import RankRings
from pacekeeper.runtime_folder import RuntimeFolder
from pacekeeper.sidecar.connection_sampler import ConnectionSampler
from pacekeeper.sidecar.operator_client import OperatorClient
from pacekeeper.sidecar.settings import SidecarSettings
from pacekeeper.sidecar.worker_monitor import MAX_FAULT_FILE_BYTES, WorkerMonitor
from pacekeeper_analysis.profiling.pattern import MAX_PROFILE_ANSWER_BYTES
from testing.operators.observations import build_crash


def build_monitor(folder: Path) -> WorkerMonitor:
    runtime = RuntimeFolder(folder / "runtime").create()
    settings = SidecarSettings(runtime, "j", "j-w0-0", "https://operator", "", folder / "token")
    return WorkerMonitor(settings, RankRings(runtime, 32), ConnectionSampler(runtime))


def write_traps(folder: Path, secret: Path) -> None:
    """Write what a rank may put in the place of a file: a link, a pipe that blocks its reader, a folder."""
    secret.write_text("{}")
    (folder / "window-1.0.json").symlink_to(secret)
    os.mkfifo(folder / "window-2.0.json")
    (folder / "window-3.0.json").mkdir()


def test_only_files_count_as_faults(tmp_path: Path) -> None:
    monitor, faults = build_monitor(tmp_path), tmp_path / "runtime/faults"
    write_traps(faults, tmp_path / "secret")
    crash = build_crash("j-w0-0", 0)
    (faults / "window-4.0.json").write_text(json.dumps(crash.to_json()))
    (faults / "window-5.0.json").write_bytes(b" " * MAX_FAULT_FILE_BYTES + b"{}")
    assert list(monitor.list_faults()) == ["window-4.0.json", "window-5.0.json"]
    assert monitor.read_fault("window-4.0.json") == crash
    assert monitor.read_fault("window-5.0.json") is None
    monitor.drop_fault("window-4.0.json")
    assert list(monitor.list_faults()) == ["window-5.0.json"]


async def test_what_a_rank_writes_for_a_profile_reaches_the_operator_and_nothing_else_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Client:
        def __init__(self) -> None:
            self.sent: list[tuple[str, int, bytes]] = []

        async def send_pattern(self, window: str, rank: int, answer: bytes) -> None:
            self.sent.append((window, rank, answer))

    monitor, patterns, client = build_monitor(tmp_path), tmp_path / "runtime/patterns", Client()
    write_traps(patterns, tmp_path / "secret")
    (patterns / "window-4.7.json").write_bytes(b"pattern")
    (patterns / "window-5.0.json").write_bytes(b" " * (MAX_PROFILE_ANSWER_BYTES + 1))
    (patterns / "window-6.x.json").write_bytes(b"pattern")
    monkeypatch.setattr(asyncio, "sleep", _sleep_twice())
    with pytest.raises(asyncio.CancelledError):
        await monitor._deliver_patterns(cast(OperatorClient, client))
    assert client.sent == [("window-4", 7, b"pattern")]
    assert sorted(path.name for path in patterns.iterdir()) == [f"window-{n}.0.json" for n in (1, 2, 3)]


def _sleep_twice() -> object:
    calls = iter((None, None))

    async def sleep(_seconds: float) -> None:
        if next(calls, "over") == "over":
            raise asyncio.CancelledError

    return sleep
