"""The ranks of a round as processes: what the launcher does to one that ends in the same moment."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

from pacekeeper.launcher.launcher import Script, build_rank_starts
from pacekeeper.launcher.ranks.rank_processes import RankProcesses
from pacekeeper.launcher.ranks.warm_process import RankForked
from pacekeeper.launcher.rendezvous.rounds import StartRound
from pacekeeper.launcher.settings import LauncherSettings
from pacekeeper.runtime_folder import RuntimeFolder
from pacekeeper_analysis.protocol.plan import WorkerPlan, WorkerRole
from pacekeeper_rank.forking.rank_start import RankStart
from pacekeeper_rank.record_ring import RingWriter, create_ring


class FakeWarmProcess:
    """A substitute for the warm process: the first rank has ended, which is not reported yet; the others sleep."""

    def __init__(self) -> None:
        self.forked: list[RankForked] = []
        self.processes: list[subprocess.Popen[bytes]] = []

    def fork(self, start: RankStart, *_: object) -> None:
        code = "import time; time.sleep(60)" if self.processes else ""
        process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
        if not self.processes:
            process.wait()
        self.processes.append(process)
        self.forked.append(RankForked(start.key, process.pid))

    def read_events(self) -> list[RankForked]:
        return self.forked


def start_ranks(warm: FakeWarmProcess, runtime: RuntimeFolder) -> RankProcesses:
    ranks = RankProcesses(warm, runtime)  # type: ignore[arg-type]  # all that is used of it here
    plan = WorkerPlan(role=WorkerRole.MEMBER, ranks=(0, 1), world_size=2, workers=1, store="127.0.0.2:29400")
    settings = LauncherSettings(worker="w", address="127.0.0.1")
    ranks.start(build_rank_starts(StartRound(3, 4711, plan), Script("s.py", False, ()), settings, runtime))
    ranks.receive_events()
    return ranks


async def test_a_rank_that_damages_its_ring_is_not_monitored_and_ends_no_launcher(tmp_path: Path) -> None:
    warm, runtime = FakeWarmProcess(), RuntimeFolder(tmp_path / "run").create()
    ranks = start_ranks(warm, runtime)
    try:
        for local_rank in range(2):
            create_ring(runtime.ring(local_rank), local_rank, 3, capacity=64)
            RingWriter(runtime.ring(local_rank))
        assert [*ranks.states()] == [0, 1]
        os.truncate(runtime.ring(0), 0)
        assert [*ranks.states()] == [1]
        late = start_ranks(FakeWarmProcess(), runtime)
        runtime.ring(1).unlink()
        runtime.ring(1).symlink_to("1")
        assert [*late.states()] == []
        late.close()
    finally:
        ranks.close()


async def test_a_rank_that_has_just_ended_withholds_no_signal_from_the_others(tmp_path: Path) -> None:
    warm, runtime = FakeWarmProcess(), RuntimeFolder(tmp_path / "run").create()
    ranks = start_ranks(warm, runtime)
    try:
        ranks.signal(signal.SIGTERM)
        assert await asyncio.to_thread(warm.processes[1].wait, 30) == -signal.SIGTERM
    finally:
        ranks.close()
