"""Sidecars of workers that do not run: one process that speaks for all of them as their own sidecars would.

    python -m bench.scripts.scale.sidecars     # {"api", "authority", "token", "folder", "of"} as JSON on its stdin

`of`: "all" of them, "spares", or "others". This process needs seconds for a plan for thousands of workers. In a
cluster each has a processor of its own: a spare that is to be timed needs another process.

Each has a token of its own, bound to its pod, a TLS connection of its own from an address of its own, and the real
client (`pacekeeper.sidecar.operator_client`). At most as many handshakes are in progress at a time as one process can
answer: thousands of machines have a processor each for theirs. Each worker is warm, follows the plan, and steps; its
metrics vary a little. Prints a line of JSON ten times a second: how many poll, how many train, how often one was given
ranks and when the last one was, and how many calls were refused so far.
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

from pacekeeper.runtime_folder import RuntimeFolder
from pacekeeper.sidecar.operator_client import OperatorClient, OperatorUnavailable, RequestRejected
from pacekeeper.sidecar.settings import SidecarSettings
from pacekeeper_analysis.protocol.plan import WorkerPlan, WorkerRole
from pacekeeper_analysis.protocol.reports import (
    Heartbeat,
    LauncherState,
    RankMetrics,
    RoundStart,
    StepProgress,
    TrainingReport,
)
from pacekeeper_analysis.protocol.requests import WorkerRequests

from .api import Api, connect_api

STEP_SECONDS = 1.0
REPORT_INTERVAL_SECONDS = 0.1
STEP_TIME_VARIATION = 0.01
"""By so much a rank's step times differ from one telling to the next."""
WAIT_SHARE = 0.05
"""Of a step, that all ranks wait: jobs that wait for a tenth of it are investigated again and again."""
LABEL_JOB = "pacekeeper.dev/job"
AUDIENCE = "pacekeeper"
FIRST_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 0.2, 5.0
MAX_CONCURRENT_CONNECTS = 128
"""Connections."""
SIDECAR_GC_THRESHOLDS = 100_000, 50, 50
"""Thresholds of the garbage collector. With Python's defaults one collection visits all objects of 5,000 sidecars, for
1.7 s in which no sidecar makes progress."""
KIND_FILTERS: dict[str, Callable[[bool], bool]] = {
    "all": lambda _: True,
    "spares": lambda spare: spare,
    "others": lambda spare: not spare,
}
"""Whether the sidecar of a pod lives here, by whether it was made to be a spare."""


@dataclass
class SidecarSet:
    api: Api
    folder: Path
    lives_here: Callable[[bool], bool]
    counts: Counter[str] = field(default_factory=Counter)
    began: float = field(default_factory=time.time)
    contexts: dict[str, ssl.SSLContext] = field(default_factory=dict)
    lives: dict[str, asyncio.Task[None]] = field(default_factory=dict)  # by UID of a pod
    begins: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_CONCURRENT_CONNECTS))
    made: int = 0
    taken_at: float = 0.0  # when a worker was given ranks last, by the machine's monotonic clock

    def on_pod_event(self, kind: str, pod: dict[str, Any]) -> None:
        """A pod's sidecar lives as long as the pod does."""
        uid, status = pod["metadata"]["uid"], pod.get("status", {})
        is_over = kind == "DELETED" or "deletionTimestamp" in pod["metadata"]
        if is_over and uid in self.lives:
            self.lives.pop(uid).cancel()
        elif (
            not is_over
            and status.get("phase") == "Running"
            and uid not in self.lives
            and self.lives_here(_is_spare(pod))
        ):
            self.made += 1
            self.lives[uid] = asyncio.create_task(_run_sidecar(self, pod, self.made))

    def get_ssl_context(self, authority: str) -> ssl.SSLContext:
        if authority not in self.contexts:
            self.contexts[authority] = ssl.create_default_context(cadata=authority)
        return self.contexts[authority]


def _is_spare(pod: dict[str, Any]) -> bool:
    """It must not share a node with others of its job."""
    anti_affinity = pod["spec"].get("affinity", {}).get("podAntiAffinity", {})
    return "requiredDuringSchedulingIgnoredDuringExecution" in anti_affinity


async def _run_sidecar(sidecar_set: SidecarSet, pod: dict[str, Any], number: int) -> None:
    settings = await _build_settings(sidecar_set, pod)
    source_address = f"127.{2 + number // 62500}.{number // 250 % 250}.{1 + number % 250}"
    connector = aiohttp.TCPConnector(
        ssl=sidecar_set.get_ssl_context(settings.authority), keepalive_timeout=60, local_addr=(source_address, 0)
    )
    async with aiohttp.ClientSession(
        connector=connector, trace_configs=[_limit_connects(sidecar_set.begins)]
    ) as session:
        client, plan, backoff = OperatorClient(session, settings), WorkerPlan(version=-1), FIRST_BACKOFF_SECONDS
        requests = WorkerRequests()
        heartbeat = Heartbeat(worker=settings.worker, state=LauncherState.WARM)
        sidecar_set.counts["sidecars"] += 1
        is_training, held_seconds = False, 0.0
        try:
            while plan.role is not WorkerRole.LEAVE:
                wait, start = settings.poll_seconds, time.monotonic()
                max_hold = min(settings.hold_seconds, max(wait, 2 * held_seconds))
                try:
                    current = _update_heartbeat(heartbeat, plan, sidecar_set)
                    answer = await client.poll(current, plan.version, requests.identity, wait, max_hold)
                except (OperatorUnavailable, RequestRejected) as error:
                    sidecar_set.counts["refused"] += 1
                    print(error, file=sys.stderr, flush=True)
                    await asyncio.sleep(backoff * random.uniform(0.75, 1.25))
                    backoff = min(MAX_BACKOFF_SECONDS, 2 * backoff)
                    continue
                held_seconds = held_seconds if answer is not None else time.monotonic() - start
                sidecar_set.counts["polls"] += 1
                backoff = FIRST_BACKOFF_SECONDS
                requests = requests if answer is None or answer.requests is None else answer.requests
                new_plan = None if answer is None else answer.plan
                if new_plan is not None:
                    is_training, was_training = new_plan.role is WorkerRole.MEMBER, is_training
                    sidecar_set.counts["training"] += is_training - was_training
                    if is_training and not was_training:
                        sidecar_set.counts["taken"] += 1
                        sidecar_set.taken_at = time.monotonic()
                    plan, heartbeat = new_plan, _follow_plan(heartbeat, plan, new_plan)
        finally:
            sidecar_set.counts["sidecars"] -= 1
            sidecar_set.counts["training"] -= is_training


