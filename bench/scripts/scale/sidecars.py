"""Sidecars of workers that do not run: one process that speaks for all of them as their own sidecars would.

    python -m bench.scripts.scale.sidecars     # {"api", "authority", "token", "folder", "of"} as JSON on its stdin

`of`: "all" of them, "spares", or "others". What thousands are told together this process takes in for seconds, where
each has a processor of its own in a cluster: a spare that is to be timed needs another one.

Each has a token of its own, bound to its pod, a TLS connection of its own from an address of its own, and the real
client (`pacekeeper.sidecar.client`). Of their handshakes so many are under way at a time as one process can answer:
thousands of machines have a processor each for theirs. Each worker is warm, follows the plan, and steps; its figures
move a little. Prints a line of JSON ten times a second: how many poll, how many train, how often one was given ranks
and when the last one was, and how many calls were refused so far.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import ssl
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp

from pacekeeper.runtime import RuntimeFolder
from pacekeeper.sidecar.client import OperatorClient, RequestRejected, OperatorUnavailable
from pacekeeper.sidecar.settings import SidecarSettings
from pacekeeper_analysis.plan import WorkerRole, WorkerPlan
from pacekeeper_analysis.reports import Heartbeat, LauncherState, RankMetrics

from .api import Api, connect

STEP_SECONDS = 1.0
REPORT_INTERVAL_SECONDS = 0.1
WOBBLE = 0.01
"""By so much a rank's step times differ from one telling to the next."""
WAITS = 0.05
"""Of a step, that all ranks wait: jobs that wait for a tenth of it are asked where that comes from, again and again."""
LABEL_JOB = "pacekeeper.dev/job"
AUDIENCE = "pacekeeper"
FIRST_BACKOFF, LONGEST_BACKOFF = 0.2, 5.0
BEGIN_AT_ONCE = 128
"""Connections."""
SIDECAR_GC_THRESHOLDS = 100_000, 50, 50
"""When to look for garbage. By Python's own measure all objects of 5,000 sidecars, which have a few each, are looked
through together, for 1.7 s in which nobody is heard."""
KIND_FILTERS: dict[str, Callable[[bool], bool]] = {
    "all": lambda _: True,
    "spares": lambda spare: spare,
    "others": lambda spare: not spare,
}
"""Whether the sidecar of a pod lives here, by whether it was made to be a spare."""


@dataclass
class SidecarFleet:
    api: Api
    folder: Path
    lives_here: Callable[[bool], bool]
    counts: Counter[str] = field(default_factory=Counter)
    began: float = field(default_factory=time.time)
    contexts: dict[str, ssl.SSLContext] = field(default_factory=dict)
    lives: dict[str, asyncio.Task[None]] = field(default_factory=dict)  # by UID of a pod
    begins: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(BEGIN_AT_ONCE))
    made: int = 0
    taken_at: float = 0.0  # when a worker was given ranks last, by the machine's monotonic clock

    def on_pod_event(self, kind: str, pod: dict[str, Any]) -> None:
        """A pod's sidecar lives as long as the pod does."""
        uid, status = pod["metadata"]["uid"], pod.get("status", {})
        over = kind == "DELETED" or "deletionTimestamp" in pod["metadata"]
        if over and uid in self.lives:
            self.lives.pop(uid).cancel()
        elif not over and status.get("phase") == "Running" and uid not in self.lives and self.lives_here(_spare(pod)):
            self.made += 1
            self.lives[uid] = asyncio.create_task(_live(self, pod, self.made))

    def context(self, authority: str) -> ssl.SSLContext:
        if authority not in self.contexts:
            self.contexts[authority] = ssl.create_default_context(cadata=authority)
        return self.contexts[authority]


def _spare(pod: dict[str, Any]) -> bool:
    """It must not share a node with others of its job."""
    apart = pod["spec"].get("affinity", {}).get("podAntiAffinity", {})
    return "requiredDuringSchedulingIgnoredDuringExecution" in apart


async def _live(fleet: SidecarFleet, pod: dict[str, Any], number: int) -> None:
    settings = await _settings(fleet, pod)
    source = f"127.{2 + number // 62500}.{number // 250 % 250}.{1 + number % 250}"
    connector = aiohttp.TCPConnector(
        ssl=fleet.context(settings.authority), keepalive_timeout=60, local_addr=(source, 0)
    )
    async with aiohttp.ClientSession(connector=connector, trace_configs=[_limit_connects(fleet.begins)]) as session:
        client, plan, backoff = OperatorClient(session, settings), WorkerPlan(version=-1), FIRST_BACKOFF
        beat = Heartbeat(worker=settings.worker, state=LauncherState.WARM)
        fleet.counts["sidecars"] += 1
        trains, held = False, 0.0
        try:
            while plan.role is not WorkerRole.LEAVE:
                wait, began = settings.poll_seconds, time.monotonic()
                most = min(settings.hold_seconds, max(wait, 2 * held))
                try:
                    news = await client.fetch_plan(_now(beat, plan, fleet), plan.version, wait, most)
                except (OperatorUnavailable, RequestRejected) as error:
                    fleet.counts["refused"] += 1
                    print(error, file=sys.stderr, flush=True)
                    await asyncio.sleep(backoff * random.uniform(0.75, 1.25))
                    backoff = min(LONGEST_BACKOFF, 2 * backoff)
                    continue
                held = held if news is not None else time.monotonic() - began
                fleet.counts["polls"] += 1
                backoff = FIRST_BACKOFF
                if news is not None:
                    trains, before = news.role is WorkerRole.MEMBER, trains
                    fleet.counts["training"] += trains - before
                    if trains and not before:
                        fleet.counts["taken"] += 1
                        fleet.taken_at = time.monotonic()
                    plan, beat = news, _follow(beat, plan, news)
        finally:
            fleet.counts["sidecars"] -= 1
            fleet.counts["training"] -= trains


