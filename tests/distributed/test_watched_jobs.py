"""Ranks that know nothing of Pacekeeper, under the real sidecar of a watched container and the operator's decisions."""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import subprocess
import time
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, cast

import pytest

from pacekeeper.runtime_folder import RuntimeFolder
from pacekeeper.sidecar.container_monitor import ContainerMonitor
from pacekeeper.sidecar.operator_client import OperatorClient
from pacekeeper.sidecar.settings import SidecarSettings
from pacekeeper.sidecar.sidecar import Sidecar
from pacekeeper.watch.container import WatchedContainer
from pacekeeper.watch.payload import build_payload
from pacekeeper_operator.api.formats import parse_time
from pacekeeper_operator.async_runtime import OperatorRuntime
from pacekeeper_operator.decide.stragglers import profile
from pacekeeper_operator.kube.client import PODS
from pacekeeper_rank.watching.process_monitor import start_process_monitor
from pacekeeper_rank.watching.watch_folder import WatchFolder
from testing.kubernetes.fake_cluster import FakeCluster
from testing.operators.watched_pods import build_pod_body
from testing.operators.watching_operator import DirectClient, WatchingOperator

SCRIPT = Path(__file__).parents[2] / "testing/training/watched/training.py"
POD = "train-0-abcde"
PATIENCE_SECONDS = 300.0
"""It only bounds a failure."""
PASS_INTERVAL_SECONDS = 0.5


class WatchedPod:
    """A container in which the payload is, with its sidecar, and the operator."""

    def __init__(
        self, watching: WatchingOperator, cluster: FakeCluster, start: Callable[..., subprocess.Popen[bytes]]
    ) -> None:
        self.watching = watching
        self.cluster = cluster
        self._start = start
        self.process = start()

    def restart(self, *arguments: str) -> None:
        """Run the script again. It must have ended."""
        self.process = self._start(*arguments)

    def list_objects(self, plural: str) -> list[dict[str, Any]]:
        return [body for (kind, _, _), body in self.cluster.objects.items() if kind == plural]

    def find_incident(self, cause: str) -> dict[str, Any] | None:
        return next((body for body in self.list_objects("incidents") if body["spec"]["cause"] == cause), None)

    async def wait_for(self, find: Callable[[], Any], what: str) -> Any:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (found := find()):
            assert time.monotonic() < deadline, f"{what}: {self.list_objects('watchedjobs')}"
            await asyncio.sleep(0.1)
        return found


@asynccontextmanager
async def watch(python: str, folder: Path, *arguments: str, **settings: Any) -> AsyncIterator[WatchedPod]:
    """Run the script in a watched container. `settings`: of the operator."""
    runtime, payload = folder / "runtime", folder / "payload"
    files = WatchFolder(runtime).create()
    boot = build_payload(payload)
    monitor = start_process_monitor(files)
    environment = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(boot),
        "PACEKEEPER_WATCH_RUNTIME": str(runtime),
    }
    cluster = FakeCluster()
    await cluster.create(PODS, build_pod_body(POD))
    watching = WatchingOperator(cluster, OperatorRuntime(), **settings)
    await watching.start()
    sidecar_settings = SidecarSettings(RuntimeFolder(runtime), "", POD, "", "", Path(), watched=True)
    client = cast(OperatorClient, DirectClient(watching, POD))
    sidecar = Sidecar(sidecar_settings, client, ContainerMonitor(WatchedContainer(runtime, POD), POD))

    def start(*others: str) -> subprocess.Popen[bytes]:
        return start_script([python, str(SCRIPT), *(others or arguments)], environment)

    pod = WatchedPod(watching, cluster, start)
    tasks = [asyncio.create_task(sidecar.run()), asyncio.create_task(run_passes(watching))]
    try:
        yield pod
        for task in tasks:
            assert not task.done(), "".join(traceback.format_exception(task.exception()))
    finally:
        with suppress(ProcessLookupError):
            os.killpg(pod.process.pid, signal.SIGKILL)
        pod.process.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        monitor.stop()


