"""What faults and moments see of a run: who is who in its world now, and what happens there."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pacekeeper_operator import ledger
from pacekeeper_operator.state import Draft

from ..kubernetes.connection import Request, Stage, parsed
from ..world import NAMESPACE
from .fault import Missed, Role, Which

if TYPE_CHECKING:
    from ..kubernetes.api_server import Change
    from ..kubernetes.nodes import Node
    from ..operators.pod import OperatorPod
    from ..schedule import JobSettings, Schedule
    from ..workers.training import Training
    from ..workers.worker import Worker
    from ..world import World

UNCOUNTED = frozenset({"events", "leases", "tokenreviews"})
"""Kinds whose writes leave nothing behind that anybody decides upon."""
PERSON = "kubectl"
"""Who edits objects by hand, as managed fields name it."""
Object = dict[str, Any]


class Scene:
    """Of one run."""

    def __init__(self, world: World, schedule: Schedule) -> None:
        self.world = world
        self.schedule = schedule
        self._struck: dict[int, None] = {}  # strokes, by their places in the schedule
        self._waiting: dict[int, list[Callable[[], object]]] = {}

    def tell(self, *words: object) -> None:
        self.world.story.tell("fate", *words)

    # Jobs.

    def settings(self, job: int) -> JobSettings:
        """Of a job, by its place in the schedule."""
        return self.schedule.jobs[job % len(self.schedule.jobs)]

    def job(self, job: int) -> Object:
        """As stored. Raises Missed where it is not there."""
        name = self.settings(job).name
        found: Object | None = self.world.api.get("trainingjobs", name, NAMESPACE)
        if found is None:
            raise Missed(f"there is no job {name}")
        return found

    def draft(self, job: int) -> Draft:
        """Plan and bookkeeping as they are written. Raises Missed where nothing is."""
        name = self.settings(job).name
        found = self.world.api.get("trainingjobstates", name, NAMESPACE)
        if found is None:
            raise Missed(f"nothing is written of job {name}")
        return ledger.read(found, name).draft

    def make_job(self, job: int) -> None:
        """By its tenant."""
        settings = self.settings(job)
        self.tell(f"job {settings.name} is made: {settings.replicas} workers and {settings.spares} spares")
        self.world.api.create("trainingjobs", settings.manifest(), manager=PERSON)

    def edit(self, job: int, spec: Object) -> None:
        """A merge patch of a job's spec, by its tenant. Raises ApiError where it is refused."""
        self.world.api.patch(
            "trainingjobs", self.job(job)["metadata"]["name"], NAMESPACE, {"spec": spec}, manager=PERSON
        )

    # Workers and nodes.

    def running(self) -> list[Worker]:
        """Of all jobs."""
        return [worker for worker in self.world.workers.values() if not worker.gone]

    def worker(self, role: Role, index: int, job: int) -> Worker:
        """Raises Missed where there is none of this role."""
        settings = self.settings(job)
        running = [worker for worker in self.running() if worker.job == settings.name]
        seated = [member.worker for member in self.draft(job).plan.members]
        if role is Role.MEMBER:
            by_name = {worker.name: worker for worker in running}
            found = [by_name[name] for name in seated if name in by_name]
        else:
            found = [worker for worker in running if worker.name not in seated]
        if not found:
            raise Missed(f"job {settings.name} has no {role}")
        return found[index % len(found)]

    def delete_pod(self, worker: Worker, *, force: bool = False) -> None:
        """By somebody; `force`: without a grace period."""
        self.tell(f"pod {worker.name} is deleted" + (" by force" if force else ""))
        self.world.api.delete("pods", worker.name, NAMESPACE, uid=worker.uid, grace=0 if force else None)

    def nodes_of(self, job: int) -> list[str]:
        """Names of the nodes that a job's members run on."""
        seated = {member.worker for member in self.draft(job).plan.members}
        return list(dict.fromkeys(worker.node for worker in self.running() if worker.name in seated))

    def training(self, job: int) -> Training:
        """Raises Missed where no worker of the job has run yet."""
        found = self.world.trainings.of_job(self.job(job)["metadata"]["uid"])
        if found is None:
            raise Missed(f"job {self.settings(job).name} has not begun")
        return found

    def node_of(self, worker: Worker) -> Node:
        return self.world.nodes[worker.node]

    def free_node(self, index: int) -> Node:
        """One without workers."""
        taken = {worker.node for worker in self.running()}
        free = [node for name, node in self.world.nodes.items() if name not in taken]
        if not free:
            raise Missed("no node is free")
        return free[index % len(free)]

    # Operators.

    def operator(self, which: Which) -> OperatorPod:
        deployment = self.world.deployment
        leader = deployment.leader
        if which is Which.LEADER:
            found = [leader] if leader is not None else deployment.pods[:1]
        else:
            found = [pod for pod in deployment.pods if pod is not leader]
        if not found:
            raise Missed(f"the operator has no {which}")
        return found[0]

    # What happens.

    def watch(self, plural: str, call: Callable[[Change], None]) -> None:
        """`call` is told of every change of a kind."""

        def told(change: Change) -> None:
            if change.plural == plural:
                call(change)

        self.world.api.subscribe(told)

    def when_gone(self, plural: str, name: str, uid: str, call: Callable[[], None]) -> None:
        """`call` comes once, half a second after that object is gone."""
        waiting = True

        def changed(change: Change) -> None:
            nonlocal waiting
            if waiting and change.type == "DELETED" and change.object["metadata"]["uid"] == uid:
                waiting = False
                self.world.after(0.5, call)

        found = self.world.api.get(plural, name, NAMESPACE)
        if found is not None and found["metadata"]["uid"] == uid:
            self.watch(plural, changed)
        else:
            self.world.after(0.5, call)

    def before_write(self, call: Callable[[str], None]) -> None:
        """`call` is told the kind of whatever an operator is about to send."""
        self._on_write(Stage.SENT, call)

    def after_write(self, call: Callable[[str], None]) -> None:
        """`call` is told the kind of whatever an operator has changed."""
        self._on_write(Stage.DONE, call)

    def _on_write(self, stage: Stage, call: Callable[[str], None]) -> None:
        def seen(request: Request) -> None:
            if request.stage is stage and request.status < 300 and matters(request):
                target = parsed(request.path)
                if target is not None:
                    call(target.kind.plural)

        self.world.api.observe(seen)

    def after_stroke(self, place: int, call: Callable[[], object]) -> None:
        """`call` comes when that stroke of the schedule has struck."""
        if place in self._struck:
            call()
        else:
            self._waiting.setdefault(place, []).append(call)

    def has_struck(self, place: int) -> None:
        self._struck[place] = None
        for call in self._waiting.pop(place, ()):
            call()


def matters(request: Request) -> bool:
    """Whether this is a write of an operator from which something follows."""
    if not request.writes or "dryRun" in request.query:
        return False
    target = parsed(request.path)
    return target is not None and target.kind.plural not in UNCOUNTED
