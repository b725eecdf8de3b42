"""Jobs as the operator keeps them, without a cluster: all of its own parts, and a small API server in memory.

What reaches the operator is what a real API server and real sidecars would send: manifests, pods, heartbeats, faults.
Only what lies behind them is missing: kubelets start every pod at once, ranks step when they are told to.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

from pacekeeper_analysis.plan import WorkerRole, WorkerPlan
from pacekeeper_analysis.records import Collective, Phase
from pacekeeper_analysis.reports import FaultReport, FaultKind, Heartbeat, LauncherState, RankMetrics, RankState
from pacekeeper_operator.api import TRAINER_CONTAINER, TrainingJob, JobPhase, format_time
from pacekeeper_operator.cluster import TRAINING_JOBS, ApiResponse, Cluster, Object, Objects
from pacekeeper_operator.manifests import Installation
from pacekeeper_operator.observe.memory import JobRegistry
from pacekeeper_operator.observe.prometheus import PrometheusClient
from pacekeeper_operator.runtime import OperatorRuntime
from pacekeeper_operator.services.desk import JobContext
from pacekeeper_operator.services.operator import Operator
from pacekeeper_operator.services.reconcile import create_job_context, reconcile_job
from pacekeeper_operator.services.sidecars import Caller, RetryLater, SidecarService
from pacekeeper_operator.settings import Settings

EPOCH = 1_800_000_000.0
"""Seconds since the epoch at which all of it begins."""
NAMESPACE = "team"
STEP_SECONDS = 0.5
MOST_PASSES = 40
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
        """Nobody waits here for what has not come yet."""
        return await super().run_with_timeout(min(seconds, 0.0), work)


class BareApiServer:
    """Objects by their path. Pods run as soon as they are made, each on a node of its own; `heard` is told of them."""

    def __init__(self, clock: BenchClock) -> None:
        self.clock = clock
        self.objects: dict[str, Object] = {}
        self.on_pod_event: Callable[[Object, bool], None] = lambda _body, _deleted: None
        self.version = 0
        self.nodes = 0

    async def watch(self, _path: str, _query: Mapping[str, str]) -> AsyncGenerator[Object]:
        """Nobody watches here: `heard` is told."""
        return
        yield

    async def request(
        self, method: str, path: str, query: Mapping[str, str], body: Object | Objects | None, _style: str
    ) -> ApiResponse:
        """As `cluster.Connection`. Bodies go through JSON, as on a wire."""
        sent: Any = json.loads(json.dumps(body))
        match method:
            case "GET":
                return self._found(path)
            case "POST":
                name = sent["metadata"]["name"]
                return ApiResponse(201, sent if "dryRun" in query else self.put(f"{path}/{name}", sent))
            case "PUT":
                known = self.objects[path]["metadata"]["resourceVersion"]
                stale = sent["metadata"].get("resourceVersion", known) != known
                return ApiResponse(409, {"message": "stale"}) if stale else ApiResponse(200, self.put(path, sent))
            case "PATCH":
                path = path.removesuffix("/status")
                return ApiResponse(200, self.put(path, _merged(self.objects[path], sent)))
            case _:
                gone = self.objects.pop(path, None)
                if gone is not None and "/pods/" in path:
                    self.on_pod_event(gone, True)
                return ApiResponse(200, {})

    def put(self, path: str, body: Object) -> Object:
        self.version += 1
        before = self.objects.get(path, {"metadata": {}})
        metadata = {
            "uid": f"uid-{self.version}",
            "creationTimestamp": format_time(self.clock.now()),
            **before["metadata"],
            **body["metadata"],
            "resourceVersion": str(self.version),
        }
        body = self.objects[path] = {**body, "metadata": metadata}
        if "/pods/" in path:
            if "nodeName" not in body["spec"]:
                self._run(body)
            self.on_pod_event(body, False)
        return body

    def _found(self, path: str) -> ApiResponse:
        if path in self.objects:
            return ApiResponse(200, self.objects[path])
        if path.rpartition("/")[2] in ("incidents", "pods", "trainingjobs"):
            items = [body for known, body in self.objects.items() if known.startswith(f"{path}/")]
            return ApiResponse(200, {"items": items, "metadata": {"resourceVersion": str(self.version)}})
        return ApiResponse(404, {"message": f"{path} is not there"})

    def _run(self, pod: Object) -> None:
        """By scheduler and kubelet."""
        self.nodes += 1
        pod["spec"]["nodeName"] = f"node-{self.nodes}"
        running = [{"name": TRAINER_CONTAINER, "state": {"running": {}}}]
        address = _address(1, self.nodes)
        pod["status"] = {"phase": "Running", "podIP": address, "containerStatuses": running}


class Jobs:
    """One operator, and jobs that it keeps."""

    def __init__(self) -> None:
        self.clock = BenchClock()
        self.server = BareApiServer(self.clock)
        cluster, settings = Cluster(self.server), Settings(sample_seconds=2.0)
        installation = Installation("https://operator", "")
        memory = JobRegistry(EPOCH)
        self.operator = Operator(settings, cluster, memory, installation, PrometheusClient("", "", ""), self.clock, paused="")
        self.server.on_pod_event = self._on_pod_event
        self.sidecars = SidecarService(cluster, memory, self.clock)
        self._rounds: dict[str, int] = {}  # that launchers began by themselves, by job

    async def start(self, name: str, workers: int, ranks: int = 1) -> JobContext:
        """A job that trains, from its manifest on."""
        body = self.server.put(
            f"{TRAINING_JOBS.path}/namespaces/{NAMESPACE}/trainingjobs/{name}", manifest(name, workers, ranks)
        )
        body["metadata"]["generation"] = 1
        job = TrainingJob.parse(body)
        desk = create_job_context(self.operator, job, body)
        await self.run_until(desk, lambda: desk.cache.phase is JobPhase.RUNNING)
        return desk

    async def run_until(self, context: JobContext, holds: Callable[[], bool]) -> None:
        """Passes and polls, until it does. Raises RuntimeError where it never does."""
        for _ in range(MOST_PASSES):
            await self.turn(context)
            if holds():
                return
        raise RuntimeError(f"job {context.job.name} is {context.cache.phase}, and does not go on")

    async def turn(self, desk: JobContext) -> float:
        """Its workers say how they are, then a pass looks at it; seconds of the processor that the pass has taken."""
        self.clock.passed += 2.0
        await self.poll(desk)
        return await self.run_pass(desk)

    async def run_pass(self, context: JobContext) -> float:
        """One pass; seconds of the processor that it has taken, without what it has sent off."""
        began = time.process_time()
        await reconcile_job(self.operator, context)
        took = time.process_time() - began
        await context.effect_runner.wait_until_idle()
        return took

    async def poll(self, desk: JobContext) -> None:
        """Every worker of the job polls once."""
        placement = desk.cache.desired.state.placement if desk.cache.desired is not None else None
        for worker in placement.workers if placement is not None else ():
            if worker.uid:
                contact = desk.cache.contacts.get(worker.name)
                before = None if contact is None else contact.raw_heartbeat
                plan = desk.cache.plan
                assert plan is not None
                round_ = self._rounds.get(desk.job.name, 0)
                heartbeat = self._heartbeat(plan.build_worker_plan(worker.name), worker.name, before, round_)
                await self.sidecars.poll(self._caller(desk, worker.name), heartbeat, plan.version, 0.0)

    async def stall(self, desk: JobContext) -> None:
        """All workers say that their ranks stand still; rank 0 holds them up. What is not dealt with waits."""
        plan = desk.cache.plan
        assert plan is not None
        faults = [
            stalled(member.worker, member.ranks, plan.membership, plan.round, self.clock.now())
            for member in plan.members
        ]
        await asyncio.gather(*(self.report_fault(desk, fault) for fault in faults))

    async def crash(self, desk: JobContext) -> None:
        """A rank ends; the launchers begin another round, and passes go on until the incident is over."""
        plan, incidents = desk.cache.plan, desk.cache.desired
        assert plan is not None
        assert incidents is not None
        worker, round_ = plan.members[0].worker, max(plan.round, self._rounds.get(desk.job.name, 0))
        step, over = desk.cache.contacts[worker].raw_heartbeat.step, len(incidents.state.incidents.past) + 1
        self._rounds[desk.job.name] = round_ + 1
        await self.report_fault(desk, crashed(worker, plan.membership, round_, step, self.clock.now()))
        await self.run_until(desk, lambda: _past(desk) == over)

    async def report_fault(self, context: JobContext, fault: FaultReport) -> bool:
        """Whether it was dealt with by now."""
        try:
            await self.sidecars.receive_fault(self._caller(context, fault.worker), fault)
        except RetryLater:
            return False
        return True

    def _caller(self, desk: JobContext, worker: str) -> Caller:
        return Caller(NAMESPACE, desk.job.name, worker)

    def _heartbeat(self, part: WorkerPlan, worker: str, before: Heartbeat | None, round_: int) -> Heartbeat:
        """Warm until it has ranks; then each poll finds them some steps further. `round_`: the least there is."""
        now = self.clock.now()
        if part.role is not WorkerRole.MEMBER:
            return Heartbeat(worker, LauncherState.WARM, part.version, meeting_port=31000, sent_at=now)
        assert before is not None
        round_ = max(part.round, round_)
        same = before.membership == part.membership and before.round == round_
        figures = tuple(RankMetrics(rank, 8, STEP_SECONDS, 0.4, 0.0125, 0.01, 32, STEP_SECONDS) for rank in part.ranks)
        return Heartbeat(
            worker=worker,
            state=LauncherState.RUNNING,
            plan_version=part.version,
            membership=part.membership,
            round=round_,
            step=before.step + 4 if before.step > 0 else 4,
            steps_in_round=before.steps_in_round + 4 if same else 4,
            total_steps=1_000_000,
            checkpoint_step=0,
            restored_step=0,
            global_batch=32 * part.world_size,
            round_started_at=before.round_started_at if same else now,
            first_step_at=before.first_step_at if same else now,
            steered=True,
            meeting_port=31000,
            figures=figures,
            sent_at=now,
        )

    def _on_pod_event(self, body: Object, deleted: bool) -> None:
        """The watches' word on a pod, and on the node that it has."""
        if not deleted:
            name = body["spec"]["nodeName"]
            if self.operator.nodes.get(("", name)) is None:
                self.operator.nodes.apply_event(node(name, body["metadata"]["resourceVersion"]), deleted=False)
        self.operator.pods.apply_event(body, deleted=deleted)


