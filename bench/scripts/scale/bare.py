"""Jobs as the operator keeps them, without a cluster: all of its own parts, and a small API server in memory.

What reaches the operator is what a real API server and real sidecars would send: manifests, pods, heartbeats, faults.
Only what lies behind them is missing: kubelets start every pod at once, ranks step on request.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import replace
from typing import Any

from pacekeeper_analysis.protocol.plan import SyncMode, WorkerPlan, WorkerRole
from pacekeeper_analysis.protocol.reports import (
    CheckpointReport,
    Evidence,
    FaultKind,
    FaultReport,
    Heartbeat,
    LauncherState,
    RankMetrics,
    RankState,
    RankWindow,
    RoundStart,
    StepProgress,
    TrainingReport,
)
from pacekeeper_analysis.stragglers.windows import count_window_steps
from pacekeeper_operator.api.formats import format_time
from pacekeeper_operator.api.names import TRAINER_CONTAINER
from pacekeeper_operator.api.training_job import JobPhase, TrainingJob
from pacekeeper_operator.async_runtime import OperatorRuntime
from pacekeeper_operator.endpoint.sidecars import Caller, RetryLater, SidecarService
from pacekeeper_operator.kube.client import TRAINING_JOBS, ApiResponse, Cluster, Object, Objects
from pacekeeper_operator.observe.job_cache import JobRegistry
from pacekeeper_operator.observe.prometheus import PrometheusClient
from pacekeeper_operator.pods.manifests import Installation
from pacekeeper_operator.runtime.job_context import JobContext
from pacekeeper_operator.runtime.reconcile import create_job_context, reconcile_job
from pacekeeper_operator.services.operator import Operator
from pacekeeper_operator.settings import Settings
from pacekeeper_rank.records import Collective, Phase

EPOCH = 1_800_000_000.0
"""Seconds since the epoch at which all of it begins."""
NAMESPACE = "team"
STEP_SECONDS, OWN_SECONDS = 0.5, 0.4
WINDOW_STEPS = count_window_steps(32, STEP_SECONDS)
MAX_PASSES = 40
"""Until a job trains, or trains again."""


class BenchClock(OperatorRuntime):
    """Time passes where the bench lets it pass."""

    def __init__(self) -> None:
        super().__init__(seed=1)
        self.passed = 0.0

    def now(self) -> float:
        return EPOCH + self.passed

    def monotonic(self) -> float:
        return self.passed

    async def run_with_timeout(self, seconds: float, work: Any) -> Any:
        """This runtime does not wait for results that have not come yet."""
        return await super().run_with_timeout(min(seconds, 0.0), work)


class BareApiServer:
    """Objects by their path. Pods run as soon as they are made, each on a node of its own: see `on_pod_event`."""

    def __init__(self, clock: BenchClock) -> None:
        self.clock = clock
        self.objects: dict[str, Object] = {}
        self.on_pod_event: Callable[[Object, bool], None] = lambda _body, _deleted: None
        self.version = 0
        self.nodes = 0

    async def watch(self, _path: str, _query: Mapping[str, str]) -> AsyncGenerator[Object]:
        """Yields nothing: `on_pod_event` is called instead."""
        return
        yield

    async def request(
        self, method: str, path: str, query: Mapping[str, str], body: Object | Objects | None, _style: str
    ) -> ApiResponse:
        """As `cluster.Connection`. Bodies go through JSON, as on a wire."""
        document: Any = json.loads(json.dumps(body))
        match method:
            case "GET":
                return self._handle_get(path)
            case "POST":
                name = document["metadata"]["name"]
                return ApiResponse(201, document if "dryRun" in query else self.put(f"{path}/{name}", document))
            case "PUT":
                current_version = self.objects[path]["metadata"]["resourceVersion"]
                stale = document["metadata"].get("resourceVersion", current_version) != current_version
                return ApiResponse(409, {"message": "stale"}) if stale else ApiResponse(200, self.put(path, document))
            case "PATCH":
                path = path.removesuffix("/status")
                return ApiResponse(200, self.put(path, _merge_patch(self.objects[path], document)))
            case _:
                deleted = self.objects.pop(path, None)
                if deleted is not None and "/pods/" in path:
                    self.on_pod_event(deleted, True)
                return ApiResponse(200, {})

    def put(self, path: str, body: Object) -> Object:
        self.version += 1
        previous = self.objects.get(path, {"metadata": {}})
        metadata = {
            "uid": f"uid-{self.version}",
            "creationTimestamp": format_time(self.clock.now()),
            **previous["metadata"],
            **body["metadata"],
            "resourceVersion": str(self.version),
        }
        body = self.objects[path] = {**body, "metadata": metadata}
        if "/pods/" in path:
            if "nodeName" not in body["spec"]:
                self._start_pod(body)
            self.on_pod_event(body, False)
        return body

    def _handle_get(self, path: str) -> ApiResponse:
        if path in self.objects:
            return ApiResponse(200, self.objects[path])
        if path.rpartition("/")[2] in ("incidents", "pods", "trainingjobs"):
            items = [body for known_path, body in self.objects.items() if known_path.startswith(f"{path}/")]
            return ApiResponse(200, {"items": items, "metadata": {"resourceVersion": str(self.version)}})
        return ApiResponse(404, {"message": f"{path} is not there"})

    def _start_pod(self, pod: Object) -> None:
        """By scheduler and kubelet."""
        self.nodes += 1
        pod["spec"]["nodeName"] = f"node-{self.nodes}"
        running = [{"name": TRAINER_CONTAINER, "state": {"running": {}}}]
        address = _build_address(1, self.nodes)
        pod["status"] = {"phase": "Running", "podIP": address, "containerStatuses": running}


class Jobs:
    """One operator, and jobs that it keeps."""

    def __init__(self) -> None:
        self.clock = BenchClock()
        self.server = BareApiServer(self.clock)
        cluster, settings = Cluster(self.server), Settings(sample_seconds=2.0)
        installation = Installation("https://operator", "")
        registry = JobRegistry(EPOCH)
        self.operator = Operator(
            settings, cluster, registry, installation, PrometheusClient("", "", ""), self.clock, paused=""
        )
        self.server.on_pod_event = self._on_pod_event
        self.sidecars = SidecarService(cluster, registry, self.clock)
        self._rounds: dict[str, int] = {}  # that launchers began by themselves, by job

    async def start(self, name: str, workers: int, ranks: int = 1) -> JobContext:
        """A job that trains, from its manifest on."""
        body = self.server.put(
            f"{TRAINING_JOBS.path}/namespaces/{NAMESPACE}/trainingjobs/{name}", build_manifest(name, workers, ranks)
        )
        body["metadata"]["generation"] = 1
        job = TrainingJob.parse(body)
        context = create_job_context(self.operator, job, body)
        await self.run_until(context, lambda: context.cache.phase is JobPhase.RUNNING)
        return context

    async def run_until(self, context: JobContext, condition: Callable[[], bool]) -> None:
        """Passes and polls, until it does. Raises RuntimeError where it never does."""
        for _ in range(MAX_PASSES):
            await self.run_turn(context)
            if condition():
                return
        raise RuntimeError(f"job {context.job.name} is {context.cache.phase}, and does not go on")

    async def run_turn(self, context: JobContext) -> float:
        """Its workers report their state, then a pass runs over it; processor seconds that the pass has taken."""
        self.clock.passed += 2.0
        await self.poll(context)
        return await self.run_pass(context)

    async def run_pass(self, context: JobContext) -> float:
        """One pass; seconds of the processor that it has taken, without what it has sent off."""
        start = time.process_time()
        await reconcile_job(self.operator, context)
        seconds = time.process_time() - start
        await context.effect_runner.wait_until_idle()
        return seconds

    async def poll(self, context: JobContext, skipped: slice = slice(0)) -> None:
        """Every worker of the job polls once, but those that are `skipped`."""
        placement = context.cache.desired.state.placement if context.cache.desired is not None else None
        workers = placement.workers if placement is not None else ()
        silent = {worker.name for worker in workers[skipped]}
        for worker in workers:
            if worker.uid and worker.name not in silent:
                contact = context.cache.contacts.get(worker.name)
                previous = None if contact is None else contact.raw_heartbeat
                plan = context.cache.plan
                assert plan is not None
                round_ = self._rounds.get(context.job.name, 0)
                heartbeat = self._build_heartbeat(plan.build_worker_plan(worker.name), worker.name, previous, round_)
                await self.sidecars.poll(self._build_caller(context, worker.name), heartbeat, plan.version, 0.0)

    def answer_request(self, context: JobContext) -> None:
        """All ranks send their last steps, as the open request asks for them."""
        plan = context.cache.plan
        assert plan is not None
        for member in plan.members:
            newest = context.cache.contacts[member.worker].raw_heartbeat.progress.step or 0
            windows = tuple(build_window(rank, newest) for rank in member.ranks)
            evidence = Evidence(context.cache.requests.evidence_name, member.worker, plan.round, windows)
            self.sidecars.receive_evidence(self._build_caller(context, member.worker), evidence)

    async def stall(self, context: JobContext) -> None:
        """All workers report that their ranks stall; rank 0 holds them up. What is not dealt with waits."""
        plan = context.cache.plan
        assert plan is not None
        faults = [
            build_stall(member.worker, member.ranks, plan.membership, plan.round, self.clock.now())
            for member in plan.members
        ]
        await asyncio.gather(*(self.report_fault(context, fault) for fault in faults))

    async def crash(self, context: JobContext) -> None:
        """A rank ends; the launchers begin another round, and passes go on until the incident is over."""
        plan, incidents = context.cache.plan, context.cache.desired
        assert plan is not None
        assert incidents is not None
        worker, round_ = plan.members[0].worker, max(plan.round, self._rounds.get(context.job.name, 0))
        step = context.cache.contacts[worker].raw_heartbeat.progress.step or 0
        past_count = len(incidents.state.incidents.past) + 1
        self._rounds[context.job.name] = round_ + 1
        await self.report_fault(context, build_crash(worker, plan.membership, round_, step, self.clock.now()))
        await self.run_until(context, lambda: _count_past_incidents(context) == past_count)

    async def report_fault(self, context: JobContext, fault: FaultReport) -> bool:
        """Whether it was dealt with by now."""
        try:
            await self.sidecars.receive_fault(self._build_caller(context, fault.worker), fault)
        except RetryLater:
            return False
        return True

    def _build_caller(self, context: JobContext, worker: str) -> Caller:
        return Caller(NAMESPACE, context.job.name, worker)

    def _build_heartbeat(
        self, worker_plan: WorkerPlan, worker: str, previous: Heartbeat | None, round_: int
    ) -> Heartbeat:
        """Warm until it has ranks; then each poll finds them some steps further. `round_`: the least there is."""
        now = self.clock.now()
        if worker_plan.role is not WorkerRole.MEMBER:
            return Heartbeat(worker, LauncherState.WARM, worker_plan.version, rendezvous_port=31000, sent_at=now)
        assert previous is not None
        round_ = max(worker_plan.round, round_)
        is_same_round = previous.membership == worker_plan.membership and previous.round == round_
        new_steps = round((now - (previous.sent_at or now)) / STEP_SECONDS)
        step = (previous.progress.step or 0) + new_steps
        metrics = tuple(
            RankMetrics(rank, WINDOW_STEPS, STEP_SECONDS, OWN_SECONDS, 0.0125, 0.01, 32, STEP_SECONDS, last_step=step)
            for rank in worker_plan.ranks
        )
        return Heartbeat(
            worker=worker,
            state=LauncherState.RUNNING,
            plan_version=worker_plan.version,
            membership=worker_plan.membership,
            round=round_,
            start=replace(previous.start, restored_step=0)
            if is_same_round
            else RoundStart(started_at=now, restored_step=0, first_step_at=now),
            progress=StepProgress(
                step=step,
                steps_in_round=previous.progress.steps_in_round + new_steps if is_same_round else new_steps,
                total_steps=1_000_000,
            ),
            checkpoint=CheckpointReport(step=0),
            training=TrainingReport(managed=True, global_batch=32 * worker_plan.world_size),
            rendezvous_port=31000,
            rank_metrics=metrics,
            sent_at=now,
        )

    def _on_pod_event(self, body: Object, deleted: bool) -> None:
        """The watches' events of a pod, and of the node that it has."""
        if not deleted:
            name = body["spec"]["nodeName"]
            if self.operator.stores.nodes.get(("", name)) is None:
                self.operator.stores.nodes.apply_event(
                    build_node(name, body["metadata"]["resourceVersion"]), deleted=False
                )
        self.operator.stores.pods.apply_event(body, deleted=deleted)


