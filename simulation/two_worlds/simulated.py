"""A disaster in the simulation."""

from __future__ import annotations

import gc
from collections.abc import Callable

from pacekeeper_operator.api import LABEL_JOB
from pacekeeper_operator.state import Draft

from .. import judges
from ..faults.fault import Fault, Heal, Missed
from ..faults.scene import PERSON, Scene
from ..schedule import Schedule
from ..world import NAMESPACE, World
from .disaster import GRACE_SECONDS, STEP_SECONDS, Disaster
from .performance import Entry, Object, perform


def simulate(disaster: Disaster, told: Callable[[str], None] = lambda _: None) -> tuple[Entry, ...]:
    """What happened; at its end what the judges found, which the test cluster has none of."""
    schedule = Schedule(disaster.seed, world=disaster.world, jobs=(disaster.job,))
    world = World(disaster.seed, disaster.world)
    judge = judges.watch(world, schedule)
    stage = SimulatedStage(world, Scene(world, schedule))
    gc.collect()
    gc.disable()  # what a killed process leaves behind is no complaint of the operator's
    try:
        entries = world.run(perform(stage, disaster, lambda entry: told(f"{world.now():9.3f}  {entry}")))
        found = tuple(f"VIOLATED {violation.rule}: {violation.words}" for violation in judge.violations)
    finally:
        world.loop.close()
        gc.enable()
    return (*entries, *found)


class SimulatedStage:
    """Of a world."""

    def __init__(self, world: World, scene: Scene) -> None:
        self._world = world
        self._scene = scene

    def make_job(self) -> None:
        """It trains as fast, and has as long to end, as on the cluster."""
        body = self._scene.settings(0).manifest()
        pod = body["spec"]["template"]["spec"]
        pod["terminationGracePeriodSeconds"] = GRACE_SECONDS
        pod["containers"][0]["env"] = [{"name": "STEP_SECONDS", "value": str(STEP_SECONDS)}]
        self._world.api.create("trainingjobs", body, manager=PERSON)

    def strike(self, fault: Fault) -> Heal | None:
        return fault.strike(self._scene)

    def kill_operator(self) -> None:
        leader = self._world.deployment.leader
        if leader is not None:
            leader.kill()

    def revive_operator(self) -> None:
        """Its kubelet does."""

    def job(self) -> Object:
        return self._scene.job(0)

    def draft(self) -> Draft | None:
        try:
            return self._scene.draft(0)
        except Missed:
            return None

    def incidents(self) -> list[Object]:
        return list(self._world.api.all("incidents", NAMESPACE))

    def pods(self) -> frozenset[str]:
        pods = self._world.api.all("pods", NAMESPACE)
        return frozenset(pod["metadata"]["name"] for pod in pods if LABEL_JOB in pod["metadata"].get("labels", {}))