def _limit_connects(begins: asyncio.Semaphore) -> aiohttp.TraceConfig:
    """Connections are begun in turn; the client's time for a handshake counts from its turn."""

    async def begin(_session: object, call: SimpleNamespace, _of: object) -> None:
        await begins.acquire()
        call.begins = True

    async def end(_session: object, call: SimpleNamespace, _of: object) -> None:
        if vars(call).pop("begins", False):
            begins.release()

    trace = aiohttp.TraceConfig()
    trace.on_connection_create_start.append(begin)
    trace.on_connection_create_end.append(end)
    trace.on_request_exception.append(end)
    return trace


def _follow(beat: Heartbeat, before: WorkerPlan, plan: WorkerPlan) -> Heartbeat:
    beat = replace(beat, plan_version=plan.version)
    if plan.role is not WorkerRole.MEMBER:
        return replace(beat, state=LauncherState.WARM, round=0, membership=plan.membership)
    if (plan.membership, plan.round) != (before.membership, before.round) or before.role is not WorkerRole.MEMBER:
        now = time.time()
        return replace(
            beat, state=LauncherState.RUNNING, membership=plan.membership, round=plan.round, round_started_at=now,
            first_step_at=now, steered=True, sync_mode=plan.sync_mode, restarts=0,
        )  # fmt: skip
    return beat


def _now(beat: Heartbeat, plan: WorkerPlan, fleet: SidecarFleet) -> Heartbeat:
    """With the steps that it has taken by now."""
    if beat.state is not LauncherState.RUNNING:
        return beat
    now = time.time()
    figures = tuple(_draw_rank_metrics(rank) for rank in plan.ranks)
    in_round = int((now - beat.round_started_at) / STEP_SECONDS) + 1
    return replace(beat, step=int((now - fleet.began) / STEP_SECONDS), steps_in_round=in_round, figures=figures)


def _draw_rank_metrics(rank: int) -> RankMetrics:
    step = STEP_SECONDS * random.uniform(1 - WOBBLE, 1 + WOBBLE)
    own = (1 - WAITS) * step
    return RankMetrics(rank, 8, step, own, own / 8, step - own, 8, STEP_SECONDS)


async def _settings(fleet: SidecarFleet, pod: dict[str, Any]) -> SidecarSettings:
    """As the operator has written them into the pod, with a token as the kubelet would get it."""
    metadata, spec = pod["metadata"], pod["spec"]
    containers = [*spec.get("initContainers", ()), *spec["containers"]]
    variables = {v["name"]: v.get("value", "") for c in containers for v in c.get("env", ())}
    bound = {"kind": "Pod", "apiVersion": "v1", "name": metadata["name"], "uid": metadata["uid"]}
    account = spec.get("serviceAccountName", "default")
    path = f"/api/v1/namespaces/{metadata['namespace']}/serviceaccounts/{account}/token"
    request = {"spec": {"audiences": [AUDIENCE], "expirationSeconds": 7200, "boundObjectRef": bound}}
    answer = await fleet.api.call("POST", path, request)
    file = fleet.folder / f"{metadata['uid']}.token"
    file.touch(mode=0o600)
    file.write_text(answer["status"]["token"])
    return SidecarSettings(
        runtime=RuntimeFolder(fleet.folder),
        job=metadata["labels"][LABEL_JOB],
        worker=metadata["name"],
        operator=variables["PACEKEEPER_OPERATOR"],
        authority=variables["PACEKEEPER_CA"],
        token_file=file,
    )


async def _main(said: dict[str, str]) -> None:
    context = ssl.create_default_context(cafile=said["authority"])
    async with connect(said["api"], said["token"], context) as api:
        fleet = SidecarFleet(api, Path(said["folder"]), KIND_FILTERS[said["of"]])
        watching = asyncio.create_task(api.watch("/api/v1/pods", fleet.on_pod_event, LABEL_JOB))
        while not watching.done():
            print(json.dumps({**fleet.counts, "taken_at": fleet.taken_at}), flush=True)
            await asyncio.sleep(REPORT_INTERVAL_SECONDS)
        await watching


if __name__ == "__main__":
    gc.set_threshold(*SIDECAR_GC_THRESHOLDS)
    asyncio.run(_main(json.loads(sys.stdin.readline())))