def start_script(command: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start it in a process group of its own."""
    return subprocess.Popen(command, env=environment, start_new_session=True)


async def run_passes(watching: WatchingOperator) -> None:
    while True:
        await watching.run_pass()
        await asyncio.sleep(PASS_INTERVAL_SECONDS)


async def test_slow_stopped_and_killed_ranks_become_incidents(bare_python: str, tmp_path: Path) -> None:
    """Rank 1 is slow for a while, then rank 2 is stopped, and at last rank 1 is killed."""
    actions = ("slow:1:150-350:0.08", "SIGSTOP:2:450", "SIGKILL:1:520")
    async with watch(bare_python, tmp_path, "3", "600", *actions) as pod:
        (job,) = await pod.wait_for(
            lambda: [b for b in pod.list_objects("watchedjobs") if b.get("status", {}).get("phase") == "Watched"],
            "all ranks describe themselves",
        )
        assert job["status"]["ranks"] == "3/3"
        slow = await pod.wait_for(lambda: pod.find_incident("straggler"), "the slow rank is named")
        assert slow["spec"]["rank"] == 1
        assert slow["status"]["slowdownBefore"] > 1.5
        await pod.wait_for(lambda: (pod.find_incident("straggler") or {})["status"].get("outcome"), "it is over")
        hang = await pod.wait_for(lambda: pod.find_incident("hang"), "the stopped rank is named")
        assert (hang["spec"]["rank"], "Stopped" in hang["spec"]["message"]) == (2, True)
        message = hang["spec"]["message"]
        await pod.wait_for(
            lambda: [b for b in pod.list_objects("watchedjobs") if b["status"].get("waiting") == message],
            "the status says for whom the others wait",
        )
        os.killpg(pod.process.pid, signal.SIGCONT)
        crash = await pod.wait_for(lambda: pod.find_incident("crash"), "the killed rank is named")
        assert crash["spec"]["rank"] == 1
        assert crash["spec"]["message"].startswith(f"rank 1 on {POD} ended without an exception")
        hang = pod.find_incident("hang")
        assert hang is not None
        assert hang["status"]["outcome"] == "Observed", "the job went on by itself"
        assert all("applied" not in body["status"] for body in pod.list_objects("incidents")), "nothing was done"


async def test_a_profile_names_the_function_that_makes_a_rank_slow(
    bare_python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile, "PROFILE_LEAD_SECONDS", 2.0)
    monkeypatch.setattr(profile, "MIN_PROFILE_WINDOW_SECONDS", 3.0)
    async with watch(bare_python, tmp_path, "3", "1000", "slow:1:100-1000:0.2", watch_profiles=True) as pod:
        slow = await pod.wait_for(lambda: pod.find_incident("straggler"), "the slow rank is named")
        assert slow["spec"]["rank"] == 1
        (window,) = await pod.wait_for(lambda: pod.list_objects("profilewindows"), "the profile is saved")
        assert window["metadata"]["name"] == slow["metadata"]["name"]

        def find_diagnosis() -> dict[str, Any] | None:
            incident = pod.find_incident("straggler")
            found = None if incident is None else incident["status"].get("diagnosis")
            return found if found and any(signal["kind"] == "Profile" for signal in found["signals"]) else None

        diagnosis = await pod.wait_for(find_diagnosis, "the profile explains the Incident")
        assert {signal["kind"] for signal in diagnosis["signals"]} == {"Times", "Profile"}
        assert diagnosis["culprit"].endswith(":act on rank 1"), diagnosis
        assert pod.process.poll() is None, "the job goes on"


async def test_the_account_tells_what_gpu_seconds_were_lost_to(
    bare_python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 is slow for a while, then stopped; rank 0 is killed, and the script continues from its checkpoint.

    All parts are right within 2 % of the wall time, also with two busy processes next to them.
    """
    monkeypatch.setenv("STATE", str(tmp_path))
    # The rank is slow for long enough to be named on a loaded machine, too.
    actions = ("slow:1:100-249:0.06", "SIGSTOP:1:290", "SIGKILL:0:390")
    async with watch(bare_python, tmp_path, "2", "420", *actions) as pod:
        await pod.wait_for(lambda: pod.find_incident("hang"), "the stopped rank is named")
        os.killpg(pod.process.pid, signal.SIGCONT)
        await asyncio.to_thread(pod.process.wait)
        await pod.wait_for(lambda: pod.find_incident("crash"), "the end of the round is dated by the killed rank")
        restarted = time.time()
        pod.restart("2", "420")
        job = await pod.wait_for(
            lambda: next((b for b in pod.list_objects("watchedjobs") if b["status"]["account"]["step"] == 420), None),
            "all steps are accounted for",
        )
    account, wall = job["status"]["account"], job["status"]["account"]["gpuSeconds"] / 2
    seconds = {loss: lost / 2 for loss, lost in account["lost"].items()}
    until = parse_time(account["until"])
    first, second = read_step_log(tmp_path / "steps")
    usual = statistics.median(first[step] - first[step - 1] for step in range(10, 100))
    # The round begins while the process imports torch: after it was started, before its script's first line.
    begun = min(max(restarted, first[389] + seconds["idle"]), second[-1])
    truth = {
        "startup": first[0] - (until - wall) + second[350] - begun,
        "straggler": first[249] - first[99] - 150 * usual,
        "hang": first[290] - first[289] - usual,
        "idle": begun - first[389],
        "repeatedSteps": second[389] - second[350],
    }
    assert until == pytest.approx(second[419], abs=0.02 * wall)
    assert {loss: seconds[loss] for loss in truth} == pytest.approx(truth, abs=0.03 * wall)
    assert account["useful"] / 2 + sum(seconds.values()) == pytest.approx(wall, abs=0.01), "rounded to milliseconds"
    (node,) = account["nodes"]
    assert node["gpuSeconds"] / 2 == pytest.approx(truth["straggler"] + truth["hang"], abs=0.03 * wall)


def read_step_log(path: Path) -> list[dict[int, float]]:
    """Return the end of each step, Unix seconds, of each run of the script. -1: its start."""
    runs: list[dict[int, float]] = []
    for event, time_ in map(str.split, path.read_text().splitlines()):
        if event == "start":
            runs.append({-1: float(time_)})
        else:
            runs[-1][int(event)] = float(time_)
    return runs