def build_manifest(name: str, workers: int, ranks: int) -> Object:
    container = {
        "name": TRAINER_CONTAINER,
        "image": "registry.example/image",
        "command": ["pacekeeper", "run", "train.py"],
    }
    return {
        "apiVersion": "pacekeeper.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name, "namespace": NAMESPACE, "generation": 1},
        "spec": {
            "replicas": workers,
            "nprocPerNode": ranks,
            "checkpoint": {"volumeClaimName": "checkpoints", "path": "/checkpoints"},
            "remediation": {"maxRestarts": 100},
            "template": {"spec": {"containers": [container]}},
        },
    }


def build_node(name: str, version: str) -> Object:
    number = int(name.rpartition("-")[2])
    return {
        "metadata": {"name": name, "uid": f"node-uid-{number}", "resourceVersion": version},
        "spec": {},
        "status": {
            "conditions": [{"type": "Ready", "status": "True"}],
            "addresses": [{"type": "InternalIP", "address": _build_address(2, number)}],
        },
    }


def build_window(rank: int, newest: int) -> RankWindow:
    """What a rank sends of its last steps up to `newest`."""
    steps = tuple(range(newest - WINDOW_STEPS + 1, newest + 1))
    return RankWindow(
        rank=rank,
        steps=steps,
        step_seconds=(STEP_SECONDS,) * len(steps),
        compute_seconds=(OWN_SECONDS,) * len(steps),
        samples=(32,) * len(steps),
        sync_mode=SyncMode.SYNC,
        baseline_seconds=STEP_SECONDS,
        baseline_own_seconds=OWN_SECONDS,
    )


