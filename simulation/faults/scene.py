"""What faults and moments see of a run: who is who in its world now, and what happens there."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pacekeeper_operator import ledger
from pacekeeper_operator.state import DesiredState

from ..kubernetes.connection import Request, RequestStage, parse_path
from ..world import NAMESPACE
from .fault import TargetMissing, TargetRole, OperatorTarget

if TYPE_CHECKING:
    from ..kubernetes.api_server import ObjectChange
    from ..kubernetes.nodes import SimulatedNode
    from ..operators.pod import OperatorPod
    from ..schedule import SimulatedJob, Schedule
    from ..workers.training import SimulatedTraining
    from ..workers.worker import SimulatedWorker
    from ..world import World

UNCOUNTED_KINDS = frozenset({"events", "leases", "tokenreviews"})
"""Kinds whose writes leave nothing behind that anybody decides upon."""
PERSON_MANAGER = "kubectl"
"""Who edits objects by hand, as managed fields name it."""
Object = dict[str, Any]


class FaultContext:
    """Of one run."""

    def __init__(self, world: World, schedule: Schedule) -> None:
        self.world = world
        self.schedule = schedule
        self._injected: dict[int, None] = {}  # strokes, by their places in the schedule
        self._waiting: dict[int, list[Callable[[], object]]] = {}

    def log(self, *words: object) -> None:
        self.world.log.record("fate", *words)

    # Jobs.

    def get_job_settings(self, job: int) -> SimulatedJob:
        """Of a job, by its place in the schedule."""
        return self.schedule.jobs[job % len(self.schedule.jobs)]

    def get_job(self, job: int) -> Object:
        """As stored. Raises Missed where it is not there."""
        name = self.get_job_settings(job).name
        found: Object | None = self.world.api.get("trainingjobs", name, NAMESPACE)
        if found is None:
            raise TargetMissing(f"there is no job {name}")
        return found

    def read_desired(self, job: int) -> DesiredState:
        """Plan and bookkeeping as they are written. Raises Missed where nothing is."""
        name = self.get_job_settings(job).name
        found = self.world.api.get("trainingjobstates", name, NAMESPACE)
        if found is None:
            raise TargetMissing(f"nothing is written of job {name}")
        return ledger.decode_state(found, name).desired

    def create_job(self, job: int) -> None:
        """By its tenant."""
        settings = self.get_job_settings(job)
        self.log(f"job {settings.name} is made: {settings.replicas} workers and {settings.spares} spares")
        self.world.api.create("trainingjobs", settings.build_manifest(), manager=PERSON_MANAGER)

    def edit_job(self, job: int, spec: Object) -> None:
        """A merge patch of a job's spec, by its tenant. Raises ApiError where it is refused."""
        self.world.api.patch(
            "trainingjobs", self.get_job(job)["metadata"]["name"], NAMESPACE, {"spec": spec}, manager=PERSON_MANAGER
        )

    # Workers and nodes.

    def list_running_workers(self) -> list[SimulatedWorker]:
        """Of all jobs."""
        return [worker for worker in self.world.workers.values() if not worker.is_gone]

    def find_worker(self, role: TargetRole, index: int, job: int) -> SimulatedWorker:
        """Raises Missed where there is none of this role."""
        settings = self.get_job_settings(job)
        running = [worker for worker in self.list_running_workers() if worker.job == settings.name]
        seated = [member.worker for member in self.read_desired(job).plan.members]
        if role is TargetRole.MEMBER:
            by_name = {worker.name: worker for worker in running}
            found = [by_name[name] for name in seated if name in by_name]
        else:
            found = [worker for worker in running if worker.name not in seated]
        if not found:
            raise TargetMissing(f"job {settings.name} has no {role}")
        return found[index % len(found)]

    def delete_pod(self, worker: SimulatedWorker, *, force: bool = False) -> None:
        """By somebody; `force`: without a grace period."""
        self.log(f"pod {worker.name} is deleted" + (" by force" if force else ""))
        self.world.api.delete("pods", worker.name, NAMESPACE, uid=worker.uid, grace=0 if force else None)

    def nodes_of(self, job: int) -> list[str]:
        """Names of the nodes that a job's members run on."""
        seated = {member.worker for member in self.read_desired(job).plan.members}
        return list(dict.fromkeys(worker.node for worker in self.list_running_workers() if worker.name in seated))

    def find_training(self, job: int) -> SimulatedTraining:
        """Raises Missed where no worker of the job has run yet."""
        found = self.world.trainings.find_training(self.get_job(job)["metadata"]["uid"])
        if found is None:
            raise TargetMissing(f"job {self.get_job_settings(job).name} has not begun")
        return found

    def find_node(self, worker: SimulatedWorker) -> SimulatedNode:
        return self.world.nodes[worker.node]

    def find_free_node(self, index: int) -> SimulatedNode:
        """One without workers."""
        taken = {worker.node for worker in self.list_running_workers()}
        free = [node for name, node in self.world.nodes.items() if name not in taken]
        if not free:
            raise TargetMissing("no node is free")
        return free[index % len(free)]

    # Operators.

    def find_operator_pod(self, which: OperatorTarget) -> OperatorPod:
        deployment = self.world.deployment
        leader = deployment.leader
        if which is OperatorTarget.LEADER:
            found = [leader] if leader is not None else deployment.pods[:1]
        else:
            found = [pod for pod in deployment.pods if pod is not leader]
        if not found:
            raise TargetMissing(f"the operator has no {which}")
        return found[0]

    # What happens.

    def watch_kind(self, plural: str, call: Callable[[ObjectChange], None]) -> None:
        """`call` is told of every change of a kind."""

        def told(change: ObjectChange) -> None:
            if change.plural == plural:
                call(change)

        self.world.api.subscribe(told)

    def call_when_deleted(self, plural: str, name: str, uid: str, call: Callable[[], None]) -> None:
        """`call` comes once, half a second after that object is gone."""
        waiting = True

        def changed(change: ObjectChange) -> None:
            nonlocal waiting
            if waiting and change.type == "DELETED" and change.object["metadata"]["uid"] == uid:
                waiting = False
                self.world.call_after(0.5, call)

        found = self.world.api.get(plural, name, NAMESPACE)
        if found is not None and found["metadata"]["uid"] == uid:
            self.watch_kind(plural, changed)
        else:
            self.world.call_after(0.5, call)

    def call_before_write(self, call: Callable[[str], None]) -> None:
        """`call` is told the kind of whatever an operator is about to send."""
        self._call_on_write(RequestStage.SENT, call)

    def call_after_write(self, call: Callable[[str], None]) -> None:
        """`call` is told the kind of whatever an operator has changed."""
        self._call_on_write(RequestStage.APPLIED, call)

    def _call_on_write(self, stage: RequestStage, call: Callable[[str], None]) -> None:
        def seen(request: Request) -> None:
            if request.stage is stage and request.status < 300 and is_operator_write(request):
                target = parse_path(request.path)
                if target is not None:
                    call(target.kind.plural)

        self.world.api.add_observer(seen)

    def call_after_injection(self, place: int, call: Callable[[], object]) -> None:
        """`call` comes when that stroke of the schedule has struck."""
        if place in self._injected:
            call()
        else:
            self._waiting.setdefault(place, []).append(call)

    def mark_injected(self, place: int) -> None:
        self._injected[place] = None
        for call in self._waiting.pop(place, ()):
            call()


def is_operator_write(request: Request) -> bool:
    """Whether this is a write of an operator from which something follows."""
    if not request.is_write or "dryRun" in request.query:
        return False
    target = parse_path(request.path)
    return target is not None and target.kind.plural not in UNCOUNTED_KINDS