def manifest(name: str, workers: int, ranks: int) -> Object:
    container = {"name": TRAINER_CONTAINER, "image": "registry.example/image", "command": ["pacekeeper", "run", "train.py"]}
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


def node(name: str, version: str) -> Object:
    number = int(name.rpartition("-")[2])
    return {
        "metadata": {"name": name, "uid": f"node-uid-{number}", "resourceVersion": version},
        "spec": {},
        "status": {
            "conditions": [{"type": "Ready", "status": "True"}],
            "addresses": [{"type": "InternalIP", "address": _address(2, number)}],
        },
    }


def stalled(worker: str, ranks: tuple[int, ...], membership: int, round_: int, now: float) -> FaultReport:
    """What its launcher says; rank 0 has never come to the collective that the others are in."""
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


def crashed(worker: str, membership: int, round_: int, step: int, now: float) -> FaultReport:
    """What a launcher says of a rank that was killed."""
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


def _past(desk: JobContext) -> int:
    """Incidents of the job that are over."""
    return 0 if desk.cache.desired is None else len(desk.cache.desired.state.incidents.past)


def _address(of: int, number: int) -> str:
    """Of this machine itself, which answers at each of them: who is probed is reached."""
    return f"127.{of << 2 | number >> 16}.{number >> 8 & 255}.{number & 255}"


def _merged(before: Any, patch: Any) -> Any:
    """RFC 7396."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(before) if isinstance(before, dict) else {}
    for name, value in patch.items():
        merged[name] = _merged(merged.get(name), value)
        if value is None:
            del merged[name]
    return merged