def build_stall(worker: str, ranks: tuple[int, ...], membership: int, round_: int, now: float) -> FaultReport:
    """What its launcher reports; rank 0 has never come to the collective that the others are in."""
    states = tuple(
        RankState(
            rank=rank,
            phase=Phase.TRAIN.name,
            phase_seconds=60.0,
            step=500,
            collective=(Collective.ALL_REDUCE if rank else Collective.NONE).name,
            group=1,
            sequence=42 if rank else 41,
            collectives_entered=42 if rank else 41,
            waiting_seconds=60.0,
            process_state="S",
            stack='File "train.py", line 90, in step\n    loss.backward()',
            moving=False,
        )
        for rank in ranks
    )
    name = f"{worker}-0f3a9c-r{round_}-stalled-1"
    return FaultReport(name, FaultKind.STALLED, worker, round_, now, membership, step=500, ranks=states, sent_at=now)


def build_crash(worker: str, membership: int, round_: int, step: int, now: float) -> FaultReport:
    """What a launcher reports of a rank that was killed."""
    return FaultReport(
        f"{worker}-0f3a9c-r{round_}-rank-0",
        FaultKind.RANK_FAILED,
        worker,
        round_,
        now - 3.0,
        membership,
        rank=0,
        exit_code=-9,
        completed_step=True,
        step=step,
        sent_at=now,
    )


def _count_past_incidents(context: JobContext) -> int:
    """Incidents of the job that are over."""
    return 0 if context.cache.desired is None else len(context.cache.desired.state.incidents.past)


def _build_address(block: int, number: int) -> str:
    """Of this machine itself, which answers at each of them: who is probed is reached."""
    return f"127.{block << 2 | number >> 16}.{number >> 8 & 255}.{number & 255}"


def _merge_patch(before: Any, patch: Any) -> Any:
    """RFC 7396."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(before) if isinstance(before, dict) else {}
    for name, value in patch.items():
        merged[name] = _merge_patch(merged.get(name), value)
        if value is None:
            del merged[name]
    return merged
