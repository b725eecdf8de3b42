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

from pacekeeper_analysis.plan import Role, WorkerPlan
from pacekeeper_analysis.records import Collective, Phase
from pacekeeper_analysis.reports import Fault, FaultKind, Heartbeat, LauncherState, RankFigures, RankState
from pacekeeper_operator.api import TRAINER, Job, JobPhase, format_time
from pacekeeper_operator.cluster import JOBS, Answer, Cluster, Object, Objects
from pacekeeper_operator.manifests import Installation
from pacekeeper_operator.observe.memory import Memory
from pacekeeper_operator.observe.prometheus import Prometheus
from pacekeeper_operator.runtime import Runtime
from pacekeeper_operator.services.desk import Desk
from pacekeeper_operator.services.operator import Operator
from pacekeeper_operator.services.reconcile import desk_for, reconcile
from pacekeeper_operator.services.sidecars import Caller, NotYet, Sidecars
from pacekeeper_operator.settings import Settings

EPOCH = 1_800_000_000.0
"""Seconds since the epoch at which all of it begins."""
NAMESPACE = "team"
STEP_SECONDS = 0.5
MOST_PASSES = 40
"""Until a job trains, or trains again."""


class Clock(Runtime):
    """Time passes where the bench lets it pass."""

    def __init__(self) -> None:
        super().__init__(seed=1)
        self.passed = 0.0

    def now(self) -> float:
        return EPOCH + self.passed

    def monotonic(self) -> float:
        return self.passed

    async def within(self, seconds: float, work: Any) -> Any:
        """Nobody waits here for what has not come yet."""
        return await super().within(min(seconds, 0.0), work)