def _limit_connects(connect_slots: asyncio.Semaphore) -> aiohttp.TraceConfig:
    """Connections are begun in turn; the client's time for a handshake counts from its turn."""

    async def begin(_session: object, request_context: SimpleNamespace, _params: object) -> None:
        await connect_slots.acquire()
        request_context.begins = True

    async def end(_session: object, request_context: SimpleNamespace, _params: object) -> None:
        if vars(request_context).pop("begins", False):
            connect_slots.release()

    trace = aiohttp.TraceConfig()
    trace.on_connection_create_start.append(begin)
    trace.on_connection_create_end.append(end)
    trace.on_request_exception.append(end)
    return trace


def _follow_plan(heartbeat: Heartbeat, previous: WorkerPlan, plan: WorkerPlan) -> Heartbeat:
    heartbeat = replace(heartbeat, plan_version=plan.version)
    if plan.role is not WorkerRole.MEMBER:
        return replace(heartbeat, state=LauncherState.WARM, round=0, membership=plan.membership)
    if (plan.membership, plan.round) != (previous.membership, previous.round) or previous.role is not WorkerRole.MEMBER:
        now = time.time()
        return replace(
            heartbeat, state=LauncherState.RUNNING, membership=plan.membership, round=plan.round, restarts=0,
            start=RoundStart(started_at=now, first_step_at=now),
            training=TrainingReport(managed=True, sync_mode=plan.sync_mode),
        )  # fmt: skip
    return heartbeat


def _update_heartbeat(heartbeat: Heartbeat, plan: WorkerPlan, sidecar_set: SidecarSet) -> Heartbeat:
    """With the steps that it has taken by now."""
    started_at = heartbeat.start.started_at
    if heartbeat.state is not LauncherState.RUNNING or started_at is None:
        return heartbeat
    now = time.time()
    metrics = tuple(_draw_rank_metrics(rank) for rank in plan.ranks)
    progress = StepProgress(
        step=int((now - sidecar_set.began) / STEP_SECONDS), steps_in_round=int((now - started_at) / STEP_SECONDS) + 1
    )
    return replace(heartbeat, progress=progress, rank_metrics=metrics)


def _draw_rank_metrics(rank: int) -> RankMetrics:
    step_seconds = STEP_SECONDS * random.uniform(1 - STEP_TIME_VARIATION, 1 + STEP_TIME_VARIATION)
    own_seconds = (1 - WAIT_SHARE) * step_seconds
    return RankMetrics(rank, 8, step_seconds, own_seconds, own_seconds / 8, step_seconds - own_seconds, 8, STEP_SECONDS)


async def _build_settings(sidecar_set: SidecarSet, pod: dict[str, Any]) -> SidecarSettings:
    """As the operator has written them into the pod, with a token as the kubelet would get it."""
    metadata, spec = pod["metadata"], pod["spec"]
    containers = [*spec.get("initContainers", ()), *spec["containers"]]
    variables = {
        variable["name"]: variable.get("value", "") for container in containers for variable in container.get("env", ())
    }
    pod_reference = {"kind": "Pod", "apiVersion": "v1", "name": metadata["name"], "uid": metadata["uid"]}
    account = spec.get("serviceAccountName", "default")
    path = f"/api/v1/namespaces/{metadata['namespace']}/serviceaccounts/{account}/token"
    request = {"spec": {"audiences": [AUDIENCE], "expirationSeconds": 7200, "boundObjectRef": pod_reference}}
    response = await sidecar_set.api.call("POST", path, request)
    file = sidecar_set.folder / f"{metadata['uid']}.token"
    file.touch(mode=0o600)
    file.write_text(response["status"]["token"])
    return SidecarSettings(
        runtime=RuntimeFolder(sidecar_set.folder),
        job=metadata["labels"][LABEL_JOB],
        worker=metadata["name"],
        operator=variables["PACEKEEPER_OPERATOR"],
        authority=variables["PACEKEEPER_CA"],
        token_file=file,
    )


async def _run_sidecars(config: dict[str, str]) -> None:
    context = ssl.create_default_context(cafile=config["authority"])
    async with connect_api(config["api"], config["token"], context) as api:
        sidecar_set = SidecarSet(api, Path(config["folder"]), KIND_FILTERS[config["of"]])
        watch_task = asyncio.create_task(api.watch("/api/v1/pods", sidecar_set.on_pod_event, LABEL_JOB))
        while not watch_task.done():
            print(json.dumps({**sidecar_set.counts, "taken_at": sidecar_set.taken_at}), flush=True)
            await asyncio.sleep(REPORT_INTERVAL_SECONDS)
        await watch_task


if __name__ == "__main__":
    gc.set_threshold(*SIDECAR_GC_THRESHOLDS)
    asyncio.run(_run_sidecars(json.loads(sys.stdin.readline())))
