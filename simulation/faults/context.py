"""What faults and triggers need of a run.

These are its present jobs, workers, nodes, and operators, and notifications of events.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pacekeeper_operator.state import state_codec
from pacekeeper_operator.state.desired_state import DesiredState

from ..kubernetes.api.changes import ObjectChange
from ..kubernetes.api.requests import Request, RequestStage, parse_path
from ..kubernetes.nodes import SimulatedNode
from ..operators.pod import OperatorPod
from ..simulated_job import SimulatedJob
from ..workers.training import SimulatedTraining
from ..workers.worker import SimulatedWorker
from ..world import NAMESPACE, World
from .targets import OperatorTarget, TargetMissing, TargetRole

UNCOUNTED_KINDS = frozenset({"events", "leases", "tokenreviews"})
"""Kinds whose writes do not affect any decision."""
PERSON_MANAGER = "kubectl"
"""Field manager of users that edit objects."""
Object = dict[str, Any]


class FaultContext:
    """The context of one run. `jobs`: those of the schedule."""

    def __init__(self, world: World, jobs: Sequence[SimulatedJob]) -> None:
        self.world = world
        self.jobs = jobs
        self._injected: dict[int, None] = {}  # injections, by their position in the schedule
        self._waiting: dict[int, list[Callable[[], object]]] = {}

    def log(self, *parts: object) -> None:
        self.world.log.record("fault", *parts)

    # Jobs.

    def get_job_settings(self, job: int) -> SimulatedJob:
        """Return a job's settings, by its position in the schedule."""
        return self.jobs[job % len(self.jobs)]

    def get_job(self, job: int) -> Object:
        """Return the stored job. Raises TargetMissing if it does not exist."""
        name = self.get_job_settings(job).name
        body: Object | None = self.world.api.get("trainingjobs", name, NAMESPACE)
        if body is None:
            raise TargetMissing(f"there is no job {name}")
        return body

    def read_desired(self, job: int) -> DesiredState:
        """Return the stored plan and bookkeeping. Raises TargetMissing if there is none."""
        name = self.get_job_settings(job).name
        body = self.world.api.get("trainingjobstates", name, NAMESPACE)
        if body is None:
            raise TargetMissing(f"job {name} has no bookkeeping")
        return state_codec.decode_state(body, name).desired

    def create_job(self, job: int) -> None:
        """Create the job as its user."""
        settings = self.get_job_settings(job)
        self.log(f"job {settings.name} is created: {settings.replicas} workers and {settings.spares} spares")
        self.world.api.create("trainingjobs", settings.build_manifest(), manager=PERSON_MANAGER)

    def edit_job(self, job: int, spec: Object) -> None:
        """Apply a merge patch to a job's spec as its user. Raises ApiError if it is rejected."""
        self.world.api.patch(
            "trainingjobs", self.get_job(job)["metadata"]["name"], NAMESPACE, {"spec": spec}, manager=PERSON_MANAGER
        )

    # Workers and nodes.

    def list_running_workers(self) -> list[SimulatedWorker]:
        """Return the running workers of all jobs."""
        return [worker for worker in self.world.workers.values() if not worker.is_gone]

    def find_worker(self, role: TargetRole, index: int, job: int) -> SimulatedWorker:
        """Return a worker of this role. Raises TargetMissing if there is none."""
        settings = self.get_job_settings(job)
        running = [worker for worker in self.list_running_workers() if worker.job == settings.name]
        member_names = [member.worker for member in self.read_desired(job).plan.members]
        if role is TargetRole.MEMBER:
            by_name = {worker.name: worker for worker in running}
            candidates = [by_name[name] for name in member_names if name in by_name]
        else:
            candidates = [worker for worker in running if worker.name not in member_names]
        if not candidates:
            raise TargetMissing(f"job {settings.name} has no {role}")
        return candidates[index % len(candidates)]

    def delete_pod(self, worker: SimulatedWorker, *, force: bool = False) -> None:
        """Delete a worker's pod. `force`: without a grace period."""
        self.log(f"pod {worker.name} is deleted" + (" by force" if force else ""))
        self.world.api.delete("pods", worker.name, NAMESPACE, uid=worker.uid, grace=0 if force else None)

    def nodes_of(self, job: int) -> list[str]:
        """Return the names of the nodes that a job's members run on."""
        member_names = {member.worker for member in self.read_desired(job).plan.members}
        return list(dict.fromkeys(worker.node for worker in self.list_running_workers() if worker.name in member_names))

    def find_training(self, job: int) -> SimulatedTraining:
        """Return a job's training. Raises TargetMissing if no worker of the job has run yet."""
        training = self.world.trainings.find_training(self.get_job(job)["metadata"]["uid"])
        if training is None:
            raise TargetMissing(f"job {self.get_job_settings(job).name} has not started")
        return training

    def find_node(self, worker: SimulatedWorker) -> SimulatedNode:
        return self.world.nodes[worker.node]

    def find_free_node(self, index: int) -> SimulatedNode:
        """Return a node without workers. Raises TargetMissing if there is none."""
        used = {worker.node for worker in self.list_running_workers()}
        free = [node for name, node in self.world.nodes.items() if name not in used]
        if not free:
            raise TargetMissing("no node is free")
        return free[index % len(free)]

    # Operators.

    def find_operator_pod(self, target: OperatorTarget) -> OperatorPod:
        deployment = self.world.deployment
        leader = deployment.leader
        if target is OperatorTarget.LEADER:
            candidates = [leader] if leader is not None else deployment.pods[:1]
        else:
            candidates = [pod for pod in deployment.pods if pod is not leader]
        if not candidates:
            raise TargetMissing(f"the operator has no {target}")
        return candidates[0]

    # What happens.

    def watch_kind(self, plural: str, call: Callable[[ObjectChange], None]) -> None:
        """Call back for every change of a kind."""

        def told(change: ObjectChange) -> None:
            if change.plural == plural:
                call(change)

        self.world.api.subscribe(told)

    def call_when_deleted(self, plural: str, name: str, uid: str, call: Callable[[], None]) -> None:
        """Call back once, half a second after that object is deleted."""
        waiting = True

        def changed(change: ObjectChange) -> None:
            nonlocal waiting
            if waiting and change.type == "DELETED" and change.object["metadata"]["uid"] == uid:
                waiting = False
                self.world.call_after(0.5, call)

        body = self.world.api.get(plural, name, NAMESPACE)
        if body is not None and body["metadata"]["uid"] == uid:
            self.watch_kind(plural, changed)
        else:
            self.world.call_after(0.5, call)

    def call_before_write(self, call: Callable[[str], None]) -> None:
        """Call back with the kind of each object that an operator is about to write."""
        self._call_on_write(RequestStage.SENT, call)

    def call_after_write(self, call: Callable[[str], None]) -> None:
        """Call back with the kind of each object that an operator has written."""
        self._call_on_write(RequestStage.APPLIED, call)

    def _call_on_write(self, stage: RequestStage, call: Callable[[str], None]) -> None:
        def seen(request: Request) -> None:
            if request.stage is stage and request.status < 300 and is_operator_write(request):
                target = parse_path(request.path)
                if target is not None:
                    call(target.kind.plural)

        self.world.api.add_observer(seen)

    def call_after_injection(self, index: int, call: Callable[[], object]) -> None:
        """Call back when that injection of the schedule has taken place."""
        if index in self._injected:
            call()
        else:
            self._waiting.setdefault(index, []).append(call)

    def mark_injected(self, index: int) -> None:
        self._injected[index] = None
        for call in self._waiting.pop(index, ()):
            call()


def is_operator_write(request: Request) -> bool:
    """Return whether this is an operator's write that can affect a decision."""
    if not request.is_write or "dryRun" in request.query:
        return False
    target = parse_path(request.path)
    return target is not None and target.kind.plural not in UNCOUNTED_KINDS
