"""A disaster in the simulation."""

from __future__ import annotations

import gc
from collections.abc import Callable

from pacekeeper_operator.api import LABEL_JOB
from pacekeeper_operator.state import DesiredState

from .. import judges
from ..faults.fault import Fault, HealCallback, TargetMissing
from ..faults.scene import PERSON_MANAGER, FaultContext
from ..schedule import Schedule
from ..world import NAMESPACE, World
from .disaster import WORKER_GRACE_SECONDS, CONFORMANCE_STEP_SECONDS, ConformanceScenario
from .performance import SequenceEntry, Object, run_scenario


def run_in_simulation(scenario: ConformanceScenario, told: Callable[[str], None] = lambda _: None) -> tuple[SequenceEntry, ...]:
    """What happened; at its end what the judges found, which the test cluster has none of."""
    schedule = Schedule(scenario.seed, world=scenario.world_settings, jobs=(scenario.job,))
    world = World(scenario.seed, scenario.world_settings)
    judge = judges.start_checker(world, schedule)
    stage = SimulatedTarget(world, FaultContext(world, schedule))
    gc.collect()
    gc.disable()  # what a killed process leaves behind is no complaint of the operator's
    try:
        entries = world.run(run_scenario(stage, scenario, lambda entry: told(f"{world.now():9.3f}  {entry}")))
        found = tuple(f"VIOLATED {violation.rule}: {violation.message}" for violation in judge.violations)
    finally:
        world.loop.close()
        gc.enable()
    return (*entries, *found)


class SimulatedTarget:
    """Of a world."""

    def __init__(self, world: World, context: FaultContext) -> None:
        self._world = world
        self._context = context

    def create_job(self) -> None:
        """It trains as fast, and has as long to end, as on the cluster."""
        body = self._context.get_job_settings(0).build_manifest()
        pod = body["spec"]["template"]["spec"]
        pod["terminationGracePeriodSeconds"] = WORKER_GRACE_SECONDS
        pod["containers"][0]["env"] = [{"name": "STEP_SECONDS", "value": str(CONFORMANCE_STEP_SECONDS)}]
        self._world.api.create("trainingjobs", body, manager=PERSON_MANAGER)

    def strike(self, fault: Fault) -> HealCallback | None:
        return fault.inject(self._context)

    def kill_operator(self) -> None:
        leader = self._world.deployment.leader
        if leader is not None:
            leader.kill()

    def restart_operator(self) -> None:
        """Its kubelet does."""

    def read_job(self) -> Object:
        return self._context.get_job(0)

    def read_desired(self) -> DesiredState | None:
        try:
            return self._context.read_desired(0)
        except TargetMissing:
            return None

    def list_incidents(self) -> list[Object]:
        return list(self._world.api.list_all("incidents", NAMESPACE))

    def list_pods(self) -> frozenset[str]:
        pods = self._world.api.list_all("pods", NAMESPACE)
        return frozenset(pod["metadata"]["name"] for pod in pods if LABEL_JOB in pod["metadata"].get("labels", {}))