class ApiServer:
    """Objects by their path. Pods run as soon as they are made, each on a node of its own; `heard` is told of them."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.objects: dict[str, Object] = {}
        self.heard: Callable[[Object, bool], None] = lambda _body, _deleted: None
        self.version = 0
        self.nodes = 0

    async def watch(self, _path: str, _query: Mapping[str, str]) -> AsyncGenerator[Object]:
        """Nobody watches here: `heard` is told."""
        return
        yield

    async def request(
        self, method: str, path: str, query: Mapping[str, str], body: Object | Objects | None, _style: str
    ) -> Answer:
        """As `cluster.Connection`. Bodies go through JSON, as on a wire."""
        sent: Any = json.loads(json.dumps(body))
        match method:
            case "GET":
                return self._found(path)
            case "POST":
                name = sent["metadata"]["name"]
                return Answer(201, sent if "dryRun" in query else self.put(f"{path}/{name}", sent))
            case "PUT":
                known = self.objects[path]["metadata"]["resourceVersion"]
                stale = sent["metadata"].get("resourceVersion", known) != known
                return Answer(409, {"message": "stale"}) if stale else Answer(200, self.put(path, sent))
            case "PATCH":
                path = path.removesuffix("/status")
                return Answer(200, self.put(path, _merged(self.objects[path], sent)))
            case _:
                gone = self.objects.pop(path, None)
                if gone is not None and "/pods/" in path:
                    self.heard(gone, True)
                return Answer(200, {})

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
            self.heard(body, False)
        return body

    def _found(self, path: str) -> Answer:
        if path in self.objects:
            return Answer(200, self.objects[path])
        if path.rpartition("/")[2] in ("incidents", "pods", "trainingjobs"):
            items = [body for known, body in self.objects.items() if known.startswith(f"{path}/")]
            return Answer(200, {"items": items, "metadata": {"resourceVersion": str(self.version)}})
        return Answer(404, {"message": f"{path} is not there"})

    def _run(self, pod: Object) -> None:
        """By scheduler and kubelet."""
        self.nodes += 1
        pod["spec"]["nodeName"] = f"node-{self.nodes}"
        running = [{"name": TRAINER, "state": {"running": {}}}]
        address = _address(1, self.nodes)
        pod["status"] = {"phase": "Running", "podIP": address, "containerStatuses": running}


class Jobs:
    """One operator, and jobs that it keeps."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.server = ApiServer(self.clock)
        cluster, settings = Cluster(self.server), Settings(sample_seconds=2.0)
        installation = Installation("https://operator", "")
        memory = Memory(EPOCH)
        self.operator = Operator(settings, cluster, memory, installation, Prometheus("", "", ""), self.clock, paused="")
        self.server.heard = self._hear
        self.sidecars = Sidecars(cluster, memory, self.clock)
        self._rounds: dict[str, int] = {}  # that launchers began by themselves, by job

    async def start(self, name: str, workers: int, ranks: int = 1) -> Desk:
        """A job that trains, from its manifest on."""
        body = self.server.put(
            f"{JOBS.path}/namespaces/{NAMESPACE}/trainingjobs/{name}", manifest(name, workers, ranks)
        )
        body["metadata"]["generation"] = 1
        job = Job.parse(body)
        desk = desk_for(self.operator, job, body)
        await self.until(desk, lambda: desk.memory.phase is JobPhase.RUNNING)
        return desk

    async def until(self, desk: Desk, holds: Callable[[], bool]) -> None:
        """Passes and polls, until it does. Raises RuntimeError where it never does."""
        for _ in range(MOST_PASSES):
            await self.turn(desk)
            if holds():
                return
        raise RuntimeError(f"job {desk.job.name} is {desk.memory.phase}, and does not go on")

    async def turn(self, desk: Desk) -> float:
        """Its workers say how they are, then a pass looks at it; seconds of the processor that the pass has taken."""
        self.clock.passed += 2.0
        await self.poll(desk)
        return await self.look(desk)

    async def look(self, desk: Desk) -> float:
        """One pass; seconds of the processor that it has taken, without what it has sent off."""
        began = time.process_time()
        await reconcile(self.operator, desk)
        took = time.process_time() - began
        await desk.errands.settled()
        return took

    async def poll(self, desk: Desk) -> None:
        """Every worker of the job polls once."""
        placement = desk.memory.draft.state.placement if desk.memory.draft is not None else None
        for worker in placement.workers if placement is not None else ():
            if worker.uid:
                contact = desk.memory.contacts.get(worker.name)
                before = None if contact is None else contact.said
                plan = desk.memory.plan
                assert plan is not None
                round_ = self._rounds.get(desk.job.name, 0)
                heartbeat = self._heartbeat(plan.part(worker.name), worker.name, before, round_)
                await self.sidecars.poll(self._caller(desk, worker.name), heartbeat, plan.version, 0.0)

    async def stall(self, desk: Desk) -> None:
        """All workers say that their ranks stand still; rank 0 holds them up. What is not dealt with waits."""
        plan = desk.memory.plan
        assert plan is not None
        faults = [
            stalled(member.worker, member.ranks, plan.membership, plan.round, self.clock.now())
            for member in plan.members
        ]
        await asyncio.gather(*(self.tell(desk, fault) for fault in faults))

    async def crash(self, desk: Desk) -> None:
        """A rank ends; the launchers begin another round, and passes go on until the incident is over."""
        plan, incidents = desk.memory.plan, desk.memory.draft
        assert plan is not None
        assert incidents is not None
        worker, round_ = plan.members[0].worker, max(plan.round, self._rounds.get(desk.job.name, 0))
        step, over = desk.memory.contacts[worker].said.step, len(incidents.state.incidents.past) + 1
        self._rounds[desk.job.name] = round_ + 1
        await self.tell(desk, crashed(worker, plan.membership, round_, step, self.clock.now()))
        await self.until(desk, lambda: _past(desk) == over)

    async def tell(self, desk: Desk, fault: Fault) -> bool:
        """Whether it was dealt with by now."""
        try:
            await self.sidecars.take_fault(self._caller(desk, fault.worker), fault)
        except NotYet:
            return False
        return True

    def _caller(self, desk: Desk, worker: str) -> Caller:
        return Caller(NAMESPACE, desk.job.name, worker)

    def _heartbeat(self, part: WorkerPlan, worker: str, before: Heartbeat | None, round_: int) -> Heartbeat:
        """Warm until it has ranks; then each poll finds them some steps further. `round_`: the least there is."""
        now = self.clock.now()
        if part.role is not Role.MEMBER:
            return Heartbeat(worker, LauncherState.WARM, part.version, meeting_port=31000, sent_at=now)
        assert before is not None
        round_ = max(part.round, round_)
        same = before.membership == part.membership and before.round == round_
        figures = tuple(RankFigures(rank, 8, STEP_SECONDS, 0.4, 0.0125, 0.01, 32, STEP_SECONDS) for rank in part.ranks)
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

    def _hear(self, body: Object, deleted: bool) -> None:
        """The watches' word on a pod, and on the node that it has."""
        if not deleted:
            name = body["spec"]["nodeName"]
            if self.operator.nodes.get(("", name)) is None:
                self.operator.nodes.hear(node(name, body["metadata"]["resourceVersion"]), deleted=False)
        self.operator.pods.hear(body, deleted=deleted)


def manifest(name: str, workers: int, ranks: int) -> Object:
    container = {"name": TRAINER, "image": "registry.example/image", "command": ["pacekeeper", "run", "train.py"]}
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


def stalled(worker: str, ranks: tuple[int, ...], membership: int, round_: int, now: float) -> Fault:
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
    return Fault(name, FaultKind.STALLED, worker, round_, now, membership, step=500, ranks=states, sent_at=now)


def crashed(worker: str, membership: int, round_: int, step: int, now: float) -> Fault:
    """What a launcher says of a rank that was killed."""
    return Fault(
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


def _past(desk: Desk) -> int:
    """Incidents of the job that are over."""
    return 0 if desk.memory.draft is None else len(desk.memory.draft.state.incidents.past)


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
